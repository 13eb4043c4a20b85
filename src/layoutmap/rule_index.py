"""Which rules can match a path at all, found without trying every regex.

A layout map tries its rules in order, and most of them fail on most paths. Nearly every rule holds some literal text
that a path must contain for the regex to match: `.*\\.layer_17\\.(query|key)\\.kernel` needs `.layer_17.`. The index
files each rule under the rarest piece of its literals, three characters or fewer, and tries a path only against the
rules filed under the pieces that it holds. It is a filter and never a decision: the regexes themselves decide, in
their order.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

__all__ = ["RuleIndex", "required_literals"]

_PIECE = 3
_QUANTIFIED = re.compile(r"[*?]|\{\d*,?\d*\}")
_ESCAPED_LITERAL = re.compile(r"[^0-9A-Za-z]")
# A comment may hold any bracket, and `a(?#note)*` repeats the a; so may the comments of a (?x: group.
_COMMENT = re.compile(r"\(\?(?:#|[A-Za-z]*x)")


class RuleIndex:
    """The rules of a layout map, filed by text that a path must contain.

    Args:
        patterns: The regexes, in the order of the rules.
    """

    def __init__(self, patterns: Sequence[re.Pattern[str]]):
        # Flags are written in a pattern, and most change what its characters mean: such a rule is always tried.
        literals = [required_literals(p.pattern) if p.flags == re.UNICODE else [] for p in patterns]
        pieces = [{piece for text in texts for piece in _pieces(text)} for texts in literals]
        frequency = Counter(piece for each in pieces for piece in each)
        self._matchers = [p.match for p in patterns]
        self._longest = [max(texts, key=len, default="") for texts in literals]
        self._always: list[int] = []
        self._filed: dict[str, list[int]] = {}
        for number, each in enumerate(pieces):
            if each:
                rarest = min(each, key=lambda piece: (frequency[piece], -len(piece), piece))
                self._filed.setdefault(rarest, []).append(number)
            else:
                self._always.append(number)
        self._widths = sorted({len(piece) for piece in self._filed})

    def matches(self, path: str) -> Iterator[int]:
        """The numbers of the rules that match, first to last."""
        filed = self._filed
        candidates = list(self._always)
        for width in self._widths:
            for piece in set(_cut(path, width)) & filed.keys():
                candidates += filed[piece]
        candidates.sort()
        for number in candidates:
            if self._longest[number] in path and self._matchers[number](path):
                yield number


def _pieces(literal: str) -> Iterable[str]:
    """What a rule may be filed under: every run of three characters of a literal, or a shorter literal itself."""
    return _cut(literal, min(_PIECE, len(literal)))


def _cut(text: str, width: int) -> list[str]:
    return [text[i : i + width] for i in range(len(text) - width + 1)]


def required_literals(pattern: str) -> list[str]:
    """Texts that every string matched by a regex must contain; empty where that is not plain to see.

    Only what stands outside groups and classes counts, and a regex with an alternative at its top level has none:
    too few are harmless, one too many would lose a match.

    Example:
        >>> required_literals(r".*\\.layer_17\\.(query|key)\\.kernels?$")
        ['.layer_17.', '.kernel']
    """
    if _COMMENT.search(pattern):
        return []
    found: list[str] = []
    run = ""
    at = 0
    while at < len(pattern):
        char = pattern[at]
        end = at + 1
        literal = ""
        if char == "|":
            return []
        if char == "[":
            end = _class_end(pattern, at)
        elif char == "(":
            end = _group_end(pattern, at)
        elif char == "\\":
            end = at + 2
            escaped = pattern[at + 1 : end]
            if _ESCAPED_LITERAL.match(escaped):
                literal = escaped
            elif (
                escaped.isdigit() or escaped in "xuUN"
            ):  # a back reference or a code point: how long is not plain
                return []
        elif char not in ".^$*+?{}":
            literal = char
        quantifier = _QUANTIFIED.match(pattern, end)
        if quantifier:  # the item may be absent, so what follows does not join on to what came before
            literal, end = "", quantifier.end()
        run += literal
        if not literal or pattern[end : end + 1] == "+":
            found.append(run)
            run = ""
        at = end
    return [text for text in [*found, run] if text]


def _class_end(pattern: str, at: int) -> int:
    """The place after a character class; a `]` that stands first in it is a member."""
    at += 2 if pattern[at + 1 : at + 2] == "^" else 1
    at += pattern[at : at + 1] == "]"
    while pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at + 1


def _group_end(pattern: str, at: int) -> int:
    """The place after a group, with all groups inside it."""
    depth = 0
    while True:
        char = pattern[at]
        if char == "[":
            at = _class_end(pattern, at)
            continue
        depth += (char == "(") - (char == ")")
        at += 2 if char == "\\" else 1
        if not depth:
            return at
