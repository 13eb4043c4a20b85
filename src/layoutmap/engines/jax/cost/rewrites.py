"""Changes that XLA makes to collectives after its partitioner; without them their bytes come out too high."""

from __future__ import annotations

from typing import Any

from layoutmap.engines.jax.cost.graph import Block, Op, Value, detach, remove_unused, replace, results_of

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
    _add_before_reducing(block)
    _scatter(block)
    remove_unused(block)
    _add_before_reducing(block)


def _merge_equal(block: Block) -> None:
    """Operations of the same operands are one."""
    seen: dict[Any, Op] = {}
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


def _is_only_for(op: Op, maker: Op) -> bool:
    return maker.name in ("all_reduce", "reduce_scatter") and maker.results[0].uses == [op]


def _reduction(op: Op) -> Any:
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
        if any(each.dims != taken for each in slices) or not set(taken) & set(op.dims):
            continue
        over = tuple(dim for dim in op.dims if dim in taken)
        rest = tuple(dim for dim in op.dims if dim not in taken)
        op.name, op.dims = "reduce_scatter", over
        part = slices[0].results[0]
        if set(over) == set(taken):
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
