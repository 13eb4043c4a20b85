"""Compute functions on gathered DTensors, and warn about it.

Each process gathers the tensors and computes the whole function, so the result is replicated.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from layoutmap.core.errors import LayoutMapWarning, format_message
from layoutmap.core.users_line import find_user_stacklevel
from layoutmap.engines.patches import set_attribute_temporarily
from layoutmap.engines.torch.dtensor_ops.shards import find_device_mesh
from layoutmap.engines.torch.operators import (
    OPERATORS,
    Args,
    Function,
    Kwargs,
    list_written_arguments,
    resolve_overload,
)
from layoutmap.engines.torch.placing import (
    gather_if_sharded,
    is_replicated,
    replicate_tensor,
    shard_like,
    transform_gradient_in_backward,
)
from layoutmap.engines.torch.trees import tree_leaves, tree_map
from layoutmap.engines.torch.unseen import check_tensor_unchanged, snapshot_change_counters


def compute_on_gathered_tensors(
    function: Function,
    args: Args,
    kwargs: Kwargs,
    write_back: Callable[[DTensor, torch.Tensor], object] = lambda old, new: old.copy_(shard_like(new, old)),
) -> Any:
    """Compute a function on gathered tensors, and return its result, replicated. Gradients flow back.

    DTensors that the function changes keep their layout: `write_back` writes the new values to them.
    """
    mesh = find_device_mesh(tree_leaves((args, kwargs)))
    changed = find_changed_tensors(function, args, kwargs)
    full = {
        id(each): gather_if_sharded(each).clone() if isinstance(each, DTensor) else each for each in changed
    }

    def gather_value(value: object) -> object:
        return full[id(value)] if id(value) in full else gather_if_sharded(value)

    args, kwargs = tree_map(gather_value, (tuple(args), dict(kwargs)))
    result = function(*args, **kwargs)
    for each in changed:
        if isinstance(each, DTensor):
            write_back(each, full[id(each)])
    # The function may return a gathered copy that it changed, so map the copy's id to the argument to return instead.
    given = {id(full[id(each)]): each for each in changed}

    def replicate_result(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return given[id(value)] if id(value) in given else replicate_tensor(value, mesh)

    return tree_map(replicate_result, result)


def find_changed_tensors(function: Function, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    """Return the tensors that a call changes in place, by the schema of an operator or by the name of a function."""
    if isinstance(function, OPERATORS):
        written = list_written_arguments(resolve_overload(function, args, kwargs))
        found: Any = [args[place] if place < len(args) else kwargs.get(name) for place, name in written]
    else:
        found = [args[:1] if is_in_place(function) else (), kwargs.get("out")]
    return [each for each in tree_leaves(found) if isinstance(each, torch.Tensor)]


# How a custom operator may be sharded is not known, so it runs on gathered tensors (decisions/0057).
def compute_custom_operator(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Compute a custom operator on gathered tensors, because its kernels expect unsharded memory."""
    if not all(is_replicated(each) for each in tree_leaves((args, kwargs)) if isinstance(each, DTensor)):
        warn_of_gathering(
            format_function_name(function), "DTensor does not know what a custom operator computes"
        )
    return compute_on_gathered_tensors(function, args, kwargs)


