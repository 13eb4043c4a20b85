"""Which of the maps that were found fits as XLA compiles it: laws that need no compiler."""

import pytest

from layoutmap.core.errors import PlanError
from layoutmap.core.mesh import Mesh
from layoutmap.cost.table import StepCost
from layoutmap.cost.verified import TooLargeError, Verified
from layoutmap.rules.rule_set import RuleSet
from layoutmap.searching.finalists import first_that_fits
from layoutmap.searching.loop import Figures, Outcome, Tried
from layoutmap.searching.shown import rows, verdict

GIB = 2**30
LIMIT = 16 * GIB


def outcome(*counted):
    """Maps on meshes of as many devices, the fastest first; each is an expert's."""
    tried = [
        Tried(f"map {n}", RuleSet(f"data={n}"), Figures(n, size * GIB), LIMIT)
        for n, size in enumerate(counted, 1)
    ]
    return Outcome(tried[0], tuple(tried), len(tried), True, tuple(tried[1:]))


def compiler(*found):
    """What makes figures of XLA's of a map, by its place; an exception is raised."""

    def verify(tried):
        size = found[tried.layout_map.mesh.size - 1]
        if not isinstance(size, int):
            raise size
        return Verified(StepCost(Mesh(None, "data=1"), (), {}, 0, 0, 0), "cpu", {}, 0, size * GIB)

    return verify


def test_the_next_best_map_is_taken_where_xla_needs_more():
    """Those before it lack what XLA says in the table, and it is held against those that fit."""
    found, made = first_that_fits(
        outcome(10, 11, 12), compiler(18, TooLargeError("too large", peak_bytes=20 * GIB), 14), LIMIT
    )
    assert (14 * GIB, "map 3") == (made.peak_bytes, found.best.name)
    said = ["lacks 2.0 GiB as XLA compiles it", "lacks 4.0 GiB as XLA compiles it", "the result"]
    assert said == [row[-1] for row in rows(found)]
    assert "No searched map beat the built-in ones" in verdict(found)


def test_an_interrupt_leaves_the_best_that_is_not_refused():
    """It is marked as interrupted, and XLA has said nothing of it."""
    found, made = first_that_fits(outcome(10, 11), compiler(18, KeyboardInterrupt()), LIMIT)
    assert ("map 2", False, None) == (found.best.name, found.is_complete, made)


def test_none_fits():
    """The error says what XLA needs for each."""
    with pytest.raises(PlanError, match=r"(?s)data=1: 18.0 GiB.*data=2: 17.0 GiB"):
        first_that_fits(outcome(10, 11), compiler(18, 17), LIMIT)
