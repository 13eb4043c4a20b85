"""Check the cost of a step for collectives that a better layout avoids."""

from __future__ import annotations

from collections.abc import Iterator

from layoutmap.core.paths import replace_numbers_with_stars
from layoutmap.core.specs import format_batch_dim, make_spec
from layoutmap.core.text_table import format_bytes
from layoutmap.core.variables import Kind
from layoutmap.cost.cost import Cost, format_duration
from layoutmap.cost.table import Collective
from layoutmap.plan.lint.checks import find_tables_over_batch_dim
from layoutmap.plan.lint.linted_plan import LintedPlan
from layoutmap.plan.lint.weights import format_rule_suffix
from layoutmap.plan.output_rules import make_output_rule_text
from layoutmap.plan.problems import Problem

_MIN_TRAFFIC_SHARE = 0.01  # causes with a smaller share of a step's traffic are not reported


def _make_traffic_facts(cost: Cost, collectives: list[Collective]) -> tuple[tuple[str, str], ...]:
    sent = sum(c.count_sent_bytes(cost.step.mesh) for c in collectives)
    seconds = sum(map(cost.sum_call_seconds, collectives))
    share = f"{100 * sent / (cost.step.sent_bytes or 1):.0f} %"
    return (
        (
            "in a step",
            f"{format_bytes(sent)} of {format_bytes(cost.step.sent_bytes)} sent ({share}), {format_duration(seconds)}",
        ),
    )


def _iterate_costly_causes(cost: Cost, calls: list[Collective]) -> Iterator[tuple[str, list[Collective]]]:
    """Yield each cause with its collectives, if those of all repeated blocks together send enough bytes to report."""
    least = _MIN_TRAFFIC_SHARE * cost.step.sent_bytes
    sent: dict[str, int] = {}
    by_cause: dict[str, list[Collective]] = {}
    for c in calls:
        group = replace_numbers_with_stars(c.cause)
        sent[group] = sent.get(group, 0) + c.count_sent_bytes(cost.step.mesh)
        by_cause.setdefault(c.cause, []).append(c)
    for cause, of_cause in by_cause.items():
        if cause and sent[replace_numbers_with_stars(cause)] >= least:
            yield cause, of_cause


def find_gathered_weight_problems(cost: Cost, linted: LintedPlan) -> Iterator[Problem]:
    """Yield a problem for each weight that is needlessly gathered over a mesh dim that does not shard the batch."""
    batch = linted.batch_dim
    found = [
        c
        for c in cost.step.collectives
        if c.kind == "all_gather" and cost.is_overlapped(c) and not {*linted.batch_dims} & {*c.dims}
    ]
    for cause, of_weight in _iterate_costly_causes(cost, found):
        dims = tuple(dict.fromkeys(dim for c in of_weight for dim in c.dims))
        over = " and ".join(dims)
        plan = linted.plan
        # A cause with stars for numbers stands for several variables, so report each of them.
        for path in [cause] if cause in plan else [p for p in plan if replace_numbers_with_stars(p) == cause]:
            a = plan[path]
            yield Problem(
                "gathered weight",
                "warning",
                path,
                f"{path}: it is gathered over {over} in each step",
                (("layout", f"{a.layout}{format_rule_suffix(a)}"), *_make_traffic_facts(cost, of_weight)),
                f"the batch is not sharded over {over}, so devices along it all compute with the whole weight",
                "lay out the outputs of this layer and of the layer before, so that each device computes a part: "
                + make_output_rule_text(plan.layers, path.rpartition(".")[0], batch, make_spec(dims)),
            )


