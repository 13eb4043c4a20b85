"""Find the slices, all-gathers, and all-to-alls that change a layout without sending more than it requires."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from layoutmap.core.blocks import Ends

Groups = tuple[tuple[int, ...], ...]
"""Groups of devices, each in the order of its parts. All groups have one size, and each device is in one of them."""


@dataclass(frozen=True, slots=True)
class SliceStep:
    """Describe a step in which each device keeps a part of its block, without sending anything.

    Args:
        axis: The axis that is sliced.
        starts: The start of the part that each device keeps, in its block.
        size: The length of the part.
    """

    axis: int
    starts: tuple[int, ...]
    size: int


@dataclass(frozen=True, slots=True)
class ExchangeStep:
    """Describe an all-gather or an all-to-all of the devices of each group.

    Args:
        joined_axis: The axis along which a device joins the parts that it gets.
        split_axis: The axis along which each device splits its block, one part for each device of its group. `None`:
            an all-gather, in which each device sends its whole block.
        groups: The groups of devices.
    """

    joined_axis: int
    split_axis: int | None
    groups: Groups


CollectiveStep = SliceStep | ExchangeStep


# Collectives of groups are faster than permutes that send the same blocks, so prefer them (decisions/0240).
def find_collective_steps(
    stored: Sequence[Ends], wanted: Sequence[Ends], num_missing: int
) -> tuple[CollectiveStep, ...] | None:
    """Return steps after which each device has its wanted block, or None if such steps send more than is missing.

    Args:
        stored: The block of each device.
        wanted: The block that each device needs. All blocks have one shape, as those of `stored` do.
        num_missing: The number of elements that all devices must receive.

    Example:
        >>> halves, whole = [((0, 2),), ((2, 4),)], [((0, 4),), ((0, 4),)]
        >>> find_collective_steps(halves, whole, 4)
        (ExchangeStep(joined_axis=0, split_axis=None, groups=((0, 1),)),)
    """
    grown_axes, shrunk_axes = list[int](), list[int]()
    for axis in range(len(stored[0])):
        spans = [(have[axis], want[axis]) for have, want in zip(stored, wanted, strict=True)]
        if all(_is_range_inside(want, have) for have, want in spans):
            shrunk_axes += [axis] * any(have != want for have, want in spans)
        elif all(_is_range_inside(have, want) for have, want in spans):
            grown_axes.append(axis)
        else:
            return None
    exchanged: list[tuple[int, int] | None] = [None, *product(grown_axes, shrunk_axes)]
    for pair in exchanged:
        steps, num_received = list[CollectiveStep](), 0
        for step, received in _iterate_collective_steps([*stored], wanted, grown_axes, shrunk_axes, pair):
            if step is None:
                break
            steps.append(step)
            num_received += received
        else:
            if num_received == num_missing:
                return tuple(steps)
    return None


def _iterate_collective_steps(
    blocks: list[Ends],
    wanted: Sequence[Ends],
    grown_axes: Sequence[int],
    shrunk_axes: Sequence[int],
    exchanged_axes: tuple[int, int] | None,
) -> Iterator[tuple[CollectiveStep | None, int]]:
    """Yield pairs of a step and the number of received elements. If a step is impossible, yield `(None, 0)` and stop.

    Slices come first, because later steps then send less. `exchanged_axes` are the axes of an all-to-all.
    """

    def replace_ranges_by_wanted(axes: Sequence[int]) -> list[Ends]:
        return [
            tuple(want[axis] if axis in axes else span for axis, span in enumerate(have))
            for have, want in zip(blocks, wanted, strict=True)
        ]

    for axis in shrunk_axes:
        if exchanged_axes is None or axis != exchanged_axes[1]:
            starts = tuple(want[axis][0] - have[axis][0] for have, want in zip(blocks, wanted, strict=True))
            blocks = replace_ranges_by_wanted([axis])
            yield SliceStep(axis, starts, _compute_range_length(blocks[0][axis])), 0
    if exchanged_axes is not None:
        axis, split_axis = exchanged_axes
        groups = _group_devices_by_result(replace_ranges_by_wanted([axis]), blocks, axis)
        if groups is None or not _are_split_in_order(blocks, wanted, split_axis, groups):
            yield None, 0
            return
        num_elements, size = _count_elements(blocks), len(groups[0])
        blocks = replace_ranges_by_wanted([axis, split_axis])
        yield ExchangeStep(axis, split_axis, groups), num_elements * (size - 1) // size
    for axis in grown_axes:
        if exchanged_axes is None or axis != exchanged_axes[0]:
            groups = _group_devices_by_result(replace_ranges_by_wanted([axis]), blocks, axis)
            if groups is None:
                yield None, 0
                return
            num_elements, size = _count_elements(blocks), len(groups[0])
            blocks = replace_ranges_by_wanted([axis])
            yield ExchangeStep(axis, None, groups), num_elements * (size - 1)


def _group_devices_by_result(results: Sequence[Ends], blocks: Sequence[Ends], axis: int) -> Groups | None:
    """Return groups in which each device's result is the group's joined blocks, or None if there are no such groups."""
    by_result: dict[Ends, dict[tuple[int, int], list[int]]] = {}
    for device, (result, block) in enumerate(zip(results, blocks, strict=True)):
        by_result.setdefault(result, {}).setdefault(block[axis], []).append(device)
    groups: list[tuple[int, ...]] = []
    for result, by_span in by_result.items():
        spans = sorted(by_span)
        if (spans[0][0], spans[-1][1]) != result[axis] or any(a[1] != b[0] for a, b in pairwise(spans)):
            return None
        if len({len(by_span[span]) for span in spans}) > 1:
            return None
        groups += zip(*(by_span[span] for span in spans), strict=True)
    return tuple(groups) if len({*map(len, groups)}) == 1 else None


def _are_split_in_order(blocks: Sequence[Ends], wanted: Sequence[Ends], axis: int, groups: Groups) -> bool:
    """Return whether device i of each group wants the i-th of the equal parts of its block along an axis."""
    for group in groups:
        for position, device in enumerate(group):
            start, size = blocks[device][axis][0], _compute_range_length(wanted[device][axis])
            is_whole = size * len(group) == _compute_range_length(blocks[device][axis])
            if not is_whole or wanted[device][axis][0] != start + position * size:
                return False
    return True


def _is_range_inside(span: tuple[int, int], outer: tuple[int, int]) -> bool:
    return outer[0] <= span[0] and span[1] <= outer[1]


def _compute_range_length(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _count_elements(blocks: Sequence[Ends]) -> int:
    """Return the number of elements of all blocks."""
    return len(blocks) * math.prod(map(_compute_range_length, blocks[0]))
