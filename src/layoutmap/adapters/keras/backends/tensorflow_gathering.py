"""Recompile functions that DTensor refuses, with more tensors gathered, and warn about it.

DTensor carries layouts from each operation to those before and after it, across layers, and refuses a whole step where
one operation meets layouts that it has no rule for. Which one will is known only when it compiles the step. It does so
before it runs any of it, so the step can be made again (why: decisions/0010).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Any

import keras
import tensorflow as tf

from layoutmap.adapters.keras.backends.tensorflow_unsupported import find_error_place, is_compiler_refusal
from layoutmap.adapters.keras.describing import list_layer_paths
from layoutmap.adapters.keras.protocol import KerasSession
from layoutmap.core.errors import LayoutMapWarning
from layoutmap.core.layout import Layout
from layoutmap.core.users_line import find_user_stacklevel
from layoutmap.engines.patches import set_temporarily
from layoutmap.engines.tensorflow.constraints import constrain_layout


class Gathering(IntEnum):
    """Degree to which the models of a scope gather during computation. Higher levels gather more."""

    AS_PLANNED = 0
    BETWEEN_LAYERS = 1
    WEIGHTS = 2
    ALL = 3


_DESCRIPTIONS: dict[int, str] = {
    Gathering.BETWEEN_LAYERS: "what goes from layer to layer is sharded along the batch only",
    Gathering.WEIGHTS: "each layer gathers its weights, and what goes between them is sharded along the batch only",
    Gathering.ALL: "each device gathers all weights and the whole batch, and computes all of it",
}
_INNER = frozenset({"keras", "tensorflow"})


class RegatheredFunction:
    """A function on the mesh that is recompiled with more gathering while DTensor refuses it.

    All that the scope's models compute later is gathered as far: they have the same layers.
    """

    def __init__(self, compiled: Callable[[], Any], session: KerasSession, what: str):
        self._at = functools.cache(lambda gathering: compiled())
        self._session = session
        self._what = what
        self._is_looked_at = False

    def trace_current(self, *args: object) -> Any:
        """Trace the current compiled function for some arguments."""
        with self._set_gathering():
            return self._at(self._session.gathering).get_concrete_function(*args)

    def _set_gathering(self) -> AbstractContextManager[None]:
        return set_temporarily(self._session.on_thread, "gathering", self._session.gathering)

    def __call__(self, *args: object) -> Any:
        """Call the function, and recompile it as needed."""
        before, place = self._session.gathering, dict[str, str]()
        if not self._is_looked_at:
            needed, place["operation"] = _find_needed_gathering(self.trace_current(*args).graph)
            self._session.gathering = max(needed, before)
        self._is_looked_at = True
        while True:
            try:
                with self._set_gathering():
                    result = self._at(self._session.gathering)(*args)
            except tf.errors.OpError as error:
                if "got a regular tensor" in error.message and self._replicate_captures(
                    self.trace_current(*args)
                ):
                    continue
                found = find_error_place(
                    error, self.trace_current(*args).graph, _describe_layers(self._session)
                )
                if not is_compiler_refusal(error) or self._session.gathering == Gathering.ALL:
                    self._session.gathering = before
                    error.layoutmap_place = found  # `explain_errors` reads this attribute
                    raise
                place = place if place.get("operation") else found
                self._session.gathering = Gathering(self._session.gathering + 1)
                continue
            if self._session.gathering != before:
                _warn_of_gathering(self._what, place, self._session)
            return result

    def _replicate_captures(self, function: Any) -> bool:
        """Replicate unsharded tensors that a traced function captures, and return whether there were any."""
        read = list(function.captured_inputs)
        plain = [i for i, each in enumerate(read) if _is_unsharded_tensor(each)]
        for i in plain:
            read[i] = self._session.engine.relayout(
                read[i], self._session.policy.replicated(read[i].shape.rank)
            )
        function.set_external_captures(read)
        return bool(plain)


def _is_unsharded_tensor(value: object) -> bool:
    is_array = isinstance(value, tf.Tensor) and value.dtype not in (tf.resource, tf.variant)
    return is_array and not tf.experimental.dtensor.is_dtensor(value)


def _describe_layers(session: KerasSession) -> dict[str, str]:
    """Return texts by layer name with the path and the layouts of nearby sharded weights."""
    layers = list_layer_paths(session.registry.layers())
    sharded: list[list[str]] = []
    for _, layer in layers:
        own = [*layer._trainable_variables, *layer._non_trainable_variables]
        laid_out = [(session.find_path(v), session.registry.get_layout(v)) for v in own]
        sharded.append([f"{path} {of}" for path, of in laid_out if of and not of.is_fully_replicated()])
    said = dict[str, str]()
    for i, (path, layer) in enumerate(layers):
        before, after = (next(filter(None, each), []) for each in (sharded[:i][::-1], sharded[i + 1 :]))
        near = ", ".join([*before, *sharded[i], *after])
        said[layer.name] = f"{path}, near {near}" if near else path
    return said


def _warn_of_gathering(what: str, place: dict[str, str], session: KerasSession) -> None:
    warning = LayoutMapWarning(
        f"{what}: {_DESCRIPTIONS[session.gathering]}",
        facts=place,
        why="DTensor has no correct rule for an operation in these layouts; weights and slots are "
        "stored as planned",
        fix="no action is needed; for more speed, leave the weights of the layers around that operation "
        "unsharded, or use JAX",
    )
    warnings.warn(warning, stacklevel=find_user_stacklevel(_INNER))


def _find_needed_gathering(graph: tf.Graph) -> tuple[Gathering, str]:
    """Return the lowest gathering level with correct results, and the operation that needs it."""
    # The input of each operation that may contain negative strides or axes.
    negative = {"StridedSlice": 3, "ConcatV2": -1}
    found = Gathering.AS_PLANNED, ""
    for op in graph.get_operations():
        value = tf.get_static_value(op.inputs[negative[op.type]]) if op.type in negative else None
        if op.type == "ScatterNd":  # DTensor applies global row indices to each device's shard
            return Gathering.ALL, op.type
        if value is not None and (value < 0).any():
            found = Gathering.WEIGHTS, op.type
    return found


def pin_layer_values(values: object, session: KerasSession) -> Any:
    """Pin a layer's inputs or outputs to a layout, so that no layout propagates across."""

    def pin(value: object) -> object:
        if not isinstance(value, tf.Tensor) or not value.shape.is_fully_defined() or not value.shape.rank:
            return value
        return pin_layout(value, _make_batch_layout(value.shape.as_list(), session))

    return keras.tree.map_structure(pin, values, none_is_leaf=True)


