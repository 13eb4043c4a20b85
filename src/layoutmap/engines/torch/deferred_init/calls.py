"""Find the effects of one torch operation: changed tensors, generators, and its caller."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from layoutmap.engines.torch.operators import Args, Kwargs, OpOverload, list_written_arguments
from layoutmap.engines.torch.trees import is_sequence, tree_leaves


def list_written_tensors(op: OpOverload, args: Args, kwargs: Kwargs) -> list[object]:
    """Return the tensors that an operation changes in place. A tensor argument that the call leaves out is None."""
    places = list_written_arguments(op)
    return tree_leaves([args[i] if i < len(args) else kwargs.get(name) for i, name in places])


def can_defer_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tape can defer a tensor: it must be strided and on the CPU."""
    return tensor.layout == torch.strided and tensor.device.type == "cpu"


def count_shape_elements(shape: Any) -> float:
    """Return the number of elements of a shape, or infinity if the value is not a sequence of integers."""
    is_shape = is_sequence(shape) and all(type(n) is int for n in shape)
    return math.prod(shape) if is_shape else math.inf


def find_random_generator(op: OpOverload, args: Args, kwargs: Kwargs) -> torch.Generator | None:
    """Return the generator that an operation draws from, or None if it draws nothing."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return None
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
    return given[0] if given else torch.default_generator


_INITIALIZER_MODULES = ("torch.nn.init", "torch.nn.utils", "keras.src.initializers")


def find_calling_initializer_name() -> str:
    """Return the name of the outermost public torch or Keras initializer among the callers, or an empty text."""
    found = ""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_INITIALIZER_MODULES):
            owner = frame.f_locals.get("self")
            name = frame.f_code.co_name if owner is None else type(owner).__name__
            module = "keras.initializers" if module.startswith("keras") else module.removeprefix("torch.")
            found = found if name.startswith("_") else f"{module}.{name}"
        frame = frame.f_back
    return found
