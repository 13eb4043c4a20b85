"""Plans as people read them, beside the texts of `test_golden`; HTML holds whatever is in a path."""

import textwrap
from html.parser import HTMLParser

from report.test_golden import one_of_each

import layoutmap as lm
from layoutmap.core.text_table import format_bytes, format_html_table
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.report.rows import make_table_rows
from layoutmap.report.text import format_plan_warnings
from layoutmap.scope.plan import make_plan

MESH = lm.Mesh(None, "batch=2,model=4")


def test_a_plan_in_one_line():
    """The representation counts variables, bytes and problems, in the singular where there is one."""
    one = make_plan([VariableSpec("k", (8,), "float32")], lm.LayoutMap(MESH, {"k": ("model",)}))

    assert repr(one) == "<Plan: 1 variable on batch=2, model=4, 32 B, 8 B per device; no problems>"
    assert repr(make_plan([], lm.LayoutMap(MESH))) == (
        "<Plan: 0 variables on batch=2, model=4, 0 B, 0 B per device; no problems>"
    )


def test_what_a_scope_warns_of():
    """Rules that do not do what they say, and matrices without one; what is small and whole is not mentioned."""
    plan = make_plan(
        [VariableSpec(p, s, "float32") for p, s in (("a.0.k", (8, 8)), ("a.1.k", (8, 8)), ("bias", (8,)))],
        lm.LayoutMap(MESH, {"typo": (None,)}),
    )

    assert format_plan_warnings(plan) == textwrap.dedent("""\
        layout map: the plan has warnings; print(lm.plan(make_model, layout_map)) shows where every variable goes
          rule 1  typo: matches no variable
          a.{0..1}.k: no rule matches, so it is replicated""")
    assert format_plan_warnings(make_plan([VariableSpec("bias", (8,), "float32")], lm.LayoutMap(MESH))) == ""


def test_every_variable_is_in_exactly_one_row():
    """Folding loses nothing and counts nothing twice."""
    plan = one_of_each()
    rows = make_table_rows(plan)

    assert sorted(a.variable.path for a in plan.assignments) == sorted(
        a.variable.path for r in rows for a in r.assignments
    )
    assert plan.global_bytes == sum(row.global_bytes for row in rows)


def test_numbers_of_an_optimizer_are_one_row():
    """Such as `step` of torch's Adam, which each weight has one of."""
    weights = [VariableSpec(f"{name}.weight", (8, 4), "float32") for name in ("embed", "norm", "head")]
    slots = [
        VariableSpec(f"optimizer.{v.path}.{name}", shape, "float32", Kind.SLOT, parent=v.path)
        for v in weights
        for name, shape in (("step", ()), ("exp_avg", v.shape))
    ]
    rows = make_table_rows(make_plan([*weights, *slots], lm.LayoutMap("model=4", {"head": ("model", None)})))

    assert ["embed.weight", "norm.weight", "head.weight", "optimizer.*.step", "optimizer.*.exp_avg"] == [
        row.path for row in rows
    ]
    assert [False, True] == [row.matches_weights for row in rows[3:]]


def test_models_are_distinguished():
    """Where a scope built several models, each row names its model; one model needs no name."""
    several = [VariableSpec("k", (8,), "float32", model=name) for name in ("teacher", "student")]

    assert ["teacher: k", "student: k"] == [
        r.path for r in make_table_rows(make_plan(several, lm.LayoutMap(MESH)))
    ]
    assert ["k"] == [r.path for r in make_table_rows(make_plan(several[:1], lm.LayoutMap(MESH)))]


def test_sizes_as_people_read_them():
    """Bytes are whole numbers; larger sizes have one digit behind the point; the largest unit has no end."""
    sizes = [0, 1023, 1024, 1536, 2**20, 2**30, 2**40, 5 * 2**50]

    assert ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 GiB", "1.0 TiB", "5120.0 TiB"] == list(
        map(format_bytes, sizes)
    )


class _Text(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text.append(data)


def read(html):
    parser = _Text()
    parser.feed(html)
    return parser


def test_html_escapes_whatever_is_in_a_path():
    """A path, a pattern or a cell with markup in it is shown, not run."""
    evil = "<script>alert('&')</script>"
    plan = make_plan([VariableSpec(f"{evil}.k", (6,), "float32")], lm.LayoutMap(MESH, {r"<s.*": ("model",)}))
    found = read(plan._repr_html_() + format_html_table(evil, [evil], [[evil]]))

    assert "script" not in found.tags
    assert f"{evil}.k" in found.text
    assert 3 == found.text.count(evil)


def test_a_derived_variable_is_shown_with_its_parent():
    """Blocks are one row, and so are their parents."""
    variables = []
    for block in range(2):
        kernel = f"blocks.{block}.up.kernel"
        scale = VariableSpec(
            f"{kernel}_scale", (64,), "float32", parent=kernel, axes=((1,),), parent_shape=(16, 64)
        )
        variables += [VariableSpec(kernel, (16, 64), "int8"), scale]
    plan = make_plan(variables, lm.LayoutMap(MESH, {r"blocks\.\d+\.up\.kernel": ("batch", "model")}))

    assert [
        ("blocks.{0..1}.up.kernel", "1"),
        ("blocks.{0..1}.up.kernel_scale", "as blocks.{0..1}.up.kernel"),
    ] == [(row.path, row.rule_text) for row in make_table_rows(plan)]
