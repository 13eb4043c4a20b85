"""Making a plan: match every variable, collect every problem; pure.

`make_table` takes what is known of the variables and a layout map, and makes a value. The dry run and the real run
share it: what `layoutmap.plan` prints is what a scope then does. The file is longer than others since each problem
that a plan can have is worded here, in one place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from layoutmap.core.errors import LayoutError, PlanError, counted, listed
from layoutmap.core.layout import Layout
from layoutmap.core.match import AS_REST, Match, Rule
from layoutmap.core.mesh import Mesh
from layoutmap.core.paths import path_pattern, path_shape
from layoutmap.core.uneven import Uneven, derived_layout, fitted, sharded_further, with_single_dims
from layoutmap.core.unsupported import Unsupported
from layoutmap.core.variables import Assignment, Kind, VariableSpec, has_several_models
from layoutmap.plan.problems import Problem, Severity, in_order
from layoutmap.plan.slots import NO_RULES, SLOTS, is_sharded_further, note_of_zero, problems_of_slot
from layoutmap.plan.table import PlanTable
from layoutmap.rules.index import RuleIndex
from layoutmap.rules.keras_rules import is_named, layout_for
from layoutmap.rules.near_misses import Candidates
from layoutmap.rules.rule_set import RuleSet
from layoutmap.rules.rules import Rules

_MOST_COMPARISONS = 20_000  # for near misses of each sort: a second; nobody reads those of more
_MATCHED = (Kind.WEIGHT, Kind.STATE, Kind.RNG)
_NEED_A_RULE = (Kind.WEIGHT, Kind.STATE)


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
) -> PlanTable:
    """Match every variable, collect every problem; pure.

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

    Raises:
        PlanError: The layout map has no mesh, so nothing can be laid out.
    """
    mesh = layout_map.mesh
    if mesh is None:
        raise PlanError(
            "the layout map has no mesh",
            why="it was made without one and has no rule",
            fix='give it one: LayoutMap(create_mesh("batch=2,model=4"))',
        )
    planning = _Planning(variables, layout_map, mesh, global_init or {}, given or {}, zero_dim)
    assignments = planning.assignments()
    problems = planning.problems
    if zero_dim is not None:
        problems.append(note_of_zero(assignments, zero_dim))
    if complete:
        paths = [path for v in planning.variables if v.kind in _MATCHED for path in (v.path, *v.aliases)]
        of_rules = [*_problems_of_rules(layout_map, planning.won, planning.beaten, paths, "variable")]
        unused = {p.subject: p for p in of_rules if p.kind == "unused rule"}
        problems = [*_with_typos(problems, unused), *of_rules]
        problems += _problems_of_outputs(layout_map, paths) if planning.has_named else ()
    matches = [layout_map.activations.match(path) for path in layers or ()]
    laid_out = tuple(match for match in matches if match.rule)
    if complete and layers is not None:
        problems += _problems_of_activations(layout_map.activations, matches)
    if not several_dims:
        asked = [(match, match.rule.layout, "") for match in laid_out if match.rule]
        asked += [(a.match, a.layout, a.variable.model) for a in assignments if a.match]
        for match, layout, model in asked:
            found = _problems_of_several_dims(match, layout)
            problems += (p.of_model(model if planning.several_models else "") for p in found)
        assignments = [replace(a, layout=with_single_dims(a.layout)) for a in assignments]
    if complete and free_activations and not laid_out:
        problems += problems_of_free_activations(assignments)
    problems += _problems_of_unsupported(unsupported, assignments)
    return PlanTable(mesh, tuple(assignments), in_order(problems), laid_out, free_activations)


class _Planning:
    """One plan in the making: the variables matched so far, and what was found."""

    def __init__(
        self,
        variables: Sequence[VariableSpec],
        layout_map: RuleSet,
        mesh: Mesh,
        global_init: Mapping[tuple[str, str], str],
        given: Mapping[tuple[str, str], Layout],
        zero_dim: str | None,
    ) -> None:
        self.has_named = any(is_named(rule.pattern) for rule in layout_map.rules)
        self.variables = [_with_its_name(v) for v in variables] if self.has_named else variables
        self.layout_map = layout_map
        self.mesh = mesh
        self.global_init = global_init
        self.given = given
        self.zero_dim = zero_dim
        self.several_models = has_several_models(variables)
        self.problems: list[Problem] = []
        self.won: dict[int, int] = dict.fromkeys(range(1, len(layout_map) + 1), 0)
        self.beaten: dict[int, tuple[Rule, str]] = {}
        self._by_path = {v.key: v for v in self.variables}
        self._done: dict[tuple[str, str], Assignment] = {}
        self._replicated: dict[int, Layout] = {}
        self._patterns = Candidates(layout_map, _MOST_COMPARISONS)
        self._near: dict[object, tuple[str, ...]] = {}

    def assignments(self) -> list[Assignment]:
        """A layout for each variable, in order; that of a variable's parent is found first."""
        return [self._assignment(variable) for variable in self.variables]

    def _assignment(self, variable: VariableSpec) -> Assignment:
        key = variable.key
        if key not in self._done:
            asked, match, uneven = self._asked(variable)
            layout = fitted(asked, variable.shape, uneven)
            assignment = Assignment(variable, layout, match, self.global_init.get(key, ""))
            self._add(variable, _problems_of(assignment, asked))
            if self.zero_dim is not None and is_sharded_further(variable):
                assignment = replace(
                    assignment, layout=sharded_further(layout, variable.shape, self.zero_dim)
                )
            self._done[key] = assignment
            if match and match.rule:
                self._count(match.rule, match.others, variable.path)
        return self._done[key]

    def _asked(self, variable: VariableSpec) -> tuple[Layout, Match | None, Uneven]:
        """The layout that is asked for, what the map said (`None`: it was not asked), and what may be done to it."""
        if variable.key in self.given:
            return self.given[variable.key], None, "error"
        if variable.follows:
            match = self._meant(variable)
            if match is None:
                return self._as_parent(variable), None, "error" if variable.axes is None else "shrink"
        else:
            match = self._match(variable) if variable.kind in _MATCHED else None
        rule = match and match.rule
        if rule is None:
            return self._replicated_layout(len(variable.shape)), match, "error"
        layout = layout_for(rule, len(variable.rule_shape if variable.is_packed else variable.shape))
        if variable.is_packed and layout.rank == len(variable.rule_shape):
            return derived_layout(layout, variable.axes or ()), match, "shrink"
        return layout, match, rule.uneven

    def _replicated_layout(self, rank: int) -> Layout:
        if rank not in self._replicated:
            self._replicated[rank] = Layout.replicated(self.mesh, rank)
        return self._replicated[rank]

    def _match(self, variable: VariableSpec) -> Match:
        """The rule of the map for a variable under all its paths; the first rule of the map among them wins."""
        names = [path for path in variable.aliases if is_named(path)]
        answers = {path: self.layout_map.matching_rules(path) for path in _paths_of(variable)}
        named = [rule for name in names for rule in self.layout_map.matching_rules(name)]
        if named:  # a name is no other path to the variable: a rule over names is one for its first path
            exact = {variable.path, *names}
            answers[variable.path] = sorted(
                (*answers[variable.path], *named), key=lambda r: (r.pattern not in exact, r.number)
            )
        winners = {path: rules[0] for path, rules in answers.items() if rules}
        if not winners and self.layout_map.rest:
            return Match(variable.path, None, otherwise=AS_REST)
        if not winners:
            block = path_shape(variable.path)
            if block not in self._near:  # they take a while to find, and are the same in all repeated blocks
                self._near[block] = tuple(self._patterns.nearest(variable.path))
            return Match(variable.path, None, near_misses=self._near[block])
        rule = min(winners.values(), key=lambda r: (r.pattern not in (*answers, *names), r.number))
        if len(named) > 1 and rule == named[0] and rule.pattern not in names:
            self._add(variable, [_problem_of_contradiction(variable, named)])
        if len({r.layout for r in winners.values()}) > 1:
            problem = Problem(
                "tied",
                "warning",
                variable.path,
                f"{variable.path}: its paths get different layouts",
                tuple((path, f"{r.layout}  {r}") for path, r in winners.items()),
                f"it is one variable with {len(answers)} paths, and {rule} comes first",
                "make the rules agree, or leave out one of them",
            )
            self._add(variable, [problem])
        others = {r.number: r for rules in answers.values() for r in rules if r != rule}
        return Match(variable.path, rule, tuple(others[n] for n in sorted(others)))

    def _meant(self, variable: VariableSpec) -> Match | None:
        """The rule that is meant for a derived variable: it matches that and not its parent.

        A rule for kernels, such as `fc.*kernel`, matches a kernel's scale by accident. There the scale follows.
        """
        if variable.kind not in _MATCHED or variable.parent is None:
            return None
        of_parent = self._rules_of_parent(variable)
        paths = (variable.path, *variable.aliases)
        found = {r for path in paths for r in self.layout_map.matching_rules(path) if r not in of_parent}
        if not found:
            return None
        first, *others = sorted(found, key=lambda r: (r.pattern not in paths, r.number))
        return Match(variable.path, first, tuple(others))

    def _as_parent(self, variable: VariableSpec) -> Layout:
        """The layout that a derived variable takes over."""
        parent = self._by_path.get((variable.model, variable.parent or ""))
        replicated = self._replicated_layout(len(variable.shape))
        if parent is not None and not parent.is_packed:
            layout, shape = self._assignment(parent).layout, parent.shape
        else:  # it has made way for those that are derived from it, a packed form of it among them
            rule = next(iter(self._rules_of_parent(variable)), None)
            if rule is None:
                return replicated
            self._count(rule, (), variable.path)
            layout, shape = layout_for(rule, len(variable.rule_shape)), variable.rule_shape
        if variable.axes is None:
            return layout if shape == variable.shape else replicated
        return (
            derived_layout(layout, variable.axes) if layout.rank == len(variable.rule_shape) else replicated
        )

    def _rules_of_parent(self, variable: VariableSpec) -> list[Rule]:
        """The rules that match the parent's path, and its name if it has one."""
        parent = self._by_path.get((variable.model, variable.parent or ""))
        names = [path for path in parent.aliases if is_named(path)] if parent else []
        return [
            rule for path in (variable.parent or "", *names) for rule in self.layout_map.matching_rules(path)
        ]

    def _add(self, variable: VariableSpec, problems: Iterable[Problem]) -> None:
        self.problems += (p.of_model(variable.model if self.several_models else "") for p in problems)

    def _count(self, rule: Rule, others: Sequence[Rule], path: str) -> None:
        self.won[rule.number] += 1
        for other in others:
            self.beaten.setdefault(other.number, (rule, path))


