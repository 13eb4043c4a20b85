"""Define the protocol of engines. `layoutmap.testing.engine_contract` has the laws of each method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from layoutmap.core.initializers import Initializer
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.variables import Assignment

if TYPE_CHECKING:
    from layoutmap.core.blocks import BlockReader, Index, NumpyArray
    from layoutmap.core.pieces import ArrayMove

Array = Any
"""An array of the engine's framework."""


@dataclass(frozen=True, slots=True)
class PlacementWithoutLayout:
    """A description of where an array is stored, if no layout can express it.

    Args:
        what: The placement in words, such as `"on CPU:0 alone"`.
        devices: The devices that store a complete copy.
        is_copied: Whether the framework copies the array to the devices of other operands, as if it were replicated.
    """

    what: str
    devices: tuple[str, ...] = ()
    is_copied: bool = False


class ArrayMoverFactory(Protocol):
    """Make a function that moves arrays to the devices, layouts, and dtypes of other arrays."""

    def __call__(
        self, moves: Sequence[ArrayMove], arrays: Sequence[Array], templates: Sequence[Array]
    ) -> Callable[[Sequence[Array]], list[Array]]:
        """Return a function that takes arrays like `arrays` and returns them with the layouts of `templates`.

        The returned arrays share no memory with the passed ones. Each device receives only the blocks that it lacks.

        Args:
            moves: For each of `templates`, the positions in `arrays` of the arrays that contain its values.
            arrays: Arrays with the layouts and dtypes of those that will be moved. Their values are not read.
            templates: Arrays with the layouts and dtypes of the results. Their values are not read.

        Raises:
            EngineError: The engine cannot send arrays between these devices.
        """
        ...


