"""Who reads or makes a weight: the objects of Keras whose methods run, from the innermost one outwards."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from types import FrameType

import keras

_METHODS = ("build", "call", "quantized_call")


def is_in_call() -> bool:
    """Whether a layer is being called, and that not by one that is being built."""
    methods = {method for method, _ in _layers_running()}
    return bool(methods) and "build" not in methods


def is_in_build() -> bool:
    """Whether a layer is being built."""
    return any(method == "build" for method, _ in _layers_running())


def describe_reader() -> str:  # why: decisions/0027
    """The layer whose `build` or `call` runs, for messages; empty if none does."""
    for method, layer in _layers_running():
        return f"{type(layer).__name__}.{method} of layer {layer.name!r}"
    return ""


def find_makers(depth: int) -> Iterator[object]:
    """The layers, optimizers, metrics and seed generators of which any method runs, from the innermost one outwards.

    Args:
        depth: How many frames, the outermost ones, are left out: see `count_user_frames`.
    """
    kinds = (keras.layers.Layer, keras.Optimizer, keras.Metric, keras.random.SeedGenerator)
    start = sys._getframe(1)
    for frame in itertools.islice(_outwards(start), max(0, sum(1 for _ in _outwards(start)) - depth)):
        code = frame.f_code
        if code.co_argcount:
            thing = frame.f_locals.get(code.co_varnames[0])
            if isinstance(thing, kinds) and hasattr(type(thing), code.co_name):
                yield thing


def count_user_frames() -> int:
    """How many frames there are up to the one that uses this library now, with that one."""
    names = [frame.f_globals.get("__name__", "").partition(".")[0] for frame in _outwards(sys._getframe(1))]
    return sum(1 for _ in itertools.dropwhile(("layoutmap", "contextlib").__contains__, names))


def _layers_running() -> Iterator[tuple[str, keras.Layer]]:
    """The layers that are being built or called, and the method of each."""
    for frame in _outwards(sys._getframe(1)):
        if frame.f_code.co_name in _METHODS:
            layer = frame.f_locals.get("self")
            if isinstance(layer, keras.layers.Layer):
                yield frame.f_code.co_name, layer


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those around it. No function has its own: such a cycle would be garbage for each variable."""
    while frame is not None:
        yield frame
        frame = frame.f_back
