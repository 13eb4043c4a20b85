"""Following every piece of advice of a plan and of lint, in any order, ends with a plan without problems."""

from __future__ import annotations

import itertools
import re

import pytest
from advice import Rules, follow
from cases import EVERYTHING
from decoders import MESHES, make_dense, make_weight, models
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from layoutmap import Layout, LayoutMap, Mesh, Plan
from layoutmap.plan.problems import merge_problems
from layoutmap.plan.suggest_rules import suggest_rules
from layoutmap.rules.merged_rules import make_exact_number_regex
from layoutmap.scope.plan import make_plan

MOST_STEPS = 300


@st.composite
def rules(draw, variables, mesh):
    """Layouts that fit, of some of the variables."""
    for v in draw(st.lists(st.sampled_from(variables), max_size=6, unique=True)):
        specs = draw(st.permutations([*mesh.dim_names, *[None] * len(v.shape)]))[: len(v.shape)]
        if not Layout(specs, mesh).find_uneven_axes(v.shape):
            yield f"{re.escape(v.path)}$", tuple(specs)


def list_advice(plan: Plan, rules: Rules) -> list[tuple[Rules, str]]:
    """Return the rules after each piece of advice, which is read as it is written, and the advice."""
    problems = merge_problems([*plan.errors, *plan.warnings, *plan.lint()])
    found = [(follow(p, rules), str(p)) for p in problems if p.kind != "unused dim"]
    for row in plan.memory.rows:
        specs = tuple(row.dim if axis == row.axis else None for axis in range(row.assignments[0].layout.rank))
        pattern = make_exact_number_regex([a.variable.path for a in row.assignments])
        found.append((rules.put(pattern, specs, 1), f"{row.path}: axis {row.axis} over {row.dim}"))
    return found


def plan_rules(variables, mesh, rules, rest=None):
    return make_plan(variables, LayoutMap(mesh, dict(rules.rows), rest=rest))


def follow_all(data, variables, mesh, rules, rest=None) -> tuple[list[Plan], list[str]]:
    """Return the plans while advice was followed in a drawn order, until there is none."""
    seed = data.draw(st.randoms(use_true_random=False))
    steps, plans = [str(rules)], list[Plan]()
    for _ in range(MOST_STEPS):
        plan = plan_rules(variables, mesh, rules, rest)
        plans.append(plan)
        advice = list_advice(plan, rules)
        if not advice:
            break
        rules, text = seed.choice(advice)
        steps += [text, str(rules)]
    assert [] == advice, "\n".join(steps[-12:])
    assert "no problems" in plan.verdict.headline
    return plans, steps


