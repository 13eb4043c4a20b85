"""Group paths that differ only in numbers, and write each group as one path: `blocks.{0..31}.kernel`.

Models repeat their blocks, so tables and lists of problems show each group once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"\d+")
_MAX_DIGITS = 15  # JavaScript numbers are exact up to 15 digits, so longer numbers get no ranges


def split_path_at_numbers(path: str) -> tuple[str, ...]:
    """Return the parts of a path between its numbers. Paths that differ only in numbers have the same parts.

    Example:
        >>> split_path_at_numbers("blocks.12.mlp.kernel")
        ('blocks.', '.mlp.kernel')
    """
    return tuple(_NUMBER.split(path))


def replace_numbers_with_stars(path: str) -> str:
    """Return a path with a star for each number. Paths that differ only in numbers give the same text.

    Example:
        >>> replace_numbers_with_stars("blocks.12.mlp.kernel")
        'blocks.*.mlp.kernel'
    """
    return _NUMBER.sub("*", path)


def find_repeated_layers(paths: Iterable[str]) -> frozenset[str]:
    """Return the paths of layers with a number in the last part, if several of them differ only in numbers.

    Args:
        paths: The paths of the model's variables.

    Example:
        >>> sorted(find_repeated_layers(["blocks.0.up.kernel", "blocks.1.up.kernel", "head_1.kernel"]))
        ['blocks.0', 'blocks.1']
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for path in dict.fromkeys(p[:at] for p in paths for at, sign in enumerate(p) if sign == "."):
        if any(map(str.isdigit, path.rpartition(".")[2])):
            groups.setdefault(split_path_at_numbers(path), []).append(path)
    return frozenset(path for same in groups.values() if len(same) > 1 for path in same)


def format_merged_paths(paths: Sequence[str]) -> str:
    """Return one text for paths that differ only in numbers, with the ranges of the numbers in braces.

    Example:
        >>> format_merged_paths(["blocks.0.kernel", "blocks.1.kernel", "blocks.7.kernel"])
        'blocks.{0..1,7}.kernel'
    """
    if len(paths) == 1:
        return paths[0]
    columns = zip(*(_NUMBER.findall(path) for path in paths), strict=True)
    merged = iter([_format_number_ranges([*dict.fromkeys(column)]) for column in columns])
    return _NUMBER.sub(lambda _: next(merged), paths[0])


def format_path_regex_as_python(paths: Sequence[str]) -> str:
    """Return the result of `make_path_regex` as Python source, which is a raw string.

    Example:
        >>> print(format_path_regex_as_python(["blocks.0.conv2d.kernel", "blocks.1.conv2d.kernel"]))
        r"blocks\\.\\d+\\.conv2d\\.kernel$"
    """
    return f'r"{make_path_regex(paths)}"'


def make_path_regex(paths: Sequence[str]) -> str:
    """Return a regex that matches paths that differ only in numbers. It has `\\d+` for each number that varies.

    Example:
        >>> print(make_path_regex(["a.0.b", "a.1.b"]), make_path_regex(["a.0.b"]))
        a\\.\\d+\\.b$ a\\.0\\.b$
    """
    columns = zip(*map(_NUMBER.findall, paths), strict=True)
    varies = iter([len(set(column)) > 1 for column in columns])
    pattern = _NUMBER.sub(lambda number: r"\d+" if next(varies) else number.group(), re.escape(paths[0]))
    return f"{pattern}$"


def _format_number_ranges(numbers: Sequence[str]) -> str:
    """Merge numbers, given as text, into one text of sorted ranges: `{0..3,7}`. Return a single number unchanged."""
    if len(numbers) == 1:
        return numbers[0]
    if max(map(len, numbers)) > _MAX_DIGITS:
        return "{" + ",".join(numbers) + "}"
    values = sorted(set(map(int, numbers)))
    parts: list[str] = []
    start = last = values[0]
    for n in [*values[1:], -1]:
        if n == last + 1:
            last = n
            continue
        parts.append(str(start) if start == last else f"{start}..{last}")
        start = last = n
    return "{" + ",".join(parts) + "}"
