"""Training, test and predict steps on the mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from layoutmap.adapters.keras.backends.tensorflow_calls import densified, on_mesh, placed
from layoutmap.adapters.keras.backends.tensorflow_gathering import Regathered, pinned
from layoutmap.adapters.keras.backends.tensorflow_options import Unoptimized
from layoutmap.adapters.keras.backends.tensorflow_unsupported import explained
from layoutmap.adapters.keras.protocol import KerasSession, Wraps
from layoutmap.adapters.keras.training import (
    build_for_step,
    make_for_training,
    materialize_for_training,
    step_wraps,
)
from layoutmap.core.errors import ScopeError
from layoutmap.engines.agreement import CallSchedule

dtensor = tf.experimental.dtensor


def training_wraps(model: Any, session: KerasSession) -> Wraps:
    """Return what to wrap on a model: steps that take each batch off the iterator and run compiled on the mesh."""
    schedule = CallSchedule()

    def step(name: str, own: object) -> Callable[..., object]:
        made = _MeshStep(model, session, name, schedule)
        return made.on_list if name == "predict" else made.on_iterator

    return step_wraps(model, session, schedule, step)


class _MeshStep:
    """A training, test or predict step on the mesh."""

    def __init__(self, model: keras.Model, session: KerasSession, name: str, schedule: CallSchedule):
        self._model = model
        self._session = session
        self._name = name
        self._schedule = schedule
        self._known: set[object] = set()  # shapes and types of batches for which all is made and checked
        self._compiled = Regathered(self._traced, session, f"{model.name}: the {name} step")

    def _traced(self) -> Callable[..., object]:
        """The step, to be compiled."""  # why: decisions/0010
        return tf.function(self._step, autograph=False, jit_compile=bool(self._model.jit_compile) or None)

    def _step(self, batch: object) -> object:
        # A function that computes a gradient runs after the call of its layer, as that of layers in float8.
        with _outputs_by_rows(self._model, self._session), on_mesh(self._session):
            return getattr(self._model, f"{self._name}_step")(batch)

    def on_iterator(self, iterator: Iterator[object]) -> object:
        """As many steps as one execution has; returns what the last one does."""
        logs: object = None
        for number in range(self._model.steps_per_execution):
            try:
                batch = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if not number:
                    raise
                break
            logs = self._run(batch)
        return keras.tree.map_structure(self._plain, logs)

    def on_list(self, batches: Sequence[object]) -> object:
        """Return the predictions for some batches, one after the other."""
        results = [keras.tree.map_structure(self._plain, self._run(batch)) for batch in batches]
        if len(results) == 1:
            return results[0]
        return keras.tree.map_structure(lambda *parts: tf.concat(parts, axis=0), *results)

    def _run(self, batch: object) -> object:
        batch = keras.tree.map_structure(
            lambda a: None if isinstance(a, tf.experimental.Optional) else a,
            densified(batch, self._model),
            none_is_leaf=True,
        )
        signature = tuple(
            (tuple(each.shape), str(each.dtype)) if hasattr(each, "shape") else type(each)
            for each in keras.tree.flatten(batch)
        )
        if signature not in self._known:
            self._make_all(batch)
        batch = placed(batch, self._session, self._schedule)
        with explained(f"{self._model.name}: the {self._name} step"):
            if self._model.run_eagerly:
                with self._session.lock, self._session.engine.run_on(self._session.policy.mesh):
                    return self._step(batch)
            if signature not in self._known:
                self._check_captured(batch)
            self._known.add(signature)
            with Unoptimized(self._session):
                return self._compiled(batch)

    def _make_all(self, batch: object) -> None:
        """Make what the step would make while it is traced: weights, metrics, slots."""
        model = self._model
        if self._name == "predict":
            build_for_step(model, self._session, batch)
            materialize_for_training(model, self._session)
        else:
            make_for_training(model, self._session, batch)

    def _check_captured(self, batch: object) -> None:
        """Refuse a step that writes to a variable outside of the mesh: every device would write to it."""
        traced = self._compiled.traced(batch)
        written = _written(traced.graph)
        for variable in traced.graph.variables:
            if not dtensor.is_dtensor(variable) and variable.handle.ref() in written:
                raise ScopeError(
                    f"{variable.name}: the {self._name} step writes to a variable that is not on the mesh",
                    facts={"shape": str(tuple(variable.shape)), "model": self._model.name},
                    why="every device would write to it, so a counter would count each step many times",
                    fix="make it with self.add_weight or keras.Variable inside of the scope, as an attribute of a "
                    "layer, or as layoutmap.DVariable",
                )

    def _plain(self, value: object) -> object:
        """Return a result as a plain tensor, which callbacks and `predict` can read."""
        if not isinstance(value, tf.Tensor) or not dtensor.is_dtensor(value):
            return value
        return tf.constant(self._session.engine.to_numpy(value))


def _by_rows(output: Any, session: KerasSession) -> object:
    shape: Any = output.shape.as_list() if isinstance(output, tf.Tensor) else [None]
    return output if None in shape else pinned(output, session.policy.derive_batch_layout(shape), session)


@contextmanager
def _outputs_by_rows(model: keras.Model, session: KerasSession) -> Generator[None]:
    """While open, what a model returns is sharded along the batch only, and so is its gradient.

    Losses and metrics look along the other axes, and some of DTensor's operations are wrong on a sharded axis.
    """
    call = model.call

    @functools.wraps(call)
    def by_rows(*args: object, **kwargs: object) -> object:
        if session.on_thread.call_depth:
            return call(*args, **kwargs)
        return keras.tree.map_structure(lambda y: _by_rows(y, session), call(*args, **kwargs))

    own = model.__dict__
    own["call"] = by_rows
    try:
        yield
    finally:
        own["call"] = call


_CALLS = ("PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile", "If", "Case")


def _written(graph: tf.Graph) -> set[object]:
    """The handles, outside of a graph, of the variables that it writes to, in functions that it calls too."""
    written: set[object] = set()
    inside = {inner.ref(): outer for outer, inner in graph.captures}
    for op in graph.get_operations():
        if op.type.startswith(("Assign", "ResourceScatter", "ResourceApply", "ResourceSparse")):
            handle = op.inputs[0]
            if handle.ref() in inside:
                written.add(inside[handle.ref()].ref())
        elif op.type in _CALLS:
            # What a called function does is not looked into: taken as written to.
            known = (i for i in op.inputs if i.ref() in inside and i.dtype == tf.resource)
            written |= {inside[i.ref()].ref() for i in known}
    return written
