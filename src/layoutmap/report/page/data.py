"""Convert a plan to JSON data for its page. Shared texts are stored once.

A model has thousands of variables but only dozens of shapes, dtypes, and layouts, so a variable refers to these by
number. All bytes are computed here; the scripts of the page compute only the position of each slice.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from layoutmap.core.layout import Layout
from layoutmap.core.match import Match, Rule
from layoutmap.core.paths import replace_numbers_with_stars
from layoutmap.core.variables import Assignment, Kind
from layoutmap.plan.carried_cost import load_cost_package
from layoutmap.plan.memory import Memory, count_memory_by_purpose
from layoutmap.plan.problems import Problem, group_problems, sort_problems
from layoutmap.plan.table import PlanTable
from layoutmap.plan.verdict import Verdict
from layoutmap.report.explain import iterate_collective_rows
from layoutmap.report.rows import make_table_rows
from layoutmap.report.text import format_activation_rows

NO_RULE, NOT_ASKED = -1, -2


def make_page_data(plan: PlanTable, findings: Sequence[Problem] = ()) -> dict[str, object]:
    """Return a plan as lists and dicts for JSON. Equal plans give equal data."""
    return _PageData(plan).make_page_dict(findings)


def make_verdict_data(verdict: Verdict) -> dict[str, object]:
    """Return the verdict on a plan (can it be built, does it fit the memory) as a dict for JSON.

    All texts are formatted here, so the scripts of the page display them unchanged.
    """
    return {
        "mood": verdict.color_class,
        "fits": verdict.fits,
        "so_far": verdict.is_lower_bound,
        "says": verdict.headline,
        "needed": verdict.needed_bytes,
        "available": verdict.available_bytes,
        "moment": verdict.moment,
        "because": [[group.text, group.num_bytes] for group in verdict.because],
        "advice": [
            [
                a.format_headline(verdict.available_bytes or 0),
                *filter(None, dict.fromkeys([a.command, a.python])),
            ]
            for a in verdict.advice
        ],
        "untried": verdict.untried,
    }


class _UniqueValues(dict[Hashable, int]):
    """Dict that gives each distinct value a number, from 0 in the order of first use."""

    def get_or_add_number(self, value: Hashable) -> int:
        return self.setdefault(value, len(self))


class _PageData:
    def __init__(self, plan: PlanTable) -> None:
        self.plan = plan
        self.layouts, self.forms, self.rules = _UniqueValues(), _UniqueValues(), _UniqueValues()
        self.lists = _UniqueValues()  # distinct lists of other matching rules and of near misses
        self.texts = _UniqueValues()
        self._of_plan = frozenset(plan.problems)
        self._seen: dict[int, int] = {}  # number of each layout, by the layout's `id`
        self.number = {id(a): i for i, a in enumerate(plan.assignments)}
        self.by_path: dict[str, list[int]] = {}
        for i, a in enumerate(plan.assignments):
            for path in (a.variable.path, *a.variable.aliases):
                self.by_path.setdefault(path, []).append(i)

    def make_page_dict(self, findings: Sequence[Problem]) -> dict[str, Any]:
        plan, memory = self.plan, count_memory_by_purpose(self.plan)
        rows = make_table_rows(plan)
        row_of = {id(a): i for i, row in enumerate(rows) for a in row.assignments}
        variables = [self._make_variable_entry(a, row_of[id(a)]) for a in plan.assignments]
        return {
            "mesh": {
                "name": plan.mesh.name,
                "dims": [[dim.name, dim.size] for dim in plan.mesh.mesh_dims],
                "devices": plan.mesh.devices,
            },
            "bytes": [plan.global_bytes, plan.device_bytes],
            "memory": _sum_bytes_by_purpose(plan, memory),
            "variables": variables,
            "rows": [[row.path, row.rule_text, row.matches_weights] for row in rows],
            "problems": [self._make_problem_fields(*group) for group in _merge_problems(plan, findings)],
            "could_be_sharded": [
                [row.path, row.axis, row.dim, row.saved_bytes, [self.number[id(a)] for a in row.assignments]]
                for row in memory.rows
            ],
            "activations": format_activation_rows(plan),
            "forms": list(self.forms),
            "rules": list(self.rules),
            "lists": list(self.lists),
            "texts": list(self.texts),
            "layouts": list(self.layouts),
            "cost": plan.cost
            and load_cost_package().make_page_fields(
                plan.cost, memory.total - memory.gradients, self._find_first_variable_position
            ),
        }

    def _find_first_variable_position(self, starred_path: str) -> int | None:
        """Return the position of the first variable with a path, in which stars are numbers, or None if none has it."""
        if "*" in starred_path:
            return next(
                (
                    n[0]
                    for path, n in self.by_path.items()
                    if replace_numbers_with_stars(path) == starred_path
                ),
                None,
            )
        return next(iter(self.by_path.get(starred_path, ())), None)

    def _make_variable_entry(self, a: Assignment, row: int) -> list[object]:
        v, match = a.variable, a.match
        shard = a.shard_bytes if a.fits else None
        form = self.forms.get_or_add_number(
            (v.shape, v.dtype, self._get_layout_number(a.layout), v.global_bytes, shard)
        )
        rule = (
            NOT_ASKED
            if match is None or match.has_existing_layout
            else self._get_rule_number(match.rule)
            if match.rule
            else NO_RULE
        )
        more = {
            "model": v.model,
            "aliases": v.aliases,
            "parent": v.parent and self._find_parent_position(a),
            "step": tuple(
                self.texts.get_or_add_number(": ".join(row)) for row in iterate_collective_rows(self.plan, a)
            ),
            "global_init": a.global_init and self.texts.get_or_add_number(a.global_init),
            **(self._make_match_fields(match, a) if match else {}),
        }
        written: list[Any] = [v.path, form, v.kind, row, rule]
        given = {name: value for name, value in more.items() if value not in (None, "", ())}
        return [*written, given] if given else written

    def _make_match_fields(self, match: Match, a: Assignment) -> dict[str, object]:
        others = tuple(self._get_rule_number(rule) for rule in match.others)
        asked = match.rule.layout if match.rule and match.rule.layout != a.layout else None
        return {
            "others": self.lists.get_or_add_number(others) if others else None,
            "near": self.lists.get_or_add_number(match.near_misses) if match.near_misses else None,
            "asked": asked and self._get_layout_number(asked),
            "rest": match.has_rest_layout or None,
            "found": match.has_existing_layout or None,
        }

    def _find_parent_position(self, a: Assignment) -> int | str:
        """Return the position of a variable's parent in the plan, or the parent's path if the plan lacks it."""
        path, model = a.variable.parent or "", a.variable.model
        for i in self.by_path.get(path, ()):
            if self.plan.assignments[i].variable.model == model:
                return i
        return path

    def _get_rule_number(self, rule: Rule) -> int:
        return self.rules.get_or_add_number(
            (rule.number, rule.pattern, self._get_layout_number(rule.layout), rule.uneven)
        )

    def _get_layout_number(self, layout: Layout) -> int:
        """Return the number of a layout in the page's list of layouts, and add a new layout to the list."""
        if id(layout) in self._seen:
            return self._seen[id(layout)]
        dims = {name: i for i, name in enumerate(self.plan.mesh.dim_names)}
        dims_of_axes = tuple(
            tuple(dims[name] for name in layout.list_mesh_dims(i)) for i in range(layout.rank)
        )
        self._seen[id(layout)] = self.layouts.get_or_add_number((dims_of_axes, str(layout)))
        return self._seen[id(layout)]

    def _make_problem_fields(self, merged: Problem, members: Sequence[Problem]) -> dict[str, object]:
        of = dict.fromkeys(
            i
            for p in members
            for i in self.by_path.get(p.subject, ())
            if p.model in ("", self.plan.assignments[i].variable.model)
        )
        names = ("severity", "kind", "subject", "what", "facts", "why", "fix")
        written = {name: getattr(merged, name) for name in names}
        by_lint = merged.severity == "warning" and members[0] not in self._of_plan
        return {**written, "count": len(members), "variables": list(of), "lint": by_lint}


def _merge_problems(
    plan: PlanTable, findings: Sequence[Problem]
) -> list[tuple[Problem, tuple[Problem, ...]]]:
    """Return the problems of a plan and the findings, merged for repeated blocks, each with its unmerged problems."""
    return group_problems(sort_problems(list(dict.fromkeys([*plan.problems, *findings]))))


def _sum_bytes_by_purpose(plan: PlanTable, memory: Memory) -> dict[str, Mapping[str, int]]:
    device = {name: getattr(memory, name) for name in ("weights", "gradients", "slots", "state")}
    weights = sum(a.variable.global_bytes for a in plan.assignments if a.variable.is_trained)
    slots = sum(a.variable.global_bytes for a in plan.assignments if a.variable.kind is Kind.SLOT)
    of_model = {
        "weights": weights,
        "gradients": weights,
        "slots": slots,
        "state": plan.global_bytes - weights - slots,
    }
    return {"device": device, "model": of_model, "host": {"all": memory.host}}
