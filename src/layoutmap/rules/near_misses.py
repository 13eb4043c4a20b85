"""Find the paths or patterns that a user probably meant by a mistyped text."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

_MIN_SCORE = 0.6
_NUMBER = re.compile(r"\d+")


def find_nearest_candidates(text: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """Return the candidates most similar to a path or pattern, best first, ignoring digits and regex signs.

    Example:
        >>> find_nearest_candidates(r".*\\.kernal", ["d1.kernel", "d1.bias"])
        ['d1.kernel']
        >>> find_nearest_candidates("layers.3.query", ["layers.3.attention.query_dense.kernel", "layers.3.norm.scale"])
        ['layers.3.attention.query_dense.kernel']
    """
    return NearMissSearch(candidates).find_nearest_candidates(text, count)


class NearMissSearch:
    """Search paths or patterns for those that are similar to a text. Paths of repeated blocks are compared once.

    Args:
        candidates: The paths or patterns.
        max_comparisons: Limit for the comparisons of all searches together, of about 50 microseconds each. A search
            that would exceed it returns an empty list. `None`: no limit.
    """

    def __init__(self, candidates: Iterable[str], max_comparisons: int | None = None) -> None:
        self._left = max_comparisons
        self._by_skeleton: dict[str, dict[tuple[str, ...], str]] = {}
        for candidate in candidates:
            numbers = tuple(_NUMBER.findall(candidate))
            self._by_skeleton.setdefault(_strip_numbers_and_regex_signs(candidate), {}).setdefault(
                numbers, candidate
            )

    def find_nearest_candidates(self, text: str, count: int = 3) -> list[str]:
        """Return at most `count` candidates that are similar to a path or pattern, the most similar first."""
        if self._left is not None:
            if len(self._by_skeleton) > self._left:
                return []
            self._left -= len(self._by_skeleton)
        wanted = _strip_numbers_and_regex_signs(text).split(".")
        numbers = tuple(_NUMBER.findall(text))
        matcher = difflib.SequenceMatcher()
        scored: list[tuple[float, str]] = []
        for skeleton, block in self._by_skeleton.items():
            # Repeated blocks are equally similar, so suggest the one with the same numbers, or else the first.
            candidate = block.get(numbers) or next(iter(block.values()))
            parts = skeleton.split(".")
            # A pattern that starts with .* says nothing of the first parts of a path, so compare only the last parts.
            shared = min(len(parts), len(wanted))
            matcher.set_seqs(".".join(wanted[-shared:]), ".".join(parts[-shared:]))
            # The last word names the kind of variable, which users rarely mistype, so equal last words
            # raise the score.
            score = matcher.ratio() - 0.01 * abs(len(parts) - len(wanted)) + 0.1 * (parts[-1] == wanted[-1])
            if score < _MIN_SCORE and _has_prefixes_in_order(wanted, parts):
                score = _MIN_SCORE
            if score >= _MIN_SCORE:
                scored.append((-score, candidate))
        return [candidate for _, candidate in sorted(scored)[:count]]


def _has_prefixes_in_order(words: Sequence[str], parts: Sequence[str]) -> bool:
    """Return whether each word is a prefix of a part of the path, in the order of the parts."""
    rest = iter(parts)
    return any(words) and all(any(part.startswith(word) for part in rest) for word in words)


def _strip_numbers_and_regex_signs(text: str) -> str:
    """Return the words of a path or pattern joined by dots, without numbers and regex signs."""
    text = text.replace("\\.", ".").replace("/", ".")
    text = re.sub(r"\\[A-Za-z]|\.[*+?]|[\\^$*+?(){}\[\]|\d]", "", text)
    return re.sub(r"\.+", ".", text).strip(".")
