"""Define the checks of lint. Each one reads the whole plan and yields problems."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from layoutmap.core.layout import Layout
from layoutmap.core.specs import format_batch_dim
from layoutmap.core.text_table import format_bytes
from layoutmap.core.uneven import derive_layout, fit_layout
from layoutmap.core.variables import Assignment, Kind
from layoutmap.plan.lint.changes import Finding
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


def _find_batch_dim_sums(linted: Linted) -> Iterator[Finding]:
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
        yield _make_finding(
            "sum over the batch dim",
            w,
            f"axis {axis}, which is summed over, is sharded over {format_batch_dim(batch)}, and so is the batch",
            {},
            "for its rows a device needs the whole weight, and for its part of the weight all rows: in each step one "
            "of them is gathered, and no rule says which",
            f'add a rule for activations, as in layout_map.activations[r"..."] = ({batch!r}, ...), '
            "or shard an output axis",
            _swap_specs(w, axis, w.axes("out")[0]),
        )


def _make_finding(
    kind: str, w: Weight, what: str, facts: Mapping[str, str], why: str, fix: str, layout: Layout | None
) -> Finding:
    """Return the finding that one weight should have another layout."""
    facts = {"shape": str(w.shape), "layout": w.layout_text, **facts}
    problem = Problem(kind, "warning", w.path, f"{w.path}: {what}", tuple(facts.items()), why, fix)
    return Finding(problem, ((w.assignment, layout),) if layout else ())


def _swap_specs(w: Weight, old: int, new: int) -> Layout:
    """Return the layout of a weight with the specs of two axes swapped."""
    specs = list(w.layout.sharding_specs)
    specs[old], specs[new] = specs[new], specs[old]
    return Layout(specs, w.layout.mesh)


# A valid layout can still be a mistake, so lint compares consecutive kernels (decisions/0022).
def _find_swapped_axes(linted: Linted) -> Iterator[Finding]:
    """Yield a problem for each pair of consecutive kernels with sharding that does not match."""
    for block in linted.blocks:
        for first, then in iterate_kernel_pairs(linted, block):
            for out, into in zip(first.axes("out"), then.axes("in"), strict=True):
                ours, theirs = first.dims(out), then.dims(into)
                if ours and theirs and ours != theirs:
                    yield _include_equal_parts(
                        linted.parts(block), _make_mismatch(linted, first, out, then, into)
                    )
                    break
            else:
                for finding in _find_outer_sharding(linted, first, then):
                    yield _include_equal_parts(linted.parts(block), finding)


def _include_equal_parts(parts: Mapping[str, Weight], finding: Finding) -> Finding:
    """Return a finding about a query kernel with the same change for the key and value kernels that are laid out alike.

    Their rule is often the same, and with fewer heads they are in no pair of kernels.
    """
    query = parts.get("query")
    if query is None or [query.assignment] != [a for a, _ in finding.changes]:
        return finding
    ((_, layout),) = finding.changes
    shards = layout.num_shards(query.axes("out")[0])
    equal = [w for w in parts.values() if w.layout == query.layout and w.count_heads("out") % shards == 0]
    return replace(finding, changes=tuple((w.assignment, layout) for w in equal))


def _find_outer_sharding(linted: Linted, first: Weight, then: Weight) -> Iterator[Finding]:
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
        fits = not moved.find_uneven_axes(w.shape)
        yield _make_finding(
            "swapped",
            w,
            f"{does} that is sharded over {_join_dims(over)}, on the side away from {other.name}",
            {other.name: f"{other.shape}  {other.layout_text}"},
            f"activations between the two are all-gathered over {_join_dims(over)}, where they could stay sharded",
            "shard the axis that passes between them" + "; its axes seem to be swapped" * fits,
            moved if fits else None,
        )


def _has_matching_kernel(linted: Linted, w: Weight, role: str, over: tuple[str, ...]) -> bool:
    """Return whether a kernel next to `w` is replicated, or sharded like `w` along their common axis."""
    others = linted.kernels_before if role == "in" else linted.kernels_after
    near = "out" if role == "in" else "in"
    return any(
        other.layout.is_fully_replicated() or any(other.dims(axis) == over for axis in other.axes(near))
        for other in others.get(id(w), ())
    )


def _make_mismatch(linted: Linted, first: Weight, out: int, then: Weight, into: int) -> Finding:
    """Return the finding that a kernel's output and the next one's input are sharded differently.

    The change is for the kernel that fewer other weights agree with.
    """
    ours, theirs = first.dims(out), then.dims(into)
    block = next(block for block in linted.blocks if any(w is first for w in block))
    if any(w is first for w in linted.parts(block).values()):
        is_first_right = linted.choose_head_dims(block) == ours
    else:
        votes = [
            linted.count_votes(first, out, dims) + linted.count_votes(then, into, dims)
            for dims in (ours, theirs)
        ]
        is_first_right = votes[0] > votes[1]
    w, axis, far, dims, other = first, out, first.axes("in"), theirs, then
    if is_first_right and not make_sharded_layout(then.layout, into, ours).find_uneven_axes(then.shape):
        w, axis, far, dims, other = then, into, then.axes("out"), ours, first
    taken = next((number for number in far if w.dims(number) == dims), None)
    swapped = None if taken is None else _swap_specs(w, taken, axis)
    summed = next((number for number in first.axes("in") if first.dims(number) == theirs), None)
    reason = "the two differ"
    if summed is not None:
        reason += f", and sums over axis {summed} are partial, over {_join_dims(theirs)}"
    is_swapped = swapped is not None and not swapped.find_uneven_axes(w.shape)
    what = f"its output is sharded over {_join_dims(ours)}, and the input of {then.name} over {_join_dims(theirs)}"
    if w is then:
        what = f"its input is sharded over {_join_dims(theirs)}, and the output of {first.name} over {_join_dims(ours)}"
    return _make_finding(
        "swapped",
        w,
        what,
        {other.name: f"{other.shape}  {other.layout_text}"},
        f"{reason}: activations between them are resharded in every step",
        "its axes seem to be swapped" if is_swapped else "shard both over the same dims",
        swapped if is_swapped else make_sharded_layout(w.layout, axis, dims),
    )


def find_replicated_partners(linted: Linted, reported: Collection[int]) -> Iterator[Finding]:
    """Yield a finding for each replicated kernel that takes the output of a sharded one, or the reverse.

    Args:
        linted: The plan.
        reported: Ids of the assignments that other findings change.
    """
    suggestions = Suggestions(linted)
    seen = set(reported)
    for first, then in linted.pairs:
        for w, role, other, other_role in ((first, "out", then, "in"), (then, "in", first, "out")):
            axis, dims = w.axes(role)[0], other.dims(other.axes(other_role)[0])
            if not w.layout.is_fully_replicated() or not dims or {*dims} & {*linted.batch_dims}:
                continue
            layout = suggestions.suggest_layout(w.assignment)
            if id(w.assignment) in seen or layout is None or layout.list_mesh_dims(axis) != dims:
                continue
            seen.add(id(w.assignment))
            over, is_row = _join_dims(dims), w is then
            yield _make_finding(
                "replicated partner",
                w,
                f"it is replicated, and {other.name} {'before' if is_row else 'after'} it is sharded over {over}",
                {other.name: f"{other.shape}  {other.layout_text}"},
                f"each device along {over} holds all of it, and what passes between the two cannot stay sharded",
                f"shard the axis that {'takes the sharded outputs' if is_row else 'passes between them'}",
                layout,
            )


def _find_attention_mismatches(linted: Linted) -> Iterator[Finding]:
    """Yield a problem if the query, key, and value kernels of a block are sharded differently."""
    for block in linted.blocks:
        parts = linted.parts(block)
        if not parts:
            continue
        query, *rest = parts.values()
        dims = {id(w): w.dims(w.axes("out")[0]) for w in parts.values()}
        over = linted.choose_head_dims(block)
        shards = math.prod(map(linted.plan.mesh.dim_size, over))
        # Key heads that the shards of the queries do not divide need another layout.
        wrong = [w for w in parts.values() if dims[id(w)] != over and w.count_heads("out") % shards == 0]
        others = [w for w in rest if dims[id(w)] != dims[id(query)] and (w in wrong or query in wrong)]
        if not over or not others:
            continue
        problem = Problem(
            "query, key, value",
            "warning",
            query.path,
            f"{query.path}: its heads are sharded differently from those of {' and '.join(w.name for w in others)}",
            tuple((w.name, f"{w.shape}  {w.layout_text}") for w in parts.values()),
            "a device needs the keys and the values of the heads for which it has queries",
            f"shard axis {query.axes('out')[0]} of all three over {_join_dims(over)}",
        )
        yield Finding(
            problem,
            tuple((w.assignment, make_sharded_layout(w.layout, w.axes("out")[0], over)) for w in wrong),
        )


def _find_split_heads(linted: Linted) -> Iterator[Finding]:
    """Yield a problem for each attention kernel with shards that split a head."""
    for block in linted.blocks:
        parts = list(linted.parts(block).values())
        if not parts:
            continue
        takers = [w for w in block if is_attention_output(w)]
        for w, role in [*((w, "out") for w in parts), *((w, "in") for w in takers)]:
            heads, *inner = w.axes(role)
            count = w.count_heads(role)
            if inner:
                sharded = [axis for axis in inner if w.dims(axis)]
                if sharded:
                    yield _make_split_heads(w, sharded[0], heads, count, w.shape[sharded[0]])
            elif w.use.head_size and w.num_shards(heads) > 1 and count % w.num_shards(heads):
                yield _make_split_heads(w, heads, heads, count, w.use.head_size)


def _make_split_heads(w: Weight, axis: int, heads: int, count: int, size: int) -> Finding:
    """Return the finding that a kernel's sharding splits its attention heads."""
    dims, shards = w.dims(axis), w.num_shards(axis)
    moves = axis != heads and not w.layout.list_mesh_dims(heads) and count % shards == 0
    fix = f"shard over dims with sizes that divide {count}, or leave the axis unsharded"
    return _make_finding(
        "heads",
        w,
        f"its sharding over {_join_dims(dims)} splits its heads",
        {"heads": f"{count} of size {size}, in {shards} shards"},
        "attention is computed per head, and no device holds a whole head: activations are resharded in every step",
        "shard by heads" if moves else fix,
        make_sharded_layout(w.layout, heads if moves else axis, dims if moves else ()),
    )


