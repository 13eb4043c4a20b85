"""Find the problems of rules in a plan, and write their messages."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from layoutmap.core.errors import format_count, join_names
from layoutmap.core.layout import Layout
from layoutmap.core.match import Match, Rule
from layoutmap.core.paths import split_path_at_numbers
from layoutmap.core.variables import Assignment
from layoutmap.plan.lint import make_layout_suggester
from layoutmap.plan.lint.changes import RuleChangeFormatter
from layoutmap.plan.problems import Problem, group_problems
from layoutmap.plan.slots import NO_RULES, SLOTS
from layoutmap.plan.table import PlanTable
from layoutmap.rules import presets
from layoutmap.rules.index import RuleIndex
from layoutmap.rules.keras_rules import anchor_keras_pattern, is_keras_rule, pad_rule_layout
from layoutmap.rules.merged_rules import find_whole_path_pattern_parts, merge_patterns
from layoutmap.rules.near_misses import (
    MIN_WORD_SCORE,
    NearMissSearch,
    WordSearch,
    get_word_similarity,
    has_one_other_letter,
)
from layoutmap.rules.patterns import Alternative, list_alternatives
from layoutmap.rules.rules import Rules

MAX_COMPARISONS = 20_000
"""The limit of comparisons in each search for near misses, which takes about a second."""

_BONUS_WITHOUT_RULE = 0.1
_SET_OR_ESCAPE = re.compile(r"\[|\(\?[^:]|\\[xuUN]")
_FLAGS = re.compile(r"(?:\(\?[aimsux]+\))*")
_LETTERS = f"{string.ascii_letters}_"
_WORD = re.compile(r"(?<!\\)[A-Za-z_]++\d*+(?![*?+{])")
_CORRECTED_PATTERN = re.compile(r'(?:did you mean|to match anywhere in a path:) r"(.*)"')


class PathRule(NamedTuple):
    """The rule of a path (None: no rule), its variable's shape if known, and whether a rule can change its layout."""

    rule: Rule | None
    shape: Sequence[int] | None = None
    can_change: bool = True


def find_unused_activation_rule_problems(rules: Rules, matches: Sequence[Match]) -> Iterator[Problem]:
    """Yield a problem for each activation rule that determines the layout of no layer's output."""
    num_wins = dict.fromkeys(range(1, len(rules) + 1), 0)
    losses: dict[int, tuple[Rule, str]] = {}
    for match in matches:
        if match.rule:
            num_wins[match.rule.number] += 1
            for other in match.others:
                losses.setdefault(other.number, (match.rule, match.path))
    paths = {match.path: PathRule(match.rule) for match in matches}
    yield from find_unused_rule_problems(rules, num_wins, losses, paths, "layer")


