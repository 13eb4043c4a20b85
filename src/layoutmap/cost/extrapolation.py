"""Compute the counts of a step with many equal blocks from runs with two and with three of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from layoutmap.core.layout import Layout
from layoutmap.core.paths import replace_numbers_with_stars
from layoutmap.core.policy import LayoutPolicy
from layoutmap.core.steps import Key, TrainingStep
from layoutmap.cost.equal_blocks import BlockDiffersFromFirstError
from layoutmap.cost.table import Collective

R = TypeVar("R")
_KEPT = 2  # number of equal blocks that are always run: the first and the last one


@dataclass(frozen=True)
class StepCounts:
    """Collectives, FLOPs, and bytes of one step on one device."""

    # number of calls by collective; in these keys, the field `calls` is always 1
    collectives: Mapping[Collective, int] = field(default_factory=dict[Collective, int])
    # all-reduces of single gradients, which the step combines into fewer calls, as in `collectives`
    gradients: Mapping[Collective, int] = field(default_factory=dict[Collective, int])
    flops: Mapping[str, int] = field(default_factory=dict[str, int])  # FLOPs by element type
    traffic: int = 0
    # peak bytes without the arguments, by order, layer, and phase; order 0 computes weight gradients last, and 1 first
    peaks: Mapping[Any, int] = field(default_factory=dict[Any, int])
    # bytes of tensors at each peak; a key joins the peak's key and a description of tensors; empty unless requested
    held: Mapping[Any, int] = field(default_factory=dict[Any, int])
    resident: int = 0  # bytes that the step allocates and keeps for later steps
    compiled_bytes: int = 0  # peak of the step that XLA has compiled, without the arguments; 0: unknown
    recomputes: bool = False  # whether activations are recomputed outside of loops

    def __sub__(self, other: StepCounts) -> StepCounts:
        return self.sum_with_scaled_counts(other, -1)

    def sum_with_scaled_counts(self, other: StepCounts, times: int) -> StepCounts:
        """Return these counts plus `times` times the counts of `other`."""
        return StepCounts(
            _sum_with_scaled_values(self.collectives, other.collectives, times),
            _sum_with_scaled_values(self.gradients, other.gradients, times),
            _sum_with_scaled_values(self.flops, other.flops, times),
            self.traffic + other.traffic * times,
            _sum_with_scaled_values(self.peaks, other.peaks, times),
            _sum_with_scaled_values(self.held, other.held, times),
            self.resident + other.resident * times,
            self.compiled_bytes + other.compiled_bytes * times,
            self.recomputes,
        )


def _sum_with_scaled_values(
    first: Mapping[Any, int], second: Mapping[Any, int], times: int
) -> dict[Any, int]:
    # The longer mapping is that of a run with more blocks, so it has all keys in the order of the step.
    ordered = sorted((first, second), key=len, reverse=True)
    return {key: first.get(key, 0) + second.get(key, 0) * times for key in {**ordered[0], **ordered[1]}}


class BlockExtrapolation:
    """Extrapolate the counts of a step from runs in which most of its equal blocks are skipped.

    Of each stack of equal blocks, two and three are run, and the third one's counts are added for each further block.
    If layouts differ within a stack, all of its blocks are run.

    Args:
        step: The step.
    """

    def __init__(self, step: TrainingStep):
        self._step = step
        self._unequal_stacks: set[int] = set()  # indices of stacks whose blocks turned out to be unequal

    def compute_counts(
        self,
        layouts: Mapping[Key, Layout],
        policy: LayoutPolicy,
        run: Callable[[Mapping[str, str]], R],
        list_layer_paths: Callable[[], Collection[str]],
        count: Callable[[Sequence[R]], Sequence[StepCounts]],
    ) -> StepCounts:
        """Return the counts of a step in these layouts.

        Args:
            layouts: The layout of each variable.
            policy: The layouts of outputs.
            run: Traces or runs the step without some blocks. Its argument is a dict from the path of each skipped block
                to the path of the first block of its stack.
            list_layer_paths: Returns the paths of the layers that ran.
            count: Returns the counts of each run.
        """
        while True:
            equal = self._find_equal_stack_indices(layouts, policy, list_layer_paths())
            sizes = sorted({len(self._step.blocks[number]) for number in equal})
            kept = [dict.fromkeys(equal, _KEPT)]
            kept += [{n: _KEPT + (len(self._step.blocks[n]) == size) for n in equal} for size in sizes]
            try:
                runs = [run(self._map_skipped_blocks_to_first(each)) for each in kept]
            except BlockDiffersFromFirstError as error:
                self._unequal_stacks.add(next(n for n, s in enumerate(self._step.blocks) if error.path in s))
                continue
            # Only a run finds the layers inside blocks. If rules for these layers make blocks unequal, run again.
            if self._find_equal_stack_indices(layouts, policy, list_layer_paths()) == equal:
                break
        low, *high = count(runs)
        total = low
        for size, more in zip(sizes, high, strict=True):
            total = total.sum_with_scaled_counts(more - low, size - _KEPT)
        return replace(total, peaks={key: total.peaks[key] for key in low.peaks})

    def _map_skipped_blocks_to_first(self, num_kept_by_stack: Mapping[int, int]) -> dict[str, str]:
        """Map each skipped block to the first block of its stack. `num_kept_by_stack` counts the other blocks."""
        blocks = self._step.blocks
        return {
            path: blocks[n][0]
            for n, number in num_kept_by_stack.items()
            for path in blocks[n][number - 1 : -1]
        }

    def _find_equal_stack_indices(
        self, layouts: Mapping[Key, Layout], policy: LayoutPolicy, layer_paths: Collection[str]
    ) -> list[int]:
        """Return the indices of the stacks where all blocks have equal layouts, and therefore equal costs."""
        contents: dict[str, list[object]] = {path: [] for stack in self._step.blocks for path in stack}
        for variable in self._step.variables:
            path = variable.parent or variable.path
            if (block := find_block_path(path, contents)) is not None:
                contents[block].append(
                    (path[len(block) :], variable.kind, layouts[variable.key].sharding_specs)
                )
        return [
            index
            for index, stack in enumerate(self._step.blocks)
            if index not in self._unequal_stacks
            and all(contents[path] == contents[stack[0]] for path in stack)
            and _has_equal_output_layouts(stack, policy, layer_paths)
        ]


def _has_equal_output_layouts(
    stack: Sequence[str], policy: LayoutPolicy, layer_paths: Collection[str]
) -> bool:
    """Return whether the rules give the outputs of all blocks of a stack, and of layers inside them, equal layouts."""
    if policy.activations is None:
        return True
    first, find_layout = stack[0], policy.find_activation_layout
    inner = [p[len(first) :] for p in {first, *layer_paths} if f"{p}.".startswith(f"{first}.")]
    return all(find_layout(f"{first}{p}") == find_layout(f"{path}{p}") for path in stack for p in inner)


def find_block_path(path: str, blocks: Mapping[str, object]) -> str | None:
    """Return the path of the innermost of `blocks` that contains the variable at `path`, or None if none does."""
    parts = path.split(".")
    return next((p for n in range(len(parts), 0, -1) if (p := ".".join(parts[:n])) in blocks), None)


def cancel_negative_counts(num_calls: Mapping[Collective, int]) -> Iterator[tuple[Collective, int]]:
    """Yield collectives with numbers of calls, after subtracting negative numbers from equal ones of another cause.

    The extrapolated number of calls is negative if a collective has another cause in three blocks than in two. Then the
    number for the other cause is too high by as many calls.
    """
    same: dict[Any, list[tuple[Collective, int]]] = {}
    for each, number in num_calls.items():
        same.setdefault((each.kind, each.dims, each.group, each.tensor_bytes), []).append((each, number))
    for group in same.values():
        short = -sum(number for _, number in group if number < 0)
        for each, number in sorted(group, key=lambda pair: pair[1]):
            taken = min(max(number, 0), short)
            short -= taken
            if number > taken:
                yield each, number - taken


def merge_collectives_of_repeated_layers(collectives: Sequence[Collective]) -> list[Collective]:
    """Merge equal collectives of repeated layers, with `*` for the layer's number. Return all collectives."""
    groups: dict[Any, list[Collective]] = {}
    for each in collectives:
        cause = replace_numbers_with_stars(each.cause)
        key = each.kind, each.dims, each.tensor_bytes, cause, each.phase, each.group
        groups.setdefault(key, []).append(each)
    return [
        same[0]
        if len(same) == 1
        else replace(
            same[0], calls=sum(each.calls for each in same), cause=replace_numbers_with_stars(same[0].cause)
        )
        for same in groups.values()
    ]
