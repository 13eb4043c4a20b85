"""Find the Keras objects with a running method, from the innermost frame outward."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Container, Iterator
from types import FrameType

import keras

_METHODS = ("build", "call", "quantized_call")


def is_in_call() -> bool:
    """Return whether a layer is being called, except by a layer that is being built."""
    methods = {method for method, _ in _iterate_running_layers()}
    return bool(methods) and "build" not in methods


def is_in_build() -> bool:
    """Return whether a layer is being built."""
    return any(method == "build" for method, _ in _iterate_running_layers())


# Some layers read a weight while they are built, so errors name the layer that reads (decisions/0027).
def describe_reader() -> str:
    """Describe the layer with a running `build` or `call`, or return an empty text."""
    for method, layer in _iterate_running_layers():
        return f"{type(layer).__name__}.{method} of layer {layer.name!r}"
    return ""


def find_makers(depth: int) -> Iterator[object]:
    """Yield the layers, optimizers, metrics, and seed generators with a running method, innermost first.

    The outermost `depth` frames are left out, as `count_user_frames` counts them.
    """
    kinds = (keras.layers.Layer, keras.Optimizer, keras.Metric, keras.random.SeedGenerator)
    start = sys._getframe(1)
    for frame in itertools.islice(_walk_frames(start), max(0, sum(1 for _ in _walk_frames(start)) - depth)):
        code = frame.f_code
        if code.co_argcount:
            thing = frame.f_locals.get(code.co_varnames[0])
            if isinstance(thing, kinds) and hasattr(type(thing), code.co_name):
                yield thing


def count_user_frames() -> int:
    """Return the number of frames up to and including the one that called into layoutmap."""
    names = [
        frame.f_globals.get("__name__", "").partition(".")[0] for frame in _walk_frames(sys._getframe(1))
    ]
    return sum(1 for _ in itertools.dropwhile(("layoutmap", "contextlib").__contains__, names))


def find_frame(module: str, function: str = "") -> FrameType | None:
    """Return the innermost running frame of a module, or of one of its functions, or None."""
    for frame in _walk_frames(sys._getframe(1)):
        if frame.f_globals.get("__name__") == module and function in ("", frame.f_code.co_name):
            return frame
    return None


def find_running_step(model: object, names: Container[str]) -> str:
    """Return which of these steps a model is running, or an empty text."""
    for frame in _walk_frames(sys._getframe(1)):
        if frame.f_code.co_name in names and frame.f_locals.get("self") is model:
            return frame.f_code.co_name
    return ""


def _iterate_running_layers() -> Iterator[tuple[str, keras.Layer]]:
    """Yield the method and the layer of each running `build` or `call`, innermost first."""
    for frame in _walk_frames(sys._getframe(1)):
        if frame.f_code.co_name in _METHODS:
            layer = frame.f_locals.get("self")
            if isinstance(layer, keras.layers.Layer):
                yield frame.f_code.co_name, layer


def _walk_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, but not this function's frame, which would create a cycle."""
    while frame is not None:
        yield frame
        frame = frame.f_back
