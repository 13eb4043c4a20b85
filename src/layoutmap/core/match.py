"""Define a rule of a layout map, and the result of matching the rules with a path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from layoutmap.core.errors import RuleError, shorten_repr
from layoutmap.core.layout import Layout
from layoutmap.core.uneven import UnevenSetting, format_uneven

Rest = Literal["replicated"]
"""The layout that a map gives variables that no rule matches."""

KERAS = "keras:"
"""How a rule over what Keras calls a variable begins, and how such a name does where it stands among paths."""

AS_FOUND = "it is as it was found: no map was asked"

AS_REST = 'it is replicated, as layout_map.rest = "replicated" says'


# A last rule `.*` has only one rank, so this setting replicates variables without a rule (decisions/0054).
def check_rest(value: object, where: str) -> Rest | None:
    """Return a layout map's `rest` setting for variables without a rule, after a check.

    Raises:
        RuleError: It is something else.
    """
    if value is None or value == "replicated":
        return "replicated" if value else None
    raise RuleError(
        f"{where}: rest={shorten_repr(value)}",
        why="it says that variables without a rule are replicated on purpose",
        fix="use 'replicated' or None; for a sharded layout add a rule as the last one",
    )


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a layout map.

    Args:
        number: Its place in the map, counted from 1.
        pattern: The regex.
        layout: The layout it gives.
        uneven: What happens to an axis that does not divide.
        reason: Why the rule gives this layout; empty if nobody says. It is no part of the rule's value.
    """

    number: int
    pattern: str
    layout: Layout
    uneven: UnevenSetting = "error"
    reason: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"rule {self.number}  {self.pattern}"


@dataclass(frozen=True, slots=True)
class Match:
    """The rules of a layout map for one path.

    Args:
        path: The path.
        rule: The rule that won, or `None` if no rule matches.
        others: The rules that match too and lost, in the order of the map.
        near_misses: Patterns that come close, if no rule matches.
        otherwise: What happens to the path if no rule matches.
    """

    path: str
    rule: Rule | None
    others: tuple[Rule, ...] = ()
    near_misses: tuple[str, ...] = ()
    otherwise: str = "it is replicated"

    @property
    def is_rest(self) -> bool:
        """Whether no rule matches and the map's `rest` setting applies."""
        return self.rule is None and self.otherwise == AS_REST

    @property
    def is_found(self) -> bool:
        """Whether another program has already placed the variable, so that no map was used."""
        return self.otherwise == AS_FOUND

    @property
    def layout(self) -> Layout | None:
        """Layout of the winning rule, or None without one."""
        return self.rule and self.rule.layout

    def __str__(self) -> str:
        if self.rule is None:
            near = "".join(f"\n  near miss  {p}" for p in self.near_misses)
            return f"{self.path}: no rule matches, so {self.otherwise}{near}"
        lost = "".join(
            f"\n  also matches  {rule}: would give {format_rule_layout(rule)}" for rule in self.others
        )
        change = f"  {'change it':<{12 if lost else 9}}  {suggest_rule_change(self.rule, [self.path])}"
        return f"{self.path}: {self.rule} -> {format_rule_layout(self.rule)}{lost}\n{change}"


def suggest_rule_change(rule: Rule, paths: Sequence[str]) -> str:
    """Return advice for the winning rule: how to give variables of these paths another layout."""
    if rule.pattern in paths:
        return f"a rule that is the path itself wins over all others: change rule {rule.number}"
    return f"the first rule that matches wins: put one before rule {rule.number}, or change that"


def format_rule_layout(rule: Rule) -> str:
    """Return a rule's layout as text, with its `uneven` setting unless that is "error"."""
    return str(rule.layout) + (f"  {format_uneven(rule.uneven)}" if rule.uneven != "error" else "")
