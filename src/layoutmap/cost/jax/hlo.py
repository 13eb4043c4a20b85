"""Count the collectives in XLA's compiled text of a step, those in a loop once for each iteration.

%all-gather.3 = bf16[4096,1024]{1,0} all-gather(%convert.1), replica_groups=[8,8]<=[64], dimensions={0}
%reduce-scatter-start.1 = ((f32[8,16]), f32[1,16]) reduce-scatter-start(..), replica_groups=mesh['a'=8,'b'=8] {'a'}
%while.5 = (..) while(%tuple), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"32"}}

XLA for TPUs fuses computing and collectives. A collective is a chain of several fusions:

%fusion.2 = (..) fusion(%x, %y), kind=kCustom, calls=%all-reduce-scatter.2, ..
%fusion.7 = (..) fusion(%x, %y), kind=kCustom, calls=%async_collective_fusion.27, ..
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from layoutmap.core.variables import get_itemsize

COLLECTIVE_KINDS = {
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "all_gather",
}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
SHAPE = re.compile(r"(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_NUMPY_KINDS = {"f": "float", "s": "int", "u": "uint"}
_DTYPES = {"pred": "bool", "bf16": "bfloat16", "c64": "complex64", "c128": "complex128"}


class Instruction(NamedTuple):
    """Line `%name = shape opcode(arguments), attributes`. `arguments` is all text after the first parenthesis."""

    name: str
    shape: str
    opcode: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CompiledCollective:
    """Collective in a compiled step: its kind, its number of devices, and its size."""

    kind: str
    group: int  # number of devices that exchange data
    tensor_bytes: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that each device sends in one call, with a ring algorithm."""
        if self.kind == "permute":
            return self.tensor_bytes
        one = self.tensor_bytes * (self.group - 1) // max(self.group, 1)
        return one * (2 if self.kind == "all_reduce" else 1)


def count_compiled_collectives(text: str) -> Mapping[CompiledCollective, int]:
    """Return the number of calls in a step of each collective of a compiled module."""
    bodies, entry = parse_computations(text)
    counts = Counter[CompiledCollective]()
    _add_collective_counts(bodies, entry, 1, counts, set(), _count_devices(text))
    return counts


def parse_computations(text: str) -> tuple[Mapping[str, list[Instruction]], str]:
    """Return a dict from computation names to instructions, the root last, and the entry computation's name."""
    bodies: dict[str, list[Instruction]] = {}
    roots: dict[str, Instruction] = {}
    entry = name = ""
    for line in text.splitlines():
        if not line.startswith(" "):
            if found := _COMPUTATION.match(line):
                name = found[1]
                bodies[name] = []
                entry = name if line.startswith("ENTRY") else entry
        elif name and (instruction := _OPERATION.match(line)):
            bodies[name].append(Instruction(*instruction.groups()))
            if line.lstrip().startswith("ROOT "):
                roots[name] = bodies[name][-1]
    # The root of a scheduled module may be anywhere, so move it to the end, where its readers expect it.
    for name, root in roots.items():
        bodies[name].remove(root)
        bodies[name].append(root)
    return bodies, entry


def _add_collective_counts(
    computations: Mapping[str, list[Instruction]],
    computation_name: str,
    times: int,
    counts: Counter[CompiledCollective],
    chain_ids: set[str],
    num_devices: int,
) -> None:
    """Add a computation's collectives to `counts`, `times` times each. A chain of fusions counts as one."""
    for _, shape, opcode, arguments in computations.get(computation_name, ()):
        if opcode == "while":
            trips = re.search(r'known_trip_count":?\{"?n"?:"?(\d+)', arguments)
            condition, body = (re.findall(rf"{n}=%?([\w.\-]+)", arguments)[0] for n in ("condition", "body"))
            loop = computations.get(condition, []), computations.get(body, [])
            num_trips = int(trips[1]) if trips else _count_loop_iterations(*loop)
            _add_collective_counts(computations, body, times * num_trips, counts, set(), num_devices)
        elif opcode in ("call", "async-start", "conditional", "fusion"):
            for inner in list_called_computations(arguments):
                _add_collective_counts(
                    computations,
                    inner,
                    times,
                    counts,
                    chain_ids if opcode == "fusion" else set(),
                    num_devices,
                )
        elif (kind := COLLECTIVE_KINDS.get(opcode.removesuffix("-start"))) is not None:
            pairs = list_permute_pairs(arguments) if "source_target_pairs=" in arguments else [(0, 1)]
            if kind == "permute" and all(source == target for source, target in pairs):
                continue  # leave out a permute in which each device sends only to itself
            if chain := re.search(r'chain_id="\d+"', arguments):
                if chain[0] in chain_ids:
                    continue
                chain_ids.add(chain[0])
            # A permute has pairs of devices instead of replica groups, so the size of its group is 2.
            group_size = 2 if kind == "permute" else len(find_first_device_group(arguments, num_devices))
            done = "reduce_scatter" if computation_name.startswith("all-reduce-scatter") else kind
            for tensor_bytes in _list_tensor_bytes(kind, shape, group_size, opcode.endswith("-start")):
                counts[CompiledCollective(done, group_size, tensor_bytes)] += times


def list_permute_pairs(attributes: str) -> list[tuple[int, int]]:
    """Return the pairs of source and target devices of a permute, or an empty list for other operations."""
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
    found = re.findall(r"(\d+),(\d+)", pairs[1]) if pairs else []
    return [(int(source), int(target)) for source, target in found]


