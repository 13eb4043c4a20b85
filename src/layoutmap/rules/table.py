"""Store the rules of one map by pattern, in order, with their index."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from layoutmap.core.layout import Layout
from layoutmap.core.match import Rule
from layoutmap.rules.index import RuleIndex


@dataclass(frozen=True, slots=True)
class Entry:
    """A rule with its compiled pattern. `has_uneven` tells whether it has its own `uneven` setting."""

    rule: Rule
    compiled: re.Pattern[str]
    has_uneven: bool


class Table:
    """Store rules by pattern, in order, with their index.

    A table only grows, and a map that removes rules creates a new one. So a lookup needs no lock while another
    thread changes the map.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries: dict[str, Entry] = {}
        self.in_order: list[Rule] = []
        self.index = RuleIndex()
        for entry in entries:
            self.append(entry)

    def append(self, entry: Entry) -> None:
        """Append a rule, and number it."""
        number = len(self.in_order) + 1
        if entry.rule.number != number:
            entry = replace(entry, rule=replace(entry.rule, number=number))
        self.in_order.append(entry.rule)
        self.index.append(entry.compiled)
        self.entries[entry.rule.pattern] = entry

    def layouts(self) -> dict[str, Layout]:
        """Return the layouts by pattern, in order."""
        return {rule.pattern: rule.layout for rule in self.in_order.copy()}

    def copy(self) -> Table:
        """Return an independent table of the same rules."""
        return Table(self.entries.copy().values())

    def __reduce__(self) -> tuple[object, ...]:
        return Table, (list(self.entries.copy().values()),)
