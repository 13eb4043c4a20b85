"""Methods that are wrapped on each layer that was made in a scope.

Keras itself wraps `build` and `quantize` on each layer in this way. Nothing stays on a class.
The exception is a hook of `copies`, while a model lives that was saved to a file.

    build, _maybe_build, quantize, enable_lora, compile     open the scope again while they run
    __deepcopy__, __reduce_ex__, get_config                 copies: see `copies`
    save_own_variables                                      marks the file for `load_model`: see `copies`
    call, quantized_call                                    return arrays in the layout of a rule for activations
    optimizer.build                                         the same, on the optimizer given to compile
    load_own_variables, load_weights                        values go from a file to their devices: see `loading`
    fit                                                     looks at callbacks and batches: see `batches`
    call, make_train_function and its like                  what the backend needs: see `backends`
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import keras

from layoutmap.adapters.keras.activations import laying_out
from layoutmap.adapters.keras.batches import checking_callbacks, sharding_batches
from layoutmap.adapters.keras.copies import copy_wraps, marking, of_two_kinds, step_of, warn_of_plain_layers
from layoutmap.adapters.keras.existing_layers import make_existing_error
from layoutmap.adapters.keras.loading import loading, loading_weights
from layoutmap.adapters.keras.paths import SESSION
from layoutmap.adapters.keras.private import Functional, outermost_layer
from layoutmap.adapters.keras.protocol import KerasSession
from layoutmap.adapters.keras.quantization import plain_weights, restored_on_error
from layoutmap.engines.patches import wrap_in_context

CALLS = ("call", "quantized_call")
"""The methods by which Keras computes what a layer returns: the second one once it is quantized."""

_BEFORE = "_layoutmap_before"
_ABSENT = object()


def wrap_layer(layer: Any, session: KerasSession) -> None:
    """Make a layer open its scope again whenever it makes weights; another scope lets go of it."""
    if not _begin(layer, session):
        return
    undo = functools.partial(restored_on_error, layer, session)
    wraps = {"build": wrap_in_context(layer.build, session.defer)}
    if hasattr(layer, "enable_lora"):
        wraps["enable_lora"] = wrap_in_context(wrap_in_context(layer.enable_lora, session.defer), undo)
    if hasattr(layer, "quantize"):
        off_mesh = functools.partial(plain_weights, layer, session)
        quantize = wrap_in_context(wrap_in_context(layer.quantize, session.defer), off_mesh)
        wraps["quantize"] = wrap_in_context(quantize, undo)
    wraps["_maybe_build"] = _once(layer, session, wrap_in_context(layer._maybe_build, session.defer))
    wraps["load_own_variables"] = loading(layer, session)
    wraps |= copy_wraps(layer, session)
    if session.policy.activations:
        _put(layer, {name: laying_out(layer, session, call_of(layer, name)) for name in CALLS})
    _put(layer, wraps)
    wraps = {**session.backend.layer_wraps(layer, session)}
    save = wraps.get("save_own_variables") or layer.save_own_variables
    wraps["save_own_variables"] = marking(save, session)
    if isinstance(layer, keras.Model):
        wraps["compile"] = _compiling(layer, session)
        wraps["load_weights"] = loading_weights(layer, lambda: _sessions_below(layer))
        wraps |= session.backend.training_wraps(layer, session)
        if session.backend.unreadable_boards:
            wraps["fit"] = checking_callbacks(wraps.get("fit", layer.fit), session)
        if session.policy.batch_dim is not None:
            wraps["fit"] = sharding_batches(wraps.get("fit", layer.fit), session)
    _put(layer, wraps)


def wrap_optimizer(optimizer: Any, session: KerasSession) -> None:
    """Make an optimizer open the scope again when it makes its slots; another scope lets go of it.

    Raises:
        ScopeError: The scope is that of a plan, and the optimizer existed before it.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    for each in (optimizer, inner) if session.context.plan_only else ():
        if hasattr(each, "built") and session_of(each) is not session:  # else its __init__ is only beginning
            raise make_existing_error(each, plan_only=True)
    if _begin(optimizer, session):
        wraps = {
            "build": wrap_in_context(optimizer.build, session.defer),
            "load_own_variables": loading(optimizer, session),
        }
        _put(optimizer, {**wraps, **session.backend.optimizer_wraps(optimizer, session)})
        session.registry.add_optimizer(optimizer)
    if inner is not None and _begin(inner, session):  # its variables are the outer one's, and it updates them
        wraps = {"load_own_variables": loading(inner, session)}
        _put(inner, {**wraps, **session.backend.optimizer_wraps(inner, session)})
    for each in getattr(optimizer, "optimizers", ()):  # a MultiOptimizer's, that may have been made outside
        wrap_optimizer(each, session)