def pin_layout(value: tf.Tensor, layout: Layout) -> tf.Tensor:
    """Move a tensor to a layout, and keep its gradient in that layout."""

    @tf.custom_gradient
    def constrain(tensor: tf.Tensor) -> Any:
        def backward(upstream: tf.Tensor | tf.IndexedSlices) -> object:
            # Optimizers update single rows from IndexedSlices, as in unsharded Keras, so keep them.
            return upstream if isinstance(upstream, tf.IndexedSlices) else constrain_layout(upstream, layout)

        return constrain_layout(tensor, layout), backward

    return constrain(value) if value.dtype.is_floating else constrain_layout(value, layout)


def _make_batch_layout(shape: Sequence[Any], session: KerasSession) -> Layout:
    """Return the layout sharded along the batch only, or replicated for arrays that do not have its rows."""
    policy = session.policy
    rows = policy.batches.get(True)
    gathers_all = session.on_thread.gathering == Gathering.ALL
    if policy.batch_dim is None or rows is None or shape[0] % rows or gathers_all:
        return policy.replicated(len(shape))
    return Layout.batch_sharded(policy.mesh, policy.batch_dim, len(shape))


def is_pinned(layer: keras.Layer, session: KerasSession) -> bool:
    """Return whether a layer must compute separately, without layouts propagating in or out."""
    if session.on_thread.gathering == Gathering.AS_PLANNED:
        # A loop over time with sharded features would all-reduce in each step.
        return isinstance(layer, keras.layers.RNN)
    is_innermost = layer._trainable_variables or layer._non_trainable_variables or not layer._layers
    return bool(is_innermost) or session.on_thread.gathering == Gathering.ALL
