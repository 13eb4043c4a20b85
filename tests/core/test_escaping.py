"""What is printed from names cannot move a terminal's cursor, colour it, or turn its text round."""

import json
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

import layoutmap as lm
from layoutmap.checkpoint.source import SavedVariable
from layoutmap.checkpoint.specs import make_variable_specs
from layoutmap.core.errors import LayoutMapError
from layoutmap.core.escaping import escape_text
from layoutmap.core.variables import Assignment, Kind, VariableSpec
from layoutmap.plan.table import PlanTable
from layoutmap.report.contents import CheckpointContents, format_checkpoint_html
from layoutmap.saving.sync_plan import SyncPlan, SyncRow
from layoutmap.scope.plan import make_plan

HOSTILE = "a\x1b[31m\nforged: line\r\x9b2J\u202e\u2066\x07\t\x85\u2028b"
SCRIPTS = "größe 重み नमस्ते می‌خواهم 👩‍👩‍👧 e\u0301"


@given(st.text(st.characters(exclude_categories=())))
def test_nothing_of_control_is_left(text):
    """No control character, no separator of lines, no bidirectional control, no half of a surrogate pair."""
    left = {c for c in escape_text(text) if unicodedata.category(c) in ("Cc", "Zl", "Zp", "Cs")}

    assert set() == left
    assert set() == {c for c in escape_text(text) if unicodedata.bidirectional(c) in _TURNING}
    assert escape_text(text) == escape_text(escape_text(text))


_TURNING = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


def test_letters_of_all_scripts_stay():
    """Accents, joined letters and joined emoji too."""
    assert SCRIPTS == escape_text(SCRIPTS)


@given(st.text())
def test_escaped_json_is_the_same_json(text):
    """Escapes are those of JSON."""
    written = json.dumps(text, ensure_ascii=False)

    assert text == json.loads(escape_text(written))


def _plan(path):
    rules = {re.escape(path): (None, "model"), "no\x1b.0m\nsuch": ("model",)}
    layout_map = lm.LayoutMap(lm.Mesh(None, "model=4"), rules)
    layout_map.activations["out\x1b"] = (None, "model")
    variables = [VariableSpec(path, (8, 6), "float32"), VariableSpec(f"{path}.2", (8, 8, 2), "float32")]
    return make_plan([*variables, VariableSpec(f"no.{path}", (8, 8), "float32")], layout_map, layers=[path])


VIEWS = {
    "plan": str,
    "plan's line": repr,
    "memory": lambda plan: str(plan.memory),
    "explanation": lambda plan: plan.explain(HOSTILE) + plan.explain(f"no.{HOSTILE}"),
    "difference": lambda plan: str(plan.diff(_plan("other\x1b\n"))),
    "lint": lambda plan: str(plan.lint()),
    "problems": lambda plan: "\n".join(map(str, plan.problems)),
    "sync": lambda plan: str(_sync(HOSTILE)),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_hostile_path_is_escaped_in_every_view(view):
    """A newline of a path starts no line of its own, and no control character is left."""
    text = VIEWS[view](_plan(HOSTILE))

    assert escape_text(text, keep="\n") == text
    assert [] == [line for line in text.splitlines() if line.startswith("forged")]


NOTEBOOK_VIEWS = {
    "plan": lambda name: _plan(name)._repr_html_(),
    "difference": lambda name: _plan(name).diff(_plan(f"other{name}"))._repr_html_(),
    "lint": lambda name: _plan(name).lint()._repr_html_(),
    "layout map": lambda name: _layout_map(name)._repr_html_(),
    "checkpoint": lambda name: format_checkpoint_html(_contents(name)),
    "sync": lambda name: _sync(name)._repr_html_(),
}


def _sync(name):
    row = SyncRow(VariableSpec(name, (8, 6), "float32"), (name,), "float32", name, name, {(name, "b"): 8})
    return SyncPlan((row,), (("sampler", name),))


def _layout_map(name):
    layout_map = lm.LayoutMap(lm.Mesh(None, "model=4"), {re.escape(name): (None, "model")})
    layout_map.activations[re.escape(f"out{name}")] = (None, "model")
    return layout_map


def _contents(name):
    variables = (
        SavedVariable(name, (8, 6), "float32", Kind.WEIGHT),
        SavedVariable(f"{name}.2", (8,), "int8"),
    )
    mesh = lm.Mesh(None, "model=4")
    placed = (Assignment(v, lm.Layout.replicated(mesh, len(v.shape))) for v in make_variable_specs(variables))
    return CheckpointContents(name, {"metadata": name}, variables, PlanTable(mesh, tuple(placed)))


@pytest.mark.parametrize("view", NOTEBOOK_VIEWS)
@given(name=st.text(st.characters(exclude_categories=()), min_size=1).map(lambda name: f"a{name}b"))
def test_a_drawn_name_is_escaped_in_every_notebook_view(view, name):
    """The HTML of a notebook has no control character and no control of direction of a name."""
    html = NOTEBOOK_VIEWS[view](name)

    assert escape_text(html, keep="\n") == html


def test_an_error_is_escaped_and_keeps_what_it_is_about():
    """The message is safe to print; what a program reads of it is as it was given."""
    error = LayoutMapError(f"{HOSTILE}: bad", facts={"path": HOSTILE}, why=HOSTILE, fix=HOSTILE)

    assert escape_text(str(error), keep="\n") == str(error)
    assert (f"{HOSTILE}: bad", HOSTILE) == (error.what, error.facts["path"])
