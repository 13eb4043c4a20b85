"""Define the checks of lint. Each one reads the whole plan and yields problems."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from layoutmap.core.layout import Layout
from layoutmap.core.specs import format_batch_dim
from layoutmap.core.text_table import format_bytes
from layoutmap.core.uneven import derive_layout, fit_layout
from layoutmap.core.variables import Assignment, Kind
from layoutmap.plan.lint.repeated import find_odd_blocks
from layoutmap.plan.lint.suggest import Suggestions, make_matching_layout, make_sharded_layout
from layoutmap.plan.lint.weights import (
    Linted,
    Weight,
    format_rule_suffix,
    is_attention_output,
    iterate_kernel_pairs,
)
from layoutmap.plan.problems import RULE_KINDS, Problem

_LARGE_BYTES = 2**20  # report arrays that take at least this much memory on a device
_LEAST_SHARE = 0.05  # report tables that take at least this share of a device's weights


def _find_batch_dim_sums(linted: Linted) -> Iterator[Problem]:
    """Yield a problem for each kernel with a summed axis sharded over the batch dim."""
    batch = linted.batch_dim
    # The gathered tensor is known to be the weight if rules shard activations like the batch, or if the engine
    # has no compiler that chooses. Weights over a second dim appear in the plan as "no activations".
    if batch is None or linted.plan.activations or not linted.plan.free_activations:
        return
    for w in linted.kernels:
        axes = [axis for axis in w.axes("in") if {*w.dims(axis)} & {*linted.batch_dims}]
        if not axes or any({*w.dims(axis)} - {*linted.batch_dims} for axis in range(len(w.shape))):
            continue
        axis = axes[0]
        yield _make_problem(
            "sum over the batch dim",
            w,
            f"axis {axis}, which is summed over, is sharded over {format_batch_dim(batch)}, and so is the batch",
            {},
            "for its rows a device needs the whole weight, and for its part of the weight all rows: in each step one "
            "of them is gathered, and no rule says which",
            'add a rule for activations, as in layout_map.activations[r"..."] = '
            f"({batch!r}, ...), or shard an output axis: {_swap_specs(w, axis, w.axes('out')[0])}",
        )


def _make_problem(kind: str, w: Weight, what: str, facts: Mapping[str, str], why: str, fix: str) -> Problem:
    """Return a problem of one weight."""
    facts = {"shape": str(w.shape), "layout": w.layout_text, **facts}
    return Problem(kind, "warning", w.path, f"{w.path}: {what}", tuple(facts.items()), why, fix)


def _swap_specs(w: Weight, old: int, new: int) -> Layout:
    """Return the layout of a weight with the specs of two axes swapped."""
    specs = list(w.layout.sharding_specs)
    specs[old], specs[new] = specs[new], specs[old]
    return Layout(specs, w.layout.mesh)


# A valid layout can still be a mistake, so lint compares consecutive kernels (decisions/0022).
def _find_swapped_axes(linted: Linted) -> Iterator[Problem]:
    """Yield a problem for each pair of consecutive kernels with sharding that does not match."""
    for block in linted.blocks:
        for first, then in iterate_kernel_pairs(linted, block):
            for out, into in zip(first.axes("out"), then.axes("in"), strict=True):
                ours, theirs = first.dims(out), then.dims(into)
                if ours and theirs and ours != theirs:
                    yield _make_mismatch_problem(first, out, then, into)
                    break
            else:
                yield from _find_outer_sharding(linted, first, then)


def _find_outer_sharding(linted: Linted, first: Weight, then: Weight) -> Iterator[Problem]:
    """Yield problems of two consecutive kernels that are sharded along their outer axes, not the shared one."""
    dims = {d for w in (first, then) for axis in (*w.axes("in"), *w.axes("out")) for d in [w.dims(axis)] if d}
    if len(dims) != 1 or linted.batch_dim is None or (over := dims.pop()) == linted.batch_dims:
        return
    for w, near, far, does in (
        (first, "out", "in", "sums over an axis"),
        (then, "in", "out", "outputs an axis"),
    ):
        sharded = [axis for axis in w.axes(far) if w.dims(axis)]
        if not sharded or any(w.dims(axis) for axis in w.axes(near)):
            continue
        if _has_matching_kernel(linted, w, far, over):
            continue
        other = then if w is first else first
        moved = _swap_specs(w, sharded[0], w.axes(near)[0])
        yield _make_problem(
            "swapped",
            w,
            f"{does} that is sharded over {_join_dims(over)}, on the side away from {other.name}",
            {other.name: f"{other.shape}  {other.layout_text}"},
            f"activations between the two are all-gathered over {_join_dims(over)}, where they could stay sharded",
            "shard the axis that passes between them"
            + ("" if moved.find_uneven_axes(w.shape) else f"; its axes seem to be swapped: {moved}"),
        )


def _has_matching_kernel(linted: Linted, w: Weight, role: str, over: tuple[str, ...]) -> bool:
    """Return whether a kernel next to `w` is replicated, or sharded like `w` along their common axis."""
    others = linted.kernels_before if role == "in" else linted.kernels_after
    near = "out" if role == "in" else "in"
    return any(
        other.layout.is_fully_replicated() or any(other.dims(axis) == over for axis in other.axes(near))
        for other in others.get(id(w), ())
    )


def _make_mismatch_problem(first: Weight, out: int, then: Weight, into: int) -> Problem:
    """Return the problem that a kernel's output and the next one's input are sharded differently."""
    ours, theirs = first.dims(out), then.dims(into)
    other = next((axis for axis in first.axes("in") if first.dims(axis) == theirs), None)
    swapped = None if other is None else _swap_specs(first, other, out)
    reason = "the two differ"
    if other is not None:
        reason += f", and sums over axis {other} are partial, over {_join_dims(theirs)}"
    fix = f"shard both over the same dims: {make_sharded_layout(first.layout, out, theirs)}"
    if swapped is not None and not swapped.find_uneven_axes(first.shape):
        fix = f"its axes seem to be swapped: {swapped}"
    return _make_problem(
        "swapped",
        first,
        f"its output is sharded over {_join_dims(ours)}, and the input of {then.name} over {_join_dims(theirs)}",
        {then.name: f"{then.shape}  {then.layout_text}"},
        f"{reason}: activations between them are resharded in every step",
        fix,
    )


def _find_attention_mismatches(linted: Linted) -> Iterator[Problem]:
    """Yield a problem if the query, key, and value kernels of a block are sharded differently."""
    for block in linted.blocks:
        parts = linted.parts(block)
        if not parts:
            continue
        query, *rest = parts.values()
        axis = query.axes("out")[0]
        others = [w for w in rest if w.dims(w.axes("out")[0]) != query.dims(axis)]
        # Key heads that the shards of the queries do not divide need another layout.
        others = [
            w
            for w in others
            if w.shape[w.axes("out")[0]] // (w.use.head_size or 1) % query.num_shards(axis) == 0
        ]
        if not others:
            continue
        yield Problem(
            "query, key, value",
            "warning",
            query.path,
            f"{query.path}: its heads are sharded differently from those of {' and '.join(w.name for w in others)}",
            tuple((w.name, f"{w.shape}  {w.layout_text}") for w in parts.values()),
            "a device needs the keys and the values of the heads for which it has queries",
            f"shard axis {axis} of all three over {_join_dims(query.dims(axis)) or _join_dims(others[0].dims(axis))}",
        )


def _find_split_heads(linted: Linted) -> Iterator[Problem]:
    """Yield a problem for each attention kernel with shards that split a head."""
    for block in linted.blocks:
        parts = list(linted.parts(block).values())
        if not parts:
            continue
        takers = [w for w in block if is_attention_output(w)]
        for w, role in [*((w, "out") for w in parts), *((w, "in") for w in takers)]:
            heads, *inner = w.axes(role)
            size = w.use.head_size
            if inner:
                sharded = [axis for axis in inner if w.dims(axis)]
                if sharded:
                    yield _make_split_head_problem(w, sharded[0], w.shape[heads], w.shape[sharded[0]])
            elif size and w.shape[heads] % size == 0 and w.num_shards(heads) > 1:
                shard = w.shape[heads] // w.num_shards(heads)
                if shard % size:
                    yield _make_split_head_problem(w, heads, w.shape[heads] // size, size)


def _make_split_head_problem(w: Weight, axis: int, heads: int, size: int) -> Problem:
    """Return the problem that a kernel's sharding splits its attention heads."""
    dims, shards = w.dims(axis), w.num_shards(axis)
    return _make_problem(
        "heads",
        w,
        f"its sharding over {_join_dims(dims)} splits its heads",
        {"heads": f"{heads} of size {size}, in {shards} shards"},
        "attention is computed per head, and no device holds a whole head: activations are resharded in every step",
        f"shard by heads, over dims whose sizes divide {heads}, or leave the axis unsharded: "
        f"{make_sharded_layout(w.layout, axis, ())}",
    )


