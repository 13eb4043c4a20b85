"""Wrap methods of each layer and optimizer created in a scope.

Keras itself wraps `build` and `quantize` on each layer in this way. Nothing stays on a class.
The exception is a hook of `copies`, while a model lives that was saved to a file.

    build, _maybe_build, quantize, enable_lora, compile     open the scope again while they run
    __deepcopy__, __reduce_ex__, get_config                 copies: see `copies`
    save_own_variables                                      marks the file for `load_model`: see `copies`
    call, quantized_call                                    return arrays in the layout of a rule for activations
    optimizer.build                                         the same, on the optimizer given to compile
    load_own_variables, load_weights                        values go from a file to their devices: see `loading`
    fit                                                     looks at callbacks and batches: see `training`
    call, make_train_function and its like                  what the backend needs: see `backends`
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import keras

from layoutmap.adapters.keras.call_stack import find_running_step
from layoutmap.adapters.keras.copies import (
    make_copy_wraps,
    make_mixed_model_error,
    warn_of_unsharded_layers,
    wrap_save_own_variables,
)
from layoutmap.adapters.keras.existing_layers import make_existing_error
from layoutmap.adapters.keras.loading import wrap_load_own_variables, wrap_load_weights
from layoutmap.adapters.keras.paths import SESSION
from layoutmap.adapters.keras.private import Functional, get_outermost_layer, in_symbolic_scope
from layoutmap.adapters.keras.protocol import KerasSession
from layoutmap.adapters.keras.quantization import restore_on_error, unshard_weights
from layoutmap.adapters.keras.training import wrap_fit
from layoutmap.engines.patches import wrap_in_context

CALLS = ("call", "quantized_call")
"""The methods that compute a layer's output. Quantized layers use the second one."""

_BEFORE = "_layoutmap_before"
_ABSENT = object()


def wrap_layer(layer: Any, session: KerasSession) -> None:
    """Wrap a layer so that its scope reopens when it creates weights. Unwrap any other scope."""
    if not _start_wrapping(layer, session):
        return
    undo = functools.partial(restore_on_error, layer, session)
    wraps = {"build": wrap_in_context(layer.build, session.defer)}
    if hasattr(layer, "enable_lora"):
        wraps["enable_lora"] = wrap_in_context(wrap_in_context(layer.enable_lora, session.defer), undo)
    if hasattr(layer, "quantize"):
        off_mesh = functools.partial(unshard_weights, layer, session)
        quantize = wrap_in_context(wrap_in_context(layer.quantize, session.defer), off_mesh)
        wraps["quantize"] = wrap_in_context(quantize, undo)
    wraps["_maybe_build"] = _wrap_maybe_build(
        layer, session, wrap_in_context(layer._maybe_build, session.defer)
    )
    wraps["load_own_variables"] = wrap_load_own_variables(layer, session)
    wraps |= make_copy_wraps(layer, session)
    if session.policy.activations:
        _set_methods(
            layer, {name: _wrap_call_with_layouts(layer, session, get_call(layer, name)) for name in CALLS}
        )
    _set_methods(layer, wraps)
    wraps = {**session.backend.make_layer_wraps(layer, session)}
    save = wraps.get("save_own_variables") or layer.save_own_variables
    wraps["save_own_variables"] = wrap_save_own_variables(save, session)
    if isinstance(layer, keras.Model):
        wraps["compile"] = _wrap_compile(layer, session)
        wraps["load_weights"] = wrap_load_weights(layer, lambda: map(get_session, layer._flatten_layers()))
        wraps |= session.backend.make_training_wraps(layer, session)
        wraps["fit"] = wrap_fit(wraps.get("fit", layer.fit), session)
    _set_methods(layer, wraps)


