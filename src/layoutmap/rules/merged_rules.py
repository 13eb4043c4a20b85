"""Write few readable rules for the layouts of many variables, without matching any other variable.

A rule names the layer and the variable, as in `.*\\.(query|key|value)_dense\\.kernel$`, with as much of the path before
it as tells them from others. What is replicated gets no rule: the map says so of the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from layoutmap.core.paths import make_path_regex
from layoutmap.core.specs import Specs

_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"\\d\+|\\.|[^_\\]+|_")
_MERGED_PART = "\0"


def make_group_rules(
    layouts: Mapping[tuple[str, ...], Specs], others: Mapping[str, str] | None = None
) -> dict[str, Specs]:
    """Make rules that give groups of paths their specs and match no other path.

    Args:
        layouts: The specs of each group of paths that differ in numbers only.
        others: Further paths: whose path each is another of, or itself.

    Returns:
        Specs by pattern, in the order of the groups. Groups of replicated variables have none.

    Example:
        >>> paths = {name: (f"h.0.{name}_proj.kernel", f"h.1.{name}_proj.kernel") for name in ("up", "gate", "down")}
        >>> found = {paths["up"]: (None, "model"), paths["gate"]: (None, "model"), paths["down"]: ("model", None)}
        >>> for pattern, specs in make_group_rules(found).items():
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
        for pattern in merge_patterns(_find_pattern_parts(paths, unwanted) for paths in groups):
            matched = {owner for path, owner in owners.items() if re.match(pattern, path)} & wanted
            if matched:  # an earlier rule may already match all of them through an alias
                rules[pattern] = specs
                wanted -= matched
    return rules


def _find_pattern_parts(paths: Sequence[str], unwanted: set[str]) -> tuple[str, ...]:
    """Find the shortest pattern, of at least layer and variable, that matches these paths and no unwanted one.

    It is given as what may stand before, and the parts of the path.
    """
    split = [path.split(".") for path in paths]
    depth = min(map(len, split))
    for length in range(min(2, depth), depth + 1):
        # also match if the model becomes part of a larger one
        start = r".*\." if depth > length else r"(.*\.)?"
        regex = make_path_regex([".".join(each[-length:]) for each in split])
        if _is_only_for(start + regex, unwanted):
            return (start, *regex[:-1].split(r"\."))
    return find_full_pattern_parts(paths, paths, unwanted)


def find_full_pattern_parts(
    paths: Sequence[str], group: Sequence[str], unwanted: Iterable[str]
) -> tuple[str, ...]:
    """Return the parts of a pattern for whole paths that differ in numbers only and match no unwanted path.

    Args:
        paths: The paths.
        group: Paths that the pattern may match, if it then has no numbers of its own.
        unwanted: Paths that it must not match.
    """
    for regex in (make_path_regex(group), match_numbers(paths)):
        if _is_only_for(regex, unwanted):
            return ("", *regex[:-1].split(r"\."))
    return ("", f"({'|'.join(map(re.escape, paths))})")


def match_numbers(paths: Sequence[str]) -> str:
    """Return a pattern that matches, at each position, only the numbers that occur in these paths."""
    columns = iter([list(dict.fromkeys(column)) for column in zip(*map(_NUMBER.findall, paths), strict=True)])
    return _NUMBER.sub(lambda _: _join_alternatives(next(columns)), re.escape(paths[0])) + "$"


def _join_alternatives(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"({'|'.join(texts)})"


def _is_only_for(pattern: str, unwanted: Iterable[str]) -> bool:
    compiled = re.compile(pattern)
    return not any(compiled.match(path) for path in unwanted)


def merge_patterns(patterns: Iterable[tuple[str, ...]]) -> list[str]:
    """Merge patterns that differ in one part, and return them as text.

    Args:
        patterns: For each pattern the text before its parts, and its parts.
    """
    rows = list(dict.fromkeys(patterns))
    for place in range(-1, -max(map(len, rows), default=0), -1):
        groups: dict[tuple[str, ...], list[str]] = {}
        for row in rows:
            at = len(row) + place
            if at < 1:
                groups.setdefault(row, [])
            else:
                groups.setdefault((*row[:at], _MERGED_PART, *row[at + 1 :]), []).append(row[at])
        rows = [
            tuple(_merge_parts(found) if part == _MERGED_PART else part for part in row)
            for row, found in groups.items()
        ]
    return [row[0] + r"\.".join(row[1:]) + "$" for row in rows]


def _merge_parts(parts: Sequence[str]) -> str:
    """Merge parts of paths into one regex, with the common prefix and suffix outside the alternatives."""
    words = [_split_words(part) for part in parts]
    first = _count_common_words(words)
    last = _count_common_words([each[first:][::-1] for each in words])
    begin, end = "".join(words[0][:first]), "".join(words[0][len(words[0]) - last :])
    return begin + _join_alternatives(["".join(each[first : len(each) - last]) for each in words]) + end


def _split_words(regex: str) -> list[str]:
    """Split a regex into words, and keep a group of alternatives in one word."""
    words, begun = list[str](), 0
    for word in _WORD.findall(regex):
        if begun:
            words[-1] += word
        else:
            words.append(word)
        if not word.startswith("\\"):
            begun += word.count("(") - word.count(")")
    return words


def _count_common_words(words: Sequence[Sequence[str]]) -> int:
    """Count the leading words that all sequences share, leaving at least one word in each."""
    count = 0
    for column in zip(*(each[:-1] for each in words), strict=False):
        if len(set(column)) > 1:
            break
        count += 1
    return count
