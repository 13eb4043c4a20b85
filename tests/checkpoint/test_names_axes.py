"""Axes of one array found in those of another: every block, both ways, and no element more than it needs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layoutmap.checkpoint.axes import (
    ArrayAxes,
    check_same_axis_names,
    fill_block_from_source,
    parse_axes_expression,
    solve_axis_sizes,
)
from layoutmap.core.blocks import compute_block_shape, make_full_index

SIZES = {"a": 2, "b": 3, "c": 4}


@st.composite
def sides(draw: st.DrawFn) -> tuple[ArrayAxes, ArrayAxes]:
    """Three names in any order, grouped in any way, on each side."""

    def side() -> ArrayAxes:
        order = draw(st.permutations(list(SIZES)))
        ends = sorted(draw(st.sets(st.integers(1, 2))) | {3})
        return tuple(tuple(order[i:j]) for i, j in zip([0, *ends], ends, strict=False))

    return side(), side()


def moved(values: np.ndarray, here: ArrayAxes, there: ArrayAxes) -> np.ndarray:
    """What numpy makes of all of an array."""
    order = [atom for axis in there for atom in axis]
    inside = [atom for axis in here for atom in axis]
    plain = values.reshape([SIZES[n] for n in order]).transpose([order.index(n) for n in inside])
    return plain.reshape([int(np.prod([SIZES[n] for n in axis])) for axis in here])


@given(data=st.data(), both=sides())
def test_any_block_is_found_and_nothing_else_is_read(
    data: st.DataObject, both: tuple[ArrayAxes, ArrayAxes]
) -> None:
    """A block of one side is read from the other in blocks with just as many elements, and has numpy's values."""
    here, there = both
    other = np.arange(24).reshape([int(np.prod([SIZES[n] for n in axis])) for axis in there])
    expected = moved(other, here, there)
    ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in expected.shape]
    index = tuple(slice(start, stop) for start, stop in ends)
    result, read = np.full(compute_block_shape(index), -1), list[int]()

    def reading(block: tuple[slice, ...]) -> np.ndarray:
        read.append(other[block].size)
        return other[block]

    filled = fill_block_from_source(result, index, here, there, SIZES, reading)

    assert (expected[index].tolist(), result.size, result.size) == (result.tolist(), filled, sum(read))


@pytest.mark.parametrize(
    ("here", "there", "own"),
    [
        ("(0/2 b) a", "a b", np.s_[:3, :]),
        ("(1/2 b) a", "a b", np.s_[3:, :]),
        ("(b 1/2) a", "a b", np.s_[1::2, :]),
        ("2/3 a b", "(a b)", np.s_[2, :, :]),
    ],
)
def test_one_of_equal_parts_is_filled_and_the_others_are_not(here: str, there: str, own: object) -> None:
    """What is written `1/2` is the second half of its axis, or every second place: it alone is filled and read."""
    left, right = parse_axes_expression(f"{here} -> {there}")
    shape = {"(": (6, 2), "2": (3, 2, 3)}[here[0]]
    other = np.arange(6).reshape((2, 3) if there == "a b" else (6,))
    result = np.full(shape, -1)
    expected = result.copy()
    expected[own] = other.T if there == "a b" else other.reshape(2, 3)

    filled = fill_block_from_source(
        result, make_full_index(shape), left, right, SIZES, lambda block: other[block]
    )
    back = np.full(other.shape, -1)
    fill_block_from_source(
        back, make_full_index(other.shape), right, left, SIZES, lambda block: result[block]
    )

    assert (expected.tolist(), 6, other.tolist()) == (result.tolist(), filled, back.tolist())


def test_sizes_follow_from_shapes_or_are_said_not_to() -> None:
    """The sizes of names follow from the shapes of both sides; shapes that do not fit have none."""
    left, right = parse_axes_expression("(heads size) width -> width heads size")

    assert {"heads": 4, "size": 8, "width": 16} == solve_axis_sizes([(left, (32, 16)), (right, (16, 4, 8))])
    assert [None] * 3 == [
        solve_axis_sizes([(left, (32, 16)), (right, (16, 4, 9))]),
        solve_axis_sizes([(left, (32, 16))]),
        solve_axis_sizes([(left, (32,)), (right, (16, 4, 8))]),
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a b", "axes 'a b' lacks the arrow"),
        ("a (b -> a b", "a parenthesis is not closed"),
        ("a, b -> a b", "',' cannot be parsed"),
        ("2/2 a -> a", "there is no part '2/2'"),
        ("a a -> a", "'a' appears twice"),
        ("a b -> a c", "is on only one side of the arrow"),
    ],
)
def test_an_expression_that_cannot_be_read_says_why(text: str, why: str) -> None:
    """What is wrong with an expression is in the message."""
    with pytest.raises(ValueError, match=why.replace("(", r"\(")):
        check_same_axis_names(*parse_axes_expression(text))
