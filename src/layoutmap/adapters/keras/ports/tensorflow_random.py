"""Random numbers inside a model that are the same on every mesh.

DTensor draws other numbers for each way in which it cuts a random array, so a dropout mask would depend on the mesh.
While a laid out model is called, Keras's random functions therefore draw whole arrays: every device draws all of it and
keeps its part. That costs drawing time, and no traffic.

Private names of Keras that are replaced while such a call runs, and put back after it, tested on Keras 3.15:

    keras.src.backend.tensorflow.random         dropout, uniform, normal, truncated_normal, randint
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow import random as keras_random

__all__ = ["drawing_whole"]

Whole = Callable[[Any], Any]
"""Puts a tensor in the layout in which every device holds all of it."""

_NAMES = ("uniform", "normal", "truncated_normal", "randint")
_module: Any = keras_random
_lock = threading.Lock()
_users = 0
_plain: dict[str, Callable[..., Any]] = {}
_current = threading.local()


@contextmanager
def drawing_whole(whole: Whole) -> Generator[None]:
    """While open, in this thread, Keras's random functions give numbers that do not depend on the mesh.

    Args:
        whole: Puts a tensor in the layout in which every device holds all of it.
    """
    global _users
    with _lock:
        if not _users:
            _install()
        _users += 1
    before = getattr(_current, "whole", None)
    _current.whole = whole
    try:
        yield
    finally:
        _current.whole = before
        with _lock:
            _users -= 1
            if not _users:
                for name, function in _plain.items():
                    setattr(_module, name, function)
                _plain.clear()


def _install() -> None:
    for name in _NAMES:
        _plain[name] = getattr(_module, name)
        setattr(_module, name, _drawn_whole(_plain[name]))
    _plain["dropout"] = _module.dropout
    _module.dropout = _dropout(_plain["dropout"])


def _drawn_whole(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def drawn_whole(*args: Any, **kwargs: Any) -> Any:
        whole: Whole | None = getattr(_current, "whole", None)
        drawn = plain(*args, **kwargs)
        return drawn if whole is None else whole(drawn)

    return drawn_whole


def _dropout(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def dropout(inputs: Any, rate: Any, *args: Any, **kwargs: Any) -> Any:
        whole: Whole | None = getattr(_current, "whole", None)
        if whole is None or rate in (0.0, 1.0):
            return plain(inputs, rate, *args, **kwargs)
        # What dropout makes of ones is its mask: zero, or the factor that makes up for what was dropped.
        return inputs * whole(plain(tf.ones(inputs.shape, inputs.dtype), rate, *args, **kwargs))

    return dropout
