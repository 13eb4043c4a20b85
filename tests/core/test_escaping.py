"""What is printed from names cannot move a terminal's cursor, colour it, or turn its text round."""

import json
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

import layoutmap as lm
from layoutmap.core.errors import LayoutMapError
from layoutmap.core.escaping import escaped
from layoutmap.core.variables import VariableSpec
from layoutmap.scope.plan import make_plan

HOSTILE = "a\x1b[31m\nforged: line\r\x9b2J\u202e\u2066\x07\t\x85\u2028b"
SCRIPTS = "größe 重み नमस्ते می‌خواهم 👩‍👩‍👧 e\u0301"


@given(st.text(st.characters(exclude_categories=())))
def test_nothing_of_control_is_left(text):
    """No control character, no separator of lines, no bidirectional control, no half of a surrogate pair."""
    left = {c for c in escaped(text) if unicodedata.category(c) in ("Cc", "Zl", "Zp", "Cs")}

    assert set() == left
    assert set() == {c for c in escaped(text) if unicodedata.bidirectional(c) in _TURNING}
    assert escaped(text) == escaped(escaped(text))


_TURNING = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


def test_letters_of_all_scripts_stay():
    """Accents, joined letters and joined emoji too."""
    assert SCRIPTS == escaped(SCRIPTS)


@given(st.text())
def test_escaped_json_is_the_same_json(text):
    """Escapes are those of JSON."""
    written = json.dumps(text, ensure_ascii=False)

    assert text == json.loads(escaped(written))


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
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_hostile_path_is_escaped_in_every_view(view):
    """A newline of a path starts no line of its own, and no control character is left."""
    text = VIEWS[view](_plan(HOSTILE))

    assert escaped(text, keep="\n") == text
    assert [] == [line for line in text.splitlines() if line.startswith("forged")]


def test_an_error_is_escaped_and_keeps_what_it_is_about():
    """The message is safe to print; what a program reads of it is as it was given."""
    error = LayoutMapError(f"{HOSTILE}: bad", facts={"path": HOSTILE}, why=HOSTILE, fix=HOSTILE)

    assert escaped(str(error), keep="\n") == str(error)
    assert (f"{HOSTILE}: bad", HOSTILE) == (error.what, error.facts["path"])
