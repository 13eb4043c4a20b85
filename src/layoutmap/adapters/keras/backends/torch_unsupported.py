"""Layers that cannot be laid out; all of Keras's own layers that were tried with torch 2.13 can."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from layoutmap.core.unsupported import Unsupported

L = keras.layers


def unsupported_of(layer: Any, path: str, weights: list[str]) -> Iterator[Unsupported]:
    """The reasons for which a layer cannot be laid out."""
    if isinstance(layer, L.TorchModuleWrapper):
        yield Unsupported(
            path,
            "a torch module inside a Keras layer is not laid out",
            why="the module keeps its own parameters, which the layer's variables would no longer be",
            fix="write the layer in Keras, or build the whole model in torch and use its adapter: library='torch'",
        )