def _find_replicated_tables(linted: Linted) -> Iterator[Problem]:
    """Yield a problem for each large replicated table in a model that is mostly sharded."""
    weights = [a for a in linted.plan.assignments if a.variable.kind is Kind.WEIGHT and a.fits]
    held = sum(a.shard_bytes for a in weights)
    rows = {w.shape[axis] for w in linted.weights for axis in w.axes("rows")}
    tables = [w for w in linted.weights if w.axes("rows") or (w.axes("in") and rows & {*w.sizes("out")})]
    ids = {id(w.assignment) for w in tables}
    rest = [a for a in weights if id(a) not in ids and len(a.variable.shape) > 1]
    sharded = [a for a in rest if not a.layout.is_fully_replicated()]
    if 2 * sum(a.variable.global_bytes for a in sharded) <= sum(a.variable.global_bytes for a in rest):
        return  # at most half of the model is sharded, so a replicated table is not an exception
    suggestions = Suggestions(linted)
    for w in tables:
        a = w.assignment
        proposed = suggestions.suggest_layout(a) if a.layout.is_fully_replicated() else None
        if proposed is None or a.shard_bytes < _LEAST_SHARE * held:
            continue
        saved = a.shard_bytes - a.shard_bytes // proposed.num_distinct_shards
        yield Problem(
            "replicated table",
            "warning",
            w.path,
            f"{w.path}: a table of {' x '.join(map(str, w.shape))} is replicated",
            (
                ("layout", w.layout_text),
                ("bytes", f"{a.shard_bytes:,} of the {held:,} that a device holds in weights"),
                ("beside it", f"{len(sharded)} of the {len(rest)} other weights are sharded"),
            ),
            f"{saved:,} bytes per device would be saved, and as many for its gradient and for each optimizer slot",
            f"shard it: {proposed}",
        )