def _with_its_name(variable: VariableSpec) -> VariableSpec:
    """A variable with what its library calls it among its aliases."""
    if not variable.name or variable.name in variable.aliases:
        return variable
    return replace(variable, aliases=(*variable.aliases, variable.name))


def _paths_of(variable: VariableSpec) -> list[str]:
    """The object paths of a variable."""
    return [variable.path, *(path for path in variable.aliases if not is_named(path))]


def _problem_of_contradiction(variable: VariableSpec, rules: Sequence[Rule]) -> Problem:
    return Problem(
        "contradiction",
        "error",
        variable.path,
        f"{variable.path}: {len(rules)} of Keras's rules match its name",
        tuple((str(rule), str(rule.layout)) for rule in rules),
        "Keras refuses a name that several keys of a layout map match",
        f"make one of them more specific, or add a rule that is the path itself: layout_map[{variable.path!r}]",
    )


def _problems_of(assignment: Assignment, asked: Layout) -> Iterator[Problem]:
    variable, layout, match = assignment.variable, assignment.layout, assignment.match
    is_its_parents = variable.follows and match is None and layout == asked
    if layout.rank != len(variable.shape):
        if not is_its_parents:
            shape = variable.rule_shape if variable.is_packed else variable.shape
            error = layout.rank_error(shape, variable.path)
            yield _of_layout("rank", "error", error, assignment)
        return
    for axis in () if is_its_parents else asked.uneven_axes(variable.shape):
        error = asked.uneven_error(variable.shape, axis, variable.path)
        if layout == asked:
            problem = _of_layout("uneven", "error", error, assignment)
            yield replace(problem, fix=f'{problem.fix}, or set uneven="shrink"')
        else:
            yield _of_taken(error, assignment, axis)
    yield from problems_of_slot(variable)
    if match is not None and not (match.rule or match.is_rest) and variable.kind in _NEED_A_RULE:
        near = ", ".join(match.near_misses)
        yield Problem(
            "no rule",
            "warning",
            variable.path,
            f"{variable.path}: no rule matches, so it is replicated",
            (("shape", str(variable.shape)), ("near misses", near)),
            f"every device holds all {variable.global_bytes:,} bytes of it",
            f"add a rule: layout_map[{path_pattern([variable.path])}] = {(None,) * len(variable.shape)}",
        )
    if assignment.global_init:
        yield Problem(
            "global init",
            "note",
            variable.path,
            f"{variable.path}: its global value is initialized on one device, then sharded",
            (("bytes", f"{variable.global_bytes:,}"),),
            assignment.global_init,
            "use one of the library's own initializers, or load a checkpoint",
        )


