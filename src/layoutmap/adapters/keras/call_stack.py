"""Find the Keras objects with a running method, from the innermost frame outward."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Container, Iterator
from types import FrameType

import keras

_METHODS = ("build", "call", "quantized_call")


def is_calling_layer() -> bool:
    """Return whether this thread is running the `call` of a layer, but no `build`."""
    methods = {method for method, _ in _iterate_running_layers()}
    return bool(methods) and "build" not in methods


def is_building_layer() -> bool:
    """Return whether the `build` of a layer is running on this thread."""
    return any(method == "build" for method, _ in _iterate_running_layers())


# Some layers read a weight while they are built, so errors name the layer that reads it (decisions/0027).
def format_running_layer() -> str:
    """Describe the innermost layer with a running `build` or `call`, or return an empty text."""
    for method, layer in _iterate_running_layers():
        return f"{type(layer).__name__}.{method} of layer {layer.name!r}"
    return ""


def iterate_running_keras_objects(num_skipped_frames: int) -> Iterator[object]:
    """Yield the layers, optimizers, metrics, and seed generators with a running method, innermost first.

    The outermost `num_skipped_frames` frames are left out, as `count_user_frames` counts them.
    """
    kinds = (keras.layers.Layer, keras.Optimizer, keras.Metric, keras.random.SeedGenerator)
    start = sys._getframe(1)
    for frame in itertools.islice(
        _iterate_frame_and_callers(start),
        max(0, sum(1 for _ in _iterate_frame_and_callers(start)) - num_skipped_frames),
    ):
        code = frame.f_code
        if code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            if isinstance(owner, kinds) and hasattr(type(owner), code.co_name):
                yield owner


def count_user_frames() -> int:
    """Return the number of frames on this thread, from the outermost frame to the one that called into layoutmap."""
    names = [
        frame.f_globals.get("__name__", "").partition(".")[0]
        for frame in _iterate_frame_and_callers(sys._getframe(1))
    ]
    return sum(1 for _ in itertools.dropwhile(("layoutmap", "contextlib").__contains__, names))


def find_running_frame(module_name: str, function_name: str = "") -> FrameType | None:
    """Return the innermost running frame of a module, or of its `function_name` if given. Return None without one."""
    for frame in _iterate_frame_and_callers(sys._getframe(1)):
        if frame.f_globals.get("__name__") == module_name and function_name in ("", frame.f_code.co_name):
            return frame
    return None


def find_running_step_name(model: object, step_names: Container[str]) -> str:
    """Return which of a model's methods `step_names` is running on this thread, or an empty text if none is."""
    for frame in _iterate_frame_and_callers(sys._getframe(1)):
        if frame.f_code.co_name in step_names and frame.f_locals.get("self") is model:
            return frame.f_code.co_name
    return ""


def _iterate_running_layers() -> Iterator[tuple[str, keras.Layer]]:
    """Yield the method name and the layer of each `build` and `call` running on this thread, innermost first."""
    for frame in _iterate_frame_and_callers(sys._getframe(1)):
        if frame.f_code.co_name in _METHODS:
            layer = frame.f_locals.get("self")
            if isinstance(layer, keras.layers.Layer):
                yield frame.f_code.co_name, layer


def _iterate_frame_and_callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a given frame and its callers, but not this generator's frame, which would create a cycle."""
    while frame is not None:
        yield frame
        frame = frame.f_back
