"""Parse XLA's text of a step into operations and values.

%dot.174 = bf16[8,2048,4096]{2,1,0} dot(%convert.349, %param.140), lhs_contracting_dims={2}, .., metadata={op_name=".."}
%all-reduce.1 = bf16[8,2048,4096]{2,1,0} all-reduce(%dot.181), channel_id=6, replica_groups=[8,8]<=[64], ..

It is that of the partitioner, or that of the compiler for CPUs or GPUs: collectives that start and end apart are one
operation here, and those that were combined are several. Tuples are lists of values, calls and fusions are inlined, and
a slice whose place depends on the device says along which mesh dims it does: the place is computed for all devices from
the partitioner's tables of small whole numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from layoutmap.core.mesh import Mesh
from layoutmap.cost.jax.graph import BARRIER, Block, Op, Place, Value, parse_place
from layoutmap.cost.jax.hlo import (
    NAMES,
    SHAPE,
    Operation,
    convert_dtype_name,
    find_first_group,
    find_inner_computations,
    find_operands,
    list_permute_pairs,
    parse_computations,
)

Numbers = np.ndarray | None
_NAMES = NAMES | {
    "bitcast": "reshape",
    "broadcast": "broadcast_in_dim",
    "conditional": "case",
    "dot": "dot_general",
    "opt-barrier": BARRIER,
}
_CALLS = ("call", "fusion", "async-start")
_MARKS = ("Sharding", "xla.sdy.FuncResultSharding", "xla.sdy.PropagationBarrier")
"""Custom calls that return what they are given."""

_UNEQUAL = re.compile(
    r", (?:channel_id|metadata|sharding|frontend_attributes|use_global_device_ids|to_apply|backend_config)="
    r"(?:\{[^}]*\}|[^,]*)"
)
"""Attributes in which two operations that do the same may differ."""


def parse_step(text: str, mesh: Mesh) -> Block:
    """Return the operations of a module's text."""
    bodies, entry = parse_computations(text)
    return _Reader(bodies, mesh).read_block(entry)


class _Reader:
    def __init__(self, bodies: Mapping[str, Sequence[Operation]], mesh: Mesh):
        self._bodies = bodies
        self._places = _MeshPositions(mesh)

    def read_block(self, name: str, inside: Place = ("", False, False, False)) -> Block:
        """Return the operations of a computation. `inside` is the place of the operation that runs it."""
        ops: list[Op] = []
        arguments: dict[int, object] = {}
        result = self._read_computation(name, (), arguments, ops, inside)
        made = Op("return", _flatten_values(result), [], *inside)
        for value in made.operands:
            value.uses.append(made)
        return Block(_flatten_values([arguments[number] for number in sorted(arguments)]), [*ops, made])

    def _read_computation(
        self, name: str, given: Sequence[object], arguments: dict[int, object], ops: list[Op], inside: Place
    ) -> Any:
        values: dict[str, object] = {}
        numbers: dict[str, np.ndarray] = {}
        last: object = []
        for each in self._bodies[name]:
            if each.op == "parameter":
                number = int(each.rest.partition(")")[0])
                last = given[number] if given else _make_values(each.shape)
                arguments[number] = last
            else:
                last = self._read_operation(each, values, numbers, ops, inside)
            values[each.name] = last
        return last

    def _read_operation(
        self, each: Operation, values: dict[str, Any], numbers: dict[str, Any], ops: list[Op], inside: Place
    ) -> Any:
        """Return the result of an operation, and add it to `ops` unless it only packs or unpacks tuples."""
        names = [] if each.op == "constant" else find_operands(each)
        given = [values[name] for name in names]
        if each.op == "tuple":
            return given
        if each.op == "get-tuple-element":
            return given[0][int(_read_attribute(each, r"index=(\d+)"))]
        if each.op == "custom-call" and _read_attribute(each, r'custom_call_target="([^"]*)"') in _MARKS:
            return given[0]
        if each.op.endswith("-done") or each.op == "copy-start":
            return given[0]
        place = _read_place(each, inside)
        if each.op in _CALLS:
            return self._read_computation(
                _read_attribute(each, r"(?:to_apply|calls)=%?([\w.\-]+)"), given, {}, ops, place
            )
        known = [numbers.get(name) for name in names]
        found = self._places.evaluate_number(each, known)
        if found is not None:
            numbers[each.name] = found
        kind, shape = each.op.removesuffix("-start"), each.shape
        if kind in NAMES and each.op != kind and kind != "all-reduce":
            shape = _split_tuple(shape)[1]  # skip the operand, which comes first
        each = each._replace(op=kind, shape=shape)
        # Several collectives combined by the compiler.
        if kind in NAMES and kind != "all-to-all" and shape.startswith("("):
            parts = zip(given, _split_tuple(shape), strict=True)
            return [
                self._add_operation(each._replace(shape=part), [one], known, _choose_place(one, place), ops)
                for one, part in parts
            ]
        return self._add_operation(each, given, known, place, ops)

    def _add_operation(
        self, each: Operation, given: Sequence[Any], known: Sequence[Numbers], place: Place, ops: list[Op]
    ) -> Any:
        result = _make_values(each.shape)
        made = Op(
            _NAMES.get(each.op, each.op.replace("-", "_")),
            _flatten_values(given),
            _flatten_values(result),
            *place,
        )
        for number, value in enumerate(made.results):
            value.maker, value.number = made, number
        for value in made.operands:
            value.uses.append(made)
        self._describe(made, each, known)
        ops.append(made)
        return result

    def _describe(self, made: Op, each: Operation, numbers: Sequence[Numbers]) -> None:
        """Set the dims, FLOPs, inner blocks, trip count, and key of an operation."""
        if each.op in NAMES:
            made.dims, made.group = self._places.find_exchange_dims(each.rest)
        elif each.op == "dynamic-slice":
            made.dims = self._places.find_slice_dims(numbers[1:])
            made.name = "slice" if made.dims else made.name
        elif each.op == "dot":
            sizes = _read_attribute(each, r"lhs_contracting_dims=\{([\d,]*)\}").split(",")
            contracting = [made.operands[0].shape[int(n)] for n in sizes if n]
            made.flops = 2 * made.results[0].size * math.prod(contracting)
        elif each.op == "convolution":
            made.flops = _count_convolution_flops(made.results[0], made.operands[1], each)
        elif each.op == "custom-call":
            made.flops = _count_library_flops(made, each)
        elif each.op in ("while", "conditional"):
            place = made.where, made.is_backward, made.is_update, made.is_fused
            made.blocks += [self.read_block(name, place) for name in find_inner_computations(each.rest)]
            made.trips = _count_trips(made) if each.op == "while" else 1
        made.metadata = _read_attribute(each, r"metadata=\{(.*?)\}")
        made.function = _read_attribute(each, r'op_name="[^"]*/(erfc?|erf_inv)"')
        values, _, attributes = each.rest.partition(")")
        is_alone = made.blocks or ("to_apply=" in attributes and each.op not in NAMES)
        made.key = (
            None if is_alone else (values * (each.op == "constant"), _UNEQUAL.sub("", attributes), each.shape)
        )


