"""Inspect operators of torch's dispatcher: argument names, changed arguments, and views."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from layoutmap.engines.tested import ImportErrorConverter, check_names_exist

with ImportErrorConverter("torch"):
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket

check_names_exist(
    "torch", (torch.ops.aten.add.Tensor, "_schema _overloadname"), (OpOverloadPacket, "_qualified_op_name")
)
check_names_exist("torch", (torch._C, "_jit_resolve_packet"))

Function = Callable[..., Any]
"""A function or method of torch, an operator, or a replacement of one."""

Args = Sequence[Any]
"""The positional arguments of a call."""

Kwargs = Mapping[str, Any]
"""The arguments of a call by name."""

OPERATORS: tuple[type[Any], ...] = (OpOverload, OpOverloadPacket)
"""The types of `torch.ops.<namespace>.<name>.<overload>` and of `torch.ops.<namespace>.<name>`."""

COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "device_mesh")
"""The namespaces of the operators that communicate between devices."""

get_overload_name = attrgetter("_overloadname")
"""Return the name of an operator's overload, such as `"Tensor"` or `"out"`."""


@functools.cache
def list_argument_names(op: OpOverload) -> tuple[str, ...]:
    """Return the names of an operator's arguments, in order."""
    return tuple(argument.name for argument in op._schema.arguments)


@functools.cache
def list_written_arguments(op: OpOverload) -> tuple[tuple[int, str], ...]:
    """Return the position and name of each argument that an operator changes in place."""
    return tuple(
        (i, argument.name)
        for i, argument in enumerate(op._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name
        in ("running_mean", "running_var")  # some batch norms write these, but their schemas do not say so
    )


def get_operator_name(op: OpOverload) -> str:
    """Return the name of an operator without its overload, such as `"aten::add"`."""
    return op._schema.name


def count_results(op: OpOverload) -> int:
    """Return the number of results of an operator."""
    return len(op._schema.returns)


@functools.cache
def can_return_view(op: OpOverload) -> bool:
    """Return whether an operator's results may share memory with its arguments."""
    return any(result.alias_info is not None for result in op._schema.returns)


@functools.cache
def is_pure_view(op: OpOverload) -> bool:
    """Return whether an operator returns views and changes no argument."""
    return can_return_view(op) and not list_written_arguments(op)


def resolve_overload(function: Any, args: Args, kwargs: Kwargs) -> object:
    """Return the overload that a call of an operator of `torch.ops` selects."""
    if isinstance(function, OpOverload):
        return function  # pyright: ignore[reportUnknownVariableType]
    return getattr(function, torch._C._jit_resolve_packet(function._qualified_op_name, *args, **kwargs))  # pyright: ignore[reportUnknownMemberType]