def _problems_of_unsupported(
    unsupported: Sequence[Unsupported], assignments: Sequence[Assignment]
) -> Iterator[Problem]:
    sharded = {
        (a.variable.model, path, axis)
        for a in assignments
        for path in (a.variable.path, *a.variable.aliases)
        for axis, count in enumerate(a.layout.shard_counts)
        if count > 1
    }
    several = has_several_models([a.variable for a in assignments])
    for each in unsupported:
        if each.if_sharded is None or any(
            (each.model, each.path, axis) in sharded for axis in each.if_sharded
        ):
            what = f"{each.path}: {each.what}"
            problem = Problem("unsupported", each.severity, each.path, what, why=each.why, fix=each.fix)
            yield problem.of_model(each.model if several else "")


def _of_layout(kind: str, severity: Severity, error: LayoutError, assignment: Assignment) -> Problem:
    facts = {name: str(value) for name, value in error.facts.items()}
    if assignment.match and assignment.match.rule:
        facts["layout"] += f"     {assignment.match.rule}"
    path = assignment.variable.path
    return Problem(kind, severity, path, error.what, tuple(facts.items()), error.why, error.fix)


def _of_taken(error: LayoutError, assignment: Assignment, axis: int) -> Problem:
    """An axis that does not divide, and for which something else was taken."""
    dims = assignment.layout.mesh_dims_of(axis)
    taken = f"sharded over {', '.join(dims)} only" if dims else "replicated"
    problem = _of_layout("uneven", "note", error, assignment)
    rule = assignment.match.rule if assignment.match else None
    if assignment.variable.is_packed:
        reason = "it is sharded as its rule shards the weight that it replaces, as far as that divides it"
    elif rule is not None:
        reason = f'rule {rule.number} has uneven="{rule.uneven}"'
    else:
        reason = f"it follows {assignment.variable.parent} as far as that divides it"
    return replace(
        problem,
        what=f"{problem.subject}: axis {axis} cannot be split evenly, so it is {taken}",
        why=f"{error.why}, and {reason}",
        fix="",
    )


