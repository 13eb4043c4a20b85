"""Every error says what, where, why and the fix, and travels between processes."""

from __future__ import annotations

import copy
import pickle

import pytest

from layoutmap.core import errors
from layoutmap.core.errors import LayoutMapError, PlanError

KINDS = [
    getattr(errors, name) for name in errors.__all__ if issubclass(getattr(errors, name), LayoutMapError)
]


def test_facts_why_and_fix_stand_in_aligned_lines():
    """The headline comes first, then the facts in their order, then why and the fix, all aligned."""
    error = LayoutMapError(
        "up.kernel: axis 1 cannot be split evenly",
        facts={"shape": (512, 1365), "layout": "(unsharded, model)"},
        why="1365 is not a multiple of 4",
        fix="pad axis 1 to 1368",
    )

    assert """\
up.kernel: axis 1 cannot be split evenly
  shape   (512, 1365)
  layout  (unsharded, model)
  why     1365 is not a multiple of 4
  fix     pad axis 1 to 1368""" == str(error)


def test_a_fact_of_several_lines_stays_in_its_column():
    """The second line of a fact stands under the first."""
    error = LayoutMapError("what", facts={"rules": "one\ntwo"}, fix="do it")

    assert "what\n  rules  one\n         two\n  fix    do it" == str(error)


def test_what_is_empty_is_left_out_and_zero_is_not():
    """An error shows no line without content; a fact that is 0 or () has content."""
    error = LayoutMapError("what", facts={"note": "", "devices": 0, "shape": ()})

    assert "what\n  devices  0\n  shape    ()" == str(error)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_an_error_survives_a_copy_and_a_pickle(kind, twin):
    """An error that is raised in another process arrives whole."""
    error = kind("what", facts={"shape": (2, 3)}, why="because", fix="do it")

    again = twin(error)

    assert kind is type(again)
    assert str(error) == str(again)
    assert ("what", {"shape": (2, 3)}, "because", "do it") == (
        again.what,
        again.facts,
        again.why,
        again.fix,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_a_value_error(kind):
    """Code that catches `ValueError`, as TensorFlow's DTensor raises, catches these."""
    assert issubclass(kind, ValueError)


def test_a_plan_error_keeps_its_problems_through_a_pickle():
    """All that was found wrong is there for a program to read, in another process too."""
    error = pickle.loads(pickle.dumps(PlanError("two problems", problems=("a", "b"))))

    assert ("a", "b") == error.problems
    assert "two problems" == str(error)
