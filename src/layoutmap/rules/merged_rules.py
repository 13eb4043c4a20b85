"""Write few readable rules for the layouts of many variables, without matching any other variable.

A rule names the layer and the variable, as in `.*\\.(query|key|value)_dense\\.kernel$`. It has more of the path only if
that is needed to match no other variable. Replicated variables get no rule, because `rest` replicates them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from layoutmap.core.paths import make_path_regex, split_path_at_numbers
from layoutmap.core.specs import Specs

_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"\\d\+|\\.|[^_\\]+|_")
_MERGED_PART = "\0"


def make_rules_for_path_groups(
    specs_by_group: Mapping[tuple[str, ...], Specs], owners_of_other_paths: Mapping[str, str] | None = None
) -> dict[str, Specs]:
    """Return rules that give groups of paths their specs and match no other path.

    Args:
        specs_by_group: The specs of each group of paths that differ in numbers only.
        owners_of_other_paths: Further paths (aliases, or paths in no group), each with the path of its variable.

    Returns:
        Specs by pattern, in the order of the groups. Groups of replicated variables have none.

    Example:
        >>> paths = {name: (f"h.0.{name}_proj.kernel", f"h.1.{name}_proj.kernel") for name in ("up", "gate", "down")}
        >>> found = {paths["up"]: (None, "model"), paths["gate"]: (None, "model"), paths["down"]: ("model", None)}
        >>> for pattern, specs in make_rules_for_path_groups(found).items():
        ...     print(pattern, specs)
        .*\\.(up|gate)_proj\\.kernel$ (None, 'model')
        .*\\.down_proj\\.kernel$ ('model', None)
    """
    by_specs: dict[Specs, list[tuple[str, ...]]] = {}
    for paths, specs in specs_by_group.items():
        if any(spec is not None for spec in specs):
            by_specs.setdefault(specs, []).append(paths)
    owners = {path: path for paths in specs_by_group for path in paths} | dict(owners_of_other_paths or {})
    rules: dict[str, Specs] = {}
    for specs, groups in by_specs.items():
        wanted = {path for paths in groups for path in paths}
        unwanted = {path for path, owner in owners.items() if owner not in wanted}
        for pattern in merge_patterns(_find_shortest_pattern_parts(paths, unwanted) for paths in groups):
            matched = {owner for path, owner in owners.items() if re.match(pattern, path)} & wanted
            if matched:  # if empty, earlier rules already match all of these variables by their aliases
                rules[pattern] = specs
                wanted -= matched
    return rules


def _find_shortest_pattern_parts(paths: Sequence[str], unwanted: set[str]) -> tuple[str, ...]:
    """Return the parts of the shortest pattern that matches these paths and no unwanted path.

    It has at least the last two parts of the path, the names of layer and variable.

    The first item is the regex for the start of the path, and the others are the regexes of the path's last parts.
    """
    split = [path.split(".") for path in paths]
    depth = min(map(len, split))
    for length in range(min(2, depth), depth + 1):
        # If the model becomes a part of a larger one, its paths get a prefix, so the pattern also allows a prefix.
        start = r".*\." if depth > length else r"(.*\.)?"
        regex = make_path_regex([".".join(each[-length:]) for each in split])
        if _has_no_match(start + regex, unwanted):
            return (start, *regex[:-1].split(r"\."))
    return find_whole_path_pattern_parts(paths, paths, unwanted)


def find_whole_path_pattern_parts(
    paths: Sequence[str], matchable_paths: Sequence[str], unwanted: Iterable[str]
) -> tuple[str, ...]:
    """Return the parts of a pattern for whole paths, which differ only in numbers. It matches no unwanted path.

    Args:
        paths: The paths.
        matchable_paths: Paths that the pattern may match besides, so that it can be shorter.
        unwanted: Paths that it must not match.
    """
    unwanted = list(unwanted)
    regex = make_path_regex(matchable_paths)
    if not _has_no_match(regex, unwanted):
        regex = _make_general_regex(paths, unwanted)
    return ("", *regex[:-1].split(r"\.")) if regex else ("", f"({'|'.join(map(re.escape, paths))})")


def _make_general_regex(paths: Sequence[str], unwanted: Sequence[str]) -> str:
    """Return a regex with `\\d+` for each number where that matches no unwanted path, or "" if exact numbers match one.

    Example:
        >>> print(_make_general_regex(["h.0.w1", "h.0.w3", "h.1.w1", "h.1.w3"], ["h.0.w2", "h.1.w2"]))
        h\\.\\d+\\.w(1|3)$
    """
    choices, separators = _make_number_regexes(paths), split_path_at_numbers(paths[0])
    regex = _replace_numbers_by_regexes(paths[0], choices)
    if not _has_no_match(regex, unwanted):
        return ""

    def is_number_in_name(column: int) -> bool:
        return not {separators[column][-1:], separators[column + 1][:1]} <= {"", "."}

    # A rule should also match further blocks, so try `\d+` for each number, first for block numbers and then for digits
    # in names.
    for column in sorted(range(len(choices)), key=is_number_in_name):
        tried = [*choices[:column], r"\d+", *choices[column + 1 :]]
        general = _replace_numbers_by_regexes(paths[0], tried)
        if "|" in choices[column] and _has_no_match(general, unwanted):
            choices, regex = tried, general
    return regex


def make_exact_number_regex(paths: Sequence[str]) -> str:
    """Return a regex for paths that differ only in numbers. It matches only numbers that occur at the same position."""
    return _replace_numbers_by_regexes(paths[0], _make_number_regexes(paths))


def _make_number_regexes(paths: Sequence[str]) -> list[str]:
    """Return a regex for each position of a number in the paths, which matches the numbers there."""
    columns = zip(*map(_NUMBER.findall, paths), strict=True)
    return [_join_alternatives(list(dict.fromkeys(column))) for column in columns]


def _replace_numbers_by_regexes(path: str, regexes: Iterable[str]) -> str:
    """Return a regex for a path, with these regexes in place of its numbers."""
    numbers = iter(regexes)
    return _NUMBER.sub(lambda _: next(numbers), re.escape(path)) + "$"


def _join_alternatives(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"({'|'.join(texts)})"


def _has_no_match(pattern: str, paths: Collection[str]) -> bool:
    # Most patterns have no unwanted paths, so compile only the others.
    return not paths or not any(map(re.compile(pattern).match, paths))


def merge_patterns(patterns: Iterable[tuple[str, ...]]) -> list[str]:
    """Return regexes as text, with patterns that differ in only one part merged into one regex.

    Args:
        patterns: For each pattern the regex for the start of the path, and the regexes of the path's parts.
    """
    rows = list(dict.fromkeys(patterns))
    for offset in range(-1, -max(map(len, rows), default=0), -1):
        groups: dict[tuple[str, ...], list[str]] = {}
        for row in rows:
            at = len(row) + offset
            if at < 1:
                groups.setdefault(row, [])
            else:
                groups.setdefault((*row[:at], _MERGED_PART, *row[at + 1 :]), []).append(row[at])
        rows = [
            tuple(_merge_path_parts(found) if part == _MERGED_PART else part for part in row)
            for row, found in groups.items()
        ]
    return [row[0] + r"\.".join(row[1:]) + "$" for row in rows]


def _merge_path_parts(parts: Sequence[str]) -> str:
    """Return one regex that matches several parts of paths: `(up|gate)_proj` for `up_proj` and `gate_proj`."""
    words = [_split_regex_into_words(part) for part in parts]
    first = _count_common_first_words(words)
    last = _count_common_first_words([each[first:][::-1] for each in words])
    begin, end = "".join(words[0][:first]), "".join(words[0][len(words[0]) - last :])
    return begin + _join_alternatives(["".join(each[first : len(each) - last]) for each in words]) + end


def _split_regex_into_words(regex: str) -> list[str]:
    """Return the words of a regex, split at underscores. A group of alternatives is in one word."""
    words, begun = list[str](), 0
    for word in _WORD.findall(regex):
        if begun:
            words[-1] += word
        else:
            words.append(word)
        if not word.startswith("\\"):
            begun += word.count("(") - word.count(")")
    return words


def _count_common_first_words(words: Sequence[Sequence[str]]) -> int:
    """Return the number of equal words at the start of all sequences. The last word of each is not compared."""
    count = 0
    for column in zip(*(each[:-1] for each in words), strict=False):
        if len(set(column)) > 1:
            break
        count += 1
    return count
