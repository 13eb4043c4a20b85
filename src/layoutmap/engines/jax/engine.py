"""Create and shard `jax.Array`s with `NamedSharding`s.

Devices are named `CPU:0`, `GPU:3`: the platform and JAX's own number of the device. A layout is a `NamedSharding` on a
`jax.sharding.Mesh` with the mesh's axis types. Only public names of JAX are used. The program of an initializer is read
with `jax.extend.core`, which JAX keeps public without a promise; tested with JAX 0.9 and 0.10.

References:
    https://docs.jax.dev/en/latest/notebooks/Distributed_arrays_and_automatic_parallelization.html
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from layoutmap.core.blocks import Index, NumpyArray
from layoutmap.core.checksums import compute_checksum
from layoutmap.core.errors import EngineError
from layoutmap.core.initializers import Initializer
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.pieces import ArrayMove
from layoutmap.core.uneven import apply_uneven_policy, derive_layout_with_dim
from layoutmap.core.variables import Assignment
from layoutmap.engines.agreement import check_same_initial_values
from layoutmap.engines.checks import (
    add_checks_to_block_reader,
    check_function_returns_one_array,
    check_initial_value,
    check_no_initializer_is_missing,
    check_random_mode,
    store_in_bounded_cache,
)
from layoutmap.engines.jax.arrays import (
    canonicalize_values,
    constrain_traced_array,
    convert_dtype,
    create_from_blocks,
    iterate_device_values,
    iterate_shards,
    wait_for_computation_on_cpu,
)
from layoutmap.engines.jax.devices import Device, bind_mesh, find_devices, list_device_names, simulate_devices
from layoutmap.engines.jax.layouts import ArrayLayoutRegistry
from layoutmap.engines.jax.moving import make_array_mover
from layoutmap.engines.jax.padded import (
    PaddedArray,
    Shape,
    change_padding_and_sharding,
    unwrap_padded_array,
    wrap_padded_array,
)
from layoutmap.engines.jax.processes import broadcast_seeds, gather_from_processes
from layoutmap.engines.jax.programs import (
    ShardedProgram,
    explain_why_sharding_changes_values,
    suspend_jax_context,
    trace_program,
)
from layoutmap.engines.jax.trees import find_memory_kind, move_to_memory
from layoutmap.engines.protocol import Array, PlacementWithoutLayout


class JaxEngine:
    """Create and shard `jax.Array`s. `engine()` is the only instance. See `Engine` for the errors."""

    name = "jax"
    array_types: tuple[type, ...] = (jax.Array, PaddedArray)
    several_dims = True
    list_device_names = staticmethod(list_device_names)
    simulate_devices = staticmethod(simulate_devices)
    bind_mesh = staticmethod(bind_mesh)
    iterate_shards = staticmethod(iterate_shards)
    iterate_device_values = staticmethod(iterate_device_values)
    canonicalize_values = staticmethod(canonicalize_values)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layouts = ArrayLayoutRegistry()
        self._programs: OrderedDict[Hashable, ShardedProgram | str] = OrderedDict()

    # -- devices and layouts

    def check_layout(self, layout: Layout) -> None:
        """Accept every layout, because JAX supports all layouts."""

    def check_dtype(self, name: str, path: str) -> None:
        """Raise an `EngineError` for a dtype that JAX would change. Dtypes of random keys are accepted."""
        if not name.startswith("key<"):
            convert_dtype(name, path)

    def make_native_layout(self, layout: Layout, rank: int) -> NamedSharding:
        """Return the `NamedSharding` of a layout, with one entry for each axis."""
        layout.check_rank((None,) * rank)
        return self._layouts.make_sharding(layout)

    def get_layout(self, array: object) -> Layout | None:
        """Return the layout of an array, or None if it is on no mesh with named dims or is a partial sum."""
        return self._layouts.get_layout(array)

    def find_placement(self, array: object, meshes: Sequence[Mesh] = ()) -> Layout | PlacementWithoutLayout:
        """Return the layout of any array, or a description of its placement if no layout expresses it."""
        return self._layouts.find_placement(array, meshes)

    # -- creating arrays

    def create_initial_values(
        self,
        assignments: Mapping[str, Assignment],
        initializers: Mapping[str, Initializer],
        progress: Callable[[str], object] | None = None,
    ) -> dict[str, jax.Array]:
        """Return initial values in their layouts. The values equal `initializer.global_value()` bit for bit.

        An initializer with a program is computed in shards: equal programs are compiled once, and called with their
        seeds. Every process uses the seeds of process 0. If an initializer has no program, or its program cannot be
        computed in shards, its global value is computed on one device, sharded, and freed before the next one.
        """
        shardings = {key: self._make_checked_sharding(assignment) for key, assignment in assignments.items()}
        check_no_initializer_is_missing(assignments, initializers)
        made: dict[str, jax.Array] = {}
        checksums: list[tuple[str, int]] = []
        try:
            with suspend_jax_context():
                across = next((s for s in shardings.values() if not s.is_fully_addressable), None)
                devices: list[Device] = [] if across is None else list(across.mesh.devices.flat)  # type: ignore[union-attr]
                used = {key: initializers[key] for key in assignments}
                seeds = broadcast_seeds(used, devices)
                for key, assignment in assignments.items():
                    sharding, initializer = shardings[key], used[key]
                    program = self._get_or_make_program(assignment, initializer, seeds.get(key), sharding)
                    if isinstance(program, ShardedProgram):
                        array = wait_for_computation_on_cpu(program(seeds[key]))
                        if assignment.layout.host_memory:
                            array = wait_for_computation_on_cpu(jax.device_put(array, sharding))
                        if assignment.is_padded:
                            array = _relayout_padded_array(array, assignment.padded_shape, sharding)
                    else:
                        values = _compute_global_value(
                            assignment, initializer, seeds.get(key), use_shared_seed=bool(devices)
                        )
                        if devices:
                            checksums.append((assignment.variable.path, compute_checksum(values)))
                        padded = assignment.padded_shape
                        array = create_from_blocks(
                            values.shape, values.dtype, sharding, values.__getitem__, padded=padded
                        )
                        del values
                    made[key] = self._layouts.record_layout(array, assignment.layout)
                    del array
                    if progress is not None:
                        progress(key)
                if checksums:
                    gather = functools.partial(gather_from_processes, devices=devices)
                    check_same_initial_values(checksums, gather)
        except BaseException:
            made.clear()
            raise
        return made

    def make_array_mover(
        self, moves: Sequence[ArrayMove], arrays: Sequence[jax.Array], templates: Sequence[jax.Array]
    ) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
        """Compile and return a function that moves arrays to the layouts of `templates` (see `ArrayMoverFactory`)."""
        move = make_array_mover(moves, arrays, templates)
        layouts = [self.get_layout(like) for like in templates]
        for layout in filter(None, layouts):
            # `record_layout` needs the mesh of each sharding, and a template made by the user is not recorded yet.
            self._layouts.make_sharding(layout)

        def move_and_record_layouts(new: Sequence[jax.Array]) -> list[jax.Array]:
            return [
                array if layout is None else self._layouts.record_layout(array, layout)
                for array, layout in zip(move(new), layouts, strict=True)
            ]

        return move_and_record_layouts

    def list_programs(self) -> list[ShardedProgram]:
        """Return the compiled programs of initializers that the cache contains."""
        return [program for program in self._programs.values() if isinstance(program, ShardedProgram)]

    def create_from_shards(
        self, assignment: Assignment, read: Callable[[Index], NumpyArray], *, copy: bool = True
    ) -> Any:
        """Create an array from shards that are read one by one (see `Engine.create_from_shards`)."""
        sharding, variable = self._make_checked_sharding(assignment), assignment.variable
        with suspend_jax_context():
            checked = add_checks_to_block_reader(variable, read)
            dtype = np.dtype(jnp.dtype(variable.dtype))
            made = create_from_blocks(
                variable.shape, dtype, sharding, checked, copy=copy, padded=assignment.padded_shape
            )
            return self._layouts.record_layout(made, assignment.layout)

    def get_writable_memory(self, array: object) -> tuple[()]:
        """Return no memory, because JAX arrays are immutable."""
        return ()

    def relayout(self, array: Array, layout: Layout, *, pad: bool = False) -> Array:
        """Return the same values in a new layout. Numpy arrays and values that numpy converts are accepted.

        A numpy array of 64-bit numbers becomes one of 32-bit numbers, as JAX does everywhere unless `jax_enable_x64`
        is set. While JAX traces, the result is constrained to the layout.
        """
        if not isinstance(array, self.array_types):
            array = canonicalize_values(array)
        if isinstance(array, jax.core.Tracer):
            sharding = self._layouts.make_checked_sharding(layout.replace_memory(None), array.shape, pad=pad)
            return move_to_memory(constrain_traced_array(array, sharding), layout.memory)
        if layout.memory is None:
            layout = layout.replace_memory(find_memory_kind(array) or None)
        sharding = self._layouts.make_checked_sharding(layout, array.shape, pad=pad)
        if (padded := layout.pad_shape(array.shape)) != array.shape or isinstance(array, PaddedArray):
            moved = _relayout_padded_array(array, padded, sharding)
            return self._layouts.record_layout(moved, layout, source=array)
        movable = isinstance(array, jax.Array) and (
            sharding.is_fully_addressable or not array.is_fully_addressable
        )
        if movable:
            moved = wait_for_computation_on_cpu(jax.device_put(array, sharding))
        elif jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            # numpy cannot store random keys, so relayout their data.
            specs = [*layout.sharding_specs, None]
            data = self.relayout(np.asarray(jax.random.key_data(array)), Layout(specs, layout.mesh))
            wrap = functools.partial(jax.random.wrap_key_data, impl=jax.random.key_impl(array))
            moved = jax.jit(wrap, out_shardings=sharding)(data)
        else:
            values = np.asarray(array)
            moved = create_from_blocks(values.shape, values.dtype, sharding, values.__getitem__)
        return self._layouts.record_layout(moved, layout, source=array)

    def make_variable(self, array: object, *, name: str = "", trainable: bool = True) -> Any:
        """Return the array, because JAX has no variables."""
        return array

    def to_numpy(self, array: jax.Array) -> NumpyArray:
        """Return all values of an array. Each process that has a part of the array must call this.

        numpy cannot store random keys, so their key data are returned.
        """
        layout = self.get_layout(array)
        if isinstance(array, PaddedArray) and not array.is_fully_addressable:
            array = array.__jax_array__()
            layout = self.get_layout(array)
        if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            if layout is not None:
                array = self.relayout(array, Layout.replicated(layout.mesh, layout.rank))
            return np.asarray(jax.random.key_data(array).addressable_data(0))
        if layout is not None and not array.is_fully_addressable:
            array = self.relayout(array, Layout.replicated(layout.mesh, layout.rank))
            return np.asarray(next(iter(array.addressable_shards)).data)
        if (
            layout is None
            or layout.is_fully_replicated()
            or isinstance(array, (PaddedArray, jax.core.Tracer))
        ):
            return np.asarray(array)
        # JAX would keep the result of np.asarray in memory as long as the array, so copy the shards into new memory.
        gathered_values = np.empty(array.shape, array.dtype)
        for index, values in iterate_shards(array):
            gathered_values[index] = values
        return gathered_values

    def gather_from_processes(self, values: NumpyArray, mesh: Mesh) -> NumpyArray:
        """Return one row of values for each process with a device of the mesh. All these processes must call this."""
        return gather_from_processes(values, find_devices(mesh))

    def run_on(self, mesh: Mesh, draws: str = "exact") -> AbstractContextManager[object]:
        """Return a context manager in which new arrays are replicated on the mesh."""
        check_random_mode(self.name, draws)
        return jax.set_mesh(self.make_native_layout(Layout.replicated(mesh, 0), 0).mesh)  # type: ignore[arg-type]

    def call_with_layout(
        self, function: Callable[..., object], layout: Layout, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a function, and return its result in a layout. If possible, no device stores the global value.

        Arrays in the arguments are inputs of the compiled function, and other arguments are constants of it. The result
        equals that of an unsharded call bit for bit, unless the function sums elements: then it is one program.
        """
        leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]

        def call_with_arrays(arrays: Sequence[jax.Array]) -> Any:
            filled = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                filled[place] = move_to_memory(array, "device")
            inner_args, inner_kwargs = jax.tree.unflatten(tree, filled)
            return function(*inner_args, **inner_kwargs)

        arrays = [leaves[i] for i in places]
        closed = trace_program(call_with_arrays, arrays)
        check_function_returns_one_array(function, len(closed.out_avals))
        sharding = self._layouts.make_checked_sharding(layout, closed.out_avals[0].shape)  # type: ignore[attr-defined]
        if explain_why_sharding_changes_values(closed):
            made = wait_for_computation_on_cpu(jax.jit(call_with_arrays, out_shardings=sharding)(arrays))
        else:
            made = wait_for_computation_on_cpu(
                ShardedProgram(closed, NamedSharding(sharding.mesh, sharding.spec))(arrays)
            )
            made = wait_for_computation_on_cpu(jax.device_put(made, sharding))
        return self._layouts.record_layout(made, layout)

    # -- helpers

    def _make_checked_sharding(self, assignment: Assignment) -> NamedSharding:
        """Return the sharding of an assignment, or raise if JAX cannot store its dtype or the layout does not fit."""
        variable = assignment.variable
        convert_dtype(variable.dtype, variable.path)
        return self._layouts.make_checked_sharding(
            assignment.layout, variable.shape, variable.path, pad=assignment.is_padded
        )

    def _get_or_make_program(
        self, assignment: Assignment, initializer: Initializer, seed: object, sharding: NamedSharding
    ) -> ShardedProgram | str:
        """Return the compiled program of an initializer, or the reason why it cannot be computed in shards."""
        if initializer.program is None:
            return "its initializer has no program"
        variable = assignment.variable
        key = (
            initializer.program.key,
            variable.shape,
            variable.dtype,
            sharding,
            _get_seed_structure_and_dtypes(seed),
        )
        with self._lock:
            if key in self._programs:
                self._programs.move_to_end(key)
                return self._programs[key]
        closed = trace_program(initializer.program.function, seed)
        if len(closed.out_avals) != 1:
            raise EngineError(
                f"{variable.path}: its initializer returns {len(closed.out_avals)} values",
                why="an initializer returns one array",
                fix="make the initializer return only the array",
            )
        (aval,) = closed.out_avals
        check_initial_value(variable, aval.shape, aval.dtype.name)  # type: ignore[attr-defined]
        if assignment.is_padded:
            sharding = self._layouts.make_sharding(_make_even_layout(assignment.layout, variable.shape))
        # Programs compute in device memory, so leave out the memory kind. The caller moves the result to the host.
        sharding = NamedSharding(sharding.mesh, sharding.spec)
        program = explain_why_sharding_changes_values(closed) or ShardedProgram(closed, sharding)
        with self._lock:
            return store_in_bounded_cache(self._programs, key, program)