def find_unused_rule_problems(
    rules: Rules,
    num_wins: Mapping[int, int],
    losses: Mapping[int, tuple[Rule, str]],
    paths: Mapping[str, PathRule],
    owner_kind: str,
) -> Iterator[Problem]:
    """Yield a problem for each rule that determines no layout.

    Args:
        rules: The rules.
        num_wins: The number of paths for which each rule is the first match, by the number of the rule.
        losses: For each rule that matched a path after another rule, by its number: that other rule, and the path.
        paths: All paths.
        owner_kind: What has the paths: `"variable"` or `"layer"`.
    """
    candidates: dict[bool, tuple[int, NearMissSearch]] = {}
    words = WordSearch([path for path, ruled in paths.items() if ruled.can_change], MAX_COMPARISONS)
    idle = [rule for rule in rules.rules if not num_wins[rule.number]]
    inside = _find_patterns_matching_anywhere(
        {r.pattern for r in idle if r.number not in losses and not is_keras_rule(r.pattern)}, paths
    )
    for rule in idle:
        name = rules.format_name(rule)
        if rule.number in losses:
            winner, path = losses[rule.number]
            yield Problem(
                "shadowed rule",
                "warning",
                rule.pattern,
                f"{name}: never used, since earlier rules match all its {owner_kind}s",
                (("first lost", f"{path} to {winner}"),),
                "the first rule that matches wins",
                f"put it before rule {winner.number}, or delete it",
            )
            continue
        named = is_keras_rule(rule.pattern)
        if named not in candidates:
            tried = [path for path in paths if is_keras_rule(path) == named]
            candidates[named] = len(tried), NearMissSearch(tried, MAX_COMPARISONS)
        count, candidate_paths = candidates[named]
        if owner_kind == "variable" and SLOTS.match(rule.pattern):
            yield Problem("unused rule", "warning", rule.pattern, f"{name}: {NO_RULES[0]}", (), *NO_RULES[1:])
            continue
        fitting, corrected = _find_corrected_pattern(rule, candidate_paths, paths, num_wins)
        gained, pattern = _find_word_correction(rule, words, paths, num_wins)
        if gained:
            # This pattern keeps all alternatives, so prefer it if the other one does not match more.
            matches = [path for path in paths if corrected and re.match(corrected, path)]
            if len(gained) + ("|" in rule.pattern) > len(matches):
                fitting, corrected = [*fitting, *gained], pattern
        near = list(dict.fromkeys([*fitting, *candidate_paths.find_nearest_candidates(rule.pattern)]))[:3]
        winner = paths[near[0]].rule if near else None
        yield Problem(
            "unused rule",
            "warning",
            rule.pattern,
            f"{name}: matches no {owner_kind}",
            (("near misses", ", ".join(near)),),
            f"a keras: rule matches whole names, and none of Keras's {format_count(count, 'name')}"
            if named
            else "rules match from the start of a path, and none of the model's "
            f"{format_count(count, 'path')} matches this pattern",
            f'to match anywhere in a path: r"{_correct_to_match_anywhere(rule, paths)}"'
            if rule.pattern in inside
            else f'did you mean r"{corrected}"? else delete it'
            if corrected
            else f"delete it, because rule {winner.number} matches {near[0]}"
            if winner
            else "fix it, or delete it",
        )
    used = [rule for rule in rules.rules if num_wins[rule.number]]
    yield from _find_unused_alternative_problems(rules, used, paths, owner_kind)


def _add_any_start(flags: re.Match[str]) -> str:
    return f"{flags[0]}.*"


def _find_word_correction(
    rule: Rule, words: WordSearch, paths: Mapping[str, PathRule], num_wins: Mapping[int, int]
) -> tuple[list[str], str]:
    """Return the paths that a rule gains by its best correction of one mistyped word, and the corrected pattern."""
    corrections = [
        (_list_gained_paths(rule, pattern, {path: paths[path] for path in near}, num_wins), pattern)
        for _, pattern, near in words.iterate_corrections(rule.pattern)
    ]
    return max(corrections, key=lambda found: len(found[0]), default=(list[str](), ""))


