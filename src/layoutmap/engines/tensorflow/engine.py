"""Create and shard tensors with `tf.experimental.dtensor`.

A layout is a `tf.experimental.dtensor.Layout`. DTensor shards an axis over one mesh dim only, so an axis over several
is refused. Only public names of TensorFlow are used; how far a random counter moves for each number is not documented,
and is under test. Tested with TensorFlow 2.21.

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

from layoutmap.core.blocks import BlockReader, NumpyArray, get_slice_ends
from layoutmap.core.checksums import compute_checksum
from layoutmap.core.initializers import Initializer
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.variables import Assignment
from layoutmap.engines.checks import (
    check_draws,
    check_initial_value,
    check_initializers,
    check_one_result,
    store_in_cache,
    wrap_reader,
)
from layoutmap.engines.tensorflow.arrays import (
    canonicalize,
    check_dtype,
    convert_layout,
    describe_placement,
    fit_layout,
    from_blocks,
    get_layout,
    iterate_by_device,
    iterate_shards,
    move_tensor,
    name_single_dims,
    read_shape,
    to_numpy,
)
from layoutmap.engines.tensorflow.devices import (
    bind_mesh,
    list_device_names,
    make_native_specs,
    simulate_devices,
)
from layoutmap.engines.tensorflow.pieces import PieceProgram
from layoutmap.engines.tensorflow.processes import check_equal_everywhere, gather_values, share_seeds
from layoutmap.engines.tensorflow.run_on import run_on
from layoutmap.engines.tensorflow.selfcheck import check_computing
from layoutmap.engines.tensorflow.variable import DVariable
from layoutmap.engines.tested import Needed

with Needed("tensorflow"):
    from tensorflow.python.autograph.core import config as autograph_config
    from tensorflow.python.autograph.core.config import DoNotConvert

# Autograph fails on some Python syntax and would show this library's frames. The rule stays for the whole process,
# because it covers only functions of this library.
autograph_config.CONVERSION_RULES = (DoNotConvert("layoutmap"), *autograph_config.CONVERSION_RULES)

dtensor = tf.experimental.dtensor


class TensorFlowEngine:
    """Create and shard DTensors. `engine()` is the only instance. See `Engine` for the errors."""

    name = "tensorflow"
    array_types: tuple[type, ...] = (tf.Tensor, tf.Variable)
    several_dims = False
    make_mover = None
    devices = staticmethod(list_device_names)
    simulate = staticmethod(simulate_devices)
    bind = staticmethod(bind_mesh)
    get_layout = staticmethod(get_layout)
    describe_placement = staticmethod(describe_placement)
    to_shards = staticmethod(iterate_shards)
    iterate_by_device = staticmethod(iterate_by_device)
    to_numpy = staticmethod(to_numpy)
    canonicalize = staticmethod(canonicalize)
    check_dtype = staticmethod(check_dtype)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._programs: OrderedDict[Hashable, PieceProgram] = OrderedDict()

    # -- devices and layouts

    def check_layout(self, layout: Layout) -> None:
        """Raise for a layout that no DTensor can have on any machine. This starts nothing."""
        make_native_specs(layout)

    def native(self, layout: Layout, rank: int) -> tf.experimental.dtensor.Layout:
        """Return the `tf.experimental.dtensor.Layout` of a layout."""
        layout.check_rank((None,) * rank)
        return convert_layout(layout)

    # -- arrays

    def create(
        self,
        assignments: Mapping[str, Assignment],
        initializers: Mapping[str, Initializer],
        progress: Callable[[str], object] | None = None,
    ) -> dict[str, tf.Tensor]:
        """Compute initial values directly in their layouts, with the bits of the unsharded initializer.

        An initializer with a program is computed in pieces of at most 16 MiB, or one row: random numbers of TensorFlow
        can be computed from any place on. The global value of one without a program, or with one that cannot be
        computed in pieces, is computed, sharded, and freed before the next. Each process computes only what its devices
        hold, from the seeds of process 0.
        """
        natives = [self._check_assignment(assignment) for assignment in assignments.values()]
        check_initializers(assignments, initializers)
        for native in natives[:1]:
            check_computing(native.mesh)
        made: dict[str, tf.Tensor] = {}
        checksums: list[tuple[str, int]] = []
        try:
            with tf.init_scope():
                used = {key: initializers[key] for key in assignments}
                seeds = share_seeds(used)
                for key, assignment in assignments.items():
                    made[key], computed = self._create_value(assignment, used[key], seeds.get(key))
                    checksums.append((assignment.variable.path, computed))
                    if progress is not None:
                        progress(key)
                if dtensor.num_clients() > 1:
                    check_equal_everywhere(checksums)
        except BaseException:
            made.clear()
            raise
        return made

    def from_shards(self, assignment: Assignment, read: BlockReader, *, copy: bool = True) -> tf.Tensor:
        """Create a tensor from shards that are read one by one (see `Engine.from_shards`)."""
        self._check_assignment(assignment)
        variable = assignment.variable
        with tf.init_scope():
            return from_blocks(variable.shape, assignment.layout, wrap_reader(variable, read), copy=copy)

    def get_writable_memory(self, array: object) -> tuple[()]:
        """Return no memory, because numpy only gets copies of TensorFlow's values."""
        return ()

    def relayout(self, array: Any, layout: Layout, *, pad: bool = False) -> tf.Tensor:
        """Move values to another layout. Unsharded tensors and values that numpy converts are accepted, too.

        Gradients pass through it. Inside a `tf.function` DTensor does it, where the sign of a zero may be lost.
        """
        if isinstance(array, self.array_types):
            if array.shape.rank is not None:  # the rank may be unknown inside a tf.function
                fit_layout(layout, tuple(array.shape))
            return name_single_dims(move_tensor(array, layout), layout)
        values = canonicalize(array)
        fit_layout(layout, values.shape)
        with tf.init_scope():
            made = from_blocks(values.shape, layout, values.__getitem__)
        return name_single_dims(made, layout)

    def variable(self, array: object, *, name: str = "", trainable: bool = True) -> DVariable:
        """Return a `DVariable` with the tensor as its value."""
        with tf.init_scope():  # a trailing slash makes the name ignore the current name scope
            return DVariable(array, name=f"{name or 'Variable'}/", trainable=trainable)

    def all_gather(self, values: NumpyArray, mesh: Mesh) -> NumpyArray:
        """Gather values from each process, one row each. All processes must call this."""
        return gather_values(values)

    def run_on(self, mesh: Mesh, draws: str = "exact") -> AbstractContextManager[None]:
        """Run operations on unsharded tensors replicated on the mesh, while the context is open.

        It is `tf.experimental.dtensor.default_mesh`, which an exception does not leave switched on.
        """
        check_draws(self.name, draws)
        return run_on(mesh)

    def call(
        self, function: Callable[..., Any], layout: Layout, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tf.Tensor:
        """Compute the result of a function in a layout, with the bits of the unsharded call.

        A function that fills an array or draws random numbers, and takes no tensor, is computed in pieces. Any other is
        called as it is, and its result sharded: DTensor would compute other random numbers.
        """
        leaves = tf.nest.flatten((list(args), dict(kwargs)))
        if not any(isinstance(leaf, (tf.Tensor, tf.Variable, np.ndarray)) for leaf in leaves):
            program = PieceProgram(lambda _: function(*args, **kwargs), ())
            if not program.why_global:
                shape = read_shape(program.outputs[0])
                fit_layout(layout, shape)
                with tf.init_scope():
                    made = _create_in_pieces(program, (), shape, layout)
                return name_single_dims(made, layout)
        results = tf.nest.flatten(function(*args, **kwargs))
        check_one_result(function, len(results))
        return self.relayout(results[0], layout)

    # -- helpers

    def _check_assignment(self, assignment: Assignment) -> tf.experimental.dtensor.Layout:
        """Return DTensor's layout of an assignment after checks that need no tensor."""
        variable = assignment.variable
        check_dtype(variable.dtype, variable.path)
        return fit_layout(assignment.layout, variable.shape, variable.path)

    def _create_value(
        self, assignment: Assignment, initializer: Initializer, seed: object
    ) -> tuple[tf.Tensor, int]:
        """Create an initial value. With several processes, also return a checksum of each one's computation."""
        variable = assignment.variable
        if initializer.program is not None:
            program = self._get_program(initializer)
            if len(program.outputs) == 1:
                (output,) = program.outputs
                check_initial_value(variable, read_shape(output), output.dtype.name)
            if not program.why_global:
                return _create_in_pieces(program, seed, variable.shape, assignment.layout), 0
        across = dtensor.num_clients() > 1
        value = (
            initializer.program.function(seed)
            if across and initializer.program is not None
            else initializer.global_value()
        )
        values = to_numpy(value) if isinstance(value, self.array_types) else np.asarray(value)
        check_initial_value(variable, values.shape, values.dtype.name)
        made = from_blocks(variable.shape, assignment.layout, values.__getitem__)
        return made, compute_checksum(values) if across else 0

    def _get_program(self, initializer: Initializer) -> PieceProgram:
        assert initializer.program is not None
        key = (initializer.program.key, _make_signature(initializer.program.seed))
        with self._lock:
            if key in self._programs:
                self._programs.move_to_end(key)
                return self._programs[key]
        program = PieceProgram(initializer.program.function, initializer.program.seed)
        with self._lock:
            return store_in_cache(self._programs, key, program)


@functools.cache
def engine() -> TensorFlowEngine:
    """Return the only TensorFlow engine of this process."""
    return TensorFlowEngine()


def _create_in_pieces(
    program: PieceProgram, seed: object, shape: tuple[int, ...], layout: Layout
) -> tf.Tensor:
    native = convert_layout(layout)
    indices = [layout.shard_slices(shape, place) for place in native.mesh.local_device_ids()]
    blocks = program.compute_blocks(seed, indices)
    return from_blocks(shape, layout, lambda index: blocks.pop(get_slice_ends(index)), copy=False)


def _make_signature(seed: object) -> Hashable:
    leaves = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(seed)]
    return repr(tf.nest.map_structure(lambda _: 0, seed)), tuple((tuple(s.shape), s.dtype) for s in leaves)
