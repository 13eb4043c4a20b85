"""Paths that differ only in numbers, as one: `blocks.{0..31}.kernel`.

Repeated blocks make a model's variables long to list and quick to understand. Whatever is shown of many variables, a
table or a list of problems, is shown for each group of them once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"\d+")
_MOST_DIGITS = 15  # of what is taken for a number: JavaScript is exact to there, and Python refuses 4300


def path_shape(path: str) -> tuple[str, ...]:
    """The parts of a path between its numbers; equal for the paths of one group.

    Example:
        >>> path_shape("blocks.12.mlp.kernel")
        ('blocks.', '.mlp.kernel')
    """
    return tuple(_NUMBER.split(path))


def starred(path: str) -> str:
    """A path with a star for each number; equal for the paths of one group.

    Example:
        >>> starred("blocks.12.mlp.kernel")
        'blocks.*.mlp.kernel'
    """
    return _NUMBER.sub("*", path)


def repeated_layers(paths: Iterable[str]) -> frozenset[str]:
    """The paths of layers that a model has several of, which differ in a number only.

    Args:
        paths: The paths of its variables.

    Example:
        >>> sorted(repeated_layers(["blocks.0.up.kernel", "blocks.1.up.kernel", "head_1.kernel"]))
        ['blocks.0', 'blocks.1']
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for path in dict.fromkeys(p[:at] for p in paths for at, sign in enumerate(p) if sign == "."):
        if any(map(str.isdigit, path.rpartition(".")[2])):
            groups.setdefault(path_shape(path), []).append(path)
    return frozenset(path for same in groups.values() if len(same) > 1 for path in same)


def merge_paths(paths: Sequence[str]) -> str:
    """One text for the paths of one group.

    Example:
        >>> merge_paths(["blocks.0.kernel", "blocks.1.kernel", "blocks.2.kernel", "blocks.7.kernel"])
        'blocks.{0..2,7}.kernel'
    """
    if len(paths) == 1:
        return paths[0]
    columns = zip(*(_NUMBER.findall(path) for path in paths), strict=True)
    merged = iter([_ranges([*dict.fromkeys(column)]) for column in columns])
    return _NUMBER.sub(lambda _: next(merged), paths[0])


def path_pattern(paths: Sequence[str]) -> str:
    """A rule's pattern, as source text, that matches the paths of one group and nothing behind them.

    Example:
        >>> print(path_pattern(["blocks.0.conv2d.kernel", "blocks.1.conv2d.kernel"]))
        r"blocks\\.\\d+\\.conv2d\\.kernel$"
    """
    return f'r"{path_regex(paths)}"'


def path_regex(paths: Sequence[str]) -> str:
    """A rule's pattern that matches the paths of one group and nothing behind them; of one path, that path alone.

    Example:
        >>> print(path_regex(["a.0.b", "a.1.b"]), path_regex(["a.0.b"]))
        a\\.\\d+\\.b$ a\\.0\\.b$
    """
    columns = zip(*map(_NUMBER.findall, paths), strict=True)
    varies = iter([len(set(column)) > 1 for column in columns])
    pattern = _NUMBER.sub(lambda number: r"\d+" if next(varies) else number.group(), re.escape(paths[0]))
    return f"{pattern}$"


def _ranges(texts: Sequence[str]) -> str:
    if len(texts) == 1:
        return texts[0]
    if max(map(len, texts)) > _MOST_DIGITS:
        return "{" + ",".join(texts) + "}"
    numbers = sorted(set(map(int, texts)))
    parts: list[str] = []
    start = last = numbers[0]
    for n in [*numbers[1:], -1]:
        if n == last + 1:
            last = n
            continue
        parts.append(str(start) if start == last else f"{start}..{last}")
        start = last = n
    return "{" + ",".join(parts) + "}"
