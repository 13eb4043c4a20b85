"""Find the problems of variables in a plan, and write their messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from layoutmap.core.errors import LayoutError
from layoutmap.core.layout import Layout
from layoutmap.core.match import Match, Rule
from layoutmap.core.paths import format_path_regex_as_python
from layoutmap.core.specs import BatchDim, format_batch_dim, list_batch_dims
from layoutmap.core.text_table import format_bytes
from layoutmap.core.uneven import format_uneven_setting, keep_largest_dim_per_axis
from layoutmap.core.unsupported import UnsupportedFeature
from layoutmap.core.variables import Assignment, Kind, VariableSpec, has_several_models
from layoutmap.plan.output_rules import OutputRanks, make_activation_rule_fix
from layoutmap.plan.problems import Problem, Severity
from layoutmap.plan.slots import find_slot_problems

_NEED_A_RULE = (Kind.WEIGHT, Kind.STATE, Kind.LATER)


def make_keras_rule_conflict_problem(variable: VariableSpec, rules: Sequence[Rule]) -> Problem:
    """Return the error that several `keras:` rules match the name of one variable, because Keras refuses this."""
    return Problem(
        "contradiction",
        "error",
        variable.path,
        f"{variable.path}: {len(rules)} of Keras's rules match its name",
        tuple((str(rule), str(rule.layout)) for rule in rules),
        "Keras refuses a name that several keys of a layout map match",
        f"make one of them more specific, or add a rule that is the path itself: layout_map[{variable.path!r}]",
    )


def make_tied_conflict_problem(
    variable: VariableSpec, rule: Rule, winners: Mapping[str, Rule], num_paths: int
) -> Problem:
    """Return the warning that the paths of a tied variable match rules with different layouts.

    Args:
        variable: The variable.
        rule: The rule that gives its layout.
        winners: The first rule that matches each of its paths.
        num_paths: The number of its paths.
    """
    return Problem(
        "tied",
        "warning",
        variable.path,
        f"{variable.path}: its paths get different layouts",
        tuple((path, f"{r.layout}  {r}") for path, r in winners.items()),
        f"it is one variable with {num_paths} paths, and {rule} comes first",
        "make the rules agree, or leave out one of them",
    )


def find_variable_problems(
    assignment: Assignment, requested: Layout, pad_refusal: str = ""
) -> Iterator[Problem]:
    """Yield the problems of a variable: a wrong rank, uneven axes, no rule, or an initial value computed on one device.

    Args:
        assignment: The variable and its layout.
        requested: The layout of its rule.
        pad_refusal: Why it cannot be padded; empty if it can.
    """
    variable, layout, match = assignment.variable, assignment.layout, assignment.match
    is_its_parents = variable.is_derived and match is None and layout == requested
    if layout.rank != len(variable.shape):
        if not is_its_parents:
            shape = variable.rule_shape if variable.is_packed else variable.shape
            error = layout.make_rank_error(shape, variable.path)
            yield _make_problem_from_error("rank", "error", error, assignment)
        return
    for axis in () if is_its_parents else requested.find_uneven_axes(variable.shape):
        error = requested.make_uneven_error(variable.shape, axis, variable.path)
        if assignment.is_padded:
            yield _make_padding_note(error, assignment, axis)
        elif layout == requested:
            yield _make_uneven_problem(error, assignment, axis, pad_refusal)
        else:
            yield _make_fewer_dims_note(error, assignment, axis, pad_refusal)
    yield from find_slot_problems(variable)
    if match is not None and not (match.rule or match.has_rest_layout) and variable.kind in _NEED_A_RULE:
        near = ", ".join(match.near_misses)
        yield Problem(
            "no rule",
            "warning",
            variable.path,
            f"{variable.path}: no rule matches, so it is replicated",
            (("shape", str(variable.shape)), ("near misses", near)),
            f"every device holds all {variable.global_bytes:,} bytes of it",
            f"add a rule: layout_map[{format_path_regex_as_python([variable.path])}] = {(None,) * len(variable.shape)}",
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


def find_unsupported_feature_problems(
    unsupported: Sequence[UnsupportedFeature], assignments: Sequence[Assignment]
) -> Iterator[Problem]:
    """Yield a problem for each layer and variable that the backend does not support in its planned layout."""
    sharded = {
        (a.variable.model, path, axis)
        for a in assignments
        for path in (a.variable.path, *a.variable.aliases)
        for axis, count in enumerate(a.layout.shard_counts)
        if count > 1
    }
    several = has_several_models([a.variable for a in assignments])
    for part in unsupported:
        if part.if_sharded is None or any(
            (part.model, part.path, axis) in sharded for axis in part.if_sharded
        ):
            what = f"{part.path}: {part.what}"
            problem = Problem(part.kind, part.severity, part.path, what, why=part.why, fix=part.fix)
            yield problem.add_model_name(part.model if several else "")


def _make_problem_from_error(
    kind: str, severity: Severity, error: LayoutError, assignment: Assignment
) -> Problem:
    """Return a variable's problem with the texts of an error. Append the matching rule to its fact `layout`."""
    facts = {name: str(value) for name, value in error.facts.items()}
    if assignment.match and assignment.match.rule:
        facts["layout"] += f"     {assignment.match.rule}"
    path = assignment.variable.path
    return Problem(kind, severity, path, error.what, tuple(facts.items()), error.why, error.fix)


