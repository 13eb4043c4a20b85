"""Parse XLA's text of a step into operations and values.

%dot.174 = bf16[8,2048,4096]{2,1,0} dot(%convert.349, %param.140), lhs_contracting_dims={2}, .., metadata={op_name=".."}
%all-reduce.1 = bf16[8,2048,4096]{2,1,0} all-reduce(%dot.181), channel_id=6, replica_groups=[8,8]<=[64], ..

The text is that of the partitioner, or of the compiler for CPUs or GPUs. An asynchronous collective, which the text
starts and ends in two operations, becomes one operation, and a combined collective becomes several. Tuples become lists
of values, and calls and fusions are inlined. A slice has the mesh dims on which its offset depends: the offsets of all
devices are computed from the partitioner's tables of small integers.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from layoutmap.core.mesh import Mesh
from layoutmap.cost.jax.graph import BARRIER, Block, Op, Origin, Value, parse_op_origin
from layoutmap.cost.jax.hlo import (
    COLLECTIVE_KINDS,
    SHAPE,
    Instruction,
    convert_xla_dtype_name,
    find_first_device_group,
    list_called_computations,
    list_operand_names,
    list_permute_pairs,
    parse_computations,
)

Integers = np.ndarray | None
_OP_NAMES = COLLECTIVE_KINDS | {
    "bitcast": "reshape",
    "broadcast": "broadcast_in_dim",
    "conditional": "case",
    "dot": "dot_general",
    "opt-barrier": BARRIER,
}
_INLINED = ("call", "fusion", "async-start")
_IDENTITY_CALLS = ("Sharding", "xla.sdy.FuncResultSharding", "xla.sdy.PropagationBarrier")
"""Custom calls that return their operand unchanged."""

_UNEQUAL = re.compile(
    r", (?:channel_id|metadata|sharding|frontend_attributes|use_global_device_ids|to_apply|backend_config)="
    r"(?:\{[^}]*\}|[^,]*)"
)
"""Attributes that may differ between two operations with equal results."""


def parse_partitioned_step(text: str, mesh: Mesh) -> Block:
    """Return a module's entry computation as a block. Its collectives have the mesh dims over which they send data."""
    bodies, entry = parse_computations(text)
    return _BlockParser(bodies, mesh).read_block(entry)


