"""The regex of a rule: compiled, or refused with what to write instead."""

from __future__ import annotations

import re

from layoutmap.core.errors import RuleError
from layoutmap.core.match import KERAS
from layoutmap.rules.backtracking import doubling_text
from layoutmap.rules.keras_rules import anchored


def compile_pattern(pattern: str, rule: str) -> re.Pattern[str]:
    """The compiled regex of a rule; `rule` is what messages call it.

    Raises:
        RuleError: It is no regex.
    """
    try:
        return re.compile(anchored(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        raise RuleError(
            f"{rule} {pattern!r} is not a regex",
            why=_why(error),
            fix=_fix(pattern.removeprefix(KERAS), error),
        ) from error


def refuse_if_endless(compiled: re.Pattern[str], pattern: str, rule: str) -> None:
    """Raise for a regex that can take exponential time to fail, and so keep a lookup busy for hours.

    Raises:
        RuleError: It is one.
    """
    text = doubling_text(compiled)
    if text is None:
        return
    possessive = _possessive(pattern)
    raise RuleError(
        f"{rule} {pattern!r} could take forever on a path that it does not match",
        facts={"for example": f"a path with {text!r} many times in a row"},
        why="its repeats can split that text in more than one way, and each repetition doubles the ways to try",
        fix="write it so that there is one way to match, as in [^.]+ for a part of a path"
        + (f"\nor with a possessive repeat, which never backtracks: {possessive!r}" if possessive else ""),
    )


def _possessive(pattern: str) -> str | None:
    """The pattern with one of its repeated groups made possessive, if that leaves one way to match."""
    for end in re.finditer(r"\)(?:[*+]|\{\d*,?\d*\})(?![+?])", pattern):
        meant = f"{pattern[: end.end()]}+{pattern[end.end() :]}"
        if _is_regex(meant) and doubling_text(re.compile(meant)) is None:
            return meant
    return None


def _why(error: Exception) -> str:
    if not isinstance(error, re.error):
        return str(error)
    return error.msg if error.pos is None else f"{error.msg}, at character {error.pos}"


def _fix(pattern: str, error: Exception) -> str:
    if re.search(r"(^|[(|])\*", pattern):  # the most common mistake: a glob
        meant = re.sub(r"(?<![.\\])\*", ".*", re.sub(r"(?<!\\)\.(?!\*)", r"\\.", pattern))
        if _is_regex(meant):
            return f"in a regex, .* matches anything: {meant!r}"
    position = getattr(error, "pos", None)
    if position is not None and pattern[position : position + 1] in tuple("([{)*+?"):
        meant = f"{pattern[:position]}\\{pattern[position:]}"
        if _is_regex(meant):
            return f"complete the regex, or escape the character if it is meant literally: {meant!r}"
    return "fix the regex; re.escape(path) escapes all special characters of a path"


def _is_regex(pattern: str) -> bool:
    try:
        return bool(re.compile(pattern))
    except (re.error, OverflowError, RecursionError):
        return False
