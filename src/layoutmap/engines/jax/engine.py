"""The JAX engine: `jax.Array`s in `NamedSharding`s.

Devices are named `CPU:0`, `GPU:3`: the platform and JAX's own number of the device. A layout is a `NamedSharding` on a
`jax.sharding.Mesh` with `Auto` axes. Only public names of JAX are used. The program of a draw is read with
`jax.extend.core`, which JAX keeps public without a promise; tested with JAX 0.10.

References:
    https://docs.jax.dev/en/latest/notebooks/Distributed_arrays_and_automatic_parallelization.html
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, PartitionSpec

from layoutmap.core.blocks import Index, block_shape, with_ends
from layoutmap.core.checksums import checksum
from layoutmap.core.errors import EngineError
from layoutmap.core.initializers import Initializer
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.variables import Assignment
from layoutmap.engines.jax.devices import Device, bound_devices, jax_devices, name_of, named_sharding
from layoutmap.engines.jax.processes import check_equal_everywhere, common_seeds, gathered
from layoutmap.engines.jax.programs import ShardedProgram, trace, why_global

__all__ = ["JaxEngine", "engine"]

NumpyArray = npt.NDArray[Any]

_MAX_PROGRAMS = 512


class JaxEngine:
    """Holds `jax.Array`s. There is one of them: `engine()`.

    Example:
        >>> jax_engine = engine()
        >>> layout = Layout(["x", None], Mesh(None, "x=1"))
        >>> array = jax_engine.relayout(np.ones((4, 2), np.float32), layout)
        >>> jax_engine.layout_of(array) == layout
        True
        >>> [index for index, values in jax_engine.to_shards(array)]
        [(slice(0, 4, None), slice(0, 2, None))]
    """

    name = "jax"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Two meshes of ours, an abstract one and the same one bound, are one mesh of JAX's. Arrays are on the first
        # that was used, for as long as JAX's lives, but for those that were made on another one.
        self._mesh_of_native: weakref.WeakKeyDictionary[jax.sharding.Mesh, Mesh] = weakref.WeakKeyDictionary()
        self._mesh_of_array: dict[int, tuple[weakref.ref[Any], Mesh]] = {}  # by id: JAX's arrays have no hash
        self._programs: OrderedDict[Hashable, ShardedProgram | str] = OrderedDict()
        self._reasons: OrderedDict[Hashable, str] = OrderedDict()

    # -- devices and layouts

    def devices(self, device_type: str | None = None) -> tuple[str, ...]:
        """The names of all devices of one type, of all processes, in JAX's order.

        Args:
            device_type: `"CPU"`, `"GPU"` or `"TPU"` in any case; `None`: of JAX's default platform.

        Raises:
            EngineError: There are none of that type.
        """
        return tuple(map(name_of, jax_devices(device_type)))

    def bind(self, mesh: Mesh) -> Mesh:
        """The mesh on this machine: an abstract one gets the first devices, one with devices is checked to exist.

        Raises:
            MeshError: The machine has too few devices, or not the ones that are named.
        """
        devices = bound_devices(mesh)
        here = [i for i, device in enumerate(devices) if device.process_index == jax.process_index()]
        if mesh.devices is not None and tuple(here) == mesh.local_device_ids:
            return mesh
        return mesh.with_devices(map(name_of, devices), local_device_ids=here)

    def check_layout(self, layout: Layout) -> None:
        """Nothing: JAX can hold every layout."""

    def native(self, layout: Layout, rank: int) -> NamedSharding:
        """The `NamedSharding` of a layout, with one entry for each axis.

        Raises:
            LayoutError: The layout is not of that rank.
            MeshError: The machine does not have the mesh's devices.
        """
        layout.check_rank((None,) * rank)
        sharding = named_sharding(layout)
        self._mesh_of_native.setdefault(sharding.mesh, layout.mesh)  # type: ignore[arg-type]
        return sharding

    def mesh_of(self, native_mesh: jax.sharding.Mesh) -> Mesh:
        """The mesh of a `jax.sharding.Mesh`: the first it was made from, or one of its devices and axis names.

        The types of its axes (`Auto`, `Explicit`) say how JAX's compiler treats them, not where things are, and are
        not kept: `native` always makes `Auto` axes.

        Raises:
            MeshError: An axis has a name that a mesh dim cannot have.
        """
        known = self._mesh_of_native.get(native_mesh)
        if known is not None:
            return known
        devices: list[Any] = list(native_mesh.devices.flat)
        dims = list(zip(map(str, native_mesh.axis_names), native_mesh.devices.shape, strict=True))
        here = [i for i, device in enumerate(devices) if device.process_index == jax.process_index()]
        return Mesh(map(name_of, devices), dims, local_device_ids=here)

    def layout_of(self, array: Any) -> Layout | None:
        """The layout of an array, or `None` if it lies on no mesh of named dims."""
        sharding = getattr(array, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, jax.sharding.Mesh):
            return None
        specs: list[Any] = [*sharding.spec, *[None] * (array.ndim - len(sharding.spec))]
        if any(spec is PartitionSpec.UNCONSTRAINED for spec in specs):
            return None
        _, made_on = self._mesh_of_array.get(id(array), (None, None))
        return Layout(specs, made_on or self.mesh_of(sharding.mesh))

    def holds(self, array: object) -> bool:
        """Whether an object is a `jax.Array` (a traced one is)."""
        return isinstance(array, jax.Array)

    # -- making arrays

    def create(
        self,
        assignments: Mapping[str, Assignment],
        draws: Mapping[str, Initializer],
        progress: Callable[[str], object] | None = None,
    ) -> dict[str, Any]:
        """First values, each straight in its layout, with the bits of `draw.whole()`.

        A draw with a program is made in shards: equal programs are compiled once, and called with their seeds. Every
        process uses the seeds of process 0. A draw without one, or with one that cannot be drawn in shards, is made
        whole on one device, cut, and freed before the next.

        Args:
            assignments: For each key a variable and its layout.
            draws: For each key how it gets its value.
            progress: Called with the key after each variable.

        Raises:
            EngineError: A draw is missing, or an element type is not held; nothing is made then. Or a draw does not
                give the shape or element type of its variable, or differs between processes.
            LayoutError: A layout does not fit its variable; nothing is made then.
            MeshError: The machine does not have the devices of a mesh; nothing is made then.
        """
        shardings = {key: self._checked(assignment) for key, assignment in assignments.items()}
        missing = [key for key in assignments if key not in draws]
        if missing:
            raise EngineError(
                f"{missing[0]}: there is no draw",
                facts={"missing": ", ".join(missing[:10])},
                why="each variable that is created needs one",
                fix="pass an Initializer for each assignment",
            )
        made: dict[str, Any] = {}
        checksums: list[tuple[str, int]] = []
        try:
            with jax.core.eval_context():
                across = next((s for s in shardings.values() if not s.is_fully_addressable), None)
                devices: list[Device] = [] if across is None else list(across.mesh.devices.flat)  # type: ignore[union-attr]
                used = {key: draws[key] for key in assignments}
                seeds = common_seeds(used, devices)
                for key, assignment in assignments.items():
                    sharding, draw = shardings[key], used[key]
                    program = self._program(assignment, draw, seeds.get(key), sharding)
                    if isinstance(program, ShardedProgram):
                        array = _settled(program(seeds[key]))
                    else:
                        whole = _global_init(assignment, draw, seeds.get(key), across=bool(devices))
                        if devices:
                            checksums.append((assignment.variable.path, checksum(whole)))
                        array = _from_blocks(assignment, sharding, whole.__getitem__)
                        del whole
                    made[key] = self._noted(array, assignment.layout)
                    del array
                    if progress is not None:
                        progress(key)
                check_equal_everywhere(checksums, devices)
        except BaseException:
            made.clear()
            raise
        return made

    def programs(self) -> list[ShardedProgram]:
        """The programs compiled so far, to look at what the compiler made of them."""
        return [program for program in self._programs.values() if isinstance(program, ShardedProgram)]

    def why_global(self, draw: Initializer) -> str:
        """Why a draw must be made whole on one device before it is cut; empty if it need not.

        Nothing is computed; the draw's program is traced, once for all draws that are the same function.
        """
        if draw.program is None:
            return "its initializer gives no program"
        key = (draw.program.key, _signature(draw.program.seed))
        with self._lock:
            known = self._reasons.get(key)
        if known is None:
            known = why_global(trace(draw.program.function, draw.program.seed))
            with self._lock:
                self._reasons[key] = known
                _bound(self._reasons)
        return known

    def from_shards(self, assignment: Assignment, read: Callable[[Index], NumpyArray]) -> Any:
        """An array whose shards are read one by one.

        Args:
            assignment: The variable and its layout.
            read: Gives the values at an index, with both ends. Called once for each different shard that this process
                holds.

        Raises:
            EngineError: What was read has not the shape or element type of the shard.
        """
        sharding = self._checked(assignment)
        with jax.core.eval_context():
            return self._noted(_from_blocks(assignment, sharding, read), assignment.layout)

    def to_shards(self, array: Any) -> Iterator[tuple[Index, NumpyArray]]:
        """The shards that this process holds, each index once, with both ends."""
        seen: set[tuple[tuple[int, int], ...]] = set()
        for shard in array.addressable_shards:
            index = with_ends(shard.index, array.shape)
            key = tuple((part.start, part.stop) for part in index)
            if key not in seen:
                seen.add(key)
                yield index, np.asarray(shard.data)

    def relayout(self, array: Any, layout: Layout) -> Any:
        """The same values in another layout; also takes numpy arrays and what numpy makes arrays of.

        A numpy array of 64-bit numbers becomes one of 32-bit numbers, as JAX does everywhere unless `jax_enable_x64`
        is set. While JAX traces, the result is constrained to the layout.

        Raises:
            LayoutError: The layout does not fit the array's shape.
            MeshError: The machine does not have the mesh's devices.
        """
        if not isinstance(array, jax.Array):
            array = self.canonical(np.asarray(array))
        sharding = self._sharding(layout, array.shape)
        if isinstance(array, jax.core.Tracer):
            return jax.lax.with_sharding_constraint(array, sharding)
        movable = isinstance(array, jax.Array) and (
            sharding.is_fully_addressable or not array.is_fully_addressable
        )
        if movable or jnp.issubdtype(array.dtype, jax.dtypes.extended):
            moved = _settled(jax.device_put(array, sharding))
        else:
            moved = _cut(np.asarray(array), sharding)
        return self._noted(moved, layout, given=array)

    def variable(self, array: Any, *, name: str = "", trainable: bool = True) -> Any:
        """The array: JAX has no variables of its own."""
        return array

    def to_numpy(self, array: Any) -> NumpyArray:
        """All values of an array, gathered from all processes that hold some; they must all ask."""
        layout = self.layout_of(array)
        if layout is not None and not array.is_fully_addressable:
            array = self.relayout(array, Layout.replicated(layout.mesh, layout.rank))
            return np.asarray(next(iter(array.addressable_shards)).data)
        if layout is None or layout.is_fully_replicated() or isinstance(array, jax.core.Tracer):
            return np.asarray(array)
        # Not np.asarray: what JAX puts together it keeps with the array, on the host.
        whole = np.empty(array.shape, array.dtype)
        for index, values in self.to_shards(array):
            whole[index] = values
        return whole

    def all_gather(self, values: NumpyArray, mesh: Mesh) -> NumpyArray:
        """The values of each process that has a device of the mesh, one row each; they must all ask.

        Raises:
            EngineError: Another process cannot be reached.
            MeshError: The machine does not have the mesh's devices.
        """
        return gathered(values, bound_devices(mesh))

    def run_on(self, mesh: Mesh) -> AbstractContextManager[Any]:
        """While open, arrays made from plain values lie on the mesh, each device having all of them.

        Raises:
            MeshError: The machine does not have the mesh's devices.
        """
        return jax.set_mesh(self.native(Layout.replicated(mesh, 0), 0).mesh)  # type: ignore[arg-type]

    def canonical(self, values: NumpyArray) -> NumpyArray:
        """Numpy values in the element type that JAX holds them in: 32 bits for 64 unless `jax_enable_x64` is set.

        Raises:
            EngineError: It holds no such elements.
        """
        number = jnp.issubdtype(values.dtype, jnp.number) or values.dtype == bool
        if not number or values.dtype.kind in "mM":
            raise EngineError(
                f"JAX cannot hold an array of {values.dtype}",
                why="arrays of JAX hold numbers and truth values",
                fix="pass an array of numbers",
            )
        return values.astype(jax.dtypes.canonicalize_dtype(values.dtype), copy=False)

    def call(
        self, function: Callable[..., Any], layout: Layout, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """What a function gives, made in a layout; the whole of it is on no device.

        Arrays among the arguments, nested too, are passed to the compiled function; anything else is part of it. The
        bits are those of the plain call, unless the function adds elements up: then it is compiled as one program.

        Raises:
            EngineError: The function does not give one array.
            LayoutError: The layout does not fit the shape of the result.
            MeshError: The machine does not have the mesh's devices.
        """
        leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]

        def of_arrays(arrays: Sequence[Any]) -> Any:
            filled = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                filled[place] = array
            inner_args, inner_kwargs = jax.tree.unflatten(tree, filled)
            return function(*inner_args, **inner_kwargs)

        arrays = [leaves[i] for i in places]
        closed = trace(of_arrays, arrays)
        if len(closed.out_avals) != 1:
            raise EngineError(
                f"{getattr(function, '__name__', function)} gives {len(closed.out_avals)} arrays",
                why="one layout is for one array",
                fix="call it once for each array, or give it a function that returns one of them",
            )
        sharding = self._sharding(layout, closed.out_avals[0].shape)  # type: ignore[attr-defined]
        if why_global(closed):
            return self._noted(_settled(jax.jit(of_arrays, out_shardings=sharding)(arrays)), layout)
        return self._noted(_settled(ShardedProgram(closed, sharding)(arrays)), layout)

    # -- parts

    def _noted(self, array: Any, layout: Layout, *, given: Any = None) -> Any:
        """An array that was made in a layout; its mesh is noted where JAX's own stands for another one of ours.

        Args:
            array: The array.
            layout: Its layout.
            given: What it was made from, and may be itself: that keeps its layout.
        """
        first = self._mesh_of_native[array.sharding.mesh]
        _, made_on = self._mesh_of_array.get(id(array), (None, first))
        if made_on == layout.mesh:
            return array
        if array is given:
            pieces = [shard.data for shard in array.addressable_shards]
            array = jax.make_array_from_single_device_arrays(
                array.shape, array.sharding, pieces, dtype=array.dtype
            )
        if first != layout.mesh:
            key = id(array)
            forget = weakref.ref(array, lambda _: self._mesh_of_array.pop(key, None))
            self._mesh_of_array[key] = forget, layout.mesh
        return array

    def _sharding(self, layout: Layout, shape: tuple[int, ...], name: str = "layout") -> NamedSharding:
        layout.check_rank(shape, name)
        for axis in layout.uneven_axes(shape):
            raise layout.uneven_error(shape, axis, name)
        return self.native(layout, len(shape))

    def _checked(self, assignment: Assignment) -> NamedSharding:
        """The sharding of an assignment, after all checks that need no array."""
        variable = assignment.variable
        _dtype_of(variable.dtype, variable.path)
        return self._sharding(assignment.layout, variable.shape, variable.path)

    def _program(
        self, assignment: Assignment, draw: Initializer, seed: Any, sharding: NamedSharding
    ) -> ShardedProgram | str:
        """The compiled program of a draw, or why it has none."""
        if draw.program is None:
            return "its initializer gives no program"
        variable = assignment.variable
        key = (draw.program.key, variable.shape, variable.dtype, sharding, _signature(seed))
        with self._lock:
            if key in self._programs:
                self._programs.move_to_end(key)
                return self._programs[key]
        closed = trace(draw.program.function, seed)
        if len(closed.out_avals) != 1:
            raise EngineError(
                f"{variable.path}: its draw gives {len(closed.out_avals)} values",
                why="a draw gives one array",
                fix="return the array only",
            )
        (aval,) = closed.out_avals
        _check_drawn(assignment, aval.shape, aval.dtype)  # type: ignore[attr-defined]
        program = why_global(closed) or ShardedProgram(closed, sharding)
        with self._lock:
            self._programs[key] = program
            _bound(self._programs)
        return program


@functools.cache
def engine() -> JaxEngine:
    """The one JAX engine of this process."""
    return JaxEngine()


def _dtype_of(name: str, path: str) -> np.dtype[Any]:
    """The element type of a name, if JAX holds it as it is."""
    try:
        dtype = np.dtype(jnp.dtype(name))
        kept = jax.dtypes.canonicalize_dtype(dtype)
    except TypeError:
        raise EngineError(
            f"{path}: JAX has no element type {name!r}",
            why="arrays of JAX hold numbers and truth values",
            fix="leave the variable to its framework, or store numbers",
        ) from None
    if kept != dtype:
        raise EngineError(
            f"{path}: JAX would hold {name} as {kept}",
            facts={"dtype": name},
            why="64-bit numbers are switched off in JAX",
            fix="jax.config.update('jax_enable_x64', True), or make the variable of 32 bits",
        )
    return dtype


def _settled(array: Any) -> Any:
    """The array, made already where that matters.

    On CPU devices, independent programs with collectives that are under way at the same time can wait for each other
    for ever, so each is waited for.
    """
    return jax.block_until_ready(array) if next(iter(array.sharding.device_set)).platform == "cpu" else array


def _bound(cache: OrderedDict[Hashable, Any]) -> None:
    """Forget what was used longest ago."""
    while len(cache) > _MAX_PROGRAMS:
        cache.popitem(last=False)


def _signature(seed: Any) -> Hashable:
    leaves, tree = jax.tree.flatten(seed)
    return tree, tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)


def _check_drawn(assignment: Assignment, shape: Sequence[int], dtype: Any) -> None:
    variable = assignment.variable
    if tuple(shape) == variable.shape and dtype == jnp.dtype(variable.dtype):
        return
    raise EngineError(
        f"{variable.path}: its draw gives another array than the variable is",
        facts={
            "variable": f"{variable.dtype}{list(variable.shape)}",
            "drawn": f"{dtype}{list(shape)}",
        },
        why="the first value of a variable has its shape and element type",
        fix="make the initializer return that shape and element type",
    )


def _global_init(assignment: Assignment, draw: Initializer, seed: Any, *, across: bool) -> NumpyArray:
    """The whole value, on the host. Across processes a program is called with the common seed."""
    value = draw.program.function(seed) if across and draw.program is not None else draw.whole()
    whole = np.asarray(value)
    _check_drawn(assignment, whole.shape, whole.dtype)
    return whole


def _from_blocks(
    assignment: Assignment, sharding: NamedSharding, read: Callable[[Index], NumpyArray]
) -> jax.Array:
    """An array put together from blocks, each read once."""
    variable = assignment.variable
    dtype = _dtype_of(variable.dtype, variable.path)

    def checked(index: Index) -> NumpyArray:
        block = np.asarray(read(index))
        if block.shape != block_shape(index) or block.dtype != dtype:
            raise EngineError(
                f"{variable.path}: a shard was read wrong",
                facts={
                    "index": index,
                    "shard": f"{dtype}{list(block_shape(index))}",
                    "read": f"{block.dtype}{list(block.shape)}",
                },
                why="a shard has the shape of its index and the variable's element type",
                fix="return exactly the values at the index",
            )
        return block

    return _placed(variable.shape, dtype, sharding, checked)


def _cut(values: NumpyArray, sharding: NamedSharding) -> jax.Array:
    return _placed(values.shape, values.dtype, sharding, values.__getitem__)


def _placed(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    sharding: NamedSharding,
    read: Callable[[Index], NumpyArray],
) -> jax.Array:
    holders: dict[tuple[tuple[int, int], ...], list[Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        ends = with_ends(index or (), shape)
        holders.setdefault(tuple((part.start, part.stop) for part in ends), []).append(device)
    pieces: list[jax.Array] = []
    for ends, devices in holders.items():
        # A copy: on CPU devices JAX would share the memory of a numpy array, and a later change of it would show.
        block = np.array(read(tuple(slice(*pair) for pair in ends)), copy=True)
        pieces.extend(jax.device_put(block, device) for device in devices)
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces, dtype=dtype)
