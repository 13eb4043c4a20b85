"""A partitioned module as operations and the values between them, with the shapes that one device has.

Functions are inlined at their calls, since a value's consumers may be on the other side. Values of MLIR are read once,
here; the other files know no MLIR.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from layoutmap.core.mesh import Mesh

COLLECTIVES = {
    "sdy.all_gather": "all_gather",
    "sdy.all_reduce": "all_reduce",
    "sdy.reduce_scatter": "reduce_scatter",
    "sdy.all_to_all": "all_to_all",
    "sdy.collective_permute": "permute",
    "sdy.all_slice": "slice",
}
LAYER = "layer="
"""What the path of a layer is announced by in the names of operations."""

UPDATE = "layoutmap_update"
"""What is in the names of the operations of an optimizer."""

FUSED = "layoutmap_fused"
"""What is in the names of the operations that one kernel computes, as attention without its scores in memory."""

_AXIS = re.compile(r'"([^"]+)"(?::\(\d+\)(\d+))?')
_BITS = re.compile(r"\D*(\d+)")
Place = tuple[str, bool, bool, bool]
"""Of an operation: its layer's path, and whether it is backward, an update, fused."""


@dataclass(slots=True, eq=False)
class Value:
    """The result of an operation, or an argument of a block.

    Args:
        shape: Its shape on one device.
        dtype: Its element type, as in `"bf16"`.
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
        return (self.size * bits_of(self.dtype) + 7) // 8


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
        dims: Of a collective: the dims that it is over.
        blocks: Of a loop or a branch: what it runs.
        trips: Of a loop: how often.
        flops: Of a matrix product or a convolution: its operations.
        key: What else two operations of the same operands must have in common to be one.
    """

    name: str
    operands: list[Value]
    results: list[Value]
    where: str = ""
    is_backward: bool = False
    is_update: bool = False
    is_fused: bool = False
    dims: tuple[str, ...] = ()
    blocks: list[Block] = field(default_factory=list["Block"])
    trips: int = 1
    flops: int = 0
    key: Any = None


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


def bits_of(dtype: str) -> int:
    """Return the size of an element."""
    found = _BITS.match(dtype)
    return int(found[1]) if found else 0


def read(module: Any, mesh: Mesh) -> Block:
    """Return the operations of a partitioned module's function."""
    return _Reader(module, mesh).main()


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