class _MeshPositions:
    """Positions of devices on a mesh, which tell the dims of collectives and slices."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._devices = np.arange(mesh.size)
        self._coords = dict(zip(mesh.dim_names, np.unravel_index(self._devices, mesh.shape), strict=True))

    def find_exchange_dims(self, rest: str) -> tuple[tuple[str, ...], int]:
        """Return a collective's mesh dims, and its group size if that is not all devices along them."""
        if "source_target_pairs=" in rest:
            ends = np.array(list_permute_pairs(rest), int).reshape(-1, 2)
            dims = [dim for dim, at in self._coords.items() if (at[ends[:, 0]] != at[ends[:, 1]]).any()]
            return tuple(dims), 0
        group = find_first_group(rest, self._mesh.size)
        dims = tuple(dim for dim, at in self._coords.items() if len(np.unique(at[group])) > 1)
        is_all = len(group) == math.prod(map(self._mesh.dim_size, dims))
        return dims, 0 if is_all else len(group)

    def find_slice_dims(self, offsets: Sequence[Numbers]) -> tuple[str, ...]:
        """Return the dims along which devices take different slices."""
        found: list[str] = []
        for at in offsets:
            if at is None or len(at) != self._mesh.size:
                continue
            at = at.reshape(self._mesh.shape)
            found += [d for n, d in enumerate(self._mesh.dim_names) if (at != at.take([0], n)).any()]
        return tuple(dim for dim in self._mesh.dim_names if dim in found)

    def evaluate_number(self, each: Operation, given: Sequence[Any]) -> Numbers:
        """Return a small integer or table for each device, or None for other values."""
        if each.op == "partition-id":
            return self._devices
        if each.op == "constant":
            return self._read_table(each)
        if not given or any(value is None for value in given):
            return None
        if each.op in ("reshape", "copy", "bitcast"):
            return given[0].reshape(len(given[0]), *_parse_shape(each.shape))
        if each.op == "convert":
            return given[0] if each.shape[0] in "su" else None
        if each.op == "dynamic-slice" and given[0].ndim == 2 and _parse_shape(each.shape) == (1,):
            return np.take(given[0][0], given[1], mode="clip").reshape(-1, 1)
        if each.op in _OPERATIONS and given[0].ndim == given[-1].ndim:
            return _OPERATIONS[each.op](given[0], given[-1])
        return None

    def _read_table(self, each: Operation) -> Numbers:
        if each.shape[0] not in "su" or math.prod(_parse_shape(each.shape)) > max(self._mesh.size, 64):
            return None
        found = re.findall(r"-?\d+", each.rest.partition(")")[0])
        shape = (1, *_parse_shape(each.shape))
        return np.array(found, np.int64).reshape(shape) if len(found) == math.prod(shape) else None


