"""What XLA's compiled text says of a step: its collectives, those in loops as often as these run.

%all-gather.3 = bf16[4096,1024]{1,0} all-gather(%convert.1), replica_groups=[8,8]<=[64], dimensions={0}
%reduce-scatter-start.1 = ((f32[8,16]), f32[1,16]) reduce-scatter-start(..), replica_groups=mesh['a'=8,'b'=8] {'a'}
%while.5 = (..) while(%tuple), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"32"}}
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from layoutmap.core.variables import itemsize

_NAMES = {
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
_SHAPE = re.compile(r"(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_DTYPES = {"pred": "bool", "bf16": "bfloat16", "c64": "complex64", "c128": "complex128"}


@dataclass(frozen=True, slots=True)
class Compiled:
    """Equal collectives of a compiled step.

    Args:
        kind: What they do, as in `Collective`.
        group: How many devices exchange.
        tensor_bytes: As in `Collective`.
    """

    kind: str
    group: int
    tensor_bytes: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that each device sends for one of them, on a ring."""
        if self.kind == "permute":
            return self.tensor_bytes
        one = self.tensor_bytes * (self.group - 1) // max(self.group, 1)
        if self.kind == "all_to_all":
            return one // self.group
        return one * (2 if self.kind == "all_reduce" else 1)


def collectives(text: str) -> Mapping[Compiled, int]:
    """Return the collectives of a compiled module, and how often each is called in a step."""
    bodies: dict[str, list[tuple[str, str, str]]] = {}
    entry = name = ""
    for line in text.splitlines():
        if not line.startswith(" "):
            if found := _COMPUTATION.match(line):
                name = found[1]
                bodies[name] = []
                entry = name if line.startswith("ENTRY") else entry
        elif name and (made := _OPERATION.match(line)):
            bodies[name].append((made[2], made[3], made[4]))
    counts = Counter[Compiled]()
    _look(bodies, entry, 1, counts)
    return counts


def _look(
    bodies: Mapping[str, list[tuple[str, str, str]]], name: str, times: int, counts: Counter[Compiled]
) -> None:
    for shape, op, rest in bodies.get(name, ()):
        if op == "while":
            trips = re.search(r'known_trip_count":?\{"?n"?:"?(\d+)', rest)
            condition = re.search(r"condition=%?([\w.\-]+)", rest)
            number = int(trips[1]) if trips else _limit(bodies, condition[1] if condition else "")
            for body in re.findall(r"body=%?([\w.\-]+)", rest):
                _look(bodies, body, times * number, counts)
        elif op in ("call", "async-start", "conditional"):
            for inner in re.findall(r"(?:to_apply|calls|branch_computations=\{)=?%?([\w.\-]+)", rest):
                _look(bodies, inner, times, counts)
        elif (kind := _NAMES.get(op.removesuffix("-start"))) is not None:
            for tensor_bytes in _tensors(kind, shape, rest, op.endswith("-start")):
                counts[Compiled(kind, _group(rest), tensor_bytes)] += times


def _tensors(kind: str, shape: str, rest: str, starts: bool) -> list[int]:
    """The sizes of the tensors of a collective, each where it is largest; several were combined to one operation."""
    sizes = [_bytes(*each) for each in _SHAPE.findall(shape)]
    if starts and kind != "all_reduce" and len(sizes) > 1:  # what it is given, and what it returns
        half = len(sizes) // 2
        return [max(pair) for pair in zip(sizes[:half], sizes[half : 2 * half], strict=True)]
    if kind == "reduce_scatter":
        return [size * _group(rest) for size in sizes]
    if kind == "all_to_all" and len(sizes) > 1:
        return [sum(sizes)]
    return sizes


def _bytes(dtype: str, sizes: str) -> int:
    known = {"f": "float", "s": "int", "u": "uint"}
    name = _DTYPES.get(dtype) or known.get(dtype[0], dtype[0]) + dtype[1:]
    return int(math.prod(int(n) for n in sizes.split(",") if n) * itemsize(name))


def _group(rest: str) -> int:
    """How many devices one group of a collective has, in each of the ways that XLA writes it."""
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", rest):
        return int(found[2])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        total = 1
        for name, part in re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", found[2]):
            total *= int(part or sizes[name])
        return total
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return len(found[1].split(","))
    return 2


def _limit(bodies: Mapping[str, list[tuple[str, str, str]]], condition: str) -> int:
    """The constant that the counter of a loop is compared with."""
    found = [
        int(rest.partition(")")[0])
        for _, op, rest in bodies.get(condition, ())
        if op == "constant" and rest[:1].isdigit()
    ]
    return max(found, default=1)
