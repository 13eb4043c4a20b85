"""Lint: what is probably not meant is reported with its evidence and a fix, and what is meant is not."""

from __future__ import annotations

import re
from dataclasses import replace

import costs
import pytest
from decoders import make_dense
from hypothesis import given
from hypothesis import strategies as st

from layoutmap import Layout, LayoutMap, Mesh, Plan, PlanError
from layoutmap.core.variables import AxisRoles, VariableSpec
from layoutmap.cost.table import Collective
from layoutmap.scope.plan import make_plan
from layoutmap.testing import strategies

HIDDEN, HEADS, SIZE, WIDE, ROWS = 64, 8, 16, 256, 512
DATA, MODEL = 2, 4


def weight(path, shape, *roles, head_size=None):
    return VariableSpec(path, shape, "float32", use=AxisRoles(roles, head_size) if roles else None)


def decoder(prefix="", *, flat=False, number=2):
    """The weights of a small decoder; with `flat`, heads lie side by side in one axis."""
    heads, head_size = ((HEADS * SIZE,), SIZE) if flat else ((HEADS, SIZE), None)
    out, into = (tuple(f"{role}.{i}" for i in range(len(heads))) for role in ("out", "in"))
    found = [weight("tokens.embeddings", (ROWS, HIDDEN), "rows", "out.0")]
    for i in range(number):
        attention = f"{prefix}blocks.{i}.attention"
        for part in ("query", "key", "value"):
            found.append(
                weight(f"{attention}.{part}.kernel", (HIDDEN, *heads), "in.0", *out, head_size=head_size)
            )
            found.append(weight(f"{attention}.{part}.bias", heads, *out, head_size=head_size))
        found.append(
            weight(f"{attention}.output.kernel", (*heads, HIDDEN), *into, "out.0", head_size=head_size)
        )
        found.append(weight(f"{prefix}blocks.{i}.up.kernel", (HIDDEN, WIDE), "in.0", "out.0"))
        found.append(weight(f"{prefix}blocks.{i}.up.bias", (WIDE,), "out.0"))
        found.append(weight(f"{prefix}blocks.{i}.down.kernel", (WIDE, HIDDEN), "in.0", "out.0"))
        found.append(weight(f"{prefix}blocks.{i}.norm.scale", (HIDDEN,)))
    return found


GOOD = {
    r".*embeddings": ("model", None),
    r".*(query|key|value)\.kernel": (None, "model", None),
    r".*(query|key|value)\.bias": ("model", None),
    r".*output\.kernel": ("model", None, None),
    r".*up\.kernel": (None, "model"),
    r".*up\.bias": ("model",),
    r".*down\.kernel": ("model", None),
    r".*norm": (None,),
}
FLAT = GOOD | {
    r".*(query|key|value)\.kernel": (None, "model"),
    r".*(query|key|value)\.bias": ("model",),
    r".*output\.kernel": ("model", None),
}
# The other axis of each weight is sharded over the dim that shards the batch.
BOTH = GOOD | {
    r".*embeddings": ("model", "data"),
    r".*(query|key|value)\.kernel": ("data", "model", None),
    r".*output\.kernel": ("model", None, "data"),
    r".*up\.kernel": ("data", "model"),
    r".*down\.kernel": ("model", "data"),
}


def plan_of(rules, variables=None, mesh=f"data={DATA},model={MODEL}", **options) -> Plan:
    return make_plan(variables or decoder(), LayoutMap(Mesh(None, mesh), rules), **options)


def but(slips: dict) -> dict:
    """The good rules but for some, which come first."""
    return slips | {pattern: specs for pattern, specs in GOOD.items() if pattern not in slips}


def found(plan, **options):
    """The kinds of what lint finds beside what the plan says, and the subjects, without the numbers of blocks."""
    mine = [p for p in plan.lint(**options).problems if p not in plan.problems]
    return sorted({(p.kind, p.subject.replace(".1.", ".0.")) for p in mine})


@given(strategies.plans(layers=True))
def test_rules_that_are_not_used_are_found(drawn):
    """Exactly those of which the plan warns: none before all variables are known."""
    variables, layout_map, plan = drawn
    of_rules = [p for p in plan.warnings if p.kind in ("unused rule", "shadowed rule")]
    before = make_plan(variables, layout_map, complete=False, layers=[])

    assert of_rules == [p for p in plan.lint().problems if p in plan.problems]
    assert not [p for p in before.lint().problems if "rule" in p.kind]


@pytest.mark.parametrize("rules", [GOOD, FLAT, BOTH], ids=["heads", "flat", "both"])
def test_a_map_as_it_is_meant_is_passed(rules):
    """CouldShard over layers' outputs, then over what they take in."""
    plan = plan_of(rules, decoder(flat=rules is FLAT), free_activations=True)

    assert () == plan.errors
    assert [] == found(plan)


