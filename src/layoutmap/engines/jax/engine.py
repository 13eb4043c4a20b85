"""The JAX engine: `jax.Array`s in `NamedSharding`s.

Devices are named `CPU:0`, `GPU:3`: the platform and JAX's own number of the device. A layout is a `NamedSharding` on a
`jax.sharding.Mesh` with `Auto` axes. Only public names of JAX are used. The program of an initializer is read with
`jax.extend.core`, which JAX keeps public without a promise; tested with JAX 0.9 and 0.10.

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
from layoutmap.core.variables import Assignment
from layoutmap.engines.agreement import check_computed
from layoutmap.engines.checks import (
    check_draws,
    check_initial_value,
    check_initializers,
    check_one_result,
    checked_reader,
    remember,
)
from layoutmap.engines.jax.arrays import by_device, canonical, dtype_of, from_blocks, ready, shards_of
from layoutmap.engines.jax.devices import Device, bound_devices, bound_mesh, device_names, simulate
from layoutmap.engines.jax.layouts import ArrayLayouts
from layoutmap.engines.jax.processes import common_seeds, gathered
from layoutmap.engines.jax.programs import ShardedProgram, trace, undisturbed, why_global
from layoutmap.engines.jax.trees import find_memory
from layoutmap.engines.protocol import Unplaced


class JaxEngine:
    """Holds `jax.Array`s. There is one of them: `engine()`. What its methods raise is in `Engine`."""

    name = "jax"
    array_types: tuple[type, ...] = (jax.Array,)
    several_dims = True
    devices = staticmethod(device_names)
    simulate = staticmethod(simulate)
    bind = staticmethod(bound_mesh)
    to_shards = staticmethod(shards_of)
    by_device = staticmethod(by_device)
    canonical = staticmethod(canonical)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layouts = ArrayLayouts()
        self._programs: OrderedDict[Hashable, ShardedProgram | str] = OrderedDict()

    # -- devices and layouts

    def check_layout(self, layout: Layout) -> None:
        """Nothing: JAX can hold every layout."""

    def check_dtype(self, name: str, path: str) -> None:
        """Refuse an element type that no array in a layout has as it is; random keys have one of their own."""
        if not name.startswith("key<"):
            dtype_of(name, path)

    def native(self, layout: Layout, rank: int) -> NamedSharding:
        """Return the `NamedSharding` of a layout, with one entry for each axis."""
        layout.check_rank((None,) * rank)
        return self._layouts.sharding(layout)

    def layout_of(self, array: object) -> Layout | None:
        """Return the layout of an array, or `None` if it is on no mesh of named dims, or a sum that is pending."""
        return self._layouts.layout_of(array)

    def found(self, array: object, meshes: Sequence[Mesh] = ()) -> Layout | Unplaced:
        """Return the layout of an array that any program has made, or how it is held otherwise."""
        return self._layouts.found(array, meshes)

    # -- making arrays

    def create(
        self,
        assignments: Mapping[str, Assignment],
        initializers: Mapping[str, Initializer],
        progress: Callable[[str], object] | None = None,
    ) -> dict[str, jax.Array]:
        """Compute initial values, each straight in its layout, with the bits of `initializer.global_value()`.

        An initializer with a program is computed in shards: equal programs are compiled once, and called with their
        seeds. Every process uses the seeds of process 0. The global value of one without a program, or with one that
        cannot be computed in shards, is computed on one device, sharded, and freed before the next.
        """
        shardings = {key: self._checked(assignment) for key, assignment in assignments.items()}
        check_initializers(assignments, initializers)
        made: dict[str, jax.Array] = {}
        checksums: list[tuple[str, int]] = []
        try:
            with undisturbed():
                across = next((s for s in shardings.values() if not s.is_fully_addressable), None)
                devices: list[Device] = [] if across is None else list(across.mesh.devices.flat)  # type: ignore[union-attr]
                used = {key: initializers[key] for key in assignments}
                seeds = common_seeds(used, devices)
                for key, assignment in assignments.items():
                    sharding, initializer = shardings[key], used[key]
                    program = self._program(assignment, initializer, seeds.get(key), sharding)
                    if isinstance(program, ShardedProgram):
                        array = ready(program(seeds[key]))
                    else:
                        values = _global_init(assignment, initializer, seeds.get(key), across=bool(devices))
                        if devices:
                            checksums.append((assignment.variable.path, compute_checksum(values)))
                        array = from_blocks(values.shape, values.dtype, sharding, values.__getitem__)
                        del values
                    made[key] = self._layouts.noted(array, assignment.layout)
                    del array
                    if progress is not None:
                        progress(key)
                if checksums:
                    check_computed(checksums, functools.partial(gathered, devices=devices))
        except BaseException:
            made.clear()
            raise
        return made

    def programs(self) -> list[ShardedProgram]:
        """The programs compiled so far, to look at what the compiler made of them."""
        return [program for program in self._programs.values() if isinstance(program, ShardedProgram)]

    def from_shards(
        self, assignment: Assignment, read: Callable[[Index], NumpyArray], *, copy: bool = True
    ) -> Any:
        """Make an array whose shards are read one by one; see `Engine.from_shards`."""
        sharding, variable = self._checked(assignment), assignment.variable
        with undisturbed():
            checked = checked_reader(variable, read)
            dtype = np.dtype(jnp.dtype(variable.dtype))
            made = from_blocks(variable.shape, dtype, sharding, checked, copy=copy)
            return self._layouts.noted(made, assignment.layout)

    def own_memory(self, array: object) -> tuple[()]:
        """Nothing: arrays of JAX never change."""
        return ()

    def relayout(self, array: object, layout: Layout) -> jax.Array:
        """Return the same values in another layout; also takes numpy arrays and what numpy makes arrays of.

        A numpy array of 64-bit numbers becomes one of 32-bit numbers, as JAX does everywhere unless `jax_enable_x64`
        is set. While JAX traces, the result is constrained to the layout.
        """
        if not isinstance(array, jax.Array):
            array = canonical(np.asarray(array))
        memory = "" if isinstance(array, jax.core.Tracer) else find_memory(array)
        sharding = self._layouts.fitting(layout, array.shape, memory=memory)
        if isinstance(array, jax.core.Tracer):
            return jax.lax.with_sharding_constraint(array, sharding)
        movable = isinstance(array, jax.Array) and (
            sharding.is_fully_addressable or not array.is_fully_addressable
        )
        if movable:
            moved = ready(jax.device_put(array, sharding))
        elif jnp.issubdtype(array.dtype, jax.dtypes.prng_key):  # numpy has no such type
            specs = [*layout.sharding_specs, None]
            data = self.relayout(np.asarray(jax.random.key_data(array)), Layout(specs, layout.mesh))
            wrap = functools.partial(jax.random.wrap_key_data, impl=jax.random.key_impl(array))
            moved = jax.jit(wrap, out_shardings=sharding)(data)
        else:
            values = np.asarray(array)
            moved = from_blocks(values.shape, values.dtype, sharding, values.__getitem__)
        return self._layouts.noted(moved, layout, given=array)

    def variable(self, array: object, *, name: str = "", trainable: bool = True) -> Any:
        """The array: JAX has no variables of its own."""
        return array

    def to_numpy(self, array: jax.Array) -> NumpyArray:
        """Return all values of an array, gathered from all processes that hold some; they must all ask.

        Of random keys, which numpy cannot hold, it returns their data.
        """
        layout = self.layout_of(array)
        if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            if layout is not None:
                array = self.relayout(array, Layout.replicated(layout.mesh, layout.rank))
            return np.asarray(jax.random.key_data(array).addressable_data(0))
        if layout is not None and not array.is_fully_addressable:
            array = self.relayout(array, Layout.replicated(layout.mesh, layout.rank))
            return np.asarray(next(iter(array.addressable_shards)).data)
        if layout is None or layout.is_fully_replicated() or isinstance(array, jax.core.Tracer):
            return np.asarray(array)
        # Not np.asarray: JAX keeps a gathered array with the array, on the host.
        gathered_values = np.empty(array.shape, array.dtype)
        for index, values in shards_of(array):
            gathered_values[index] = values
        return gathered_values

    def all_gather(self, values: NumpyArray, mesh: Mesh) -> NumpyArray:
        """Return the values of each process that has a device of the mesh, one row each; they must all ask."""
        return gathered(values, bound_devices(mesh))

    def run_on(self, mesh: Mesh, draws: str = "exact") -> AbstractContextManager[object]:
        """While open, arrays made from plain values are on the mesh, replicated."""
        check_draws(self.name, draws)
        return jax.set_mesh(self.native(Layout.replicated(mesh, 0), 0).mesh)  # type: ignore[arg-type]

    def call(
        self, function: Callable[..., object], layout: Layout, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return the result of a function in a layout; no device holds the global value.

        Arrays among the arguments, nested too, are passed to the compiled function; anything else is part of it. The
        bits are those of the plain call, unless the function adds elements up: then it is compiled as one program.
        """
        leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]

        def of_arrays(arrays: Sequence[jax.Array]) -> Any:
            filled = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                filled[place] = array
            inner_args, inner_kwargs = jax.tree.unflatten(tree, filled)
            return function(*inner_args, **inner_kwargs)

        arrays = [leaves[i] for i in places]
        closed = trace(of_arrays, arrays)
        check_one_result(function, len(closed.out_avals))
        sharding = self._layouts.fitting(layout, closed.out_avals[0].shape)  # type: ignore[attr-defined]
        if why_global(closed):
            return self._layouts.noted(ready(jax.jit(of_arrays, out_shardings=sharding)(arrays)), layout)
        return self._layouts.noted(ready(ShardedProgram(closed, sharding)(arrays)), layout)

    # -- parts

    def _checked(self, assignment: Assignment) -> NamedSharding:
        """The sharding of an assignment, after all checks that need no array."""
        variable = assignment.variable
        dtype_of(variable.dtype, variable.path)
        return self._layouts.fitting(assignment.layout, variable.shape, variable.path, variable.memory)

    def _program(
        self, assignment: Assignment, initializer: Initializer, seed: object, sharding: NamedSharding
    ) -> ShardedProgram | str:
        """Return the compiled program of an initializer, or why it has none."""
        if initializer.program is None:
            return "its initializer has no program"
        variable = assignment.variable
        key = (initializer.program.key, variable.shape, variable.dtype, sharding, _signature(seed))
        with self._lock:
            if key in self._programs:
                self._programs.move_to_end(key)
                return self._programs[key]
        closed = trace(initializer.program.function, seed)
        if len(closed.out_avals) != 1:
            raise EngineError(
                f"{variable.path}: its initializer returns {len(closed.out_avals)} values",
                why="an initializer returns one array",
                fix="return the array only",
            )
        (aval,) = closed.out_avals
        check_initial_value(variable, aval.shape, aval.dtype.name)  # type: ignore[attr-defined]
        program = why_global(closed) or ShardedProgram(closed, sharding)
        with self._lock:
            return remember(self._programs, key, program)


@functools.cache
def engine() -> JaxEngine:
    """The one JAX engine of this process."""
    return JaxEngine()


def _signature(seed: object) -> Hashable:
    leaves, tree = jax.tree.flatten(seed)
    return tree, tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)


def _global_init(
    assignment: Assignment, initializer: Initializer, seed: object, *, across: bool
) -> NumpyArray:
    """The global value, on the host. Across processes a program is called with the common seed."""
    value = (
        initializer.program.function(seed)
        if across and initializer.program is not None
        else initializer.global_value()
    )
    values = np.asarray(value)
    check_initial_value(assignment.variable, values.shape, values.dtype.name)
    return values
