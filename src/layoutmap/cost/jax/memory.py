"""Compute the peak memory of a device that runs operations in a given order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from layoutmap.cost.jax.graph import BARRIER, Block, Op, Value
from layoutmap.cost.table import Collective

_FUSIBLE = """
    abs add and atan2 broadcast_in_dim cbrt ceil clamp compare complex concatenate constant convert
    cosine divide erf exponential exponential_minus_one floor imag iota is_finite log log_plus_one
    logistic maximum minimum multiply negate not or pad popcnt power real reduce_precision remainder
    reverse round_nearest_afz round_nearest_even rsqrt select shift_left shift_right_arithmetic
    shift_right_logical sign sine slice sqrt subtract tan tanh transpose xor
"""
FUSIBLE = frozenset(_FUSIBLE.split())
"""Operations that XLA fuses into the users of their results, so that their results need no memory."""

EXPENSIVE = frozenset(("tanh", "erf"))
"""Operations that are slow to compute, so XLA stores their results for the backward pass, as those of `Op.function`."""

ALIASES = frozenset(("reshape", "optimization_barrier", "bitcast_convert", "tuple", "get_tuple_element"))
"""Operations whose results share the memory of their operands."""

IN_PLACE = frozenset(("all_reduce", "dynamic_update_slice", "scatter", "while"))
"""Operations that write their result to the memory of an operand."""

MATERIALIZING = frozenset(
    ("dot_general", "convolution", "custom_call", "while", "case", "sort", "return", "concatenate")
)
"""Operations that read their operands from memory, so that XLA does not fuse the operands into them."""

_SMALL = 4096  # bytes; smaller constants count as scalars, as they may be tables with one number per device

_MULTIPLE = 8  # XLA pads operands to this, because tensor cores multiply 16-bit elements in multiples of 8
_PRODUCTS = frozenset(("dot_general", "convolution", "reduce", "scatter", "while", "custom_call"))
"""Operations that may compute a weight's gradient, so that a search for it ends there."""


_MORE, _RECOMPUTED, _WORKSPACE, _COMBINED = 1.1, 1.5, 4 << 20, 30 << 20
"""Margins of the upper bound: the factor of the counted bytes, that factor with recomputed activations, the bytes of a
workspace, and the most bytes of collectives of one kind that XLA combines.
"""


def estimate_memory_upper_bound(
    num_bytes: int,
    collectives: Iterable[Collective] = (),
    recomputes: bool = False,
    # XLA adds copies and gaps that follow no rule, so a margin is added to the counted bytes (decisions/0165).
) -> int:
    """Return an upper bound of the bytes that XLA for GPUs needs besides a step's arguments.

    The margin covers copies, gaps between buffers, workspaces, and the operands of collectives that XLA combines. It is
    larger if activations are recomputed outside of loops, since XLA may delay weight gradients then.
    """
    kinds = Counter[str]()
    for each in collectives:
        kinds[each.kind] += each.calls * each.tensor_bytes
    combined = sum(min(each, _COMBINED) for each in kinds.values())
    return int(num_bytes * (_RECOMPUTED if recomputes else _MORE)) + _WORKSPACE + combined


# XLA's scheduler puts operations that compute weight gradients last, so their operands stay in memory (decisions/0165).
def _order_gradients_last(ops: Sequence[Op], backward_ids: Set[int], gradient_ids: Set[int]) -> list[Op]:
    """Return operations in XLA's order: weight gradients follow the rest of the backward pass, then updates.

    XLA schedules from the last operation backward. It begins with the all-reduces of gradients, because only the update
    waits for them. So the products that compute gradients come last, and their operands stay in memory until then.
    """
    first = [op for op in ops if id(op) not in gradient_ids]
    updates = _find_ids_with_dependents({id(op) for op in ops if op.is_update}, ops)
    return [
        *_order_forward_first(first, backward_ids),
        *sorted((op for op in ops if id(op) in gradient_ids), key=lambda op: id(op) in updates),
    ]


def is_remat_barrier(op: Op) -> bool:
    """Return whether an operation is a barrier before recomputed activations."""
    return op.name == BARRIER and not op.is_fused and any(value.size > 1 for value in op.operands)


