"""The regex of a rule: compiled, refused with what to write instead, or warned of."""

from __future__ import annotations

import re
import warnings

from layoutmap.core.errors import LayoutMapWarning, RuleError
from layoutmap.core.match import KERAS
from layoutmap.core.users_line import level_of_user
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


def warn_if_slow(compiled: re.Pattern[str], rule: str) -> None:
    """Warn, on the user's line, of a regex that can take exponential time to fail; `rule` names it with its pattern."""
    text = doubling_text(compiled)
    if text is not None:
        warning = LayoutMapWarning(
            f"{rule} can take forever on a path that it does not match",
            facts={"for example": f"a path with {text!r} many times in a row"},
            why="its nested repeats can split that text in exponentially many ways",
            fix="write it so that a text matches in one way, as in [^.]+ for a part of a path",
        )
        warnings.warn(warning, stacklevel=level_of_user())


def _why(error: Exception) -> str:
    if not isinstance(error, re.error):
        return str(error)
    return error.msg if error.pos is None else f"{error.msg}, at character {error.pos}"


def _fix(pattern: str, error: Exception) -> str:
    if re.search(r"(^|[(|])\*", pattern):  # the most common mistake: a glob
        meant = re.sub(r"(?<![.\\])\*", ".*", re.sub(r"(?<!\\)\.(?!\*)", r"\\.", pattern))
        if _is_regex(meant):
            return f"a regex says .* for anything: {meant!r}"
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
