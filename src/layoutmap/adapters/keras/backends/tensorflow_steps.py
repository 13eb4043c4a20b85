"""Run training, test, and predict steps on the mesh."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from layoutmap.adapters.keras.backends.tensorflow_calls import (
    compare_and_place_batch,
    compute_on_mesh,
    convert_sparse_inputs_to_dense,
)
from layoutmap.adapters.keras.backends.tensorflow_gathering import RecompiledFunction, relayout_with_gradient
from layoutmap.adapters.keras.backends.tensorflow_unsupported import translate_compiler_refusals
from layoutmap.adapters.keras.protocol import KerasSession, WrappedMethods
from layoutmap.adapters.keras.training import (
    build_model_for_batch,
    create_training_variables,
    make_step_factory_wrappers,
    materialize_training_variables,
)
from layoutmap.engines.agreement import CallComparisonSchedule
from layoutmap.engines.patches import SelfClosingContext
from layoutmap.engines.tensorflow.combined import StepWithWritesAtEnd
from layoutmap.engines.tensorflow.traces import check_writes_at_trace_end

dtensor = tf.experimental.dtensor


def make_training_method_wrappers(model: Any, session: KerasSession) -> WrappedMethods:
    """Return wrappers of a model's methods, by name. They run the model's steps compiled on the mesh."""
    schedule = CallComparisonSchedule()

    def make_step(step_name: str, make_keras_step: object) -> Callable[..., object]:
        mesh_step = _MeshStep(model, session, step_name, schedule)
        return mesh_step.run_on_all_batches if step_name == "predict" else mesh_step.run_on_next_batches

    loops = {
        name: _wrap_to_unshard_arguments(getattr(model, name), session)
        for name in ("fit", "evaluate", "predict")
    }
    return make_step_factory_wrappers(model, session, schedule, make_step, loops)


def _wrap_to_unshard_arguments(loop: Callable[..., object], session: KerasSession) -> Callable[..., object]:
    """Wrap `fit` or a similar method to unshard its arguments, because a `tf.data` pipeline has no mesh."""

    @functools.wraps(loop)
    def run_loop_with_unsharded_arguments(*args: object, **kwargs: object) -> object:
        values: Any = keras.tree.map_structure(
            lambda value: _unshard_value(value, session), (args, kwargs), none_is_leaf=True
        )
        return loop(*values[0], **values[1])

    return run_loop_with_unsharded_arguments


class _MeshStep:
    """Run a training, test, or predict step on the mesh."""

    def __init__(
        self, model: keras.Model, session: KerasSession, name: str, schedule: CallComparisonSchedule
    ):
        self._model = model
        self._session = session
        self._name = name
        self._schedule = schedule
        self._traced_signatures = set[object]()  # signatures of the batches for which the step was traced
        self._compiled = RecompiledFunction(self._compile_step, session, f"{model.name}: the {name} step")

    def _compile_step(self) -> Callable[..., object]:
        """Return the step as a `tf.function`."""
        # DTensor may refuse the step, so compile a new function each time (decisions/0010).
        # A step waits for each of its all-reduces, so combine them (decisions/0274).
        return StepWithWritesAtEnd(
            self._run_keras_step, autograph=False, jit_compile=bool(self._model.jit_compile) or None
        )

    def _run_keras_step(self, batch: object) -> object:
        """Run Keras's step of the model on a batch that is on the mesh, eagerly or in a trace."""
        if not tf.executing_eagerly():
            check_writes_at_trace_end(f"the {self._name} step")
        # Custom gradients, such as those of float8 layers, run after their layer's call, so open both contexts here.
        with (
            _shard_outputs_along_batch_temporarily(self._model, self._session),
            compute_on_mesh(self._session),
        ):
            return getattr(self._model, f"{self._name}_step")(batch)

    def run_on_next_batches(self, iterator: Iterator[object]) -> object:
        """Run `steps_per_execution` steps on the next batches of an iterator, and return the last result."""
        logs: object = None
        for number in range(self._model.steps_per_execution):
            try:
                batch = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if not number:
                    raise
                break
            logs = self._run_on_batch(batch)
        return self._unshard_values(logs)

    def run_on_all_batches(self, batches: Sequence[object]) -> object:
        """Run the step on several batches one after the other, and return their results as one."""
        results = [self._unshard_values(self._run_on_batch(batch)) for batch in batches]
        if len(results) == 1:
            return results[0]
        return keras.tree.map_structure(lambda *parts: tf.concat(parts, axis=0), *results)

    def _run_on_batch(self, batch: object) -> object:
        """Create missing variables, place a batch on the mesh, and return the compiled step's result."""
        batch = keras.tree.map_structure(
            lambda a: None if isinstance(a, tf.experimental.Optional) else a,
            convert_sparse_inputs_to_dense(batch, self._model),
            none_is_leaf=True,
        )
        signature = tuple(
            (tuple(each.shape), str(each.dtype)) if hasattr(each, "shape") else type(each)
            for each in keras.tree.flatten(batch)
        )
        if signature not in self._traced_signatures:
            self._create_missing_variables(batch)
        batch = compare_and_place_batch(batch, self._session, self._schedule)
        with translate_compiler_refusals(f"{self._model.name}: the {self._name} step"):
            if self._model.run_eagerly:
                with self._session.lock, self._session.engine.run_on(self._session.policy.mesh):
                    return self._run_keras_step(batch)
            self._traced_signatures.add(signature)
            with DisabledGraphOptimizer(self._session):
                return self._compiled(batch)

    def _unshard_values(self, values: object) -> Any:
        return keras.tree.map_structure(lambda value: _unshard_value(value, self._session), values)

    def _create_missing_variables(self, batch: object) -> None:
        """Create the weights, metrics, and slots that the step would create in its trace."""
        model = self._model
        if self._name == "predict":
            build_model_for_batch(model, self._session, batch)
            materialize_training_variables(model, self._session)
        else:
            create_training_variables(model, self._session, batch)


