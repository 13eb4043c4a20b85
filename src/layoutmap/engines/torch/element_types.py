"""Element types of torch, and plain tensors to and from numpy, whose further types are those of `ml_dtypes`."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import torch

from layoutmap.core.blocks import NumpyArray
from layoutmap.engines.checks import no_element_type, no_numbers


def torch_dtype(name: str, path: str) -> torch.dtype:
    """The element type of a name.

    Raises:
        EngineError: Torch has none of that name.
    """
    found = getattr(torch, name, None)
    if isinstance(found, torch.dtype):
        return found
    raise no_element_type("torch", name, path)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of an element type, as numpy has it."""
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
def _numpy_has(dtype: torch.dtype) -> bool:
    try:
        torch.empty(0, dtype=dtype).numpy()
    except TypeError:
        return False
    return True


def to_numpy(tensor: torch.Tensor) -> NumpyArray:
    """A copy of a plain tensor's values; bfloat16 and its like in the types of `ml_dtypes`."""
    # Torch only notes that a tensor is conjugated, or negative, as `x.conj().imag` is.
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if _numpy_has(tensor.dtype):
        return tensor.numpy().copy()
    bits = tensor.view(getattr(torch, np.dtype(_BITS[tensor.itemsize]).name)).numpy().copy()
    return bits.view(np.dtype(getattr(ml_dtypes, dtype_name(tensor.dtype))))


def to_torch(values: NumpyArray, *, copy: bool = True) -> torch.Tensor:
    """A tensor of the element type that numpy values have.

    Args:
        values: The values.
        copy: Whether they may change later; if not, the tensor may share their memory.

    Raises:
        EngineError: Torch holds no such elements.
    """
    values = np.array(values, copy=copy or not values.flags.writeable or None, order="C")
    if values.dtype.name in _NAMES_OF_ML_DTYPES and hasattr(torch, values.dtype.name):
        bits = torch.from_numpy(values.view(_BITS[values.itemsize]))  # pyright: ignore[reportUnknownMemberType]
        return bits.view(getattr(torch, values.dtype.name))
    try:
        return torch.from_numpy(values)  # pyright: ignore[reportUnknownMemberType]
    except TypeError:
        raise no_numbers("torch", values.dtype) from None


def canonical(values: NumpyArray) -> NumpyArray:
    """Numpy values as torch holds them, which is as they are.

    Raises:
        EngineError: Torch holds no such elements.
    """
    to_torch(values[:0] if values.ndim else values)
    return values
