"""Change the numbers of a model by one rounding error each, to measure how rounding changes its results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from layoutmap.adapters import TrainingAdapter
from layoutmap.core.blocks import NumpyArray

_COARSE_STEPS = {"float16": 2**-10, "bfloat16": 2**-7}
_ROUNDINGS_OF_TOLERANCE = 1e-5 / 2**-23
"""The default tolerance, divided by the rounding error of float32."""


def perturb_variables(
    adapter: TrainingAdapter, model: Any, signs: np.random.Generator, tolerance: float
) -> None:
    """Change each floating-point variable of a model by one rounding error per element.

    Args:
        adapter: Adapter of the model.
        model: The model, which is changed.
        signs: Generator that draws whether an element grows or shrinks.
        tolerance: The largest relative difference that counts as equal. One rounding error is at least an 84th of it.
    """
    for variable in adapter.variables(model).values():
        value = adapter.read(variable)
        perturbed = make_perturbed_arrays(value, signs, tolerance)
        if perturbed is not value:
            adapter.write(variable, perturbed)


def make_perturbed_arrays(values: Any, signs: np.random.Generator, tolerance: float) -> Any:
    """Return nested values with each element of floating-point arrays changed by one rounding error at random.

    Args:
        values: Arrays, and mappings, lists and tuples of them. Other values are returned unchanged.
        signs: See `perturb_variables`.
        tolerance: See `perturb_variables`.
    """
    if isinstance(values, Mapping):
        items = cast("Mapping[Any, Any]", values).items()
        return {name: make_perturbed_arrays(value, signs, tolerance) for name, value in items}
    if type(values) in (list, tuple):
        return type(values)(make_perturbed_arrays(value, signs, tolerance) for value in values)
    if not isinstance(values, np.ndarray):
        return values
    array = cast("NumpyArray", values)
    if array.dtype.kind != "f" and array.dtype.name not in _COARSE_STEPS:
        return array
    step = max(_COARSE_STEPS.get(array.dtype.name, 0.0), tolerance / _ROUNDINGS_OF_TOLERANCE)
    exact = np.asarray(array, np.float64)
    return (exact * (1 + step * signs.choice([-1, 1], array.shape))).astype(array.dtype)
