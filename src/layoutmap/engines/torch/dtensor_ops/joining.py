"""Concatenate DTensors, also with empty tensors of one axis, which caches start with.

Before torch 2.14 DTensor takes such a tensor for one with as many axes as the others.
"""

from __future__ import annotations

import torch

from layoutmap.engines.tested import is_older_than
from layoutmap.engines.torch.operators import Args, Function, Kwargs

JOINS = (
    frozenset({torch.cat, torch.concat, torch.concatenate})
    if is_older_than("torch", "2.14")
    else frozenset[Function]()
)


def drop_empty_tensors(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Return the arguments of a concatenation without tensors of shape (0,), if other tensors have more axes."""
    tensors = args[0] if args else kwargs.get("tensors", ())
    kept = [each for each in tensors if tuple(each.shape) != (0,)]
    if not kept or max(each.ndim for each in kept) < 2:
        return args, kwargs
    return ((kept, *args[1:]), kwargs) if args else (args, {**kwargs, "tensors": kept})