SLIPS = {
    "swapped heads": (
        {r".*(query|key|value)\.kernel": ("model", "data", None)},
        "swapped",
        "blocks.0.attention.query.kernel",
    ),
    "swapped features": ({r".*up\.kernel": ("model", "data")}, "swapped", "blocks.0.up.kernel"),
    "sum over the batch dim": (
        {r".*(up|down)\.kernel": ("data", None)},
        "sum over the batch dim",
        "blocks.0.down.kernel",
    ),
    "keys otherwise": (
        {r".*(key)\.kernel": (None, None, None)},
        "query, key, value",
        "blocks.0.attention.query.kernel",
    ),
    "through heads": (
        {r".*(value)\.kernel": (None, "model", "data")},
        "heads",
        "blocks.0.attention.value.kernel",
    ),
    "replicated table": ({r".*embeddings": (None, None)}, "replicated table", "tokens.embeddings"),
    "bias over another": ({r".*up\.bias": ("data",)}, "contradicts its kernel", "blocks.0.up.bias"),
}


@pytest.mark.parametrize("name", SLIPS)
def test_each_slip_is_found_where_it_is(name):
    """By its kind, at the weight concerned, with the rule that did it, a reason and a fix."""
    rules, kind, subject = SLIPS[name]
    plan = plan_of(but(rules), free_activations=True)

    assert (kind, subject) in found(plan)
    told = next(p for p in plan.lint().problems if (p.kind, p.subject) == (kind, subject))
    assert "rule 1" in str(told)
    assert told.why
    assert told.fix


def with_fully_shard(layout):
    """A layout with the data dim on axis 0, too, as torch's `fully_shard` adds it: behind the dims that are there."""
    specs = list(layout.sharding_specs)
    dims = layout.list_mesh_dims(0)
    specs[0] = (*dims, "data")
    return Layout(specs, layout.mesh)


@pytest.mark.parametrize("flat", [False, True])
def test_the_dims_of_fully_shard_add_no_finding(flat):
    """It gathers weights before their products, so what is found is what the layouts without its dims have."""
    rules = FLAT if flat else GOOD
    for slip in [{}, *(rules for rules, *_ in SLIPS.values())]:
        plan = plan_of(slip | rules if not slip else but(slip), decoder(flat=flat and not slip))
        plan = replace(
            plan,
            assignments=tuple(
                replace(
                    a, layout=Layout([None if s == "data" else s for s in a.layout.sharding_specs], plan.mesh)
                )
                for a in plan.assignments
            ),
        )
        sharded = tuple(replace(a, layout=with_fully_shard(a.layout)) for a in plan.assignments)
        gathered = replace(plan, assignments=sharded, gathered_dims=("data",))

        expected = [each for each in found(plan) if each[0] != "replicated table"]
        assert expected == found(gathered), slip
        assert found(gathered) == found(Plan.from_json(gathered.to_json()))


@given(st.data())
def test_a_block_that_is_knocked_out_is_the_only_finding(data):
    """Of four to nine blocks under a sound map one is replicated over the model's dim, all of it or some weights."""
    number = data.draw(st.integers(4, 9))
    rules = data.draw(st.sampled_from([GOOD, FLAT, BOTH]))
    variables = decoder(flat=rules is FLAT, number=number)
    odd = data.draw(st.integers(0, number - 1))
    names = data.draw(st.sampled_from([("up", "down"), ("attention",), ("attention", "up", "down")]))
    plan = plan_of(rules, variables)
    knocked = replace(
        plan,
        assignments=tuple(
            replace(
                a, layout=Layout([None if s == "model" else s for s in a.layout.sharding_specs], plan.mesh)
            )
            if a.variable.path.startswith(tuple(f"blocks.{odd}.{name}" for name in names))
            else a
            for a in plan.assignments
        ),
    )

    assert [] == found(plan)
    mine = [p for p in knocked.lint().problems if p not in knocked.problems]
    assert [("odd one out", f"blocks.{odd}")] == [(p.kind, p.subject) for p in mine]
    assert f"{number - 1} of {number} such blocks" in mine[0].what


