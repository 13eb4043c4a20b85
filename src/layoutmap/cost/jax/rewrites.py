"""Rewrite collectives as XLA does after its partitioner, so that their bytes are not overestimated."""

from __future__ import annotations

import re

from layoutmap.cost.jax.graph import (
    Block,
    Op,
    Value,
    detach_operation,
    get_results,
    remove_unused_operations,
    replace_value,
)

MOVES = frozenset(("transpose", "reshape", "convert", "broadcast_in_dim", "copy", "optimization_barrier"))
"""Operations that return an operand as it is, in another form or place."""


_SINGLE = ("custom_call", "return", "optimization_barrier")


def rewrite_block(block: Block) -> None:
    """Rewrite the operations of a block and of its inner blocks."""
    for op in block.ops:
        for inner in op.blocks:
            rewrite_block(inner)
    remove_unused_operations(block)
    _merge_equal_operations(block)
    _reduce_once(block)
    _merge_summed_reductions(block)
    _make_reduce_scatters(block)
    remove_unused_operations(block)
    _merge_summed_reductions(block)


def _merge_equal_operations(block: Block) -> None:
    """Merge equal operations on the same operands."""
    seen: dict[object, Op] = {}
    for op in list(block.ops):
        if op.is_fused or op.blocks or op.key is None or op.name in _SINGLE:
            continue
        key = (op.name, op.key, tuple(map(id, op.operands)))
        first = seen.setdefault(key, op)
        if first is not op:
            for old, new in zip(op.results, first.results, strict=True):
                replace_value(old, new)
    remove_unused_operations(block)


def _merge_summed_reductions(block: Block) -> None:
    """Replace the sum of two equal reductions by one reduction of a sum."""
    ops: list[Op] = []
    gone: set[int] = set()
    for op in block.ops:
        ops.append(op)
        makers = [value.maker for value in op.operands] if op.name == "add" else []
        if len(makers) != 2 or makers[0] is None or makers[1] is None or makers[0] is makers[1]:
            continue
        reductions = [each for each in makers if each is not None and _is_used_only_by(op, each)]
        if len(reductions) != 2 or _describe_reduction(reductions[0]) != _describe_reduction(reductions[1]):
            continue
        first = reductions[0]
        for each in reductions:
            replace_value(each.results[0], each.operands[0])
            detach_operation(each)
            gone.add(id(each))
        op.results[0].shape = first.operands[0].shape
        reduced = _make_all_reduce(op, op.results[0], first.dims, first.group)
        reduced.name, reduced.results[0].shape = first.name, first.results[0].shape
        ops.append(reduced)
    block.ops = [op for op in ops if id(op) not in gone]


def _reduce_once(block: Block) -> None:
    """Merge two consecutive all-reduces into one over the dims of both."""
    for op in block.ops:
        first = op.operands[0].maker if op.name == "all_reduce" and len(op.operands) == 1 else None
        if first is None or first.name != op.name or first.group or op.group or first.results[0].uses != [op]:
            continue
        if {*first.dims} & {*op.dims}:
            continue
        op.dims = (*first.dims, *op.dims)
        replace_value(first.results[0], first.operands[0])
    remove_unused_operations(block)


def split_all_reduces(block: Block) -> None:
    """Split an all-reduce of concatenated arrays, which XLA's compiler makes of several small ones."""
    for op in list(block.ops):
        for inner in op.blocks:
            split_all_reduces(inner)
        joined = op.operands[0].maker if op.name == "all_reduce" else None
        while joined is not None and joined.name == "reshape":
            joined = joined.operands[0].maker
        if joined is None or joined.name != "concatenate":
            continue
        taken: dict[int, list[Op]] = {}
        for use in op.results[0].uses:
            start = re.search(r"slice=\{\[(\d+):", str(use.key)) if use.name == "slice" else None
            taken.setdefault(int(start[1]) if start else -1, []).append(use)
        slices = [taken[start] for start in sorted(taken)]
        if [part.size for part in joined.operands] != [each[0].results[0].size for each in slices]:
            continue
        for part, uses in zip(joined.operands, slices, strict=True):
            at = part.maker or op
            value = Value(part.shape, part.dtype)
            value.maker = Op(
                op.name, [part], [value], at.where, at.is_backward, at.is_update, dims=op.dims, group=op.group
            )
            part.uses.append(value.maker)
            block.ops.insert(block.ops.index(op), value.maker)
            for use in uses:
                replace_value(use.results[0], value)
    remove_unused_operations(block)


def _is_used_only_by(op: Op, maker: Op) -> bool:
    return maker.name in ("all_reduce", "reduce_scatter") and maker.results[0].uses == [op]


def _describe_reduction(op: Op) -> object:
    return op.name, op.dims, op.group, op.operands[0].shape, op.results[0].shape


def _make_all_reduce(op: Op, result: Value, dims: tuple[str, ...], group: int) -> Op:
    """Return an all-reduce of a value. Its result replaces the value."""
    reduced = Value(result.shape, result.dtype)
    replace_value(result, reduced)
    made = Op(
        "all_reduce", [result], [reduced], op.where, op.is_backward, op.is_update, dims=dims, group=group
    )
    reduced.maker = made
    result.uses.append(made)
    return made


def _make_reduce_scatters(block: Block) -> None:
    """Replace an all-reduce by a reduce-scatter if each device uses only a slice of the result."""
    for op in list(block.ops):
        if op.name != "all_reduce" or op.group:
            continue
        between = op.results[0]
        while len(between.uses) == 1 and between.uses[0].name in MOVES:
            between = get_results(between.uses[0], between)[0]
        slices = list(between.uses)
        if not slices or any(each.name != "slice" for each in slices):
            continue
        taken = slices[0].dims
        if any(each.dims != taken for each in slices) or not taken or not {*taken} <= {*op.dims}:
            continue
        rest = tuple(dim for dim in op.dims if dim not in taken)
        op.name, op.dims = "reduce_scatter", taken
        part = slices[0].results[0]
        for each in slices:
            replace_value(each.results[0], between)
        _shrink_values(op, between, part)
        if rest:
            block.ops.insert(block.ops.index(op) + 1, _make_all_reduce(op, op.results[0], rest, 0))


def _shrink_values(op: Op, last: Value, part: Value) -> None:
    """Give the values between a reduce-scatter and its former slice the size of the slice."""
    value = op.results[0]
    while True:
        value.shape = part.shape if value is last else (part.size,)
        if value is last:
            return
        value = get_results(value.uses[0], value)[0]