class _BlockParser:
    def __init__(self, bodies: Mapping[str, Sequence[Instruction]], mesh: Mesh):
        self._bodies = bodies
        self._positions = _DevicePositions(mesh)

    def read_block(self, name: str, caller: Origin = ("", False, False, False)) -> Block:
        """Return a computation as a block. `caller` is the origin of the operation that runs the computation."""
        ops: list[Op] = []
        arguments: dict[int, object] = {}
        result = self._read_computation(name, (), arguments, ops, caller)
        made = Op("return", _flatten_values(result), [], *caller)
        for value in made.operands:
            value.uses.append(made)
        return Block(_flatten_values([arguments[position] for position in sorted(arguments)]), [*ops, made])

    def _read_computation(
        self, name: str, operands: Sequence[Any], arguments: dict[int, object], ops: list[Op], caller: Origin
    ) -> Any:
        """Return a computation's result. Add its operations to `ops`, and its parameters to `arguments`."""
        values: dict[str, object] = {}
        numbers: dict[str, np.ndarray] = {}
        last: object = []
        for line in self._bodies[name]:
            if line.opcode == "parameter":
                position = int(line.arguments.partition(")")[0])
                last = operands[position] if operands else _make_values_of_shape(line.shape)
                arguments[position] = last
            else:
                last = self._read_operation(line, values, numbers, ops, caller)
            values[line.name] = last
        return last

    def _read_operation(
        self, line: Instruction, values: dict[str, Any], known: dict[str, Any], ops: list[Op], caller: Origin
    ) -> Any:
        """Return an operation's result. Add the operation to `ops`, unless it only passes values on."""
        names = [] if line.opcode == "constant" else list_operand_names(line)
        operands = [values[name] for name in names]
        if line.opcode == "tuple":
            return operands
        if line.opcode == "get-tuple-element":
            return operands[0][int(_read_attribute(line, r"index=(\d+)"))]
        is_call = line.opcode == "custom-call"
        if is_call and _read_attribute(line, r'custom_call_target="([^"]*)"') in _IDENTITY_CALLS:
            return operands[0]
        if line.opcode.endswith("-done") or line.opcode == "copy-start":
            return operands[0]
        origin = _read_origin(line, caller)
        if line.opcode in _INLINED:
            return self._read_computation(
                _read_attribute(line, r"(?:to_apply|calls)=%?([\w.\-]+)"), operands, {}, ops, origin
            )
        integers = [known.get(name) for name in names]
        found = self._positions.compute_integers_by_device(line, integers)
        if found is not None:
            known[line.name] = found
        kind, shape = line.opcode.removesuffix("-start"), line.shape
        if kind in COLLECTIVE_KINDS and line.opcode != kind and kind != "all-reduce":
            # An asynchronous collective returns a tuple of its operand and its result, so take the result.
            shape = _split_tuple_shape(shape)[1]
        line = line._replace(opcode=kind, shape=shape)
        # XLA may combine several collectives into one that returns a tuple, so split it into one per element.
        if kind in COLLECTIVE_KINDS and kind != "all-to-all" and shape.startswith("("):
            results: list[Any] = []
            for one, part in zip(operands, _split_tuple_shape(shape), strict=True):
                own = _choose_nonempty_origin(one, origin)
                results.append(self._add_operation(line._replace(shape=part), [one], integers, own, ops))
                # XLA gives all elements the metadata of one of the operations that it combined.
                if one.producer is not None:
                    ops[-1].metadata = one.producer.metadata or ops[-1].metadata
            return results
        return self._add_operation(line, operands, integers, origin, ops)

    def _add_operation(
        self, line: Instruction, operands: Sequence[Any], known: Sequence[Any], origin: Origin, ops: list[Op]
    ) -> Any:
        result = _make_values_of_shape(line.shape)
        op = Op(
            _OP_NAMES.get(line.opcode, line.opcode.replace("-", "_")),
            _flatten_values(operands),
            _flatten_values(result),
            *origin,
        )
        for position, value in enumerate(op.results):
            value.producer, value.index = op, position
        for value in op.operands:
            value.uses.append(op)
        self._set_op_fields(op, line, known)
        ops.append(op)
        return result

    def _set_op_fields(self, op: Op, line: Instruction, known: Sequence[Integers]) -> None:
        """Set the fields of an operation that depend on its attributes, such as its dims, FLOPs, and inner blocks."""
        if line.opcode in COLLECTIVE_KINDS:
            op.dims, op.group = self._positions.find_collective_dims_and_group_size(line.arguments)
        elif line.opcode == "dynamic-slice":
            op.dims = self._positions.find_mesh_dims_with_different_slices(known[1:])
            op.name = "slice" if op.dims else op.name
        elif line.opcode == "dot":
            sizes = _read_attribute(line, r"lhs_contracting_dims=\{([\d,]*)\}").split(",")
            contracting = [op.operands[0].shape[int(n)] for n in sizes if n]
            op.flops = 2 * op.results[0].size * math.prod(contracting)
        elif line.opcode == "convolution":
            op.flops = _count_convolution_flops(op.results[0], op.operands[1], line)
        elif line.opcode == "custom-call":
            op.flops = _count_library_call_flops(op, line)
        elif line.opcode in ("while", "conditional"):
            origin = op.layer_path, op.is_backward, op.is_update, op.is_fused
            op.blocks += [self.read_block(name, origin) for name in list_called_computations(line.arguments)]
            op.trips = _count_loop_iterations(op) if line.opcode == "while" else 1
        values, _, attributes = line.arguments.partition(")")
        op.metadata, op.function, _, compared = _parse_attributes(attributes)
        is_alone = op.blocks or ("to_apply=" in attributes and line.opcode not in COLLECTIVE_KINDS)
        constant = values * (line.opcode == "constant")
        op.key = None if is_alone else (constant, compared, line.shape)


