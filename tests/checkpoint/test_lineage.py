"""Which step came from which is known, whatever a run goes back to and whichever steps are deleted."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint.forged import manifest_in, write_manifest
from checkpoint.saves import save, values_of
from hypothesis import example, given
from hypothesis import strategies as st

from layoutmap.checkpoint.lineage import History, SavedStep, facts_of, following, last_step, saved_step
from layoutmap.checkpoint.manifest import NAME
from layoutmap.checkpoint.storage import LocalStorage

PROCESSES = ("core",)

MOVES = st.lists(st.tuples(st.sampled_from(("on", "back", "delete")), st.integers(0, 10)), max_size=30)


@given(moves=MOVES)
@example(
    [("on", 0), ("on", 1), ("on", 0), ("back", 1), ("on", 1), *[("delete", 1)] * 2, ("back", 0), ("on", 0)]
)
def test_a_step_comes_from_those_that_were_saved_on_its_way(moves: list[tuple[str, int]]) -> None:
    """However often a run goes back and whatever is deleted, ancestors are exactly those that it went through."""
    there: dict[int, SavedStep] = {}
    ways: dict[int, set[int]] = {}  # by step: all that it came from, those that are deleted, too
    position: SavedStep | None = None
    way: set[int] = set()
    for number, (move, n) in enumerate(moves):
        if move == "on":
            step = (position.step if position else 0) + 1 + n % 3
            saved = following(step, f"save {number}", position, there.values())
            ways[step], there[step], position = way, saved, saved
            way = way | {step}
        elif there and move == "back":
            position = list(there.values())[n % len(there)]
            way = ways[position.step] | {position.step}
        elif there:
            del there[list(there)[n % len(there)]]
        if move == "on":  # a step that was written over is another one
            for other in list(there):
                if step in ways[other]:
                    del there[other]

    for each in there.values():
        expected = ways[each.step] & there.keys()
        assert expected == {other.step for other in there.values() if each.comes_from(other)}
        assert each == saved_step(each.step, facts_of(each))
    assert len({each.order for each in there.values()}) == len(there)


def test_the_last_step_is_that_of_the_last_save(tmp_path: Path) -> None:
    """Whatever its number; one whose manifest is damaged is the last if its number says so; others are passed over."""
    for step in (10, 20, 30):
        save(tmp_path, step, values_of(0))
    found = manifest_in(tmp_path / "step-20")
    write_manifest(tmp_path / "step-20", found | {"order": 5, "lines": {"a": 20}})
    lasts = [last_step(LocalStorage(tmp_path))]
    for step in (10, 30):
        (tmp_path / f"step-{step}" / NAME).write_text("{")
        lasts.append(last_step(LocalStorage(tmp_path)))

    assert [20, 20, 30] == lasts
    assert None is last_step(LocalStorage(tmp_path / "nothing"))


@pytest.mark.parametrize("lines", [{}, {"a": "x"}, [], None, 5])
def test_what_is_no_line_is_not_followed(tmp_path: Path, lines: object) -> None:
    """A manifest with something else in its place is damaged, or counts as one that knows nothing of lines."""
    save(tmp_path, 10, values_of(0))
    write_manifest(tmp_path / "step-10", manifest_in(tmp_path / "step-10") | {"lines": lines})
    history = History(LocalStorage(tmp_path))
    steps = history.steps()

    assert ([10] == history.damaged) != ({"": 10} == (steps[10].lines if steps else None))
