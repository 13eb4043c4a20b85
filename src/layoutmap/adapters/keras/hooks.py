"""Replace class attributes of Keras while a scope is open.

A few class attributes are replaced while a scope is open on some thread, and put back when the last one closes:
`Variable.__init__` (of the class that all backends share), `Layer.__new__`, `Layer._maybe_build`, the optimizers'
`__init__` and `SeedGenerator.next`. All look at the current scope of their own thread, so other threads see plain
Keras. What Keras's reader of files asks for again and again is kept meanwhile.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from layoutmap.adapters.current import get_current_session, warn_in_inner_task
from layoutmap.adapters.keras.private import BaseOptimizer, CommonVariable, Layer, saving_lib
from layoutmap.core.errors import ScopeError
from layoutmap.engines.patches import Attribute, Patches, set_temporarily


def _wrap_variable_init(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def init(variable: object, initializer: object, *args: object, **kwargs: object) -> None:
        session = get_current_session()
        if not _is_ours(session) or getattr(_inside, "variable", None) is variable:
            plain(variable, initializer, *args, **kwargs)
            return
        refusal = session.find_existing_error()
        if refusal is not None:
            raise _UncatchableError(refusal) if _is_being_built(sys._getframe()) else refusal
        with set_temporarily(_inside, "variable", variable):  # another library's wrapper may call it twice
            session.create_variable(variable, plain, initializer, args, kwargs)

    return init


def _wrap_layer_new(found: Any) -> object:
    plain: Callable[..., object] = found.__func__

    @functools.wraps(plain)
    def create_layer(cls: type, *args: object, **kwargs: object) -> object:
        layer = plain(cls, *args, **kwargs)
        session = get_current_session()
        if _is_ours(session):
            session.note_layer(layer, given=[v for v in (*args, *kwargs.values()) if isinstance(v, str)])
        elif session is not None:
            raise ScopeError(
                f"{cls.__name__}: a Keras layer is built in a scope for {session.library} models",
                why="a scope is for one library, so this layer would stay unsharded",
                fix='pass library="keras"',
            )
        else:
            warn_in_inner_task("keras", cls.__name__)
        return layer

    return staticmethod(create_layer)


class _UncatchableError(BaseException):
    """Carry an error out of Keras, which catches any `Exception` of a layer that it builds by a call."""


def _wrap_maybe_build(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def maybe_build(layer: object, call_spec: object) -> None:
        try:
            plain(layer, call_spec)
        except _UncatchableError as refused:
            if _is_being_built(sys._getframe().f_back):
                raise
            raise refused.args[0] from None

    return maybe_build


def _is_being_built(frame: Any) -> bool:
    """Return whether a frame runs, at any depth, inside the wrapped `Layer._maybe_build`."""
    while frame is not None and (frame.f_code.co_name, frame.f_code.co_filename) != ("maybe_build", __file__):
        frame = frame.f_back
    return frame is not None


def _wrap_seed_draw(plain: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(plain)
    def draw(generator: object, ordered: bool = True) -> object:
        session = get_current_session()
        if not _is_ours(session):
            return plain(generator, ordered)
        with session.advance_or_restore_seed(generator):
            return plain(generator, ordered)

    return draw


def _wrap_optimizer_init(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def init_optimizer(self: object, *args: object, **kwargs: object) -> None:
        session = get_current_session()
        if _is_ours(session):
            session.note_optimizer(self)
        plain(self, *args, **kwargs)

    return init_optimizer


def _silence_in_scope(plain: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(plain)
    def skip_in_scope(*args: object, **kwargs: object) -> object:
        return plain(*args, **kwargs) if get_current_session() is None else None

    return skip_in_scope


def _is_ours(session: Any) -> bool:
    return session is not None and session.library == "keras"


_inside = threading.local()
_PATCHES = Patches(
    [
        Attribute(CommonVariable, "__init__", _wrap_variable_init),
        Attribute(Layer, "__new__", _wrap_layer_new),
        Attribute(Layer, "_maybe_build", _wrap_maybe_build),
        Attribute(keras.random.SeedGenerator, "next", _wrap_seed_draw),
        Attribute(BaseOptimizer, "__init__", _wrap_optimizer_init),
        # Keras 3.15 creates a layer for each of these lookups, so cache them.
        Attribute(saving_lib, "get_attr_skipset", functools.cache),
    ]
)


@functools.cache
def _make_silencing_patches(methods: tuple[tuple[object, str], ...]) -> Patches:
    return Patches(Attribute(owner, name, _silence_in_scope) for owner, name in methods)


@contextmanager
def install_hooks(quiet: Sequence[tuple[object, str]] = ()) -> Iterator[None]:
    """Install the class hooks until the block ends. Threads and nested scopes share them."""
    with _PATCHES.activate(), _make_silencing_patches(tuple(quiet)).activate():
        yield
