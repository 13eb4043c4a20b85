"""Rules for layouts that were found: as few as a person wants to read, each for just the variables it says.

A rule names the layer and the variable, as in `.*\\.(query|key|value)_dense\\.kernel$`, with as much of the path before
it as tells them from others. What is replicated gets no rule: the map says so of the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from layoutmap.core.paths import path_regex
from layoutmap.core.specs import Specs

_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"\\d\+|\\.|[^_\\]+|_")
_HERE = "\0"


def rules_for(
    layouts: Mapping[tuple[str, ...], Specs], others: Mapping[str, str] | None = None
) -> dict[str, Specs]:
    """Rules that give groups of paths these specs, and match no other path.

    Args:
        layouts: The specs of each group of paths that differ in numbers only.
        others: Further paths: whose path each is another of, or itself.

    Returns:
        Specs by pattern, in the order of the groups. Groups of replicated variables have none.

    Example:
        >>> paths = {name: (f"h.0.{name}_proj.kernel", f"h.1.{name}_proj.kernel") for name in ("up", "gate", "down")}
        >>> found = {paths["up"]: (None, "model"), paths["gate"]: (None, "model"), paths["down"]: ("model", None)}
        >>> for pattern, specs in rules_for(found).items():
        ...     print(pattern, specs)
        .*\\.(up|gate)_proj\\.kernel$ (None, 'model')
        .*\\.down_proj\\.kernel$ ('model', None)
    """
    by_specs: dict[Specs, list[tuple[str, ...]]] = {}
    for paths, specs in layouts.items():
        if any(spec is not None for spec in specs):
            by_specs.setdefault(specs, []).append(paths)
    owners = {path: path for paths in layouts for path in paths} | dict(others or {})
    rules: dict[str, Specs] = {}
    for specs, groups in by_specs.items():
        wanted = {path for paths in groups for path in paths}
        unwanted = {path for path, owner in owners.items() if owner not in wanted}
        for pattern in _merged(_parts(paths, unwanted) for paths in groups):
            matched = {owner for path, owner in owners.items() if re.match(pattern, path)} & wanted
            if matched:  # a rule before it may be for all of them, by another of their paths
                rules[pattern] = specs
                wanted -= matched
    return rules


def _parts(paths: Sequence[str], unwanted: set[str]) -> tuple[str, ...]:
    """The shortest pattern of at least the layer and the variable that matches these paths and nothing unwanted.

    It is given as what may stand before, and the parts of the path.
    """
    split = [path.split(".") for path in paths]
    depth = min(map(len, split))
    for length in range(min(2, depth), depth + 1):
        start = r".*\." if depth > length else r"(.*\.)?"  # which allows for another model around this one
        regex = path_regex([".".join(each[-length:]) for each in split])
        if _is_only_for(start + regex, unwanted):
            return (start, *regex[:-1].split(r"\."))
    for regex in (path_regex(paths), _with_their_numbers(paths)):
        if _is_only_for(regex, unwanted):
            return ("", *regex[:-1].split(r"\."))
    return ("", f"({'|'.join(map(re.escape, paths))})")


def _with_their_numbers(paths: Sequence[str]) -> str:
    """A pattern with just the numbers that are in paths of one group, each in its place."""
    columns = iter([list(dict.fromkeys(column)) for column in zip(*map(_NUMBER.findall, paths), strict=True)])
    return _NUMBER.sub(lambda _: _one_of(next(columns)), re.escape(paths[0])) + "$"


def _one_of(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"({'|'.join(texts)})"


def _is_only_for(pattern: str, unwanted: Iterable[str]) -> bool:
    compiled = re.compile(pattern)
    return not any(compiled.match(path) for path in unwanted)


def _merged(patterns: Iterable[tuple[str, ...]]) -> list[str]:
    """Patterns in parts as texts, those that differ in one part as one with a choice."""
    rows = list(dict.fromkeys(patterns))
    for place in range(-1, -max(map(len, rows), default=0), -1):
        groups: dict[tuple[str, ...], list[str]] = {}
        for row in rows:
            at = len(row) + place
            if at < 1:
                groups.setdefault(row, [])
            else:
                groups.setdefault((*row[:at], _HERE, *row[at + 1 :]), []).append(row[at])
        rows = [
            tuple(_choice(found) if part == _HERE else part for part in row) for row, found in groups.items()
        ]
    return [row[0] + r"\.".join(row[1:]) + "$" for row in rows]


def _choice(parts: Sequence[str]) -> str:
    """One regex for parts of paths, with what they begin and end with before and behind the choice."""
    words = [_words(part) for part in parts]
    first = _common(words)
    last = _common([each[first:][::-1] for each in words])
    begin, end = "".join(words[0][:first]), "".join(words[0][len(words[0]) - last :])
    return begin + _one_of(["".join(each[first : len(each) - last]) for each in words]) + end


def _words(regex: str) -> list[str]:
    """The words of a regex; a choice in it, with all that it holds, is part of one."""
    words, begun = list[str](), 0
    for word in _WORD.findall(regex):
        if begun:
            words[-1] += word
        else:
            words.append(word)
        if not word.startswith("\\"):
            begun += word.count("(") - word.count(")")
    return words


def _common(words: Sequence[Sequence[str]]) -> int:
    """How many words all begin with, of which one at least is left over in each."""
    count = 0
    for column in zip(*(each[:-1] for each in words), strict=False):
        if len(set(column)) > 1:
            break
        count += 1
    return count
