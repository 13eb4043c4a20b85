"""Changes that XLA makes to collectives after its partitioner; without them their bytes come out too high."""

from __future__ import annotations

import re

from layoutmap.cost.jax.graph import Block, Op, Value, detach, remove_unused, replace, results_of

MOVES = frozenset(("transpose", "reshape", "convert", "broadcast_in_dim", "copy", "optimization_barrier"))
"""Operations that return an operand as it is, in another form or place."""


_SINGLE = ("custom_call", "return", "optimization_barrier")


def rewrite(block: Block) -> None:
    """Rewrite the operations of a block, and of those inside."""
    for op in block.ops:
        for inner in op.blocks:
            rewrite(inner)
    remove_unused(block)
    _merge_equal(block)
    _reduce_once(block)
    _add_before_reducing(block)
    _scatter(block)
    remove_unused(block)
    _add_before_reducing(block)


def _merge_equal(block: Block) -> None:
    """Operations of the same operands are one."""
    seen: dict[object, Op] = {}
    for op in list(block.ops):
        if op.is_fused or op.blocks or op.key is None or op.name in _SINGLE:
            continue
        key = (op.name, op.key, tuple(map(id, op.operands)))
        first = seen.setdefault(key, op)
        if first is not op:
            for old, new in zip(op.results, first.results, strict=True):
                replace(old, new)
    remove_unused(block)


def _add_before_reducing(block: Block) -> None:
    """A sum of two all-reduces, or of two reduce-scatters, is one of the sum."""
    ops: list[Op] = []
    gone: set[int] = set()
    for op in block.ops:
        ops.append(op)
        makers = [value.maker for value in op.operands] if op.name == "add" else []
        if len(makers) != 2 or makers[0] is None or makers[1] is None or makers[0] is makers[1]:
            continue
        reductions = [each for each in makers if each is not None and _is_only_for(op, each)]
        if len(reductions) != 2 or _reduction(reductions[0]) != _reduction(reductions[1]):
            continue
        first = reductions[0]
        for each in reductions:
            replace(each.results[0], each.operands[0])
            detach(each)
            gone.add(id(each))
        op.results[0].shape = first.operands[0].shape
        reduced = _reduced(op, op.results[0], first.dims, first.group)
        reduced.name, reduced.results[0].shape = first.name, first.results[0].shape
        ops.append(reduced)
    block.ops = [op for op in ops if id(op) not in gone]


def _reduce_once(block: Block) -> None:
    """Make one all-reduce, over the dims of both, of an all-reduce of an all-reduce."""
    for op in block.ops:
        first = op.operands[0].maker if op.name == "all_reduce" and len(op.operands) == 1 else None
        if first is None or first.name != op.name or first.group or op.group or first.results[0].uses != [op]:
            continue
        if {*first.dims} & {*op.dims}:
            continue
        op.dims = (*first.dims, *op.dims)
        replace(first.results[0], first.operands[0])
    remove_unused(block)


def separate(block: Block) -> None:
    """Split each all-reduce of concatenated arrays, which XLA's compiler makes of small ones, into one of each."""
    for op in list(block.ops):
        for inner in op.blocks:
            separate(inner)
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
                replace(use.results[0], value)
    remove_unused(block)


def _is_only_for(op: Op, maker: Op) -> bool:
    return maker.name in ("all_reduce", "reduce_scatter") and maker.results[0].uses == [op]


def _reduction(op: Op) -> object:
    return op.name, op.dims, op.group, op.operands[0].shape, op.results[0].shape


def _reduced(op: Op, result: Value, dims: tuple[str, ...], group: int) -> Op:
    """An all-reduce of a result, which takes its place."""
    reduced = Value(result.shape, result.dtype)
    replace(result, reduced)
    made = Op(
        "all_reduce", [result], [reduced], op.where, op.is_backward, op.is_update, dims=dims, group=group
    )
    reduced.maker = made
    result.uses.append(made)
    return made


def _scatter(block: Block) -> None:
    """An all-reduce of which each device then takes a part is a reduce-scatter."""
    for op in list(block.ops):
        if op.name != "all_reduce" or op.group:
            continue
        between = op.results[0]
        while len(between.uses) == 1 and between.uses[0].name in MOVES:
            between = results_of(between.uses[0], between)[0]
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
            replace(each.results[0], between)
        _shrink(op, between, part)
        if rest:
            block.ops.insert(block.ops.index(op) + 1, _reduced(op, op.results[0], rest, 0))


def _shrink(op: Op, last: Value, part: Value) -> None:
    """The values from a reduce-scatter to what it was sliced to have the size of a part."""
    value = op.results[0]
    while True:
        value.shape = part.shape if value is last else (part.size,)
        if value is last:
            return
        value = results_of(value.uses[0], value)[0]
