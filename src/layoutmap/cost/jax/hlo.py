"""Count the collectives in XLA's compiled text of a step, once for each run of a loop.

%all-gather.3 = bf16[4096,1024]{1,0} all-gather(%convert.1), replica_groups=[8,8]<=[64], dimensions={0}
%reduce-scatter-start.1 = ((f32[8,16]), f32[1,16]) reduce-scatter-start(..), replica_groups=mesh['a'=8,'b'=8] {'a'}
%while.5 = (..) while(%tuple), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"32"}}

For TPUs, where computing and collectives are one fusion, of a start, middles and an end, of one chain:

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

NAMES = {
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
_KINDS = {"f": "float", "s": "int", "u": "uint"}
_DTYPES = {"pred": "bool", "bf16": "bfloat16", "c64": "complex64", "c128": "complex128"}


class Operation(NamedTuple):
    """Line of a computation: `%name = shape op(rest`."""

    name: str
    shape: str
    op: str
    rest: str


@dataclass(frozen=True, slots=True)
class CompiledCollective:
    """Collectives of one kind, size, and group of devices in a compiled step."""

    kind: str
    group: int  # number of devices that exchange
    tensor_bytes: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that each device sends for one of them, on a ring."""
        if self.kind == "permute":
            return self.tensor_bytes
        one = self.tensor_bytes * (self.group - 1) // max(self.group, 1)
        return one * (2 if self.kind == "all_reduce" else 1)


def parse_collectives(text: str) -> Mapping[CompiledCollective, int]:
    """Return the collectives of a compiled module, with the number of calls of each in a step."""
    bodies, entry = parse_computations(text)
    counts = Counter[CompiledCollective]()
    _count_in_computation(bodies, entry, 1, counts, set(), _count_devices(text))
    return counts


def parse_computations(text: str) -> tuple[Mapping[str, list[Operation]], str]:
    """Return each computation's operations by its name, the root last, and the entry's name."""
    bodies: dict[str, list[Operation]] = {}
    roots: dict[str, Operation] = {}
    entry = name = ""
    for line in text.splitlines():
        if not line.startswith(" "):
            if found := _COMPUTATION.match(line):
                name = found[1]
                bodies[name] = []
                entry = name if line.startswith("ENTRY") else entry
        elif name and (made := _OPERATION.match(line)):
            bodies[name].append(Operation(*made.groups()))
            if line.lstrip().startswith("ROOT "):
                roots[name] = bodies[name][-1]
    for name, root in roots.items():  # in a scheduled module, the root may be anywhere
        bodies[name].remove(root)
        bodies[name].append(root)
    return bodies, entry


def _count_in_computation(
    bodies: Mapping[str, list[Operation]],
    name: str,
    times: int,
    counts: Counter[CompiledCollective],
    chains: set[str],
    num_devices: int,
) -> None:
    """Add the collectives of a computation to `counts`. A collective of a known chain is skipped."""
    for _, shape, op, rest in bodies.get(name, ()):
        if op == "while":
            trips = re.search(r'known_trip_count":?\{"?n"?:"?(\d+)', rest)
            condition, body = (re.findall(rf"{each}=%?([\w.\-]+)", rest)[0] for each in ("condition", "body"))
            number = int(trips[1]) if trips else _count_trips(bodies.get(condition, []), bodies.get(body, []))
            _count_in_computation(bodies, body, times * number, counts, set(), num_devices)
        elif op in ("call", "async-start", "conditional", "fusion"):
            for inner in find_inner_computations(rest):
                _count_in_computation(
                    bodies, inner, times, counts, chains if op == "fusion" else set(), num_devices
                )
        elif (kind := NAMES.get(op.removesuffix("-start"))) is not None:
            pairs = list_permute_pairs(rest) if "source_target_pairs=" in rest else [(0, 1)]
            if kind == "permute" and all(source == target for source, target in pairs):
                continue  # permutes without pairs send nothing
            if chain := re.search(r'chain_id="\d+"', rest):
                if chain[0] in chains:
                    continue
                chains.add(chain[0])
            # Permutes have pairs instead of replica_groups.
            group = 2 if kind == "permute" else len(find_first_group(rest, num_devices))
            done = "reduce_scatter" if name.startswith("all-reduce-scatter") else kind
            for tensor_bytes in _list_tensor_sizes(kind, shape, group, op.endswith("-start")):
                counts[CompiledCollective(done, group, tensor_bytes)] += times


def list_permute_pairs(rest: str) -> list[tuple[int, int]]:
    """Return the source and target devices of a permute, or no pairs if another operation is given."""
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", rest)
    found = re.findall(r"(\d+),(\d+)", pairs[1]) if pairs else []
    return [(int(source), int(target)) for source, target in found]


