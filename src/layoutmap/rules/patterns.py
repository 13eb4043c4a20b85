"""Compile the regex of a rule, or raise an error with a suggested correction."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from layoutmap.core.errors import RuleError
from layoutmap.core.match import KERAS
from layoutmap.rules.keras_rules import anchor_keras_pattern, is_keras_rule

_MAX_LENGTH = 1000
# A repeat costs 4 and an optional part 1. At this limit, matching 60 letters already takes seconds.
_MAX_COST = 27
_OPENING = re.compile(r"\((?:\?(?:[aimsu-]*:|[=!>]|<[=!]|P<\w+>))?")
_TOKEN = re.compile(
    rf"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:P=\w+|[aimsu]+)\)|{_OPENING.pattern}|(?:[*+?]|\{{\d*,?\d*\}})[+?]?|.",
    re.DOTALL,
)
_CHOICE = re.compile(r"\||[*+?]\??|\{.+")  # possessive repeats never backtrack, so they are not counted
_LARGE_COUNT = re.compile(r"\{.*\d{4}")
_LOOP = re.compile(r"[*+{]")
_PART = re.compile(r"\((?:\?:)?(?:X\\\.|\\\.X)".replace("X", r"(?:\\[wd]|\[\^\\?\.\])[+*]"))
_END = re.compile(r"\)*\Z")
_DOT = re.compile(r"\)*\\\.")
_START = re.compile(rf"(?:{KERAS})?(?:\(\?[aimsu]+\))*")
_REFERENCE = re.compile(r"\\[1-9]|\(\?(?:P=|[(#]|[a-z]*x)")


class Alternative(NamedTuple):
    """An alternative in a regex: its position, and the regex before and after it without the other alternatives."""

    start: int
    end: int
    before: str
    after: str

    def replace_by(self, text: str) -> str:
        """Return the regex with a text in place of this alternative and of all others of its group."""
        return f"{self.before}{text}{self.after}"


def compile_pattern(pattern: str, rule_name: str) -> re.Pattern[str]:
    """Return the compiled regex of a rule. `rule_name` names the rule in errors.

    Raises:
        RuleError: It is no regex.
    """
    try:
        return re.compile(anchor_keras_pattern(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        raise RuleError(
            f"{rule_name} {pattern!r} is not a regex",
            why=_format_regex_error(error),
            fix=_suggest_regex_fix(pattern.removeprefix(KERAS), error),
        ) from error


def check_pattern_is_fast(pattern: str, rule_name: str) -> None:
    """Raise for a regex from a file that could take hours to match a path, because files may be from strangers.

    Raises:
        RuleError: The pattern exceeds a limit.
    """
    # A `keras:` rule must match the whole name, so check the pattern with the end `$`.
    reason = explain_why_pattern_is_slow(pattern + "$" * is_keras_rule(pattern))
    if reason:
        raise RuleError(
            f"{rule_name} {pattern[:_MAX_LENGTH]!r} could take too long on a path without a match",
            why=reason,
            fix=r"write [^.]+ for a part of a path and (\w+\.)* for several, or make a repeat possessive, as in \w++",
        )


# A regex in a downloaded file can hang, so patterns from files have limits (decisions/0199).
def explain_why_pattern_is_slow(pattern: str) -> str:
    """Return in words which limit a regex exceeds, or an empty string for a fast regex.

    Example:
        >>> explain_why_pattern_is_slow("(a+)+$"), explain_why_pattern_is_slow(r"(\\w+\\.)+kernel")
        ('a repeated group holds a repeat or an alternative', '')
    """
    if len(pattern) > _MAX_LENGTH:
        return f"a pattern of a file has at most {_MAX_LENGTH} characters"
    opened: list[int] = []
    cost = 0
    for match in _TOKEN.finditer(pattern):
        token, start, end = match[0], *match.span()
        if _LARGE_COUNT.match(token) or pattern[start - 1 : end] == "(?":
            return "only rules in Python code may have counts above 999, comments, conditions, or the flag x"
        if token == ")" and opened:
            group = pattern[opened.pop() : start]
            if _LOOP.match(pattern, end) and _has_repeat_or_alternative(group) and not _PART.fullmatch(group):
                return "a repeated group holds a repeat or an alternative"
        elif _OPENING.fullmatch(token):
            opened.append(start)
        elif token == "|" and not opened:
            cost = 0  # alternatives outside groups are tried one by one, so the limit is for each of them
        elif _CHOICE.fullmatch(token) and not _END.match(pattern, end):
            cost += 1 if token[0] in "|?" or _DOT.match(pattern, end) else 4
            if cost > _MAX_COST:
                return f"a pattern has at most 6 repeats, or {_MAX_COST} optional parts and alternatives"
    return ""


def list_alternatives(pattern: str) -> list[Alternative]:
    """Return the alternatives in a regex. Those in groups that are optional, repeated, or negated are left out.

    Example:
        >>> pattern = r"(a\\.(b|c)|d)\\.e"
        >>> [each.replace_by(pattern[each.start : each.end]) for each in list_alternatives(pattern)]
        ['(a\\\\.(b))\\\\.e', '(a\\\\.(c))\\\\.e', '(a\\\\.(b|c))\\\\.e', '(d)\\\\.e']
    """
    begin = _START.match(pattern)
    if "|" not in pattern or begin is None or _REFERENCE.search(pattern):
        return []
    opened, groups = [[begin.end()]], list[tuple[list[int], bool]]()
    for match in _TOKEN.finditer(pattern, begin.end()):
        if _OPENING.fullmatch(match[0]):
            opened.append([match.end()])
        elif match[0] == "|":
            opened[-1] += match.span()
        elif match[0] == ")":
            bounds = [*opened.pop(), match.start()]
            is_needed = not pattern[: bounds[0]].endswith("!") and pattern[match.end() :][:1] not in tuple(
                "*+?{"
            )
            groups.append((bounds, is_needed and all(i < j for i, j in _iterate_spans(bounds))))
    groups.append(([*opened.pop(), len(pattern)], True))
    found: list[Alternative] = []
    for bounds, _ in groups:
        for start, end in _iterate_spans(bounds) if len(bounds) > 2 else ():
            around = [(each, is_needed) for each, is_needed in groups if each[0] <= start and end <= each[-1]]
            before, after, i, j = "", "", 0, len(pattern)
            for each, _ in reversed(around):
                before, after = before + pattern[i : each[0]], pattern[each[-1] : j] + after
                i, j = next((i, j) for i, j in _iterate_spans(each) if i <= start and end <= j)
            if all(is_needed for _, is_needed in around):
                found.append(Alternative(start, end, before, after))
    return found


def _iterate_spans(bounds: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each alternative of a group."""
    return zip(bounds[::2], bounds[1::2], strict=True)


