"""Represent a partitioned step as operations and values, with the shapes on one device."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from layoutmap.core.variables import get_itemsize

LAYER = "layer="  # text before a layer's path in the names of operations
UPDATE = "layoutmap_update"  # scope in the names of the operations that update weights
FUSED_SCOPE = "layoutmap_fused"
"""Scope in the names of operations that one fused kernel computes, such as attention without scores in memory."""

Origin = tuple[str, bool, bool, bool]
"""Origin of an operation: the path of its layer, and whether it is of the backward pass, of an update, or fused."""


@dataclass(slots=True, eq=False)
class Value:
    """Result of an operation, or argument of a block."""

    shape: tuple[int, ...]  # shape on one device
    dtype: str  # element type, such as "bfloat16"
    producer: Op | None = None  # operation that computes it; None: it is an argument of its block
    index: int = 0  # position among the results of `producer`, or among the arguments of the block
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
    """Operation of a partitioned step on one device."""

    name: str  # such as "dot_general"; for a collective, its kind
    operands: list[Value]
    results: list[Value]
    layer_path: str = ""  # path of the layer that called the operation; empty: unknown
    is_backward: bool = False
    is_update: bool = False
    is_fused: bool = False  # whether it is part of fused attention, so that its inner results need no memory
    # mesh dims of a collective; for a slice, the dims along which devices take different slices
    dims: tuple[str, ...] = ()
    group: int = 0  # number of devices that exchange data in a collective; 0: all devices along its dims
    blocks: list[Block] = field(default_factory=list["Block"])  # bodies of a loop or branch
    trips: int = 1  # number of iterations of a loop
    flops: int = 0  # FLOPs of a matrix product or a convolution
    key: Any = None  # operations with equal keys and operands have equal results; None: never merged
    metadata: str = ""
    """XLA's metadata: the operation's name in the traced function, and its source line."""
    # function, such as "erfc", that XLA computes by this and other operations; empty: none
    function: str = ""


@dataclass(slots=True, eq=False)
class Block:
    """Arguments and operations of a step, a loop's body, or a branch. The last operation is the return."""

    arguments: list[Value]
    ops: list[Op]

    @property
    def return_values(self) -> Sequence[Value]:
        """Values that the block returns."""
        return self.ops[-1].operands

    def iterate_all_ops(self) -> Iterator[Op]:
        """Yield all operations, each before those of its inner blocks."""
        for op in self.ops:
            yield op
            for block in op.blocks:
                yield from block.iterate_all_ops()


BARRIER = "optimization_barrier"  # operation that returns all its operands unchanged


def get_source_operand(result: Value) -> Value:
    """Return the operand that a barrier returns as `result`, or the first operand of any other operation."""
    assert result.producer is not None
    return result.producer.operands[result.index if result.producer.name == BARRIER else 0]


def get_derived_results(op: Op, operand: Value) -> Sequence[Value]:
    """Return the results as which a barrier returns `operand`, or all results of any other operation."""
    if op.name != BARRIER:
        return op.results
    return [result for result, each in zip(op.results, op.operands, strict=True) if each is operand]


def replace_uses(old: Value, new: Value) -> None:
    """Replace `old` by `new` in the operands of all operations that use it."""
    for op in dict.fromkeys(old.uses):
        op.operands = [new if each is old else each for each in op.operands]
    new.uses += old.uses
    old.uses = []


def detach_from_operands(op: Op) -> None:
    """Remove an operation from the users of its operands."""
    for operand in op.operands:
        operand.uses.remove(op)


def remove_unused_operations(block: Block) -> None:
    """Remove operations from a block if no operation uses their results. Return operations and custom calls stay."""
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
            detach_from_operands(op)
    block.ops = kept[::-1]


def parse_op_origin(name: str) -> Origin:
    """Return the origin of an operation, parsed from its name. JAX lists scopes and transformations there."""
    layer_path = re.findall(LAYER + r"([^/()]*)", name)
    return (layer_path[-1] if layer_path else ""), "transpose(" in name, UPDATE in name, FUSED_SCOPE in name
