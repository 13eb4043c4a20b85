"""The plan: for each variable its layout and why, every problem there is, and all bytes; nothing is touched.

`make_plan` is pure: it takes what is known of the variables and a layout map, and makes a value. The dry run and the
real run share it: what `layoutmap.plan` prints is what a scope then does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from layoutmap.errors import LayoutError, PlanError, format_message
from layoutmap.layout import Layout
from layoutmap.layout_map import LayoutMap
from layoutmap.limits import Limit
from layoutmap.mesh import Mesh
from layoutmap.path_groups import merge_paths, path_pattern, path_shape
from layoutmap.rules import Match, Rule, Rules, nearest
from layoutmap.variables import Assignment, Kind, VariableSpec

if TYPE_CHECKING:
    from layoutmap.plan_diff import PlanDiff

__all__ = ["Plan", "Problem", "group_problems", "make_plan"]

Severity = Literal["error", "warning", "note"]

_MATCHED = (Kind.WEIGHT, Kind.STATE, Kind.RNG)
_NEED_A_RULE = (Kind.WEIGHT, Kind.STATE)
_SHOWN_IN_FULL = 10


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in a plan that is wrong or may not be meant.

    Args:
        kind: What sort of problem: `"rank"`, `"uneven"`, `"no rule"`, `"unused rule"`, `"shadowed rule"`
            (of variables or of activations), `"tied"`, `"drawn whole"`, `"not built"`, `"not held"` or
            `"cannot run"`.
        severity: `"error"`: the model cannot be made so. `"warning"`: it can, and `strict` makes it an error. `"note"`:
            worth knowing, never an error.
        subject: The path or the pattern concerned.
        what: The headline.
        facts: The values that show it.
        why: The reason.
        mend: What to type instead.
    """

    kind: str
    severity: Severity
    subject: str
    what: str
    facts: tuple[tuple[str, str], ...] = ()
    why: str = ""
    mend: str = ""

    def __str__(self) -> str:
        return format_message(self.what, dict(self.facts), self.why, self.mend)


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """Where every variable of a model goes.

    Args:
        mesh: The mesh.
        assignments: The variables and their layouts, in the order of the model.
        problems: Everything found, errors first.
        activations: The layers whose output a rule of `LayoutMap.activations` lays out, in the order of the model;
            empty too where the library tells no layers.

    Example:
        >>> from layoutmap import LayoutMap, Mesh
        >>> layout_map = LayoutMap(Mesh(None, "batch=2,model=4"), {r".*\\.kernel": (None, "model")})
        >>> plan = make_plan([VariableSpec("d1.kernel", (512, 1024), "float32")], layout_map)
        >>> plan["d1.kernel"].shard_shape, plan.device_nbytes
        ((512, 256), 524288)
        >>> plan
        <Plan: 1 variable on batch=2, model=4, 2.0 MiB, 512.0 KiB per device; no problems>
    """

    mesh: Mesh
    assignments: tuple[Assignment, ...]
    problems: tuple[Problem, ...] = ()
    activations: tuple[Match, ...] = ()

    def __iter__(self) -> Iterator[Assignment]:
        return iter(self.assignments)

    def __len__(self) -> int:
        return len(self.assignments)

    def __getitem__(self, path: str) -> Assignment:
        for assignment in self.assignments:
            if path == assignment.variable.path or path in assignment.variable.aliases:
                return assignment
        near = nearest(path, [a.variable.path for a in self.assignments])
        raise KeyError(
            f"the plan has no variable {path!r}" + (f"; near misses: {', '.join(near)}" if near else "")
        )

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems with which the model cannot be made."""
        return tuple(p for p in self.problems if p.severity == "error")

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """The problems that `strict` makes errors."""
        return tuple(p for p in self.problems if p.severity == "warning")

    @property
    def nbytes(self) -> int:
        """Size in bytes of all variables, each counted once."""
        return sum(a.variable.nbytes for a in self.assignments)

    @property
    def device_nbytes(self) -> int:
        """Size in bytes of what each device holds: the shards of all variables."""
        return sum(a.shard_nbytes for a in self.assignments if a.fits)

    @property
    def largest_drawn_whole(self) -> Assignment | None:
        """The largest variable whose first value must be drawn whole on one device, if there is any."""
        whole = [a for a in self.assignments if a.drawn_whole]
        return max(whole, key=lambda a: a.variable.nbytes, default=None)

    def with_problem(self, problem: Problem) -> Plan:
        """The same plan with one more problem."""
        return self.with_problems([problem])

    def with_problems(self, problems: Sequence[Problem]) -> Plan:
        """The same plan with more problems."""
        return replace(self, problems=_in_order([*self.problems, *problems]))

    def check(self, *, strict: bool = False) -> Plan:
        """Raise once, with every error; give the plan back if there is none.

        Args:
            strict: Whether warnings count as errors.

        Raises:
            PlanError: There are errors; the first ten are in the message, all are in `problems`.
        """
        found = self.errors + (self.warnings if strict else ())
        if not found:
            return self
        grouped = group_problems(found)
        if len(grouped) == 1:
            (only,) = grouped
            raise PlanError(only.what, problems=found, facts=dict(only.facts), why=only.why, mend=only.mend)
        shown = "\n\n".join(str(problem) for problem in grouped[:_SHOWN_IN_FULL])
        more = f"\n\n... and {len(grouped) - _SHOWN_IN_FULL} more" if len(grouped) > _SHOWN_IN_FULL else ""
        raise PlanError(f"{len(found)} problems\n{shown}{more}", problems=found)

    # -- questions

    def explain(self, path: str) -> str:
        """Why a variable is where it is, and what to type to have it elsewhere.

        Args:
            path: The variable's path, or another path to it.

        Raises:
            KeyError: The plan has no such variable; names those that come close.

        Example:
            >>> from layoutmap import LayoutMap, Mesh
            >>> rules = {r".*\\.kernel": (None, "model"), "d1": ("model",)}
            >>> layout_map = LayoutMap(Mesh(None, "batch=2,model=4"), rules)
            >>> print(make_plan([VariableSpec("d1.kernel", (512, 1024), "float32")], layout_map).explain("d1.kernel"))
            d1.kernel
              what          weight, float32[512, 1024], 2.0 MiB
              layout        (unsharded, model)
              per device    512 x 256, 512.0 KiB
              because       rule 1  .*\\.kernel
              also matches  rule 2  d1: would give (model,)
              change it     the first rule that matches wins: put one before rule 1, or change that
        """
        from layoutmap.report.explain import explain_text

        return explain_text(self, path)

    def diff(self, other: Plan) -> PlanDiff:
        """What moves from this plan to another; false if nothing does.

        Example:
            >>> from layoutmap import LayoutMap, Mesh
            >>> mesh, variables = Mesh(None, "model=4"), [VariableSpec("d1.kernel", (512, 1024), "float32")]
            >>> rows, columns = LayoutMap(mesh, {"d1": ("model", None)}), LayoutMap(mesh, {"d1": (None, "model")})
            >>> print(make_plan(variables, rows).diff(make_plan(variables, columns)))
            d1.kernel  layout  (model, unsharded) -> (unsharded, model)
            <BLANKLINE>
            1 change; per device 512.0 KiB -> 512.0 KiB
        """
        from layoutmap.plan_diff import diff_plans

        return diff_plans(self, other)

    @property
    def fingerprint(self) -> str:
        """A short text that is the same for plans that put the same variables in the same places of a mesh."""
        from layoutmap.plan_json import fingerprint

        return fingerprint(self)

    # -- texts

    def to_json(self) -> str:
        """The plan as JSON, a variable in each line: to be kept beside the model, and compared by `diff`."""
        from layoutmap.plan_json import plan_to_json

        return plan_to_json(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read what `to_json` wrote.

        Raises:
            PlanError: The text is no plan, or of another version; says where.
        """
        from layoutmap.plan_json import plan_from_json

        return plan_from_json(text)

    def __str__(self) -> str:
        from layoutmap.report.text import plan_text

        return plan_text(self)

    def __repr__(self) -> str:
        from layoutmap.report.text import plan_line

        return f"<Plan: {plan_line(self)}>"

    def _repr_html_(self) -> str:
        from layoutmap.report.html import plan_html

        return plan_html(self)


