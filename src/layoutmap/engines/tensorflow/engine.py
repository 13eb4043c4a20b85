"""Create and shard tensors with `tf.experimental.dtensor`.

A layout is a `tf.experimental.dtensor.Layout`. DTensor shards an axis over one mesh dim only, so an axis over several
dims raises an error. Tested with TensorFlow 2.21.

References:
    https://www.tensorflow.org/guide/dtensor_overview
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from layoutmap.core.blocks import BlockReader, NumpyArray, get_starts_and_stops
from layoutmap.core.checksums import compute_checksum
from layoutmap.core.initializers import Initializer
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.variables import Assignment
from layoutmap.engines.checks import (
    add_checks_to_block_reader,
    check_function_returns_one_array,
    check_initial_value,
    check_no_initializer_is_missing,
    check_random_mode,
    store_in_bounded_cache,
)
from layoutmap.engines.tensorflow.arrays import (
    canonicalize_values,
    check_and_convert_layout,
    check_dtype,
    convert_to_native_layout,
    create_from_blocks,
    find_placement,
    get_layout,
    get_static_shape,
    iterate_device_values,
    iterate_shards,
    relayout_and_keep_size_one_dims,
    relayout_tensor,
    to_numpy,
)
from layoutmap.engines.tensorflow.devices import (
    bind_mesh,
    list_device_names,
    make_native_specs,
    simulate_devices,
)
from layoutmap.engines.tensorflow.pieces import PiecewiseInitializer
from layoutmap.engines.tensorflow.processes import (
    broadcast_seeds,
    check_same_checksums,
    gather_from_processes,
)
from layoutmap.engines.tensorflow.run_on import run_on
from layoutmap.engines.tensorflow.selfcheck import check_dtensor_results
from layoutmap.engines.tensorflow.variable import DVariable
from layoutmap.engines.tested import ImportErrorConverter

with ImportErrorConverter("tensorflow"):
    from tensorflow.python.autograph.core import config as autograph_config
    from tensorflow.python.autograph.core.config import DoNotConvert

# Autograph fails on some Python syntax and would show layoutmap's frames, so exclude layoutmap. The rule stays
# for the whole process, because it covers no other functions.
autograph_config.CONVERSION_RULES = (DoNotConvert("layoutmap"), *autograph_config.CONVERSION_RULES)

dtensor = tf.experimental.dtensor


class TensorFlowEngine:
    """Create and shard DTensors. `engine()` is the only instance. See `Engine` for the errors."""

    name = "tensorflow"
    array_types: tuple[type, ...] = (tf.Tensor, tf.Variable)
    several_dims = False
    make_array_mover = None
    list_device_names = staticmethod(list_device_names)
    simulate_devices = staticmethod(simulate_devices)
    bind_mesh = staticmethod(bind_mesh)
    get_layout = staticmethod(get_layout)
    find_placement = staticmethod(find_placement)
    iterate_shards = staticmethod(iterate_shards)
    iterate_device_values = staticmethod(iterate_device_values)
    to_numpy = staticmethod(to_numpy)
    canonicalize_values = staticmethod(canonicalize_values)
    check_dtype = staticmethod(check_dtype)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._programs: OrderedDict[Hashable, PiecewiseInitializer] = OrderedDict()

    # -- devices and layouts

    def check_layout(self, layout: Layout) -> None:
        """Raise an `EngineError` for a layout that no DTensor can have on any machine. No device is used."""
        make_native_specs(layout)

    def make_native_layout(self, layout: Layout, rank: int) -> tf.experimental.dtensor.Layout:
        """Return the `tf.experimental.dtensor.Layout` of a layout."""
        layout.check_rank((None,) * rank)
        return convert_to_native_layout(layout)

    # -- arrays

    def create_initial_values(
        self,
        assignments: Mapping[str, Assignment],
        initializers: Mapping[str, Initializer],
        progress: Callable[[str], object] | None = None,
    ) -> dict[str, tf.Tensor]:
        """Return initial values in their layouts. The values equal those of the unsharded initializer bit for bit.

        An initializer with a program is computed in pieces of at most 16 MiB, or one row. If it has no program, or its
        program cannot be computed in pieces, its global value is computed, sharded, and freed before the next one. Each
        process computes only the shards of its devices, from the seeds of process 0.
        """
        natives = [self._make_checked_layout(assignment) for assignment in assignments.values()]
        check_no_initializer_is_missing(assignments, initializers)
        for native in natives[:1]:
            check_dtensor_results(native.mesh)
        made: dict[str, tf.Tensor] = {}
        checksums: list[tuple[str, int]] = []
        try:
            with tf.init_scope():
                used = {key: initializers[key] for key in assignments}
                seeds = broadcast_seeds(used)
                for key, assignment in assignments.items():
                    made[key], computed = self._create_initial_value(assignment, used[key], seeds.get(key))
                    checksums.append((assignment.variable.path, computed))
                    if progress is not None:
                        progress(key)
                if dtensor.num_clients() > 1:
                    check_same_checksums(checksums)
        except BaseException:
            made.clear()
            raise
        return made

    def create_from_shards(
        self, assignment: Assignment, read: BlockReader, *, copy: bool = True
    ) -> tf.Tensor:
        """Create a tensor from shards that are read one by one (see `Engine.create_from_shards`)."""
        self._make_checked_layout(assignment)
        variable = assignment.variable
        with tf.init_scope():
            return create_from_blocks(
                variable.shape, assignment.layout, add_checks_to_block_reader(variable, read), copy=copy
            )

    def get_writable_memory(self, array: object) -> tuple[()]:
        """Return no memory, because numpy only gets copies of TensorFlow's values."""
        return ()

    def relayout(self, array: Any, layout: Layout, *, pad: bool = False) -> tf.Tensor:
        """Return the same values in a new layout. Unsharded tensors and values that numpy converts are accepted.

        The relayout has a gradient. Inside a `tf.function`, it is DTensor's, which may lose the sign of a zero.
        """
        if isinstance(array, self.array_types):
            if array.shape.rank is not None:  # in a tf.function it may be unknown: skip the check
                check_and_convert_layout(layout, tuple(array.shape))
            return relayout_and_keep_size_one_dims(relayout_tensor(array, layout), layout)
        values = canonicalize_values(array)
        check_and_convert_layout(layout, values.shape)
        with tf.init_scope():
            made = create_from_blocks(values.shape, layout, values.__getitem__)
        return relayout_and_keep_size_one_dims(made, layout)

    def make_variable(self, array: object, *, name: str = "", trainable: bool = True) -> DVariable:
        """Return a `DVariable` with the tensor as its value."""
        with tf.init_scope():  # a trailing slash makes the name ignore the current name scope
            return DVariable(array, name=f"{name or 'Variable'}/", trainable=trainable)

    def gather_from_processes(self, values: NumpyArray, mesh: Mesh) -> NumpyArray:
        """Return the values of each process, one row each. All processes must call this."""
        return gather_from_processes(values)

    def run_on(self, mesh: Mesh, draws: str = "exact") -> AbstractContextManager[None]:
        """Return a context manager in which operations on unsharded tensors run replicated on the mesh.

        It enters `tf.experimental.dtensor.default_mesh`, and also leaves it after an exception.
        """
        check_random_mode(self.name, draws)
        return run_on(mesh)

    def call_with_layout(
        self, function: Callable[..., Any], layout: Layout, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tf.Tensor:
        """Call a function, and return its result in a layout. The values equal an unsharded call's bit for bit.

        A function that takes no tensor, and fills an array or draws random numbers, is computed in pieces. Any other
        function is called without a mesh, and its result is sharded, since DTensor would draw other random numbers.
        """
        leaves = tf.nest.flatten((list(args), dict(kwargs)))
        if not any(isinstance(leaf, (tf.Tensor, tf.Variable, np.ndarray)) for leaf in leaves):
            program = PiecewiseInitializer(lambda _: function(*args, **kwargs), ())
            if not program.why_global:
                shape = get_static_shape(program.outputs[0])
                check_and_convert_layout(layout, shape)
                with tf.init_scope():
                    made = _create_tensor_in_pieces(program, (), shape, layout)
                return relayout_and_keep_size_one_dims(made, layout)
        results = tf.nest.flatten(function(*args, **kwargs))
        check_function_returns_one_array(function, len(results))
        return self.relayout(results[0], layout)

    # -- helpers

    def _make_checked_layout(self, assignment: Assignment) -> tf.experimental.dtensor.Layout:
        """Return DTensor's layout of an assignment, or raise if it does not support the dtype or the layout."""
        variable = assignment.variable
        check_dtype(variable.dtype, variable.path)
        return check_and_convert_layout(assignment.layout, variable.shape, variable.path)

    def _create_initial_value(
        self, assignment: Assignment, initializer: Initializer, seed: object
    ) -> tuple[tf.Tensor, int]:
        """Return an initial value, and its checksum, which is 0 unless several processes computed the whole value."""
        variable = assignment.variable
        if initializer.program is not None:
            program = self._get_or_make_program(initializer)
            if len(program.outputs) == 1:
                (output,) = program.outputs
                check_initial_value(variable, get_static_shape(output), output.dtype.name)
            if not program.why_global:
                return _create_tensor_in_pieces(program, seed, variable.shape, assignment.layout), 0
        across = dtensor.num_clients() > 1
        value = (
            initializer.program.function(seed)
            if across and initializer.program is not None
            else initializer.global_value()
        )
        values = to_numpy(value) if isinstance(value, self.array_types) else np.asarray(value)
        check_initial_value(variable, values.shape, values.dtype.name)
        made = create_from_blocks(variable.shape, assignment.layout, values.__getitem__)
        return made, compute_checksum(values) if across else 0

    def _get_or_make_program(self, initializer: Initializer) -> PiecewiseInitializer:
        assert initializer.program is not None
        key = (initializer.program.key, _get_seed_structure_and_dtypes(initializer.program.seed))
        with self._lock:
            if key in self._programs:
                self._programs.move_to_end(key)
                return self._programs[key]
        program = PiecewiseInitializer(initializer.program.function, initializer.program.seed)
        with self._lock:
            return store_in_bounded_cache(self._programs, key, program)


@functools.cache
def engine() -> TensorFlowEngine:
    """Return the only TensorFlow engine of this process."""
    return TensorFlowEngine()


def _create_tensor_in_pieces(
    program: PiecewiseInitializer, seed: object, shape: tuple[int, ...], layout: Layout
) -> tf.Tensor:
    native = convert_to_native_layout(layout)
    indices = [layout.shard_slices(shape, place) for place in native.mesh.local_device_ids()]
    blocks = program.compute_blocks(seed, indices)
    return create_from_blocks(
        shape, layout, lambda index: blocks.pop(get_starts_and_stops(index)), copy=False
    )


def _get_seed_structure_and_dtypes(seed: object) -> Hashable:
    leaves = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(seed)]
    return repr(tf.nest.map_structure(lambda _: 0, seed)), tuple((tuple(s.shape), s.dtype) for s in leaves)
