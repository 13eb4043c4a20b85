"""Handle `quantize` and `enable_lora`, in which Keras replaces the variables of a layer."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import keras

from layoutmap.adapters.keras.protocol import KerasSession
from layoutmap.core.errors import PlanError

_GONE = object()


@contextmanager
# Quantizing can fail halfway, so restore the layer: all or nothing changes (decisions/0056).
def restore_layer_on_plan_error(layer: keras.Layer, session: KerasSession) -> Generator[None]:
    """Restore a layer's variables if the block, such as `quantize` or `enable_lora`, raises a plan error.

    Layouts of the new variables are assigned after all exist. If that fails, the layer and its sublayers get their old
    variables back with their values. So a kernel that was quantized stays in memory until then.
    """
    before = [_LayerState(each) for each in layer._flatten_layers()]
    try:
        yield
    except PlanError:
        for state in before:
            for variable in state.restore_layer():
                session.registry.remove_variable(variable)
        session.materialize_variables()  # plan again with the restored variables
        raise


class _LayerState:
    """Hold the attributes and own variables of one layer, so that later changes can be undone."""

    def __init__(self, layer: keras.Layer):
        self._layer = layer
        self._attributes = dict(layer.__dict__)
        self._stores = [(s, list(s)) for s in (layer._trainable_variables, layer._non_trainable_variables)]
        self._trained = [(v, v.trainable) for _, variables in self._stores for v in variables]

    def restore_layer(self) -> list[keras.Variable]:
        """Undo the changes to the layer, and return the variables that it had gained."""
        layer, now = self._layer, dict(self._layer.__dict__)
        old = {id(variable) for variable, _ in self._trained}
        new = [variable for store, _ in self._stores for variable in store if id(variable) not in old]
        layer._tracker.unlock()
        for variable, trainable in self._trained:
            if variable.trainable != trainable:
                variable.trainable = trainable
        for name in now.keys() - self._attributes.keys():
            delattr(layer, name)
        for name, value in self._attributes.items():
            if now.get(name, _GONE) is not value:
                setattr(layer, name, value)
        for store, variables in self._stores:
            store[:] = variables
        own = layer.__dict__
        for name in self._attributes:  # paths depend on the order of attributes, so restore it
            own[name] = own.pop(name)
        if layer.built:
            layer._tracker.lock()
        return new


@contextmanager
def unshard_own_weights_temporarily(layer: keras.Layer, session: KerasSession) -> Generator[None]:
    """Replace a layer's own weights by unsharded arrays until the block ends.

    Keras's quantizers need whole weights, so those of one layer are gathered on the host.
    """
    make_unsharded = session.backend.make_unsharded_tensor
    if session.context.plan_only or make_unsharded is None:
        yield
        return
    before: list[tuple[Any, object, object]] = []
    for variable in (*layer._trainable_variables, *layer._non_trainable_variables):
        if session.registry.has_variable(variable) and variable.value is not None:
            sharded_value = variable._value
            variable._value = make_unsharded(session.engine.to_numpy(sharded_value))
            before.append((variable, sharded_value, variable._value))
    try:
        yield
    finally:
        for variable, sharded_value, unsharded_value in before:
            if variable._value is unsharded_value:
                variable._value = sharded_value
