"""The descent: what it finds, without a model."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layoutmap.cost.search.descent import BudgetSpentError, find_minimum

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@st.composite
def spaces(draw):
    """Sizes of a small space, a score of each of its points, and a start."""
    sizes = draw(SIZES)
    points = list(itertools.product(*map(range, sizes)))
    scores = draw(st.lists(st.integers(0, 5), min_size=len(points), max_size=len(points)))
    return (
        sizes,
        {point: (score,) for point, score in zip(points, scores, strict=True)},
        draw(st.sampled_from(points)),
    )


@given(spaces())
def test_exhaustive_in_small_spaces(space):
    """Where all points may be asked for, the score is the smallest there is."""
    sizes, scores, start = space
    assert (
        min(scores.values())
        == scores[find_minimum(sizes, scores.__getitem__, [start], max_evaluations=len(scores))]
    )


@given(spaces(), st.integers(0, 3))
def test_no_single_change_improves(space, seed):
    """A descent that may ask often enough ends where no single change improves the score."""
    sizes, scores, start = space
    # A coordinate more, of which only the first choice is any good, so that the space has more points than it asks for.
    found = find_minimum(
        (*sizes, 1000),
        lambda p: (scores[p[:-1]][0] + 9 * p[-1],),
        [(*start, 0)],
        max_evaluations=1000 * len(scores) - 1,
        seed=seed,
    )
    changed = [(*found[:n], c, *found[n + 1 :]) for n, size in enumerate(sizes) for c in range(size)]
    assert [] == [point for point in changed if scores[point[:-1]] < scores[found[:-1]]]


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=5), st.integers(0, 3)
)
def test_separate_choices_are_found(costs, seed):
    """Where choices do not depend on each other, one pass from any start finds the best of each."""
    max_evaluations = sum(map(len, costs)) * 2 + 1
    found = find_minimum(
        tuple(map(len, costs)),
        lambda p: (sum(c[n] for c, n in zip(costs, p, strict=True)),),
        [(0,) * len(costs)],
        max_evaluations=max_evaluations,
        seed=seed,
    )
    assert [min(cost) for cost in costs] == [cost[n] for cost, n in zip(costs, found, strict=True)]


@given(spaces(), st.integers(1, 20), st.integers(0, 3))
def test_is_deterministic_and_asks_no_more_than_it_may(space, max_evaluations, seed):
    """The same seed gives the same point, no worse than the start, and no point is asked for twice."""
    sizes, scores, start = space

    def run():
        asked = []
        found = find_minimum(
            sizes,
            lambda p: asked.append(p) or scores[p],
            [start],
            max_evaluations=max_evaluations,
            seed=seed,
            restarts=2,
        )
        return found, asked

    found, asked = run()
    assert (found, asked) == run()
    assert (len(set(asked)), True, True) == (
        len(asked),
        len(asked) <= max_evaluations,
        scores[found] <= scores[start],
    )


def test_nothing_may_be_asked():
    """Where no point may be asked for, there is none to return."""
    with pytest.raises(BudgetSpentError):
        find_minimum((2,), lambda point: (0,), [(0,)], max_evaluations=0)