class _Reader:
    def __init__(self, module: Any, mesh: Mesh):
        self._mesh = mesh
        self._functions = {
            op.attributes["sym_name"].value: op
            for op in module.operation.regions[0].blocks[0]
            if op.operation.name == "func.func"
        }
        self._shardings: dict[Any, list[Any]] = {}
        self._types: dict[Any, tuple[tuple[int, ...], str]] = {}
        self._locals: dict[Any, tuple[tuple[int, ...], str]] = {}
        self._places: dict[str, Place] = {}
        self._values: dict[Any, Value] = {}

    def main(self) -> Block:
        function = self._functions["main"]
        made = _entries(function, "arg_attrs")
        block = function.regions[0].blocks[0]
        arguments = [
            self._given(arg, made[n].get("sdy.sharding"), n) for n, arg in enumerate(block.arguments)
        ]
        ops: list[Op] = []
        self._read(block, ops, ("", False, False, False))
        return Block(arguments, ops)

    def _given(self, arg: Any, sharding: Any, number: int) -> Value:
        axes = self._specs(sharding)[0] if sharding is not None else []
        shape, dtype = self._local(arg.type, axes)
        value = self._values[arg] = Value(shape, dtype, None, number)
        return value

    def _read(self, block: Any, ops: list[Op], inside: Place) -> None:
        """Add the operations of a block; `inside` is the place of what it is part of."""
        for view in block.operations:
            op = view.operation
            name, attributes = op.name, op.attributes
            if name == "func.call":
                self._inline(op, ops, self._place(op, inside))
                continue
            operands = [self._values[each] for each in op.operands]
            place = self._place(op, inside)
            made = Op(name.partition(".")[2], operands, [], *place)
            axes = self._result_axes(op)
            for number, result in enumerate(op.results):
                shape, dtype = self._local(result.type, axes[number] if number < len(axes) else [])
                value = self._values[result] = Value(shape, dtype, made, number)
                made.results.append(value)
            for operand in operands:
                operand.uses.append(made)
            if name in COLLECTIVES:
                made.name = COLLECTIVES[name]
                self._collective(made, attributes)
            elif made.name == "dot_general":
                made.flops = self._dot_flops(made, attributes)
            elif made.name == "convolution":
                made.flops = self._convolution_flops(made, attributes)
            if name == "sdy.manual_computation":
                self._manual(op, made, place)
            else:
                for region in op.regions:
                    for inner in region.blocks:
                        self._inner(made, inner, axes, place)
            if made.name == "while":
                made.trips = _trips(op)
            elif not made.blocks:
                made.key = _key(op, made)
            ops.append(made)

    def _inner(self, made: Op, block: Any, axes: Sequence[Any], place: Place) -> None:
        if made.name not in ("while", "case", "if"):
            return  # what reduces two elements
        given = made.results if made.name == "while" else []
        arguments: list[Value] = []
        for number, arg in enumerate(block.arguments):
            shape = given[number].shape if given else self._local(arg.type, [])[0]
            value = self._values[arg] = Value(shape, self._local(arg.type, [])[1], None, number)
            arguments.append(value)
        ops: list[Op] = []
        self._read(block, ops, place)
        made.blocks.append(Block(arguments, ops))

    def _manual(self, op: Any, made: Op, place: Place) -> None:
        """The body of a `shard_map`: its shapes are those of a device already, in the dims that it is over."""
        block = op.regions[0].blocks[0]
        for arg, operand in zip(block.arguments, made.operands, strict=True):
            self._values[arg] = Value(operand.shape, operand.dtype, None)
        arguments = [self._values[arg] for arg in block.arguments]
        ops: list[Op] = []
        self._read(block, ops, place)
        made.blocks.append(Block(arguments, ops))

    def _inline(self, op: Any, ops: list[Op], place: Place) -> None:
        function = self._functions[op.attributes["callee"].value]
        block = function.regions[0].blocks[0]
        for arg, operand in zip(block.arguments, op.operands, strict=True):
            self._values[arg] = self._values[operand]
        self._read(block, ops, place)
        returned = ops.pop()
        for value in returned.operands:
            value.uses.remove(returned)
        for result, value in zip(op.results, returned.operands, strict=True):
            self._values[result] = value

    # -- shapes

    def _result_axes(self, op: Any) -> list[Any]:
        attributes = op.attributes
        for name in ("out_sharding", "sdy.sharding", "sharding", "out_shardings"):
            if name in attributes:
                return self._specs(attributes[name])
        return []

    def _specs(self, attribute: Any) -> list[list[list[tuple[str, int]]]]:
        """For each value, for each axis the sizes of the dims that it is sharded over."""
        found = self._shardings.get(attribute)
        if found is None:
            text = str(attribute)
            found = [_axes_of(each) for each in re.findall(r"<@[^,]+, \[([^\]]*)\]", text)]
            self._shardings[attribute] = found
        return found

    def _local(self, kind: Any, axes: Sequence[Any]) -> tuple[tuple[int, ...], str]:
        known = self._types.get(kind)
        if known is None:
            text = str(kind)
            if text.startswith("tensor<"):
                *sizes, dtype = text[7:-1].partition(",")[0].split("x")
                known = tuple(map(int, sizes)), dtype
            else:
                known = (), "token"
            self._types[kind] = known
        if not axes:
            return known
        key = kind, id(axes)
        if key not in self._locals:
            self._locals[key] = self._divided(*known, axes)
        return self._locals[key]

    def _divided(
        self, shape: tuple[int, ...], dtype: str, axes: Sequence[Any]
    ) -> tuple[tuple[int, ...], str]:
        return tuple(-(-n // self._size(dims)) for n, dims in zip(shape, axes, strict=False)), dtype

    def _size(self, dims: Sequence[tuple[str, int]]) -> int:
        return math.prod(size or self._mesh.dim_size(name) for name, size in dims)

    # -- what operations do

    def _collective(self, made: Op, attributes: Any) -> None:
        for name in ("gathering_axes", "reduction_axes", "slicing_axes", "reduce_scatter_axes", "params"):
            if name in attributes:
                found = _AXIS.findall(str(attributes[name]))
                made.dims = tuple(dict.fromkeys(dim for dim, _ in found))
                return

    def _dot_flops(self, made: Op, attributes: Any) -> int:
        text = str(attributes["dot_dimension_numbers"])
        found = re.search(r"lhs_contracting_dimensions = \[([^\]]*)\]", text)
        contracting = [int(n) for n in found[1].split(",")] if found and found[1].strip() else []
        return 2 * made.results[0].size * math.prod(made.operands[0].shape[n] for n in contracting)

    def _convolution_flops(self, made: Op, attributes: Any) -> int:
        kernel = re.search(r"x\[([^\]]*)\]", str(attributes["dimension_numbers"]))
        assert kernel is not None
        output_axis = [each.strip() for each in kernel[1].split(",")].index("o")
        shape = made.operands[1].shape
        return 2 * made.results[0].size * made.operands[1].size // max(shape[output_axis], 1)

    def _place(self, op: Any, inside: Place) -> Place:
        name = name_of(op)
        found = self._places.get(name)
        if found is None:
            found = self._places[name] = place_of(name)
        where, is_backward, is_update, is_fused = found
        return where or inside[0], is_backward or inside[1], is_update or inside[2], is_fused or inside[3]


def _entries(function: Any, name: str) -> list[dict[str, Any]]:
    attributes = function.attributes
    return [{entry.name: entry.attr for entry in each} for each in attributes[name]]


def _axes_of(text: str) -> list[list[tuple[str, int]]]:
    return [
        [(name, int(size or 0)) for name, size in _AXIS.findall(each)]
        for each in re.findall(r"\{([^}]*)\}", text)
    ]


def name_of(op: Any) -> str:
    """Return the name that JAX has given an operation, of the scopes that it was traced in."""
    location = op.location
    # jaxlib 0.9 has one class of locations, and ends the process where one without a name is asked for it.
    has_name = getattr(location, "is_a_name", lambda: True)()
    return getattr(location, "name_str", "") if has_name else ""


def place_of(name: str) -> Place:
    """Return the layer that an operation is part of, and whether it is one of a gradient, of an update, is fused."""
    where = re.findall(LAYER + r"([^/()]*)", name)
    return (where[-1] if where else ""), "transpose(" in name, UPDATE in name, FUSED in name


def _key(op: Any, made: Op) -> Any:
    if len(op.regions):  # what it does to two elements is in there
        return None
    attributes = op.attributes
    kinds = tuple((each.shape, each.dtype) for each in made.results)
    return tuple((name, attributes[name]) for name in attributes if name != "mhlo.frontend_attributes"), kinds


def _trips(op: Any) -> int:
    """How often a loop runs, whose condition compares a counter with a constant; 1 if that is not known."""
    condition = op.regions[0].blocks[0]
    ops = list(condition.operations)
    compare = next((each for each in ops if each.operation.name == "stablehlo.compare"), None)
    if compare is None:
        return 1
    limit = _constant(compare.operands[1])
    start = None
    counter = compare.operands[0]
    for number, arg in enumerate(condition.arguments):
        if arg == counter:
            start = _constant(op.operands[number])
    return max(limit - (start or 0), 1) if limit is not None else 1


def _constant(value: Any) -> int | None:
    owner = value.owner
    attributes: Mapping[str, Any] = getattr(owner, "attributes", {})
    found = re.search(r"dense<(-?\d+)>", str(attributes["value"])) if "value" in attributes else None
    return int(found[1]) if found else None
