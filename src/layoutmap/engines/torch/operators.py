"""Operators of torch's dispatcher: the names of their arguments, what they change, and what of theirs is a view."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from layoutmap.engines.tested import Needed, check_names

with Needed("torch"):
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket

check_names(
    "torch", (torch.ops.aten.add.Tensor, "_schema _overloadname"), (OpOverloadPacket, "_qualified_op_name")
)
check_names("torch", (torch._C, "_jit_resolve_packet"))

Function = Callable[..., Any]
"""A function or method of torch, an operator, or what takes its place."""

Args = Sequence[Any]
"""The positional arguments of a call."""

Kwargs = Mapping[str, Any]
"""The arguments of a call by name."""

OPERATORS: tuple[type[Any], ...] = (OpOverload, OpOverloadPacket)
"""The types of `torch.ops.<namespace>.<name>.<overload>`, and of that without an overload."""

COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "device_mesh")
"""Where the operators are that communicate."""

overload_name = attrgetter("_overloadname")
"""Which overload of its name an operation is."""


@functools.cache
def argument_names(op: OpOverload) -> tuple[str, ...]:
    """The names of an operation's arguments, in order."""
    return tuple(argument.name for argument in op._schema.arguments)


@functools.cache
def written_arguments(op: OpOverload) -> tuple[tuple[int, str], ...]:
    """Place and name of each argument that an operation changes in place."""
    return tuple(
        (i, argument.name)
        for i, argument in enumerate(op._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in ("running_mean", "running_var")  # some batch norms do not say that they do
    )


@functools.cache
def is_view(op: OpOverload) -> bool:
    """Whether what an operation returns may be in the memory of its arguments."""
    return any(result.alias_info is not None for result in op._schema.returns)


@functools.cache
def only_views(op: OpOverload) -> bool:
    """Whether that is so, and the operation leaves its arguments as they are."""
    return is_view(op) and not written_arguments(op)


def operator_of(function: Any, args: Args, kwargs: Kwargs) -> object:
    """The overload of an operator of `torch.ops` that a call of it means."""
    if isinstance(function, OpOverload):
        return function  # pyright: ignore[reportUnknownVariableType]
    return getattr(function, torch._C._jit_resolve_packet(function._qualified_op_name, *args, **kwargs))  # pyright: ignore[reportUnknownMemberType]
