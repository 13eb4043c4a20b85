"""The peak of what a device holds while it runs operations in their order, by when each value is last used."""

from __future__ import annotations

from collections.abc import Mapping

from layoutmap.engines.jax.cost.graph import Block, Op, Value

_FUSED = """
    abs add and atan2 broadcast_in_dim cbrt ceil clamp compare complex concatenate constant convert
    cosine divide erf exponential exponential_minus_one floor imag iota is_finite log log_plus_one
    logistic maximum minimum multiply negate not or pad popcnt power real reduce_precision remainder
    reverse round_nearest_afz round_nearest_even rsqrt select shift_left shift_right_arithmetic
    shift_right_logical sign sine slice sqrt subtract tan tanh transpose xor
"""
FUSED = frozenset(_FUSED.split())
"""Operations that are computed inside of what takes their results, and so hold nothing."""

ALIASES = frozenset(("reshape", "optimization_barrier", "bitcast_convert", "tuple", "get_tuple_element"))
"""Operations whose results are their operands."""

IN_PLACE = frozenset(("dynamic_update_slice", "scatter", "while"))
"""Operations whose results take the place of operands."""

READ = frozenset(
    ("dot_general", "convolution", "custom_call", "while", "case", "sort", "return", "concatenate")
)
"""Operations that take what is in memory."""


class Memory:
    """What the operations of a block hold.

    Args:
        block: The block.
        kept: Values that are somewhere already, and are not counted.
    """

    def __init__(self, block: Block, kept: frozenset[int] = frozenset()):
        self._block = block
        self._kept = kept | {id(each) for each in block.arguments}
        self._roots: dict[int, tuple[Value, ...]] = {}
        self.inner: dict[int, int] = {}
        self.traffic = 0
        self.peaks: dict[tuple[str, str], int] = {}
        self.peak = self._run()

    def roots(self, value: Value) -> tuple[Value, ...]:
        """The values in memory that one is read from."""
        return self._roots.get(id(value), (value,))

    def _run(self) -> int:
        ops = self._block.ops
        last: dict[int, int] = {}
        made: dict[int, list[Value]] = {}
        for number, op in enumerate(ops):
            sources = self._sources(op)
            for result in op.results:
                self._roots[id(result)] = self._of(op, result, sources)
            for value in sources:
                last[id(value)] = number
            new = [r for r in op.results if self._roots[id(r)] == (r,) and id(r) not in self._kept]
            made[number] = new
            for value in new:
                last.setdefault(id(value), number)
            self._count_traffic(op, sources, new)
        ends: dict[int, list[int]] = {}
        for value_id, number in last.items():
            ends.setdefault(number, []).append(value_id)
        sizes: dict[int, int] = {}
        now = peak = 0
        for number, op in enumerate(ops):
            for value in made[number]:
                sizes[id(value)] = value.num_bytes
                now += value.num_bytes
            here = now + self._peak_inside(op)
            peak = max(peak, here)
            key = (op.where, "update" if op.is_update else "backward" if op.is_backward else "forward")
            self.peaks[key] = max(self.peaks.get(key, 0), here)
            for value_id in ends.get(number, ()):
                now -= sizes.pop(value_id, 0)
        return peak

    def _sources(self, op: Op) -> list[Value]:
        return list({id(root): root for value in op.operands for root in self.roots(value)}.values())

    def _of(self, op: Op, result: Value, sources: list[Value]) -> tuple[Value, ...]:
        if op.name in ALIASES:
            return self.roots(op.operands[result.number if op.name != "reshape" else 0])
        if op.name == "while":
            return self._carried(op, result)
        if op.name in IN_PLACE:
            return self.roots(op.operands[0])[:1] if self.roots(op.operands[0]) else (result,)
        if op.name in FUSED and not self._is_read(result):
            return tuple(sources)
        return (result,)

    def _carried(self, op: Op, result: Value) -> tuple[Value, ...]:
        operand = op.operands[result.number]
        roots = self.roots(operand)
        if len(roots) == 1 and roots[0].num_bytes == result.num_bytes and id(roots[0]) not in self._kept:
            return roots
        return (result,)

    def _is_read(self, value: Value) -> bool:
        return any(use.name in READ or use.name in COLLECTIVE_NAMES for use in value.uses)

    def _peak_inside(self, op: Op) -> int:
        found = 0
        for inner in op.blocks:
            if id(inner) not in self.inner:
                memory = Memory(inner)
                self.inner[id(inner)] = memory.peak
                self.traffic += memory.traffic * op.trips
            found = max(found, self.inner[id(inner)])
        return found

    def _count_traffic(self, op: Op, sources: list[Value], new: list[Value]) -> None:
        if op.blocks or op.name == "return" or not new:
            return
        if op.name in ("gather", "dynamic_slice"):
            self.traffic += 2 * sum(value.num_bytes for value in new)
        else:
            self.traffic += sum(value.num_bytes for value in (*sources, *new))


COLLECTIVE_NAMES = frozenset(("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "permute"))


def peaks_of(block: Block, donated: Mapping[int, int]) -> Memory:
    """Return the memory of a step, without that of its arguments.

    Args:
        block: The step.
        donated: For each result that takes the place of an argument, the number of that.
    """
    returned = block.returned
    return Memory(block, frozenset(id(returned[number]) for number in donated))