def _unshard_value(value: object, session: KerasSession) -> object:
    """Return a tensor on the mesh as an unsharded one, which callbacks can read. Return other values unchanged."""
    if not isinstance(value, tf.Tensor) or not dtensor.is_dtensor(value):
        return value
    return tf.constant(session.engine.to_numpy(value))


def _constrain_to_batch_layout(output: Any, session: KerasSession) -> object:
    shape: Any = output.shape.as_list() if isinstance(output, tf.Tensor) else [None]
    if None in shape:
        return output
    return relayout_with_gradient(output, session.policy.derive_batch_layout(shape))


@contextmanager
def _shard_outputs_along_batch_temporarily(model: keras.Model, session: KerasSession) -> Generator[None]:
    """Shard a model's outputs and their gradients only along the batch, until the block ends.

    Losses and metrics compute along the other axes, where some DTensor operations are incorrect if these are sharded.
    """
    call = model.call

    @functools.wraps(call)
    def call_with_sharded_outputs(*args: object, **kwargs: object) -> object:
        if session.thread_state.call_depth:
            return call(*args, **kwargs)
        return keras.tree.map_structure(
            lambda y: _constrain_to_batch_layout(y, session), call(*args, **kwargs)
        )

    own = model.__dict__
    own["call"] = call_with_sharded_outputs
    try:
        yield
    finally:
        own["call"] = call


# TensorFlow lists these options even if nobody sets them, so they are not the user's choice.
_ALWAYS_THERE = {"disable_model_pruning", "disable_meta_optimizer"}
_options_lock = threading.RLock()
_open_blocks: weakref.WeakSet[DisabledGraphOptimizer] = weakref.WeakSet()


class DisabledGraphOptimizer(SelfClosingContext):
    """Disable TensorFlow's graph optimizer for graphs on CPUs until the block ends.

    TensorFlow would optimize the graph of a step once for each device. On 8 devices, that takes half of the time of
    the first step, and makes no later step faster. The optimizer stays enabled on accelerators, where it may be
    useful, and in programs that choose optimizations themselves.
    """

    def __init__(self, session: KerasSession) -> None:
        mesh = session.engine.make_native_layout(session.policy.make_replicated_layout(0), 0).mesh
        self._is_on_cpu = mesh.device_type() == "CPU"

    def open_context(self) -> None:
        """Disable the graph optimizer, unless the program chose optimizations itself, or the mesh has accelerators."""
        options = tf.config.optimizer
        with _options_lock:
            chosen = options.get_experimental_options()
            wanted = self._is_on_cpu and not chosen.keys() - _ALWAYS_THERE
            if wanted and (_open_blocks or not chosen.get("disable_meta_optimizer")):
                _open_blocks.add(self)
                options.set_experimental_options({"disable_meta_optimizer": True})

    def close_context(self) -> None:
        """Enable the graph optimizer, unless another thread is still in a block that disables it."""
        with _options_lock:
            if self in _open_blocks:
                found = {} if len(_open_blocks) > 1 else {"disable_meta_optimizer": False}
                tf.config.optimizer.set_experimental_options(found)
                _open_blocks.discard(self)
