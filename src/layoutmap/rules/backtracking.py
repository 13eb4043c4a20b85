"""Regexes that can take exponential time to fail, such as `(a+)+$`.

Python's `re` tries one way to match after another. Where the repeats of a regex can split a run of text in several
ways, each further character doubles the ways, and a path of 30 characters can keep a lookup busy for hours.

`doubling_text` finds the text that has two ways through the same loop. It reads the regex as an automaton with one
state for each character position (Glushkov's construction), counts the ways from each state to the next, and looks
for a state to which one text leads back in two ways.

What is not judged: backreferences, lookarounds, conditional groups, atomic groups and possessive repeats count as the
empty text; a regex of more than 200 positions or 100,000 steps is taken to be fine. Repeats beside each other, as in
`.*a.*b.*c`, take polynomial time, for which paths are short enough.

The parser is the standard library's own and a private module, `re._parser`: tested on Python 3.11. Where it is not
there or speaks of something unknown, nothing is found, and `tests/test_backtracking.py` fails.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

# Only a repeat of a group can hold another repeat or an alternative.
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_MOST_POSITIONS = 200
_MOST_STEPS = 100_000
_MOST_COPIES = 8  # of what is repeated a bounded number of times; more counts as no bound

# A set of characters is an int with a bit for each of the first 256, one for all others and one for the text's end.
_OTHER, _END = 256, 257
_ALL = (1 << _END) - 1


@dataclass(slots=True)
class _Part:
    """A part of a regex: whether it matches the empty text, and at which positions it begins and ends."""

    nullable: bool
    first: list[int] = field(default_factory=list[int])
    last: list[int] = field(default_factory=list[int])


_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "DIGIT": str.isdigit,
    "SPACE": str.isspace,
    "WORD": lambda char: char.isalnum() or char == "_",
}


class _TooMuch(Exception):
    """The regex is too large to be judged, or has something that is not known."""


def doubling_text(pattern: re.Pattern[str]) -> str | None:
    """A text each repeat of which doubles the ways that `re` tries before it fails; `None` if none is found.

    Example:
        >>> doubling_text(re.compile("(a+)+$")), doubling_text(re.compile(r"(.+\\.)+kernel"))
        ('a', '.a')
        >>> doubling_text(re.compile("(a+)+")) is None, doubling_text(re.compile(r"(\\w+\\.)+kernel")) is None
        (True, True)
    """
    if not _REPEATED_GROUP.search(pattern.pattern):
        return None
    try:
        parser: Any = import_module("re._parser")

        automaton = _Automaton(pattern.flags)
        end = automaton.read(parser.parse(pattern.pattern, pattern.flags)).last
        # Where a match may end, it does: `re.match` asks for no more, and nothing is tried again.
        pivots = [p for p in range(len(automaton.chars)) if p not in end]
        return min(filter(None, map(automaton.text_of_two_ways, pivots)), key=len, default=None)
    except (ImportError, AttributeError, LookupError, TypeError, ValueError, RecursionError, _TooMuch):
        return None


class _Automaton:
    """Positions of a regex, the characters that each matches, and in how many ways each follows another."""

    def __init__(self, flags: int) -> None:
        self.flags = flags
        self.chars: list[int] = []
        self.follow: list[Counter[int]] = []
        self.steps = 0

    # -- making it

    def read(self, items: Any) -> _Part:
        """The part for a sequence of items as the parser gives them."""
        joined = _Part(nullable=True)
        for op, value in items:
            joined = self._then(joined, self._item(str(op), value))
        return joined

    def _item(self, op: str, value: Any) -> _Part:
        if op in ("MAX_REPEAT", "MIN_REPEAT"):
            return self._repeat(*value)
        if op == "SUBPATTERN":
            return self.read(value[-1])
        if op == "BRANCH":
            parts = [self.read(items) for items in value[1]]
            first, last = ([p for part in parts for p in getattr(part, end)] for end in ("first", "last"))
            return _Part(any(part.nullable for part in parts), first, last)
        if op == "AT":
            return self._position(1 << _END) if str(value) in ("AT_END", "AT_END_STRING") else _Part(True)
        if op in ("ASSERT", "ASSERT_NOT", "GROUPREF", "GROUPREF_EXISTS", "ATOMIC_GROUP", "POSSESSIVE_REPEAT"):
            return _Part(nullable=True)
        return self._position(self._set(op, value))

    def _repeat(self, least: int, most: Any, items: Any) -> _Part:
        if least == most or most <= _MOST_COPIES:
            optional = _Part(nullable=True)
            for _ in range(most - least):  # x{0,2} is (x(x)?)?: one way for each count
                optional = self._then(self.read(items), optional)
                optional.nullable = True
            joined = _Part(nullable=True)
            for _ in range(least):
                joined = self._then(joined, self.read(items))
            return self._then(joined, optional)
        body = self.read(items)
        for last in body.last:
            self.follow[last].update(body.first)
        return _Part(body.nullable or least == 0, body.first, body.last)

    def _then(self, one: _Part, two: _Part) -> _Part:
        for last in one.last:
            self.follow[last].update(two.first)
        first = one.first + two.first if one.nullable else one.first
        last = one.last + two.last if two.nullable else two.last
        return _Part(one.nullable and two.nullable, first, last)

    def _position(self, chars: int) -> _Part:
        if len(self.chars) >= _MOST_POSITIONS:
            raise _TooMuch
        self.chars.append(chars)
        self.follow.append(Counter())
        at = [len(self.chars) - 1]
        return _Part(False, at, at)

    def _set(self, op: str, value: Any) -> int:
        if op == "ANY":
            return _ALL if self.flags & re.DOTALL else _ALL & ~(1 << 10)
        if op == "NOT_LITERAL":
            return _ALL & ~self._set("LITERAL", value)
        if op == "LITERAL":
            return self._set("RANGE", (value, value))
        if op == "RANGE":
            low, high = value
            found = sum(1 << code for code in range(low, min(high, 255) + 1)) | (high > 255) << _OTHER
            return found | self._other_case(found) if self.flags & re.IGNORECASE else found
        if op == "CATEGORY":
            name = str(value).removeprefix("CATEGORY_")
            inside = _CATEGORIES[name.removeprefix("NOT_")]
            wanted = not name.startswith("NOT_")
            found = sum(1 << code for code in range(256) if inside(chr(code)) == wanted)
            return found | (name in ("WORD", "NOT_DIGIT", "NOT_SPACE")) << _OTHER  # taken to be a letter
        if op == "IN":
            negated = bool(value) and str(value[0][0]) == "NEGATE"
            found = 0
            for kind, what in value[negated:]:
                found |= self._set(str(kind), what)
            return _ALL & ~found if negated else found
        raise _TooMuch

    def _other_case(self, chars: int) -> int:
        cases = (chr(code).swapcase() for code in range(256) if chars >> code & 1)
        return sum(1 << code for code in {ord(c) for c in cases if len(c) == 1} if code < 256)

    # -- asking it

    def text_of_two_ways(self, pivot: int) -> str | None:
        """A text that leads from a position back to it in two ways."""
        start: tuple[int, int, bool] = (pivot, pivot, False)
        came: dict[tuple[int, int, bool], tuple[tuple[int, int, bool], int] | None] = {start: None}
        waiting: deque[tuple[int, int, bool]] = deque([start])
        while waiting:
            here = waiting.popleft()
            for there, chars in self._next(here):
                if there == (pivot, pivot, True):
                    return _text(came, here, chars)
                if there not in came:
                    came[there] = here, chars
                    waiting.append(there)
        return None

    def _next(self, here: tuple[int, int, bool]) -> Iterator[tuple[tuple[int, int, bool], int]]:
        one, two, parted = here
        for a, ways in self.follow[one].items():
            for b in self.follow[two]:
                self.steps += 1
                if self.steps > _MOST_STEPS:
                    raise _TooMuch
                chars = self.chars[a] & self.chars[b] & _ALL
                if chars:
                    yield (a, b, parted or a != b or (one == two and ways > 1)), chars


def _text(came: dict[Any, Any], here: Any, chars: int) -> str:
    text = ""
    while True:
        text = _shown(chars) + text
        step = came[here]
        if step is None:
            return text
        here, chars = step


def _shown(chars: int) -> str:
    """One character of a set, a plain one if there is any."""
    usual = [*range(97, 123), *range(48, 58), 46, 95, *range(32, 127)]
    return next((chr(code) for code in (*usual, *range(256)) if chars >> code & 1), "\u0100")
