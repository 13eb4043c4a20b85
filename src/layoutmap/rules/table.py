"""Store the rules of one map by pattern, in order, with their index."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from layoutmap.core.layout import Layout
from layoutmap.core.match import Rule
from layoutmap.rules.index import RuleIndex


@dataclass(frozen=True, slots=True)
class RuleEntry:
    """A rule with its compiled pattern. `has_uneven` says whether it has an `uneven` setting of its own."""

    rule: Rule
    compiled: re.Pattern[str]
    has_uneven: bool


class RuleTable:
    """Rules of one map by pattern, in order, with an index for lookups.

    Rules are only added to a table, and a map that removes a rule creates a new table. So a lookup needs no lock while
    another thread changes the map.
    """

    def __init__(self, entries: Iterable[RuleEntry] = ()) -> None:
        self.entries: dict[str, RuleEntry] = {}
        self.in_order: list[Rule] = []
        self.index = RuleIndex()
        for entry in entries:
            self.append(entry)

    def append(self, entry: RuleEntry) -> None:
        """Append a rule. Its number becomes its position in the table, counted from 1."""
        number = len(self.in_order) + 1
        if entry.rule.number != number:
            entry = replace(entry, rule=replace(entry.rule, number=number))
        self.in_order.append(entry.rule)
        self.index.append(entry.compiled)
        self.entries[entry.rule.pattern] = entry

    def get_layouts_by_pattern(self) -> dict[str, Layout]:
        """Return a dict from pattern to layout, in the order of the rules."""
        return {rule.pattern: rule.layout for rule in self.in_order.copy()}

    def copy(self) -> RuleTable:
        """Return an independent table of the same rules."""
        return RuleTable(self.entries.copy().values())

    def __reduce__(self) -> tuple[object, ...]:
        return RuleTable, (list(self.entries.copy().values()),)
