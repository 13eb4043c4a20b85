"""The index of a layout map gives the answers of the plain loop, for whatever regex."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, reject
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from layoutmap.rules.index import RuleIndex, find_required_literals
from layoutmap.testing import strategies


def plain_loop(patterns: list[re.Pattern[str]], path: str) -> list[int]:
    """What the index stands for: every regex, in order."""
    return [number for number, pattern in enumerate(patterns) if pattern.match(path)]


# What the regexes are made of, combined anyhow: likelier to match an odd regex than a real path is.
texts = strategies.paths() | st.text("kern.el012 #\n(|a", max_size=12)


@given(st.lists(strategies.patterns(), max_size=6), st.lists(texts, min_size=1, max_size=6))
@example(["xa(?#note)*b"], ["xb"])
@example(["(?#()kernel"], ["kernel"])
@example(["(?x:k # )\n)ernel"], ["kernel"])
@example(["kernel|bias"], ["bias"])
@example(["kernels?", "kernels{0}", "kernel{1,2}s??", "kernels*+", "kernels+?"], ["kernel", "kernels"])
@example(["k(e)r{,2}n"], ["ken"])
@example(["(?i)KERNEL", "(?i:K)ernel", "(?-i:K)ernel"], ["kernel"])
@example(["(?x)k e r n e l # all of it"], ["kernel"])
@example(["[]kernel]", "[^]kernel]", r"[\]kernel]x"], ["k", "x", "kx", "]"])
@example(["(?!kernel)bias", "(?<!kernel)bias", "bias(?=kernel)?"], ["bias"])
@example([r"(ker)(?(1)nel|bias)", r"(k)?(?(1)ernel|bias)"], ["kernel", "bias"])
@example([r"\x6bernel", r"\153ernel", r"(k)\1ernel", r"\N{LATIN SMALL LETTER K}ernel"], ["kernel", "kkernel"])
@example(
    ["kernel{a}", "kernel{", "kernel{}", "kernel{1", "kernel{,}"],
    ["kernel{a}", "kernel{", "kernel{}", "kernel{1", "kerne"],
)
@example(["^{}{2}", "a{}{2}b", "a{}?b"], ["{}}", "a{}}b", "a{b"])
@example(["", "^", "$", ".*", "a*", "ab", "b"], ["", "a", "ab", "b"])
@example(["kernel$", r"kernel\Z", "kernel."], ["kernel\n", "kernel"])
@example([r"kérnel\é", r"ß"], ["kérnelé", "ß", "SS"])
def test_the_index_gives_the_answers_of_the_plain_loop(patterns: list[str], paths: list[str]):
    """For any regexes and any path, the index yields the numbers of those that match, in order, and no other."""
    compiled = [re.compile(pattern) for pattern in patterns]
    index = RuleIndex(compiled)

    for path in paths:
        assert plain_loop(compiled, path) == list(index.iterate_matching_positions(path)), path


@given(st.data())
def test_a_text_made_from_a_regex_is_found(data: st.DataObject):
    """Texts that are made to match, where those above match by luck: the index misses none of them."""
    pattern = data.draw(strategies.patterns())
    try:
        path = data.draw(st.from_regex(pattern))
    except (
        NotImplementedError,
        InvalidArgument,
        AssertionError,
    ):  # a regex that hypothesis cannot turn round
        reject()
    compiled = [re.compile(pattern)]

    for text in (path, *(path[i:] for i in range(1, min(4, len(path))))):
        assert plain_loop(compiled, text) == list(RuleIndex(compiled).iterate_matching_positions(text)), text


@pytest.mark.parametrize(
    ("pattern", "literals"),
    [
        (r".*\.layer_17\.(query|key)\.kernels?$", [".layer_17.", ".kernel"]),
        (r"blocks.17.attn", ["blocks", "17", "attn"]),
        (r"(encoder|decoder)\.up", [".up"]),
        (r"d1\.kernel", ["d1.kernel"]),
        (r"kernel|bias", []),
        (r"ab+c", ["ab", "c"]),
        (r"ab*c", ["a", "c"]),
        (r"a[bc]d", ["a", "d"]),
        (r"a(?#note)*b", ["b"]),
        (r"kernels?+(?:bias){2}x", ["kernel", "x"]),
        (r"ker(nel|as)|kex", ["ke"]),
    ],
)
def test_the_literals_of_usual_rules_are_found(pattern: str, literals: list[str]):
    """The index sees all the text that stands outside groups, classes and quantifiers."""
    assert literals == find_required_literals(pattern)


@pytest.mark.parametrize(
    ("rule", "path"),
    [
        (r".*\.layer_{}\.(query|key|value)\.kernel", "model.layer_537.key.kernel"),
        (r"blocks\.{}\.attn\.kernel$", "blocks.537.attn.kernel"),
        (r"blocks.{}.attn.query.kernel", "blocks.537.attn.query.kernel"),  # bare dots, as people write them
        (r".*layer_{}.*kernel.*", "model.layer_537.attn.kernel_scale"),
        (r"(encoder|decoder)\.\d+\.expert_{}\..*", "decoder.0.expert_537.up.kernel"),
    ],
)
def test_a_path_is_tried_against_few_of_many_rules(rule: str, path: str):
    """Of a thousand rules that differ in one number, a path meets those that share its number's digits."""
    tried: list[int] = []

    class Counting:
        """A compiled regex that notes when it is tried."""

        flags = int(re.UNICODE)

        def __init__(self, number: int):
            self.number = number
            self.pattern = rule.format(number)

        def match(self, path: str) -> re.Match[str] | None:
            tried.append(self.number)
            return re.match(self.pattern, path)

    index = RuleIndex([Counting(i) for i in range(1000)])  # type: ignore[list-item]
    found = list(index.iterate_matching_positions(path))

    assert 537 in found
    assert len(tried) <= 20