def unwrap_optimizer(optimizer: object) -> None:
    """Make an optimizer plain again, which no model has any more: what was wrapped would keep it and its slots."""
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if each is not None:
            _unwrap(each)
    for each in getattr(optimizer, "optimizers", ()):
        unwrap_optimizer(each)


def session_of(thing: object) -> KerasSession | None:
    """The scope that looks after a layer, model or optimizer."""
    return thing.__dict__.get(SESSION)


def call_of(layer: keras.Layer, name: str) -> Callable[..., object]:
    """Return the `call` of a layer that is being made, or what stands for it, to be wrapped.

    A class without one may be Functional by inheritance: Keras makes it so while its first model is being initialized,
    which is after `__new__`.
    """
    if name != "call" or name in layer.__dict__ or type(layer).call is not keras.Model.call:
        return getattr(layer, name)

    @functools.wraps(types.MethodType(Functional.call, layer))
    def call(*args: object, **kwargs: object) -> object:
        return type(layer).call(layer, *args, **kwargs)

    return call


def _sessions_below(model: keras.Model) -> set[KerasSession]:
    """The scopes that look after a model and the layers in it."""
    return {session for layer in model._flatten_layers() if (session := session_of(layer)) is not None}


def _begin(thing: object, session: KerasSession) -> bool:
    """Whether something is still to be wrapped; what another scope wrapped is plain again."""
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
        own[SESSION].registry.let_go(thing)
        del own[SESSION]


def _put(thing: object, wraps: dict[str, Callable[..., object]]) -> None:
    # Into __dict__, past Keras's __setattr__, which tracks what it is given.
    own = thing.__dict__
    before = own.setdefault(_BEFORE, {})
    for name in wraps:
        before.setdefault(name, own.get(name, _ABSENT))
    own.update(wraps)


def _once(layer: keras.Layer, session: KerasSession, method: Callable[..., object]) -> Callable[..., object]:
    """Build a layer if it is not, in one thread only: another one that calls it meanwhile waits."""

    @functools.wraps(method)
    def once(call_spec: Any) -> object:
        outer = outermost_layer()
        if outer is not None and session_of(outer) is None:
            _check_outer(outer, session)
        if layer.built:
            return None
        with session.lock:
            return None if layer.built else method(call_spec)

    return once


def _check_outer(outer: Any, session: KerasSession) -> None:
    """Warn once, when all its layers are built, if a model outside of all scopes has weights of its own.

    Raises:
        ScopeError: It is called in a step of Keras's that the backend cannot take with layers of two kinds.
    """
    refused = session.backend.one_scope_in
    step = step_of(outer, refused) if refused else ""
    if step and (not refused[step] or _trains_two_kinds(outer)):
        raise of_two_kinds(outer, step)
    if outer in session.outer_models:
        return
    layers = outer._flatten_layers()
    if all(layer.built for layer in layers):
        session.outer_models.add(outer)
        plain = [
            layer
            for layer in layers
            if session_of(layer) is None and (layer._trainable_variables or layer._non_trainable_variables)
        ]
        if plain:
            warn_of_plain_layers(outer, plain)


def _trains_two_kinds(outer: keras.Model) -> bool:
    """Whether a model trains layers that are in layouts and others."""
    layers = [layer for layer in outer._flatten_layers() if layer._trainable_variables and layer.trainable]
    return len({session_of(layer) is None for layer in layers}) > 1


def _compiling(model: Any, session: KerasSession) -> Callable[..., object]:
    plain = model.compile

    @functools.wraps(plain)
    def compile(*args: object, **kwargs: object) -> object:
        before = getattr(model, "optimizer", None)
        with session.defer():
            result = plain(*args, **kwargs)
            optimizer = getattr(model, "optimizer", None)
            if before is not None and before is not optimizer:
                session.optimizer_replaced(before)
            if optimizer is not None:
                wrap_optimizer(optimizer, session)
        return result

    return compile
