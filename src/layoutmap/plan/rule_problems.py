"""Find the problems of rules in a plan, and write their messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from layoutmap.core.errors import format_count, join_names
from layoutmap.core.layout import Layout
from layoutmap.core.match import Match, Rule
from layoutmap.core.paths import format_path_pattern, split_at_numbers
from layoutmap.core.variables import Assignment
from layoutmap.plan.lint import make_suggestions
from layoutmap.plan.lint.changes import ChangeWriter
from layoutmap.plan.problems import Problem, merge_problems
from layoutmap.plan.slots import NO_RULES, SLOTS
from layoutmap.plan.table import PlanTable
from layoutmap.rules.index import RuleIndex
from layoutmap.rules.keras_rules import is_keras_rule
from layoutmap.rules.near_misses import Candidates
from layoutmap.rules.rules import Rules

MAX_COMPARISONS = 20_000
"""The limit of comparisons in each search for near misses, which takes about a second."""


def find_idle_activation_rules(rules: Rules, matches: Sequence[Match]) -> Iterator[Problem]:
    """Yield a problem for each activation rule that applies to no layer's output."""
    won = dict.fromkeys(range(1, len(rules) + 1), 0)
    beaten: dict[int, tuple[Rule, str]] = {}
    for match in matches:
        if match.rule:
            won[match.rule.number] += 1
            for other in match.others:
                beaten.setdefault(other.number, (match.rule, match.path))
    yield from find_idle_rules(rules, won, beaten, [match.path for match in matches], "layer")


def find_idle_rules(
    rules: Rules,
    won: Mapping[int, int],
    beaten: Mapping[int, tuple[Rule, str]],
    paths: Sequence[str],
    of: str,
) -> Iterator[Problem]:
    """Yield a problem for each rule that determines no layout.

    Args:
        rules: The rules.
        won: Number of paths that each rule matches first, by the rule's number.
        beaten: For each rule that lost, by its number: the rule that won, and the path.
        paths: All paths.
        of: What has the paths: `"variable"` or `"layer"`.
    """
    candidates: dict[bool, tuple[int, Candidates]] = {}
    idle = [rule for rule in rules.rules if not won[rule.number]]
    inside = _find_unanchored(
        {r.pattern for r in idle if r.number not in beaten and not is_keras_rule(r.pattern)}, paths
    )
    for rule in idle:
        name = rules.format_name(rule)
        if rule.number in beaten:
            winner, path = beaten[rule.number]
            yield Problem(
                "shadowed rule",
                "warning",
                rule.pattern,
                f"{name}: never used, since earlier rules match all its {of}s",
                (("first lost", f"{path} to {winner}"),),
                "the first rule that matches wins",
                f"put it before rule {winner.number}, or delete it",
            )
            continue
        named = is_keras_rule(rule.pattern)
        if named not in candidates:
            tried = [path for path in paths if is_keras_rule(path) == named]
            candidates[named] = len(tried), Candidates(tried, MAX_COMPARISONS)
        count, candidate_paths = candidates[named]
        if of == "variable" and SLOTS.match(rule.pattern):
            yield Problem("unused rule", "warning", rule.pattern, f"{name}: {NO_RULES[0]}", (), *NO_RULES[1:])
            continue
        near = candidate_paths.find_nearest(rule.pattern)
        yield Problem(
            "unused rule",
            "warning",
            rule.pattern,
            f"{name}: matches no {of}",
            (("near misses", ", ".join(near)),),
            f"such a rule matches whole names, and none of Keras's {format_count(count, 'name')}"
            if named
            else "rules match from the start of a path, and none of the model's "
            f"{format_count(count, 'path')} starts like this",
            f'to match anywhere in a path: r".*{rule.pattern}"'
            if rule.pattern in inside
            else f"did you mean {format_path_pattern(_find_meant(rule.pattern, near[0], paths))}? else delete it"
            if near
            else "fix it, or delete it",
        )


