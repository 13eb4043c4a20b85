"""Functions of DTensors that are computed on gathered tensors, and the warning of operators that are.

Each process computes all of it, from tensors that were gathered for it; its result is replicated.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from layoutmap.core.errors import LayoutMapWarning, format_message
from layoutmap.engines.torch.dtensor_ops.conversions import everywhere, full_tensor, like
from layoutmap.engines.torch.dtensor_ops.shards import mesh_of
from layoutmap.engines.torch.private import tree_leaves, tree_map


def on_gathered(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Compute a function on gathered tensors; gradients pass. What it changes in place keeps its layout."""
    target = args[0] if args and changes_in_place(function) else None
    mesh = mesh_of(tree_leaves((args, kwargs)))
    targets = [each for each in tree_leaves(target) if isinstance(each, DTensor)]
    if targets:
        changed = tree_map(
            lambda each: full_tensor(each).clone() if isinstance(each, DTensor) else each, target
        )
        result = function(changed, *tree_map(full_tensor, tuple(args[1:])), **tree_map(full_tensor, kwargs))
        for old, new in zip(tree_leaves(target), tree_leaves(changed), strict=True):
            if isinstance(old, DTensor):
                old.copy_(like(new, old))
        return None if result is None else target
    result = function(*tree_map(full_tensor, tuple(args)), **tree_map(full_tensor, kwargs))
    if target is not None:
        return result
    return tree_map(lambda each: everywhere(each, mesh) if isinstance(each, torch.Tensor) else each, result)


def read(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A function that takes values out of a tensor: those of the global tensor, not of a shard or a summand."""
    with torch.no_grad():
        return function(*tree_map(full_tensor, tuple(args)), **kwargs)


@functools.cache
def changes_in_place(function: Callable[..., Any]) -> bool:
    """Whether a function changes its first argument, by its name."""
    name = function.__name__
    return (name.endswith("_") and not name.endswith("__")) or name in _CHANGING


_CHANGING = {
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__imatmul__", "__itruediv__", "__ifloordiv__"),
    *("__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
}


def name_of(function: Callable[..., Any]) -> str:
    """What a function is called in messages."""
    module = getattr(function, "__module__", None) or "torch.Tensor"
    return f"{module.removesuffix('._tensor')}.{function.__name__}"


_warned: set[str] = set()


def warn_of_gathering(name: str, why: str) -> None:
    """Warn that a function is computed on gathered tensors, once for each function."""
    if name in _warned:
        return
    _warned.add(name)
    why = next(iter(why.strip().splitlines()), "")
    text = format_message(
        f"{name}: computed on gathered tensors, by each process",
        {},
        why or "DTensor has no rule for it",
        "call it on what is small, or relayout its arguments first",
    )
    warnings.warn(text, LayoutMapWarning, stacklevel=_stacklevel())


def _stacklevel() -> int:
    """How far out the program's own code is, seen from whoever calls this."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_OWN:
        level, frame = level + 1, frame.f_back
    return level


_NOT_OWN = ("layoutmap", "torch", "contextlib", "functools")


_TENSOR = torch.Tensor
_READING = (
    *("item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "__array__", "__bool__", "__complex__"),
    *("__contains__", "__float__", "__format__", "__index__", "__int__"),
)
READS = dict.fromkeys(
    [*(getattr(_TENSOR, name) for name in _READING), torch.equal, torch.allclose, torch.is_nonzero], read
)


def _split(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`tensor_split`, whose places torch reads from memory."""
    return function(args[0], *map(full_tensor, args[1:]), **tree_map(full_tensor, kwargs))


def _of_list(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`torch.tensor` of a list of tensors, which torch reads from memory."""

    def plain(value: Any) -> Any:
        return tree_map(full_tensor, value) if isinstance(value, (list, tuple)) else value

    return function(*map(plain, args), **{name: plain(each) for name, each in kwargs.items()})


GATHERED: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.quantile, _TENSOR.quantile, torch.nanquantile, _TENSOR.nanquantile), on_gathered),
    **dict.fromkeys((torch.tensor_split, _TENSOR.tensor_split), _split),
    **dict.fromkeys((torch.tensor, torch.as_tensor, torch.asarray, _TENSOR.new_tensor), _of_list),
    # Their gradients compare values, which have to be exact: a sum that is written to is rounded.
    **dict.fromkeys((_TENSOR.index_reduce_, _TENSOR.scatter_reduce_), on_gathered),
}