def _order_forward_first(
    ops: Sequence[Op], backward_ids: Set[int], gradient_ids: Set[int] = frozenset()
) -> list[Op]:
    """Return operations with the forward pass first, and then each operation as soon as its operands exist.

    Operations with ids in `gradient_ids` precede others. A module's text has the results of a step one after another,
    each after the operations that only it needs.
    """
    eager = (backward_ids | gradient_ids) - _find_scalar_constant_ids(ops)
    missing = {
        id(op): {id(v.producer) for v in op.operands if v.producer is not None}
        for op in ops
        if id(op) in eager
    }
    waiting = {id(op): op for op in ops if id(op) in eager and not missing[id(op)].isdisjoint(eager)}
    ordered: list[Op] = []
    for first in [op for op in sorted(ops, key=lambda op: id(op) in eager) if id(op) not in waiting]:
        todo = [first]
        while todo:
            op = todo.pop(0)
            ordered.append(op)
            for use in dict.fromkeys(
                use for result in op.results for use in result.uses if id(use) in waiting
            ):
                missing[id(use)].discard(id(op))
                if not missing[id(use)]:
                    todo.insert(0 if id(use) in gradient_ids else len(todo), waiting.pop(id(use)))
    return ordered


def _find_scalar_constant_ids(ops: Sequence[Op]) -> Set[int]:
    """Return the ids of small constants, and of operations that compute single numbers only from these."""
    found: set[int] = set()
    for op in ops:
        is_number = all(id(v.producer) in found for v in op.operands) and all(v.size <= 1 for v in op.results)
        if is_number or (op.name == "constant" and op.results[0].num_bytes <= _SMALL):
            found.add(id(op))
    return found


def _find_backward_op_ids(ops: Sequence[Op]) -> Set[int]:
    """Return the ids of backward operations, of barriers before recomputing, and of all that depend on these."""
    return _find_ids_with_dependents({id(op) for op in ops if op.is_backward or op.name == BARRIER}, ops)


def _find_ids_with_dependents(op_ids: Set[int], ops: Sequence[Op]) -> Set[int]:
    """Return `op_ids`, and the ids of all operations that depend on the results of these."""
    found = set(op_ids)
    for op in ops:
        for value in op.operands:
            if id(value.producer) in found:
                found.add(id(op))
                break
    return found


def _find_gradient_op_ids(ops: Sequence[Op]) -> Set[int]:
    """Return the ids of operations that compute weight gradients or the update, and of all that depend on these."""
    late: set[int] = set()
    for op in reversed(ops):
        uses = [use for result in op.results for use in result.uses]
        ends = all(use.is_update or (id(use) in late and use.name not in _PRODUCTS) for use in uses)
        if op.is_update or (uses and ends and op.is_backward):
            late.add(id(op))
    return _find_ids_with_dependents(late, ops)


@dataclass(slots=True)
class OrderMemory:
    """Peaks of a block's operations in one order: of all, and by layer path and pass, with the bytes stored then."""

    peak: int = 0
    peaks: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    held_bytes: dict[tuple[str, str], Counter[object]] = field(
        default_factory=dict[tuple[str, str], Counter[object]]
    )


