"""Find the fewest rules that reproduce a plan's layouts, so that a user can edit and replan them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from layoutmap.core.errors import RuleError, join_names
from layoutmap.core.paths import split_path_at_numbers
from layoutmap.core.specs import Specs, replace_unsharded_by_none
from layoutmap.core.variables import Assignment, Kind
from layoutmap.plan.planner import make_plan_table
from layoutmap.plan.table import PlanTable
from layoutmap.rules.merged_rules import make_rules_for_path_groups
from layoutmap.rules.rule_set import RuleSet

_RULED = (Kind.WEIGHT, Kind.STATE, Kind.RNG)


def derive_rules(plan: PlanTable) -> RuleSet:
    """Return few rules that reproduce the layouts of a plan, which is checked by planning again.

    Raises:
        RuleError: No rules give these layouts.

    Example:
        >>> from layoutmap.core.layout import Layout
        >>> from layoutmap.core.mesh import Mesh
        >>> from layoutmap.core.variables import VariableSpec
        >>> mesh = Mesh("data=2,model=4")
        >>> found = {f"h.{i}.{name}.kernel": specs for i in range(2) for name, specs in
        ...          (("up", (None, "model")), ("gate", (None, "model")), ("norm", (None, None)))}
        >>> variables = [(VariableSpec(path, (8, 8), "float32"), Layout(specs, mesh)) for path, specs in found.items()]
        >>> print(derive_rules(PlanTable(mesh, tuple(Assignment(*each) for each in variables))))
        RuleSet on data=2, model=4, 1 rule
           1  .*\\.(up|gate)\\.kernel$  (unsharded, model)
        the rest is replicated
    """
    groups: dict[tuple[object, Specs], list[str]] = {}
    ruled = [a for a in plan.assignments if a.variable.kind in _RULED]
    for a in ruled:
        if not a.variable.is_derived:
            groups.setdefault((split_path_at_numbers(a.variable.path), _list_specs_and_memory(a)), []).append(
                a.variable.path
            )
    owners = {path: a.variable.path for a in ruled for path in (a.variable.path, *a.variable.aliases)}
    rules = make_rules_for_path_groups({tuple(paths): specs for (_, specs), paths in groups.items()}, owners)
    # Derived variables get the layout of their parent, so only those with a different layout need a rule.
    exceptions = {
        a.variable.path: _list_specs_and_memory(a) for a in _iterate_mismatched_assignments(plan, rules)
    }
    rules = {f"{re.escape(path)}$": specs for path, specs in exceptions.items()} | rules
    if wrong := [a.variable.path for a in _iterate_mismatched_assignments(plan, rules)]:
        raise RuleError(
            f"{join_names(wrong)}: no rules give {'it its layout' if len(wrong) == 1 else 'them their layouts'}",
            facts={"layout": str(plan[wrong[0]].layout)},
            why="it is derived from another variable, as for a quantized kernel, and inherits that variable's rule",
            fix="exclude it from the plan, and set its layout by hand",
        )
    return _make_rule_set(plan, rules)


class _MemorySpec(NamedTuple):
    """A kind of host memory. It is the last item of specs, so that variables share a rule only if both are equal."""

    kind: str


def _list_specs_and_memory(assignment: Assignment) -> Specs:
    specs, memory = (
        replace_unsharded_by_none(assignment.layout.sharding_specs),
        assignment.layout.host_memory,
    )
    return (*specs, _MemorySpec(memory)) if memory else specs


def _make_rule_set(plan: PlanTable, rules: dict[str, Specs]) -> RuleSet:
    uneven = "pad" if any(a.is_padded for a in plan.assignments) else "error"
    rule_set = RuleSet(plan.mesh, uneven=uneven, rest="replicated")
    for pattern, specs in rules.items():
        *axes, last = specs or (None,)
        if isinstance(last, _MemorySpec):
            rule_set.add(pattern, axes, memory=last.kind)
        else:
            rule_set.add(pattern, specs)
    return rule_set


def _iterate_mismatched_assignments(plan: PlanTable, rules: dict[str, Specs]) -> Iterator[Assignment]:
    """Yield the variables of a plan to which these rules would give a different layout than the plan does."""
    planned = make_plan_table(
        [a.variable for a in plan.assignments], _make_rule_set(plan, rules), complete=False
    )
    for a, found in zip(planned.assignments, plan.assignments, strict=True):
        if found.variable.kind in _RULED and a.layout != found.layout:
            yield found
