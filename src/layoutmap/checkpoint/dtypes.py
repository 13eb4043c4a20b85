"""Look up dtypes by name: as numpy dtypes, and as codes in safetensors headers."""

from __future__ import annotations

from typing import Any

import numpy as np

from layoutmap.core.errors import CheckpointError

SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""The safetensors code of each dtype. Other dtypes are written as unsigned integers of their size."""

_UNSIGNED_CODES = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}


def get_numpy_dtype(name: str, where: str = "") -> np.dtype[Any]:
    """Return the numpy dtype of this name. If numpy has none, take it from the package ml_dtypes.

    Args:
        name: The name, as in `"bfloat16"`.
        where: The variable with this dtype, for the message.

    Raises:
        CheckpointError: No such dtype exists, or the package ml_dtypes is needed and not installed.
    """
    try:
        found = np.dtype(name)
        if found.kind in "biufc" or (found.kind == "V" and found.name == name and found.fields is None):
            return found
    except (TypeError, ValueError, SyntaxError):  # numpy raises any of these while it parses the name
        pass
    try:
        import ml_dtypes  # imported here, because it may be missing: only the frameworks install it
    except ModuleNotFoundError:
        ml_dtypes = None
    extended = getattr(ml_dtypes, name, None)
    if np.generic not in getattr(extended, "__mro__", ()):
        raise CheckpointError(
            f"{where}{': ' * bool(where)}element type {name!r} is not known",
            why="numpy has no such type, and neither has ml_dtypes"
            + ("" if ml_dtypes else ", which is not installed"),
            fix="pip install ml_dtypes" if ml_dtypes is None else "save the values in a known type",
        )
    return np.dtype(extended)


def get_safetensors_dtype_and_values_per_element(name: str, itemsize: int) -> tuple[str, int]:
    """Return the safetensors code that stores a dtype, and the number of values of this code per element.

    Example:
        >>> [get_safetensors_dtype_and_values_per_element(*each) for each in (("int4", 1), ("complex128", 16))]
        [('U8', 1), ('U64', 2)]
    """
    if name in SAFETENSORS:
        return SAFETENSORS[name], 1
    size = next((n for n in (itemsize, 8) if n in _UNSIGNED_CODES and itemsize % n == 0), 1)
    return _UNSIGNED_CODES[size], itemsize // size
