"""Functions of DTensors that are computed on gathered tensors, and the warning of operators that are.

Each process computes all of it, from tensors that were gathered for it; its result is replicated.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from layoutmap.core.errors import LayoutMapWarning, format_message
from layoutmap.core.users_line import level_of_user
from layoutmap.engines.torch.dtensor_ops.shards import mesh_in
from layoutmap.engines.torch.operators import (
    OPERATORS,
    Args,
    Function,
    Kwargs,
    operator_of,
    written_arguments,
)
from layoutmap.engines.torch.placing import everywhere, full_tensor, is_everywhere, like, with_gradient
from layoutmap.engines.torch.trees import tree_leaves, tree_map
from layoutmap.engines.torch.unseen import check, numbers_of


def on_gathered(
    function: Function,
    args: Args,
    kwargs: Kwargs,
    write: Callable[[DTensor, torch.Tensor], object] = lambda old, new: old.copy_(like(new, old)),
) -> Any:
    """Compute a function on gathered tensors; gradients pass. What it changes keeps its layout, or stays plain.

    Args:
        function: The function.
        args: Its arguments, of which some are DTensors.
        kwargs: And by name.
        write: Gives a DTensor the values that the function has changed it to.
    """
    mesh = mesh_in(tree_leaves((args, kwargs)))
    changed = changed_by(function, args, kwargs)
    plain = {id(each): full_tensor(each).clone() if isinstance(each, DTensor) else each for each in changed}

    def off_mesh(value: object) -> object:
        return plain[id(value)] if id(value) in plain else full_tensor(value)

    args, kwargs = tree_map(off_mesh, (tuple(args), dict(kwargs)))
    result = function(*args, **kwargs)
    for each in changed:
        if isinstance(each, DTensor):
            write(each, plain[id(each)])
    given = {id(plain[id(each)]): each for each in changed}  # what is returned may be the argument itself

    def on_mesh(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return given[id(value)] if id(value) in given else everywhere(value, mesh)

    return tree_map(on_mesh, result)


def changed_by(function: Function, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    """The tensors that a call changes: as an operator's schema says, or by the name of any other function."""
    if isinstance(function, OPERATORS):
        written = written_arguments(operator_of(function, args, kwargs))
        found: Any = [args[place] if place < len(args) else kwargs.get(name) for place, name in written]
    else:
        found = [args[:1] if changes_in_place(function) else (), kwargs.get("out")]
    return [each for each in tree_leaves(found) if isinstance(each, torch.Tensor)]


def custom(function: Function, args: Args, kwargs: Kwargs) -> object:  # why: decisions/0057
    """A custom operator: its kernels, and its formula for gradients, are written for the memory of plain tensors."""
    if not all(is_everywhere(each) for each in tree_leaves((args, kwargs)) if isinstance(each, DTensor)):
        warn_of_gathering(name_of(function), "DTensor does not know what a custom operator computes")
    return on_gathered(function, args, kwargs)


def read(function: Function, args: Args, kwargs: Kwargs) -> object:
    """A function that takes values out of a tensor: those of the global tensor, not of a shard or a summand."""
    with torch.no_grad():
        return function(*tree_map(complete, tuple(args)), **kwargs)


def complete(value: object) -> object:
    """All values of a DTensor, when they are there: those of a collective under way are not read of its result."""
    plain = full_tensor(value)
    return plain.wait() if isinstance(value, DTensor) and hasattr(plain, "wait") else plain


@functools.cache
def changes_in_place(function: Function) -> bool:
    """Whether a function changes its first argument, by its name."""
    name = function.__name__
    return (name.endswith("_") and not name.endswith("__")) or name in _CHANGING


_CHANGING = {
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__imatmul__", "__itruediv__", "__ifloordiv__"),
    *("__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
}


def name_of(function: Function) -> str:
    """The name of a function in messages."""
    if isinstance(function, OPERATORS):
        return f"torch.ops.{getattr(function, 'overloadpacket', function)}"
    module = getattr(function, "__module__", None) or "torch.Tensor"
    return f"{module.removesuffix('._tensor')}.{function.__name__}"


_warned: set[str] = set()


def warn_of_gathering(name: str, why: str) -> None:
    """Warn that a function is computed on gathered tensors, once for each function."""
    if name in _warned:  # a step is taken many times
        return
    _warned.add(name)
    why = next(iter(why.strip().splitlines()), "")
    text = format_message(
        f"{name}: computed on gathered tensors, by each process",
        {},
        why or "DTensor has no rule for it",
        "call it on what is small, or relayout its arguments first",
    )
    warnings.warn(text, LayoutMapWarning, stacklevel=level_of_user({"torch", "functools"}))


_TENSOR = torch.Tensor
_READING = (  # of which DTensor reads the part of this device: pytorch/pytorch#166638
    *("item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "__array__", "__bool__", "__complex__"),
    *("__contains__", "__float__", "__format__", "__index__", "__int__"),
)
READS = dict.fromkeys(
    [*(getattr(_TENSOR, name) for name in _READING), torch.equal, torch.allclose, torch.is_nonzero], read
)


def _split(function: Function, args: Args, kwargs: Kwargs) -> object:
    """`tensor_split`, whose places torch reads from memory."""
    return function(args[0], *map(full_tensor, args[1:]), **tree_map(full_tensor, kwargs))


def _of_list(function: Function, args: Args, kwargs: Kwargs) -> object:
    """`torch.tensor` of a list of tensors, which torch reads from memory."""

    def plain(value: object) -> Any:
        return tree_map(full_tensor, value) if isinstance(value, (list, tuple)) else value

    return function(*map(plain, args), **{name: plain(each) for name, each in kwargs.items()})


def product(function: Function, args: Args, kwargs: Kwargs) -> object:
    """`prod`; for DTensors torch computes its gradient without the result, which may be changed unseen."""
    given = dict(kwargs)
    x = args[0] if args else given.pop("input")
    numbers = numbers_of(x)

    def checked(gradient: torch.Tensor) -> object:
        check(numbers)
        return gradient

    result = function(with_gradient(x, checked), *args[1:], **given)
    numbers += numbers_of(result)
    return result


GATHERED: dict[object, Function] = {
    **dict.fromkeys((torch.quantile, _TENSOR.quantile, torch.nanquantile, _TENSOR.nanquantile), on_gathered),
    torch.prod: product,
    **dict.fromkeys((torch.tensor_split, _TENSOR.tensor_split), _split),
    **dict.fromkeys((torch.tensor, torch.as_tensor, torch.asarray, _TENSOR.new_tensor), _of_list),
    # Their gradients compare values, which have to be exact: a sum that is written to is rounded.
    **dict.fromkeys((_TENSOR.index_reduce_, _TENSOR.scatter_reduce_), on_gathered),
}