_OPERATIONS: Mapping[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": lambda a, b: a // np.maximum(b, 1),
    "remainder": lambda a, b: a % np.maximum(b, 1),
    "minimum": np.minimum,
    "maximum": np.maximum,
}


def _count_convolution_flops(result: Value, kernel: Value, each: Operation) -> int:
    labels = _read_attribute(each, r"dim_labels=\w+_(\w+)->")
    return 2 * result.size * kernel.size // max(kernel.shape[labels.index("o")], 1)


def _count_library_flops(made: Op, each: Operation) -> int:
    """Return the FLOPs of a GPU library's product or convolution, or 0 for other calls."""
    target = _read_attribute(each, r'custom_call_target="([^"]*)"')
    if target.startswith("__cublas"):
        axes = _read_attribute(each, r'"lhs_contracting_dimensions":\[([^\]]*)\]')
        length = math.prod(made.operands[0].shape[int(n)] for n in re.findall(r"\d+", axes))
        return 2 * made.results[0].size * length
    if not target.startswith("__cudnn$conv"):
        return 0
    # Gradients use the labels of the forward convolution.
    given, result = made.operands, made.results[0]
    if target.endswith("BackwardInput"):
        return _count_convolution_flops(given[0], given[1], each)
    of = (given[1], result) if target.endswith("BackwardFilter") else (result, given[1])
    return _count_convolution_flops(*of, each)


def _read_place(each: Operation, inside: Place) -> Any:
    found = parse_place(_read_attribute(each, r'op_name="([^"]*)"'))
    return tuple(own or outer for own, outer in zip(found, inside, strict=True)) if inside else found


def _choose_place(value: Value, place: Place) -> Place:
    """Return an operation's place, or else its operand's, since combined operations have none."""
    made = value.maker
    return (
        place if any(place) or made is None else (made.where, made.is_backward, made.is_update, made.is_fused)
    )


def _read_attribute(each: Operation, pattern: str) -> str:
    found = re.search(pattern, each.rest)
    return found[1] if found else ""


def _count_trips(made: Op) -> int:
    """Return how often a loop runs if its condition compares a counter with a constant, or else 1."""
    block = made.blocks[-2]  # the condition is before the body, which is last
    root = block.return_values[0].maker
    if root is None or root.name != "compare":
        return 1
    counter, limit = root.operands
    start = next((made.operands[n] for n, arg in enumerate(block.arguments) if arg is counter), None)
    last, first = _read_constant(limit), _read_constant(start)
    return 1 if last is None else max(last - (first or 0), 1)


def _read_constant(value: Value | None) -> int | None:
    if value is None or value.maker is None or value.maker.name != "constant" or value.shape:
        return None
    return int(value.maker.key[0]) if re.fullmatch(r"-?\d+", value.maker.key[0]) else None


def _parse_shape(text: str) -> tuple[int, ...]:
    found = SHAPE.search(text)
    return tuple(int(n) for n in found[2].split(",") if n) if found else ()


def _make_values(shape: str) -> Any:
    """Return a value of a shape, or a list of values for a tuple."""
    if not shape.startswith("("):
        found = SHAPE.search(shape)
        # Tokens have no size.
        return Value(_parse_shape(shape), convert_dtype_name(found[1])) if found else Value((0,), "bool")
    return [_make_values(each) for each in _split_tuple(shape)]


def _split_tuple(shape: str) -> list[str]:
    """Return the shapes inside a tuple's shape."""
    parts, depth, start = list[str](), 0, 1
    for place, sign in enumerate(shape):
        depth += (sign in "([{") - (sign in ")]}")
        if (sign == "," and depth == 1) or (sign == ")" and depth == 0):
            parts.append(re.sub(r"/\*.*?\*/", "", shape[start:place]).strip())
            start = place + 1
    return [part for part in parts if part]


def _flatten_values(values: Any) -> list[Value]:
    if isinstance(values, Value):
        return [values]
    return [value for each in values for value in _flatten_values(each)]