def _make_uneven_problem(error: LayoutError, assignment: Assignment, axis: int, pad_refusal: str) -> Problem:
    """Return the problem that an axis cannot be split evenly, with padding or shrinking as the fix."""
    problem = _make_problem_from_error("uneven", "error", error, assignment)
    if pad_refusal:
        pads = assignment.match and assignment.match.rule and assignment.match.rule.uneven != "error"
        why = f"{problem.why}, and {pad_refusal}" if pads else problem.why
        return replace(problem, why=why, fix=f'{problem.fix}, or set uneven="shrink"')
    cost = format_bytes(replace(assignment, is_padded=True).padding_bytes)
    return replace(problem, fix=f'set uneven="pad", which costs {cost} per device, or uneven="shrink"')


def _make_padding_note(error: LayoutError, assignment: Assignment, axis: int) -> Problem:
    """Return the note that an axis is padded, with the memory that the padding costs."""
    size, padded = (shape[axis] for shape in (assignment.variable.shape, assignment.padded_shape))
    cost = format_bytes(assignment.padding_bytes)
    problem = _make_problem_from_error("uneven", "note", error, assignment)
    what = f"{problem.subject}: axis {axis} is padded from {size} to {padded}, {cost} per device"
    return replace(problem, what=what, fix="")


def _make_fewer_dims_note(error: LayoutError, assignment: Assignment, axis: int, pad_refusal: str) -> Problem:
    """Return the note that an uneven axis is sharded over fewer mesh dims than its rule says, or is not sharded."""
    dims = assignment.layout.list_mesh_dims(axis)
    taken = f"sharded over {', '.join(dims)} only" if dims else "replicated"
    problem = _make_problem_from_error("uneven", "note", error, assignment)
    rule = assignment.match.rule if assignment.match else None
    if assignment.variable.is_packed:
        reason = "it is sharded as its rule shards the weight that it replaces, as far as that divides it"
    elif rule is not None:
        reason = f"rule {rule.number} has {format_uneven_setting(rule.uneven)}"
        if not isinstance(rule.uneven, str):
            reason += f", and {pad_refusal}"
    else:
        reason = f"it follows {assignment.variable.parent} as far as that divides it"
    return replace(
        problem,
        what=f"{problem.subject}: axis {axis} cannot be split evenly, so it is {taken}",
        why=f"{error.why}, and {reason}",
        fix="",
    )


def find_multiple_dims_per_axis_problems(match: Match, layout: Layout) -> Iterator[Problem]:
    """Yield a warning for each axis over several mesh dims, because this engine shards an axis over only one."""
    taken = keep_largest_dim_per_axis(layout)
    for axis in range(layout.rank):
        if layout.num_shards(axis) > taken.num_shards(axis):
            yield Problem(
                "unsupported layout",
                "warning",
                match.path,
                f"{match.path}: axis {axis} is sharded over {taken.sharding_specs[axis]} only",
                (("layout", f"{layout}     {match.rule}"), ("mesh", str(layout.mesh))),
                "this engine shards an axis over only one mesh dim, so each device holds more of it",
                f"shard axis {axis} over one dim, or make a mesh with one dim of size {layout.num_shards(axis)}",
            )


def find_missing_activation_rule_problem(
    assignments: Sequence[Assignment],
    ranks: OutputRanks | None,
    batch_dim: BatchDim | None = None,
    *,
    checks_batch_dim: bool = False,
) -> Problem | None:
    """Return the problem that sharded weights need activation rules, or None if they do not.

    Args:
        assignments: The weights and their layouts.
        ranks: The layers of the model; `None`: the model is a pytree, whose activations have no paths.
        batch_dim: The mesh dim over which batches are sharded; `None`: unknown.
        checks_batch_dim: Whether weights that are sharded over `batch_dim` need rules, too.
    """
    batch_dims = {*list_batch_dims(batch_dim)} if checks_batch_dim else set[str]()

    def has_two_sharded_axes(layout: Layout) -> bool:
        return sum(count > 1 for count in layout.shard_counts) > 1

    def is_sharded_over_batch_dims(layout: Layout) -> bool:
        dims = {dim for axis in range(layout.rank) for dim in layout.list_mesh_dims(axis)}
        return layout.rank > 1 and any(layout.mesh.dim_size(dim) > 1 for dim in dims & batch_dims)

    weights = [a for a in assignments if a.variable.kind is Kind.WEIGHT]
    sharded, how = [a for a in weights if has_two_sharded_axes(a.layout)], "along two axes"
    if not sharded and batch_dim:
        sharded = [a for a in weights if is_sharded_over_batch_dims(a.layout)]
        how = f"over {format_batch_dim(batch_dim)}, as the batch is"
    if not sharded:
        return None
    first = sharded[0]
    facts = (("layout", str(first.layout)), ("such weights", f"{len(sharded)}"))
    fix = make_activation_rule_fix(ranks, [a.variable.path for a in sharded], first.layout.mesh, batch_dim)
    if ranks is not None:
        return Problem(
            "no activations",
            "warning",
            first.variable.path,
            f"{first.variable.path}: sharded {how}, and no rule is for activations",
            facts,
            "the compiler then chooses, and may send several times as many bytes in each step",
            fix,
        )
    # The code of a pytree may constrain activations, which a plan cannot see, so this is a note, which `strict`
    # ignores.
    return Problem(
        "no activations",
        "note",
        first.variable.path,
        f"{first.variable.path}: sharded {how}, and a plan does not see the layouts of activations",
        facts,
        "without a constraint in the code the compiler chooses, and may send several times as many bytes",
        fix,
    )
