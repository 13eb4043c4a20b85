"""Make a plan: match every variable with the rules, and collect all problems.

`make_table` takes what is known of the variables and a layout map, and makes a value. The dry run and the real run
share it: what `layoutmap.plan` prints is what a scope then does. Problems are worded in `variable_problems` and
`rule_problems`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from layoutmap.core.errors import PlanError
from layoutmap.core.layout import Layout
from layoutmap.core.match import AS_REST, Match, Rule
from layoutmap.core.mesh import Mesh
from layoutmap.core.paths import split_at_numbers
from layoutmap.core.uneven import (
    UnevenSetting,
    add_sharding_dim,
    choose_policy,
    derive_layout,
    fit_layout,
    keep_largest_dims,
)
from layoutmap.core.unsupported import Unsupported
from layoutmap.core.variables import Assignment, Kind, VariableSpec, has_several_models
from layoutmap.plan.problems import Problem, sort_problems
from layoutmap.plan.rule_problems import (
    MAX_COMPARISONS,
    correct_typos,
    find_idle_activation_rules,
    find_idle_rules,
    find_layer_outputs,
    suggest_rules,
)
from layoutmap.plan.slots import is_sharded_by_zero, make_zero_note
from layoutmap.plan.table import PlanTable
from layoutmap.plan.variable_problems import (
    find_contradiction,
    find_free_activations,
    find_several_dims,
    find_tied_conflict,
    find_unsupported,
    find_variable_problems,
)
from layoutmap.rules.keras_rules import is_keras_rule, pad_layout
from layoutmap.rules.near_misses import Candidates
from layoutmap.rules.rule_set import RuleSet

_RULED_KINDS = (Kind.WEIGHT, Kind.STATE, Kind.RNG, Kind.LATER)

_PAD_OR_SHRINK: UnevenSetting = ("pad", "shrink")

ExplainFn = Callable[[VariableSpec, Layout], str]
"""Returns why a variable cannot be padded in a layout, or an empty text if it can."""


def make_table(
    variables: Sequence[VariableSpec],
    layout_map: RuleSet,
    *,
    global_init: Mapping[tuple[str, str], str] | None = None,
    unsupported: Sequence[Unsupported] = (),
    complete: bool = True,
    layers: Sequence[str] | None = None,
    free_activations: bool = False,
    given: Mapping[tuple[str, str], Layout] | None = None,
    zero_dim: str | None = None,
    several_dims: bool = True,
    explain_no_padding: ExplainFn = lambda variable, layout: "",
) -> PlanTable:
    """Match every variable with the rules, and collect all problems. No argument is changed.

    Args:
        variables: The variables, in the order of the model.
        layout_map: The rules.
        global_init: For each variable, by its `key`, whose global value must be initialized on one device: why.
        unsupported: What the backend cannot do with layers and variables.
        complete: Whether these are all variables there will be. Rules that match nothing are only a problem then.
        layers: The paths of all layers, for the rules of `LayoutMap.activations`; `None`: they are not known.
        free_activations: Whether a compiler chooses the layouts of activations without a rule.
        given: The layouts of variables that have one already, by `key`; the rules are not asked for these.
        zero_dim: The mesh dim over which slots are sharded further than their weights; `None`: they are not.
        several_dims: Whether the engine can shard an axis over several mesh dims; else the largest of them is taken.
        explain_no_padding: Says why a variable cannot be padded, or returns an empty text if it can.

    Raises:
        PlanError: The layout map has no mesh, so nothing can be laid out.
    """
    mesh = layout_map.mesh
    if mesh is None:
        raise PlanError(
            "the layout map has no mesh",
            why="it was created without a mesh and without rules",
            fix='give it one: LayoutMap(create_mesh("batch=2,model=4"))',
        )
    planning = _Planning(
        variables, layout_map, mesh, global_init or {}, given or {}, zero_dim, explain_no_padding
    )
    assignments = planning.assignments()
    problems = planning.problems
    if zero_dim is not None:
        problems.append(make_zero_note(assignments, zero_dim))
    if complete:
        paths = [path for v in planning.variables if v.kind in _RULED_KINDS for path in (v.path, *v.aliases)]
        of_rules = [*find_idle_rules(layout_map, planning.won, planning.beaten, paths, "variable")]
        unused = {p.subject: p for p in of_rules if p.kind == "unused rule"}
        problems = [*correct_typos(problems, unused), *of_rules]
        problems += find_layer_outputs(layout_map, paths) if planning.has_named else ()
    matches = [layout_map.activations.match(path) for path in layers or ()]
    laid_out = tuple(match for match in matches if match.rule)
    if complete and layers is not None:
        problems += find_idle_activation_rules(layout_map.activations, matches)
    if not several_dims:
        asked = [(match, match.rule.layout, "") for match in laid_out if match.rule]
        asked += [(a.match, a.layout, a.variable.model) for a in assignments if a.match]
        for match, layout, model in asked:
            found = find_several_dims(match, layout)
            problems += (p.name_model(model if planning.several_models else "") for p in found)
        assignments = [replace(a, layout=keep_largest_dims(a.layout)) for a in assignments]
    if complete and free_activations and not laid_out:
        problems += find_free_activations(assignments)
    problems += find_unsupported(unsupported, assignments)
    plan = PlanTable(mesh, tuple(assignments), sort_problems(problems), laid_out, free_activations)
    return replace(plan, problems=tuple(suggest_rules(plan)))


class _Planning:
    """Hold the variables and problems found so far while a plan is made."""

    def __init__(
        self,
        variables: Sequence[VariableSpec],
        layout_map: RuleSet,
        mesh: Mesh,
        global_init: Mapping[tuple[str, str], str],
        given: Mapping[tuple[str, str], Layout],
        zero_dim: str | None,
        explain_no_padding: ExplainFn,
    ) -> None:
        self.has_named = any(is_keras_rule(rule.pattern) for rule in layout_map.rules)
        self.variables = [_add_name_alias(v) for v in variables] if self.has_named else variables
        self.layout_map = layout_map
        self.mesh = mesh
        self.global_init = global_init
        self.given = given
        self.zero_dim = zero_dim
        self.explain_no_padding = explain_no_padding
        self.several_models = has_several_models(variables)
        self.problems: list[Problem] = []
        self.won: dict[int, int] = dict.fromkeys(range(1, len(layout_map) + 1), 0)
        self.beaten: dict[int, tuple[Rule, str]] = {}
        self._by_path = {v.key: v for v in self.variables}
        self._done: dict[tuple[str, str], Assignment] = {}
        self._replicated: dict[int, Layout] = {}
        self._patterns = Candidates(layout_map, MAX_COMPARISONS)
        self._near: dict[object, tuple[str, ...]] = {}

    def assignments(self) -> list[Assignment]:
        """Assign a layout to each variable, in order. A parent's layout is computed first."""
        return [self._assign(variable) for variable in self.variables]

    def _assign(self, variable: VariableSpec) -> Assignment:
        """Assign a layout to a variable, and record its problems."""
        key = variable.key
        if key not in self._done:
            asked, match, uneven = self._find_layout(variable)
            asked, variable = _choose_memory(asked, variable)
            is_uneven = asked.rank == len(variable.shape) and bool(asked.find_uneven_axes(variable.shape))
            # The engine has already padded an existing array with uneven shards.
            is_given = key in self.given
            why_not = self.explain_no_padding(variable, asked) if is_uneven and not is_given else ""
            policy = choose_policy(uneven, can_pad=not why_not)
            layout = fit_layout(asked, variable.shape, policy)
            is_padded = is_uneven and policy == "pad"
            assignment = Assignment(variable, layout, match, self.global_init.get(key, ""), is_padded)
            self._add_problems(
                variable, find_variable_problems(assignment, asked, why_not) if not is_given else ()
            )
            if self.zero_dim is not None and is_sharded_by_zero(variable):
                assignment = replace(
                    assignment, layout=add_sharding_dim(layout, variable.shape, self.zero_dim)
                )
            self._done[key] = assignment
            if match and match.rule:
                self._count_match(match.rule, match.others, variable.path)
        return self._done[key]

    def _find_layout(self, variable: VariableSpec) -> tuple[Layout, Match | None, UnevenSetting]:
        """Return the requested layout, the match (None if no rule applies to it), and the `uneven` setting."""
        if variable.key in self.given:
            return self.given[variable.key], None, "pad"
        if variable.follows:
            match = self._match_own_rules(variable)
            if match is None:
                return self._inherit_layout(variable)
        else:
            match = self._match_rules(variable) if variable.kind in _RULED_KINDS else None
        rule = match and match.rule
        if rule is None:
            return self._get_replicated_layout(len(variable.shape)), match, "error"
        layout = pad_layout(rule, len(variable.rule_shape if variable.is_packed else variable.shape))
        if variable.is_packed and layout.rank == len(variable.rule_shape):
            return derive_layout(layout, variable.axes or ()), match, _derive_setting(rule.uneven)
        return layout, match, rule.uneven

    def _get_replicated_layout(self, rank: int) -> Layout:
        if rank not in self._replicated:
            self._replicated[rank] = Layout.replicated(self.mesh, rank)
        return self._replicated[rank]

    def _match_rules(self, variable: VariableSpec) -> Match:
        """Match all paths of a variable with the rules. The first rule of the map wins."""
        names = [path for path in variable.aliases if is_keras_rule(path)]
        answers = {path: self.layout_map.matching_rules(path) for path in _list_paths(variable)}
        named = [rule for name in names for rule in self.layout_map.matching_rules(name)]
        if named:  # a Keras name is not a path, so report its rule under the variable's path
            exact = {variable.path, *names}
            answers[variable.path] = sorted(
                (*answers[variable.path], *named), key=lambda r: (r.pattern not in exact, r.number)
            )
        winners = {path: rules[0] for path, rules in answers.items() if rules}
        if not winners and self.layout_map.rest:
            return Match(variable.path, None, otherwise=AS_REST)
        if not winners:
            block = split_at_numbers(variable.path)
            # Near misses are slow to find and equal for repeated blocks, so cache them.
            if block not in self._near:
                self._near[block] = tuple(self._patterns.find_nearest(variable.path))
            return Match(variable.path, None, near_misses=self._near[block])
        rule = min(winners.values(), key=lambda r: (r.pattern not in (*answers, *names), r.number))
        if len(named) > 1 and rule == named[0] and rule.pattern not in names:
            self._add_problems(variable, [find_contradiction(variable, named)])
        if len({r.layout for r in winners.values()}) > 1:
            self._add_problems(variable, [find_tied_conflict(variable, rule, winners, len(answers))])
        others = {r.number: r for rules in answers.values() for r in rules if r != rule}
        return Match(variable.path, rule, tuple(others[n] for n in sorted(others)))

    def _match_own_rules(self, variable: VariableSpec) -> Match | None:
        """Match the rules that match a derived variable but not its parent, or return None without one.

        A rule for kernels, such as `fc.*kernel`, matches a kernel's scale by accident. There the scale follows.
        """
        if variable.kind not in _RULED_KINDS or variable.parent is None:
            return None
        of_parent = self._find_parent_rules(variable)
        paths = (variable.path, *variable.aliases)
        found = {r for path in paths for r in self.layout_map.matching_rules(path) if r not in of_parent}
        if not found:
            return None
        first, *others = sorted(found, key=lambda r: (r.pattern not in paths, r.number))
        return Match(variable.path, first, tuple(others))

    def _inherit_layout(self, variable: VariableSpec) -> tuple[Layout, None, UnevenSetting]:
        """Return the layout that a derived variable inherits, no match, and the `uneven` setting."""
        parent = self._by_path.get((variable.model, variable.parent or ""))
        replicated = self._get_replicated_layout(len(variable.shape))
        if parent is not None and not parent.is_packed:
            assignment = self._assign(parent)
            layout, shape = assignment.layout, parent.shape
            uneven = _PAD_OR_SHRINK if assignment.is_padded else "shrink"
        else:  # derived variables, such as its packed form, replaced the parent
            rule = next(iter(self._find_parent_rules(variable)), None)
            if rule is None:
                return replicated, None, "error"
            self._count_match(rule, (), variable.path)
            layout, shape = pad_layout(rule, len(variable.rule_shape)), variable.rule_shape
            uneven = _derive_setting(rule.uneven)
        if variable.axes is None:
            uneven = "error" if uneven == "shrink" else uneven  # the problem is reported for the parent
            return (layout if shape == variable.shape else replicated), None, uneven
        if layout.rank != len(variable.rule_shape):
            return replicated, None, "error"
        return derive_layout(layout, variable.axes), None, uneven

    def _find_parent_rules(self, variable: VariableSpec) -> list[Rule]:
        """Return the rules that match the parent's path or Keras name."""
        parent = self._by_path.get((variable.model, variable.parent or ""))
        names = [path for path in parent.aliases if is_keras_rule(path)] if parent else []
        return [
            rule for path in (variable.parent or "", *names) for rule in self.layout_map.matching_rules(path)
        ]

    def _add_problems(self, variable: VariableSpec, problems: Iterable[Problem]) -> None:
        self.problems += (p.name_model(variable.model if self.several_models else "") for p in problems)

    def _count_match(self, rule: Rule, others: Sequence[Rule], path: str) -> None:
        self.won[rule.number] += 1
        for other in others:
            self.beaten.setdefault(other.number, (rule, path))


def _choose_memory(layout: Layout, variable: VariableSpec) -> tuple[Layout, VariableSpec]:
    """Give a layout and its variable the same memory: the layout's if it names one, else the variable's."""
    if layout.memory is None and variable.memory:
        layout = layout.replace_memory(variable.memory)
    if layout.host_memory != variable.memory:
        variable = replace(variable, memory=layout.host_memory)
    return layout, variable


def _derive_setting(setting: UnevenSetting) -> UnevenSetting:
    """Return the `uneven` setting of variables derived from one with this setting."""
    return _PAD_OR_SHRINK if choose_policy(setting, can_pad=True) == "pad" else "shrink"


def _add_name_alias(variable: VariableSpec) -> VariableSpec:
    """Add the library's name of a variable to its aliases."""
    if not variable.name or variable.name in variable.aliases:
        return variable
    return replace(variable, aliases=(*variable.aliases, variable.name))


def _list_paths(variable: VariableSpec) -> list[str]:
    """Return the object paths of a variable."""
    return [variable.path, *(path for path in variable.aliases if not is_keras_rule(path))]
