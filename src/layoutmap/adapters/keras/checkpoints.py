"""What a checkpoint keeps of a Keras model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from layoutmap.adapters.keras.private import is_seed_state
from layoutmap.adapters.protocol import Stored
from layoutmap.core.variables import Kind, VariableSpec


def stored(variables: Mapping[str, Any], model: Any) -> list[Stored]:
    """Return the variables of a model with their values, those of its optimizer too.

    Args:
        variables: The variables by path.
        model: The model.
    """
    optimizer = getattr(model, "optimizer", None)
    slots = {id(variable) for variable in (optimizer.variables if optimizer is not None else ())}
    return [
        Stored(
            VariableSpec(
                path,
                tuple(int(n) for n in variable.shape),
                keras.backend.standardize_dtype(variable.dtype),
                _kind_of(variable, id(variable) in slots),
            ),
            variable.value,
        )
        for path, variable in variables.items()
    ]


def restored(variables: Mapping[str, Any], arrays: Iterable[tuple[str, Any]]) -> None:
    """Give variables other values."""
    for path, array in arrays:
        variables[path].assign(array)


def _kind_of(variable: Any, is_slot: bool) -> Kind:
    if is_slot:
        return Kind.SLOT
    if is_seed_state(variable):
        return Kind.RNG
    return Kind.WEIGHT if variable.trainable else Kind.STATE