def _find_replicated_tables(linted: Linted) -> Iterator[Finding]:
    """Yield a problem for each large replicated table in a model that is mostly sharded."""
    weights = [a for a in linted.plan.assignments if a.variable.kind is Kind.WEIGHT and a.fits]
    held = sum(a.shard_bytes for a in weights)
    rows = {w.shape[axis] for w in linted.weights for axis in w.axes("rows")}
    # The output layer of a language model is as large as the table.
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
        is_table, size = bool(w.axes("rows")), " x ".join(map(str, w.shape))
        what = (
            f"a table of {size}"
            if is_table
            else f"a kernel of {size}, with as many outputs as a table has rows,"
        )
        problem = Problem(
            "replicated table" if is_table else "replicated kernel",
            "warning",
            w.path,
            f"{w.path}: {what} is replicated",
            (
                ("layout", w.layout_text),
                ("bytes", f"{a.shard_bytes:,} of the {held:,} that a device holds in weights"),
                ("beside it", f"{len(sharded)} of the {len(rest)} other weights are sharded"),
            ),
            f"{saved:,} bytes per device would be saved, and as many for its gradient and for each optimizer slot",
            "shard it",
        )
        yield Finding(problem, ((a, proposed),))


def find_contradictions(linted: Linted, reported: Collection[int]) -> Iterator[Finding]:
    """Yield a finding for each variable that is sharded differently from the kernel that it belongs to.

    Args:
        linted: The plan.
        reported: Ids of the assignments that other findings change.
    """
    suggestions = Suggestions(linted)
    kernels = {(w.assignment.variable.model, w.layer): w for w in linted.kernels}
    for w in linted.weights:
        kernel = kernels.get((w.assignment.variable.model, w.layer))
        if kernel is None or w.axes("in") or not w.axes("out"):
            continue
        axes = {kernel.use.roles[axis]: axis for axis in kernel.axes("out")}
        for axis in w.axes("out"):
            # A replicated bias costs little memory and no communication.
            if not w.dims(axis) or w.dims(axis) == kernel.dims(axes[w.use.roles[axis]]):
                continue
            if not {id(w.assignment), id(kernel.assignment)} & {*reported}:
                layout = suggestions.suggest_from_bias(kernel, w, axes[w.use.roles[axis]])
                if layout is None:
                    follows = make_matching_layout(w, kernel)
                    yield _make_follower_finding(w.assignment, kernel.assignment, kernel.name, follows)
                else:
                    fix = f"shard its outputs as {w.name} is"
                    yield Finding(
                        _make_contradiction(
                            "contradicts its bias", kernel.assignment, w.assignment, w.name, fix
                        ),
                        ((kernel.assignment, layout),),
                    )
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
                yield _make_follower_finding(a, parent, parent.variable.path.rpartition(".")[2], follows)


