"""Convert torch's dtypes and tensors to and from numpy, with `ml_dtypes` for bfloat16 and float8."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import torch

from layoutmap.core.blocks import NumpyArray
from layoutmap.engines.checks import is_python_number_or_list, make_bad_dtype_error, make_non_numeric_error


def find_torch_dtype(name: str, path: str) -> torch.dtype:
    """Return the torch dtype with a name, such as `"float32"`. An error message names `path`, the variable's path.

    Raises:
        EngineError: Torch has no dtype of that name.
    """
    found = getattr(torch, name, None)
    if isinstance(found, torch.dtype):
        return found
    raise make_bad_dtype_error("torch", name, path)


def format_dtype(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype without `torch.`, as numpy and `ml_dtypes` call it."""
    return str(dtype).removeprefix("torch.")


_NAMES_OF_ML_DTYPES = {
    *(
        "bfloat16",
        "complex32",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
}
_BITS: dict[int, type[np.generic]] = {1: np.uint8, 2: np.uint16, 4: np.int32}


@functools.cache
def _is_numpy_dtype(dtype: torch.dtype) -> bool:
    try:
        torch.empty(0, dtype=dtype).numpy()
    except TypeError:
        return False
    return True


def to_numpy(tensor: torch.Tensor) -> NumpyArray:
    """Return a copy of an unsharded tensor as a numpy array. bfloat16 and float8 become types of `ml_dtypes`."""
    # torch only marks a tensor as conjugated or negated, as in `x.conj().imag`, so compute the actual values.
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if _is_numpy_dtype(tensor.dtype):
        return tensor.numpy().copy()
    bits = tensor.view(getattr(torch, np.dtype(_BITS[tensor.itemsize]).name)).numpy().copy()
    return bits.view(np.dtype(getattr(ml_dtypes, format_dtype(tensor.dtype))))


def to_torch(values: NumpyArray, *, copy: bool = True) -> torch.Tensor:
    """Return a torch tensor with the values and element type of a numpy array.

    Args:
        values: The values.
        copy: Whether the values may change later; if not, the tensor may share their memory.

    Raises:
        EngineError: Torch has no dtype for the elements.
    """
    values = np.array(values, copy=copy or not values.flags.writeable or None, order="C")
    if values.dtype.name in _NAMES_OF_ML_DTYPES and hasattr(torch, values.dtype.name):
        bits = torch.from_numpy(values.view(_BITS[values.itemsize]))  # pyright: ignore[reportUnknownMemberType]
        return bits.view(getattr(torch, values.dtype.name))
    try:
        return torch.from_numpy(values)  # pyright: ignore[reportUnknownMemberType]
    except TypeError:
        raise make_non_numeric_error("torch", values.dtype) from None


def canonicalize_values(values: Any) -> NumpyArray:
    """Return values as a numpy array in the dtype that torch would give them.

    Raises:
        EngineError: Torch cannot store such elements.
    """
    values = torch.as_tensor(values).numpy() if is_python_number_or_list(values) else np.asarray(values)
    to_torch(values[:0] if values.ndim else values)
    return values
