"""Regexes that can take exponential time to fail, such as `(a+)+$`.

Python's `re` tries one way to match after another. Where the repeats of a regex can split a run of text in several
ways, each further character doubles the ways, and a path of 30 characters can keep a lookup busy for hours.

`doubling_text` finds the text that has two ways through the same loop. It reads the regex as an automaton with one
state for each character position (Glushkov's construction), counts the ways from each state to the next, and looks
for a state to which one text leads back in two ways.

What is in a lookaround, an atomic group or a possessive repeat is judged by itself, as a regex that may end there:
nothing of it is tried again. In the loop around them, a possessive repeat takes all characters of its kind, and
backreferences and lookarounds count as the empty text. A regex with more than 200 positions in loops, or of more than
100,000 steps, is taken to be fine. Repeats beside each other, as in `.*a.*b.*c`, take polynomial time, for which paths
are short enough; a group that holds a repeat and is itself repeated more than 8 times counts as a loop.

Parser and compiler are the standard library's own and private modules, `re._parser` and `re._compiler`: tested on
Python 3.11. Where they are not there or speak of something unknown, nothing is found, and the tests fail.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

# Only a repeat of a group can hold another repeat or an alternative.
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
_MOST_POSITIONS = 200  # in loops
_MOST_STEPS = 100_000
_MOST_COPIES = 8  # of what is repeated a bounded number of times; more counts as no bound

# A set of characters is an int with a bit for each of the first 256, one for all others and one for the text's end.
_OTHER, _END = 256, 257
_ALL = (1 << _END) - 1
_Items = Sequence[tuple[Any, Any]]  # an operation and its argument each, as the standard library parses them
_Pair = tuple[int, int, bool]  # two positions, and whether they were reached in two ways


@dataclass(slots=True)
class _Atom:
    """A part of a regex: whether it matches the empty text, and at which positions it begins and ends."""

    nullable: bool
    first: list[int] = field(default_factory=list[int])
    last: list[int] = field(default_factory=list[int])


class _TooMuch(Exception):
    """The regex is too large to be judged, or has something that is not known."""


def doubling_text(pattern: re.Pattern[str]) -> str | None:  # why: decisions/0037
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
        found: list[str] = []
        tree = parser.parse(pattern.pattern, pattern.flags)
        judged: list[_Items] = [tree]
        for items in judged:  # grows by what is judged by itself
            automaton = _Automaton(parser, tree.state, judged)
            end = set(automaton.read(items).last)
            # Where a match may end, it does: `re.match` asks for no more, and nothing is tried again.
            pivots = (p for p, loop in enumerate(automaton.loops) if loop and p not in end)
            found += filter(None, map(automaton.text_of_two_ways, pivots))
        return min(found, key=len, default=None)
    except (ImportError, AttributeError, LookupError, TypeError, ValueError, RecursionError, _TooMuch):
        return None


def _is_loop(least: int, most: int, items: _Items) -> bool:
    """Whether a repeat has no bound; one that has is read as so many copies."""
    return most > _MOST_COPIES and (least != most or _has_loop(items))


def _has_loop(items: _Items) -> bool:
    for op, value in items or ():
        name = str(op)
        if name in _REPEATS and _is_loop(*value):
            return True
        if any(map(_has_loop, _parts(name, value))):
            return True
    return False


def _parts(name: str, value: Any) -> list[_Items]:
    """The sequences of items that an item holds."""
    if name in ("SUBPATTERN", *_REPEATS):
        return [value[-1]]
    if name == "ATOMIC_GROUP":
        return [value]
    return list(value[1]) if name == "BRANCH" else list(value[1:]) if name == "GROUPREF_EXISTS" else []


class _Automaton:
    """Positions of a regex, the characters that each matches, and in how many ways each follows another.

    Args:
        parser: The parser of the standard library.
        state: What the parser knows of the regex.
        apart: Gets the items that are to be judged by themselves.
        loop: The number of the loop that holds all of it; 0: none does.
    """

    def __init__(self, parser: Any, state: Any, apart: list[_Items], loop: int = 0) -> None:
        self._parser, self._state, self._apart = parser, state, apart
        self.chars: list[int] = []
        self.follow: list[Counter[int]] = []
        self.loops: list[int] = []  # the number of the outermost loop that holds each position, or 0
        self._loop, self._num_loops = loop, loop
        self._num_in_loops = 0
        self._possessive: set[int] = set()
        self.steps = 0

    # -- making it

    def read(self, items: _Items) -> _Atom:
        """The part for a sequence of items as the parser gives them."""
        joined = _Atom(nullable=True)
        for op, value in items:
            joined = self._then(joined, self._item(op, value))
        return joined

    def _item(self, item: Any, value: Any) -> _Atom:
        op = str(item)
        if op in ("MAX_REPEAT", "MIN_REPEAT"):
            return self._repeat(*value)
        if op == "POSSESSIVE_REPEAT":
            self._apart.append([("MAX_REPEAT", value)])
            return self._taken_at_once(value[2], value[0] == 0) if _is_loop(*value) else self._repeat(*value)
        if op == "ATOMIC_GROUP":
            self._apart.append(value)
            return self._taken_at_once(value, nullable=False) if _has_loop(value) else self.read(value)
        if op == "SUBPATTERN":
            return self.read(value[-1])
        if op in ("BRANCH", "GROUPREF_EXISTS"):
            parts = [self.read(items or ()) for items in _parts(op, value)]
            first, last = ([p for part in parts for p in getattr(part, end)] for end in ("first", "last"))
            return _Atom(any(part.nullable for part in parts), first, last)
        if op == "AT":
            return self._position(1 << _END) if str(value) in ("AT_END", "AT_END_STRING") else _Atom(True)
        if op in ("ASSERT", "ASSERT_NOT"):
            self._apart.append(value[1])
            return _Atom(nullable=True)
        if op == "GROUPREF":
            return _Atom(nullable=True)
        return self._position(
            _characters(item, tuple(value) if op == "IN" else value, self._state.flags) if self._loop else 0
        )

    def _repeat(self, least: int, most: int, items: _Items) -> _Atom:
        if not _is_loop(least, most, items):
            optional = _Atom(nullable=True)
            for _ in range(most - least):  # x{0,2} is (x(x)?)?: one way for each count
                optional = self._then(self.read(items), optional)
                optional.nullable = True
            joined = _Atom(nullable=True)
            for _ in range(least):
                joined = self._then(joined, self.read(items))
            return self._then(joined, optional)
        outer = self._loop
        self._num_loops += not outer
        self._loop = outer or self._num_loops
        body = self.read(items)
        self._loop = outer
        self._join(body.last, body.first)
        return _Atom(body.nullable or least == 0, body.first, body.last)

    def _taken_at_once(self, items: _Items, nullable: bool) -> _Atom:
        """A loop that gives nothing back: one position that takes any number of its characters, and none is left."""
        inside = _Automaton(self._parser, self._state, [], loop=1)
        inside.read(items)
        chars = 0
        for each in inside.chars:
            chars |= each
        part = self._position(chars)
        self._join(part.last, part.first)
        self._possessive.update(part.first)
        return _Atom(nullable, part.first, part.last)

    def _join(self, last: list[int], first: list[int]) -> None:
        for p in last:
            self.follow[p].update(q for q in first if p != q or p not in self._possessive)

    def _then(self, one: _Atom, two: _Atom) -> _Atom:
        self._join(one.last, two.first)
        first = one.first + two.first if one.nullable else one.first
        last = one.last + two.last if two.nullable else two.last
        return _Atom(one.nullable and two.nullable, first, last)

    def _position(self, chars: int) -> _Atom:
        self._num_in_loops += bool(self._loop)
        if self._num_in_loops > _MOST_POSITIONS:
            raise _TooMuch
        self.chars.append(chars)
        self.follow.append(Counter())
        self.loops.append(self._loop)
        at = [len(self.chars) - 1]
        return _Atom(False, at, at)

    # -- asking it

    def text_of_two_ways(self, pivot: int) -> str | None:
        """A text that leads from a position back to it in two ways."""
        start: _Pair = (pivot, pivot, False)
        came: dict[_Pair, tuple[_Pair, int] | None] = {start: None}
        waiting: deque[_Pair] = deque([start])
        while waiting:
            here = waiting.popleft()
            for there, chars in self._next(here):
                if there == (pivot, pivot, True):
                    return _text(came, here, chars)
                if there not in came:
                    came[there] = here, chars
                    waiting.append(there)
        return None

    def _next(self, here: _Pair) -> Iterator[tuple[_Pair, int]]:
        one, two, parted = here
        for a, ways in self.follow[one].items():
            for b in self.follow[two] if self.loops[a] == self.loops[one] else ():
                self.steps += 1
                if self.steps > _MOST_STEPS:
                    raise _TooMuch
                chars = self._next_chars(one, a) & self._next_chars(two, b) & _ALL
                if chars:
                    yield (a, b, parted or a != b or (one == two and ways > 1)), chars

    def _next_chars(self, here: int, there: int) -> int:
        """The characters that lead from one position to another: none that a possessive repeat would have taken."""
        taken = self.chars[here] if here in self._possessive and here != there else 0
        return self.chars[there] & ~taken


@cache
def _characters(op: Any, value: Any, flags: int) -> int:
    """The characters that one item matches: `re` itself is asked."""
    parser: Any = import_module("re._parser")
    one = parser.SubPattern(parser.State(), [(op, list(value) if str(op) == "IN" else value)])
    matches = import_module("re._compiler").compile(one, flags).fullmatch
    return sum(1 << code for code in range(256) if matches(chr(code))) | bool(matches("字")) << _OTHER


def _text(came: Mapping[_Pair, tuple[_Pair, int] | None], here: _Pair, chars: int) -> str:
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
