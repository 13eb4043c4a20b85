"""Following every piece of advice of a plan and of lint, in any order, ends with a plan without problems."""

from __future__ import annotations

import re

from decoders import MESHES, models
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from layoutmap import Layout, LayoutMap, Mesh, Plan
from layoutmap.plan.problems import merge_problems
from layoutmap.scope.plan import make_plan

MOST_STEPS = 300


@st.composite
def rules(draw, variables, mesh):
    """Layouts that fit, of some of the variables."""
    for v in draw(st.lists(st.sampled_from(variables), max_size=6, unique=True)):
        specs = draw(st.permutations([*mesh.dim_names, *[None] * len(v.shape)]))[: len(v.shape)]
        if not Layout(specs, mesh).find_uneven_axes(v.shape):
            yield v.path, specs


def list_advice(plan: Plan) -> list[dict[str, Layout]]:
    """Return each piece of advice as the layouts that it gives, by path."""
    found = []
    for p, each in merge_problems(plan.warnings):
        assert "no rule" == p.kind, p
        specs = re.search(r" = (\(.*\))$", p.fix)
        assert specs is not None, p.fix
        layout = Layout(eval(specs[1]), plan.mesh)
        found.append({one.subject: layout for one in each})
    for row in plan.memory.rows:
        specs = [row.dim if axis == row.axis else None for axis in range(row.assignments[0].layout.rank)]
        found.append({a.variable.path: Layout(specs, plan.mesh) for a in row.assignments})
    return found + [read_finding(p, plan) for p in plan.lint() if p.kind != "unused dim"]


def read_finding(problem, plan: Plan) -> dict[str, Layout]:
    """Return the layouts that the fix of a finding gives."""

    def read_layout(text):
        specs = [
            None if each.strip() == "unsharded" else each.strip() for each in text.split(",") if each.strip()
        ]
        return Layout(specs, plan.mesh)

    if problem.kind == "odd one out":
        others = [(name, re.search(r"others \((.*)\)$", text)) for name, text in problem.facts]
        return {f"{problem.subject}.{name}": read_layout(each[1]) for name, each in others if each}
    if problem.kind == "query, key, value":
        axis, dims = re.fullmatch(r"shard axis (\d) of all three over (.*)", problem.fix).groups()
        block = problem.subject.rpartition("query")[0]
        layouts = {}
        for name, _ in problem.facts:
            v = plan[f"{block}{name}"].variable
            specs = [dims if number == int(axis) else None for number in range(len(v.shape))]
            heads = v.shape[int(axis)] // (v.use.head_size or 1)
            if heads % plan.mesh.dim_size(dims) == 0:
                layouts[v.path] = Layout(specs, plan.mesh)
        return layouts
    if problem.fix == "replicate it":
        return {problem.subject: Layout.replicated(plan.mesh, len(plan[problem.subject].variable.shape))}
    return {problem.subject: read_layout(re.search(r"\(([^()]*)\)$", problem.fix)[1])}


# Shrinking takes minutes
@settings(max_examples=max(1, settings().max_examples // 5), phases=[Phase.generate])
@given(st.data())
def test_all_advice_leads_to_a_plan_without_problems(data):
    """Each piece is followed on its own, as the user finds it, and none leads back."""
    variables = data.draw(models())
    mesh = Mesh(None, data.draw(st.sampled_from(MESHES)))
    layouts = {path: Layout(specs, mesh) for path, specs in data.draw(rules(variables, mesh))}
    seed = data.draw(st.randoms(use_true_random=False))
    for _ in range(MOST_STEPS):
        layout_map = LayoutMap(mesh, {re.escape(path): each for path, each in layouts.items()})
        plan = make_plan(variables, layout_map)
        assert not plan.errors, plan
        advice = list_advice(plan)
        if not advice:
            break
        layouts |= seed.choice(advice)
    assert [] == advice, (str(plan.lint()), plan.memory, layouts)
    assert "no problems" in plan.verdict.headline