def _find_unused_alternative_problems(
    rules: Rules, used: Sequence[Rule], paths: Mapping[str, PathRule], owner_kind: str
) -> Iterator[Problem]:
    """Yield a problem for each used rule with alternatives that match no path.

    It is a note unless similar words match paths without a rule. A preset is for several models, so its alternatives
    are left out.
    """
    unruled = {path: ruled for path, ruled in paths.items() if ruled.rule is None and ruled.can_change}
    left = MAX_COMPARISONS
    for rule, members in _find_unmatched_alternatives(used, paths).items():
        if rule.pattern in presets.list_patterns():
            continue
        texts = [rule.pattern[each.start : each.end] for each in members]
        # Matching a path takes less time than comparing two words, so 50 paths count as one comparison.
        left -= sum(len(_WORD.findall(text)) for text in texts) * (1 + len(unruled) // 50)
        pattern, gained = rule.pattern, list[str]()
        for each in reversed(members) if left > 0 else ():
            near, text = _find_alternative_correction(rule, each, unruled)
            if near and not {*near} & {*gained}:
                pattern, gained = pattern[: each.start] + text + pattern[each.end :], [*near, *gained]
        names = join_names(texts)
        yield Problem(
            "unused rule",
            "warning" if gained else "note",
            rule.pattern,
            f"{rules.format_name(rule)}: {names} match{'es' * (len(texts) == 1)} no {owner_kind}",
            (("near misses", ", ".join(gained[:3])),) if gained else (),
            "the rule's other alternatives match" + ", and these near misses have no rule" * bool(gained),
            f'did you mean r"{pattern}"? else delete {names} from it'
            if gained
            else f"delete {names} from it, unless other models need it",
        )


def _find_unmatched_alternatives(
    rules: Iterable[Rule], paths: Iterable[str]
) -> Mapping[Rule, Sequence[Alternative]]:
    """Return a dict from each rule to its alternatives that match no path, in their order, if it has any."""
    found = [(rule, each) for rule in rules for each in list_alternatives(rule.pattern)]
    index = RuleIndex(
        re.compile(anchor_keras_pattern(each.replace_by(rule.pattern[each.start : each.end])))
        for rule, each in found
    )
    unmatched = set(range(len(found)))
    for path in paths:
        if not unmatched:
            break
        unmatched.difference_update(index.iterate_matching_positions(path))
    alternatives: dict[Rule, list[Alternative]] = {}
    for rule, each in (found[n] for n in sorted(unmatched)):
        # If all inner alternatives of one match nothing, name only the outer one.
        inner = alternatives.setdefault(rule, [])
        inner[:] = [other for other in inner if not each.start <= other.start < each.end]
        inner.append(each)
    return {rule: sorted(members) for rule, members in alternatives.items()}


def _correct_to_match_anywhere(rule: Rule, paths: Mapping[str, PathRule]) -> str:
    """Return the pattern of a rule with `.*` at its start, and with its unmatched alternatives corrected or deleted."""
    rule = replace(rule, pattern=_FLAGS.sub(_add_any_start, rule.pattern, count=1))
    pattern, unruled = rule.pattern, {path: ruled for path, ruled in paths.items() if ruled.rule is None}
    for each in reversed(_find_unmatched_alternatives([rule], paths).get(rule, ())):
        _, text = _find_alternative_correction(rule, each, unruled)
        after = pattern[each.end :]
        if text:
            pattern = pattern[: each.start] + text + after
        elif after.startswith("|"):
            pattern = pattern[: each.start] + after[1:]
        else:
            pattern = pattern[: each.start].removesuffix("|") + after
    return pattern


def _find_alternative_correction(
    rule: Rule, alternative: Alternative, unruled: Mapping[str, PathRule]
) -> tuple[list[str], str]:
    """Return the paths that a rule gains by its best correction of one word of an alternative, and the alternative."""
    text = rule.pattern[alternative.start : alternative.end]
    corrections: list[tuple[float, list[str], str]] = []
    for word in () if _SET_OR_ESCAPE.search(text) else _WORD.finditer(text):
        before, after = text[: word.start()], text[word.end() :]
        # A .* before the word would match its first letters.
        start = "(?<![A-Za-z_])" if (alternative.before + before).rstrip("(?:").endswith("*") else ""
        pattern = alternative.replace_by(f"{before}{start}(?P<_word>[A-Za-z_]+\\d*){after}")
        regex = re.compile(anchor_keras_pattern(pattern))
        others = sorted({match["_word"] for path in unruled if (match := regex.match(path))})
        number = word[0].lstrip(_LETTERS)
        letters = {o: o.removesuffix(number) for o in others if o.lstrip(_LETTERS) == number}
        name = word[0].removesuffix(number)
        # A short word is similar to many others, so only one of them may differ in a letter or lack the last ones.
        short = [
            other
            for other in others
            if has_one_other_letter(name, letters.get(other, ""))
            or (len(other) < 4 and word[0].startswith(other))
            or len(name) == len(other) == 1
        ]
        for other in others:
            score = get_word_similarity(name, letters[other]) if other in letters else 0
            if score >= MIN_WORD_SCORE or [other] == short:
                corrected = f"{before}{other}{after}"
                gained = _list_gained_paths(rule, alternative.replace_by(corrected), unruled, {})
                corrections.append((score, gained, corrected))
    _, gained, corrected = max((each for each in corrections if each[1]), default=(0, list[str](), ""))
    return gained, corrected


def _list_gained_paths(
    rule: Rule, pattern: str, paths: Mapping[str, PathRule], num_wins: Mapping[int, int]
) -> list[str]:
    """Return the paths that get their layout from a rule with a corrected pattern.

    The list is empty if the pattern also matches paths of other ranks, or if another rule would become unused.
    """
    matched = {path: ruled for path, ruled in paths.items() if re.match(pattern, path)}
    if not all(can_change and _has_fitting_rank(rule, shape) for _, shape, can_change in matched.values()):
        return []
    gained = [path for path, (winner, *_) in matched.items() if not winner or rule.number < winner.number]
    lost = Counter(winner.number for path in gained if (winner := paths[path].rule))
    return gained if all(count < num_wins[number] for number, count in lost.items()) else []


def _has_fitting_rank(rule: Rule, shape: Sequence[int] | None) -> bool:
    return shape is None or len(shape) == rule.layout.rank or is_keras_rule(rule.pattern)


def _find_corrected_pattern(
    rule: Rule, candidates: NearMissSearch, paths: Mapping[str, PathRule], num_wins: Mapping[int, int]
) -> tuple[list[str], str]:
    """Return paths that a rule was probably meant for, nearest first, and a corrected pattern ("" if there is none).

    The corrected rule would determine a layout, and no other rule would become unused.
    """

    def get_similarity_bonus(path: str) -> float | None:
        winner, shape, can_change = paths[path]
        if not can_change or not _has_fitting_rank(rule, shape):
            return None
        return _BONUS_WITHOUT_RULE if winner is None else 0

    near = candidates.find_nearest_candidates(rule.pattern, get_similarity_bonus=get_similarity_bonus)
    if not near:
        return [], ""
    nearest = near[0]
    form = split_path_at_numbers(nearest)
    same_form = [
        path
        for path in candidates.list_candidates_with_same_words(nearest)
        if split_path_at_numbers(path) == form
    ]
    intended = {*candidates.list_intended_candidates(rule.pattern, nearest, lambda p: paths[p].shape)}
    winners = {path: winner for path in intended if (winner := paths[path].rule)}
    lost = Counter(winner.number for winner in winners.values() if rule.number < winner.number)
    # Another rule keeps a path if its pattern is exactly this path, or if it would match nothing without such paths.
    intended -= {
        path
        for path, winner in winners.items()
        if winner.pattern == path or lost[winner.number] >= num_wins[winner.number]
    }
    # If the nearest path stays with another rule, that rule has probably replaced this one, so propose no correction.
    if nearest not in intended or (nearest in winners and winners[nearest].number < rule.number):
        return [], ""
    wanted = [path for path in same_form if path in intended]
    unwanted = [path for path in same_form if path not in intended]
    (pattern,) = merge_patterns([find_whole_path_pattern_parts(wanted, wanted, unwanted)])
    return near, pattern


def _find_patterns_matching_anywhere(patterns: Iterable[str], paths: Iterable[str]) -> set[str]:
    """Return the patterns that match anywhere in one of the paths, not only from its start."""
    listed, found = list(patterns), set[str]()
    index = RuleIndex(map(re.compile, listed), matches_anywhere=True)
    for path in paths if listed else ():
        found.update(listed[number] for number in index.iterate_matching_positions(path))
    return found


def add_typo_corrections_to_fixes(
    problems: Sequence[Problem], unused_rule_problems: Mapping[str, Problem]
) -> Iterator[Problem]:
    """Yield the problems. If a corrected unused rule matches a variable without a rule, its fix is that correction.

    The fix to add a rule would leave the mistyped rule in the map.
    """
    for problem in problems:
        near = dict(problem.facts).get("near misses", "").split(", ") if problem.kind == "no rule" else ()
        for rule in [unused_rule_problems[pattern] for pattern in near if pattern in unused_rule_problems]:
            corrected = _CORRECTED_PATTERN.search(rule.fix)
            # A rule gets only one new pattern, so both problems must propose the same one.
            if corrected and re.match(corrected[1], problem.subject):
                name = re.split(r": (?:.+ )?match(?:es)? no ", rule.what)[0]
                problem = replace(problem, fix=f'correct {name} to r"{corrected[1]}", or add a rule')
                break
        yield problem


def add_corrected_rules(
    rules: Rules, problems: Iterable[Problem], assignments: Iterable[Assignment]
) -> Iterator[Assignment]:
    """Yield the assignments. If the correction of a problem's rule wins for a variable, its match has the new rule."""
    by_pattern = {rule.pattern: rule for rule in rules.rules}
    corrected = [
        (replace(by_pattern[p.subject], pattern=match[1]), re.compile(anchor_keras_pattern(match[1])))
        for p in problems
        if p.kind == "unused rule" and (match := _CORRECTED_PATTERN.search(p.fix))
    ]
    for a in assignments:
        v, match = a.variable, a.match
        if match and not match.has_existing_layout and not v.is_derived:
            paths = (v.path, *v.aliases)
            fitting = [
                rule
                for rule, regex in corrected
                if any(map(regex.match, paths))
                and _has_fitting_rank(rule, v.shape)
                and not pad_rule_layout(rule, len(v.shape)).find_uneven_axes(v.shape)
                if not match.rule or (rule.number < match.rule.number and match.rule.pattern not in paths)
            ]
            if fitting:
                a = replace(a, match=replace(match, corrected=min(fitting, key=lambda rule: rule.number)))
        yield a


def add_suggested_rules_to_fixes(plan: PlanTable) -> Iterator[Problem]:
    """Yield the problems of a plan. If no rule fits the rank of a variable, the fix contains a suggested rule."""
    by_path = {(a.variable.model, a.variable.path): a for a in plan.assignments}
    models = {a.variable.model for a in plan.assignments}
    wanted: dict[int, Assignment] = {}
    for p in plan.problems:
        model = p.model if p.model or len(models) > 1 else next(iter(models), "")
        a = by_path.get((model, p.subject))
        if (
            a
            and a.match
            and (p.fix.startswith("add a rule: layout_map[r") or (p.kind == "rank" and a.match.rule))
        ):
            wanted[id(p)] = a
    if not wanted:
        yield from plan.problems
        return
    layouts = _suggest_layouts(plan, wanted.values())
    writer = RuleChangeFormatter(plan, [(a, layouts[a.variable.key]) for a in wanted.values()])
    fixes: dict[int, str] = {}
    for _, group in group_problems([p for p in plan.problems if id(p) in wanted]):
        changes = [(wanted[id(p)], layouts[wanted[id(p)].variable.key]) for p in group]
        fixes |= dict.fromkeys(map(id, group), "; ".join(writer.iterate_change_texts(changes)))
    for p in plan.problems:
        yield replace(p, fix=fixes[id(p)]) if id(p) in fixes else p


def _suggest_layouts(plan: PlanTable, members: Iterable[Assignment]) -> dict[tuple[str, str], Layout]:
    """Return a dict from the key of each of these variables to its suggested layout."""
    current = {
        a.variable.key: a
        if a.fits
        else replace(a, layout=Layout.replicated(plan.mesh, len(a.variable.shape)))
        for a in plan.apply_corrections().assignments
    }
    keys = [a.variable.key for a in members]
    # A bias is sharded as its kernel is, so the second pass sees the layouts that the first one suggests for kernels.
    for _ in range(2):
        suggestions = make_layout_suggester(replace(plan, assignments=tuple(current.values())))
        layouts = {key: suggestions.advise_layout(current[key]) for key in keys}
        current |= {key: replace(current[key], layout=layout) for key, layout in layouts.items() if layout}
    return {key: current[key].layout for key in keys}


def find_keras_output_rule_problems(rules: Rules, paths: Sequence[str]) -> Iterator[Problem]:
    """Yield a note for each `keras:` rule that Keras would also apply to layer outputs, but layoutmap does not."""
    layers = {
        path[:at] for path in paths if is_keras_rule(path) for at, sign in enumerate(path) if sign == "/"
    }
    outputs: dict[Rule, list[str]] = {}
    for layer in sorted(layers):
        for rule in rules.matching_rules(f"{layer}/output"):
            outputs.setdefault(rule, []).append(f"{layer}/output")
    for rule, names in outputs.items():
        yield Problem(
            "layer output",
            "note",
            rule.pattern,
            f"{rules.format_name(rule)}: in Keras it also lays out outputs of layers; in this map it does not",
            (("outputs", join_names(names)),),
            "Keras looks up the output of a layer in the map of its variables, as the layer's path and /output",
            "to lay out the outputs, too, add a rule for the layer's path to layout_map.activations",
        )