class BlockMemory:
    """Memory of a block's operations in one of several orders, without arguments and the values with `kept_ids`."""

    def __init__(
        self,
        block: Block,
        kept_ids: frozenset[int] = frozenset(),
        describe_value: Callable[[Value], object] | None = None,
    ):
        self._describe_value = describe_value
        self._kept = kept_ids | {id(each) for each in block.arguments}
        self._roots: dict[int, tuple[Value, ...]] = {}
        # For each operation: buffers that it reads, buffers that it creates, and operands that are copied with padding.
        self._buffers: dict[int, tuple[Sequence[Value], Sequence[Value], Sequence[Value]]] = {}
        self.inner_peaks: dict[int, int] = {}
        self.traffic = 0
        self._held_inside: dict[int, Counter[object]] = {}
        for op in block.ops:
            self._find_buffers_of_op(op)

    def _find_buffers_of_op(self, op: Op) -> None:
        roots = self._roots
        found: dict[int, Value] = {}
        for value in op.operands:
            for root in roots.get(id(value), (value,)):
                found[id(root)] = root
        sources, new = [*found.values()], list[Value]()
        for result in op.results:
            buffers = roots[id(result)] = self._find_result_buffers(op, result, sources)
            if buffers == (result,) and id(result) not in self._kept:
                new.append(result)
        self._buffers[id(op)] = sources, new, _find_padded_operands(op)
        self._add_traffic_bytes(op, sources, op.results if op.name == "all_reduce" else new)

    def find_buffers(self, value: Value) -> tuple[Value, ...]:
        """Return the values in memory that a value is read from: itself, or those that it views or is fused with."""
        return self._roots.get(id(value), (value,))

    def compute_peaks(self, ops: Sequence[Op]) -> OrderMemory:
        """Return the peaks of the block with its operations in a given order."""
        last: dict[int, int] = {}
        made: list[list[Value]] = []
        copies: dict[int, Value] = {}
        for number, op in enumerate(ops):
            sources, new, padded = self._buffers[id(op)]
            for value in sources:
                last[id(value)] = number
            for value in new:
                last.setdefault(id(value), number)
            made.append([*new])
            for operand in padded:
                # XLA pads an operand once: the forward product makes the copy, and the gradient's products reuse it.
                if id(operand) not in copies:
                    copies[id(operand)] = Value(operand.shape, operand.dtype, operand.producer, operand.index)
                    made[number].append(copies[id(operand)])
                last[id(copies[id(operand)])] = number
        ends: dict[int, list[int]] = {}
        for value_id, number in last.items():
            ends.setdefault(number, []).append(value_id)
        sizes: dict[int, int] = {}
        values: dict[int, Value] = {}
        found, now = OrderMemory(), 0
        for number, op in enumerate(ops):
            for value in made[number]:
                sizes[id(value)] = num_bytes = value.num_bytes
                values[id(value)] = value
                now += num_bytes
            here = now + self._compute_inner_peak_bytes(op)
            found.peak = max(found.peak, here)
            key = (op.layer_path, "update" if op.is_update else "backward" if op.is_backward else "forward")
            if self._describe_value is not None and here > found.peaks.get(key, -1):
                found.held_bytes[key] = self._sum_bytes_by_description((values[each] for each in sizes), op)
            found.peaks[key] = max(found.peaks.get(key, 0), here)
            for value_id in ends.get(number, ()):
                now -= sizes.pop(value_id, 0)
        return found

    def _sum_bytes_by_description(self, values: Iterable[Value], op: Op) -> Counter[object]:
        """Return a counter from descriptions to bytes: of values, and of those at the peak in a loop or branch."""
        assert self._describe_value is not None
        found = Counter[object]()
        for value in values:
            found[self._describe_value(value)] += value.num_bytes
        inside = max(op.blocks, key=lambda each: self.inner_peaks.get(id(each), 0), default=None)
        return found + self._held_inside[id(inside)] if inside is not None else found

    def _find_result_buffers(self, op: Op, result: Value, sources: list[Value]) -> tuple[Value, ...]:
        if op.is_fused and op.name not in COLLECTIVE_NAMES:
            return tuple(sources) if all(use.is_fused for use in result.uses) else (result,)
        if op.name in ALIASES or (op.name == "copy" and all(use.name == "while" for use in result.uses)):
            return self.find_buffers(op.operands[result.index if len(op.operands) > 1 else 0])
        if op.name == "while":
            return self._find_loop_result_buffers(op, result)
        if op.name in IN_PLACE:
            return self._choose_overwritten_buffer(op.operands[0], result)
        if op.name in FUSIBLE and not self._is_materialized(result) and not _is_stored_for_backward(op):
            return tuple(sources)
        return (result,)

    def _find_loop_result_buffers(self, op: Op, result: Value) -> tuple[Value, ...]:
        operand, body = op.operands[result.index], op.blocks[-1]
        if body.return_values[result.index] is body.arguments[result.index]:
            return self.find_buffers(operand)
        taken = self._choose_overwritten_buffer(operand, result)
        # Several results of a loop may start from one operand, such as zeros. Only the first of them can reuse its
        # memory.
        is_first = all(each is not operand for each in op.operands[: result.index])
        return taken if is_first and not any(id(root) in self._kept for root in taken) else (result,)

    def _choose_overwritten_buffer(self, operand: Value, result: Value) -> tuple[Value, ...]:
        """Return the operand's buffer, which the result overwrites, or the result itself if the sizes differ."""
        roots = self.find_buffers(operand)
        return roots if len(roots) == 1 and roots[0].num_bytes == result.num_bytes else (result,)

    def _is_materialized(self, value: Value) -> bool:
        made = value.producer
        # Each kernel that reads a broadcast scalar repeats the broadcast itself, so its result needs no buffer.
        is_number = made is not None and made.name == "broadcast_in_dim" and made.operands[0].size == 1
        return any(
            (use.is_fused and not is_number) or use.name in MATERIALIZING or use.name in COLLECTIVE_NAMES
            for use in value.uses
        )

    def _compute_inner_peak_bytes(self, op: Op) -> int:
        found = 0
        for inner in op.blocks:
            if id(inner) not in self.inner_peaks:
                memory = BlockMemory(inner, describe_value=self._describe_value)
                backward_ids, gradient_ids = (
                    _find_backward_op_ids(inner.ops),
                    _find_gradient_op_ids(inner.ops),
                )
                found_inside = memory.compute_peaks(
                    _order_forward_first(inner.ops, backward_ids, gradient_ids)
                )
                self.inner_peaks[id(inner)] = found_inside.peak
                highest = max(found_inside.peaks, key=lambda key: found_inside.peaks[key], default=None)
                held = found_inside.held_bytes.get(highest, Counter()) if highest else Counter()
                self._held_inside[id(inner)] = held
                self.traffic += memory.traffic * op.trips
            found = max(found, self.inner_peaks[id(inner)])
        return found

    def _add_traffic_bytes(self, op: Op, sources: list[Value], new_values: list[Value]) -> None:
        if op.blocks or op.name == "return" or not new_values:
            return
        if op.name in ("gather", "dynamic_slice"):
            self.traffic += 2 * sum(value.num_bytes for value in new_values)
        else:
            # XLA either stores the operands or recomputes them from their sources, whichever means fewer bytes to read.
            # So count the smaller total.
            operands = {id(value): value for value in op.operands}.values()
            read = min(sum(value.num_bytes for value in values) for values in (sources, operands))
            self.traffic += read + sum(value.num_bytes for value in new_values)


