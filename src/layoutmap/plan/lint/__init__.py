"""Find layouts that are valid but probably not intended, each with its evidence and a fix.

    "sum over the batch dim" a summed axis of a kernel, or a table, is sharded over the dim of the batch
    "swapped"                a layer's output is sharded over another dim than the next layer's input
    "replicated partner"     a kernel is replicated, and the kernel before or after it is sharded along the common axis;
                             or a bias is replicated, and its kernel's outputs and other biases are not
    "query, key, value"      these kernels of an attention layer are sharded differently
    "heads"                  the shards of an attention kernel split a head
    "replicated table"       an embedding table is replicated, while most other weights are sharded
    "replicated kernel"      an output layer as large as such a table is replicated
    "contradicts its kernel" a bias, or the scale of a quantized weight, is sharded differently from its kernel
    "contradicts its bias"   a kernel is sharded differently from its bias, and the bias is probably right
    "unused dim"             nothing is sharded over a dim of the mesh
    "odd one out"            one of the repeated blocks is sharded over fewer dims than the others

and, if the plan has the cost of a step:

    "gathered weight"        a weight is gathered over a dim that does not shard the batch
    "resharded outputs"      the outputs of a fused kernel are resharded, because a split of them crosses shards
    "summed activation"      activations are reduced over the dim of the batch
    "dim that only costs"    bytes are sent along a dim, although its devices repeat the same computation

Most checks need the roles of a weight's axes in its layer (`AxisRoles`), which adapters find for the layers of their
libraries. Other roles are inferred from names and shapes, if these are clear. Weights with unknown roles are counted,
but not checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from layoutmap.core.errors import PlanError, format_count, join_names
from layoutmap.core.escaping import escape_text
from layoutmap.core.mesh import Mesh, check_dims_in_mesh
from layoutmap.core.paths import format_merged_paths, split_path_at_numbers
from layoutmap.core.specs import BatchDim, format_batch_dim, make_spec
from layoutmap.core.text_table import format_html_table
from layoutmap.plan.carried_cost import load_cost_package
from layoutmap.plan.lint import checks
from layoutmap.plan.lint.changes import add_rule_changes_to_fixes
from layoutmap.plan.lint.linted_plan import LintedPlan
from layoutmap.plan.lint.suggest import LayoutSuggestions
from layoutmap.plan.output_rules import NAMES_OF_BATCH
from layoutmap.plan.problems import Problem, merge_problems
from layoutmap.plan.table import PlanTable


@dataclass(frozen=True, repr=False)
class Findings:
    """Store the problems that lint found in a plan. A `Findings` without problems is false in a condition.

    Iteration yields one problem for equal problems of repeated blocks, as `print` shows them.

    Args:
        problems: Each finding, with its evidence in `facts` and a fix.
        batch_dim: The mesh dim over which the checks assumed batches to be sharded; `None`: none, or it is unknown.
        is_known: Whether the user or the model determines `batch_dim`, so that it is not guessed from activation rules
            or from the name of a dim.
        num_errors: The number of the plan's errors. Variables that do not fit their layouts are not checked.
        unchecked_paths: The paths of the sharded weights of unknown role or order, which most checks omit.
        needs_inputs: Whether inputs of the model would show the order of some of these.
        call_error: The error of the model's call with inputs, which was to show the order; empty: there was none.
    """

    problems: tuple[Problem, ...]
    batch_dim: BatchDim | None
    is_known: bool = False
    num_errors: int = 0
    unchecked_paths: tuple[str, ...] = ()
    needs_inputs: bool = False
    call_error: str = ""

    @cached_property
    def _merged_problems(self) -> tuple[Problem, ...]:
        return tuple(merge_problems(self.problems))

    def __iter__(self) -> Iterator[Problem]:
        return iter(self._merged_problems)

    def __len__(self) -> int:
        return len(self._merged_problems)

    def __str__(self) -> str:
        lines = [f"{escape_text(problem.kind)}: {problem}\n" for problem in self]
        return "\n".join([*lines, f"Lint: {self.summary}"])

    def __repr__(self) -> str:
        return f"<Findings: {self.summary}>"

    def _repr_html_(self) -> str:
        rows = [(p.kind, p.what, p.why, p.fix) for p in self]
        return format_html_table(f"Lint: {self.summary}", ("kind", "what", "why", "fix"), rows)

    @property
    def summary(self) -> str:
        """The number of findings, and the mesh dims over which batches are sharded, in one line."""
        found = format_count(len(self), "finding") if self else "nothing found"
        if self.num_errors:
            found += f" beside {format_count(self.num_errors, 'error')} of the plan"
        if self.unchecked_paths:
            groups: dict[tuple[str, ...], list[str]] = {}
            for path in self.unchecked_paths:
                groups.setdefault(split_path_at_numbers(path), []).append(path)
            names = [escape_text(format_merged_paths(paths)) for paths in groups.values()]
            found += (
                f"; {format_count(len(self.unchecked_paths), 'sharded weight')} of unknown use not checked: "
            )
            found += join_names(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
            found += "; pass inputs= (--inputs) to check them" * (self.needs_inputs and not self.call_error)
        if self.call_error:
            failure = escape_text(self.call_error)
            found += f"; the order of calls is unknown, because the call with these inputs failed: {failure}"
        if self.batch_dim:
            how = "are sharded" if self.is_known else "are assumed to be sharded"
            return f"{found}; batches {how} over {escape_text(format_batch_dim(self.batch_dim))}"
        return f"{found}; {'batches are replicated' if self.is_known else 'the batch dim is not known'}"


def lint_plan(plan: PlanTable, batch_dim: BatchDim | None = None) -> Findings:
    """Return the layouts of a plan that are probably not intended. See `Plan.lint`.

    Raises:
        PlanError: The mesh lacks `batch_dim`.
    """
    check_dims_in_mesh("lint: batch_dim", batch_dim, plan.mesh, "batches are sharded over it", PlanError)
    # Findings must not contradict the corrections of mistyped rules, so check the layouts with these.
    linted, is_known = make_linted_plan(plan.apply_corrections(), batch_dim)
    findings = [finding for check in checks.CHECKS for finding in check(linted)]
    for check in checks.LATER_CHECKS:
        findings += check(linted, {id(a): layout for f in findings for a, layout in f.changes})
    found = [*add_rule_changes_to_fixes(findings, linted.plan)]
    if plan.cost is not None:
        found += load_cost_package().find_cost_problems(linted)
    unknown = tuple(a.variable.path for a in linted.unchecked_weights)
    needs_inputs = linted.has_unknown_order
    return Findings(
        tuple(found), linted.batch_dim, is_known, len(plan.errors), unknown, needs_inputs, linted.call_error
    )


def make_linted_plan(plan: PlanTable, batch_dim: BatchDim | None = None) -> tuple[LintedPlan, bool]:
    """Return a pair: the plan as a `LintedPlan`, and whether its batch dim is known, not guessed."""
    cost_dim = plan.cost.batch_dim if plan.cost else None
    known = batch_dim or cost_dim or (make_spec(plan.batches) if plan.batches else None)
    is_known = known is not None or plan.batches is not None
    return LintedPlan(plan, known if is_known else guess_batch_dim(plan)), is_known


def make_layout_suggester(plan: PlanTable) -> LayoutSuggestions:
    """Return the object that suggests layouts for the replicated variables of a plan."""
    linted, _ = make_linted_plan(plan)
    return LayoutSuggestions(
        linted,
        lambda: {
            id(a): layout
            for check in checks.CHECKS
            for finding in check(linted)
            for a, layout in finding.changes
        },
    )


def list_dims_with_batch_names(mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh dims with a name that is usual for a dim over which batches are sharded, such as `data`."""
    return tuple(dim for dim in mesh.dim_names if dim in NAMES_OF_BATCH)


def guess_batch_dim(plan: PlanTable) -> str | None:
    """Return the mesh dim over which batches are probably sharded, or None if nothing suggests one.

    It is the dim of most activation rules, else a dim of `fully_shard`, which shards weights over the devices of the
    batch, else a dim with a usual name.
    """
    votes = Counter(
        dim
        for match in plan.activations
        if match.layout is not None and match.layout.rank
        for dim in match.layout.list_mesh_dims(0)
    )
    named = [*plan.gathered_dims, *list_dims_with_batch_names(plan.mesh)]
    return votes.most_common(1)[0][0] if votes else named[0] if named else None
