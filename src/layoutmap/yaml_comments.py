"""The comments of a rules file: what is said above an entry and beside it, kept while the entries change.

PyYAML reads no comments, but its marks tell where all else stands; what is left of the text are comments and blank
lines. They belong to the entry that follows, or at the end of whose line they are. An entry is known by its place,
`("rules", pattern)` or `("mesh", "dims")`, so a rule that is deleted takes its comment along, and others keep theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Comment", "Place", "as_comment", "read_comments", "with_comments"]

Place = tuple[str, ...]
"""The keys that lead to an entry of a rules file."""

_HEAD: Place = ()
_END: Place = ("...",)  # no key of a rules file; YAML ends a document so
_SECTIONS: set[Place] = {("mesh",), ("mesh", "dims"), ("rules",), ("activations",)}
_REST_OF_LINE = re.compile(r"[^\n\r\x85\u2028\u2029]*")
_NOT_IN_YAML = re.compile(r"[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Comment:
    """What a rules file says to people of one entry.

    Args:
        above: The lines above it, each with its sign `#`; `""` is a blank line.
        beside: What stands at the end of its line, with the sign; empty if nothing does.
    """

    above: tuple[str, ...] = ()
    beside: str = ""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A key in a text, and the first and the last of its lines, counted from 0; of a section, those of its key."""

    place: Place
    first: int
    last: int


def as_comment(text: str) -> Comment:
    """Text as lines above an entry.

    Raises:
        ValueError: It has a sign that YAML does not allow.

    Example:
        >>> as_comment("Attention:\\nwhole heads").above
        ('# Attention:', '# whole heads')
    """
    strange = _NOT_IN_YAML.search(text)
    if strange:
        raise ValueError(f"YAML does not allow the sign {strange[0]!r}")
    return Comment(tuple(f"# {line}".rstrip() for line in text.splitlines()))


def read_comments(text: str) -> dict[Place, Comment]:
    """The comments of a text that is YAML, by the place of their entry."""
    if not re.search(r"#|\n\s*\n", text):  # a large file that a program wrote is read in half the time
        return {}
    said = _said(text)
    found: dict[Place, Comment] = {}
    at = 0
    for number, entry in enumerate(_entries(text)):
        # What stands between the lines of one entry, such as a list with a line for each spec, goes above it, too.
        above = [line for line in said[at : entry.last] if line is not None]
        if number == 0:
            found[_HEAD], above = Comment(tuple(above)), []
        is_first_of_line = entry.last >= at
        found[entry.place] = Comment(tuple(above), (is_first_of_line and said[entry.last]) or "")
        at = entry.last + 1
    found[_END] = Comment(tuple(line for line in said[at:] if line is not None))
    return {place: comment for place, comment in found.items() if comment != Comment()}


def with_comments(text: str, comments: Mapping[Place, Comment]) -> str:
    """A text with comments at its entries; those of entries that it has not stand at its end."""
    left = dict(comments)
    lines = text.splitlines(keepends=True)
    head, end = left.pop(_HEAD, Comment()), left.pop(_END, Comment())
    above: dict[int, list[str]] = {}
    for entry in _entries(text):
        comment = left.pop(entry.place, Comment())
        indent = "  " * (len(entry.place) - 1)
        above[entry.first] = [f"{indent}{line}".rstrip() for line in comment.above]
        if comment.beside:
            lines[entry.last] = f"{lines[entry.last].rstrip()} {comment.beside}\n"
    homeless = [line for each in left.values() for line in (*each.above, each.beside) if line]
    body = [line for n, each in enumerate(lines) for line in (*(f"{a}\n" for a in above.get(n, ())), each)]
    before, after = ("".join(f"{line}\n" for line in part) for part in (head.above, (*homeless, *end.above)))
    return f"{before.lstrip()}{''.join(body)}{after}".rstrip() + "\n"


def _said(text: str) -> list[str | None]:
    """The comment of each line, `""` of a blank one, `None` of a line that has other signs only."""
    said: list[str | None] = [line.strip() for line in text.removeprefix("\ufeff").splitlines()]
    for token in _yaml().scan(text):
        start, end = token.start_mark, token.end_mark
        if start.index < end.index:  # else it is the begin or the end of a block, which has no signs
            for n in range(start.line, _last(end) + 1):
                said[n] = None
            rest = _REST_OF_LINE.match(text, end.index)
            if rest and rest[0].lstrip().startswith("#"):
                said[end.line] = rest[0].strip()
    return said


def _entries(text: str) -> Iterator[_Entry]:
    """The entries of a rules file, in the order of the text."""
    return _entries_of(_yaml().compose(text, _yaml().SafeLoader), _HEAD)


def _yaml() -> Any:  # what is known of its types is half of them
    import yaml

    return yaml


def _entries_of(node: Any, place: Place) -> Iterator[_Entry]:
    for key, value in node.value:
        own = (*place, str(key.value))
        # A mapping that stands elsewhere and is named here, with YAML's `*`, has its entries there.
        if own in _SECTIONS and value.id == "mapping" and value.start_mark.index > key.end_mark.index:
            yield _Entry(own, key.start_mark.line, _last(key.end_mark))
            yield from _entries_of(value, own)
        else:
            yield _Entry(own, key.start_mark.line, max(_last(key.end_mark), _last_of(value)))


def _last_of(node: Any) -> int:
    """The last line of a node. A block's own end is where the next one begins."""
    if node.id == "scalar" or node.flow_style or not node.value:
        return _last(node.end_mark)
    child = node.value[-1]
    return _last_of(child if node.id == "sequence" else child[1])


def _last(mark: Any) -> int:
    """The line of the last sign before a mark: YAML's `|` ends where the next line begins."""
    return mark.line - (mark.column == 0)
