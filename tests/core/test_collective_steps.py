"""Slices, permutes, all-to-alls, and all-gathers lead from one layout to another, and send no more than it requires."""

from itertools import product

import numpy as np
import pytest

from layoutmap.core.blocks import get_starts_and_stops
from layoutmap.core.collective_steps import ExchangeStep, PermuteStep, SliceStep, find_collective_steps
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.pieces import find_block_transfers
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import draw_sharding_specs

MESHES = {
    8: ["x=8", "x=2,y=4", "x=4,y=2", "x=2,y=2,z=2"],
    6: ["x=6", "x=2,y=3", "x=3,y=2"],
    1: ["x=1", "x=1,y=1"],
}
SHAPE = (48, 24, 72)


def take_slice_step(shards, step):
    for n, factor in enumerate(step.factors):
        shards = [np.take(shard, [kept[n]], factor) for shard, kept in zip(shards, step.kept, strict=True)]
    return shards


def take_permute_step(shards, step):
    assert all(len({*each}) == len(each) for each in zip(*step.pairs, strict=True))
    new = dict.fromkeys(range(len(shards)))
    new.update((receiver, shards[sender]) for sender, receiver in step.pairs)
    return [*new.values()]


def take_exchange_step(shards, step, lengths):
    """Each device splits its shard, sends a part to each device of its group, and joins what it gets."""
    assert sorted(device for group in step.groups for device in group) == [*range(len(shards))]
    new = list(shards)
    for group in step.groups:
        for position, device in enumerate(group):
            parts = [shards[other] for other in group]
            if step.split:
                parts = [
                    split_shard(part, step.split)[step.parts[other][position] if step.parts else position]
                    for part, other in zip(parts, group, strict=True)
                ]
            new[device] = join_parts(parts, step.joined, lengths)
    return new


def split_shard(shard, factors):
    """All parts of a shard that contain one element of each of these factors."""
    found = []
    for places in product(*(range(shard.shape[factor]) for factor in factors)):
        part = shard
        for place, factor in zip(places, factors, strict=True):
            part = np.take(part, [place], factor)
        found.append(part)
    return found


def join_parts(parts, factors, lengths):
    """The shard that has these parts, in the order of `split_shard`."""
    if not factors:
        return parts[0]
    size = len(parts) // lengths[factors[0]]
    joined = [join_parts(parts[n : n + size], factors[1:], lengths) for n in range(0, len(parts), size)]
    return np.concatenate(joined, factors[0])


def take_steps(shards, found, shape):
    """The shards after these steps, and the number of elements that devices got from others."""
    received = 0
    shards = [shard.reshape(found.shape) for shard in shards]
    for step in found.steps:
        if isinstance(step, SliceStep):
            shards = take_slice_step(shards, step)
        elif isinstance(step, PermuteStep):
            received += sum(shards[sender].size for sender, receiver in step.pairs if sender != receiver)
            shards = take_permute_step(shards, step)
        else:
            size = len(step.groups[0])
            received += sum(each.size // (size if step.split else 1) * (size - 1) for each in shards)
            shards = take_exchange_step(shards, step, found.lengths)
    return [shard.reshape(shape) for shard in shards], received


@pytest.mark.parametrize("num_devices", [8, 6, 1])
def test_drawn_layouts_are_reached_by_sending_what_is_missing(num_devices):
    values = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    kinds, num_found = set(), 0
    for seed in range(200):
        choices = Choices.from_seed(seed)
        stored, wanted = (
            [layout.shard_slices(SHAPE, device) for device in range(num_devices)]
            for mesh in (Mesh(None, text) for text in choices.sample(MESHES[num_devices], 2))
            for layout in [Layout(draw_sharding_specs(choices, mesh, SHAPE, "error"), mesh)]
        )
        pieces = find_block_transfers(dict(enumerate(stored)), {n: [index] for n, index in enumerate(wanted)})
        missing = sum(piece.num_elements for piece in pieces if piece.sender != piece.receiver)
        ends = [[*map(get_starts_and_stops, blocks)] for blocks in (stored, wanted)]
        found = find_collective_steps(*ends, missing)
        if found is None:
            continue
        num_found += 1
        shards, received = take_steps([values[index] for index in stored], found, values[wanted[0]].shape)

        assert missing == received, seed
        for shard, index in zip(shards, wanted, strict=True):
            np.testing.assert_array_equal(values[index], shard, str(seed))
        kinds |= {(type(step), bool(getattr(step, "split", ()))) for step in found.steps}
    if num_devices == 1:
        assert (set(), 200) == (kinds, num_found)
    else:
        assert kinds == {
            (SliceStep, False),
            (PermuteStep, False),
            (ExchangeStep, False),
            (ExchangeStep, True),
        }
        assert num_found > 100  # of the others, some need blocks of several shapes


def test_swapped_blocks_are_one_permute():
    stored, wanted = [((0, 2),), ((2, 4),)], [((2, 4),), ((0, 2),)]
    assert find_collective_steps(stored, wanted, 4).steps == (PermuteStep(((0, 1), (1, 0))),)


@pytest.mark.parametrize(
    ("stored", "wanted", "num_missing"),
    [
        ([((0, 4),), ((0, 4),), ((4, 8),), ((4, 8),)], [((0, 3),), ((3, 6),), ((6, 9),), ((5, 8),)], 3),
        ([((0, 6),), ((0, 6),), ((6, 12),)], [((0, 4),), ((4, 8),), ((8, 12),)], 2),  # halves to thirds
    ],
)
def test_other_pairs_have_no_such_steps(stored, wanted, num_missing):
    assert find_collective_steps(stored, wanted, num_missing) is None
