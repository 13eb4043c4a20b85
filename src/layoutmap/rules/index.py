"""Find the rules that can match a path without trying every regex.

Most rules of a layout map fail on most paths. Nearly every rule contains literal text that each matching path must
contain: `.*\\.layer_17\\.(query|key)\\.kernel` needs `.layer_17.`. The index stores each rule under the rarest
substring of its literals, of at most three characters, and tries a path only against the rules of substrings that the
path contains. The index only filters. The regexes decide, in their order.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

_KEY_LENGTH = 3
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


class RuleIndex:
    """Index of the rules of a layout map by text that a matching path must contain.

    A lookup indexes the rules that were added since the lookup before. It rebuilds the index when the number of rules
    has doubled, because other substrings may then be the rarest. Threads may look up and add rules at the same time.

    Args:
        patterns: The regexes, in the order of the rules.
        matches_anywhere: Whether a rule may match anywhere in a path, not only from its start.
    """

    def __init__(self, patterns: Iterable[re.Pattern[str]] = (), *, matches_anywhere: bool = False):
        self._patterns = list(patterns)
        self._matches_anywhere = matches_anywhere
        self._index_lock = threading.Lock()
        self._matchers: list[Callable[[str], object]] = []
        self._longest_literals: list[str] = []
        self._keys: list[set[str]] = []
        self._frequency: Counter[str] = Counter()
        self._rules_by_literal = _LiteralIndex()
        self._num_indexed = self._num_indexed_at_rebuild = 0

    def append(self, pattern: re.Pattern[str]) -> None:
        """Add the regex of a rule that is tried after all others. The next lookup adds it to the index."""
        self._patterns.append(pattern)

    def iterate_matching_positions(self, path: str) -> Iterator[int]:
        """Yield the position, from 0, of each rule that matches a path, in ascending order."""
        if self._num_indexed != len(self._patterns):
            self._index_new_rules()
        rules_by_literal = self._rules_by_literal
        candidates = list(rules_by_literal.always)
        for width in rules_by_literal.widths:
            for key in set(_list_substrings(path, width)) & rules_by_literal.by_key.keys():
                candidates += rules_by_literal.by_key[key]
        candidates.sort()
        for position in candidates:
            if self._longest_literals[position] in path and self._matchers[position](path):
                yield position

    def _index_new_rules(self) -> None:
        with self._index_lock:
            start = len(self._keys)
            for pattern in self._patterns[start:]:
                # Flags such as (?i) change which text a literal matches, so try a pattern with flags on every path.
                literals = find_required_literals(pattern.pattern) if pattern.flags == re.UNICODE else []
                keys = {key for text in literals for key in _list_index_keys(text)}
                self._frequency.update(keys)
                self._matchers.append(pattern.search if self._matches_anywhere else pattern.match)
                self._longest_literals.append(max(literals, key=len, default=""))
                self._keys.append(keys)
            rules_by_literal = self._rules_by_literal
            if len(self._keys) >= 2 * self._num_indexed_at_rebuild:
                start, rules_by_literal = 0, _LiteralIndex()
                self._num_indexed_at_rebuild = len(self._keys)
            for position in range(start, len(self._keys)):
                rules_by_literal.add_rule(position, self._keys[position], self._frequency)
            self._rules_by_literal, self._num_indexed = rules_by_literal, len(self._keys)


class _LiteralIndex:
    """Index from substrings to positions of rules that need them. `always`: positions of rules that need none."""

    def __init__(self) -> None:
        self.always: list[int] = []
        self.by_key: dict[str, list[int]] = {}
        self.widths: list[int] = []

    def add_rule(self, position: int, keys: set[str], frequency: Mapping[str, int]) -> None:
        if not keys:
            self.always.append(position)
            return
        rarest = min(keys, key=lambda key: (frequency[key], -len(key), key))
        self.by_key.setdefault(rarest, []).append(position)
        if len(rarest) not in self.widths:
            self.widths.append(len(rarest))


def _list_index_keys(literal: str) -> Iterable[str]:
    """Return the index keys of a literal: its substrings of three characters, or a shorter literal itself."""
    return _list_substrings(literal, min(_KEY_LENGTH, len(literal)))


def _list_substrings(text: str, width: int) -> list[str]:
    return [text[i : i + width] for i in range(len(text) - width + 1)]


def find_required_literals(pattern: str) -> list[str]:
    """Return the texts that every match of a regex certainly contains. The list may be empty.

    Characters in groups and classes are left out, and a regex with an alternative outside groups has no such text. A
    missing text only makes lookups slower, but a wrong one would lose a match.

    Example:
        >>> find_required_literals(r".*\\.layer_17\\.(query|key)\\.kernels?$")
        ['.layer_17.', '.kernel']
    """
    try:
        items: Any = import_module("re._parser").parse(pattern)
    except (ImportError, AttributeError):  # this Python lacks the undocumented module, so find no literals
        return []
    found: list[str] = []
    literal = ""
    for op, value in items:
        name = str(op)
        if name == "LITERAL":
            literal += chr(value)
            continue
        if name in _REPEATS and value[0] and [str(inner) for inner, _ in value[2]] == ["LITERAL"]:
            # A repeated character occurs at least once, but may occur more often, so the literal ends after it.
            literal += chr(value[2][0][1])
        found.append(literal)
        literal = ""
    return [text for text in [*found, literal] if text]