def group_problems(problems: Sequence[Problem]) -> list[Problem]:
    """The problems with those of repeated blocks made one: `blocks.{0..31}.kernel: ...`."""
    groups: dict[object, list[Problem]] = {}
    for p in problems:
        # The pattern in a mend names one block; all else must be equal for two problems to be one.
        groups.setdefault((p.kind, p.severity, path_shape(p.subject), p.facts, p.why), []).append(p)
    merged: list[Problem] = []
    for first, *rest in groups.values():
        subjects = [first.subject, *(p.subject for p in rest)]
        new = merge_paths(subjects) if rest else first.subject
        mend = first.mend.replace(path_pattern(subjects[:1]), path_pattern(subjects))
        merged.append(replace(first, subject=new, what=first.what.replace(first.subject, new, 1), mend=mend))
    return merged


def make_plan(
    variables: Sequence[VariableSpec],
    layout_map: LayoutMap,
    *,
    drawn_whole: Mapping[str, str] | None = None,
    limits: Sequence[Limit] = (),
    complete: bool = True,
    layers: Sequence[str] | None = None,
) -> Plan:
    """Match every variable, collect every problem; pure.

    Args:
        variables: The variables, in the order of the model. A slot comes after its parent.
        layout_map: The rules.
        drawn_whole: For each path whose first value must be drawn whole: why.
        limits: What the backend cannot do with layers and variables.
        complete: Whether these are all variables there will be. Rules that match nothing are only a problem then.
        layers: The paths of all layers, for the rules of `LayoutMap.activations`; `None`: they are not known.

    Raises:
        PlanError: The layout map has no mesh, so nothing can be laid out.
    """
    mesh = layout_map.mesh
    if mesh is None:
        raise PlanError(
            "the layout map has no mesh",
            why="it was made without one and has no rule",
            mend='give it one: LayoutMap(create_mesh("batch=2,model=4"))',
        )
    assignments: list[Assignment] = []
    problems: list[Problem] = []
    won: dict[int, int] = dict.fromkeys(range(1, len(layout_map) + 1), 0)
    beaten: dict[int, tuple[Rule, str]] = {}
    by_path: dict[tuple[str, str], Assignment] = {}
    near: dict[object, tuple[str, ...]] = {}
    for variable in variables:
        match = _match(variable, layout_map, near, problems) if variable.kind in _MATCHED else None
        layout = _layout(variable, match, by_path, mesh)
        whole = (drawn_whole or {}).get(variable.path, "")
        assignment = Assignment(variable, layout, match, whole)
        assignments.append(assignment)
        by_path[variable.model, variable.path] = assignment
        if match and match.rule:
            won[match.rule.number] += 1
            for other in match.others:
                beaten.setdefault(other.number, (match.rule, variable.path))
        problems += _problems_of(assignment)
    if complete:
        paths = [path for v in variables if v.kind in _MATCHED for path in (v.path, *v.aliases)]
        problems += _problems_of_rules(layout_map, won, beaten, paths, "variable")
    activations = [layout_map.activations.match(path) for path in layers or ()]
    if complete and layers is not None:
        problems += _problems_of_activations(layout_map.activations, activations)
    problems += _problems_of_limits(limits, assignments)
    laid_out = tuple(match for match in activations if match.rule)
    return Plan(mesh, tuple(assignments), _in_order(problems), laid_out)