def wrap_optimizer(optimizer: Any, session: KerasSession) -> None:
    """Wrap an optimizer so that its scope reopens when it creates slots. Unwrap any other scope.

    Raises:
        ScopeError: The scope is that of a plan, and the optimizer existed before it.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    for each in (optimizer, inner) if session.context.plan_only else ():
        # Skip layers in the middle of __init__.
        if hasattr(each, "built") and get_session(each) is not session:
            raise make_existing_error(each, plan_only=True)
    if _start_wrapping(optimizer, session):
        wraps = {
            "build": wrap_in_context(optimizer.build, session.defer),
            "load_own_variables": wrap_load_own_variables(optimizer, session),
        }
        _set_methods(optimizer, {**wraps, **session.backend.make_optimizer_wraps(optimizer, session)})
        session.registry.add_optimizer(optimizer)
    # The inner optimizer updates the outer one's variables, so wrap it, too.
    if inner is not None and _start_wrapping(inner, session):
        wraps = {"load_own_variables": wrap_load_own_variables(inner, session)}
        _set_methods(inner, {**wraps, **session.backend.make_optimizer_wraps(inner, session)})
    # Inner optimizers of a MultiOptimizer may come from outside the scope.
    for each in getattr(optimizer, "optimizers", ()):
        wrap_optimizer(each, session)


def unwrap_optimizer(optimizer: object) -> None:
    """Unwrap an optimizer without a model, because the wraps would keep its slots in memory."""
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if each is not None:
            _unwrap(each)
    for each in getattr(optimizer, "optimizers", ()):
        unwrap_optimizer(each)


def get_session(thing: object) -> KerasSession | None:
    """Return the session that wraps a layer, model, or optimizer, or None."""
    return thing.__dict__.get(SESSION)


def get_call(layer: keras.Layer, name: str) -> Callable[..., object]:
    """Return the `call`, or equivalent, of a layer that is being constructed.

    A class without one may be Functional by inheritance: Keras makes it so while its first model is being initialized,
    which is after `__new__`.
    """
    if name != "call" or name in layer.__dict__ or type(layer).call is not keras.Model.call:
        return getattr(layer, name)

    @functools.wraps(types.MethodType(Functional.call, layer))
    def call(*args: object, **kwargs: object) -> object:
        return type(layer).call(layer, *args, **kwargs)

    return call


def _start_wrapping(thing: object, session: KerasSession) -> bool:
    """Unwrap an object from another scope, and return whether this scope must still wrap it."""
    if thing.__dict__.get(SESSION) is session:
        return False
    _unwrap(thing)
    thing.__dict__[SESSION] = session
    return True


def _unwrap(thing: object) -> None:
    own = thing.__dict__
    for name, before in own.pop(_BEFORE, {}).items():
        if before is _ABSENT:
            own.pop(name, None)
        else:
            own[name] = before
    if SESSION in own:
        own[SESSION].registry.remove_owner(thing)
        del own[SESSION]


def _set_methods(thing: object, wraps: dict[str, Callable[..., object]]) -> None:
    # Keras's __setattr__ would track the value, so write to __dict__.
    own = thing.__dict__
    before = own.setdefault(_BEFORE, {})
    for name in wraps:
        before.setdefault(name, own.get(name, _ABSENT))
    own.update(wraps)


def _wrap_maybe_build(
    layer: keras.Layer, session: KerasSession, method: Callable[..., object]
) -> Callable[..., object]:
    """Wrap `_maybe_build` so that one thread builds the layer while others wait."""

    @functools.wraps(method)
    def build_once(call_spec: Any) -> object:
        outer = get_outermost_layer()
        if outer is not None and get_session(outer) is None:
            _check_outer(outer, session)
        if layer.built:
            return None
        with session.lock:
            return None if layer.built else method(call_spec)

    return build_once


def _check_outer(outer: Any, session: KerasSession) -> None:
    """Warn once of unsharded layers next to sharded ones, or raise for a step that the backend cannot run."""
    refused = session.backend.single_scope_steps
    step = find_running_step(outer, refused) if refused else ""
    trained = [layer for layer in outer._flatten_layers() if layer._trainable_variables and layer.trainable]
    has_mixed_layers = len({get_session(layer) is None for layer in trained}) > 1
    if step and (not refused[step] or has_mixed_layers):
        raise make_mixed_model_error(outer, step)
    if outer in session.outer_models:
        return
    layers = outer._flatten_layers()
    if all(layer.built for layer in layers):
        session.outer_models.add(outer)
        plain = [
            layer
            for layer in layers
            if get_session(layer) is None and (layer._trainable_variables or layer._non_trainable_variables)
        ]
        if plain:
            warn_of_unsharded_layers(outer, plain)


def _wrap_compile(model: Any, session: KerasSession) -> Callable[..., object]:
    plain = model.compile

    @functools.wraps(plain)
    def compile(*args: object, **kwargs: object) -> object:
        before = getattr(model, "optimizer", None)
        with session.defer():
            result = plain(*args, **kwargs)
            optimizer = getattr(model, "optimizer", None)
            if before is not None and before is not optimizer:
                session.release_optimizer(before)
            if optimizer is not None:
                wrap_optimizer(optimizer, session)
        return result

    return compile


def _wrap_call_with_layouts(
    layer: object, session: KerasSession, plain: Callable[..., object]
) -> Callable[..., object]:
    """Wrap a layer's `call`, or equivalent, to constrain outputs by activation rules.

    The layer's path is looked up when it is called, since it may not be known before.
    """

    @functools.wraps(plain)
    def call(*args: object, **kwargs: object) -> object:
        outputs = plain(*args, **kwargs)
        # Symbolic calls and plans have no arrays to constrain.
        if in_symbolic_scope() or session.context.plan_only:
            return outputs
        path, layout = session.find_output_layout(layer)
        if layout is None:
            return outputs
        flat = keras.tree.flatten(outputs)
        arrays = [each for each in flat if keras.ops.is_tensor(each)]
        shapes = [tuple(int(n) for n in array.shape) for array in arrays]
        layouts = session.policy.choose_output_layouts(layout, shapes, path)
        chosen = {id(array): each for array, each in zip(arrays, layouts, strict=True) if each is not None}
        placed = [
            session.backend.relayout_output(each, chosen[id(each)], session) if id(each) in chosen else each
            for each in flat
        ]
        return keras.tree.pack_sequence_as(outputs, placed)

    return call