def test_an_odd_one_out_says_which_weights_and_how_the_others_are_laid_out():
    """With the rule that did it, at most four weights, and only where three blocks are laid out alike."""
    rules = {r"blocks\.1\.(up|down)\.kernel": (None, None)}
    (problem,) = plan_of(but(rules | {r"blocks\.1\.up\.bias": (None,)}), decoder(number=4)).lint().problems

    assert (
        "blocks.1: it is not sharded over model, and 3 of 4 such blocks are\n"
        "  up.kernel    (unsharded, unsharded)     rule 1  blocks\\.1\\.(up|down)\\.kernel; others (unsharded, model)\n"
        "  up.bias      (unsharded,)     rule 2  blocks\\.1\\.up\\.bias; others (model,)\n"
        "  down.kernel  (unsharded, unsharded)     rule 1  blocks\\.1\\.(up|down)\\.kernel; others (model, unsharded)\n"
        "  why          each device along model holds all of its weights and computes all of its products\n"
        "  fix          lay it out as the others; delete rule 1; delete rule 2"
    ) == str(problem)
    assert "odd one out" not in {p.kind for p in plan_of(but(rules), decoder(number=3)).lint().problems}


def without(*patterns):
    """Return the good rules without some."""
    return {pattern: specs for pattern, specs in GOOD.items() if pattern not in patterns}


UP, DOWN = r".*up\.kernel", r".*down\.kernel"
COLUMN, ROW = (
    "add a rule: layout_map[r\"blocks\\.\\d+\\.up\\.kernel$\"] = (None, 'model')",
    ("add a rule: layout_map[r\"blocks\\.\\d+\\.down\\.kernel$\"] = ('model', None)"),
)


@pytest.mark.parametrize(
    ("rules", "kind", "subject", "change"),
    [
        (but({UP: ("model", None)}), "swapped", "up.kernel", "change rule 1 to (None, 'model')"),
        (without(UP, DOWN), "contradicts its bias", "up.kernel", COLUMN),
        (
            without(UP, DOWN) | {UP: ("model", None)},
            "swapped",
            "up.kernel",
            "change rule 7 to (None, 'model')",
        ),
        (without(DOWN), "replicated partner", "down.kernel", ROW),
        (but({r".*up\.bias": ("data",)}), "contradicts its kernel", "up.bias", "change rule 1 to ('model',)"),
        (
            but({r".*down\.bias": ("model",)}),
            "contradicts its kernel",
            "down.bias",
            "change rule 1 to (None,)",
        ),
        (
            without(r".*up\.bias"),
            "replicated partner",
            "up.bias",
            "add a rule: layout_map[r\"blocks\\.\\d+\\.up\\.bias$\"] = ('model',)",
        ),
    ],
    ids=["swapped", "no rule", "swapped alone", "no row", "bias", "bias of a row", "no bias"],
)
def test_the_odd_one_is_reported_and_not_the_weights_that_agree(rules, kind, subject, change):
    """Unmatched variables are replicated on purpose, so that the plan itself reports nothing."""
    variables = [*decoder(), *(weight(f"blocks.{n}.down.bias", (HIDDEN,), "out.0") for n in range(2))]
    plan = make_plan(variables, LayoutMap(Mesh(None, f"data={DATA},model={MODEL}"), rules, rest="replicated"))

    assert [(kind, f"blocks.{n}.{subject}") for n in range(2)] == found_all(plan)
    assert {change} == {
        p.fix.partition("; ")[2].removeprefix("its axes seem to be swapped; ")
        for p in plan.lint().problems
        if p not in plan.problems
    }


def test_replicated_biases_are_passed_if_all_are_or_a_rule_says_so():
    """They take little memory, so only one among sharded biases is a mistake."""
    mesh = Mesh(None, f"data={DATA},model={MODEL}")
    for rules in (
        {pattern: specs for pattern, specs in GOOD.items() if "bias" not in pattern},
        but({r".*up\.bias": (None,)}),
    ):
        assert [] == found_all(make_plan(decoder(), LayoutMap(mesh, rules, rest="replicated")))


def test_a_rule_that_replicates_one_of_equal_biases_is_reported():
    """Those of the query and the key are sharded as their kernels."""
    odd = {r".*value\.bias": (None, None)}
    expected = [("replicated partner", f"blocks.{n}.attention.value.bias") for n in range(2)]

    assert expected == found_all(plan_of(odd | {"norm": (None,)} | GOOD))
    assert {"delete rule 1"} == {p.fix.rpartition("; ")[2] for p in plan_of(odd | GOOD).lint()}


def test_a_bias_that_is_sharded_as_its_kernel_is_no_odd_one_out():
    """One of the layers takes sharded inputs, so its bias is replicated, and another one is of unknown use."""
    sizes = [(16, 32), (24, 32), (48, 32), (16, 32)]
    variables = [w for n, pair in enumerate(sizes) for w in make_dense(f"l{n}", pair)]
    variables += [weight("l4.kernel", (3, 24, 32)), weight("l4.bias", (32,))]
    rules = {
        r"l4\.kernel": (None, "model", None),
        r"l4\.bias": (None,),
        r"l2\.kernel": ("model", None),
        r"l2\.bias": (None,),
        r".*kernel": (None, "model"),
        r".*": ("model",),
    }

    assert [] == found(plan_of(rules, variables))


