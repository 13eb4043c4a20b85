"""Which of the maps that were found fits as XLA compiles it: laws that need no compiler."""

import pytest

from layoutmap.core.errors import EngineError, LayoutMapWarning, PlanError
from layoutmap.core.mesh import Mesh
from layoutmap.cost.search.finalists import (
    choose_best_compiled_map,
    choose_first_map_that_fits,
    search_around_best_compiled_map,
)
from layoutmap.cost.search.loop import Candidate, MapCost, SearchOutcome
from layoutmap.cost.search.result_table import compare_with_best_built_in_map, make_result_rows
from layoutmap.cost.table import StepCost
from layoutmap.cost.verified import StepTooLargeError, Verified
from layoutmap.rules.rule_set import RuleSet

GIB = 2**30
LIMIT = 16 * GIB


def outcome(*counted):
    """Maps on meshes of as many devices, the fastest first; each is an expert's."""
    tried = [
        Candidate(f"map {n}", RuleSet(f"data={n}"), MapCost(n, size * GIB), LIMIT)
        for n, size in enumerate(counted, 1)
    ]
    return SearchOutcome(
        tried[0], tuple(tried), frozenset(each.name for each in tried), True, tuple(tried[1:])
    )


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
    found, made = choose_first_map_that_fits(
        outcome(10, 11, 12), compiler(18, StepTooLargeError("too large", peak_bytes=20 * GIB), 14), LIMIT
    )
    assert (14 * GIB, "map 3") == (made.peak_bytes, found.best.name)
    said = ["lacks 2.0 GiB as XLA compiles it", "lacks 4.0 GiB as XLA compiles it", "the result"]
    assert said == [row[-1] for row in make_result_rows(found)]
    assert "No searched map beat the built-in ones" in compare_with_best_built_in_map(found)


def test_an_interrupt_leaves_the_best_that_is_not_refused():
    """It is marked as interrupted, and XLA has said nothing of it."""
    found, made = choose_first_map_that_fits(outcome(10, 11), compiler(18, KeyboardInterrupt()), LIMIT)
    assert ("map 2", False, None) == (found.best.name, found.is_complete, made)


def compiled(*found):
    """Figures of XLA's of a map, by its place: seconds and GiB; an exception is raised."""

    def figures(tried):
        made = found[tried.layout_map.mesh.size - 1]
        if isinstance(made, BaseException):
            raise made
        return MapCost(made[0], made[1] * GIB)

    return figures


def test_the_best_map_is_that_which_xla_compiles_best():
    """Not that which is counted as best; a table's rows say which of its figures are XLA's."""
    found = choose_best_compiled_map(outcome(10, 11, 12), compiled((3.0, 10), (2.5, 10), (4.0, 10)))
    assert ("map 2", 2.5) == (found.best.name, found.best.cost.seconds)
    assert ["map 2", "map 1", "map 3"] == [each.name for each in found.built_in_maps]
    said = "as XLA compiles it"
    assert [f"the result {said}", said, said] == [row[-1] for row in make_result_rows(found)]
    assert "map 2 on data=2" in compare_with_best_built_in_map(found)


def test_a_map_that_does_not_fit_as_compiled_is_not_the_best():
    """Though it is faster; one that was counted as too large may be the best."""
    found = choose_best_compiled_map(outcome(10, 15, 12), compiled((1.0, 17), (1.2, 15), (4.0, 10)))
    assert "map 2" == found.best.name


def test_maps_that_are_counted_as_slower_are_not_compiled_where_counts_are_right():
    """The first is compiled as it is counted, and the others take twice as long."""
    found = choose_best_compiled_map(
        outcome(10, 11, 12), compiled((1.02, 10), AssertionError(), AssertionError())
    )
    assert ("map 1", 1.02) == (found.best.name, found.best.cost.seconds)


def test_a_compiler_that_fails_or_is_interrupted_leaves_what_was_counted():
    """Of the maps before that, the best is taken."""
    counted = outcome(10, 11, 12)
    failing = EngineError("no compiler", why="it is not there", fix="install it")
    with pytest.warns(
        LayoutMapWarning, match=r"(?s)XLA could not compile any of the best maps.*no compiler.*verify=False"
    ):
        assert counted == choose_best_compiled_map(counted, compiled(failing, failing, failing))
    assert "map 2" == choose_best_compiled_map(counted, compiled(failing, (2.0, 9), failing)).best.name
    stopped = choose_best_compiled_map(counted, compiled((1.9, 9), KeyboardInterrupt(), (0.1, 9)))
    assert ("map 1", False) == (stopped.best.name, stopped.is_complete)
    assert not choose_best_compiled_map(
        counted, compiled(KeyboardInterrupt(), (1.0, 9), (1.0, 9))
    ).is_complete


def searched_near(found):
    """Both searches of three maps whose figures of XLA's are given; the second finds a map of 0.5 seconds or fails."""

    def after(*seconds_and_sizes):
        asked = []

        def near(first):
            asked.append(first.name)
            if isinstance(found, BaseException):
                raise found
            best = Candidate("near", RuleSet("data=2", {"up": ("data",)}), MapCost(found, 9 * GIB), LIMIT)
            return SearchOutcome(best, (), frozenset({"map 1", *"abcde"}), True)

        counted = outcome(10, 11, 12)
        return search_around_best_compiled_map(
            counted, choose_best_compiled_map(counted, compiled(*seconds_and_sizes)), near
        ), asked

    return after


@pytest.mark.parametrize(
    ("figures", "best", "asked"),
    [
        (((1.0, 10), (2.0, 10), (3.0, 10)), "map 1", []),
        (((2.0, 10), (1.0, 10), (3.0, 10)), "near", ["map 2"]),
        (((2.0, 10), (1.999, 9), (3.0, 10)), "map 2", []),
        (((1.0, 17), (2.0, 10), (3.0, 10)), "near", ["map 2"]),
    ],
)
def test_it_is_searched_on_where_counts_chose_another_map_than_the_compiler(figures, best, asked):
    """From the compiler's choice, if that is better by more than a tie, or if the counts' choice does not fit."""
    found, near = searched_near(0.5)(*figures)
    assert (best, asked) == (found.best.name, near)
    assert found.best.cost.peak_bytes == found.best.compiled_bytes
    assert found.num_tried == 3 + 5 * len(asked)


@pytest.mark.parametrize(("further", "is_complete"), [(0.999, True), (KeyboardInterrupt(), False)])
def test_a_search_that_goes_on_loses_nothing(further, is_complete):
    """What it finds is the result if it is better by more than a tie, and an interrupt leaves what there was."""
    found, asked = searched_near(further)((2.0, 10), (1.0, 10), (3.0, 10))
    assert (["map 2"], "map 2", is_complete) == (asked, found.best.name, found.is_complete)


def test_none_fits():
    """The error says what XLA needs for each."""
    with pytest.raises(PlanError, match=r"(?s)data=1: 18.0 GiB.*data=2: 17.0 GiB"):
        choose_first_map_that_fits(outcome(10, 11), compiler(18, 17), LIMIT)
