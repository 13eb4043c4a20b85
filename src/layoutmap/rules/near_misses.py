"""Find the paths or patterns that a user probably meant by a mistyped text."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

_MIN_SCORE = 0.6
MIN_WORD_SCORE = 0.75
_GROUP_SET_OR_ESCAPE = re.compile(r"\(\?[^:]|\[[^\]]*[A-Za-z]|\\[xuUN]")
_LETTERS = re.compile(r"(?<!\\)[A-Za-z]+(?![*?+{])")
_NUMBER_SIGN = "\0"
_REPEAT = r"(?:[*+?]|\{\d*,?\d*\})\??"
_NUMBER_REGEX = re.compile(
    rf"\\[dw](?:{_REPEAT})?|\[[\d-]+\](?:{_REPEAT})?|\[[^\]]*\][*+]\??|\((?:\?:)?\d+(?:\|\d+)*\)|\.[*+]\??|\d+"
)
"""A number in a path or pattern, or a regex in its place that matches numbers."""


def find_nearest_candidates(text: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """Return the candidates most similar to a path or pattern, best first. Numbers decide between similar ones.

    Example:
        >>> find_nearest_candidates(r".*\\.kernal", ["d1.kernel", "d1.bias"])
        ['d1.kernel']
        >>> find_nearest_candidates(r"h\\.\\d+\\.fc2\\.kernal", ["h.0.fc1.kernel", "h.0.fc2.kernel"])
        ['h.0.fc2.kernel']
        >>> find_nearest_candidates("layers.3.query", ["layers.3.attention.query_dense.kernel", "layers.3.norm.scale"])
        ['layers.3.attention.query_dense.kernel']
    """
    return NearMissSearch(candidates).find_nearest_candidates(text, count)


class NearMissSearch:
    """Search paths or patterns for those that are similar to a text. Paths of repeated blocks are compared once.

    Args:
        candidates: The paths or patterns.
        max_comparisons: Limit for the comparisons of all searches together, of about 50 microseconds each. A search
            that would exceed it leaves out candidates. `None`: no limit.
    """

    def __init__(self, candidates: Iterable[str], max_comparisons: int | None = None) -> None:
        self._left = max_comparisons
        self._by_skeleton: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {}
        self._scores: dict[str, list[tuple[float, str]]] = {}
        self._alignments: dict[tuple[str, str], dict[int, int]] = {}
        for candidate in candidates:
            form, numbers = _separate_words_and_numbers(candidate)
            forms = self._by_skeleton.setdefault(_make_skeleton(form), {})
            forms.setdefault(form, {})[candidate] = numbers

    def find_nearest_candidates(
        self,
        text: str,
        count: int = 3,
        get_similarity_bonus: Callable[[str], float | None] = lambda candidate: 0,
    ) -> list[str]:
        """Return at most `count` candidates that are similar to a path or pattern, the most similar first.

        Candidates that differ only in numbers are equally similar. Of these, only one with the fewest other numbers
        than the text is returned.

        Args:
            text: The path or pattern.
            count: The maximum number.
            get_similarity_bonus: Returns what to add to the similarity of a candidate, which is at most 1.1. `None`
                leaves the candidate out.
        """
        form, numbers = _separate_words_and_numbers(text)
        found: list[tuple[float, str]] = []
        for score, skeleton in self._find_similar_skeletons(_make_skeleton(form)):
            # Comparing the numbers of ten candidates takes as long as comparing two skeletons.
            if not self._reserve_comparisons(sum(map(len, self._by_skeleton[skeleton].values())) // 10):
                break
            ranked: list[tuple[int, float, int, str]] = []
            for other, candidates in self._by_skeleton[skeleton].items():
                pairs = self._align_numbers(form, other)
                for candidate, values in candidates.items():
                    if (bonus := get_similarity_bonus(candidate)) is not None:
                        differences = sum(
                            not _are_matching_numbers(numbers[n], values[m]) for m, n in pairs.items()
                        )
                        ranked.append((differences, -bonus, len(ranked), candidate))
            if ranked:
                _, bonus, _, candidate = min(ranked)
                found.append((bonus - score, candidate))
        return [candidate for _, candidate in sorted(found)[:count]]

    def list_candidates_with_same_words(self, candidate: str) -> list[str]:
        """Return the candidates that differ from one of them only in numbers."""
        form, _ = _separate_words_and_numbers(candidate)
        return [*self._by_skeleton[_make_skeleton(form)][form]]

    def list_intended_candidates(
        self, text: str, nearest: str, get_shape: Callable[[str], object]
    ) -> list[str]:
        """Return the candidates that a pattern would match if its words were those of the nearest candidate.

        They differ from the nearest candidate only in numbers: where the pattern has a regex for a number, or no
        number. If a word of the pattern lacks a number, they also have the shape of the nearest candidate.
        """
        form, numbers = _separate_words_and_numbers(text)
        other, own = _separate_words_and_numbers(nearest)
        pairs = self._align_numbers(form, other)
        places = [match.start() for match in re.finditer(_NUMBER_SIGN, other)]
        regexes = [
            numbers[pairs[n]] if n in pairs and not numbers[pairs[n]].isdigit() else None
            for n in range(len(own))
        ]
        found: list[str] = []
        for candidate, values in self._by_skeleton[_make_skeleton(other)][other].items():
            has_shape = get_shape(candidate) == get_shape(nearest)
            if all(
                value == own[n]
                or (
                    regex is not None
                    and (_are_matching_numbers(regex, value) or not _are_matching_numbers(regex, own[n]))
                )
                or (n not in pairs and (has_shape or _is_number_whole_part(other, places[n])))
                for n, (regex, value) in enumerate(zip(regexes, values, strict=True))
            ):
                found.append(candidate)
        return found

    def _find_similar_skeletons(self, wanted_skeleton: str) -> list[tuple[float, str]]:
        """Return the skeletons of candidates that are similar to a skeleton, each after its score."""
        if wanted_skeleton in self._scores:
            return self._scores[wanted_skeleton]
        if not self._reserve_comparisons(len(self._by_skeleton)):
            return []
        wanted = wanted_skeleton.split(".")
        matcher = difflib.SequenceMatcher()
        scored = self._scores[wanted_skeleton] = []
        for skeleton in self._by_skeleton:
            parts = skeleton.split(".")
            # A pattern that starts with .* allows any first parts of a path, so compare only the last parts.
            shared = min(len(parts), len(wanted))
            matcher.set_seqs(".".join(wanted[-shared:]), ".".join(parts[-shared:]))
            # The last word names the kind of variable, which users rarely mistype, so equal last words
            # raise the score.
            score = matcher.ratio() - 0.01 * abs(len(parts) - len(wanted)) + 0.1 * (parts[-1] == wanted[-1])
            if score < _MIN_SCORE and _has_prefixes_in_order(wanted, parts):
                score = _MIN_SCORE
            if score >= _MIN_SCORE:
                scored.append((score, skeleton))
        return scored

    def _reserve_comparisons(self, count: int) -> bool:
        """Return whether so many comparisons are within the limit, and subtract them from it."""
        if self._left is None or count > self._left:
            return self._left is None
        self._left -= count
        return True

    def _align_numbers(self, text_form: str, candidate_form: str) -> dict[int, int]:
        """Return a dict from the index of a number in a candidate to the index of the number at its place in a text."""
        key = text_form, candidate_form
        if key not in self._alignments:
            matcher = difflib.SequenceMatcher(None, text_form, candidate_form, autojunk=False)
            self._alignments[key] = {
                candidate_form.count(_NUMBER_SIGN, 0, j + k): text_form.count(_NUMBER_SIGN, 0, i + k)
                for i, j, size in matcher.get_matching_blocks()
                for k in range(size)
                if text_form[i + k] == _NUMBER_SIGN
            }
        return self._alignments[key]


class WordSearch:
    """Search the words of paths, which are runs of letters, for those that are similar to a mistyped word of a pattern.

    Args:
        paths: The paths.
        max_comparisons: Limit for the comparisons of all searches together. Beyond it, nothing is found.

    Example:
        >>> search = WordSearch(["attention.query.bias", "attention.key.bias"], max_comparisons=100)
        >>> for word, pattern, paths in search.iterate_corrections(r".*\\.(qeury|key|value)\\.bias"):
        ...     print(word, pattern, paths)
        qeury .*\\.(query|key|value)\\.bias ['attention.query.bias']
    """

    def __init__(self, paths: Sequence[str], max_comparisons: int) -> None:
        self._left = max_comparisons
        self._paths = paths
        self._similar: dict[str, list[str]] = {}

    # Most plans have no rule to correct, so read the words of all paths only for the first one.
    @cached_property
    def _paths_by_word(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for path in self._paths:
            for word in {*_LETTERS.findall(path)}:
                found.setdefault(word, []).append(path)
        return found

    @cached_property
    def _joined_words(self) -> str:
        return " ".join(self._paths_by_word)

    def iterate_corrections(self, pattern: str) -> Iterator[tuple[str, str, Sequence[str]]]:
        """Yield each word of a pattern that is in no path, the pattern for a similar word, and paths with that word.

        Patterns with flags, named groups, sets of letters, or character codes such as `\\u006b` have no corrections.
        """
        if _GROUP_SET_OR_ESCAPE.search(pattern):
            return
        for match in _LETTERS.finditer(pattern):
            word = match.group()
            if word not in self._joined_words:
                for other in self._find_similar_words(word):
                    paths = self._paths_by_word[other]
                    # Matching a path takes less time than comparing two words, so 50 paths count as one comparison.
                    self._left -= 1 + len(paths) // 50
                    if self._left > 0:
                        yield word, f"{pattern[: match.start()]}{other}{pattern[match.end() :]}", paths

    def _find_similar_words(self, word: str) -> list[str]:
        if word not in self._similar:
            if len(self._paths_by_word) > self._left:
                return []
            self._left -= len(self._paths_by_word)
            near = difflib.get_close_matches(word, self._paths_by_word, cutoff=MIN_WORD_SCORE)
            short = [other for other in self._paths_by_word if has_one_other_letter(word, other)]
            # A short word is similar to many others, so only one of them may differ in a letter.
            self._similar[word] = near or short * (len(short) == 1)
        return self._similar[word]


def get_word_similarity(word: str, other: str) -> float:
    """Return the similarity of two words from 0 to 1. Swapped letters and missing last letters are typos."""
    is_typo = sorted(word) == sorted(other) or other.startswith(word)
    return max(MIN_WORD_SCORE * is_typo, difflib.SequenceMatcher(None, word, other).ratio())


def has_one_other_letter(word: str, other: str) -> bool:
    """Return whether a word of two or three letters differs from another one in a single letter."""
    return len(word) == len(other) in (2, 3) and sum(map(str.__ne__, word, other)) == 1


def _has_prefixes_in_order(words: Sequence[str], parts: Sequence[str]) -> bool:
    """Return whether each word is a prefix of a part of the path, in the order of the parts."""
    rest = iter(parts)
    return any(words) and all(any(part.startswith(word) for part in rest) for word in words)


def _separate_words_and_numbers(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the words of a path or pattern with a sign for each number, and its numbers or their regexes."""
    text = text.replace(_NUMBER_SIGN, "")
    numbers = _NUMBER_REGEX.findall(text)
    # A number regex that starts with a dot, such as .*, also matches dots, so it separates the words on both sides.
    form = _NUMBER_REGEX.sub(lambda m: f".{_NUMBER_SIGN}." if m[0][0] == "." else _NUMBER_SIGN, text)
    form = re.sub(r"\\[A-Za-z]|\.[*+?]|[\\^$*+?(){}\[\]|\d]", "", form.replace("\\.", ".").replace("/", "."))
    return _merge_dots(form), tuple(numbers)


def _make_skeleton(form: str) -> str:
    """Return the words of a path or pattern without the signs for numbers."""
    return _merge_dots(form.replace(_NUMBER_SIGN, ""))


def _merge_dots(text: str) -> str:
    return re.sub(r"\.+", ".", text).strip(".")


def _are_matching_numbers(a: str, b: str) -> bool:
    """Return whether two numbers are equal, or one of them is a regex that matches the other."""
    try:
        return a == b or any(re.fullmatch(regex, number) for regex, number in ((a, b), (b, a)))
    except re.error:  # a path may contain text such as [3-1], which is no regex
        return False


def _is_number_whole_part(form: str, place: int) -> bool:
    """Return whether the number at this place of a path is a whole part of it, as in `blocks.0.kernel`."""
    return {form[:place][-1:], form[place + 1 :][:1]} <= {"", "."}