def _find_meant(pattern: str, nearest: str, paths: Sequence[str]) -> Sequence[str]:
    """Return the nearest path, or its group of repeated blocks if the pattern has no number."""
    if re.search(r"\d", pattern.replace(r"\d", "")):
        return [nearest]
    parts = split_at_numbers(nearest)
    return [path for path in paths if split_at_numbers(path) == parts]


def _find_unanchored(patterns: Iterable[str], paths: Sequence[str]) -> set[str]:
    """Return the patterns that match inside a path, not only from its start."""
    listed, found = list(patterns), set[str]()
    index = RuleIndex(map(re.compile, listed), anywhere=True)
    for path in paths if listed else ():
        found.update(listed[number] for number in index.find_matches(path))
    return found


def correct_typos(problems: Sequence[Problem], unused: Mapping[str, Problem]) -> Iterator[Problem]:
    """Yield the problems. If an unused rule almost matches a variable without a rule, change the fix.

    Adding a rule would end the warning and keep the typo, so the fix is to correct the unused one.
    """
    for problem in problems:
        near = dict(problem.facts).get("near misses", "").split(", ") if problem.kind == "no rule" else ()
        block = split_at_numbers(problem.subject)
        # Assign each unused rule to its nearest variable only, so that no two fixes change the same rule.
        meant = [unused[pattern] for pattern in near if pattern in unused]
        meant = [rule for rule in meant if split_at_numbers(_get_nearest_path(rule)) == block]
        if meant:
            name = meant[0].what.partition(": matches no")[0]
            problem = replace(
                problem, fix=f"correct {name} to {format_path_pattern([problem.subject])}, or add a rule"
            )
        yield problem


def _get_nearest_path(rule: Problem) -> str:
    """Return the path that an unused rule almost matches."""
    return dict(rule.facts)["near misses"].partition(", ")[0]


def suggest_rules(plan: PlanTable) -> Iterator[Problem]:
    """Yield the problems of a plan, with a rule in the fix of a variable without one, or with one of another rank."""
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
    layouts = _choose_layouts(plan, wanted.values())
    writer = ChangeWriter(plan, [(a, layouts[a.variable.key]) for a in wanted.values()])
    fixes: dict[int, str] = {}
    for _, group in merge_problems([p for p in plan.problems if id(p) in wanted]):
        changes = [(wanted[id(p)], layouts[wanted[id(p)].variable.key]) for p in group]
        fixes |= dict.fromkeys(map(id, group), "; ".join(writer.list_changes(changes)))
    for p in plan.problems:
        yield replace(p, fix=fixes[id(p)]) if id(p) in fixes else p


def _choose_layouts(plan: PlanTable, members: Iterable[Assignment]) -> dict[tuple[str, str], Layout]:
    """Return the layouts that are suggested for some variables, which are taken for replicated ones."""
    replicated = {
        id(a): a if a.fits else replace(a, layout=Layout.replicated(plan.mesh, len(a.variable.shape)))
        for a in plan.assignments
    }
    suggestions = make_suggestions(replace(plan, assignments=tuple(replicated.values())))
    found: dict[tuple[str, str], Layout] = {}
    for a in members:
        new = replicated[id(a)]
        # Vectors are small, so shard them only like their kernel.
        is_small = len(a.variable.shape) == 1 and not a.variable.use
        found[a.variable.key] = (None if is_small else suggestions.suggest_layout(new)) or new.layout
    return found


def find_layer_outputs(rules: Rules, paths: Sequence[str]) -> Iterator[Problem]:
    """Yield a note for each Keras rule that Keras also applies to layer outputs."""
    above = {
        path[:at] for path in paths if is_keras_rule(path) for at, sign in enumerate(path) if sign == "/"
    }
    outputs: dict[Rule, list[str]] = {}
    for layer in sorted(above):
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
            "if that is meant, add a rule for the layer's path: layout_map.activations[...]",
        )