def test_a_kernel_between_a_swapped_one_and_one_that_shards_outputs_is_not_swapped():
    """The swapped one before it is changed to outputs in shards, which it takes."""
    variables = [
        w
        for name, sizes in zip("abcd", ((32, 24), (24, 256), (256, 96), (96, 32)), strict=True)
        for w in make_dense(f"block.{name}", sizes)
    ]
    rules = {r".*[abd]\.kernel": ("model", None), r".*c\.kernel": (None, "model"), r".*bias": (None,)}

    assert [("swapped", "block.a.kernel")] == found(plan_of(rules, variables))


def test_the_plan_and_lint_advise_the_same_for_a_kernel_without_a_rule():
    """Its bias shows how it is sharded, and not the same layer of another block, which may take sharded inputs."""
    variables = [
        *make_dense("h.0.c", (32, 24)),
        *make_dense("h.1.c", (32, 24)),
        *make_dense("big", (640, 64)),
    ]
    rules = {r"h\.0\.c\.kernel": ("model", None), r"h\.1\.c\.bias": ("model",), "big.kernel": (None, "model")}
    rules |= {"big.bias": ("model",)}
    plan = plan_of(rules, variables)
    (problem,) = (p for p in plan.lint().problems if p not in plan.problems)

    assert ("contradicts its bias", "h.1.c.kernel") == (problem.kind, problem.subject)
    assert [("h.1.c.kernel", 1, "model")] == [
        (row.path, row.axis, row.dim) for row in plan.memory.rows if row.path == "h.1.c.kernel"
    ]


@pytest.mark.parametrize("is_tied", [False, True])
def test_an_output_layer_that_sums_over_a_sharded_axis_is_found(is_tied):
    """A tied table is one, too. Another table is not: its outputs are gathered for the same bytes as sums are added."""
    table, *rest = decoder()
    if is_tied:
        table = replace(table, aliases=("lm_head.embeddings",))
    else:
        rest.append(weight("head.kernel", (HIDDEN, ROWS), "in.0", "out.0"))
    rest.append(weight("positions.embeddings", (HIDDEN, HIDDEN), "rows", "out.0"))
    slips = {r".*(tokens|positions).*": (None, "model"), r"head": ("model", None)}
    plan = plan_of(slips | GOOD, [table, *rest])
    (problem,) = (p for p in plan.lint().problems if p not in plan.problems)

    assert ("swapped", "tokens.embeddings" if is_tied else "head.kernel") == (problem.kind, problem.subject)
    assert f"sharded over model, for {ROWS} outputs" in problem.what
    assert problem.fix.endswith("= ('model', None)" if is_tied else "change rule 2 to (None, 'model')")


def found_all(plan):
    return [(p.kind, p.subject) for p in plan.lint().problems if p not in plan.problems]


@pytest.mark.parametrize("rest", [None, "replicated"])
@pytest.mark.parametrize("typo", [r".*pu\.kernel", r".*(pu|gate)\.kernel"])
def test_other_advice_is_as_if_a_mistyped_rule_were_correct(typo, rest):
    """For its partner, its bias, and its memory. After the correction, the same is left to do, or nothing."""
    variables = [*decoder(), *make_dense("gate", (HIDDEN, 2 * HIDDEN))]
    good = without(UP, r".*up\.bias") | {"gate.bias": ("model",)}
    mesh = Mesh(None, f"data={DATA},model={MODEL}")
    plans = [make_plan(variables, LayoutMap(mesh, good | {typo: (None, "model")}, rest=rest))]
    (unused,) = [p for p in plans[0].lint().problems if p in plans[0].problems]
    corrected = re.findall(r'did you mean r"(.*)"', unused.fix)[0]
    plans.append(make_plan(variables, LayoutMap(mesh, good | {corrected: (None, "model")}, rest=rest)))

    found = [{p.subject: p.fix for p in plan.lint().problems if p not in plan.problems} for plan in plans]
    assert found[0] == found[1]
    assert all("('model',)" in found[0][f"blocks.{n}.up.bias"] for n in range(2))
    fixes = {p.subject: p.fix for p in plans[0].problems if p.kind == "no rule"}
    assert rest or "('model',)" in fixes["blocks.0.up.bias"]
    rows = {row.path: (row.axis, row.dim) for row in plans[0].memory.rows}
    assert (1, "model") == rows.get("blocks.{0..1}.up.kernel")


