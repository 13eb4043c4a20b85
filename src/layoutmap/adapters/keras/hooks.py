"""Replace class attributes of Keras while a scope is open.

While a scope is open on some thread, these are replaced: `Variable.__init__` (of the class that all backends share),
`Layer.__new__`, `Layer._maybe_build`, the optimizers' `__init__`, and `SeedGenerator.next`. All look at the scope of
their own thread, so other threads see unchanged Keras. `get_attr_skipset`, which loading calls often, is cached.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from layoutmap.adapters.current import get_current_session, warn_of_model_in_inner_task
from layoutmap.adapters.keras.private import BaseOptimizer, CommonVariable, Layer, saving_lib
from layoutmap.core.errors import ScopeError
from layoutmap.engines.patches import AttributePatch, PatchGroup, set_attribute_temporarily


def _wrap_variable_init(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `Variable.__init__` so that the open scope constructs the variable, without a value if possible."""

    @functools.wraps(original)
    def init_variable(variable: object, initializer: object, *args: object, **kwargs: object) -> None:
        session = get_current_session()
        if not _is_keras_session(session) or getattr(_being_constructed, "variable", None) is variable:
            original(variable, initializer, *args, **kwargs)
            return
        refusal = session.find_preexisting_owner_error()
        if refusal is not None:
            raise _UncatchableError(refusal) if _is_inside_maybe_build(sys._getframe()) else refusal
        # Another library's wrapper may call `__init__` twice, so construct only once.
        with set_attribute_temporarily(_being_constructed, "variable", variable):
            session.construct_variable(variable, original, initializer, args, kwargs)

    return init_variable


def _wrap_layer_new(static_method: Any) -> object:
    """Wrap `Layer.__new__` to record layers in the open scope, or raise if the scope is for a different library."""
    original: Callable[..., object] = static_method.__func__

    @functools.wraps(original)
    def create_layer(cls: type, *args: object, **kwargs: object) -> object:
        layer = original(cls, *args, **kwargs)
        session = get_current_session()
        if _is_keras_session(session):
            session.record_and_wrap_layer(
                layer, constructor_texts=[v for v in (*args, *kwargs.values()) if isinstance(v, str)]
            )
        elif session is not None:
            raise ScopeError(
                f"{cls.__name__}: a Keras layer is built in a scope for {session.library} models",
                why="a scope is for one library, so this layer would stay unsharded",
                fix='pass library="keras" to the scope, or build the layer outside',
            )
        else:
            warn_of_model_in_inner_task("keras", cls.__name__)
        return layer

    return staticmethod(create_layer)


class _UncatchableError(BaseException):
    """Carry an error out of Keras as a `BaseException`, because Keras catches each `Exception` in a build."""


def _wrap_maybe_build(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `Layer._maybe_build`: the outermost call raises the error that an `_UncatchableError` carries."""

    @functools.wraps(original)
    def maybe_build(layer: object, call_spec: object) -> None:
        try:
            original(layer, call_spec)
        except _UncatchableError as refused:
            if _is_inside_maybe_build(sys._getframe().f_back):
                raise
            raise refused.args[0] from None

    return maybe_build


def _is_inside_maybe_build(frame: Any) -> bool:
    """Return whether a frame runs, at any depth, inside the wrapped `Layer._maybe_build`."""
    while frame is not None and (frame.f_code.co_name, frame.f_code.co_filename) != ("maybe_build", __file__):
        frame = frame.f_back
    return frame is not None


def _wrap_seed_generator_next(original: Callable[..., object]) -> Callable[..., object]:
    """Wrap `SeedGenerator.next` to draw in the order of unsharded Keras in scopes, and to undo draws in plans."""

    @functools.wraps(original)
    def draw_seed(generator: object, ordered: bool = True) -> object:
        session = get_current_session()
        if not _is_keras_session(session):
            return original(generator, ordered)
        with session.order_or_undo_seed_draw(generator):
            return original(generator, ordered)

    return draw_seed


def _wrap_optimizer_init(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap an optimizer's `__init__` to record the optimizer in the open scope."""

    @functools.wraps(original)
    def init_optimizer(self: object, *args: object, **kwargs: object) -> None:
        session = get_current_session()
        if _is_keras_session(session):
            session.record_and_wrap_optimizer(self)
        original(self, *args, **kwargs)

    return init_optimizer


def _wrap_to_skip_in_scope(original: Callable[..., object]) -> Callable[..., object]:
    """Wrap a function so that in a scope it does nothing and returns None."""

    @functools.wraps(original)
    def skip_in_scope(*args: object, **kwargs: object) -> object:
        return original(*args, **kwargs) if get_current_session() is None else None

    return skip_in_scope


def _is_keras_session(session: Any) -> bool:
    """Return whether a session is open and is for Keras models."""
    return session is not None and session.library == "keras"


_being_constructed = threading.local()
_PATCHES = PatchGroup(
    [
        AttributePatch(CommonVariable, "__init__", _wrap_variable_init),
        AttributePatch(Layer, "__new__", _wrap_layer_new),
        AttributePatch(Layer, "_maybe_build", _wrap_maybe_build),
        AttributePatch(keras.random.SeedGenerator, "next", _wrap_seed_generator_next),
        AttributePatch(BaseOptimizer, "__init__", _wrap_optimizer_init),
        # Keras 3.15 creates a layer in each call of this function, so cache its results.
        AttributePatch(saving_lib, "get_attr_skipset", functools.cache),
    ]
)


@functools.cache
def _make_disabling_patches(methods: tuple[tuple[object, str], ...]) -> PatchGroup:
    return PatchGroup(AttributePatch(owner, name, _wrap_to_skip_in_scope) for owner, name in methods)


@contextmanager
def install_hooks_temporarily(disabled_methods: Sequence[tuple[object, str]] = ()) -> Iterator[None]:
    """Install the hooks in Keras's classes, and disable `disabled_methods` in scopes, until the block ends.

    Threads and nested scopes share the hooks.
    """
    with _PATCHES.activate(), _make_disabling_patches(tuple(disabled_methods)).activate():
        yield
