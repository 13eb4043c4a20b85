"""Quantizing a layer on a backend whose tensors in layouts Keras cannot hand to numpy, as its quantizers do."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from layoutmap.adapters.keras.protocol import KerasSession


@contextmanager
def weights_off_mesh(layer: Any, session: KerasSession, as_plain: Callable[[Any], object]) -> Generator[None]:
    """While open, a layer's own weights are plain global arrays; what is made of them is laid out as it is assigned.

    One layer's weights are gathered on the host then, which is what Keras's quantizers need.

    Args:
        layer: The layer.
        session: The scope.
        as_plain: Makes a plain tensor of the backend of a numpy array.
    """
    if session.context.plan_only:
        yield
        return
    before: list[tuple[Any, object, object]] = []
    for variable in (*layer._trainable_variables, *layer._non_trainable_variables):
        if session.registry.knows(variable) and variable.value is not None:
            held = variable._value
            variable._value = as_plain(session.engine.to_numpy(held))
            before.append((variable, held, variable._value))
    try:
        yield
    finally:
        for variable, held, plain in before:
            if variable._value is plain:
                variable._value = held
