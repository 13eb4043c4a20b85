"""Find the slices, permutes, all-to-alls, and all-gathers that change a layout and send no more than it requires."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, islice, product
from typing import Any

from layoutmap.core.blocks import Ends
from layoutmap.core.mesh_dims import list_prime_factors

Coordinates = tuple[int | None, ...]
"""Position of a block along each factor of an array's shape. `None` stands for the whole factor."""

_MAX_TRIED = 64
"""The largest number of sets of exchanged factors to try. Their number grows exponentially with the mesh dims."""


@dataclass(frozen=True, slots=True)
class SliceStep:
    """Describe a step in which each device keeps one element of some factors, without sending anything.

    Args:
        factors: The factors that are sliced.
        kept: For each device, the position that it keeps of each of these factors.
    """

    factors: tuple[int, ...]
    kept: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class PermuteStep:
    """Describe a step in which each device gets the block of one device, possibly its own.

    Args:
        pairs: Pairs of a sender and a receiver. Each device is sender and receiver at most once.
    """

    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ExchangeStep:
    """Describe an all-gather or an all-to-all of the devices of each group.

    Args:
        joined: The factors along which a device joins the parts that it gets, in the order of the group.
        split: The factors along which each device splits its block, one part for each device of its group. Empty: an
            all-gather, in which each device sends its whole block.
        groups: The groups of devices. All have one size, and each device is in one of them.
        parts: For each device, the part that it sends to each device of its group; empty: part i to device i.
    """

    joined: tuple[int, ...]
    split: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[int, ...], ...] = ()


CollectiveStep = SliceStep | PermuteStep | ExchangeStep


@dataclass(frozen=True, slots=True)
class CollectiveSteps:
    """Describe steps that lead from the stored block of each device to its wanted block.

    Each axis is factored, so that each block contains one element or all of a factor: an axis of 24 rows that is first
    sharded in 2 parts and then in 4 has the factors 2, 2, and 6.

    Args:
        shape: Shape to which a device reshapes its stored block: one axis for each factor of the array's axes.
        lengths: The lengths of all factors.
        steps: The steps.
    """

    shape: tuple[int, ...]
    lengths: tuple[int, ...]
    steps: tuple[CollectiveStep, ...]


# Collectives of groups are faster than permutes that send the same blocks, so prefer them (decisions/0240).
def find_collective_steps(
    stored: Sequence[Ends], wanted: Sequence[Ends], num_missing: int
) -> CollectiveSteps | None:
    """Return steps after which each device has its wanted block, or None if such steps send more than is missing.

    Args:
        stored: The block of each device.
        wanted: The block that each device needs.
        num_missing: The number of elements that all devices must receive.

    Example:
        >>> halves, whole = [((0, 2),), ((2, 4),)], [((0, 4),), ((0, 4),)]
        >>> find_collective_steps(halves, whole, 4).steps
        (ExchangeStep(joined=(0,), split=(), groups=((0, 1),), parts=()),)
    """
    axes = [
        _factor_axis([block[axis] for block in stored], [block[axis] for block in wanted])
        for axis in range(len(stored[0]))
    ]
    factored = [axis for axis in axes if axis is not None]
    if len(factored) < len(axes):
        return None
    lengths = tuple(length for each, _, _ in factored for length in each)
    have = [
        tuple(chain.from_iterable(places)) for places in zip(*(each for _, each, _ in factored), strict=True)
    ]
    want = [
        tuple(chain.from_iterable(places)) for places in zip(*(each for _, _, each in factored), strict=True)
    ]
    grown = [n for n in range(len(lengths)) if want[0][n] is None and have[0][n] is not None]
    shrunk = [n for n in range(len(lengths)) if have[0][n] is None and want[0][n] is not None]
    for joined, split in islice(_iterate_exchanged_factors(lengths, grown, shrunk), _MAX_TRIED):
        finder = _StepFinder(
            lengths=lengths,
            have=have,
            want=want,
            joined=joined,
            split=split,
            gathered=tuple(n for n in grown if n not in joined),
            sliced=tuple(n for n in shrunk if n not in split),
        )
        steps = finder.find_steps()
        if steps is not None and finder.count_received_elements(steps) == num_missing:
            shape = (1 if place is not None else n for n, place in zip(lengths, have[0], strict=True))
            return CollectiveSteps(tuple(shape), lengths, steps)
    return None