def _in_order(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """Errors first."""
    order = {"error": 0, "warning": 1, "note": 2}
    return tuple(sorted(problems, key=lambda p: order[p.severity]))


def _match(
    variable: VariableSpec,
    layout_map: LayoutMap,
    near: dict[object, tuple[str, ...]],
    problems: list[Problem],
) -> Match:
    """What the map says of a variable under all its paths; the first rule of the map among them wins."""
    answers = {path: layout_map.matching_rules(path) for path in (variable.path, *variable.aliases)}
    winners = {path: rules[0] for path, rules in answers.items() if rules}
    if not winners:
        block = path_shape(variable.path)
        if block not in near:  # near misses take a while to find, and are the same in all repeated blocks
            near[block] = tuple(nearest(variable.path, layout_map))
        return Match(variable.path, None, near_misses=near[block])
    rule = min(winners.values(), key=lambda r: (r.pattern not in answers, r.number))
    if len({r.layout for r in winners.values()}) > 1:
        problems.append(
            Problem(
                "tied",
                "warning",
                variable.path,
                f"{variable.path}: its paths are given different layouts",
                tuple((path, f"{r.layout}  {r}") for path, r in winners.items()),
                f"it is one variable with {len(answers)} paths, and {rule} comes first",
                "make the rules agree, or leave out one of them",
            )
        )
    others = {r.number: r for rules in answers.values() for r in rules if r != rule}
    return Match(variable.path, rule, tuple(others[n] for n in sorted(others)))


def _layout(
    variable: VariableSpec, match: Match | None, by_path: Mapping[tuple[str, str], Assignment], mesh: Mesh
) -> Layout:
    if match and match.rule:
        return match.rule.layout
    parent = by_path.get((variable.model, variable.parent or ""))
    if parent and parent.variable.shape == variable.shape:
        return parent.layout
    return Layout.replicated(mesh, len(variable.shape))


def _problems_of(assignment: Assignment) -> Iterator[Problem]:
    variable, layout, match = assignment.variable, assignment.layout, assignment.match
    if match is None:
        return  # it follows another variable, whose problem is told there, or is replicated
    if layout.rank != len(variable.shape):
        yield _of_error("rank", layout.rank_error(variable.shape, variable.path), assignment)
    elif match.rule:
        for axis in layout.uneven_axes(variable.shape):
            yield _of_error("uneven", layout.uneven_error(variable.shape, axis, variable.path), assignment)
    if match.rule is None and variable.kind in _NEED_A_RULE:
        near = ", ".join(match.near_misses)
        yield Problem(
            "no rule",
            "warning",
            variable.path,
            f"{variable.path}: no rule matches, so it is replicated",
            (("shape", str(variable.shape)), ("near misses", near)),
            f"every device holds all {variable.nbytes:,} bytes of it",
            f"add a rule: layout_map[{path_pattern([variable.path])}] = {(None,) * len(variable.shape)}",
        )
    if assignment.drawn_whole:
        yield Problem(
            "drawn whole",
            "note",
            variable.path,
            f"{variable.path}: its first value is drawn whole, then cut",
            (("bytes", f"{variable.nbytes:,}"),),
            assignment.drawn_whole,
            "use one of the library's own initializers, or load a checkpoint",
        )


def _problems_of_limits(limits: Sequence[Limit], assignments: Sequence[Assignment]) -> Iterator[Problem]:
    cut = {
        (path, axis)
        for a in assignments
        for path in (a.variable.path, *a.variable.aliases)
        for axis, count in enumerate(a.layout.shard_counts)
        if count > 1
    }
    for limit in limits:
        if limit.if_cut is None or any((limit.path, axis) in cut for axis in limit.if_cut):
            what = f"{limit.path}: {limit.what}"
            yield Problem("cannot run", limit.severity, limit.path, what, why=limit.why, mend=limit.mend)


def _of_error(kind: str, error: LayoutError, assignment: Assignment) -> Problem:
    facts = {name: str(value) for name, value in error.facts.items()}
    if assignment.match and assignment.match.rule:
        facts["layout"] += f"     {assignment.match.rule}"
    return Problem(
        kind, "error", assignment.variable.path, error.what, tuple(facts.items()), error.why, error.mend
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
    for rule in rules.rules:
        if won[rule.number]:
            continue
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
        near = nearest(rule.pattern, paths)
        yield Problem(
            "unused rule",
            "warning",
            rule.pattern,
            f"{name}: matches no {of}",
            (("near misses", ", ".join(near)),),
            f"re.match finds it at the start of none of the {len(paths)} paths",
            f"did you mean {path_pattern(near[:1])}? else delete it" if near else "mend it, or delete it",
        )
