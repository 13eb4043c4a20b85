"""Represent a partitioned step as operations and values, with the shapes on one device."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from layoutmap.core.variables import get_itemsize

LAYER = "layer="  # the text before the path of a layer in the names of operations
UPDATE = "layoutmap_update"  # text in the names of the operations of an optimizer
FUSED = "layoutmap_fused"
"""Text in the names of the operations that one kernel computes, as attention without its scores in memory."""

Place = tuple[str, bool, bool, bool]
"""Of an operation: its layer's path, and whether it is backward, an update, fused."""


@dataclass(slots=True, eq=False)
class Value:
    """Result of an operation, or argument of a block."""

    shape: tuple[int, ...]  # on one device
    dtype: str  # for example "bfloat16"
    maker: Op | None = None  # None: an argument of its block
    number: int = 0  # index among the results of its maker or the arguments of its block
    uses: list[Op] = field(default_factory=list["Op"])  # operations that read it

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Number of bytes on one device."""
        return math.ceil(self.size * get_itemsize(self.dtype))


@dataclass(slots=True, eq=False)
class Op:
    """Operation of a partitioned step."""

    name: str  # of a collective, its kind
    operands: list[Value]
    results: list[Value]
    where: str = ""  # path of its layer
    is_backward: bool = False
    is_update: bool = False
    is_fused: bool = False  # part of fused attention, so that its inner results need no memory
    # of a collective: its mesh dims; of a slice: the dims whose devices take different parts
    dims: tuple[str, ...] = ()
    group: int = 0  # devices of a collective that exchange; 0: all along its dims
    blocks: list[Block] = field(default_factory=list["Block"])  # bodies of a loop or branch
    trips: int = 1  # iterations of a loop
    flops: int = 0  # of a matrix product or a convolution
    key: Any = None  # equal for operations that are one if their operands are equal
    metadata: str = ""
    """XLA's metadata: its name in the program, and where the source line is."""
    function: str = ""  # composite function, such as "erfc", that it is a part of


@dataclass(slots=True, eq=False)
class Block:
    """Operations in order, the last of which returns."""

    arguments: list[Value]
    ops: list[Op]  # the last one returns

    @property
    def return_values(self) -> Sequence[Value]:
        """Values that the block returns."""
        return self.ops[-1].operands

    def walk(self) -> Iterator[Op]:
        """Yield all operations, including those of inner blocks."""
        for op in self.ops:
            yield op
            for block in op.blocks:
                yield from block.walk()


BARRIER = "optimization_barrier"  # the operation that returns each of several operands as it is


def get_operand(result: Value) -> Value:
    """Return the operand that becomes a result of a one-operand operation or of a barrier."""
    assert result.maker is not None
    return result.maker.operands[result.number if result.maker.name == BARRIER else 0]


def get_results(op: Op, operand: Value) -> Sequence[Value]:
    """Return the results made of an operand: one for a barrier, all for other operations."""
    if op.name != BARRIER:
        return op.results
    return [result for result, each in zip(op.results, op.operands, strict=True) if each is operand]


def replace_value(old: Value, new: Value) -> None:
    """Let all operations that use a value use another one."""
    for op in dict.fromkeys(old.uses):
        op.operands = [new if each is old else each for each in op.operands]
    new.uses += old.uses
    old.uses = []


def detach_operation(op: Op) -> None:
    """Remove an operation from the users of its operands."""
    for operand in op.operands:
        operand.uses.remove(op)


def remove_unused_operations(block: Block) -> None:
    """Remove operations without used results."""
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
            detach_operation(op)
    block.ops = kept[::-1]


def parse_place(name: str) -> Place:
    """Return the layer in an operation's name, and whether it is backward, an update, or fused."""
    where = re.findall(LAYER + r"([^/()]*)", name)
    return (where[-1] if where else ""), "transpose(" in name, UPDATE in name, FUSED in name
