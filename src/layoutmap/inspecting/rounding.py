"""Move the numbers of a model by one rounding, to measure how rounding changes its results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from layoutmap.adapters import Training
from layoutmap.core.blocks import NumpyArray

_COARSE_STEPS = {"float16": 2**-10, "bfloat16": 2**-7}
_ROUNDINGS_OF_TOLERANCE = 1e-5 / 2**-23
"""The default tolerance in roundings of float32. Lower precision gets a larger tolerance."""


def move_variables(adapter: Training, model: Any, signs: np.random.Generator, tolerance: float) -> None:
    """Move each floating-point variable of a model by one rounding.

    Args:
        adapter: Knows the model's library.
        model: The model, which is changed.
        signs: Each element is moved up or down by a draw of it.
        tolerance: The largest relative difference that counts as equal; one rounding is an 84th of it.
    """
    for variable in adapter.variables(model).values():
        value = adapter.read(variable)
        moved = move_arrays(value, signs, tolerance)
        if moved is not value:
            adapter.write(variable, moved)


def move_arrays(values: Any, signs: np.random.Generator, tolerance: float) -> Any:
    """Return nested values with each element of a floating-point numpy array moved by one rounding.

    Args:
        values: Arrays, and mappings, lists and tuples of them. Other values are returned unchanged.
        signs: See `move_variables`.
        tolerance: See `move_variables`.
    """
    if isinstance(values, Mapping):
        items = cast("Mapping[Any, Any]", values).items()
        return {name: move_arrays(value, signs, tolerance) for name, value in items}
    if type(values) in (list, tuple):
        return type(values)(move_arrays(value, signs, tolerance) for value in values)
    if not isinstance(values, np.ndarray):
        return values
    array = cast("NumpyArray", values)
    if array.dtype.kind != "f" and array.dtype.name not in _COARSE_STEPS:
        return array
    step = max(_COARSE_STEPS.get(array.dtype.name, 0.0), tolerance / _ROUNDINGS_OF_TOLERANCE)
    exact = np.asarray(array, np.float64)
    return (exact * (1 + step * signs.choice([-1, 1], array.shape))).astype(array.dtype)