def _list_tensor_bytes(kind: str, shape: str, group_size: int, is_asynchronous: bool) -> list[int]:
    """Return the bytes of each tensor that a collective exchanges: of its operand or result, whichever is larger."""
    shapes = SHAPE.findall(shape)
    # On TPUs, an asynchronous collective also returns numbers for synchronization, so leave out their shapes.
    sizes = [_compute_num_bytes(*each) for each in shapes if not is_asynchronous or each != ("u32", "")]
    # An asynchronous collective lists first the sizes of its operands and then those of its results.
    if is_asynchronous and kind != "all_reduce" and len(sizes) > 1:
        half = len(sizes) // 2
        sizes = [max(pair) for pair in zip(sizes[:half], sizes[half : 2 * half], strict=True)]
    elif kind == "reduce_scatter":
        sizes = [size * group_size for size in sizes]
    # The tuple of an all-to-all has one part for each device, so add the parts up.
    return [sum(sizes)] if kind == "all_to_all" else sizes


def _compute_num_bytes(dtype: str, sizes: str) -> int:
    return int(math.prod(int(n) for n in sizes.split(",") if n) * get_itemsize(convert_xla_dtype_name(dtype)))


def list_called_computations(attributes: str) -> list[str]:
    """Return the names of the computations that an operation runs. The condition of a loop comes first."""
    found = ", ".join(one or several for one, several in _INNER.findall(attributes))
    return [name.removeprefix("%") for name in found.split(", ") if name]


_INNER = re.compile(
    r"(?:condition|body|true_computation|false_computation|to_apply|calls)=%?([\w.\-]+)"
    r"|branch_computations=\{([^}]*)\}"
)


def convert_xla_dtype_name(name: str) -> str:
    """Return numpy's name of an XLA element type.

    Example:
        >>> convert_xla_dtype_name("f32"), convert_xla_dtype_name("pred"), convert_xla_dtype_name("f8e4m3fn")
        ('float32', 'bool', 'float8_e4m3fn')
    """
    found = re.fullmatch(r"([fsu])(\d+)(.*)", name)
    if name in _DTYPES or found is None:
        return _DTYPES.get(name, name)
    return f"{_NUMPY_KINDS[found[1]]}{found[2]}" + f"_{found[3]}" * bool(found[3])


def _count_devices(text: str) -> int:
    """Return the number of devices that run a module, from its first line."""
    head, _, _ = text.partition("\n")
    return math.prod(int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", head))


_IOTA = r"\[([\d,]*)\](?:T\(([\d,]*)\))?"  # iota device list: numbers from 0, a shape, and a permutation of its axes


def find_first_device_group(attributes: str, num_devices: int) -> np.ndarray:
    """Return the devices of a collective's first group, from attributes in any of XLA's notations."""
    if found := re.search(rf"replica_groups=\[\d+,(\d+)\]<={_IOTA}", attributes):
        return _parse_iota_devices(*found.groups()[1:]).reshape(-1, int(found[1]))[0]
    if found := re.search(
        rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((?:{_IOTA}|([\d,]+))\))? \{{([^}}]*)\}}",
        attributes,
    ):
        axes = [(name, int(size)) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])]
        parts = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", found[5])
        taken = {name: (int(before or 1), int(length or 0)) for name, before, length in parts}
        if found[4]:
            devices = np.array([int(n) for n in found[4].split(",")])
        else:
            devices = _parse_iota_devices(found[2] or ",".join(str(size) for _, size in axes), found[3])
        axis_positions: list[np.ndarray] = []
        for name, size in axes:
            before, length = taken.get(name, (1, 1))
            axis_positions.append(np.arange(length or size) * (size // before // (length or size)))
        return devices.reshape([size for _, size in axes])[np.ix_(*axis_positions)].ravel()
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return np.array([int(n) for n in found[1].split(",")])
    return np.arange(num_devices)


def _parse_iota_devices(sizes: str, order: str | None) -> np.ndarray:
    """Return a list of devices from XLA's iota notation. `[16,4]T(1,0)` has the sizes "16,4" and the order "1,0"."""
    shape = [int(n) for n in sizes.split(",")]
    axes = [int(n) for n in order.split(",")] if order else range(len(shape))
    return np.arange(math.prod(shape)).reshape(shape).transpose(axes).ravel()


def _count_loop_iterations(condition: list[Instruction], body: list[Instruction]) -> int:
    """Return the number of iterations of a loop, from the limit and the increment of its counter."""
    limits = [
        int(each.arguments.partition(")")[0])
        for each in condition
        if each.opcode == "constant" and each.arguments[0].isdigit()
    ]
    positions = [int(found[1]) for each in condition if (found := re.search(r"index=(\d+)", each.arguments))]
    after = list_operand_names(body[-1]) if body else []
    operations = {each.name: each for each in body}
    is_known = len(positions) == 1 and positions[0] < len(after)
    step = _compute_counter_increment(operations, after[positions[0]]) if is_known else 1
    return -(-max(limits, default=1) // max(step, 1))


def _compute_counter_increment(operations: Mapping[str, Instruction], name: str) -> int:
    """Return the sum of the constants that the operation `name` and its operands add to a loop's counter."""
    instruction = operations.get(name)
    if instruction is None or instruction.opcode not in ("add", "constant"):
        return 0
    if instruction.opcode == "add":
        return sum(_compute_counter_increment(operations, each) for each in list_operand_names(instruction))
    number = instruction.arguments.partition(")")[0]
    return int(number) if number.isdigit() else 0


def list_operand_names(instruction: Instruction) -> list[str]:
    """Return the names of an operation's operands."""
    return re.findall(r"%([\w.\-]+)", instruction.arguments.partition(")")[0])