def test_the_plan_shows_the_layout_that_lint_advises_for_a_mistyped_and_swapped_rule():
    """Its correction alone would shard the wrong axis."""
    plan = plan_of(without(r".*output\.kernel") | {r".*outptu\.kernel": (None, None, "model")})
    fixes = [p.fix for p in plan.lint().problems if p.kind == "swapped"]

    assert [True] * 2 == [fix.endswith("change rule 8 to ('model', None, None)") for fix in fixes]
    assert [0] == [row.axis for row in plan.memory.rows if row.path.endswith("output.kernel")]


def test_a_bias_without_a_rule_is_sharded_as_its_kernel_will_be():
    """The plan advises both in one printout, and lint too, if the kernel is only now to be sharded."""
    kernel = plan_of({}, [*make_dense("up", (64, 256))])
    fixes = {p.subject: p.fix for p in kernel.problems if p.kind == "no rule"}
    swapped = plan_of(without(r".*up\.bias") | {UP: ("model", None)})
    (bias,) = {p.fix for p in swapped.lint().problems if p.subject.endswith("up.bias")}

    assert "(None, 'model')" in fixes["up.kernel"]
    assert "('model',)" in fixes["up.bias"]
    assert "('model',)" in bias


def test_a_swapped_kernel_whose_heads_cannot_be_split_is_replicated():
    """So the fix names a layout in any case."""
    roles = AxisRoles(("in.0", "out.0"), 16), AxisRoles(("in.0", "out.0"), 16)
    variables = [
        VariableSpec(f"attention.{name}.kernel", shape, "float32", use=use)
        for name, shape, use in (("query", (64, 96), roles[0]), ("output", (96, 64), roles[1]))
    ]
    (problem,) = plan_of({r"attention\.query\.kernel": ("model", None)}, variables).lint().problems

    assert problem.fix.endswith("change rule 1 to (None, None)")


def test_only_a_weight_with_rows_is_called_a_table():
    """A kernel of the same shape is a kernel."""
    variables = [*decoder(), weight("head.kernel", (ROWS, HIDDEN), "out.0", "in.0")]
    table, head = (
        plan_of(but({r".*embeddings": (None, None), r"head": (None, None)}), variables).lint().problems
    )

    assert ("replicated table", "replicated kernel") == (table.kind, head.kind)
    assert "tokens.embeddings: a table of 512 x 64 is replicated" == table.what
    assert (
        "head.kernel: a kernel of 512 x 64, with as many outputs as a table has rows, is replicated"
        == head.what
    )