class _DevicePositions:
    """Positions of devices on a mesh. They show over which dims devices exchange or take different slices."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._devices = np.arange(mesh.size)
        self._coords = dict(zip(mesh.dim_names, np.unravel_index(self._devices, mesh.shape), strict=True))

    def find_collective_dims_and_group_size(self, attributes: str) -> tuple[tuple[str, ...], int]:
        """Return a collective's mesh dims and group size. The size is 0 if groups have all devices along the dims."""
        if "source_target_pairs=" in attributes:
            ends = np.array(list_permute_pairs(attributes), int).reshape(-1, 2)
            dims = [dim for dim, at in self._coords.items() if (at[ends[:, 0]] != at[ends[:, 1]]).any()]
            return tuple(dims), 0
        group = find_first_device_group(attributes, self._mesh.size)
        dims = tuple(dim for dim, at in self._coords.items() if len(np.unique(at[group])) > 1)
        is_all = len(group) == math.prod(map(self._mesh.dim_size, dims))
        return dims, 0 if is_all else len(group)

    def find_mesh_dims_with_different_slices(self, offsets_by_axis: Sequence[Integers]) -> tuple[str, ...]:
        """Return the mesh dims along which slices differ, from each axis's offsets on all devices (None: unknown)."""
        found: list[str] = []
        for at in offsets_by_axis:
            if at is None or len(at) != self._mesh.size:
                continue
            at = at.reshape(self._mesh.shape)
            found += [d for n, d in enumerate(self._mesh.dim_names) if (at != at.take([0], n)).any()]
        return tuple(dim for dim in self._mesh.dim_names if dim in found)

    def compute_integers_by_device(self, line: Instruction, values: Sequence[Any]) -> Integers:
        """Return an array of the integers that an operation computes on each device, or None if they are unknown."""
        if line.opcode == "partition-id":
            return self._devices
        if line.opcode == "constant":
            return self._read_integer_constant(line)
        if not values or any(value is None for value in values):
            return None
        if line.opcode in ("reshape", "copy", "bitcast"):
            return values[0].reshape(len(values[0]), *_parse_shape(line.shape))
        if line.opcode == "convert":
            return values[0] if line.shape[0] in "su" else None
        if line.opcode == "dynamic-slice" and values[0].ndim == 2 and _parse_shape(line.shape) == (1,):
            return np.take(values[0][0], values[1], mode="clip").reshape(-1, 1)
        if line.opcode in _INTEGER_OPERATIONS and values[0].ndim == values[-1].ndim:
            return _INTEGER_OPERATIONS[line.opcode](values[0], values[-1])
        return None

    def _read_integer_constant(self, line: Instruction) -> Integers:
        if line.shape[0] not in "su" or math.prod(_parse_shape(line.shape)) > max(self._mesh.size, 64):
            return None
        found = re.findall(r"-?\d+", line.arguments.partition(")")[0])
        shape = (1, *_parse_shape(line.shape))
        return np.array(found, np.int64).reshape(shape) if len(found) == math.prod(shape) else None


_INTEGER_OPERATIONS: Mapping[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": lambda a, b: a // np.maximum(b, 1),
    "remainder": lambda a, b: a % np.maximum(b, 1),
    "minimum": np.minimum,
    "maximum": np.maximum,
}


def _count_convolution_flops(result: Value, kernel: Value, line: Instruction) -> int:
    labels = _read_attribute(line, r"dim_labels=\w+_(\w+)->")
    return 2 * result.size * kernel.size // max(kernel.shape[labels.index("o")], 1)


def _count_library_call_flops(op: Op, line: Instruction) -> int:
    """Return the FLOPs of a GPU library's matrix product or convolution, or 0 for all other custom calls."""
    target = _read_attribute(line, r'custom_call_target="([^"]*)"')
    if target.startswith("__cublas"):
        axes = _read_attribute(line, r'"lhs_contracting_dimensions":\[([^\]]*)\]')
        length = math.prod(op.operands[0].shape[int(n)] for n in re.findall(r"\d+", axes))
        return 2 * op.results[0].size * length
    if not target.startswith("__cudnn$conv"):
        return 0
    # For a gradient of a convolution, the labels are those of the forward pass, so find the forward kernel and result.
    operands, result = op.operands, op.results[0]
    if target.endswith("BackwardInput"):
        return _count_convolution_flops(operands[0], operands[1], line)
    of = (operands[1], result) if target.endswith("BackwardFilter") else (result, operands[1])
    return _count_convolution_flops(*of, line)