def _find_padded_operands(op: Op) -> Sequence[Value]:
    """Return the operands that XLA for GPUs copies with padding, because tensor cores multiply in multiples of 8."""
    if op.name != "dot_general" or op.operands[0].dtype not in ("bfloat16", "float16") or not op.flops:
        return ()
    left, right = op.operands
    length = op.flops // (2 * op.results[0].size)  # number of products that are summed for each element
    batch = left.size * right.size // (op.results[0].size * length**2)
    return [
        each for each in op.operands if any(n % _MULTIPLE for n in (length, each.size // (batch * length)))
    ]


def _is_stored_for_backward(op: Op) -> bool:
    uses = [use for result in op.results for use in result.uses]
    is_last = bool(op.function) and any(use.function != op.function for use in uses)
    is_forward = not op.is_backward and not op.is_update
    return (op.name in EXPENSIVE or is_last) and any(use.is_backward for use in uses) and is_forward


COLLECTIVE_NAMES = frozenset(("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "permute"))


def compute_memory_per_order(
    block: Block,
    argument_by_donated_result: Mapping[int, int],
    describe_value: Callable[[Value], object] | None = None,
) -> tuple[OrderMemory, OrderMemory, int]:
    """Return the memory of a step without its arguments with weight gradients last, and first, and its traffic."""
    kept_ids = frozenset(id(block.return_values[number]) for number in argument_by_donated_result)
    memory, ops = BlockMemory(block, kept_ids, describe_value), block.ops
    backward_ids, gradient_ids = _find_backward_op_ids(ops), _find_gradient_op_ids(ops)
    first = memory.compute_peaks(_order_forward_first(ops, backward_ids, gradient_ids))
    # If a step recomputes activations, as a barrier shows, all of them would be in memory at once with gradients last.
    # So XLA computes gradients first, and there is only one order.
    if any(map(is_remat_barrier, ops)):
        return first, first, memory.traffic
    last = memory.compute_peaks(_order_gradients_last(ops, backward_ids, gradient_ids))
    return last, first, memory.traffic
