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

from layoutmap.adapters.keras.backends.tensorflow_calls import compute_on_mesh, make_dense, place_on_mesh
from layoutmap.adapters.keras.backends.tensorflow_gathering import RegatheredFunction, pin_layout
from layoutmap.adapters.keras.backends.tensorflow_unsupported import explain_errors
from layoutmap.adapters.keras.protocol import KerasSession, WrappedMethods
from layoutmap.adapters.keras.training import (
    build_for_step,
    make_for_training,
    make_step_wraps,
    materialize_for_training,
)
from layoutmap.engines.agreement import CallSchedule
from layoutmap.engines.patches import Closing
from layoutmap.engines.tensorflow.combined import CombinedFunction
from layoutmap.engines.tensorflow.traces import check_trace_at_end

dtensor = tf.experimental.dtensor


def make_training_wraps(model: Any, session: KerasSession) -> WrappedMethods:
    """Return methods to wrap on a model so that its steps run compiled on the mesh."""
    schedule = CallSchedule()

    def step(name: str, own: object) -> Callable[..., object]:
        made = _MeshStep(model, session, name, schedule)
        return made.run_on_list if name == "predict" else made.run_on_iterator

    loops = {name: _wrap_loop(getattr(model, name), session) for name in ("fit", "evaluate", "predict")}
    return make_step_wraps(model, session, schedule, step, loops)


def _wrap_loop(loop: Callable[..., object], session: KerasSession) -> Callable[..., object]:
    """Wrap `fit` or a similar method to gather tensors on the mesh, because a `tf.data` pipeline has no mesh."""

    @functools.wraps(loop)
    def run_loop(*args: object, **kwargs: object) -> object:
        values: Any = keras.tree.map_structure(
            lambda value: _unshard_value(value, session), (args, kwargs), none_is_leaf=True
        )
        return loop(*values[0], **values[1])

    return run_loop


class _MeshStep:
    """A training, test, or predict step on the mesh."""

    def __init__(self, model: keras.Model, session: KerasSession, name: str, schedule: CallSchedule):
        self._model = model
        self._session = session
        self._name = name
        self._schedule = schedule
        self._known: set[object] = set()  # batch signatures for which the step is traced and checked
        self._compiled = RegatheredFunction(self._compile_step, session, f"{model.name}: the {name} step")

    def _compile_step(self) -> Callable[..., object]:
        """Return the step as a `tf.function`."""
        # DTensor may refuse the step, so it can be compiled again with more gathered (decisions/0010).
        # It waits for collectives, so its sums are combined (decisions/0274).
        return CombinedFunction(
            self._step, autograph=False, jit_compile=bool(self._model.jit_compile) or None
        )

    def _step(self, batch: object) -> object:
        if not tf.executing_eagerly():
            check_trace_at_end(f"the {self._name} step")
        # Custom gradients, such as those of float8 layers, run after their layer's call, so keep the context open.
        with _pin_outputs(self._model, self._session), compute_on_mesh(self._session):
            return getattr(self._model, f"{self._name}_step")(batch)

    def run_on_iterator(self, iterator: Iterator[object]) -> object:
        """Run the steps of one execution on batches of an iterator, and return the last result."""
        logs: object = None
        for number in range(self._model.steps_per_execution):
            try:
                batch = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if not number:
                    raise
                break
            logs = self._run_on_batch(batch)
        return self._unshard(logs)

    def run_on_list(self, batches: Sequence[object]) -> object:
        """Run the step on several batches, one after the other."""
        results = [self._unshard(self._run_on_batch(batch)) for batch in batches]
        if len(results) == 1:
            return results[0]
        return keras.tree.map_structure(lambda *parts: tf.concat(parts, axis=0), *results)

    def _run_on_batch(self, batch: object) -> object:
        batch = keras.tree.map_structure(
            lambda a: None if isinstance(a, tf.experimental.Optional) else a,
            make_dense(batch, self._model),
            none_is_leaf=True,
        )
        signature = tuple(
            (tuple(each.shape), str(each.dtype)) if hasattr(each, "shape") else type(each)
            for each in keras.tree.flatten(batch)
        )
        if signature not in self._known:
            self._create_variables(batch)
        batch = place_on_mesh(batch, self._session, self._schedule)
        with explain_errors(f"{self._model.name}: the {self._name} step"):
            if self._model.run_eagerly:
                with self._session.lock, self._session.engine.run_on(self._session.policy.mesh):
                    return self._step(batch)
            self._known.add(signature)
            with DisabledGraphOptimizer(self._session):
                return self._compiled(batch)

    def _unshard(self, values: object) -> Any:
        return keras.tree.map_structure(lambda value: _unshard_value(value, self._session), values)

    def _create_variables(self, batch: object) -> None:
        """Create the weights, metrics, and slots that the step would create in its trace."""
        model = self._model
        if self._name == "predict":
            build_for_step(model, self._session, batch)
            materialize_for_training(model, self._session)
        else:
            make_for_training(model, self._session, batch)