def _make_follower_finding(a: Assignment, kernel: Assignment, name: str, layout: Layout | None) -> Finding:
    """Return the finding that a variable should be sharded as its kernel is, or replicated if the layout is `None`."""
    fix = "shard it as those axes of the kernel are" if layout else "replicate it"
    layout = layout or Layout.replicated(a.layout.mesh, len(a.variable.shape))
    return Finding(_make_contradiction("contradicts its kernel", a, kernel, name, fix), ((a, layout),))


def _make_contradiction(kind: str, a: Assignment, other: Assignment, name: str, fix: str) -> Problem:
    """Return the problem that a variable is sharded differently from its kernel or bias."""
    path = a.variable.path
    return Problem(
        kind,
        "warning",
        path,
        f"{path}: is sharded differently from {name}, with which it is used",
        (
            ("layout", f"{a.layout}{format_rule_suffix(a)}"),
            (name, f"{other.layout}{format_rule_suffix(other)}"),
        ),
        "the two are sharded differently, so one of them is resharded in every step",
        fix,
    )


def _find_unused_dims(linted: Linted) -> Iterator[Finding]:
    """Yield a problem for each mesh dim over which nothing is sharded."""
    mesh = linted.plan.mesh
    for dim in linted.plan.unused_dims:
        if dim.name in linted.batch_dims:
            continue
        fix = f"shard weights over {dim.name}, or plan for a mesh without it"
        if linted.batch_dim is None:
            fix += f"; if batches are sharded over it, say batch_dim={dim.name!r}"
        yield Finding(
            Problem(
                "unused dim",
                "warning",
                dim.name,
                f"{dim.name}: nothing is sharded over this dim of the mesh",
                (("mesh", str(mesh)),),
                f"groups of {dim.size} devices store and compute the same: "
                f"{mesh.size // dim.size} of the {math.prod(mesh.shape)} devices would be enough",
                fix,
            )
        )


