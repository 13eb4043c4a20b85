"""Write the change of the rules with which a finding disappears.

Each check gives the layouts that variables should have. The text of all fixes is written here, so that it has one form
(decisions/0280).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from layoutmap.core.layout import UNSHARDED, Layout
from layoutmap.core.match import Rule
from layoutmap.core.paths import split_path_at_numbers
from layoutmap.core.variables import Assignment
from layoutmap.plan.problems import Problem, group_problems
from layoutmap.plan.table import PlanTable
from layoutmap.rules.merged_rules import find_whole_path_pattern_parts, merge_patterns

LayoutChange: TypeAlias = tuple[Assignment, Layout]


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that lint found, and new layouts that would solve it.

    Args:
        problem: The problem. The change of the rules is added to its fix later.
        changes: Variables with the layouts that they should have.
    """

    problem: Problem
    changes: tuple[LayoutChange, ...] = ()


def add_rule_changes_to_fixes(findings: Sequence[Finding], plan: PlanTable) -> Iterator[Problem]:
    """Yield the problem of each finding, with the rules to change in its fix.

    Problems that are shown merged have the same text, which changes the variables of all of them.
    """
    writer = RuleChangeFormatter(plan, [change for f in findings for change in f.changes])
    changes = {id(f.problem): f.changes for f in findings}
    texts: dict[int, str] = {}
    for _, group in group_problems([f.problem for f in findings]):
        text = "; ".join(writer.iterate_change_texts([change for p in group for change in changes[id(p)]]))
        texts |= {id(p): text for p in group}
    for f in findings:
        text = texts[id(f.problem)]
        yield replace(f.problem, fix=f"{f.problem.fix}; {text}") if text else f.problem


class RuleChangeFormatter:
    """Formatter of changes of rules that give variables new layouts. The texts are for fixes.

    Args:
        plan: The plan.
        changes: All variables to change, with their new layouts.
    """

    def __init__(self, plan: PlanTable, changes: Sequence[LayoutChange]) -> None:
        self._patterns = _PatternMaker(plan)
        kept: dict[int, set[tuple[str, str]]] = defaultdict(set)
        for a in plan.assignments:
            if a.match and a.match.rule:
                kept[a.match.rule.number].add(a.variable.key)
        self._kept_by_layout = {
            (a.match.rule.number, layout): set(kept[a.match.rule.number])
            for a, layout in changes
            if a.match and a.match.rule
        }
        self._kept_by_deletion = kept
        for a, layout in changes:
            if a.match and (rule := a.match.rule):
                self._kept_by_layout[rule.number, layout].discard(a.variable.key)
                if a.match.others and a.match.others[0].layout == layout:
                    kept[rule.number].discard(a.variable.key)

    def iterate_change_texts(self, changes: Sequence[LayoutChange]) -> Iterator[str]:
        """Yield a text for each rule to change, to delete, to put before another rule, or to add."""
        groups: dict[tuple[Rule | None, bool, Layout], list[Assignment]] = defaultdict(list)
        for a, layout in changes:
            has_no_map = a.match is None or a.match.has_existing_layout
            groups[a.match.rule if a.match else None, has_no_map, layout].append(a)
        deleted = set[int]()
        for (rule, has_no_map, layout), group in groups.items():
            if has_no_map:
                yield f"lay it out as {layout}"
            elif rule is None:
                for pattern in self._patterns.make_patterns(group):
                    yield f'add a rule: layout_map[r"{pattern}"] = {format_specs_as_python(layout)}'
            elif not self._kept_by_deletion[rule.number]:
                if rule.number not in deleted:
                    yield f"delete rule {rule.number}"
                deleted.add(rule.number)
            elif not self._kept_by_layout[rule.number, layout]:
                yield f"change rule {rule.number} to {format_specs_as_python(layout)}"
            else:
                for pattern in self._patterns.make_patterns(group):
                    yield f'put before rule {rule.number}: layout_map[r"{pattern}"] = {format_specs_as_python(layout)}'


class _PatternMaker:
    """Maker of patterns that match given variables of a plan and no others."""

    def __init__(self, plan: PlanTable) -> None:
        self._paths: dict[tuple[str, ...], set[str]] = defaultdict(set)
        for a in plan.assignments:
            for path in (a.variable.path, *a.variable.aliases):
                self._paths[split_path_at_numbers(path)].add(path)

    def make_patterns(self, group: Sequence[Assignment]) -> Sequence[str]:
        """Return patterns that match these variables and no other path of the plan."""
        forms: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for a in group:
            forms[split_path_at_numbers(a.variable.path)].append(a.variable.path)
        # A pattern differs from its paths only in numbers, so check only paths with the same words for unwanted
        # matches.
        return merge_patterns(
            find_whole_path_pattern_parts(paths, paths, self._paths[form] - {*paths})
            for form, paths in forms.items()
        )


def format_specs_as_python(layout: Layout) -> str:
    """Return the specs of a layout as Python source, with None for unsharded axes."""
    return str(tuple(None if spec == UNSHARDED else spec for spec in layout.sharding_specs))
