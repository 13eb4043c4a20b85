"""Compile the regex of a rule, or raise an error with a suggested correction."""

from __future__ import annotations

import re

from layoutmap.core.errors import RuleError
from layoutmap.core.match import KERAS
from layoutmap.rules.keras_rules import anchor_pattern, is_keras_rule

_MAX_LENGTH = 1000
_MAX_COST = 27  # a repeat costs 4 and an optional part 1; this limit keeps a path of 60 letters to seconds
_OPENING = re.compile(r"\((?:\?(?:[aimsu-]*:|[=!>]|<[=!]|P<\w+>))?")
_TOKEN = re.compile(
    rf"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:P=\w+|[aimsu]+)\)|{_OPENING.pattern}|(?:[*+?]|\{{\d*,?\d*\}})[+?]?|.",
    re.DOTALL,
)
_CHOICE = re.compile(r"\||[*+?]\??|\{.+")  # a possessive repeat has no alternatives, so it is not matched
_LARGE_COUNT = re.compile(r"\{.*\d{4}")
_LOOP = re.compile(r"[*+{]")
_PART = re.compile(r"\((?:\?:)?(?:X\\\.|\\\.X)".replace("X", r"(?:\\[wd]|\[\^\\?\.\])[+*]"))
_END = re.compile(r"\)*\Z")
_DOT = re.compile(r"\)*\\\.")


def compile_pattern(pattern: str, rule: str) -> re.Pattern[str]:
    """Compile the regex of a rule. `rule` names the rule in errors.

    Raises:
        RuleError: It is no regex.
    """
    try:
        return re.compile(anchor_pattern(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        raise RuleError(
            f"{rule} {pattern!r} is not a regex",
            why=_explain_error(error),
            fix=_suggest_fix(pattern.removeprefix(KERAS), error),
        ) from error


def refuse_slow_pattern(pattern: str, rule: str) -> None:
    """Raise for a regex from a file that could keep a lookup busy for hours.

    Raises:
        RuleError: The pattern exceeds a limit.
    """
    # A rule for Keras names matches the whole name, so add the end.
    reason = find_slow_part(pattern + "$" * is_keras_rule(pattern))
    if reason:
        raise RuleError(
            f"{rule} {pattern[:_MAX_LENGTH]!r} could take too long on a path without a match",
            why=reason,
            fix=r"write [^.]+ for a part of a path and (\w+\.)* for several, or make a repeat possessive, as in \w++",
        )


# A regex in a downloaded file can hang, so patterns from files have limits (decisions/0199).
def find_slow_part(pattern: str) -> str:
    """Return the limit that a regex exceeds, or an empty string.

    Example:
        >>> find_slow_part("(a+)+$"), find_slow_part(r"(\\w+\\.)+kernel")
        ('a repeated group holds a repeat or an alternative', '')
    """
    if len(pattern) > _MAX_LENGTH:
        return f"a pattern of a file has at most {_MAX_LENGTH} characters"
    opened: list[int] = []
    cost = 0
    for match in _TOKEN.finditer(pattern):
        token, start, end = match[0], *match.span()
        if _LARGE_COUNT.match(token) or pattern[start - 1 : end] == "(?":
            return "a count above 999, a comment, a condition, and the flag x are for rules in Python code"
        if token == ")" and opened:
            group = pattern[opened.pop() : start]
            if _LOOP.match(pattern, end) and _has_choice(group) and not _PART.fullmatch(group):
                return "a repeated group holds a repeat or an alternative"
        elif _OPENING.fullmatch(token):
            opened.append(start)
        elif token == "|" and not opened:
            cost = 0  # top-level alternatives are tried one after the other, so their costs add up
        elif _CHOICE.fullmatch(token) and not _END.match(pattern, end):
            cost += 1 if token[0] in "|?" or _DOT.match(pattern, end) else 4
            if cost > _MAX_COST:
                return f"a pattern has at most 6 repeats, or {_MAX_COST} optional parts and alternatives"
    return ""


def _has_choice(group: str) -> bool:
    return any(map(_CHOICE.fullmatch, _TOKEN.findall(group)))


def _explain_error(error: Exception) -> str:
    if not isinstance(error, re.error):
        return str(error)
    return error.msg if error.pos is None else f"{error.msg}, at character {error.pos}"


def _suggest_fix(pattern: str, error: Exception) -> str:
    if re.search(r"(^|[(|])\*", pattern):  # the user wrote a glob, the most common mistake
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
