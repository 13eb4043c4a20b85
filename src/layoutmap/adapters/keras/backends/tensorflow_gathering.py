"""Recompile functions that DTensor refuses, with more tensors gathered, and warn about it.

DTensor propagates layouts from each operation to those before and after it, across layers. It refuses a whole step if
it has no rule for one operation in these layouts, which is known only when it compiles the step. It compiles before it
runs anything, so the step can be compiled again (decisions/0010).
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

from layoutmap.adapters.keras.backends.tensorflow_unsupported import (
    is_compiler_refusal,
    make_refused_op_facts,
)
from layoutmap.adapters.keras.describing import list_layer_paths
from layoutmap.adapters.keras.protocol import KerasSession
from layoutmap.core.errors import LayoutMapWarning
from layoutmap.core.layout import Layout
from layoutmap.core.users_line import find_user_stacklevel
from layoutmap.engines.patches import set_attribute_temporarily
from layoutmap.engines.tensorflow.constraints import constrain_layout


class GatheringLevel(IntEnum):
    """Tell how much the models of a scope gather while they compute. Higher levels gather more."""

    AS_PLANNED = 0
    BETWEEN_LAYERS = 1
    WEIGHTS = 2
    ALL = 3


_DESCRIPTIONS: dict[int, str] = {
    GatheringLevel.BETWEEN_LAYERS: "outputs of layers are sharded along the batch only",
    GatheringLevel.WEIGHTS: "each layer gathers its weights, and outputs of layers are sharded along the batch only",
    GatheringLevel.ALL: "each device gathers all weights and the whole batch, and repeats the whole computation",
}
_INNER = frozenset({"keras", "tensorflow"})


class RecompiledFunction:
    """Compile a function for the mesh. As long as DTensor refuses it, compile it again with more gathering.

    Later computations of the scope's models gather as much, because they have the same layers.
    """

    def __init__(self, compile_function: Callable[[], Any], session: KerasSession, description: str):
        self._compile_at_level = functools.cache(lambda level: compile_function())
        self._session = session
        self._description = description
        self._is_graph_checked = False

    def trace_at_gathering_level(self, *args: object) -> Any:
        """Return the function's trace for some arguments, compiled at the session's present gathering level."""
        with self._set_gathering_level_temporarily():
            return self._compile_at_level(self._session.gathering_level).get_concrete_function(*args)

    def _set_gathering_level_temporarily(self) -> AbstractContextManager[None]:
        """Make layers that this thread calls gather as much as the session needs so far, until the block ends."""
        return set_attribute_temporarily(
            self._session.thread_state, "gathering_level", self._session.gathering_level
        )

    def __call__(self, *args: object) -> Any:
        """Call the function. If DTensor refuses it, compile it again with more gathering."""
        before, operation_facts = self._session.gathering_level, dict[str, str]()
        if not self._is_graph_checked:
            needed, operation_facts["operation"] = _find_gathering_level_and_operation(
                self.trace_at_gathering_level(*args).graph
            )
            self._session.gathering_level = max(needed, before)
        self._is_graph_checked = True
        while True:
            try:
                with self._set_gathering_level_temporarily():
                    result = self._compile_at_level(self._session.gathering_level)(*args)
            except tf.errors.OpError as error:
                if "got a regular tensor" in error.message and self._replicate_captured_tensors(
                    self.trace_at_gathering_level(*args)
                ):
                    continue
                found = make_refused_op_facts(
                    error, self.trace_at_gathering_level(*args).graph, _describe_layers_by_name(self._session)
                )
                if not is_compiler_refusal(error) or self._session.gathering_level == GatheringLevel.ALL:
                    self._session.gathering_level = before
                    error.layoutmap_place = found  # `translate_compiler_refusals` reads this attribute
                    raise
                operation_facts = operation_facts if operation_facts.get("operation") else found
                self._session.gathering_level = GatheringLevel(self._session.gathering_level + 1)
                continue
            if self._session.gathering_level != before:
                _warn_of_gathering(self._description, operation_facts, self._session)
            return result

    def _replicate_captured_tensors(self, traced_function: Any) -> bool:
        """Replicate unsharded tensors that a traced function captures, and return whether there were any."""
        read = list(traced_function.captured_inputs)
        unsharded_indices = [i for i, each in enumerate(read) if _is_unsharded_tensor(each)]
        for i in unsharded_indices:
            read[i] = self._session.engine.relayout(
                read[i], self._session.policy.make_replicated_layout(read[i].shape.rank)
            )
        traced_function.set_external_captures(read)
        return bool(unsharded_indices)


def _is_unsharded_tensor(value: object) -> bool:
    is_array = isinstance(value, tf.Tensor) and value.dtype not in (tf.resource, tf.variant)
    return is_array and not tf.experimental.dtensor.is_dtensor(value)


def _describe_layers_by_name(session: KerasSession) -> dict[str, str]:
    """Return a dict from layer name to a text: the path, and the layouts of sharded weights in and near the layer."""
    layers = list_layer_paths(session.registry.list_layers())
    sharded: list[list[str]] = []
    for _, layer in layers:
        own = [*layer._trainable_variables, *layer._non_trainable_variables]
        laid_out = [(session.find_variable_path(v), session.registry.get_layout(v)) for v in own]
        sharded.append([f"{path} {of}" for path, of in laid_out if of and not of.is_fully_replicated()])
    said = dict[str, str]()
    for i, (path, layer) in enumerate(layers):
        before, after = (next(filter(None, each), []) for each in (sharded[:i][::-1], sharded[i + 1 :]))
        near = ", ".join([*before, *sharded[i], *after])
        said[layer.name] = f"{path}, near {near}" if near else path
    return said


def _warn_of_gathering(description: str, operation_facts: dict[str, str], session: KerasSession) -> None:
    """Warn that a function gathers more than planned. `operation_facts` describes the operation that needs it."""
    warning = LayoutMapWarning(
        f"{description}: {_DESCRIPTIONS[session.gathering_level]}",
        facts=operation_facts,
        why="DTensor has no correct rule for an operation in these layouts; weights and slots are "
        "stored as planned",
        fix="no action is needed; for more speed, leave the weights of the layers around that operation "
        "unsharded, or use JAX",
    )
    warnings.warn(warning, stacklevel=find_user_stacklevel(_INNER))


def _find_gathering_level_and_operation(graph: tf.Graph) -> tuple[GatheringLevel, str]:
    """Return the gathering level at which DTensor computes a graph correctly, and the type of an operation.

    The type is that of an operation that needs the level, or an empty text if nothing more must be gathered.
    """
    # DTensor computes slices with negative strides, and concatenations along negative axes, incorrectly. Map the type
    # of each operation to the position of the input with its strides or its axis.
    negative = {"StridedSlice": 3, "ConcatV2": -1}
    found = GatheringLevel.AS_PLANNED, ""
    for op in graph.get_operations():
        value = tf.get_static_value(op.inputs[negative[op.type]]) if op.type in negative else None
        if op.type == "ScatterNd":  # DTensor applies indices of global rows to each shard, so gather
            return GatheringLevel.ALL, op.type
        if value is not None and (value < 0).any():
            found = GatheringLevel.WEIGHTS, op.type
    return found


def relayout_to_batch_layout(values: object, session: KerasSession) -> Any:
    """Return a layer's inputs or outputs in the batch's layout, so that no other layout spreads between layers."""

    def relayout_value(value: object) -> object:
        if not isinstance(value, tf.Tensor) or not value.shape.is_fully_defined() or not value.shape.rank:
            return value
        return relayout_with_gradient(value, _make_batch_layout(value.shape.as_list(), session))

    return keras.tree.map_structure(relayout_value, values, none_is_leaf=True)


def relayout_with_gradient(value: tf.Tensor, layout: Layout) -> tf.Tensor:
    """Return a tensor in a layout. Its gradient gets the same layout."""

    @tf.custom_gradient
    def constrain_tensor(tensor: tf.Tensor) -> Any:
        def backward(upstream: tf.Tensor | tf.IndexedSlices) -> object:
            # Optimizers update single rows from IndexedSlices, as in unsharded Keras, so leave these unchanged.
            return upstream if isinstance(upstream, tf.IndexedSlices) else constrain_layout(upstream, layout)

        return constrain_layout(tensor, layout), backward

    return constrain_tensor(value) if value.dtype.is_floating else constrain_layout(value, layout)


def _make_batch_layout(shape: Sequence[Any], session: KerasSession) -> Layout:
    """Return a layout that shards only rows, or a replicated one for rows unlike the batch's or if all is gathered."""
    policy = session.policy
    rows = policy.batches.get(True)
    gathers_all = session.thread_state.gathering_level == GatheringLevel.ALL
    if policy.batch_dim is None or rows is None or shape[0] % rows or gathers_all:
        return policy.make_replicated_layout(len(shape))
    return Layout.batch_sharded(policy.mesh, policy.batch_dim, len(shape))


def allows_only_batch_layout(layer: keras.Layer, session: KerasSession) -> bool:
    """Return whether, at this gathering level, a layer's inputs and outputs may be sharded only along the batch."""
    if session.thread_state.gathering_level == GatheringLevel.AS_PLANNED:
        # A recurrent layer with sharded features would all-reduce in each time step, so replicate its features.
        return isinstance(layer, keras.layers.RNN)
    is_innermost = layer._trainable_variables or layer._non_trainable_variables or not layer._layers
    return bool(is_innermost) or session.thread_state.gathering_level == GatheringLevel.ALL