def find_resharded_output_problems(cost: Cost, linted: LintedPlan) -> Iterator[Problem]:
    """Yield a problem for each fused kernel with outputs that are resharded, because a split of them crosses shards."""
    for w in linted.kernels:
        taker = linted.kernels_after_fused.get(id(w))
        dims = {*w.list_dims(w.list_axes("out")[0])} - {*linted.batch_dims}
        # The layer that contains both kernels splits the outputs, so find the collectives that this layer causes.
        found = [
            c
            for c in cost.step.collectives
            if c.kind in ("all_gather", "all_to_all", "permute")
            and dims & {*c.dims}
            and not cost.is_overlapped(c)
            if replace_numbers_with_stars(c.cause) == replace_numbers_with_stars(w.block)
        ]
        if taker is None or not any(_iterate_costly_causes(cost, found)):
            continue
        yield Problem(
            "resharded outputs",
            "warning",
            w.path,
            f"{w.path}: its fused outputs are resharded over {' and '.join(sorted(dims))} in each step",
            (("layout", w.layout_text), *_make_traffic_facts(cost, found)),
            f"they are split into parts before {taker.layer_name}, and each part is on other devices than the rest",
            "order them so that each device has some of every part, as (heads, 3, size) for query, key, and value; "
            "use one kernel for each part; or replicate this kernel",
        )


def find_summed_activation_problems(cost: Cost, linted: LintedPlan) -> Iterator[Problem]:
    """Yield a problem for each layer with an activation that is all-reduced over the dim that shards the batch."""
    batch = linted.batch_dim
    assert batch is not None
    found = [
        c
        for c in cost.step.collectives
        if c.kind in ("all_reduce", "reduce_scatter")
        and not cost.is_overlapped(c)
        and {*linted.batch_dims} & {*c.dims}
    ]
    has_table = any(find_tables_over_batch_dim(linted))
    summing = {
        replace_numbers_with_stars(w.layer)
        for w in linted.kernels
        for axis in w.list_axes("in")
        if {*w.list_dims(axis)} & {*linted.batch_dims}
    }
    for path, of_layer in _iterate_costly_causes(cost, found):
        is_cause = replace_numbers_with_stars(path) in summing
        # A table causes the sums in its layer and in later ones, and has a finding of its own.
        if has_table and not is_cause:
            continue
        yield Problem(
            "summed activation",
            "warning",
            path,
            f"{path}: its activation is summed over {format_batch_dim(batch)}, over which the batch is sharded",
            _make_traffic_facts(cost, of_layer),
            f"a {'weight' if is_cause else 'weight or an activation before it'} is sharded along an axis that is "
            "summed over, so each device computes a part of every sum, for the rows of all devices",
            f"shard the output by rows, too: {make_output_rule_text(linted.plan.layers, path, batch)}",
        )


def find_costly_dim_problems(cost: Cost, linted: LintedPlan) -> Iterator[Problem]:
    """Yield a problem for each mesh dim over which devices exchange data although all of them compute the same."""
    plan = linted.plan
    for dim in plan.mesh.mesh_dims:
        over = [c for c in cost.step.collectives if dim.name in c.dims]
        if dim.size == 1 or dim.name in linted.batch_dims or not over:
            continue
        gathered = {replace_numbers_with_stars(c.cause) for c in over if c.kind == "all_gather"}
        sharded = [
            a.variable.path
            for a in plan.assignments
            if a.variable.kind is Kind.WEIGHT
            and any(dim.name in a.layout.list_mesh_dims(axis) for axis in range(a.layout.rank))
        ]
        if any(replace_numbers_with_stars(path) not in gathered for path in sharded):
            continue
        saves = (
            "each weight that is sharded over it is gathered" if sharded else "no weight is sharded over it"
        )
        yield Problem(
            "dim that only costs",
            "warning",
            dim.name,
            f"{dim.name}: this dim of the mesh costs time, and saves no computation",
            (("mesh", str(plan.mesh)), *_make_traffic_facts(cost, over)),
            f"{saves}, and the batch is not sharded over it: groups of {dim.size} devices compute the same",
            f"shard the batch over {dim.name} as well, lay out activations over it, or leave it out of the mesh",
        )


COST_CHECKS = (
    find_gathered_weight_problems,
    find_resharded_output_problems,
    find_summed_activation_problems,
    find_costly_dim_problems,
)
