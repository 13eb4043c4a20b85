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
    from layoutmap.core.pieces import Move

Array = Any
"""An array of the engine's framework."""


@dataclass(frozen=True, slots=True)
class Unplaced:
    """The placement of an array that no layout can express.

    Args:
        what: The placement in words, such as `"on CPU:0 alone"`.
        devices: The devices that store a complete copy.
        is_copied: Whether the framework copies it to other operands' devices, so that it counts as replicated.
    """

    what: str
    devices: tuple[str, ...] = ()
    is_copied: bool = False


class MakeMover(Protocol):
    """Make a function that moves the values of arrays to the devices, layouts, and dtypes of others."""

    def __call__(
        self, moves: Sequence[Move], arrays: Sequence[Array], likes: Sequence[Array]
    ) -> Callable[[Sequence[Array]], list[Array]]:
        """Return a function that takes arrays in the layouts of `arrays` and returns arrays like `likes`.

        What it returns shares no memory with what it takes. It sends each device the pieces that it does not hold.

        Args:
            moves: For each of `likes` the numbers of the arrays with its values.
            arrays: Arrays with the layouts and dtypes of those that will be moved. Their values are not read.
            likes: Arrays with the layouts and dtypes of the results, likewise.

        Raises:
            EngineError: The engine cannot send arrays between these devices.
        """
        ...