def _find_unused_rules(linted: Linted) -> Iterator[Finding]:
    """Return the plan's problems about rules without effect, which it has once all variables are known."""
    return (Finding(problem) for problem in linted.plan.problems if problem.kind in RULE_KINDS)


def _find_large_unplaced_arrays(linted: Linted) -> Iterator[Finding]:
    """Yield a problem for each large array that was created after the model was sharded, and stayed on one device."""
    sizes = {a.variable.path: a.variable.global_bytes for a in linted.plan.assignments}
    for problem in linted.plan.problems:
        if problem.kind == "plain" and sizes.get(problem.subject, 0) > _LARGE_BYTES:
            yield Finding(
                replace(
                    problem,
                    severity="warning",
                    facts=(*problem.facts, ("size", format_bytes(sizes[problem.subject]))),
                    why="the other arrays are on a mesh, so each device will receive all of it",
                    fix="create it in `make` of layout_map.build, or lay it out later: layout_map.apply(model)",
                )
            )


CHECKS = (
    _find_unused_rules,
    _find_batch_dim_sums,
    _find_swapped_axes,
    _find_attention_mismatches,
    _find_split_heads,
    find_odd_blocks,
    _find_replicated_tables,
    _find_unused_dims,
    _find_large_unplaced_arrays,
)


def _join_dims(dims: Sequence[str]) -> str:
    return " and ".join(dims)