def _problems_of_several_dims(match: Match, layout: Layout) -> Iterator[Problem]:
    """A problem for each axis that is over several dims, where the engine can shard it over one."""
    taken = with_single_dims(layout)
    for axis in range(layout.rank):
        if layout.num_shards(axis) > taken.num_shards(axis):
            yield Problem(
                "unsupported layout",
                "warning",
                match.path,
                f"{match.path}: axis {axis} is sharded over {taken.sharding_specs[axis]} only",
                (("layout", f"{layout}     {match.rule}"), ("mesh", str(layout.mesh))),
                "arrays of this engine have an axis over one mesh dim, so each device holds more of it",
                f"shard axis {axis} over one dim, or make a mesh with one dim of size {layout.num_shards(axis)}",
            )


def problems_of_free_activations(
    assignments: Sequence[Assignment], batch_dim: str | None = None
) -> Iterator[Problem]:
    """A problem if weights are sharded along two axes, or as the batch is, and no rule is for activations.

    Args:
        assignments: The weights and their layouts.
        batch_dim: The mesh dim over which batches are sharded; `None`: weights along two axes are looked for.
    """

    def is_open(layout: Layout) -> bool:
        if batch_dim is None:
            return sum(count > 1 for count in layout.shard_counts) > 1
        dims = [dim for axis in range(layout.rank) for dim in layout.mesh_dims_of(axis)]
        return layout.rank > 1 and batch_dim in dims and layout.mesh.dim_size(batch_dim) > 1

    sharded = [a for a in assignments if a.variable.kind is Kind.WEIGHT and is_open(a.layout)]
    if sharded:
        first = sharded[0]
        how = f"over {batch_dim}, as the batch is" if batch_dim else "along two axes"
        yield Problem(
            "no activations",
            "warning",
            first.variable.path,
            f"{first.variable.path}: sharded {how}, and no rule is for activations",
            (("layout", str(first.layout)), ("such weights", f"{len(sharded)}")),
            "the compiler then chooses, and may send several times as many bytes in each step",
            "add rules for the outputs of the main blocks, as in "
            'layout_map.activations[r"blocks\\.\\d+"] = ("batch", None, None)',
        )


