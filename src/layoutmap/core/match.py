"""Define a rule of a layout map, and the result of matching a path against the rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from layoutmap.core.errors import RuleError, shorten_repr
from layoutmap.core.layout import Layout
from layoutmap.core.uneven import UnevenSetting, format_uneven_setting

Rest = Literal["replicated"]
"""The explicit setting for variables that no rule matches."""

KERAS = "keras:"
"""The prefix of rules that match Keras variable names, and of these names in a list of paths."""

AS_FOUND = "it keeps its layout: no layout map applies to it"

AS_REST = 'it is replicated, as layout_map.rest = "replicated" says'


# A last rule `.*` has a layout of one rank, so the setting `rest` replicates variables of any rank (decisions/0054).
def validate_rest_setting(value: object, where: str) -> Rest | None:
    """Check the `rest` setting of a layout map, which is for variables that no rule matches, and return it.

    Raises:
        RuleError: The value is not `"replicated"` or `None`.
    """
    if value is None or value == "replicated":
        return "replicated" if value else None
    raise RuleError(
        f"{where}: rest={shorten_repr(value)} is not allowed",
        why="it says whether variables without a rule are replicated on purpose or get a warning",
        fix="use 'replicated' or None; for a sharded layout add a rule as the last one",
    )


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a layout map: a regex, and the layout of the variables that it matches.

    Args:
        number: Its position in the map, counted from 1.
        pattern: The regex.
        layout: The layout it gives.
        uneven: What happens to an axis that cannot be split evenly.
        reason: Why the rule gives this layout; empty if not given. Not compared.
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
    """Result of matching one path: the rule that wins, and the other rules that match.

    Args:
        path: The path.
        rule: The rule that won, or `None` if no rule matches.
        others: The other matching rules, which lost, in the order of the map.
        near_misses: Patterns that come close, if no rule matches.
        otherwise: What happens to the path if no rule matches.
        corrected: The correction of a mistyped rule, if the corrected rule matches the path and wins.
    """

    path: str
    rule: Rule | None
    others: tuple[Rule, ...] = ()
    near_misses: tuple[str, ...] = ()
    otherwise: str = "it is replicated"
    corrected: Rule | None = None

    @property
    def has_rest_layout(self) -> bool:
        """Whether no rule matches, and the map's setting `rest = "replicated"` applies to the path."""
        return self.rule is None and self.otherwise == AS_REST

    @property
    def has_existing_layout(self) -> bool:
        """Whether the variable had a layout before, for instance from other sharding code, so no rules were tried."""
        return self.otherwise == AS_FOUND

    @property
    def layout(self) -> Layout | None:
        """Layout of the winning rule, or None if no rule matches."""
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
    """Return advice on how to give the variables at these paths a different layout than the winning rule does."""
    if rule.pattern in paths:
        return f"change rule {rule.number}: a rule that equals the path wins over all others"
    return f"change rule {rule.number}, or add a rule before it: the first rule that matches wins"


def format_rule_layout(rule: Rule) -> str:
    """Return a rule's layout as text, with its `uneven` setting unless that is "error"."""
    return str(rule.layout) + (f"  {format_uneven_setting(rule.uneven)}" if rule.uneven != "error" else "")
