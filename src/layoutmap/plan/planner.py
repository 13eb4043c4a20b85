"""Make a plan: match every variable with the rules, and collect all problems.

`make_plan_table` makes a plan from descriptions of the variables and a layout map. The dry run and the real run both
use it, so a scope does what `layoutmap.plan` prints. The messages are in `variable_problems` and `rule_problems`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from layoutmap.core.errors import PlanError
from layoutmap.core.layout import Layout
from layoutmap.core.match import AS_REST, Match, Rule
from layoutmap.core.mesh import Mesh
from layoutmap.core.specs import BatchDim
from layoutmap.core.uneven import (
    UnevenSetting,
    apply_uneven_policy,
    choose_uneven_policy,
    derive_layout_from_parent,
    derive_layout_with_dim,
    keep_largest_dim_per_axis,
)
from layoutmap.core.unsupported import UnsupportedFeature
from layoutmap.core.variables import Assignment, Kind, VariableSpec, has_several_models
from layoutmap.plan.output_rules import OutputRanks
from layoutmap.plan.problems import Problem, sort_problems
from layoutmap.plan.rule_problems import (
    MAX_COMPARISONS,
    PathRule,
    add_corrected_rules,
    add_suggested_rules_to_fixes,
    add_typo_corrections_to_fixes,
    find_keras_output_rule_problems,
    find_unused_activation_rule_problems,
    find_unused_rule_problems,
)
from layoutmap.plan.slots import is_sharded_by_zero_dim, make_zero_dim_note
from layoutmap.plan.table import PlanTable
from layoutmap.plan.variable_problems import (
    find_missing_activation_rule_problem,
    find_multiple_dims_per_axis_problems,
    find_unsupported_feature_problems,
    find_variable_problems,
    make_keras_rule_conflict_problem,
    make_tied_conflict_problem,
)
from layoutmap.rules.keras_rules import is_keras_rule, pad_rule_layout
from layoutmap.rules.near_misses import NearMissSearch
from layoutmap.rules.rule_set import RuleSet

_RULED_KINDS = (Kind.WEIGHT, Kind.STATE, Kind.RNG, Kind.LATER)

_BLOCK_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_PAD_OR_SHRINK: UnevenSetting = ("pad", "shrink")

ExplainWhyPaddingIsImpossibleFn = Callable[[VariableSpec, Layout], str]
"""A function that returns why a variable cannot be padded in a layout, or an empty string if it can."""


def make_plan_table(
    variables: Sequence[VariableSpec],
    layout_map: RuleSet,
    *,
    global_init: Mapping[tuple[str, str], str] | None = None,
    unsupported: Sequence[UnsupportedFeature] = (),
    complete: bool = True,
    layers: Sequence[str] | Mapping[str, int | None] | None = None,
    free_activations: bool = False,
    batch_dim: BatchDim | None = None,
    existing_layouts: Mapping[tuple[str, str], Layout] | None = None,
    zero_dim: str | None = None,
    several_dims: bool = True,
    explain_why_padding_is_impossible: ExplainWhyPaddingIsImpossibleFn = lambda variable, layout: "",
) -> PlanTable:
    """Return the plan: the layout of every variable by the rules, and all problems. No argument is changed.

    Args:
        variables: The variables, in the order of the model.
        layout_map: The rules.
        global_init: By the `key` of a variable, the reason why one device must compute its whole first value.
        unsupported: Layers and variables with which the backend cannot compute.
        complete: Whether the model will have no other variables. Only then are rules that match nothing a problem.
        layers: The paths of all layers, for the rules of `LayoutMap.activations`; a mapping also has the ranks of
            their outputs. `None`: unknown, or the model is a pytree.
        free_activations: Whether a compiler chooses the layouts of activations without a rule.
        batch_dim: The mesh dim over which batches are sharded, for fixes; `None`: unknown.
        existing_layouts: The layouts of variables that have one already, by `key`; no rules apply to these variables.
        zero_dim: The mesh dim over which slots are sharded further than their weights; `None`: they are not.
        several_dims: Whether the engine can shard an axis over several mesh dims; else only the largest is used.
        explain_why_padding_is_impossible: Returns why a variable cannot be padded, or an empty string if it can.

    Raises:
        PlanError: The layout map has no mesh, so nothing can be laid out.
    """
    mesh = layout_map.mesh
    if mesh is None:
        raise PlanError(
            "the layout map has no mesh",
            why="it was created without a mesh and without rules",
            fix='create it with a mesh: LayoutMap(create_mesh("batch=2,model=4"))',
        )
    builder = _PlanBuilder(
        variables,
        layout_map,
        mesh,
        global_init or {},
        existing_layouts or {},
        zero_dim,
        explain_why_padding_is_impossible,
    )
    assignments = builder.assign_all_layouts()
    problems = builder.problems
    if zero_dim is not None:
        problems.append(make_zero_dim_note(assignments, zero_dim))
    if complete:
        paths = {
            path: PathRule(
                a.match.rule if a.match else None,
                v.rule_shape if v.is_packed else v.shape,
                v.key not in builder.existing_layouts,
            )
            for v, a in zip(builder.variables, assignments, strict=True)
            if v.kind in _RULED_KINDS
            for path in (v.path, *v.aliases)
        }
        of_rules = [*find_unused_rule_problems(layout_map, builder.won, builder.beaten, paths, "variable")]
        unused = {p.subject: p for p in of_rules if p.kind == "unused rule"}
        problems = [*add_typo_corrections_to_fixes(problems, unused), *of_rules]
        assignments = [*add_corrected_rules(layout_map, of_rules, assignments)]
        problems += find_keras_output_rule_problems(layout_map, [*paths]) if builder.has_keras_rules else ()
    matches = [
        layout_map.activations.match_without_near_misses(path)
        for path in layers or ()
        if layout_map.activations
    ]
    laid_out = tuple(match for match in matches if match.rule)
    if complete and layers is not None:
        problems += find_unused_activation_rule_problems(layout_map.activations, matches)
    if not several_dims:
        requested = [(match, match.rule.layout, "") for match in laid_out if match.rule]
        requested += [(a.match, a.layout, a.variable.model) for a in assignments if a.match]
        for match, layout, model in requested:
            found = find_multiple_dims_per_axis_problems(match, layout)
            problems += (p.add_model_name(model if builder.several_models else "") for p in found)
        assignments = [replace(a, layout=keep_largest_dim_per_axis(a.layout)) for a in assignments]
    ranks = None
    if layers is not None:
        ranks = OutputRanks(dict.fromkeys(layers) if isinstance(layers, Sequence) else layers)
    if complete and free_activations and not laid_out:
        problem = find_missing_activation_rule_problem(assignments, ranks, batch_dim)
        problems += [problem] if problem else []
    problems += find_unsupported_feature_problems(unsupported, assignments)
    plan = PlanTable(
        mesh, tuple(assignments), sort_problems(problems), laid_out, free_activations, layers=ranks
    )
    return replace(plan, problems=tuple(add_suggested_rules_to_fixes(plan)))


class _PlanBuilder:
    """Builder of a plan's assignments. It stores the variables, and the layouts and problems so far."""

    def __init__(
        self,
        variables: Sequence[VariableSpec],
        layout_map: RuleSet,
        mesh: Mesh,
        global_init: Mapping[tuple[str, str], str],
        existing_layouts: Mapping[tuple[str, str], Layout],
        zero_dim: str | None,
        explain_why_padding_is_impossible: ExplainWhyPaddingIsImpossibleFn,
    ) -> None:
        self.has_keras_rules = any(is_keras_rule(rule.pattern) for rule in layout_map.rules)
        self.variables = [_with_name_alias(v) for v in variables] if self.has_keras_rules else variables
        self.layout_map = layout_map
        self.mesh = mesh
        self.global_init = global_init
        self.existing_layouts = existing_layouts
        self.zero_dim = zero_dim
        self.explain_why_padding_is_impossible = explain_why_padding_is_impossible
        self.several_models = has_several_models(variables)
        self.problems: list[Problem] = []
        self.won: dict[int, int] = dict.fromkeys(range(1, len(layout_map) + 1), 0)
        self.beaten: dict[int, tuple[Rule, str]] = {}
        self._by_path = {v.key: v for v in self.variables}
        self._done: dict[tuple[str, str], Assignment] = {}
        self._replicated: dict[int, Layout] = {}
        self._patterns = NearMissSearch(layout_map, MAX_COMPARISONS)
        self._near: dict[object, tuple[str, ...]] = {}

    def assign_all_layouts(self) -> list[Assignment]:
        """Return the variables with their layouts, in order. The layout of a parent is computed first."""
        return [self._assign_layout(variable) for variable in self.variables]

    def _assign_layout(self, variable: VariableSpec) -> Assignment:
        """Return a variable with its layout, computed at the first call, and record its problems."""
        key = variable.key
        if key not in self._done:
            requested, match, uneven = self._find_requested_layout(variable)
            requested, variable = _unify_memory_kinds(requested, variable)
            shape = variable.shape
            is_uneven = requested.rank == len(shape) and bool(requested.find_uneven_axes(shape))
            # An existing array with uneven shards is padded already, so it needs neither a check nor a problem.
            is_given = key in self.existing_layouts
            why_not = (
                self.explain_why_padding_is_impossible(variable, requested)
                if is_uneven and not is_given
                else ""
            )
            policy = choose_uneven_policy(uneven, can_pad=not why_not)
            layout = apply_uneven_policy(requested, variable.shape, policy)
            is_padded = is_uneven and policy == "pad"
            assignment = Assignment(variable, layout, match, self.global_init.get(key, ""), is_padded)
            self._add_problems(
                variable,
                find_variable_problems(assignment, requested, why_not) if not is_given else (),
            )
            if self.zero_dim is not None and is_sharded_by_zero_dim(variable):
                assignment = replace(
                    assignment, layout=derive_layout_with_dim(layout, variable.shape, self.zero_dim)
                )
            self._done[key] = assignment
            if match and match.rule:
                self._record_rule_match(match.rule, match.others, variable.path)
        return self._done[key]

    def _find_requested_layout(self, variable: VariableSpec) -> tuple[Layout, Match | None, UnevenSetting]:
        """Return the requested layout of a variable, its match (None: rules do not apply), and its `uneven` setting."""
        if variable.key in self.existing_layouts:
            return self.existing_layouts[variable.key], None, "pad"
        if variable.is_derived:
            match = self._match_rules_not_matching_parent(variable)
            if match is None:
                return self._inherit_layout(variable)
        else:
            match = self._match_rules(variable) if variable.kind in _RULED_KINDS else None
        rule = match and match.rule
        if rule is None:
            return self._get_replicated_layout(len(variable.shape)), match, "error"
        layout = pad_rule_layout(rule, len(variable.rule_shape if variable.is_packed else variable.shape))
        if variable.is_packed and layout.rank == len(variable.rule_shape):
            return (
                derive_layout_from_parent(layout, variable.axes or ()),
                match,
                _derive_uneven_setting(rule.uneven),
            )
        return layout, match, rule.uneven

    def _get_replicated_layout(self, rank: int) -> Layout:
        if rank not in self._replicated:
            self._replicated[rank] = Layout.replicated(self.mesh, rank)
        return self._replicated[rank]

    def _match_rules(self, variable: VariableSpec) -> Match:
        """Return the match of a variable: the rule that wins, and other matching rules, or near misses if none match.

        If its paths match different rules, a rule for an exact path wins, and otherwise the first rule in the map.
        """
        names = [path for path in variable.aliases if is_keras_rule(path)]
        matching = {path: self.layout_map.matching_rules(path) for path in _list_object_paths(variable)}
        named = [rule for name in names for rule in self.layout_map.matching_rules(name)]
        if named:  # messages show object paths, so treat rules for the Keras name as rules for the path
            exact = {variable.path, *names}
            matching[variable.path] = sorted(
                (*matching[variable.path], *named), key=lambda r: (r.pattern not in exact, r.number)
            )
        winners = {path: rules[0] for path, rules in matching.items() if rules}
        if not winners and self.layout_map.rest:
            return Match(variable.path, None, otherwise=AS_REST)
        if not winners:
            block = _BLOCK_NUMBER.sub("*", variable.path)
            # A search for near misses is slow, and its result is equal for repeated blocks, so cache it.
            if block not in self._near:
                self._near[block] = tuple(self._patterns.find_nearest_candidates(variable.path))
            return Match(variable.path, None, near_misses=self._near[block])
        rule = min(winners.values(), key=lambda r: (r.pattern not in (*matching, *names), r.number))
        if len(named) > 1 and rule == named[0] and rule.pattern not in names:
            self._add_problems(variable, [make_keras_rule_conflict_problem(variable, named)])
        if len({r.layout for r in winners.values()}) > 1:
            self._add_problems(variable, [make_tied_conflict_problem(variable, rule, winners, len(matching))])
        others = {r.number: r for rules in matching.values() for r in rules if r != rule}
        return Match(variable.path, rule, tuple(others[n] for n in sorted(others)))

    def _match_rules_not_matching_parent(self, variable: VariableSpec) -> Match | None:
        """Return the match of a derived variable with rules that do not match its parent, or None if there are none.

        A rule for kernels, such as `fc.*kernel`, also matches the scale of a kernel, but is not meant for it. So the
        scale gets the layout of its parent.
        """
        if variable.kind not in _RULED_KINDS or variable.parent is None:
            return None
        of_parent = self._list_rules_matching_parent(variable)
        paths = (variable.path, *variable.aliases)
        found = {r for path in paths for r in self.layout_map.matching_rules(path) if r not in of_parent}
        if not found:
            return None
        first, *others = sorted(found, key=lambda r: (r.pattern not in paths, r.number))
        return Match(variable.path, first, tuple(others))

    def _inherit_layout(self, variable: VariableSpec) -> tuple[Layout, None, UnevenSetting]:
        """Return a derived variable's layout by its parent, None instead of a match, and the `uneven` setting."""
        parent = self._by_path.get((variable.model, variable.parent or ""))
        replicated = self._get_replicated_layout(len(variable.shape))
        if parent is not None and not parent.is_packed:
            assignment = self._assign_layout(parent)
            layout, shape = assignment.layout, parent.shape
            uneven = _PAD_OR_SHRINK if assignment.is_padded else "shrink"
        else:  # the model lacks the parent, and has for example only its packed form, so apply the parent's rule
            rule = next(iter(self._list_rules_matching_parent(variable)), None)
            if rule is None:
                return replicated, None, "error"
            self._record_rule_match(rule, (), variable.path)
            layout, shape = pad_rule_layout(rule, len(variable.rule_shape)), variable.rule_shape
            uneven = _derive_uneven_setting(rule.uneven)
        if variable.axes is None:
            # The parent's layout is shrunk already, so if an axis of the same shape is uneven, report an error.
            uneven = "error" if uneven == "shrink" else uneven
            return (layout if shape == variable.shape else replicated), None, uneven
        if layout.rank != len(variable.rule_shape):
            return replicated, None, "error"
        return derive_layout_from_parent(layout, variable.axes), None, uneven

    def _list_rules_matching_parent(self, variable: VariableSpec) -> list[Rule]:
        """Return the rules that match the path of a variable's parent, or the parent's name in Keras."""
        parent = self._by_path.get((variable.model, variable.parent or ""))
        names = [path for path in parent.aliases if is_keras_rule(path)] if parent else []
        return [
            rule for path in (variable.parent or "", *names) for rule in self.layout_map.matching_rules(path)
        ]

    def _add_problems(self, variable: VariableSpec, problems: Iterable[Problem]) -> None:
        self.problems += (p.add_model_name(variable.model if self.several_models else "") for p in problems)

    def _record_rule_match(self, rule: Rule, others: Sequence[Rule], path: str) -> None:
        self.won[rule.number] += 1
        for other in others:
            self.beaten.setdefault(other.number, (rule, path))


def _unify_memory_kinds(layout: Layout, variable: VariableSpec) -> tuple[Layout, VariableSpec]:
    """Return a layout and a variable with the same memory kind: the layout's if it names one, else the variable's."""
    if layout.memory is None and variable.memory:
        layout = layout.replace_memory(variable.memory)
    if layout.host_memory != variable.memory:
        variable = replace(variable, memory=layout.host_memory)
    return layout, variable


def _derive_uneven_setting(setting: UnevenSetting) -> UnevenSetting:
    """Return the `uneven` setting for a derived variable, from the setting of its parent's rule."""
    return _PAD_OR_SHRINK if choose_uneven_policy(setting, can_pad=True) == "pad" else "shrink"


def _with_name_alias(variable: VariableSpec) -> VariableSpec:
    """Return the variable with its name in its library as an alias, so that `keras:` rules match it."""
    if not variable.name or variable.name in variable.aliases:
        return variable
    return replace(variable, aliases=(*variable.aliases, variable.name))


def _list_object_paths(variable: VariableSpec) -> list[str]:
    """Return the path and the aliases of a variable, without names that start with `keras:`."""
    return [variable.path, *(path for path in variable.aliases if not is_keras_rule(path))]
