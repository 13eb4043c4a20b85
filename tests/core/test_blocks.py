"""Blocks of an array: split it anyhow, assemble it again."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layoutmap.core.blocks import (
    Index,
    assemble_blocks,
    compute_block_shape,
    find_coverage_fault,
    intersect_blocks,
    make_full_index,
    normalize_index,
    stack_starts_and_stops,
)
from layoutmap.core.errors import LayoutMapError
from layoutmap.testing import strategies

array_shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> Index:
    """A block anywhere in an array, perhaps without elements."""
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return tuple(slice(*pair) for pair in ends)


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Index]:
    """All blocks of an array that is sharded in two, again and again, not always along the same axis: no grid."""
    blocks = [make_full_index(shape)]
    for _ in range(draw(st.integers(0, 6))):
        block = blocks.pop(draw(st.integers(0, len(blocks) - 1)))
        axes = [axis for axis, part in enumerate(block) if part.stop - part.start > 1]
        if not axes:
            blocks.append(block)
            continue
        axis = draw(st.sampled_from(axes))
        at = draw(st.integers(block[axis].start + 1, block[axis].stop - 1))
        blocks.append((*block[:axis], slice(block[axis].start, at), *block[axis + 1 :]))
        blocks.append((*block[:axis], slice(at, block[axis].stop), *block[axis + 1 :]))
    return draw(st.permutations(blocks))


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int)).reshape(shape)


@given(st.data(), array_shapes)
def test_blocks_assembled_are_the_array(data: st.DataObject, shape: tuple[int, ...]):
    """However an array is sharded, any part of it is assembled from its blocks, in any order."""
    array = numbered(shape)
    blocks = data.draw(cuts(shape))
    wanted = data.draw(st.none() | indices(shape))

    made = assemble_blocks(((block, array[block]) for block in blocks), shape, array.dtype, wanted)

    np.testing.assert_array_equal(array if wanted is None else array[wanted], made, strict=True)


@given(st.data(), array_shapes.filter(all))
def test_a_missing_or_a_doubled_block_is_an_error(data: st.DataObject, shape: tuple[int, ...]):
    """Blocks that do not cover each element exactly once are refused, even where their sizes add up."""
    array = numbered(shape)
    blocks = data.draw(cuts(shape))
    lost, doubled = (data.draw(st.sampled_from(range(len(blocks)))) for _ in range(2))
    wrong = [block for i, block in enumerate(blocks) if i != lost]
    if doubled != lost:
        wrong.append(blocks[doubled])

    with pytest.raises(LayoutMapError, match=r"gap|overlap"):
        assemble_blocks([(block, array[block]) for block in wrong], shape, array.dtype)


@given(st.data(), array_shapes)
def test_each_element_in_one_block(data: st.DataObject, shape: tuple[int, ...]):
    """Blocks cover an array if each element is in exactly one; else a part is named, and how many blocks have it."""
    blocks = data.draw(cuts(shape) | st.lists(indices(shape), max_size=6))
    for _ in range(data.draw(st.integers(0, 2))):
        blocks = damaged(data, blocks, shape)
    counts = np.zeros(shape, int)
    for block in blocks:
        counts[block] += 1
    found = find_coverage_fault(*stack_starts_and_stops(blocks, len(shape)), make_full_index(shape))

    if found is None:
        assert (counts == 1).all()
    else:
        cell, times = found
        assert counts[cell].size
        assert ({times}, True) == (set(counts[cell].flat), times != 1)


def damaged(data: st.DataObject, blocks: list[Index], shape: tuple[int, ...]) -> list[Index]:
    """Blocks of which one is lost, is there again, or is another one."""
    index = data.draw(indices(shape))
    if not blocks:
        return [index]
    at = data.draw(st.integers(0, len(blocks) - 1))
    return data.draw(
        st.sampled_from(
            (
                [*blocks[:at], *blocks[at + 1 :]],
                [*blocks, blocks[at]],
                [*blocks[:at], index, *blocks[at + 1 :]],
            )
        )
    )


def test_a_grid_that_nobody_could_count():
    """What blocks cover is found out in the memory of the blocks, though they cut each axis at other places."""
    corners = [tuple(slice(i, i + 1) for _ in range(12)) for i in range(1000)]
    found = find_coverage_fault(*stack_starts_and_stops(corners, 12), make_full_index((1000,) * 12))

    assert found is not None
    assert 0 == found[1]


def test_a_gap_and_an_overlap_of_one_size_do_not_make_up_for_each_other():
    """The message names the place that is covered by no block, or by two."""
    half = (slice(0, 2), slice(0, 3)), np.zeros((2, 3), int)

    with pytest.raises(LayoutMapError) as raised:
        assemble_blocks([half, half], (4, 3), int)

    assert """\
