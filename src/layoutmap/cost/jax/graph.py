"""A partitioned step as operations and the values between them, with the shapes that one device has."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from layoutmap.core.variables import get_itemsize

LAYER = "layer="
"""The text before the path of a layer in the names of operations."""

UPDATE = "layoutmap_update"
"""Text in the names of the operations of an optimizer."""

FUSED = "layoutmap_fused"
"""Text in the names of the operations that one kernel computes, as attention without its scores in memory."""

Place = tuple[str, bool, bool, bool]
"""Of an operation: its layer's path, and whether it is backward, an update, fused."""


@dataclass(slots=True, eq=False)
class Value:
    """The result of an operation, or an argument of a block.

    Args:
        shape: Its shape on one device.
        dtype: The name of its element type, as in `"bfloat16"`.
        maker: The operation that makes it; `None`: its block is given it.
        number: Which result of its maker, or which argument of its block.
        uses: The operations that take it.
    """

    shape: tuple[int, ...]
    dtype: str
    maker: Op | None = None
    number: int = 0
    uses: list[Op] = field(default_factory=list["Op"])

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes on one device."""
        return math.ceil(self.size * get_itemsize(self.dtype))


@dataclass(slots=True, eq=False)
class Op:
    """An operation.

    Args:
        name: Its name; of collectives their kind.
        operands: What it takes.
        results: What it makes.
        where: The path of the layer that it is part of, or empty.
        is_backward: Whether it is part of a gradient.
        is_update: Whether it is part of the optimizer's update.
        is_fused: Whether it is part of a fused attention: what is used in there only is not in memory.
        dims: Of a collective: the dims that it is over; of a slice: those whose devices take different parts.
        group: Of a collective: how many devices exchange; 0: all that are along its dims.
        blocks: Of a loop or a branch: what it runs.
        trips: Of a loop: how often.
        flops: Of a matrix product or a convolution: its operations.
        key: What else two operations of the same operands must have in common to be one.
        function: The function of many operations, as erfc, that it is a part of; empty: none.
    """

    name: str
    operands: list[Value]
    results: list[Value]
    where: str = ""
    is_backward: bool = False
    is_update: bool = False
    is_fused: bool = False
    dims: tuple[str, ...] = ()
    group: int = 0
    blocks: list[Block] = field(default_factory=list["Block"])
    trips: int = 1
    flops: int = 0
    key: Any = None
    function: str = ""


@dataclass(slots=True, eq=False)
class Block:
    """Operations in order.

    Args:
        arguments: What it is given.
        ops: Its operations; the last one returns.
    """

    arguments: list[Value]
    ops: list[Op]

    @property
    def returned(self) -> Sequence[Value]:
        """The values that it returns."""
        return self.ops[-1].operands

    def walk(self) -> Iterator[Op]:
        """All operations, those inside of others too."""
        for op in self.ops:
            yield op
            for block in op.blocks:
                yield from block.walk()


BARRIER = "optimization_barrier"
"""The operation that returns each of several operands as it is."""


def operand_of(result: Value) -> Value:
    """Return the operand that the result of an operation of one operand, or of a barrier, is made of."""
    assert result.maker is not None
    return result.maker.operands[result.number if result.maker.name == BARRIER else 0]


def results_of(op: Op, operand: Value) -> Sequence[Value]:
    """Return the results that are made of an operand: of a barrier one, of others all."""
    if op.name != BARRIER:
        return op.results
    return [result for result, each in zip(op.results, op.operands, strict=True) if each is operand]


def replace(old: Value, new: Value) -> None:
    """Have all that takes a value take another one."""
    for op in dict.fromkeys(old.uses):
        op.operands = [new if each is old else each for each in op.operands]
    new.uses += old.uses
    old.uses = []


def detach(op: Op) -> None:
    """Have an operation take nothing any more."""
    for operand in op.operands:
        operand.uses.remove(op)


def remove_unused(block: Block) -> None:
    """Remove operations whose results nothing takes."""
    kept: list[Op] = []
    for op in reversed(block.ops):
        if op.name in ("return", "custom_call"):
            kept.append(op)
            continue
        for value in op.results:
            if value.uses:
                kept.append(op)
                break
        else:
            detach(op)
    block.ops = kept[::-1]


def place_of(name: str) -> Place:
    """Return the layer that an operation is part of, and whether it is one of a gradient, of an update, is fused."""
    where = re.findall(LAYER + r"([^/()]*)", name)
    return (where[-1] if where else ""), "transpose(" in name, UPDATE in name, FUSED in name
