"""The effects of a call of one of torch's operations: tensors that it changes, generators, who asked for it."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from layoutmap.engines.torch.operators import Args, Kwargs, OpOverload, written_arguments
from layoutmap.engines.torch.trees import is_sequence, tree_leaves


def changed_by(op: OpOverload, args: Args, kwargs: Kwargs) -> list[object]:
    """The tensors that an operation changes in place."""
    places = written_arguments(op)
    return tree_leaves([args[i] if i < len(args) else kwargs.get(name) for i, name in places])


def can_wait(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a kind that a tape defers."""
    return tensor.layout == torch.strided and tensor.device.type == "cpu"


def size_of(shape: Any) -> float:
    """The number of elements of a shape, if it is one."""
    is_shape = is_sequence(shape) and all(type(n) is int for n in shape)
    return math.prod(shape) if is_shape else math.inf


def generator_of(op: OpOverload, args: Args, kwargs: Kwargs) -> torch.Generator | None:
    """The generator that an operation draws its random numbers from; `None` if it draws none."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return None
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
    return given[0] if given else torch.default_generator


_ASKING = ("torch.nn.init", "torch.nn.utils", "keras.src.initializers")


def asked_by() -> str:
    """The outermost function of torch.nn or initializer of Keras that asked for what is being recorded."""
    found = ""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_ASKING):
            owner = frame.f_locals.get("self")
            name = frame.f_code.co_name if owner is None else type(owner).__name__
            module = "keras.initializers" if module.startswith("keras") else module.removeprefix("torch.")
            found = found if name.startswith("_") else f"{module}.{name}"
        frame = frame.f_back
    return found