def _problems_of_activations(rules: Rules, matches: Sequence[Match]) -> Iterator[Problem]:
    won = dict.fromkeys(range(1, len(rules) + 1), 0)
    beaten: dict[int, tuple[Rule, str]] = {}
    for match in matches:
        if match.rule:
            won[match.rule.number] += 1
            for other in match.others:
                beaten.setdefault(other.number, (match.rule, match.path))
    yield from _problems_of_rules(rules, won, beaten, [match.path for match in matches], "layer")


def _problems_of_rules(
    rules: Rules,
    won: Mapping[int, int],
    beaten: Mapping[int, tuple[Rule, str]],
    paths: Sequence[str],
    of: str,
) -> Iterator[Problem]:
    """A problem for each rule that decides nothing; `of` is what the paths are of, a variable or a layer."""
    candidates: dict[bool, tuple[int, Candidates]] = {}
    idle = [rule for rule in rules.rules if not won[rule.number]]
    inside = _inside({r.pattern for r in idle if r.number not in beaten and not is_named(r.pattern)}, paths)
    for rule in idle:
        name = rules.name_of(rule)
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
        named = is_named(rule.pattern)
        if named not in candidates:
            tried = [path for path in paths if is_named(path) == named]
            candidates[named] = len(tried), Candidates(tried, _MOST_COMPARISONS)
        count, candidate_paths = candidates[named]
        if of == "variable" and SLOTS.match(rule.pattern):
            yield Problem("unused rule", "warning", rule.pattern, f"{name}: {NO_RULES[0]}", (), *NO_RULES[1:])
            continue
        near = candidate_paths.nearest(rule.pattern)
        yield Problem(
            "unused rule",
            "warning",
            rule.pattern,
            f"{name}: matches no {of}",
            (("near misses", ", ".join(near)),),
            f"such a rule matches whole names, and none of Keras's {counted(count, 'name')}"
            if named
            else "rules match from the start of a path, and none of the model's "
            f"{counted(count, 'path')} starts like this",
            f'to match anywhere in a path: r".*{rule.pattern}"'
            if rule.pattern in inside
            else f"did you mean {path_pattern(near[:1])}? else delete it"
            if near
            else "fix it, or delete it",
        )


def _inside(patterns: Iterable[str], paths: Sequence[str]) -> set[str]:
    """The patterns that match inside of a path, found as the rules of a map are, and so in no more time."""
    listed, found = list(patterns), set[str]()
    index = RuleIndex(map(re.compile, listed), anywhere=True)
    for path in paths if listed else ():
        found.update(listed[number] for number in index.matches(path))
    return found


def _with_typos(problems: Sequence[Problem], unused: Mapping[str, Problem]) -> Iterator[Problem]:
    """The problems; where a rule that matches nothing comes near a variable without one, that rule is to be corrected.

    A rule that says what happens today would end the warning, and leave the variable replicated.
    """
    for problem in problems:
        near = dict(problem.facts).get("near misses", "").split(", ") if problem.kind == "no rule" else ()
        meant = [unused[pattern] for pattern in near if pattern in unused]
        meant.sort(key=lambda rule: not dict(rule.facts)["near misses"].startswith(problem.subject))
        if meant:
            name = meant[0].what.partition(": matches no")[0]
            problem = replace(
                problem, fix=f"correct {name} to {path_pattern([problem.subject])}, or add a rule"
            )
        yield problem


def _problems_of_outputs(rules: Rules, paths: Sequence[str]) -> Iterator[Problem]:
    """A note for each of Keras's rules by which Keras lays out the outputs of layers, too."""
    above = {path[:at] for path in paths if is_named(path) for at, sign in enumerate(path) if sign == "/"}
    outputs: dict[Rule, list[str]] = {}
    for layer in sorted(above):
        for rule in rules.matching_rules(f"{layer}/output"):
            outputs.setdefault(rule, []).append(f"{layer}/output")
    for rule, names in outputs.items():
        yield Problem(
            "layer output",
            "note",
            rule.pattern,
            f"{rules.name_of(rule)}: in Keras it also lays out outputs of layers; in this map it does not",
            (("outputs", listed(names)),),
            "Keras looks up the output of a layer in the map of its variables, as the layer's path and /output",
            "if that is meant, add a rule for the layer's path: layout_map.activations[...]",
        )