# A search parses a module for each map, and most of their operations have equal attributes, so cache the results.
@functools.lru_cache(maxsize=2**14)
def _parse_attributes(attributes: str) -> tuple[str, str, Origin, str]:
    """Return an operation's metadata, function, and origin, and the attributes that decide about its result."""
    metadata = re.search(r"metadata=\{(.*?)\}", attributes)
    name = re.search(r'op_name="([^"]*)"', attributes)
    function = re.search(r'op_name="[^"]*/(erfc?|erf_inv)"', attributes)
    return (
        metadata[1] if metadata else "",
        function[1] if function else "",
        parse_op_origin(name[1] if name else ""),
        _UNEQUAL.sub("", attributes),
    )


def _read_origin(line: Instruction, caller: Origin) -> Any:
    found = _parse_attributes(line.arguments.partition(")")[2])[2]
    return tuple(own or outer for own, outer in zip(found, caller, strict=True)) if caller else found


def _choose_nonempty_origin(value: Value, origin: Origin) -> Origin:
    """Return `origin`. If it is empty, as for combined collectives, return the origin of the producer of `value`."""
    op = value.producer
    return origin if any(origin) or op is None else (op.layer_path, op.is_backward, op.is_update, op.is_fused)


def _read_attribute(line: Instruction, pattern: str) -> str:
    found = re.search(pattern, line.arguments)
    return found[1] if found else ""


def _count_loop_iterations(op: Op) -> int:
    """Return the iterations of a loop that compares a counter with a constant, or 1 for other loops."""
    block = op.blocks[-2]  # the condition of the loop, as the body is the last block
    root = block.return_values[0].producer
    if root is None or root.name != "compare":
        return 1
    counter, limit = root.operands
    start = next((op.operands[n] for n, arg in enumerate(block.arguments) if arg is counter), None)
    last, first = _read_scalar_constant(limit), _read_scalar_constant(start)
    return 1 if last is None else max(last - (first or 0), 1)


def _read_scalar_constant(value: Value | None) -> int | None:
    if value is None or value.producer is None or value.producer.name != "constant" or value.shape:
        return None
    return int(value.producer.key[0]) if re.fullmatch(r"-?\d+", value.producer.key[0]) else None


def _parse_shape(text: str) -> tuple[int, ...]:
    return _parse_shape_and_dtype(text)[0]


@functools.lru_cache(maxsize=2**12)
def _parse_shape_and_dtype(text: str) -> tuple[tuple[int, ...], str]:
    """Return the first shape in a text, and its dtype in the notation of `Value`. Without one, the dtype is empty."""
    found = SHAPE.search(text)
    if not found:
        return (), ""
    return tuple(int(n) for n in found[2].split(",") if n), convert_xla_dtype_name(found[1])


def _make_values_of_shape(shape: str) -> Any:
    """Return a new value of a shape in HLO's notation, or a list of values for a tuple."""
    if not shape.startswith("("):
        dims, dtype = _parse_shape_and_dtype(shape)
        # If the text is no shape, the value is a token, so return a value without elements.
        return Value(dims, dtype) if dtype else Value((0,), "bool")
    return [_make_values_of_shape(each) for each in _split_tuple_shape(shape)]


def _split_tuple_shape(shape: str) -> list[str]:
    """Return the shapes inside a tuple's shape."""
    parts, depth, start = list[str](), 0, 1
    for origin, sign in enumerate(shape):
        depth += (sign in "([{") - (sign in ")]}")
        if (sign == "," and depth == 1) or (sign == ")" and depth == 0):
            parts.append(re.sub(r"/\*.*?\*/", "", shape[start:origin]).strip())
            start = origin + 1
    return [part for part in parts if part]


def _flatten_values(values: Any) -> list[Value]:
    if isinstance(values, Value):
        return [values]
    return [value for each in values for value in _flatten_values(each)]
