"""Regexes that can take exponential time to fail, such as `(a+)+$`.

Python's `re` tries one way to match after another. Where the repeats of a regex can split a run of text in several
ways, each further character doubles the ways, and a path of 30 characters can keep a lookup busy for hours.

`doubling_text` finds the text that has two ways through the same loop. It reads the regex as an automaton with one
state for each character position (Glushkov's construction), counts the ways from each state to the next, and looks
for a state to which one text leads back in two ways.

What is not judged: backreferences, lookarounds, conditional groups, atomic groups and possessive repeats count as the
empty text; a regex of more than 200 positions or 100,000 steps is taken to be fine. Repeats beside each other, as in
`.*a.*b.*c`, take polynomial time, for which paths are short enough.

Parser and compiler are the standard library's own and private modules, `re._parser` and `re._compiler`: tested on
Python 3.11. Where they are not there or speak of something unknown, nothing is found, and the tests fail.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterator
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

        items = parser.parse(pattern.pattern, pattern.flags)
        automaton = _Automaton(parser, items.state)
        end = automaton.read(items).last
        # Where a match may end, it does: `re.match` asks for no more, and nothing is tried again.
        pivots = [p for p in range(len(automaton.chars)) if p not in end]
        return min(filter(None, map(automaton.text_of_two_ways, pivots)), key=len, default=None)
    except (ImportError, AttributeError, LookupError, TypeError, ValueError, RecursionError, _TooMuch):
        return None


class _Automaton:
    """Positions of a regex, the characters that each matches, and in how many ways each follows another."""

    def __init__(self, parser: Any, state: Any) -> None:
        self._parser, self._state = parser, state
        self.chars: list[int] = []
        self.follow: list[Counter[int]] = []
        self.steps = 0

    # -- making it

    def read(self, items: Any) -> _Part:
        """The part for a sequence of items as the parser gives them."""
        joined = _Part(nullable=True)
        for op, value in items:
            joined = self._then(joined, self._item(op, value))
        return joined

    def _item(self, item: Any, value: Any) -> _Part:
        op = str(item)
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
        return self._position(self._characters(item, value))

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

    def _characters(self, op: Any, value: Any) -> int:
        """The characters that one item matches: `re` itself is asked."""
        one = self._parser.SubPattern(self._state, [(op, value)])
        matches = import_module("re._compiler").compile(one, self._state.flags).fullmatch
        return sum(1 << code for code in range(256) if matches(chr(code))) | bool(matches("字")) << _OTHER

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