def _find_contradictions(linted: Linted) -> Iterator[Problem]:
    """Yield a problem for each variable that is sharded differently from the kernel that it belongs to."""
    kernels = {(w.assignment.variable.model, w.layer): w for w in linted.kernels}
    for w in linted.weights:
        kernel = kernels.get((w.assignment.variable.model, w.layer))
        if kernel is None or w.axes("in") or not w.axes("out"):
            continue
        of = {kernel.use.roles[axis]: axis for axis in kernel.axes("out")}
        for axis in w.axes("out"):
            # A replicated bias costs little memory and no communication.
            if w.dims(axis) and w.dims(axis) != kernel.dims(of[w.use.roles[axis]]):
                follows = make_matching_layout(w, kernel)
                yield _make_contradiction(w.assignment, w.path, kernel.assignment, kernel.name, follows)
                break
    assignments = {(a.variable.model, a.variable.path): a for a in linted.plan.assignments}
    for a in linted.plan.assignments:
        v = a.variable
        parent = assignments.get((v.model, v.parent or ""))
        if not v.follows or v.axes is None or a.match is None or parent is None or not a.fits:
            continue
        if parent.layout.rank == len(v.rule_shape) and not a.layout.is_fully_replicated():
            follows = fit_layout(derive_layout(parent.layout, v.axes), v.shape, "shrink")
            if a.layout != follows:
                name = parent.variable.path.rpartition(".")[2]
                yield _make_contradiction(a, v.path, parent, name, follows)


def _make_contradiction(
    a: Assignment, path: str, kernel: Assignment, name: str, follows: Layout | None
) -> Problem:
    """Return the problem that a variable and its kernel are sharded differently."""
    return Problem(
        "contradicts its kernel",
        "warning",
        path,
        f"{path}: is sharded differently from {name}, with which it is used",
        (
            ("layout", f"{a.layout}{format_rule_suffix(a)}"),
            (name, f"{kernel.layout}{format_rule_suffix(kernel)}"),
        ),
        "the two are sharded differently, so one of them is resharded in every step",
        f"shard it as those axes of the kernel are: {follows}" if follows else "replicate it",
    )


def _find_unused_dims(linted: Linted) -> Iterator[Problem]:
    """Yield a problem for each mesh dim over which nothing is sharded."""
    mesh = linted.plan.mesh
    for dim in linted.plan.unused_dims:
        if dim.name in linted.batch_dims:
            continue
        fix = f"shard weights over {dim.name}, or plan for a mesh without it"
        if linted.batch_dim is None:
            fix += f"; if batches are sharded over it, say batch_dim={dim.name!r}"
        yield Problem(
            "unused dim",
            "warning",
            dim.name,
            f"{dim.name}: nothing is sharded over this dim of the mesh",
            (("mesh", str(mesh)),),
            f"groups of {dim.size} devices store and compute the same: "
            f"{mesh.size // dim.size} of the {math.prod(mesh.shape)} devices would be enough",
            fix,
        )


def _find_unused_rules(linted: Linted) -> Iterator[Problem]:
    """Return the plan's problems about rules without effect, which it has once all variables are known."""
    return (problem for problem in linted.plan.problems if problem.kind in RULE_KINDS)


def _find_large_unplaced_arrays(linted: Linted) -> Iterator[Problem]:
    """Yield a problem for each large array that was created after the model was sharded, and stayed on one device."""
    sizes = {a.variable.path: a.variable.global_bytes for a in linted.plan.assignments}
    for problem in linted.plan.problems:
        if problem.kind == "plain" and sizes.get(problem.subject, 0) > _LARGE_BYTES:
            yield replace(
                problem,
                severity="warning",
                facts=(*problem.facts, ("size", format_bytes(sizes[problem.subject]))),
                why="the other arrays are on a mesh, so each device will receive all of it",
                fix="create it in `make` of layout_map.build, or lay it out later: layout_map.apply(model)",
            )


CHECKS = (
    _find_unused_rules,
    _find_batch_dim_sums,
    _find_swapped_axes,
    _find_attention_mismatches,
    _find_split_heads,
    _find_replicated_tables,
    _find_contradictions,
    _find_unused_dims,
    _find_large_unplaced_arrays,
    find_odd_blocks,
)


def _join_dims(dims: Sequence[str]) -> str:
    return " and ".join(dims)
