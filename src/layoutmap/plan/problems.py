"""Describe a problem of a plan, and merge equal problems of repeated blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from layoutmap.core.errors import format_message
from layoutmap.core.escaping import escape_text
from layoutmap.core.old_names import DeprecatedAlias
from layoutmap.core.paths import format_merged_paths, format_path_regex_as_python, split_path_at_numbers

Severity = Literal["error", "warning", "note"]
RULE_KINDS = ("unused rule", "shadowed rule")


@dataclass(frozen=True, slots=True)
class Problem:
    """Problem in a plan: an error, a layout that may not be intended, or a note.

    Args:
        kind: What sort of problem: `"rank"`, `"uneven"`, `"no rule"`, `"unused rule"`, `"shadowed rule"`
            (of variables or of activations), `"tied"`, `"global init"`, `"no activations"`, `"not built"`,
            `"unused dim"`, `"gathering"`, `"loose slot"`, `"zero"`, `"unsupported layout"`, `"unsupported"` or
            `"unknown order"`; of a step under explicit axes `"out_sharding"`; of what
            is inspected `"no layout"`, `"another mesh"`, `"plain"`, `"moved"`, `"differs"` or `"drifted"`; of rules
            that begin with `keras:` `"contradiction"` or `"layer output"`. What lint finds has kinds of its own; see
            `layoutmap.plan.lint`.
        severity: `"error"`: the model cannot be built. `"warning"`: it can, but `strict` makes it an error. `"note"`:
            information that is never an error.
        subject: The path or pattern with the problem.
        what: The headline.
        facts: The values that show it.
        why: The reason.
        fix: What to type instead.
        model: The name of the model that the subject is in, if the plan has several; the headline begins with it then.
    """

    kind: str
    severity: Severity
    subject: str
    what: str
    facts: tuple[tuple[str, str], ...] = ()
    why: str = ""
    fix: str = ""
    model: str = ""

    def add_model_name(self, model: str) -> Problem:
        """Return a copy of the problem with the model's name before the headline, or the problem itself for `""`."""
        return replace(self, what=f"{model}: {self.what}", model=model) if model else self

    of_model = DeprecatedAlias("add_model_name")

    def __str__(self) -> str:
        return format_message(escape_text(self.what), dict(self.facts), self.why, self.fix)


def merge_problems(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems with equal problems of repeated blocks merged into one: `blocks.{0..31}.kernel: ...`."""
    return [merged for merged, _ in group_problems(problems)]


def group_problems(problems: Sequence[Problem]) -> list[tuple[Problem, tuple[Problem, ...]]]:
    """Return merged problems of repeated blocks, each with the problems that it stands for.

    Problems of rules are not merged, because their subjects are patterns, and a merged pattern is no rule of the map.
    """
    groups: dict[object, list[Problem]] = {}
    for p in problems:
        # The fixes of repeated blocks differ in the numbers of the blocks, so compare fixes without numbers.
        subject = p.subject if p.kind in RULE_KINDS else split_path_at_numbers(p.subject)
        facts = tuple((split_path_at_numbers(name), value) for name, value in p.facts)
        key = (p.kind, p.severity, p.model, subject, facts, p.why, split_path_at_numbers(p.fix))
        groups.setdefault(key, []).append(p)
    merged: list[tuple[Problem, tuple[Problem, ...]]] = []
    for first, *rest in groups.values():
        if not rest:
            merged.append((first, (first,)))
            continue
        subjects = [first.subject, *(p.subject for p in rest)]
        new = format_merged_paths(subjects)
        fix = first.fix
        # If the fixes are equal, a path in them is not a path of these blocks, so do not replace it.
        if any(p.fix != fix for p in rest):
            fix = fix.replace(
                format_path_regex_as_python(subjects[:1]), format_path_regex_as_python(subjects)
            )
        whats = [first.what, *(p.what for p in rest)]
        if len(set(map(split_path_at_numbers, whats))) == 1:
            what = format_merged_paths(whats)
        else:
            head = f"{first.model}: " if first.model else ""
            what = head + first.what.removeprefix(head).replace(first.subject, new, 1)
        # Names of facts can be paths in these blocks, too.
        names = [[name for name, _ in p.facts] for p in (first, *rest)]
        facts = tuple(
            (format_merged_paths(each), value)
            for each, (_, value) in zip(zip(*names, strict=True), first.facts, strict=True)
        )
        merged.append((replace(first, subject=new, what=what, facts=facts, fix=fix), (first, *rest)))
    return merged


def sort_problems(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """Return the problems sorted: errors, warnings, notes, and variables without a rule last among the warnings."""
    order = {"error": 0, "warning": 1, "note": 2}
    return tuple(sorted(problems, key=lambda p: (order[p.severity], p.kind == "no rule")))