def _has_repeat_or_alternative(group: str) -> bool:
    return any(map(_CHOICE.fullmatch, _TOKEN.findall(group)))


def _format_regex_error(error: Exception) -> str:
    if not isinstance(error, re.error):
        return str(error)
    return error.msg if error.pos is None else f"{error.msg}, at character {error.pos}"


def _suggest_regex_fix(pattern: str, error: Exception) -> str:
    if re.search(r"(^|[(|])\*", pattern):  # a star at the start is a glob, so suggest the regex for it
        corrected = re.sub(r"(?<![.\\])\*", ".*", re.sub(r"(?<!\\)\.(?!\*)", r"\\.", pattern))
        if _is_regex(corrected):
            return f"in a regex, .* matches anything: {corrected!r}"
    position = getattr(error, "pos", None)
    if position is not None and pattern[position : position + 1] in tuple("([{)*+?"):
        corrected = f"{pattern[:position]}\\{pattern[position:]}"
        if _is_regex(corrected):
            return f"complete the regex, or escape the character if it is meant literally: {corrected!r}"
    return "fix the regex; re.escape(path) escapes all special characters of a path"


def _is_regex(pattern: str) -> bool:
    try:
        return bool(re.compile(pattern))
    except (re.error, OverflowError, RecursionError):
        return False