# A plan starts no framework, so checks of layouts and dtypes must not use devices (decisions/0032).
class Engine(Protocol):
    """Create, read, and reshard arrays of one framework.

    Laws: shards round-trip bit for bit and cover each element once; every relayout is bit-exact; `create` returns the
    same values on every layout, those of the plain initializer; each device holds exactly its shard; a layout that the
    engine cannot hold is refused by name, never replaced; indices have both ends.

    Six methods are the engine: `devices`, `native`, `create`, `from_shards`, `to_shards`, `relayout`. Each of the
    others answers what these cannot (decision 0032):

    - `simulate` says how many devices there are, while that is open.
    - `bind` knows which devices of a mesh are of this process; names alone do not say it.
    - `check_layout` and `check_dtype` are asked by plans, where `native` would start the framework.
    - `get_layout` is `native` backwards; `describe_placement` says how an array is held that it returns `None` for.
    - `iterate_by_device` yields what `to_shards` leaves out: replicas, of which one may have drifted.
    - `canonicalize` returns the element type of an array before there is one, so that a reader of shards can convert.
    - `get_writable_memory` is where a checkpoint is read to without a copy; no other method changes an array.
    - `variable` and `run_on` are how the framework trains and computes: its variables, its ambient mesh.
    - `to_numpy` gathers the shards of other processes, on the way that the framework does it best.
    - `all_gather` is how processes agree on what is not yet an array.
    - `make_mover` sends only what devices lack, of many arrays at once, which `relayout` of each cannot.
    - `call` computes the result of a function in shards; only the framework can trace it.

    Attributes:
        name: The engine's name: `"jax"`, `"tensorflow"`, `"torch"`.
        array_types: The classes of the framework's arrays and of its variables that hold one.
        several_dims: Whether one axis of an array can be sharded over several mesh dims.
        make_mover: Function that returns a function that moves arrays (see `MakeMover`). `None`: arrays move through
            the memory of one process.
    """

    name: str
    array_types: tuple[type, ...]
    several_dims: bool
    make_mover: MakeMover | None

    def devices(self, device_type: str | None = None) -> tuple[str, ...]:
        """Return the names of all devices of a type (`None`: the default type), in the framework's order.

        Raises:
            EngineError: There are none of that type.
        """
        ...

    def simulate(self, number: int) -> None:
        """Start the framework with this number of simulated CPU devices. It must not have started yet.

        Raises:
            EngineError: It has started on others.
        """
        ...

    def bind(self, mesh: Mesh) -> Mesh:
        """Bind a mesh to this machine: give an abstract mesh devices, and check that named devices exist.

        Raises:
            MeshError: The machine has too few devices, or not the ones that are named.
        """
        ...

    # Plans are made before their devices exist, so this check uses only the layout (decisions/0032).
    def check_layout(self, layout: Layout) -> None:
        """Raise for a layout that no array of the framework can have on any machine.

        The answer depends on the layout alone: no device is asked for and nothing is started, so that plans can ask.

        Raises:
            EngineError: The engine cannot hold such a layout; `native` refuses it too.
        """
        ...

    def check_dtype(self, name: str, path: str) -> None:
        """Raise if the framework cannot store this dtype unchanged. This starts nothing, so plans can call it.

        Args:
            name: The element type, as in `"float32"`.
            path: The path of the variable, for the message.

        Raises:
            EngineError: The engine cannot hold it; `create` and `from_shards` refuse it too.
        """
        ...

    def native(self, layout: Layout, rank: int) -> Any:
        """Convert a layout to the framework's form: `NamedSharding`, `dtensor.Layout`, `(DeviceMesh, placements)`.

        Raises:
            EngineError: The engine cannot hold such a layout.
            LayoutError: The layout is not of that rank.
            MeshError: The machine does not have the mesh's devices.
        """
        ...

    def get_layout(self, array: Array) -> Layout | None:
        """Return the layout of an array, or None for other values and arrays without a named mesh."""
        ...

    def describe_placement(self, array: Array, meshes: Sequence[Mesh] = ()) -> Layout | Unplaced:
        """Return the layout of an array from any program, or its placement without one. Nothing is guessed.

        Args:
            array: The array, or what stands for one without values.
            meshes: Where to look for the dims of a layout that the framework says without names.
        """
        ...

    def create(
        self,
        assignments: Mapping[str, Assignment],
        initializers: Mapping[str, Initializer],
        progress: Callable[[str], object] | None = None,
    ) -> dict[str, Array]:
        """Compute initial values directly in their layouts.

        Args:
            assignments: For each key, such as a path, a variable and its layout.
            initializers: For each key the initializer of its variable.
            progress: Called with the key after each variable.

        Returns:
            The arrays, by key. Values equal those of `initializer.global_value()` bit for bit, on every layout.

        Raises:
            EngineError: An initializer is missing, an element type or a layout is not held, or the framework would
                train wrongly in this process; nothing is made then. Or an initializer does not return the shape or
                element type of its variable, or differs between processes.
            LayoutError: A layout does not fit its variable; nothing is made then.
            MeshError: The machine does not have the devices of a mesh; nothing is made then.
        """
        ...

    def from_shards(self, assignment: Assignment, read: BlockReader, *, copy: bool = True) -> Array:
        """Create an array from shards that are read one by one.

        Args:
            assignment: The variable and its layout.
            read: Returns the values at an index. Called once for each different shard that this process holds.
            copy: Whether what is read may change later. If not, the array may share its memory.

        Raises:
            EngineError: What was read has not the shape or element type of the shard.
        """
        ...

    def to_shards(self, array: Array, *, copy: bool = True) -> Iterator[tuple[Index, NumpyArray]]:
        """Yield this process's shards, each index once.

        Args:
            array: The array.
            copy: Whether the values stay as they are when the array changes. If not, they may be in its own memory:
                then those that change with it are writeable, and those that never change are read-only.
        """
        ...

    # Copying takes most of a load's time, so values are read into the array's memory (decisions/0127).
    def get_writable_memory(self, array: Array) -> Sequence[tuple[Index, NumpyArray]]:
        """Return writable memory of this process's shards, or an empty sequence if there is none.

        What is written there is in the array. Who writes there assigns the array to itself afterwards, as the framework
        does that, so that this knows of the change.
        """
        ...

    def iterate_by_device(self, array: Array) -> Iterator[tuple[str, NumpyArray]]:
        """Yield the name and the values of each device of this process, replicas included.

        Nothing is gathered. What stands for an array without values yields nothing.
        """
        ...

    def relayout(self, array: Array, layout: Layout, *, pad: bool = False) -> Array:
        """Move values to another layout. Unsharded arrays and numpy arrays are accepted, too.

        Raises:
            EngineError: The engine cannot hold the layout, or such elements.
            LayoutError: The layout does not fit the array's shape. With `pad`, axes need not divide.
            MeshError: The machine does not have the mesh's devices.
        """
        ...

    def variable(self, array: Array, *, name: str = "", trainable: bool = True) -> Any:
        """Return the framework's variable with an array as its value, or the array if there are no variables."""
        ...

    def to_numpy(self, array: Array) -> NumpyArray:
        """Gather all values of an array from all of its processes, each of which must call this."""
        ...

    def all_gather(self, values: NumpyArray, mesh: Mesh) -> NumpyArray:
        """Gather values from each process with a device of the mesh, one row each, in process order.

        They must all ask, with values of one shape and element type.

        Raises:
            EngineError: Another process cannot be reached.
        """
        ...

    def run_on(self, mesh: Mesh, draws: str = "exact") -> AbstractContextManager[Any]:
        """Compute operations on unsharded values replicated on a mesh, while the context is open.

        Args:
            mesh: The mesh.
            draws: How random numbers are drawn; every engine knows `"exact"`.

        Raises:
            EngineError: The engine does not draw so.
            MeshError: The machine does not have the mesh's devices.
        """
        ...

    def canonicalize(self, values: object) -> NumpyArray:
        """Convert values to numpy in the engine's dtype, with 32 bits if 64-bit types are disabled.

        Python numbers get the framework's default element type.

        Raises:
            EngineError: It holds no such elements.
        """
        ...

    def call(
        self, function: Callable[..., Any], layout: Layout, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Array:
        """Compute the result of a function in a layout. If possible, no device stores the global value.

        Raises:
            EngineError: The function does not return one array, or the engine cannot hold the layout.
            LayoutError: The layout does not fit the shape of the result.
            MeshError: The machine does not have the mesh's devices.
        """
        ...
