"""Compute functions on gathered DTensors, and warn about it.

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
from layoutmap.core.users_line import find_user_stacklevel
from layoutmap.engines.torch.dtensor_ops.shards import find_mesh
from layoutmap.engines.torch.operators import (
    OPERATORS,
    Args,
    Function,
    Kwargs,
    list_written_arguments,
    resolve_overload,
)
from layoutmap.engines.torch.placing import (
    full_tensor,
    hook_gradient,
    is_replicated,
    place_like,
    replicate_tensor,
)
from layoutmap.engines.torch.trees import tree_leaves, tree_map
from layoutmap.engines.torch.unseen import check, snapshot_counters


def compute_gathered(
    function: Function,
    args: Args,
    kwargs: Kwargs,
    write: Callable[[DTensor, torch.Tensor], object] = lambda old, new: old.copy_(place_like(new, old)),
) -> Any:
    """Compute a function on gathered tensors. Gradients pass, and DTensors that it changes keep their layout.

    Args:
        function: The function.
        args: Its arguments, of which some are DTensors.
        kwargs: And by name.
        write: Gives a DTensor the values that the function has changed it to.
    """
    mesh = find_mesh(tree_leaves((args, kwargs)))
    changed = find_changed(function, args, kwargs)
    plain = {id(each): full_tensor(each).clone() if isinstance(each, DTensor) else each for each in changed}

    def gather_value(value: object) -> object:
        return plain[id(value)] if id(value) in plain else full_tensor(value)

    args, kwargs = tree_map(gather_value, (tuple(args), dict(kwargs)))
    result = function(*args, **kwargs)
    for each in changed:
        if isinstance(each, DTensor):
            write(each, plain[id(each)])
    given = {id(plain[id(each)]): each for each in changed}  # the result may be one of the changed arguments

    def replicate_result(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return given[id(value)] if id(value) in given else replicate_tensor(value, mesh)

    return tree_map(replicate_result, result)


def find_changed(function: Function, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    """Return the tensors that a call changes, by the operator's schema or the function's name."""
    if isinstance(function, OPERATORS):
        written = list_written_arguments(resolve_overload(function, args, kwargs))
        found: Any = [args[place] if place < len(args) else kwargs.get(name) for place, name in written]
    else:
        found = [args[:1] if is_in_place(function) else (), kwargs.get("out")]
    return [each for each in tree_leaves(found) if isinstance(each, torch.Tensor)]


# No sharding is known for a custom operator, so it runs on gathered tensors (decisions/0057).
def compute_custom_operator(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Compute a custom operator on gathered tensors, because its kernels expect unsharded memory."""
    if not all(is_replicated(each) for each in tree_leaves((args, kwargs)) if isinstance(each, DTensor)):
        warn_of_gathering(format_function(function), "DTensor does not know what a custom operator computes")
    return compute_gathered(function, args, kwargs)


def read_gathered(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Call a function that reads values, with gathered tensors in place of DTensors."""
    with torch.no_grad():
        return function(*tree_map(gather_and_wait, tuple(args)), **kwargs)


def gather_and_wait(value: object) -> object:
    """Return all values of a DTensor, and wait for a collective in progress. Other values stay unchanged."""
    plain = full_tensor(value)
    return plain.wait() if isinstance(value, DTensor) and hasattr(plain, "wait") else plain


@functools.cache
def is_in_place(function: Function) -> bool:
    """Return whether a function changes its first argument, judging by its name."""
    name = function.__name__
    return (name.endswith("_") and not name.endswith("__")) or name in _CHANGING


_CHANGING = {
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__imatmul__", "__itruediv__", "__ifloordiv__"),
    *("__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
}


def format_function(function: Function) -> str:
    """Return the name of a function for messages."""
    if isinstance(function, OPERATORS):
        return f"torch.ops.{getattr(function, 'overloadpacket', function)}"
    module = getattr(function, "__module__", None) or "torch.Tensor"
    return f"{module.removesuffix('._tensor')}.{function.__name__}"


_warned_functions: set[str] = set()


def warn_of_gathering(name: str, why: str) -> None:
    """Warn that a function is computed on gathered tensors, once for each function."""
    if name in _warned_functions:  # warn once per function
        return
    _warned_functions.add(name)
    why = next(iter(why.strip().splitlines()), "")
    text = format_message(
        f"{name}: computed on gathered tensors, by each process",
        {},
        why or "DTensor has no rule for it",
        "call it on what is small, or relayout its arguments first",
    )
    warnings.warn(text, LayoutMapWarning, stacklevel=find_user_stacklevel({"torch", "functools"}))


_TENSOR = torch.Tensor
_READING = (  # DTensor reads only the local part of these: pytorch/pytorch#166638
    *("item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "__array__", "__bool__", "__complex__"),
    *("__contains__", "__float__", "__format__", "__index__", "__int__"),
)
READS = dict.fromkeys(
    [*(getattr(_TENSOR, name) for name in _READING), torch.equal, torch.allclose, torch.is_nonzero],
    read_gathered,
)


def _compute_tensor_split(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Compute `tensor_split`, because torch reads its split points from memory."""
    return function(args[0], *map(full_tensor, args[1:]), **tree_map(full_tensor, kwargs))


def _convert_list(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Compute `torch.tensor` of a list of tensors, because torch reads them from memory."""

    def gather_list(value: object) -> Any:
        return tree_map(full_tensor, value) if isinstance(value, (list, tuple)) else value

    return function(*map(gather_list, args), **{name: gather_list(each) for name, each in kwargs.items()})


def compute_product(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Compute `prod`, and refuse its backward pass if the input or result was changed meanwhile."""
    given = dict(kwargs)
    x = args[0] if args else given.pop("input")
    numbers = snapshot_counters(x)

    def check_gradient(gradient: torch.Tensor) -> object:
        check(numbers)
        return gradient

    result = function(hook_gradient(x, check_gradient), *args[1:], **given)
    numbers += snapshot_counters(result)
    return result


GATHERED: dict[object, Function] = {
    **dict.fromkeys(
        (torch.quantile, _TENSOR.quantile, torch.nanquantile, _TENSOR.nanquantile), compute_gathered
    ),
    torch.prod: compute_product,
    **dict.fromkeys((torch.tensor_split, _TENSOR.tensor_split), _compute_tensor_split),
    **dict.fromkeys((torch.tensor, torch.as_tensor, torch.asarray, _TENSOR.new_tensor), _convert_list),
    # Their gradients compare values, so partial sums, which round, must be gathered.
    **dict.fromkeys((_TENSOR.index_reduce_, _TENSOR.scatter_reduce_), compute_gathered),
}
