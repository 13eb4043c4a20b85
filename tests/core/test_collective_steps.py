"""Slices, all-gathers, and all-to-alls lead from one layout to another, and send no more than it requires."""

import numpy as np
import pytest

from layoutmap.core.blocks import get_starts_and_stops
from layoutmap.core.collective_steps import SliceStep, find_collective_steps
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.pieces import find_block_transfers
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import draw_sharding_specs

MESHES = ["x=8", "x=2,y=4", "x=4,y=2", "x=2,y=2,z=2"]
SHAPE = (16, 8, 24)


def take_steps(shards, steps):
    """The shards after these steps, and the number of elements that devices got from others."""
    received = 0
    for step in steps:
        if isinstance(step, SliceStep):
            axis, stops = step.axis, np.add(step.starts, step.size)
            shards = [
                np.take(shard, range(start, stop), axis)
                for shard, start, stop in zip(shards, step.starts, stops, strict=True)
            ]
            continue
        new = list(shards)
        for group in step.groups:
            for position, device in enumerate(group):
                parts = [shards[other] for other in group]
                if step.split_axis is not None:
                    parts = [np.split(part, len(group), step.split_axis)[position] for part in parts]
                received += sum(part.size for n, part in enumerate(parts) if n != position)
                new[device] = np.concatenate(parts, step.joined_axis)
        shards = new
    return shards, received


def test_drawn_layouts_are_reached_by_sending_what_is_missing():
    values = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    kinds = set()
    for seed in range(400):
        choices = Choices.from_seed(seed)
        stored, wanted = (
            [layout.shard_slices(SHAPE, device) for device in range(8)]
            for mesh in (Mesh(None, text) for text in choices.sample(MESHES, 2))
            for layout in [Layout(draw_sharding_specs(choices, mesh, SHAPE, "error"), mesh)]
        )
        pieces = find_block_transfers(dict(enumerate(stored)), {n: [index] for n, index in enumerate(wanted)})
        missing = sum(piece.num_elements for piece in pieces if piece.sender != piece.receiver)
        ends = [[*map(get_starts_and_stops, blocks)] for blocks in (stored, wanted)]
        steps = find_collective_steps(*ends, missing)
        if steps is None:
            kinds.add("pieces")
            continue
        shards, received = take_steps([values[index] for index in stored], steps)

        assert missing == received, seed
        for shard, index in zip(shards, wanted, strict=True):
            np.testing.assert_array_equal(values[index], shard, str(seed))
        kinds |= {"slice" if isinstance(step, SliceStep) else step.split_axis is None for step in steps}
    assert {"pieces", "slice", True, False} == kinds  # True: an all-gather, False: an all-to-all


@pytest.mark.parametrize(
    ("stored", "wanted", "num_missing"),
    [
        ([((0, 2),), ((2, 4),)], [((2, 4),), ((0, 2),)], 4),  # devices swap their blocks
        ([((0, 4),), ((0, 4),), ((4, 8),), ((4, 8),)], [((0, 3),), ((3, 6),), ((6, 9),), ((5, 8),)], 3),
    ],
)
def test_other_pairs_have_no_such_steps(stored, wanted, num_missing):
    assert find_collective_steps(stored, wanted, num_missing) is None
