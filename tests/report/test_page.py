"""The page of a plan: one file that loads nothing, holds any path as data only, and stays small."""

import json
import re
from html.parser import HTMLParser

import frameworks
import pytest
from hypothesis import given
from hypothesis import strategies as st

import layoutmap as lm
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.plan.problems import Problem
from layoutmap.report.page.page import _SCRIPTS, make_plan_page
from layoutmap.report.rows import make_table_rows
from layoutmap.scope.plan import make_plan
from layoutmap.testing import strategies

MESH = lm.Mesh(None, "batch=2,model=4")
PARTS = frameworks.PACKAGE / "report" / "page" / "assets"


class Reader(HTMLParser):
    """The tags of a page, what each script element holds, and all attributes."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.scripts, self.open = [], [], [], ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.open = tag
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_data(self, data):
        if self.open == "script":
            attrs, text = self.scripts[-1]
            self.scripts[-1] = (attrs, text + data)

    def handle_endtag(self, tag):
        self.open = ""


def data_of(page):
    return json.loads(next(text for attrs, text in Reader(page).scripts if attrs.get("id") == "plan"))


def plan_of(*paths, rules=None):
    return make_plan(
        [VariableSpec(path, (8, 16), "float32") for path in paths], lm.LayoutMap(MESH, rules or {})
    )


def large():
    """1,500 variables and their slots on 4,096 devices."""
    variables = [
        VariableSpec(
            f"decoder.transformer_layer_{i}.self_attention_layer.{name}.kernel", (4096, 32, 128), "bfloat16"
        )
        for i in range(250)
        for name in ("query_dense", "key_dense", "value_dense", "output_dense", "gate_dense", "up_dense")
    ]
    variables += [
        VariableSpec(f"optimizer.{v.path}.momentum", v.shape, "float32", Kind.SLOT, parent=v.path)
        for v in variables
    ]
    rules = {r".*(query|key|value)_dense": ("batch", "model", None)}
    return make_plan(variables, lm.LayoutMap(lm.Mesh(None, "batch=256,model=16"), rules))


def test_the_page_loads_nothing():
    """Its policy forbids all but what stands in it, no attribute names a place, and no attribute is a script."""
    page = Reader(plan_of("d1.kernel").to_html())
    policy = [value for _, value in page.attributes if value and "default-src" in value]

    assert [
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    ] == policy
    assert [] == [(n, v) for n, v in page.attributes if n == "src" or n.startswith("on")]
    assert {"data:,", "#table-heading"} == {v for n, v in page.attributes if n in ("href", "action", "data")}
    assert [] == re.findall(r"https?:|url\(|@import", plan_of("d1.kernel").to_html())


def test_every_part_of_the_page_is_in_it():
    """No script is beside the others and left out."""
    assert {path.name for path in PARTS.glob("*.js")} == {f"{name}.js" for name in _SCRIPTS}
    assert {"page.html", "page.css", *(f"{name}.js" for name in _SCRIPTS)} == {
        path.name for path in PARTS.iterdir()
    }


NASTY = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]>",
    "{{script}}",
    "a\"b'c`d\\e",
    "\u2028\u2029\x00\x7f",
    "größe.核.🙂",
    "\ud800",
    "&lt;&amp;",
)


@given(st.lists(st.one_of(st.sampled_from(NASTY), st.text(min_size=1)), min_size=1, max_size=4, unique=True))
def test_paths_are_data_and_nothing_else(paths):
    """Whatever a path holds, the page has the same tags, can be written, and gives the path back."""
    plan = make_plan(
        [VariableSpec(p, (6,), "float32", aliases=(f"{p}'",)) for p in paths], lm.LayoutMap(MESH)
    )
    page = make_plan_page(
        plan, [Problem("lint", "warning", p, f"{p}: what", (("fact", p),), p, p) for p in paths]
    )
    usual = plan_of("d1.kernel").to_html()

    assert Reader(usual).tags == Reader(page).tags
    assert page == page.encode().decode()
    assert paths == [written[0] for written in data_of(page)["variables"]]


def test_the_mesh_is_data_too():
    """The names of dims and devices stand in the title and the data, and are no markup there."""
    mesh = lm.Mesh(None, [("<b>", 2)], "</title>")
    page = make_plan([VariableSpec("k", (6,), "float32")], lm.LayoutMap(mesh)).to_html()

    assert Reader(plan_of("d1.kernel").to_html()).tags == Reader(page).tags
    assert [["<b>", 2]] == data_of(page)["mesh"]["dims"]


@given(strategies.plans(layers=True))
def test_equal_plans_give_equal_pages(drawn):
    """Also where one of them comes from its JSON file."""
    _, _, plan = drawn

    assert plan.to_html() == lm.Plan.from_json(plan.to_json()).to_html()


@given(strategies.plans())
def test_the_bytes_of_the_page_are_those_of_the_plan(drawn):
    """Every variable, with the bytes that the plan counts, in the rows of the terminal's table."""
    _, _, plan = drawn
    data = data_of(plan.to_html())
    rows = make_table_rows(plan)

    assert [plan.global_bytes, plan.device_bytes] == data["bytes"]
    assert [
        (a.variable.path, a.variable.global_bytes, a.shard_bytes if a.fits else None)
        for a in plan.assignments
    ] == [(path, *data["forms"][form][3:]) for path, form, *_ in data["variables"]]
    assert [row.path for row in rows] == [path for path, *_ in data["rows"]]
    assert [
        i
        for a in plan.assignments
        for i, row in enumerate(rows)
        if any(a is other for other in row.assignments)
    ] == [row for _, _, _, row, *_ in data["variables"]]


def test_a_large_plan_makes_a_small_page():
    """3,000 variables on 4,096 devices: under two megabytes."""
    assert len(large().to_html().encode()) < 2_000_000


def test_findings_stand_beside_the_problems():
    """Errors first, repeated blocks in one, each known once and with its variables."""
    plan = plan_of("blocks.0.up.kernel", "blocks.1.up.kernel", rules={"blocks": (None, "model")})
    lint = [
        Problem("lint", severity, f"blocks.{i}.up.kernel", f"blocks.{i}.up.kernel: {severity}")
        for severity in ("warning", "error")
        for i in (0, 1, 1)
    ]
    told = data_of(make_plan_page(plan, lint))["problems"]

    assert [
        ("error", "blocks.{0..1}.up.kernel: error", 2, [0, 1]),
        ("warning", "blocks.{0..1}.up.kernel: warning", 2, [0, 1]),
    ] == [(p["severity"], p["what"], p["count"], p["variables"]) for p in told]


@pytest.mark.parametrize("count", [0, 1])
def test_a_plan_of_next_to_nothing_has_a_page(count):
    """No variable, or one, on a mesh without dims."""
    variables = [VariableSpec("k", (), "float32")][:count]

    assert count == len(data_of(make_plan(variables, lm.LayoutMap(lm.Mesh(None, []))).to_html())["variables"])
