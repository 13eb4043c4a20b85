"""What a layer that was born in a scope carries with it: a few methods wrapped on the instance.

Keras itself wraps `build` and `quantize` on each layer in this way. Nothing stays on a class.

    build, _maybe_build, quantize, enable_lora, compile     open the scope again while they run
    optimizer.build                                         the same, on the optimizer given to compile
    make_train_function and its like                        see `training`
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras

from layoutmap.adapters.keras.training import wrap_training

if TYPE_CHECKING:
    from layoutmap.adapters.keras.session import KerasSession

__all__ = ["wrap_layer", "wrap_optimizer"]

_MARK = "_layoutmap_session"


def wrap_layer(layer: Any, session: KerasSession) -> None:
    """Make a layer open its scope again whenever it makes weights."""
    own = layer.__dict__
    if own.get(_MARK) is session:
        return
    own[_MARK] = session
    for name in ("build", "quantize", "enable_lora"):
        if hasattr(layer, name):
            own[name] = _reopening(session, getattr(layer, name))
    own["_maybe_build"] = _once(layer, session, _reopening(session, layer._maybe_build))
    if isinstance(layer, keras.Model):
        own["compile"] = _compiling(layer, session)
        wrap_training(layer, session)


def wrap_optimizer(optimizer: Any, session: KerasSession) -> None:
    """Make an optimizer open the scope again when it makes its slots."""
    own = optimizer.__dict__
    if own.get(_MARK) is not session:
        own[_MARK] = session
        own["build"] = _reopening(session, optimizer.build)
        session.optimizer_born(optimizer)


def _reopening(session: KerasSession, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def reopening(*args: Any, **kwargs: Any) -> Any:
        with session.defer():
            return method(*args, **kwargs)

    return reopening


def _once(layer: Any, session: KerasSession, method: Callable[..., Any]) -> Callable[..., Any]:
    """Build a layer if it is not, in one thread only: another one that calls it meanwhile waits."""

    @functools.wraps(method)
    def once(call_spec: Any) -> Any:
        if layer.built:
            return None
        with session.lock:
            return None if layer.built else method(call_spec)

    return once


def _compiling(model: Any, session: KerasSession) -> Callable[..., Any]:
    plain = model.compile

    @functools.wraps(plain)
    def compile(*args: Any, **kwargs: Any) -> Any:
        with session.defer():
            result = plain(*args, **kwargs)
            if getattr(model, "optimizer", None) is not None:
                wrap_optimizer(model.optimizer, session)
        return result

    return compile