# A plan must not start devices of a framework, so checks of layouts and dtypes must not use devices (decisions/0032).
class Engine(Protocol):
    """Create, read, and reshard arrays of one framework.

    Laws: shards round-trip bit for bit and contain each element once. Every relayout is exact to the bit. Initial
    values are the same in every layout, and equal those of the unsharded initializer. Each device stores exactly its
    shard. An unsupported layout raises an error that names it, and is never replaced. Indices have both ends.

    Six methods are the core: `list_device_names`, `make_native_layout`, `create_initial_values`,
    `create_from_shards`, `iterate_shards`, `relayout`. They cannot replace the others (decisions/0032):

    - `simulate_devices` sets the number of devices before the framework starts.
    - `bind_mesh` finds the devices of a mesh that belong to this process, since names do not contain it.
    - `check_layout` and `check_dtype` are for plans, because `make_native_layout` would start the framework.
    - `get_layout` is the inverse of `make_native_layout`, and `find_placement` also describes arrays without a layout.
    - `iterate_device_values` yields replicas, too, since one of them may have drifted. `iterate_shards` skips them.
    - `canonicalize_values` returns the element type that an array will have, so that readers of shards can convert.
    - `get_writable_memory` lets a checkpoint be read without a copy. No other method changes an array.
    - `make_variable` and `run_on` give access to the framework's variables and its ambient mesh.
    - `to_numpy` gathers the shards of other processes in the framework's fastest way.
    - `gather_from_processes` lets processes compare values that are not in an array yet.
    - `make_array_mover` moves many arrays at once, and sends only what devices lack, which `relayout` cannot.
    - `call_with_layout` computes the result of a function in shards, since only the framework can trace it.

    Attributes:
        name: The engine's name: `"jax"`, `"tensorflow"`, `"torch"`.
        array_types: The classes of the framework's arrays and of its variables that hold one.
        several_dims: Whether one axis of an array can be sharded over several mesh dims.
        make_array_mover: Function that returns a function that moves arrays (see `ArrayMoverFactory`). `None`: arrays
            move through the memory of one process.
    """

    name: str
    array_types: tuple[type, ...]
    several_dims: bool
    make_array_mover: ArrayMoverFactory | None

    def list_device_names(self, device_type: str | None = None) -> tuple[str, ...]:
        """Return the names of all devices of a type (`None`: the default type), in the framework's order.

        Raises:
            EngineError: The machine has no devices of this type.
        """
        ...

    def simulate_devices(self, num_devices: int) -> None:
        """Start the framework with this number of simulated CPU devices.

        Raises:
            EngineError: The framework has started with other devices.
        """
        ...

    def bind_mesh(self, mesh: Mesh) -> Mesh:
        """Return a mesh with devices of this machine: an abstract mesh gets devices, and named devices must exist.

        Raises:
            MeshError: The machine has too few devices, or lacks a named device.
        """
        ...

    def check_layout(self, layout: Layout) -> None:
        """Raise an `EngineError` for a layout that no array of the framework can have on any machine.

        It uses only the layout, and starts neither devices nor the framework, so that plans can call it.

        Raises:
            EngineError: The engine does not support the layout. Then `make_native_layout` raises, too.
        """
        ...

    def check_dtype(self, name: str, path: str) -> None:
        """Raise if the framework cannot store this dtype unchanged. Nothing is started, so plans can call this.

        Args:
            name: The element type, as in `"float32"`.
            path: The path of the variable, for the message.

        Raises:
            EngineError: The engine does not support it. `create_initial_values` and `create_from_shards` raise, too.
        """
        ...

    def make_native_layout(self, layout: Layout, rank: int) -> Any:
        """Convert a layout to the framework's form: `NamedSharding`, `dtensor.Layout`, `(DeviceMesh, placements)`.

        Raises:
            EngineError: The engine does not support the layout.
            LayoutError: The layout is not of that rank.
            MeshError: The machine does not have the mesh's devices.
        """
        ...

    def get_layout(self, array: Array) -> Layout | None:
        """Return the layout of an array, or None for other values and for arrays on no mesh with dim names."""
        ...

    def find_placement(self, array: Array, meshes: Sequence[Mesh] = ()) -> Layout | PlacementWithoutLayout:
        """Return the exact layout of any array, or a description of its placement if no layout expresses it.

        Args:
            array: The array, or an object that stands for one without values.
            meshes: Meshes whose dim names may be used if the framework stores the layout without names.
        """
        ...

    def create_initial_values(
        self,
        assignments: Mapping[str, Assignment],
        initializers: Mapping[str, Initializer],
        progress: Callable[[str], object] | None = None,
    ) -> dict[str, Array]:
        """Return initial values of variables, computed directly in their layouts.

        Args:
            assignments: For each key, such as a path, a variable and its layout.
            initializers: For each key the initializer of its variable.
            progress: Called with the key after each variable.

        Returns:
            The arrays, by key. Values equal those of `initializer.global_value()` bit for bit, on every layout.

        Raises:
            EngineError: An initializer is missing, an element type or a layout is not supported, or the framework
                computes wrongly in this process; nothing is created then. Or an initializer returns another shape or
                element type than that of its variable, or other values in another process.
            LayoutError: A layout does not fit its variable; nothing is created then.
            MeshError: The machine does not have the devices of a mesh; nothing is created then.
        """
        ...

    def create_from_shards(self, assignment: Assignment, read: BlockReader, *, copy: bool = True) -> Array:
        """Create an array from shards that are read one by one.

        Args:
            assignment: The variable and its layout.
            read: Returns the values at an index. Called once for each distinct shard of this process.
            copy: Whether to copy the values. If not, the array may share their memory, so they must not change.

        Raises:
            EngineError: `read` returned values of another shape or element type than those of the shard.
        """
        ...

    def iterate_shards(self, array: Array, *, copy: bool = True) -> Iterator[tuple[Index, NumpyArray]]:
        """Yield the index and the values of each distinct shard of this process.

        Args:
            array: The array.
            copy: Whether to copy the values. If not, they may be in the array's memory. They are writeable if they
                change with the array, and read-only if the array never changes.
        """
        ...

    # Copying takes most of a load's time, so values are read into the array's memory (decisions/0127).
    def get_writable_memory(self, array: Array) -> Sequence[tuple[Index, NumpyArray]]:
        """Return the index and writable memory of each local shard, or an empty sequence for read-only memory.

        Values that are written there are in the array. After writing, the caller must assign the array to itself, so
        that the framework notices the change.
        """
        ...

    def iterate_device_values(self, array: Array) -> Iterator[tuple[str, NumpyArray]]:
        """Yield the name of each device of this process and the values of the array on it, including replicas.

        Nothing is gathered. For an object without values, nothing is yielded.
        """
        ...

    def relayout(self, array: Array, layout: Layout, *, pad: bool = False) -> Array:
        """Return the same values in a new layout. Unsharded arrays and numpy arrays are accepted, too.

        Raises:
            EngineError: The engine does not support the layout or the element type.
            LayoutError: The layout does not fit the array's shape. With `pad`, shards may be uneven.
            MeshError: The machine does not have the mesh's devices.
        """
        ...

    def make_variable(self, array: Array, *, name: str = "", trainable: bool = True) -> Any:
        """Return a new variable with an array as its value, or the array if the framework has no variables."""
        ...

    def to_numpy(self, array: Array) -> NumpyArray:
        """Return all values of an array. Each process that has a part of the array must call this."""
        ...

    def gather_from_processes(self, values: NumpyArray, mesh: Mesh) -> NumpyArray:
        """Return the values of each process that has a device of the mesh, one row each, in process order.

        All these processes must call it, with values of the same shape and element type.

        Raises:
            EngineError: Another process cannot be reached.
        """
        ...

    def run_on(self, mesh: Mesh, draws: str = "exact") -> AbstractContextManager[Any]:
        """Return a context manager in which operations on unsharded values run replicated on a mesh.

        Args:
            mesh: The mesh.
            draws: The mode of drawing random numbers. Every engine supports `"exact"`.

        Raises:
            EngineError: The engine does not support the mode.
            MeshError: The machine does not have the mesh's devices.
        """
        ...

    def canonicalize_values(self, values: object) -> NumpyArray:
        """Convert values to numpy in the dtype of the engine's arrays: 32 bits if 64-bit types are disabled.

        Python numbers get the framework's default element type.

        Raises:
            EngineError: The engine does not support the element type.
        """
        ...

    def call_with_layout(
        self, function: Callable[..., Any], layout: Layout, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Array:
        """Call a function, and return its result in a layout. If possible, no device stores the global value.

        Raises:
            EngineError: The function does not return one array, or the engine does not support the layout.
            LayoutError: The layout does not fit the shape of the result.
            MeshError: The machine does not have the mesh's devices.
        """
        ...
