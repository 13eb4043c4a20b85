"""Which step came from which is known, whatever a run goes back to and whichever steps are deleted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoint.forged import manifest_in, write_manifest
from checkpoint.saves import save, values_of
from hypothesis import example, given
from hypothesis import strategies as st

from layoutmap.checkpoint.lineage import (
    StepHistory,
    StepLineage,
    convert_lineage_to_manifest_entries,
    find_last_step_number,
    make_step_lineage,
    parse_lineage_from_manifest_entries,
)
from layoutmap.checkpoint.manifest import NAME
from layoutmap.checkpoint.storage import LocalStorage

PROCESSES = ("core",)

MOVES = st.lists(
    st.tuples(st.sampled_from(("on", "back", "delete", "again")), st.integers(0, 10)), max_size=30
)


@given(moves=MOVES)
@example(
    [("on", 0), ("on", 1), ("on", 0), ("back", 1), ("on", 1), *[("delete", 1)] * 2, ("back", 0), ("on", 0)]
)
def test_a_step_comes_from_those_that_were_saved_on_its_way(moves: list[tuple[str, int]]) -> None:
    """However often a run goes back and whatever is deleted, ancestors are exactly those that it went through."""
    there: dict[int, tuple[StepLineage, int]] = {}  # and the how many-th move has saved it
    ways: dict[int, set[int]] = {}  # by that: those that it came from, also if they are deleted
    position: tuple[StepLineage, int] | None = None
    for number, (move, n) in enumerate(moves):
        if move == "on":
            step, way = 1 + n % 3, set[int]()
            if position is not None:
                step, way = position[0].step + step, ways[position[1]] | {position[1]}
        elif move == "again" and position is not None:  # it is deleted, and saved once more
            step, way = position[0].step, ways[position[1]]
            there.pop(step, None)
        else:
            some = list(there)[n % len(there)] if there else None
            if some is not None and move == "back":
                position = there[some]
            elif some is not None and move == "delete":
                del there[some]
            continue
        others = [each for each, _ in there.values()]
        saved = make_step_lineage(step, f"save {number}", position and position[0], others)
        position = there[step] = saved, number
        ways[number] = way

    for each, number in there.values():
        expected = {other.step for other, by in there.values() if by in ways[number]}
        assert expected == {other.step for other, _ in there.values() if each.has_ancestor(other)}
        assert each == parse_lineage_from_manifest_entries(
            each.step, convert_lineage_to_manifest_entries(each)
        )
    assert len({each.order for each, _ in there.values()}) == len(there)


def test_the_last_step_is_that_of_the_last_save(tmp_path: Path) -> None:
    """Whatever its number; one whose manifest is damaged is the last if its number says so; others are passed over."""
    for step in (10, 20, 30):
        save(tmp_path, step, values_of(0))
    found = manifest_in(tmp_path / "step-20")
    write_manifest(tmp_path / "step-20", found | {"order": 5, "lines": {"a": 20}})
    lasts = [find_last_step_number(LocalStorage(tmp_path))]
    for step in (10, 30):
        (tmp_path / f"step-{step}" / NAME).write_text("{")
        lasts.append(find_last_step_number(LocalStorage(tmp_path)))

    assert [20, 20, 30] == lasts
    assert None is find_last_step_number(LocalStorage(tmp_path / "nothing"))


@pytest.mark.parametrize("lines", [{}, {"a": "x"}, [], None, 5])
def test_what_is_no_line_is_not_followed(tmp_path: Path, lines: object) -> None:
    """A manifest with something else in its place is damaged, or counts as one that knows nothing of lines."""
    save(tmp_path, 10, values_of(0))
    write_manifest(tmp_path / "step-10", manifest_in(tmp_path / "step-10") | {"lines": lines})
    history = StepHistory(LocalStorage(tmp_path))
    steps = history.read_lineages()

    assert ([10] == history.damaged) != ({"": 10} == (steps[10].lines if steps else None))


@pytest.mark.parametrize("metrics", [{"loss": "low"}, {"loss": [1.0]}, 5])
def test_what_is_no_metric_is_not_compared(tmp_path: Path, metrics: object) -> None:
    """A step with it is damaged, and none of the best."""
    for step in (10, 20):
        save(tmp_path, step, values_of(0))
    write_manifest(tmp_path / "step-10", manifest_in(tmp_path / "step-10") | {"metrics": metrics})
    history = StepHistory(LocalStorage(tmp_path))

    assert [20] == list(history.read_lineages())
    assert [10] == history.damaged


@pytest.mark.parametrize("num_bytes", [16383, 16384, 16385])
def test_a_manifest_that_another_program_has_formatted_is_read(tmp_path: Path, num_bytes: int) -> None:
    """Also one with as many bytes as are read at first."""
    save(tmp_path, 10, values_of(0))
    path = tmp_path / "step-10" / NAME
    text = json.dumps(json.loads(path.read_text()))
    path.write_text(text + " " * (num_bytes - len(text)))

    assert [10] == list(StepHistory(LocalStorage(tmp_path)).read_lineages())
