"""Which rules can match a path at all, found without trying every regex.

A layout map tries its rules in order, and most of them fail on most paths. Nearly every rule holds some literal text
that a path must contain for the regex to match: `.*\\.layer_17\\.(query|key)\\.kernel` needs `.layer_17.`. The index
files each rule under the rarest piece of its literals, three characters or fewer, and tries a path only against the
rules filed under the pieces that it holds. It is a filter and never a decision: the regexes themselves decide, in
their order.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

_PIECE = 3
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


class RuleIndex:
    """The rules of a layout map, filed by text that a path must contain.

    Rules are filed when a path is looked up: those added since one by one, and all of them anew whenever their number
    has doubled, since which piece is the rarest is known only then. Other threads may look up and add meanwhile.

    Args:
        patterns: The regexes, in the order of the rules.
        anywhere: Whether a rule matches anywhere in a path, and not from its start alone.
    """

    def __init__(self, patterns: Iterable[re.Pattern[str]] = (), *, anywhere: bool = False):
        self._patterns = list(patterns)
        self._anywhere = anywhere
        self._filing = threading.Lock()
        self._matchers: list[Callable[[str], object]] = []
        self._longest: list[str] = []
        self._pieces: list[set[str]] = []
        self._frequency: Counter[str] = Counter()
        self._files = _LiteralIndex()
        self._filed = self._filed_at_once = 0

    def append(self, pattern: re.Pattern[str]) -> None:
        """Add a regex, after all others."""
        self._patterns.append(pattern)

    def find_matches(self, path: str) -> Iterator[int]:
        """Yield the numbers of the rules that match a path, first to last."""
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
        with self._filing:
            start = len(self._pieces)
            for pattern in self._patterns[start:]:
                # Flags in a pattern change the meaning of its characters, so such a pattern is tried on every path.
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
    """Numbers of rules by a literal that their paths contain, and the rules that are always tried."""

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
    """Return the index keys of a literal: each run of three characters, or the whole of a shorter literal."""
    return _list_substrings(literal, min(_PIECE, len(literal)))


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
    except (ImportError, AttributeError):  # the module is not public in this Python release
        return []
    found: list[str] = []
    run = ""
    for op, value in items:
        name = str(op)
        if name == "LITERAL":
            run += chr(value)
            continue
        if name in _REPEATS and value[0] and [str(inner) for inner, _ in value[2]] == ["LITERAL"]:
            # The character occurs at least once, and the next one need not follow it.
            run += chr(value[2][0][1])
        found.append(run)
        run = ""
    return [text for text in [*found, run] if text]