def _factor_axis(
    stored: Sequence[tuple[int, int]], wanted: Sequence[tuple[int, int]]
) -> tuple[list[int], list[Coordinates], list[Coordinates]] | None:
    """Return the lengths of an axis's factors, and the coordinates of each stored and each wanted block.

    Return None if blocks have unequal lengths, or if neither number of blocks divides the other.
    """
    size = max(stop for _, stop in stored)
    counts = list[int]()
    for spans in (stored, wanted):
        length = spans[0][1] - spans[0][0]
        if not length or size % length or any(b - a != length or a % length for a, b in spans):
            return None
        counts.append(size // length)
    few, many = sorted(counts)
    if many % few:
        return None
    factors = [*list_prime_factors(few), *list_prime_factors(many // few)]

    def compute_coordinates(start: int, count: int) -> Coordinates:
        """Return the coordinates of the block at `start` of `count` equal blocks."""
        found, number = list[int | None](), start * count // size
        for factor in factors:
            is_sharded, count = count > 1, max(1, count // factor)
            found.append(number // count if is_sharded else None)
            number %= count
        return (*found, None)

    return (
        [*factors, size // many],
        [compute_coordinates(start, counts[0]) for start, _ in stored],
        [compute_coordinates(start, counts[1]) for start, _ in wanted],
    )


def _iterate_exchanged_factors(
    lengths: Sequence[int], grown: Sequence[int], shrunk: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield factors that an all-to-all can join and split, so that it has as many parts of both: none, all, others."""
    for joined in _iterate_subsets(grown):
        size = math.prod(lengths[n] for n in joined)
        for split in _iterate_subsets(shrunk):
            if math.prod(lengths[n] for n in split) == size:
                yield joined, split


def _iterate_subsets(values: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the subsets of values: the empty one, and then the others, largest first."""
    yield ()
    for count in range(len(values), 0, -1):
        yield from combinations(values, count)


@dataclass(frozen=True, kw_only=True)
class _StepFinder:
    """Find a slice, a permute, an all-to-all, and an all-gather, without those that change nothing.

    Args:
        lengths: The lengths of the factors.
        have: The coordinates of each device's stored block.
        want: The coordinates of each device's wanted block.
        joined: The factors that the all-to-all joins.
        split: The factors that the all-to-all splits.
        gathered: The factors that the all-gather joins.
        sliced: The factors that the slice removes.
    """

    lengths: Sequence[int]
    have: Sequence[Coordinates]
    want: Sequence[Coordinates]
    joined: tuple[int, ...]
    split: tuple[int, ...]
    gathered: tuple[int, ...]
    sliced: tuple[int, ...]

    def find_steps(self) -> tuple[CollectiveStep, ...] | None:
        """Return the steps, or None if these factors allow none."""
        sharded = tuple(n for n in range(len(self.lengths)) if self.have[0][n] is not None)
        kept = tuple(n for n in sharded if self.want[0][n] is not None)
        exchanges, gathers = list[tuple[int, ...]](), list[tuple[int, ...]]()
        before_exchange = dict[int, Coordinates]()
        for devices in _group_by_coordinates(
            range(len(self.want)), self.want, (*kept, *self.sliced)
        ).values():
            rows = self._arrange_devices(devices, kept)
            if rows is None:
                return None
            by_part: dict[tuple[object, ...], list[int]] = {}
            for (copy, gathered), row in rows.items():
                exchanges.append(tuple(row.values()))
                for joined, device in row.items():
                    places = dict(zip((*self.gathered, *self.joined), (*gathered, *joined), strict=True))
                    before_exchange[device] = tuple(places.get(n, self.want[device][n]) for n in sharded)
                    by_part.setdefault((copy, _pick(self.want[device], self.split)), []).append(device)
            gathers += map(tuple, by_part.values())
        pairs = _find_sender_of_each_receiver([_pick(each, sharded) for each in self.have], before_exchange)
        if pairs is None:
            return None
        steps = list[CollectiveStep]()
        if self.sliced:
            receivers = dict(pairs)
            kept_parts = (_pick(self.want[receivers.get(d, d)], self.sliced) for d in range(len(self.want)))
            steps.append(SliceStep(self.sliced, tuple(kept_parts)))
        if any(sender != receiver for sender, receiver in pairs):
            steps.append(PermuteStep(tuple(pairs)))
        if self.split:
            steps.append(
                ExchangeStep(self.joined, self.split, tuple(exchanges), self._order_parts(exchanges))
            )
        if self.gathered:
            steps.append(ExchangeStep(self.gathered, (), tuple(gathers)))
        return tuple(steps)

    def count_received_elements(self, steps: Iterable[CollectiveStep]) -> int:
        """Return the number of elements that all devices receive in these steps."""
        size = math.prod(
            length
            for n, length in enumerate(self.lengths)
            if self.have[0][n] is None and n not in self.sliced
        )
        total = 0
        for step in steps:
            if isinstance(step, PermuteStep):
                total += size * sum(sender != receiver for sender, receiver in step.pairs)
            elif isinstance(step, ExchangeStep):
                num_parts = len(step.groups[0])
                part = size // num_parts if step.split else size
                total += len(self.have) * part * (num_parts - 1)
        return total

    def _arrange_devices(
        self, devices: Sequence[int], kept: Sequence[int]
    ) -> dict[tuple[int, tuple[int, ...]], dict[tuple[int, ...], int]] | None:
        """Arrange devices into groups for the all-to-all, or return None if that is impossible.

        The wanted blocks of the devices differ only in the split factors.

        Returns:
            A group of devices for each pair of a number and the coordinates of a block in the gathered factors. A group
            is a dict from the coordinates in the joined factors to a device. Its devices want different parts. As many
            devices as possible keep their stored block.
        """
        by_part = _group_by_coordinates(devices, self.want, self.split)
        every_gathered, every_joined = (
            list(product(*(range(self.lengths[n]) for n in factors)))
            for factors in (self.gathered, self.joined)
        )
        num_copies, rest = divmod(len(devices), len(every_gathered) * len(every_joined))
        if rest or len(by_part) < len(every_joined) or len({len(each) for each in by_part.values()}) > 1:
            return None
        rows: dict[tuple[int, tuple[int, ...]], dict[tuple[int, ...], int]] = {}
        for key in product(range(num_copies), every_gathered):
            row = rows[key] = dict[tuple[int, ...], int]()
            for candidates in by_part.values():
                for device in candidates:
                    have, joined = self.have[device], _pick(self.have[device], self.joined)
                    is_in_place = _pick(have, kept) == _pick(self.want[device], kept)
                    if is_in_place and _pick(have, self.gathered) == key[1] and joined not in row:
                        row[joined] = device
                        candidates.remove(device)
                        break
        for row in rows.values():
            present = {_pick(self.want[device], self.split) for device in row.values()}
            open_places = [joined for joined in every_joined if joined not in row]
            absent = [part for part in by_part if part not in present]
            row.update(
                (joined, by_part[part].pop(0)) for joined, part in zip(open_places, absent, strict=True)
            )
        return {key: {joined: row[joined] for joined in every_joined} for key, row in rows.items()}

    def _order_parts(self, groups: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """Return for each device the part that it sends to each device of its group, or () if that is part i to i."""
        every_part = list(product(*(range(self.lengths[n]) for n in self.split)))
        parts = dict[int, tuple[int, ...]]()
        for group in groups:
            order = tuple(every_part.index(_pick(self.want[device], self.split)) for device in group)
            parts.update(dict.fromkeys(group, order))
        is_in_order = all(order == tuple(range(len(every_part))) for order in parts.values())
        return () if is_in_order else tuple(parts[device] for device in sorted(parts))


def _find_sender_of_each_receiver(
    stored: Sequence[Coordinates], needed: Mapping[int, Coordinates]
) -> list[tuple[int, int]] | None:
    """Return pairs of a sender and a receiver that give each device the block that it needs.

    Return None if a device would have to send its block twice.
    """
    receivers = [device for device in sorted(needed) if stored[device] != needed[device]]
    senders: dict[Coordinates, list[int]] = {}
    for device in receivers:
        senders.setdefault(stored[device], []).append(device)
    pairs = [(device, device) for device in needed if stored[device] == needed[device]]
    for receiver in receivers:
        if not (found := senders.get(needed[receiver])):
            return None
        pairs.append((found.pop(0), receiver))
    return sorted(pairs)


def _group_by_coordinates(
    devices: Iterable[int], coordinates: Sequence[Coordinates], factors: Sequence[int]
) -> dict[Coordinates, list[int]]:
    """Return the devices by their coordinates in some factors, in the order of the coordinates."""
    groups: dict[Coordinates, list[int]] = {}
    for device in devices:
        groups.setdefault(_pick(coordinates[device], factors), []).append(device)
    return groups


def _pick(coordinates: Coordinates, factors: Iterable[int]) -> tuple[Any, ...]:
    return tuple(coordinates[n] for n in factors)