@functools.cache
def engine() -> JaxEngine:
    """Return the only JAX engine of this process."""
    return JaxEngine()


# Padding in the program would change its rounding, so compute an even layout, and pad separately (decisions/0230).
def _make_even_layout(layout: Layout, shape: Shape) -> Layout:
    """Return a layout without uneven axes. Mesh dims of an uneven axis shard a different axis if they fit there."""
    even = apply_uneven_policy(layout, shape, "replicate")
    for axis in layout.find_uneven_axes(shape):
        for dim in layout.list_mesh_dims(axis):
            even = derive_layout_with_dim(even, shape, dim)
    return even


def _relayout_padded_array(array: Array, padded: Shape, sharding: NamedSharding) -> Array:
    """Return an array in a sharding, stored with the padded shape `padded`."""
    stored, shape = unwrap_padded_array(array), array.shape
    if isinstance(stored, jax.Array) and (stored.shape, stored.sharding) == (padded, sharding):
        return array
    if isinstance(stored, jax.Array) and stored.sharding.device_set == sharding.device_set:
        with suspend_jax_context():
            return wrap_padded_array(
                wait_for_computation_on_cpu(change_padding_and_sharding(stored, shape, padded, sharding)),
                shape,
            )
    values = np.asarray(array)
    return create_from_blocks(shape, values.dtype, sharding, values.__getitem__, padded=padded)


def _get_seed_structure_and_dtypes(seed: object) -> Hashable:
    leaves, tree = jax.tree.flatten(seed)
    return tree, tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)


def _compute_global_value(
    assignment: Assignment, initializer: Initializer, seed: object, *, use_shared_seed: bool
) -> NumpyArray:
    """Return the global value of an initializer. With `use_shared_seed`, its program computes it from `seed`."""
    value = (
        initializer.program.function(seed)
        if use_shared_seed and initializer.program is not None
        else initializer.global_value()
    )
    values = np.asarray(value)
    check_initial_value(assignment.variable, values.shape, values.dtype.name)
    return values
