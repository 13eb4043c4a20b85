"""Who reads a weight: the layers whose methods run, from the innermost one outwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import keras

__all__ = ["is_in_a_call", "read_by"]

_METHODS = ("build", "call", "quantized_call")


def is_in_a_call() -> bool:
    """Whether a layer is being called, and that not by one that is being built."""
    methods = {method for method, _ in _running()}
    return bool(methods) and "build" not in methods


def read_by() -> str:
    """The layer whose `build` or `call` runs, for messages; empty if none does."""
    for method, layer in _running():
        return f"{type(layer).__name__}.{method} of layer {layer.name!r}"
    return ""


def _running() -> Iterator[tuple[str, Any]]:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in _METHODS:
            layer = frame.f_locals.get("self")
            if isinstance(layer, keras.layers.Layer):
                yield frame.f_code.co_name, layer
        frame = frame.f_back
