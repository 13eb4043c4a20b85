"""Rewrite collectives as XLA does after its partitioner, so that their bytes are not overestimated."""

from __future__ import annotations

import re

from layoutmap.cost.jax.graph import (
    Block,
    Op,
    Value,
    detach_from_operands,
    get_derived_results,
    remove_unused_operations,
    replace_uses,
)

MOVES = frozenset(("transpose", "reshape", "convert", "broadcast_in_dim", "copy", "optimization_barrier"))
"""Operations that return the elements of an operand with another shape, type, order, or location."""


_SINGLE = ("custom_call", "return", "optimization_barrier")


def rewrite_collectives(block: Block) -> None:
    """Rewrite the collectives of a block and of its inner blocks, in place, as XLA does after its partitioner."""
    for op in block.ops:
        for inner in op.blocks:
            rewrite_collectives(inner)
    remove_unused_operations(block)
    _merge_equal_operations(block)
    _merge_consecutive_all_reduces(block)
    _merge_summed_reductions(block)
    _convert_to_reduce_scatters(block)
    remove_unused_operations(block)
    _merge_summed_reductions(block)


def _merge_equal_operations(block: Block) -> None:
    """Replace operations that have equal keys and the same operands by the first of them."""
    seen: dict[object, Op] = {}
    for op in list(block.ops):
        if op.is_fused or op.blocks or op.key is None or op.name in _SINGLE:
            continue
        key = (op.name, op.key, tuple(map(id, op.operands)))
        first = seen.setdefault(key, op)
        if first is not op:
            for old, new in zip(op.results, first.results, strict=True):
                replace_uses(old, new)
    remove_unused_operations(block)


def _merge_summed_reductions(block: Block) -> None:
    """Replace a sum of two equal all-reduces or reduce-scatters by one reduction of the sum of their operands."""
    ops: list[Op] = []
    gone: set[int] = set()
    for op in block.ops:
        ops.append(op)
        makers = [value.producer for value in op.operands] if op.name == "add" else []
        if len(makers) != 2 or makers[0] is None or makers[1] is None or makers[0] is makers[1]:
            continue
        reductions = [each for each in makers if each is not None and _is_reduction_used_only_by(op, each)]
        if len(reductions) != 2 or _make_reduction_key(reductions[0]) != _make_reduction_key(reductions[1]):
            continue
        first = reductions[0]
        for each in reductions:
            replace_uses(each.results[0], each.operands[0])
            detach_from_operands(each)
            gone.add(id(each))
        op.results[0].shape = first.operands[0].shape
        reduced = _make_all_reduce(op, op.results[0], first.dims, first.group)
        reduced.name, reduced.results[0].shape = first.name, first.results[0].shape
        ops.append(reduced)
    block.ops = [op for op in ops if id(op) not in gone]


def _merge_consecutive_all_reduces(block: Block) -> None:
    """Replace an all-reduce of an all-reduce's result by one all-reduce over the mesh dims of both."""
    for op in block.ops:
        first = op.operands[0].producer if op.name == "all_reduce" and len(op.operands) == 1 else None
        if first is None or first.name != op.name or first.group or op.group or first.results[0].uses != [op]:
            continue
        if {*first.dims} & {*op.dims}:
            continue
        op.dims = (*first.dims, *op.dims)
        replace_uses(first.results[0], first.operands[0])
    remove_unused_operations(block)


def split_combined_all_reduces(block: Block) -> None:
    """Split each all-reduce of concatenated arrays, as XLA's compiler makes them, into one for each array."""
    for op in list(block.ops):
        for inner in op.blocks:
            split_combined_all_reduces(inner)
        joined = op.operands[0].producer if op.name == "all_reduce" else None
        while joined is not None and joined.name == "reshape":
            joined = joined.operands[0].producer
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
            at = part.producer or op
            value = Value(part.shape, part.dtype)
            origin = at.layer_path, at.is_backward, at.is_update
            value.producer = Op(op.name, [part], [value], *origin, dims=op.dims, group=op.group)
            part.uses.append(value.producer)
            block.ops.insert(block.ops.index(op), value.producer)
            for use in uses:
                replace_uses(use.results[0], value)
    remove_unused_operations(block)


def _is_reduction_used_only_by(op: Op, producer: Op) -> bool:
    return producer.name in ("all_reduce", "reduce_scatter") and producer.results[0].uses == [op]


def _make_reduction_key(op: Op) -> object:
    return op.name, op.dims, op.group, op.operands[0].shape, op.results[0].shape


def _make_all_reduce(op: Op, result: Value, dims: tuple[str, ...], group: int) -> Op:
    """Return a new all-reduce of `result`. Operations that used `result` then use the reduced value."""
    reduced = Value(result.shape, result.dtype)
    replace_uses(result, reduced)
    made = Op(
        "all_reduce", [result], [reduced], op.layer_path, op.is_backward, op.is_update, dims=dims, group=group
    )
    reduced.producer = made
    result.uses.append(made)
    return made


def _convert_to_reduce_scatters(block: Block) -> None:
    """Replace an all-reduce by a reduce-scatter if each device uses only its own slice of the result."""
    for op in list(block.ops):
        if op.name != "all_reduce" or op.group:
            continue
        between = op.results[0]
        while len(between.uses) == 1 and between.uses[0].name in MOVES:
            between = get_derived_results(between.uses[0], between)[0]
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
            replace_uses(each.results[0], between)
        _shrink_to_slice(op, between, part)
        if rest:
            block.ops.insert(block.ops.index(op) + 1, _make_all_reduce(op, op.results[0], rest, 0))


def _shrink_to_slice(reduce_scatter: Op, last_value: Value, slice_result: Value) -> None:
    """Give the values from a reduce-scatter's result up to `last_value` the size of the slice that it replaces."""
    value = reduce_scatter.results[0]
    while True:
        value.shape = slice_result.shape if value is last_value else (slice_result.size,)
        if value is last_value:
            return
        value = get_derived_results(value.uses[0], value)[0]
