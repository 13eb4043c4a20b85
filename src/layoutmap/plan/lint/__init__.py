"""Find layouts that are valid but probably not intended, each with its evidence and a fix.

    "sum over the batch dim" an axis that is summed over is sharded over the dim of the batch
    "swapped"                a layer's output is sharded over another dim than the next layer's input
    "replicated partner"     of two kernels in a row one is sharded along the axis between them, and one is replicated
    "query, key, value"      the three of an attention layer are not sharded alike
    "heads"                  sharding splits a head of attention
    "replicated table"       a table of embeddings is replicated while the rest is sharded
    "replicated kernel"      the same of an output layer as large as a table
    "contradicts its kernel" a bias, or the scale of a quantized weight, is sharded differently from its kernel
    "contradicts its bias"   a kernel is sharded differently from its bias, and no other weight agrees with it
    "unused dim"             nothing is sharded over a dim of the mesh
    "odd one out"            of repeated blocks one is not sharded as the others are

and, where the plan has the cost of a step:

    "gathered weight"        a weight is gathered over a dim that does not shard the batch
    "summed activation"      activations are summed over the dim of the batch
    "dim that only costs"    bytes travel over a dim, whose devices compute the same

Most of them need to know what a layer does with the axes of its weights (`Use`), which adapters know for the layers of
their libraries. What is not known is not judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from layoutmap.core.errors import PlanError, format_count
from layoutmap.core.escaping import escape_text
from layoutmap.core.mesh import Mesh, check_dim
from layoutmap.core.specs import BatchDim, format_batch_dim, spec_from_dims
from layoutmap.core.text_table import format_html_table
from layoutmap.plan.carried_cost import load_cost_package
from layoutmap.plan.lint import checks
from layoutmap.plan.lint.changes import write_changes
from layoutmap.plan.lint.suggest import Suggestions
from layoutmap.plan.lint.weights import Linted
from layoutmap.plan.problems import Problem, group_problems
from layoutmap.plan.table import PlanTable

_NAMES_OF_BATCH = ("batch", "data", "dp", "fsdp")


@dataclass(frozen=True, slots=True, repr=False)
class Findings:
    """Problems that lint found in a plan. It is true if there are any.

    Args:
        problems: Each finding, with its evidence in `facts` and a fix.
        batch_dim: The mesh dim that was taken for the one that the batch is sharded over; `None`: there is none or it
            is not known, so nothing was judged by it.
        is_known: Whether that was said or read off a model, and not assumed by rules for activations or by its name.
        num_errors: Number of the plan's errors. Variables that do not fit their layouts are not judged.
    """

    problems: tuple[Problem, ...]
    batch_dim: BatchDim | None
    is_known: bool = False
    num_errors: int = 0

    def __iter__(self) -> Iterator[Problem]:
        return iter(self.problems)

    def __len__(self) -> int:
        return len(self.problems)

    def __str__(self) -> str:
        lines = [f"{escape_text(problem.kind)}: {problem}\n" for problem in group_problems(self.problems)]
        return "\n".join([*lines, f"Lint: {self.line}"])

    def __repr__(self) -> str:
        return f"<Findings: {self.line}>"

    def _repr_html_(self) -> str:
        rows = [(p.kind, p.what, p.why, p.fix) for p in group_problems(self.problems)]
        return format_html_table(f"Lint: {self.line}", ("kind", "what", "why", "fix"), rows)

    @property
    def line(self) -> str:
        """The number of findings, and the mesh dims over which batches are sharded, as one line."""
        count = len(group_problems(self.problems))
        found = f"{count} finding{'' if count == 1 else 's'}" if count else "nothing found"
        if self.num_errors:
            found += f" beside {format_count(self.num_errors, 'error')} of the plan"
        if self.batch_dim:
            how = "are sharded" if self.is_known else "are assumed to be sharded"
            return f"{found}; batches {how} over {escape_text(format_batch_dim(self.batch_dim))}"
        return f"{found}; {'batches are replicated' if self.is_known else 'the batch dim is not known'}"


def lint_plan(plan: PlanTable, batch_dim: BatchDim | None = None) -> Findings:
    """Look for layouts that are probably not intended. See `Plan.lint`.

    Raises:
        PlanError: The mesh has no such dim.
    """
    check_dim("lint: batch_dim", batch_dim, plan.mesh, "batches are sharded over it", PlanError)
    linted, is_known = sort_weights(plan, batch_dim)
    findings = [finding for check in checks.CHECKS for finding in check(linted)]
    reported = {id(a) for finding in findings for a, _ in finding.changes}
    findings += checks.find_replicated_partners(linted, reported)
    reported |= {id(a) for finding in findings for a, _ in finding.changes}
    findings += checks.find_contradictions(linted, reported)
    found = [*write_changes(findings, plan)]
    if plan.cost is not None:
        found += load_cost_package().lint(linted)
    return Findings(tuple(found), linted.batch_dim, is_known, len(plan.errors))


def sort_weights(plan: PlanTable, batch_dim: BatchDim | None = None) -> tuple[Linted, bool]:
    """Return the plan sorted for the checks, and whether its batch dim is known and not guessed."""
    of_cost = plan.cost.batch_dim if plan.cost else None
    known = batch_dim or of_cost or (spec_from_dims(plan.batches) if plan.batches else None)
    is_known = known is not None or plan.batches is not None
    return Linted(plan, known if is_known else guess_batch_dim(plan)), is_known


def make_suggestions(plan: PlanTable) -> Suggestions:
    """Return the layouts that lint does not report for the replicated variables of a plan."""
    return Suggestions(sort_weights(plan)[0])


def list_named_batch_dims(mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh dims with a usual name for a dim over which batches are sharded."""
    return tuple(dim for dim in mesh.dim_names if dim in _NAMES_OF_BATCH)


def guess_batch_dim(plan: PlanTable) -> str | None:
    """Return the mesh dim that the batch is probably sharded over, or None if nothing suggests one.

    Rules for activations say it, or `fully_shard`, which shards weights over the devices of the batch, or its name.
    """
    votes = Counter(
        dim
        for match in plan.activations
        if match.layout is not None and match.layout.rank
        for dim in match.layout.list_mesh_dims(0)
    )
    named = [*plan.gathered_dims, *list_named_batch_dims(plan.mesh)]
    return votes.most_common(1)[0][0] if votes else named[0] if named else None