# Shrinking takes minutes
@settings(max_examples=max(1, settings().max_examples // 5), phases=[Phase.generate])
@given(st.data())
def test_all_advice_leads_to_a_plan_without_problems(data):
    """Each piece is followed on its own, as the user finds it, and none leads back."""
    variables = data.draw(models())
    mesh = Mesh(None, data.draw(st.sampled_from(MESHES)))
    follow_all(data, variables, mesh, Rules(tuple(data.draw(rules(variables, mesh)))))


def suggest_map(variables, mesh):
    """Return the suggested rules as a user edits them."""
    suggested = suggest_rules(make_plan(variables, LayoutMap(mesh)))
    return Rules(
        tuple(
            (
                rule.pattern,
                tuple(None if spec == "unsharded" else spec for spec in rule.layout.sharding_specs),
            )
            for rule in suggested.rules
        )
    )


def draw_typo(data, rules, plan):
    """Return the rules with two letters of a word in other places."""
    number, (pattern, specs) = data.draw(st.sampled_from([*enumerate(rules.rows)]))
    places = [
        at
        for word in re.finditer(r"(?<!\\)[a-z]{2,}", pattern)
        for at in range(word.start(), word.end() - 1)
        if pattern[at] != pattern[at + 1]
    ]
    at = data.draw(st.sampled_from(places))
    typo = pattern[:at] + pattern[at + 1] + pattern[at] + pattern[at + 2 :]
    return Rules((*rules.rows[:number], (typo, specs), *rules.rows[number + 1 :]))


def draw_removal(data, rules, plan):
    """Return the rules without one."""
    return rules.delete(data.draw(st.integers(1, len(rules.rows))))


def draw_swap(data, rules, plan):
    """Return the rules with the specs of two axes of one rule swapped, or of two rules in a row."""
    first = data.draw(st.integers(1, len(rules.rows)))
    for number in range(first, 1 + data.draw(st.integers(first, min(first + 1, len(rules.rows))))):
        specs = rules.rows[number - 1][1]
        others = [
            swapped
            for swapped in sorted(
                {*map(tuple, (specs[n:] + specs[:n] for n in range(1, len(specs))))}, key=str
            )
            if swapped != specs
            and not plan_rules(
                [a.variable for a in plan.assignments], plan.mesh, rules.change(number, swapped)
            ).errors
        ]
        if others:
            rules = rules.change(number, data.draw(st.sampled_from(others)))
    return rules


def draw_odd_block(data, rules, plan):
    """Return the rules with another one before them, for one weight of one block."""
    blocks = sorted({path.partition(".")[2].partition(".")[0] for path in plan if path.startswith("blocks.")})
    at = f"blocks.{data.draw(st.sampled_from(blocks))}."
    path = data.draw(st.sampled_from([path for path in plan if path.startswith(at)]))
    specs = data.draw(st.permutations([*plan.mesh.dim_names, *[None] * len(plan[path].variable.shape)]))
    specs = data.draw(st.sampled_from([specs[: plan[path].layout.rank], [None] * plan[path].layout.rank]))
    assume(not Layout(specs, plan.mesh).find_uneven_axes(plan[path].variable.shape))
    return rules.put(f"{re.escape(path)}$", tuple(specs), 1)


@pytest.mark.parametrize("mutate", [draw_typo, draw_removal, draw_swap, draw_odd_block])
@settings(max_examples=100 if EVERYTHING else 1, phases=[Phase.generate], deadline=None)
@given(st.data())
def test_all_advice_repairs_a_map_with_one_mistake(mutate, data):
    """A device then holds no more bytes than with the map without the mistake.

    A mistake may leave a kernel sharded by rows that was sharded by columns: two rules are swapped, or the rule of an
    odd block is missing, and that of the other blocks matches it. Nothing else is wrong then, and the kernel's bias is
    replicated. So for these, biases do not count.
    """
    variables = data.draw(models())
    mesh = Mesh(None, data.draw(st.sampled_from(MESHES)))
    rest = data.draw(st.sampled_from([None, "replicated"]))
    good = suggest_map(variables, mesh)
    original = plan_rules(variables, mesh, good, rest)
    rules = mutate(data, good, original)
    mistaken = plan_rules(variables, mesh, rules, rest)
    is_resharded = any(
        not a.layout.is_fully_replicated() and a.layout != original[a.variable.path].layout
        for a in mistaken.assignments
        if not a.variable.path.endswith("bias")
    )
    plans, steps = follow_all(data, variables, mesh, rules, rest)
    if mutate is not draw_odd_block:
        after, before = (
            sum(
                a.device_bytes
                for a in plan.assignments
                if not (is_resharded and a.variable.path.endswith("bias"))
            )
            for plan in (plans[-1], original)
        )
        assert after <= before, "\n".join(steps)


@settings(max_examples=100 if EVERYTHING else 3, phases=[Phase.generate], deadline=None)
@given(st.data())
def test_all_advice_repairs_own_names_with_several_mistakes(data):
    """The rules do not match from the start, one word has a typo, and the output kernel of attention is swapped."""
    variables = [make_weight("sym.weight", (512, 64), "rows", "out.0")]
    sizes = {f"look.{name}": (64, 64) for name in ("merge", "qq", "kk", "vv")}
    for name, (inputs, outputs) in (sizes | {"wide": (64, 256), "narrow": (256, 64)}).items():
        for cell in range(2):
            variables.append(make_weight(f"cells.{cell}.{name}.weight", (outputs, inputs), "out.0", "in.0"))
            variables.append(make_weight(f"cells.{cell}.{name}.bias", (outputs,), "out.0"))
    start = data.draw(st.sampled_from(["", ".*"]))
    rules = {
        "sym": (None, "model"),
        rf"{start}look\.(qq|kk|vb)\.weight": ("model", None),
        rf"{start}look\.(qq|kk|vv)\.bias": ("model",),
        rf"{start}look\.merge\.weight": ("model", None),
        rf"{start}wide\.weight": ("model", None),
        rf"{start}narow\.weight": (None, "model"),
    }
    mesh = Mesh(None, "batch=2,model=4")
    plans, steps = follow_all(data, variables, mesh, Rules(tuple(rules.items())), "replicated")

    for names, specs in ((("qq", "kk", "vv"), ("model", "unsharded")), (("merge",), ("unsharded", "model"))):
        expected = dict.fromkeys(names, specs)
        actual = {name: plans[-1][f"cells.1.look.{name}.weight"].layout.sharding_specs for name in names}
        assert expected == actual, "\n".join(steps)
    assert start or "vb" not in steps[-1]


@pytest.mark.parametrize(
    ("sizes", "layouts"),
    [
        # One dim is right for both axes of b, so it shards the first one, and the other axis is not sharded.
        (
            {"a": (64, 96), "b": (96, 128), "c": (128, 64)},
            {"b.bias": ("data",), "a.kernel": (None, "model"), "c.kernel": ("model", None)}
            | {"b.kernel": specs},
        )
        for specs in (("data", "model"), ("model", "data"))
    ]
    + [
        # No kernel takes the outputs of c, so its kernel is right, and not its bias.
        (
            {"a": (32, 256), "b": (256, 24), "c": (24, 32)},
            {"a.kernel": (None, "model"), "a.bias": ("model",), "b.kernel": ("model", None)}
            | {"c.kernel": ("model", None), "c.bias": ("model",)},
        )
    ],
)
def test_no_advice_undoes_another(sizes, layouts):
    """A kernel is not swapped to and fro."""
    variables = [w for name, pair in sizes.items() for w in make_dense(f"blocks.0.{name}", pair)]
    mesh = Mesh(None, "data=4,model=2")
    rules = Rules(tuple((rf"blocks\.0\.{re.escape(name)}$", row) for name, row in layouts.items()))
    for _ in range(8):
        for problem in plan_rules(variables, mesh, rules, "replicated").lint():
            rules = follow(problem, rules)
            break
    assert [] == [*plan_rules(variables, mesh, rules, "replicated").lint()]


def test_advice_for_three_kernels_in_a_row_is_for_the_first():
    """All three are sharded by rows. With the first one by columns, the second is right, and so is its bias."""
    sizes = {"a": (64, 256), "b": (256, 128), "c": (128, 64)}
    variables = [w for name, pair in sizes.items() for w in make_dense(f"blocks.0.{name}", pair)]
    rules = Rules(((r".*\.kernel$", ("model", None)), (r".*\.c\.bias$", (None,))))
    found = plan_rules(variables, Mesh(None, "batch=2,model=4"), rules, "replicated").lint()
    assert ["blocks.0.a.kernel"] == [problem.subject for problem in found]


def test_no_advice_shards_the_bias_of_a_kernel_in_unknown_order():
    """If the kernel's axes are swapped, its bias would be wrong, too. Without a mistake, a whole bias costs little."""
    sizes = {"look": (64, 64), "tag": (64, 32), "merge": (64, 64)}
    variables = [w for name, pair in sizes.items() for w in make_dense(f"blocks.0.{name}", pair)]
    rules = Rules(((r".*(look|tag|merge)\.kernel$", (None, "model")), (r".*tag\.bias$", ("model",))))
    plan = plan_rules(variables, Mesh(None, "batch=2,model=4"), rules)

    fixes = {"blocks.0.look.bias", "blocks.0.merge.bias"}
    assert (
        fixes
        == {p.subject for p in plan.problems if p.fix.endswith("= (None,)")}
        == {p.subject for p in plan.problems}
    )
    assert [] == [*plan.lint()]
    assert (
        "2 sharded weights not checked"
        in plan_rules(variables, plan.mesh, rules, "replicated").verdict.headline
    )


@settings(max_examples=100 if EVERYTHING else 2, phases=[Phase.generate], deadline=None)
@given(st.data())
def test_advice_for_a_bias_beside_a_swapped_kernel_is_final(data):
    """A bias without a rule is sharded as its kernel is after all advice was followed, and never again."""
    variables = data.draw(models())
    mesh = Mesh(None, data.draw(st.sampled_from(MESHES)))
    rest = data.draw(st.sampled_from([None, "replicated"]))
    good = suggest_map(variables, mesh)
    good = Rules(tuple(row for row in good.rows if "bias" not in row[0]))
    original = plan_rules(variables, mesh, good, rest)
    plans, steps = follow_all(data, variables, mesh, draw_swap(data, good, original), rest)
    for path in original:
        if path.endswith("bias"):
            layouts = [layout for layout, _ in itertools.groupby(plan[path].layout for plan in plans)]
            assert len(layouts) <= 2, "\n".join([path, *steps])
