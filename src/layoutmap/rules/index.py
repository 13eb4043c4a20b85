"""Find the rules that can match a path without trying every regex.

Most rules of a layout map fail on most paths. Nearly every rule contains literal text that each matching path must
contain: `.*\\.layer_17\\.(query|key)\\.kernel` needs `.layer_17.`. The index
stores each rule under the rarest piece of its literals, three characters or fewer, and tries a path only against the
rules of the pieces that it contains. The index only filters. The regexes decide, in their order.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

_PIECE_LENGTH = 3
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


class RuleIndex:
    """Index the rules of a layout map by text that a matching path must contain.

    A lookup indexes the rules that were added since the last one. It rebuilds the index when the number of rules has
    doubled, because other pieces may then be the rarest. Threads may look up and add rules at the same time.

    Args:
        patterns: The regexes, in the order of the rules.
        anywhere: Whether a rule may match anywhere in a path, not only from its start.
    """

    def __init__(self, patterns: Iterable[re.Pattern[str]] = (), *, anywhere: bool = False):
        self._patterns = list(patterns)
        self._anywhere = anywhere
        self._index_lock = threading.Lock()
        self._matchers: list[Callable[[str], object]] = []
        self._longest: list[str] = []
        self._pieces: list[set[str]] = []
        self._frequency: Counter[str] = Counter()
        self._files = _LiteralIndex()
        self._filed = self._filed_at_once = 0

    def append(self, pattern: re.Pattern[str]) -> None:
        """Append a regex."""
        self._patterns.append(pattern)

    def find_matches(self, path: str) -> Iterator[int]:
        """Yield the numbers of the rules that match a path, in ascending order."""
        if self._filed != len(self._patterns):
            self._index_new_rules()
        files = self._files
        candidates = list(files.always)
        for width in files.widths:
            for piece in set(_list_substrings(path, width)) & files.by_piece.keys():
                candidates += files.by_piece[piece]
        candidates.sort()
        for number in candidates:
            if self._longest[number] in path and self._matchers[number](path):
                yield number

    def _index_new_rules(self) -> None:
        with self._index_lock:
            start = len(self._pieces)
            for pattern in self._patterns[start:]:
                # Flags in a pattern change the meaning of its characters, so try such a pattern on every path.
                literals = find_required_literals(pattern.pattern) if pattern.flags == re.UNICODE else []
                pieces = {piece for text in literals for piece in _list_index_keys(text)}
                self._frequency.update(pieces)
                self._matchers.append(pattern.search if self._anywhere else pattern.match)
                self._longest.append(max(literals, key=len, default=""))
                self._pieces.append(pieces)
            files = self._files
            if len(self._pieces) >= 2 * self._filed_at_once:
                start, files = 0, _LiteralIndex()
                self._filed_at_once = len(self._pieces)
            for number in range(start, len(self._pieces)):
                files.add(number, self._pieces[number], self._frequency)
            self._files, self._filed = files, len(self._pieces)


class _LiteralIndex:
    """Store the numbers of rules by a literal that their paths contain, and the rules to try always."""

    def __init__(self) -> None:
        self.always: list[int] = []
        self.by_piece: dict[str, list[int]] = {}
        self.widths: list[int] = []

    def add(self, number: int, pieces: set[str], frequency: Mapping[str, int]) -> None:
        if not pieces:
            self.always.append(number)
            return
        rarest = min(pieces, key=lambda piece: (frequency[piece], -len(piece), piece))
        self.by_piece.setdefault(rarest, []).append(number)
        if len(rarest) not in self.widths:
            self.widths.append(len(rarest))


def _list_index_keys(literal: str) -> Iterable[str]:
    """Return the index keys of a literal: each run of three characters, or a shorter literal itself."""
    return _list_substrings(literal, min(_PIECE_LENGTH, len(literal)))


def _list_substrings(text: str, width: int) -> list[str]:
    return [text[i : i + width] for i in range(len(text) - width + 1)]


def find_required_literals(pattern: str) -> list[str]:
    """Return texts that every match of a regex contains, or an empty list if none is certain.

    Only what stands outside groups and classes counts, and a regex with an alternative at its top level has none:
    too few are harmless, one too many would lose a match.

    Example:
        >>> find_required_literals(r".*\\.layer_17\\.(query|key)\\.kernels?$")
        ['.layer_17.', '.kernel']
    """
    try:
        items: Any = import_module("re._parser").parse(pattern)
    except (ImportError, AttributeError):  # this Python release does not have the undocumented module
        return []
    found: list[str] = []
    run = ""
    for op, value in items:
        name = str(op)
        if name == "LITERAL":
            run += chr(value)
            continue
        if name in _REPEATS and value[0] and [str(inner) for inner, _ in value[2]] == ["LITERAL"]:
            # A repeated character occurs at least once, but the next one need not follow it directly.
            run += chr(value[2][0][1])
        found.append(run)
        run = ""
    return [text for text in [*found, run] if text]
