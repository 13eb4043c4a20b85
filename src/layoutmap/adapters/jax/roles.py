"""Find the roles of the axes of weights, for flax.nnx's own modules.

Lints of a plan use them, because sharding an axis that is summed over has other costs than sharding an output axis. How
other modules use their weights is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flax import nnx

from layoutmap.adapters.jax.pytrees import format_pytree_key
from layoutmap.core.variables import AxisRoles

_NORMS = (nnx.BatchNorm, nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm)
_HEAD_SIZE = "head_dim"
"""Attribute in which attention modules store the size of a head."""


def find_weight_axis_roles(
    modules: Sequence[tuple[Sequence[object], nnx.Module]],
) -> dict[tuple[str, ...], AxisRoles]:
    """Return a dict from the path of each weight to the roles of its axes in its module, if these are known."""
    head_sizes = {
        id(each): size
        for _, module in modules
        if isinstance(size := getattr(module, _HEAD_SIZE, None), int)
        for each in vars(module).values()
        if isinstance(each, nnx.Linear)  # other classes store heads along an axis of their own
    }
    found: dict[tuple[str, ...], AxisRoles] = {}
    for keys, module in modules:
        for attribute, roles in _iterate_axis_roles_of_weights(module):
            if len(roles) == len(getattr(getattr(module, attribute, None), "shape", ())):
                path = tuple(map(format_pytree_key, (*keys, attribute)))
                found[path] = AxisRoles(tuple(roles), head_sizes.get(id(module)))
    return found


def _iterate_axis_roles_of_weights(module: object) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield a pair for each weight of a module: the name of its attribute, and the role of each of its axes."""
    if isinstance(module, nnx.LinearGeneral):
        batch = [""] * len(module.batch_axis)
        out = _make_numbered_roles("out", len(module.out_features))
        yield "kernel", (*batch, *_make_numbered_roles("in", len(module.in_features)), *out)
        yield "bias", (*batch, *out)
    elif isinstance(module, nnx.Linear):
        yield "kernel", ("in.0", "out.0")
        yield "bias", ("out.0",)
    elif isinstance(module, nnx.Einsum):
        yield from _iterate_axis_roles_of_einsum(module.einsum_str or "")
    elif isinstance(module, nnx.Conv):
        yield "kernel", (*[""] * (len(module.kernel_shape) - 2), "in.0", "out.0")
        yield "bias", ("out.0",)
    elif isinstance(module, nnx.Embed):
        yield "embedding", ("rows", "out.0")
    elif isinstance(module, nnx.LoRA):
        yield "lora_a", ("in.0", "")
        yield "lora_b", ("", "out.0")
    elif isinstance(module, _NORMS):
        yield "scale", ("out.0",)
        yield "bias", ("out.0",)


def _make_numbered_roles(role: str, count: int) -> list[str]:
    return [f"{role}.{i}" for i in range(count)]


def _iterate_axis_roles_of_einsum(equation: str) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield pairs for the attributes `kernel` and `bias`: the name, and the role of each axis in an einsum equation."""
    operands, _, result = equation.replace("...", "").replace(" ", "").partition("->")
    inputs, _, kernel = operands.partition(",")
    summed = [letter for letter in kernel if letter in inputs and letter not in result]
    put_out = [letter for letter in result if letter in kernel and letter not in inputs]
    names = dict(zip(summed, _make_numbered_roles("in", len(summed)), strict=True))
    names |= dict(zip(put_out, _make_numbered_roles("out", len(put_out)), strict=True))
    yield "kernel", [names.get(letter, "") for letter in kernel]
    yield "bias", [names.get(letter, "") for letter in result if letter in kernel]