def _list_tensor_sizes(kind: str, shape: str, group: int, starts: bool) -> list[int]:
    """Return the largest size of each tensor of a collective, since XLA may combine several."""
    shapes = SHAPE.findall(shape)
    # Operations that TPUs wait for.
    sizes = [_count_bytes(*each) for each in shapes if not starts or each != ("u32", "")]
    if starts and kind != "all_reduce" and len(sizes) > 1:  # a started collective lists operands and results
        half = len(sizes) // 2
        sizes = [max(pair) for pair in zip(sizes[:half], sizes[half : 2 * half], strict=True)]
    elif kind == "reduce_scatter":
        sizes = [size * group for size in sizes]
    return [sum(sizes)] if kind == "all_to_all" else sizes  # the tuple has one piece per device


def _count_bytes(dtype: str, sizes: str) -> int:
    return int(math.prod(int(n) for n in sizes.split(",") if n) * get_itemsize(convert_dtype_name(dtype)))


def find_inner_computations(rest: str) -> list[str]:
    """Return the names of the computations that an operation runs, a loop's condition first."""
    found = ", ".join(one or several for one, several in _INNER.findall(rest))
    return [name.removeprefix("%") for name in found.split(", ") if name]


_INNER = re.compile(
    r"(?:condition|body|true_computation|false_computation|to_apply|calls)=%?([\w.\-]+)"
    r"|branch_computations=\{([^}]*)\}"
)


def convert_dtype_name(name: str) -> str:
    """Return numpy's name of an XLA element type.

    Example:
        >>> convert_dtype_name("f32"), convert_dtype_name("pred"), convert_dtype_name("f8e4m3fn")
        ('float32', 'bool', 'float8_e4m3fn')
    """
    found = re.fullmatch(r"([fsu])(\d+)(.*)", name)
    if name in _DTYPES or found is None:
        return _DTYPES.get(name, name)
    return f"{_KINDS[found[1]]}{found[2]}" + f"_{found[3]}" * bool(found[3])


def _count_devices(text: str) -> int:
    """Return how many devices run a module, as its first line says."""
    head, _, _ = text.partition("\n")
    return math.prod(int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", head))


_IOTA = r"\[([\d,]*)\](?:T\(([\d,]*)\))?"  # iota device list: numbers from 0, a shape, and a permutation of its axes


def find_first_group(rest: str, num_devices: int) -> np.ndarray:
    """Return the devices of the first group of a collective, in any of XLA's notations."""
    if found := re.search(rf"replica_groups=\[\d+,(\d+)\]<={_IOTA}", rest):
        return _order_devices(*found.groups()[1:]).reshape(-1, int(found[1]))[0]
    if found := re.search(
        rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((?:{_IOTA}|([\d,]+))\))? \{{([^}}]*)\}}", rest
    ):
        axes = [(name, int(size)) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])]
        parts = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", found[5])
        taken = {name: (int(before or 1), int(length or 0)) for name, before, length in parts}
        if found[4]:
            devices = np.array([int(n) for n in found[4].split(",")])
        else:
            devices = _order_devices(found[2] or ",".join(str(size) for _, size in axes), found[3])
        places: list[np.ndarray] = []
        for name, size in axes:
            before, length = taken.get(name, (1, 1))
            places.append(np.arange(length or size) * (size // before // (length or size)))
        return devices.reshape([size for _, size in axes])[np.ix_(*places)].ravel()
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return np.array([int(n) for n in found[1].split(",")])
    return np.arange(num_devices)


def _order_devices(sizes: str, order: str | None) -> np.ndarray:
    """Return the devices in a text's order: `[16,4]T(1,0)` counts along the minor axis first."""
    shape = [int(n) for n in sizes.split(",")]
    axes = [int(n) for n in order.split(",")] if order else range(len(shape))
    return np.arange(math.prod(shape)).reshape(shape).transpose(axes).ravel()


def _count_trips(condition: list[Operation], body: list[Operation]) -> int:
    """Return how often a loop runs, from the limit of its counter and the increment."""
    limits = [
        int(each.rest.partition(")")[0])
        for each in condition
        if each.op == "constant" and each.rest[0].isdigit()
    ]
    places = [int(found[1]) for each in condition if (found := re.search(r"index=(\d+)", each.rest))]
    after = find_operands(body[-1]) if body else []
    operations = {each.name: each for each in body}
    step = _find_increment(operations, after[places[0]]) if len(places) == 1 and places[0] < len(after) else 1
    return -(-max(limits, default=1) // max(step, 1))


def _find_increment(operations: Mapping[str, Operation], name: str) -> int:
    """Return the sum of the constants that are added to a value."""
    made = operations.get(name)
    if made is None or made.op not in ("add", "constant"):
        return 0
    if made.op == "add":
        return sum(_find_increment(operations, each) for each in find_operands(made))
    number = made.rest.partition(")")[0]
    return int(number) if number.isdigit() else 0


def find_operands(operation: Operation) -> list[str]:
    """Return the names of an operation's operands."""
    return re.findall(r"%([\w.\-]+)", operation.rest.partition(")")[0])