2 blocks overlap at [0:2, 0:3]
  shape  (4, 3)
  why    each element of an array is in exactly one block
  fix    pass each block of the array exactly once""" == str(raised.value)


def test_a_gap_is_named_by_its_place():
    """The message says which elements are missing."""
    with pytest.raises(LayoutMapError, match=re.escape("blocks leave a gap at [2:4, 0:3]")):
        assemble_blocks([((slice(0, 2), slice(0, 3)), np.zeros((2, 3), int))], (4, 3), int)


def test_a_block_of_another_shape_than_its_place_is_an_error():
    """Values are never broadcast into a place that they do not fill."""
    with pytest.raises(LayoutMapError) as raised:
        assemble_blocks([((slice(0, 4),), np.zeros(1))], (4,), float)

    assert """\
a block of shape (1,) does not fit its index [0:4]
  shape  (4,)
  why    the index has the shape (4,)
  fix    pass each block with its index in the global array""" == str(raised.value)


@given(strategies.layouts(), st.data())
def test_the_distinct_shards_of_a_layout_are_the_array(layout, data: st.DataObject):
    """The shards of all devices, each index once, assembled are the tensor."""
    shape = data.draw(strategies.shapes(layout, max_side=2).filter(lambda shape: np.prod(shape) <= 4096))
    array = numbered(shape)
    shards = {
        tuple((p.start, p.stop) for p in index): index
        for index in (layout.shard_slices(shape, i) for i in range(layout.mesh.size))
    }

    made = assemble_blocks([(index, array[index]) for index in shards.values()], shape, array.dtype)

    np.testing.assert_array_equal(array, made, strict=True)
    assert layout.num_distinct_shards == len(shards)


@given(st.data(), array_shapes)
def test_the_intersection_holds_what_is_in_both(data: st.DataObject, shape: tuple[int, ...]):
    """An element lies in the intersection just if it lies in both blocks; no shared element gives `None`."""
    a, b = data.draw(indices(shape)), data.draw(indices(shape))
    in_a, in_b = np.zeros(shape, bool), np.zeros(shape, bool)
    in_a[a], in_b[b] = True, True
    in_both = np.zeros(shape, bool)

    both = intersect_blocks(a, b)
    if both is not None:
        in_both[both] = True

    np.testing.assert_array_equal(in_a & in_b, in_both)
    assert (both is None) == (not in_both.any())


@given(st.data(), array_shapes)
def test_with_ends_picks_the_same_elements(data: st.DataObject, shape: tuple[int, ...]):
    """Any slices without a step, written with both ends, mean what numpy means by them."""
    ends = st.none() | st.integers(-8, 8)
    index = tuple(slice(data.draw(ends), data.draw(ends)) for _ in shape)
    array = numbered(shape)

    complete = normalize_index(index, shape)

    np.testing.assert_array_equal(array[index], array[complete], strict=True)
    assert array[index].shape == compute_block_shape(complete)


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ((slice(0, 4, 2), slice(0, 3)), "a block is contiguous along each axis, so its slices have no step"),
        ((slice(0, 4),), "an array of 2 axes needs 2 slices, not 1"),
    ],
)
def test_an_index_of_no_block_is_an_error(index: Index, why: str):
    """A step would be lost, and a missing axis guessed: both are refused."""
    with pytest.raises(LayoutMapError) as raised:
        normalize_index(index, (4, 3))

    assert why == raised.value.why