def _unshard_value(value: object, session: KerasSession) -> object:
    """Return a value, or an unsharded tensor for one on the mesh, which callbacks and `tf.data` can read."""
    if not isinstance(value, tf.Tensor) or not dtensor.is_dtensor(value):
        return value
    return tf.constant(session.engine.to_numpy(value))


def _constrain_to_batch_layout(output: Any, session: KerasSession) -> object:
    shape: Any = output.shape.as_list() if isinstance(output, tf.Tensor) else [None]
    return output if None in shape else pin_layout(output, session.policy.derive_batch_layout(shape))


@contextmanager
def _pin_outputs(model: keras.Model, session: KerasSession) -> Generator[None]:
    """Shard a model's outputs and their gradients only along the batch, until the block ends.

    Losses and metrics look along the other axes, and some of DTensor's operations are wrong on a sharded axis.
    """
    call = model.call

    @functools.wraps(call)
    def call_pinned(*args: object, **kwargs: object) -> object:
        if session.on_thread.call_depth:
            return call(*args, **kwargs)
        return keras.tree.map_structure(
            lambda y: _constrain_to_batch_layout(y, session), call(*args, **kwargs)
        )

    own = model.__dict__
    own["call"] = call_pinned
    try:
        yield
    finally:
        own["call"] = call


_ALWAYS_THERE = {"disable_model_pruning", "disable_meta_optimizer"}  # options that TensorFlow always lists
_options_lock = threading.RLock()
_open_blocks: weakref.WeakSet[DisabledGraphOptimizer] = weakref.WeakSet()


class DisabledGraphOptimizer(Closing):
    """Disable TensorFlow's graph optimizer for graphs on CPUs until the block ends.

    TensorFlow would optimize the graph of a step once for each device: half of the time of the first step on 8, and
    no later one is faster for it. On accelerators, which that may serve, it is left alone, and wherever a program has
    chosen optimizations itself.
    """

    def __init__(self, session: KerasSession) -> None:
        mesh = session.engine.native(session.policy.replicated(0), 0).mesh
        self._is_on_cpu = mesh.device_type() == "CPU"

    def open(self) -> None:
        """Disable the optimizer."""
        options = tf.config.optimizer
        with _options_lock:
            chosen = options.get_experimental_options()
            wanted = self._is_on_cpu and not chosen.keys() - _ALWAYS_THERE
            if wanted and (_open_blocks or not chosen.get("disable_meta_optimizer")):
                _open_blocks.add(self)
                options.set_experimental_options({"disable_meta_optimizer": True})

    def close(self) -> None:
        """Restore the options."""
        with _options_lock:
            if self in _open_blocks:
                # While another thread is inside, restoring the saved options would be too early for it.
                found = {} if len(_open_blocks) > 1 else {"disable_meta_optimizer": False}
                tf.config.optimizer.set_experimental_options(found)
                _open_blocks.discard(self)