PAIRS = {
    "as meant": ({}, set()),
    "swapped rows": ({r"dense_(1|4)\.kernel": (None, "model")}, {"dense_1", "dense_4"}),
    "swapped columns": ({r"(dense|dense_3)\.kernel": ("model", None)}, {"dense", "dense_3"}),
    "one swapped": ({r"dense_4\.kernel": (None, "model")}, {"dense_4"}),
    "no rows": ({r"dense_(1|4)\.kernel": (None, None)}, {"dense_1", "dense_4"}),
    "one without columns": ({r"dense\.kernel": (None, None)}, {"dense"}),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("is_gated", [False, True])
def test_pairs_of_a_model_without_blocks_are_found(name, is_gated):
    """Two wide layers of one size with a narrow one after each, between layers of other sizes."""
    slip, expected = PAIRS[name]
    variables = [*make_dense("dense_9", (24, HIDDEN))]
    for first, gate, second in (("dense", "dense_6", "dense_1"), ("dense_3", "dense_7", "dense_4")):
        for each in (first, gate) if is_gated else (first,):
            variables += make_dense(each, (HIDDEN, WIDE))
        variables += make_dense(second, (WIDE, HIDDEN))
    columns, rows = r"(dense|dense_[367])\.", r"dense_(1|4)\."
    good = {
        columns + "kernel": (None, "model"),
        columns + "bias": ("model",),
        rows + "kernel": ("model", None),
    }
    rules = slip | {pattern: specs for pattern, specs in good.items() if pattern not in slip}
    plan = make_plan(
        [*variables, *make_dense("head", (HIDDEN, 10))],
        LayoutMap(Mesh(None, f"data={DATA},model={MODEL}"), rules, rest="replicated"),
    )

    assert () == plan.errors
    assert expected == {subject.partition(".")[0] for _, subject in found_all(plan)}


TAKERS_OF_ANOTHER_ORDER = {
    "two branches": [(8, 32), (8, 32), (32, 8), (32, 8)],
    "narrow first": [(32, 8), (8, 32), (32, 8), (8, 32)],
    "two heads": [(8, 32), (32, 4), (32, 12), (16, 32), (32, 8)],
}


@pytest.mark.parametrize("name", TAKERS_OF_ANOTHER_ORDER)
def test_layers_in_an_unclear_order_are_in_no_pair(name):
    """Any layout of them is passed, since the shapes do not show which kernel takes which outputs."""
    shapes = TAKERS_OF_ANOTHER_ORDER[name]
    variables = [weight(f"{'abcde'[n]}.kernel", shape, "in.0", "out.0") for n, shape in enumerate(shapes)]

    assert [] == found(plan_of({r".*": (None, "model")}, variables))


QUERY, KEY, VALUE = {"attention.query"}, {"attention.key"}, {"attention.value"}


@pytest.mark.parametrize(
    ("slip", "found_at"),
    [
        ({r".*(query|key|value)\.kernel": ("model", None, None)}, QUERY | KEY | VALUE),
        ({r".*query\.kernel": ("model", None, None)}, QUERY),
        (
            {r".*value\.kernel": ("model", None, None)},
            QUERY | VALUE,
        ),  # of the query: that the three are not alike
        ({r".*output\.kernel": (None, None, "model")}, {"attention.output"}),
        ({r".*up\.kernel": ("model", None)}, {"up"}),
        ({r".*down\.kernel": (None, "model")}, {"down"}),
        ({r".*up\.kernel": ("model", None), r".*down\.kernel": (None, "model")}, {"up", "down"}),
    ],
)
def test_an_axis_for_the_other_is_found(slip, found_at):
    """A sharding that divides, in a layout that can be made: the plan alone has nothing to say of it."""
    plan = plan_of(but(slip) | {r".*bias": (None,)}, [v for v in decoder() if "bias" not in v.path])
    kernels = {
        p.subject.split(".", 2)[2].removesuffix(".kernel")
        for p in plan.lint().problems
        if p not in plan.problems
    }

    assert () == plan.errors
    assert found_at == kernels


def test_a_mistake_that_is_fixed_as_reported_is_gone():
    """Queries, keys and values whose axes are swapped: in the layouts that the fix names lint finds nothing."""
    plan = plan_of(but({r".*(query|key|value)\.kernel": ("model", "data", None)}))
    (fix,) = {p.fix for p in plan.lint().problems if p.kind == "swapped"}

    assert "its axes seem to be swapped; change rule 1 to ('data', 'model', None)" == fix
    assert [] == found(plan_of(but({r".*(query|key|value)\.kernel": ("data", "model", None)})))


def test_layers_that_only_have_the_same_sizes_are_not_taken_for_neighbours():
    """In a model that is flat, two layers may take in what one puts out: which of them is next is not known."""
    variables = [
        weight(f"{name}.kernel", shape, "in.0", "out.0")
        for name, shape in (("a", (8, 16)), ("b", (16, 32)), ("c", (16, 64)))
    ]
    rules = {r"a\.": (None, "model"), r"b\.": (None, "model"), r"c\.": ("model", None)}

    assert [] == found(plan_of(rules, variables))


def test_heads_in_one_axis_are_not_split():
    """Eight heads of 16 in one axis of 128: sixteen devices divide the axis and not the heads."""
    variables = decoder(flat=True)
    for mesh, kinds in ((f"data=2,model={HEADS}", set()), ("data=2,model=16", {"heads"})):
        plan = plan_of(FLAT, variables, mesh)
        assert () == plan.errors
        assert kinds == {kind for kind, _ in found(plan)}
    heads = [p for p in plan.lint().problems if p.kind == "heads"]
    assert ("heads", "8 of size 16, in 16 shards") in heads[0].facts
    assert {"query", "key", "value", "output"} == {p.subject.split(".")[3] for p in heads}


def test_one_head_of_keys_that_no_mesh_divides_is_no_slip():
    """It has to be replicated where the queries' heads are sharded."""
    variables = [
        weight("attention.query.kernel", (HIDDEN, HEADS, SIZE), "in.0", "out.0", "out.1"),
        *(
            weight(f"attention.{p}.kernel", (HIDDEN, 1, SIZE), "in.0", "out.0", "out.1")
            for p in ("key", "value")
        ),
    ]
    layout_map = LayoutMap(Mesh(None, "model=4"), {".*": (None, "model", None)}, uneven="shrink")

    assert [] == found(make_plan(variables, layout_map))


def test_a_sum_over_the_batchs_dim_is_clear_where_rules_or_no_compiler_say_what_moves():
    """With rules for activations it is the weight, and on engines that put such weights together, too."""
    rules = but({r".*(up|down)\.kernel": ("data", None), r".*up\.bias": (None,)})
    kinds = {kind for kind, _ in found(plan_of(rules, free_activations=True))}
    layout_map = LayoutMap(Mesh(None, "data=2,model=4"), rules, {r"blocks\.\d+": ("data", None, None)})
    with_activations = make_plan(
        decoder(), layout_map, layers=["blocks.0", "blocks.1"], free_activations=True
    )

    assert {"sum over the batch dim"} == kinds
    assert [] == found(with_activations)
    assert [] == found(plan_of(rules, free_activations=False))


@pytest.mark.parametrize("specs", [(None, "data"), ("data", None)])
def test_a_table_over_the_batchs_dim_is_the_one_finding_also_with_a_cost(specs):
    """The sums of the layers after it have no finding, and the fix is a layout over another dim."""
    rules = but({r".*embeddings": specs})
    plan = plan_of(rules, free_activations=True)
    sums = [Collective("all_reduce", ("data",), 2, 2**28, f"blocks.{n}.norm") for n in range(2)]
    with_cost = replace(plan, cost=costs.plan(None, sums).cost)

    expected = [("sum over the batch dim", "tokens.embeddings")]
    assert expected == found(plan) == found(with_cost)
    assert {"change rule 1 to ('model', None)"} == {
        p.fix.rpartition("; ")[2] for p in with_cost.lint().problems
    }
    assert [] == found(plan_of(rules, free_activations=False))


def test_the_fix_for_an_existing_layout_names_the_new_one():
    """A model that was sharded without a map has no rules to change."""
    plan = plan_of(but({UP: ("model", None)}))
    existing = [replace(a, match=None) for a in plan.assignments]
    (fix,) = {p.fix for p in replace(plan, assignments=tuple(existing)).lint().problems}

    assert fix.endswith("its axes seem to be swapped; lay it out as (unsharded, model)")


def test_the_batchs_dim_is_that_of_the_activations_or_one_of_its_names_or_the_one_given():
    """Else it is not known, and the text says so."""
    variables, rules = decoder(), GOOD
    layout_map = LayoutMap(Mesh(None, "rows=2,model=4"), rules, {r"blocks\.\d+": ("rows", None, None)})
    told = make_plan(variables, layout_map, layers=["blocks.0"]).lint()
    unknown = plan_of(rules, mesh="rows=2,model=4")

    assert ("rows", []) == (told.batch_dim, list(told))
    assert "data" == plan_of(rules).lint().batch_dim
    assert [("unused dim", "rows")] == found(unknown)
    assert "say batch_dim='rows'" in str(unknown.lint())
    assert "the batch dim is not known" in str(unknown.lint())
    assert [] == found(unknown, batch_dim="rows")
    with pytest.raises(PlanError, match="lint: batch_dim 'row' is not a dim of the mesh"):
        unknown.lint(batch_dim="row")


def test_a_dim_of_the_mesh_that_nothing_is_sharded_over_is_reported():
    """With how many devices do the same as others."""
    (problem,) = plan_of(GOOD, mesh="data=2,model=4,spare=3").lint().problems

    assert ("unused dim", "spare") == (problem.kind, problem.subject)
    assert (
        "groups of 3 devices store and compute the same: 8 of the 24 devices would be enough" == problem.why
    )


def test_a_scale_with_a_rule_that_contradicts_its_kernel_is_reported():
    """A scale that follows its kernel is right by itself, and one that is replicated costs little."""

    def derived(layout):
        kernel = weight("up.kernel", (HIDDEN, WIDE), "in.0", "out.0")
        scale = VariableSpec(
            "up.scale", (WIDE,), "float32", parent="up.kernel", axes=((1,),), parent_shape=(HIDDEN, WIDE)
        )
        rules = {r"up\.kernel": (None, "model")} | ({} if layout is None else {r"up\.scale": layout})
        return found(plan_of(rules, [kernel, scale]))

    assert [] == derived(None) == derived(("model",)) == derived((None,))
    assert [("contradicts its kernel", "up.scale")] == derived(("data",))


def test_errors_of_the_plan_are_counted():
    """Weights with errors are not judged, so that "nothing found" alone would be wrong."""
    findings = plan_of(GOOD, mesh="data=2,model=3").lint()
    assert (
        [],
        "nothing found beside 21 errors of the plan; batches are assumed to be sharded over data",
    ) == ([*findings], findings.summary)


def test_repeated_blocks_are_reported_once():
    """In the text, with the numbers of all of them, and the line below counts what is reported."""
    plan = plan_of(but({r".*up\.bias": ("data",)}))
    text, merged = str(plan.lint()), [*plan.lint()]

    assert ["blocks.{0..1}.up.bias"] == [problem.subject for problem in merged]
    assert str(plan).endswith(
        "\n\nLint: 1 finding; batches are assumed to be sharded over data; to see them: plan.lint()"
    )
    assert text.startswith(
        "contradicts its kernel: blocks.{0..1}.up.bias: is sharded differently from up.kernel, with which it is used\n"
    )
    assert text.endswith("\nLint: 1 finding; batches are assumed to be sharded over data")


@given(strategies.plans(layers=True))
def test_any_plan_is_linted_and_says_the_same_when_it_was_written_and_read(drawn):
    """No plan is too odd, and what lint goes by is in the plan's JSON."""
    _, _, plan = drawn
    text = plan.to_json()
    again = Plan.from_json(text)

    assert str(plan.lint()) == str(again.lint())
    assert text == again.to_json()


@given(st.sampled_from(list(SLIPS)), st.booleans())
def test_slips_are_found_in_a_plan_that_was_written_and_read(name, free):
    """Uses and who lays out activations are kept."""
    plan = plan_of(but(SLIPS[name][0]), free_activations=free)

    assert str(plan.lint()) == str(Plan.from_json(plan.to_json()).lint())


KERNEL, BIG = "blocks.0.up.kernel", 2**28


@pytest.mark.parametrize(
    ("collective", "kinds"),
    [
        (Collective("all_gather", ("model",), 2, BIG, KERNEL), {"gathered weight", "dim that only costs"}),
        (Collective("all_gather", ("data",), 2, BIG, KERNEL), set()),  # the batch is sharded over it
        (Collective("all_gather", ("model",), 2, 2**10, KERNEL), {"dim that only costs"}),  # too little
        (
            Collective("all_gather", ("model",), 2, BIG, "blocks.*.up.kernel"),
            {"gathered weight", "dim that only costs"},
        ),
        (Collective("all_reduce", ("data",), 2, BIG, "blocks.0.up"), {"summed activation"}),
        (Collective("all_reduce", ("data",), 1, BIG, KERNEL), set()),  # its gradient
        (Collective("all_reduce", ("data",), 1, 4), set()),  # the loss
        (Collective("all_gather", ("model",), 2, BIG, "blocks.0.up"), set()),  # what was computed in parts
    ],
)
def test_what_travels_without_need_is_reported(collective, kinds):
    """A gathered weight that could compute in parts, rows summed over all devices; and nothing that must be."""
    rules = {r"blocks\.0\.up\.kernel": ("data", "model"), "tokens|blocks": ("data", None)}
    fsdp = [*costs.collectives()][:2]
    plan = costs.plan(rules, [*fsdp, collective, Collective("permute", ("data",), 1, BIG)])

    assert kinds == {problem.kind for problem in plan.lint().problems} - {"sum over the batch dim"}


@pytest.mark.parametrize(("cause", "count"), [("blocks.*.attn", 1), ("blocks.*.attn.qkv", 0)])
def test_a_split_of_fused_outputs_that_crosses_shards_is_reported(cause, count):
    """The block that splits them reshards them. A collective of the kernel itself has another cause."""
    sizes = {"attn.qkv": (64, 192), "attn.proj": (64, 64)}
    variables = [
        w for n in range(2) for name, shape in sizes.items() for w in make_dense(f"blocks.{n}.{name}", shape)
    ]
    rules = {r".*qkv\.kernel": (None, "model"), r".*proj\.kernel": ("model", None)}
    plan = costs.plan(rules, [Collective("all_gather", ("model",), 2, BIG, cause)], variables=variables)
    texts = [str(p) for p in plan.lint().problems if p.kind == "resharded outputs"]

    assert 2 * count == len(texts)
    assert all("its fused outputs are resharded over model in each step" in text for text in texts)


def test_a_finding_of_a_step_says_what_it_costs():
    """In bytes and time, with the rules to add."""
    plan = costs.plan(None, [Collective("all_gather", ("model",), 2, BIG, KERNEL, "forward")])
    finding = next(p for p in plan.lint().problems if p.kind == "gathered weight")

    why = "the batch is not sharded over model, so devices along it all compute with the whole weight"
    fix = "lay out the outputs of this layer and of the layer before, so that each device computes a part: "
    assert (
        "blocks.0.up.kernel: it is gathered over model in each step\n"
        "  layout     (data, model)     rule 1  .*up\\.kernel\n"
        "  in a step  448.0 MiB of 448.0 MiB sent (100 %), 1.04 ms\n"
        f"  why        {why}\n"
        f"  fix        {fix}a rule of layout_map.activations for the output of blocks.0.up (of a pytree: "
        "jax.lax.with_sharding_constraint where it is computed) that shards its first axis over data and its last "
        "axis over model"
    ) == str(finding)