def call_with_gathered_values(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Call a function that reads values, such as `tolist`, with gathered tensors in place of DTensors."""
    with torch.no_grad():
        return function(*tree_map(gather_and_wait, tuple(args)), **kwargs)


def gather_and_wait(value: object) -> object:
    """Gather a DTensor, and wait for its collectives. Return the plain tensor, or any other value unchanged."""
    gathered = gather_if_sharded(value)
    return gathered.wait() if isinstance(value, DTensor) and hasattr(gathered, "wait") else gathered


@functools.cache
def is_in_place(function: Function) -> bool:
    """Return whether a function changes its first argument. Only its name is considered."""
    name = function.__name__
    return (name.endswith("_") and not name.endswith("__")) or name in _CHANGING


_CHANGING = {
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__imatmul__", "__itruediv__", "__ifloordiv__"),
    *("__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
}


def format_function_name(function: Function) -> str:
    """Return the full name of a function, as messages show it."""
    if isinstance(function, OPERATORS):
        return f"torch.ops.{getattr(function, 'overloadpacket', function)}"
    module = getattr(function, "__module__", None) or "torch.Tensor"
    return f"{module.removesuffix('._tensor')}.{function.__name__}"


_warned_functions: set[str] = set()


class _ThreadState(threading.local):
    """Whether this thread warns of functions that are computed on gathered tensors."""

    warns = True


_thread_state = _ThreadState()


def ignore_gathering_temporarily() -> AbstractContextManager[None]:
    """Do not warn of gathered tensors until the block ends, because several processes do not gather there."""
    return set_attribute_temporarily(_thread_state, "warns", False)


def warn_of_gathering(name: str, why: str) -> None:
    """Warn that a function is computed on gathered tensors. It warns once per function."""
    if name in _warned_functions or not _thread_state.warns:
        return
    _warned_functions.add(name)
    why = next(iter(why.strip().splitlines()), "")
    text = format_message(
        f"{name} is computed on gathered tensors, by each process",
        {},
        why or "DTensor has no rule for it",
        "call it on small tensors, or relayout its arguments first",
    )
    warnings.warn(text, LayoutMapWarning, stacklevel=find_user_stacklevel({"torch", "functools"}))


_TENSOR = torch.Tensor
_READING = (  # DTensor would read only local values, so gather (pytorch/pytorch#166638)
    *("item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "__array__", "__bool__", "__complex__"),
    *("__contains__", "__float__", "__format__", "__index__", "__int__"),
)
READS = dict.fromkeys(
    [*(getattr(_TENSOR, name) for name in _READING), torch.equal, torch.allclose, torch.is_nonzero],
    call_with_gathered_values,
)


def _compute_tensor_split(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Compute `tensor_split` with gathered split points, because torch reads these from memory."""
    return function(args[0], *map(gather_if_sharded, args[1:]), **tree_map(gather_if_sharded, kwargs))


def _create_tensor_from_list(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Compute `torch.tensor` of a list. DTensors in it are gathered, because torch reads their memory."""

    def gather_tensors_in_list(value: object) -> Any:
        return tree_map(gather_if_sharded, value) if isinstance(value, (list, tuple)) else value

    return function(
        *map(gather_tensors_in_list, args),
        **{name: gather_tensors_in_list(each) for name, each in kwargs.items()},
    )


def compute_prod(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Compute `prod`. Its backward pass raises if the input or the result was changed through `tensor.data`."""
    given = dict(kwargs)
    x = args[0] if args else given.pop("input")
    numbers = snapshot_change_counters(x)

    def check_and_return_gradient(gradient: torch.Tensor) -> object:
        check_tensor_unchanged(numbers)
        return gradient

    result = function(transform_gradient_in_backward(x, check_and_return_gradient), *args[1:], **given)
    numbers += snapshot_change_counters(result)
    return result


GATHERED: dict[object, Function] = {
    **dict.fromkeys(
        (torch.quantile, _TENSOR.quantile, torch.nanquantile, _TENSOR.nanquantile),
        compute_on_gathered_tensors,
    ),
    torch.prod: compute_prod,
    **dict.fromkeys((torch.tensor_split, _TENSOR.tensor_split), _compute_tensor_split),
    **dict.fromkeys(
        (torch.tensor, torch.as_tensor, torch.asarray, _TENSOR.new_tensor), _create_tensor_from_list
    ),
    # The gradients of these functions compare values for equality, which fails for the different rounding of partial
    # sums, so reduce and gather the arguments.
    **dict.fromkeys((_TENSOR.index_reduce_, _TENSOR.scatter_reduce_), compute_on_gathered_tensors),
}
