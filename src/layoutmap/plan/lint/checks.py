"""Define the checks of lint. Each of them reads the whole plan and yields findings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from layoutmap.core.layout import Layout
from layoutmap.core.specs import format_batch_dim
from layoutmap.core.text_table import format_bytes
from layoutmap.core.uneven import apply_uneven_policy, derive_layout_from_parent
from layoutmap.core.variables import Assignment, Kind
from layoutmap.plan.lint.changes import Finding
from layoutmap.plan.lint.inferred_roles import HEAD
from layoutmap.plan.lint.linted_plan import LintedPlan
from layoutmap.plan.lint.repeated import find_less_sharded_blocks
from layoutmap.plan.lint.suggest import LayoutSuggestions, make_bias_layout, make_sharded_layout
from layoutmap.plan.lint.weights import Weight, format_rule_suffix
from layoutmap.plan.output_rules import make_output_rule_text
from layoutmap.plan.problems import RULE_KINDS, Problem

_LARGE_BYTES = 2**20  # report arrays that take at least this much memory on a device
_POSITIONS = re.compile(r"\bwpe\b|pos(ition)?(al|s)?_emb|\bpos\b")
_LEAST_SHARE = 0.05  # report tables that take at least this share of a device's weights


def _find_sums_over_batch_dim(linted: LintedPlan) -> Iterator[Finding]:
    """Yield a finding for each kernel with a summed axis that is sharded over the batch dim."""
    batch = linted.batch_dim
    # With activation rules, or if no compiler chooses layouts, each step gathers the weight, as the user intends.
    if batch is None or not linted.are_batch_outputs_free:
        return
    for w in linted.kernels:
        axes = [axis for axis in w.list_axes("in") if {*w.list_dims(axis)} & {*linted.batch_dims}]
        # If the weight is also sharded over another dim, the plan reports it ("no activations"), so skip it here.
        if not axes or any({*w.list_dims(axis)} - {*linted.batch_dims} for axis in range(len(w.shape))):
            continue
        axis = axes[0]
        yield _make_weight_finding(
            "sum over the batch dim",
            w,
            f"axis {axis}, which is summed over, is sharded over {format_batch_dim(batch)}, and so is the batch",
            {},
            "a device needs the whole weight for its rows, or all rows for its part of the weight: each step gathers "
            "one of them, and no rule says which",
            f"add a rule for activations: {make_output_rule_text(linted.plan.layers, w.layer, batch)}, "
            "or shard an output axis",
            _make_swapped_layout(w, axis, w.list_axes("out")[0]),
        )


def find_tables_over_batch_dim(linted: LintedPlan) -> Iterator[Finding]:
    """Yield a finding for each embedding table that is sharded over the batch dim, and over no other dim.

    Later layers then sum over the sharded features of its outputs, or gather them.
    """
    batch = linted.batch_dim
    if batch is None or not linted.are_batch_outputs_free:
        return
    suggestions = LayoutSuggestions(linted)
    for w in linted.weights:
        dims = {dim for axis in range(len(w.shape)) for dim in w.list_dims(axis)}
        if not w.list_axes("rows") or not dims or dims - {*linted.batch_dims}:
            continue
        axis = next(axis for axis in range(len(w.shape)) if w.list_dims(axis))
        yield _make_weight_finding(
            "sum over the batch dim",
            w,
            f"axis {axis} of this table is sharded over {format_batch_dim(batch)}, and so is the batch",
            {},
            "a device needs the whole outputs for its rows, but has a part of the table: each step gathers or sums "
            "outputs in this layer or in later ones, and no rule says where",
            f"add a rule for activations: {make_output_rule_text(linted.plan.layers, w.layer, batch)}, "
            "or do not shard it over that dim",
            suggestions.suggest_table_layout(w),
        )


def _make_weight_finding(
    kind: str, w: Weight, what: str, facts: Mapping[str, str], why: str, fix: str, layout: Layout | None
) -> Finding:
    """Return the finding that a weight should have this layout. If `layout` is None, it contains no change."""
    facts = {"shape": str(w.shape), "layout": w.layout_text, **facts}
    problem = Problem(kind, "warning", w.path, f"{w.path}: {what}", tuple(facts.items()), why, fix)
    return Finding(problem, ((w.assignment, layout),) if layout else ())


def _make_swapped_layout(w: Weight, first_axis: int, second_axis: int) -> Layout:
    """Return the layout of a weight with the specs of two axes exchanged."""
    specs = list(w.layout.sharding_specs)
    specs[first_axis], specs[second_axis] = specs[second_axis], specs[first_axis]
    return Layout(specs, w.layout.mesh)


# A layout can be valid and still a mistake, so compare the layouts of consecutive kernels (decisions/0022).
def _find_swapped_axes(linted: LintedPlan) -> Iterator[Finding]:
    """Yield findings for consecutive kernels that are sharded differently along their common axis, or not along it."""
    seen = set[object]()
    for block in linted.blocks:
        kernels = linted.find_attention_kernels(block)
        for first, second in linted.list_kernel_pairs(block):
            for found in _find_pair_mismatches(linted, first, second):
                finding = _extend_finding_to_key_and_value(kernels, found)
                # A kernel after several, such as query, key, and value, needs only one finding.
                key = found.problem.subject, tuple((id(a), layout) for a, layout in found.changes)
                if key not in seen:
                    is_guessed = (id(first), id(second)) in linted.guessed_pairs
                    yield _add_guessed_order(linted, finding, first, second) if is_guessed else finding
                seen.add(key)


def _add_guessed_order(linted: LintedPlan, finding: Finding, first: Weight, second: Weight) -> Finding:
    """Return the finding with a fact about the guessed order of its two kernels. Its fix depends on the order."""
    order = ("order", f"{first.name} before {second.name}, {linted.guessed_order_reason}")
    problem = finding.problem
    fix = f"{problem.fix}, if {first.name} is called first"
    return replace(finding, problem=replace(problem, facts=(*problem.facts, order), fix=fix))


def _find_pair_mismatches(linted: LintedPlan, first: Weight, second: Weight) -> Iterator[Finding]:
    """Yield the findings for two consecutive kernels."""
    for out, into in zip(first.list_axes("out"), second.list_axes("in"), strict=True):
        ours, theirs = first.list_dims(out), second.list_dims(into)
        if ours and theirs and ours != theirs:
            yield _make_mismatch_finding(linted, first, out, second, into)
            return
    yield from _find_unsharded_common_axis(linted, first, second)


def _extend_finding_to_key_and_value(kernels: Mapping[str, Weight], finding: Finding) -> Finding:
    """Return the finding. If it changes a query kernel, it then also changes key and value kernels of equal layout.

    One rule often matches all three. Key and value kernels with fewer heads are in no pair of consecutive kernels, so
    no other check changes them.
    """
    query = kernels.get("query")
    if query is None or [query.assignment] != [a for a, _ in finding.changes]:
        return finding
    ((_, layout),) = finding.changes
    shards = layout.num_shards(query.list_axes("out")[0])
    equal = [w for w in kernels.values() if w.layout == query.layout and w.count_heads("out") % shards == 0]
    return replace(finding, changes=tuple((w.assignment, layout) for w in equal))


def _find_unsharded_common_axis(linted: LintedPlan, first: Weight, second: Weight) -> Iterator[Finding]:
    """Yield findings for two consecutive kernels that are sharded, but not along the axis that they share."""
    dims = {w.list_dims(axis) for w in (first, second) for axis in (*w.list_axes("in"), *w.list_axes("out"))}
    dims.discard(())
    if len(dims) != 1 or linted.batch_dim is None or (over := dims.pop()) == linted.batch_dims:
        return
    for w, near, far, does in (
        (first, "out", "in", "sums over an axis"),
        (second, "in", "out", "outputs an axis"),
    ):
        sharded = [axis for axis in w.list_axes(far) if w.list_dims(axis)]
        if not sharded or any(w.list_dims(axis) for axis in w.list_axes(near)):
            continue
        other = second if w is first else first
        if _has_matching_neighbor_kernel(linted, w, far, over, allow_swapped=True):
            continue
        moved = _make_swapped_layout(w, sharded[0], w.list_axes(near)[0])
        is_uneven = moved.find_uneven_axes(w.shape)
        fits = not is_uneven and not w.count_heads(near) % moved.num_shards(w.list_axes(near)[0])
        yield _make_weight_finding(
            "swapped",
            w,
            f"{does} that is sharded over {_join_dims(over)}, on the side away from {other.name}",
            {other.name: f"{other.shape}  {other.layout_text}"},
            "activations between the two, or their gradients, are partial sums: each step adds them over "
            f"{_join_dims(over)}, with an all-reduce, or with a reduce-scatter and an all-gather",
            "shard the axis that passes between them; its axes seem to be swapped"
            if fits
            else f"replicate it: the axis that passes between them cannot be split evenly over {_join_dims(over)}",
            moved if fits else make_sharded_layout(w.layout, sharded[0], ()),
        )


def _has_matching_neighbor_kernel(
    linted: LintedPlan, w: Weight, role: str, over: tuple[str, ...], *, allow_swapped: bool = False
) -> bool:
    """Return whether a kernel next to `w` is replicated, or shards the axis that they share over the same dims.

    With `allow_swapped`, that kernel may also shard its other axis over them, if its own finding will swap the two. So
    of two consecutive kernels, only one is to be changed, and the change of one finding leaves no other outdated.
    """
    others = linted.kernels_before if role == "in" else linted.kernels_after
    near = "out" if role == "in" else "in"
    return any(
        other.layout.is_fully_replicated()
        or any(other.list_dims(axis) == over for axis in other.list_axes(near))
        or (
            allow_swapped
            and any(other.list_dims(axis) == over for axis in other.list_axes(role))
            and not _has_matching_neighbor_kernel(linted, other, role, over)
        )
        for other in others.get(id(w), ())
    )


def _make_mismatch_finding(
    linted: LintedPlan, first: Weight, out_axis: int, second: Weight, in_axis: int
) -> Finding:
    """Return the finding that the output of a kernel and the input of the next one are sharded differently.

    The kernel to change is the one whose sharding fewer other weights have.
    """
    ours, theirs = first.list_dims(out_axis), second.list_dims(in_axis)
    block = next(block for block in linted.blocks if any(w is first for w in block))
    if any(w is first for w in linted.find_attention_kernels(block).values()):
        is_first_right = linted.choose_head_dims(block) == ours
    else:
        votes = [
            linted.count_agreeing_weights(first, out_axis, dims)
            + linted.count_agreeing_weights(second, in_axis, dims)
            for dims in (ours, theirs)
        ]
        is_first_right = votes[0] > votes[1]
    w, axis, far, dims, other = first, out_axis, first.list_axes("in"), theirs, second
    if is_first_right and not make_sharded_layout(second.layout, in_axis, ours).find_uneven_axes(
        second.shape
    ):
        w, axis, far, dims, other = second, in_axis, second.list_axes("out"), ours, first
    taken = next((number for number in far if w.list_dims(number) == dims), None)
    swapped = None if taken is None else _make_swapped_layout(w, taken, axis)
    summed = next((number for number in first.list_axes("in") if first.list_dims(number) == theirs), None)
    reason = "the two differ"
    if summed is not None:
        reason += f", and sums over axis {summed} are partial, over {_join_dims(theirs)}"
    # If the kernel on the other side disagrees with the swapped axes, its own finding would swap them back.
    beyond, role = (linted.kernels_before, "out") if w is first else (linted.kernels_after, "in")
    dims_beyond = {each.list_dims(each.list_axes(role)[0]) for each in beyond.get(id(w), ())}
    is_swapped = (
        swapped is not None
        and not swapped.find_uneven_axes(w.shape)
        and dims_beyond <= {(), w.list_dims(axis)}
    )
    what = f"its output is sharded over {_join_dims(ours)}, and the input of {second.name} over {_join_dims(theirs)}"
    if w is second:
        what = f"its input is sharded over {_join_dims(theirs)}, and the output of {first.name} over {_join_dims(ours)}"
    return _make_weight_finding(
        "swapped",
        w,
        what,
        {other.name: f"{other.shape}  {other.layout_text}"},
        f"{reason}: activations between them are resharded in every step",
        "its axes seem to be swapped" if is_swapped else "shard both over the same dims",
        swapped if swapped and is_swapped else make_sharded_layout(w.layout, axis, dims),
    )


def _find_replicated_neighbor_kernels(linted: LintedPlan, changed: Mapping[int, Layout]) -> Iterator[Finding]:
    """Yield a finding for each replicated kernel that is directly before or after a kernel with a sharded common axis.

    Args:
        linted: The plan.
        changed: The layouts that other findings propose, by the id of the assignment.
    """
    suggestions = LayoutSuggestions(linted)
    seen = set(changed)
    for first, second in linted.kernel_pairs:
        for w, role, other, other_role in ((first, "out", second, "in"), (second, "in", first, "out")):
            axis, dims = w.list_axes(role)[0], other.list_dims(other.list_axes(other_role)[0])
            if not w.layout.is_fully_replicated() or not dims or {*dims} & {*linted.batch_dims}:
                continue
            layout = suggestions.suggest_layout(w.assignment)
            if id(w.assignment) in seen or layout is None or layout.list_mesh_dims(axis) != dims:
                continue
            seen.add(id(w.assignment))
            over, is_row = _join_dims(dims), w is second
            yield _make_weight_finding(
                "replicated partner",
                w,
                f"it is replicated, and {other.name} {'before' if is_row else 'after'} it is sharded over {over}",
                {other.name: f"{other.shape}  {other.layout_text}"},
                f"each device along {over} holds all of it, and what passes between the two cannot stay sharded",
                f"shard the axis that {'takes the sharded outputs' if is_row else 'passes between them'}",
                layout,
            )


def _find_replicated_biases(linted: LintedPlan, changed: Mapping[int, Layout]) -> Iterator[Finding]:
    """Yield a finding for each replicated bias, if its kernel's outputs are sharded, and so are other biases.

    A replicated bias costs little, so with `rest`, rules that shard no bias are no mistake, and neither is a rule that
    replicates a bias, unless that of an equal kernel of the same block is sharded. Without `rest`, each bias needs a
    rule.

    Args:
        linted: The plan.
        changed: The layouts that other findings propose, by the id of the assignment.
    """
    pairs = [
        (w, replace(kernel, assignment=replace(a, layout=changed.get(id(a), a.layout))), id(a) in changed)
        for w in linted.weights
        if (kernel := linted.find_kernel_of_bias(w)) and id(kernel) not in linted.unordered_kernels
        for a in [kernel.assignment]
    ]
    layouts = [make_bias_layout(w, kernel) for w, kernel, _ in pairs]
    kernels_of_sharded = [
        kernel for layout, (w, kernel, _) in zip(layouts, pairs, strict=True) if layout == w.layout
    ]
    has_sharded, sharded = bool(kernels_of_sharded), {*map(_make_equal_kernel_key, kernels_of_sharded)}
    for layout, (w, kernel, is_changed) in zip(layouts, pairs, strict=True):
        match = w.assignment.match
        dims = {dim for axis in kernel.list_axes("out") for dim in kernel.list_dims(axis)}
        is_expected = layout is None or not w.layout.is_fully_replicated() or dims & {*linted.batch_dims}
        if is_expected or id(w.assignment) in changed or not match or match.has_existing_layout:
            continue
        if match.rule and _make_equal_kernel_key(kernel) not in sharded:
            continue
        if match.has_rest_layout and not has_sharded:
            continue
        others = "; other biases are sharded as their kernels are" * has_sharded
        yield _make_weight_finding(
            "replicated partner",
            w,
            f"it is replicated, and the outputs of {kernel.name} are {'to be ' * is_changed}sharded over "
            f"{_join_dims(sorted(dims))}",
            {
                kernel.name: f"{kernel.shape}  {kernel.layout} (as advised)"
                if is_changed
                else f"{kernel.shape}  {kernel.layout_text}"
            },
            f"each device holds all of it, and adds only its part{others}",
            "shard it as its kernel's outputs are",
            layout,
        )


def _make_equal_kernel_key(kernel: Weight) -> object:
    """Return a key that is equal for kernels of one block with equal shapes and layouts, such as query and value."""
    return kernel.assignment.variable.model, kernel.block, kernel.shape, kernel.layout


def _find_attention_mismatches(linted: LintedPlan) -> Iterator[Finding]:
    """Yield a finding for each block with query, key, and value kernels that are sharded differently."""
    for block in linted.blocks:
        parts = linted.find_attention_kernels(block)
        if not parts:
            continue
        query, *rest = parts.values()
        dims = {id(w): w.list_dims(w.list_axes("out")[0]) for w in parts.values()}
        over = linted.choose_head_dims(block)
        shards = math.prod(map(linted.plan.mesh.dim_size, over))
        # If the number of key heads is not a multiple of the shards, the keys need a different layout, which is no
        # mistake.
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
            f"shard axis {query.list_axes('out')[0]} of all three over {_join_dims(over)}",
        )
        yield Finding(
            problem,
            tuple((w.assignment, make_sharded_layout(w.layout, w.list_axes("out")[0], over)) for w in wrong),
        )


def _find_split_heads(linted: LintedPlan) -> Iterator[Finding]:
    """Yield a finding for each attention kernel with shards that split a head."""
    for block in linted.blocks:
        parts = list(linted.find_attention_kernels(block).values())
        if not parts:
            continue
        takers = [w for w in block if id(w) in linted.attention_outputs]
        for w, role in [*((w, "out") for w in parts), *((w, "in") for w in takers)]:
            heads, *inner = w.list_axes(role)
            count = w.count_heads(role)
            if inner:
                sharded = [axis for axis in inner if w.list_dims(axis)]
                if sharded:
                    yield _make_split_heads_finding(w, sharded[0], heads, count, w.shape[sharded[0]])
            elif w.use.head_size and w.count_shards(heads) > 1 and count % w.count_shards(heads):
                yield _make_split_heads_finding(w, heads, heads, count, w.use.head_size)


def _make_split_heads_finding(
    w: Weight, axis: int, heads_axis: int, num_heads: int, head_size: int
) -> Finding:
    """Return the finding that a kernel's sharding splits its attention heads."""
    dims, shards = w.list_dims(axis), w.count_shards(axis)
    moves = axis != heads_axis and not w.layout.list_mesh_dims(heads_axis) and num_heads % shards == 0
    fix = f"shard over dims with sizes that divide {num_heads}, or leave the axis unsharded"
    return _make_weight_finding(
        "heads",
        w,
        f"its sharding over {_join_dims(dims)} splits its heads",
        {"heads": f"{num_heads} of size {head_size}, in {shards} shards"},
        "attention is computed per head, and no device holds a whole head: activations are resharded in every step",
        "shard by heads" if moves else fix,
        make_sharded_layout(w.layout, heads_axis if moves else axis, dims if moves else ()),
    )


def _find_replicated_tables(linted: LintedPlan) -> Iterator[Finding]:
    """Yield a finding for each large replicated embedding table, or output layer, in a model that is mostly sharded."""
    weights = [a for a in linted.plan.assignments if a.variable.kind is Kind.WEIGHT and a.fits]
    weight_bytes = sum(a.shard_bytes for a in weights)
    rows = {w.shape[axis] for w in linted.weights for axis in w.list_axes("rows")}
    # The output layer of a language model has as many outputs as the table has rows, so it counts as a table.
    tables = [
        w
        for w in linted.weights
        if w.list_axes("rows") or (w.list_axes("in") and rows & {*w.list_axis_sizes("out")})
        # Presets replicate tables of positions, because they are small, so report none. If a table has no known use,
        # only its name shows that it is one of positions.
        if w.assignment.variable.use is not None or not _POSITIONS.search(w.path)
    ]
    ids = {id(w.assignment) for w in tables}
    rest = [a for a in weights if id(a) not in ids and len(a.variable.shape) > 1]
    sharded = [a for a in rest if not a.layout.is_fully_replicated()]
    if 2 * sum(a.variable.global_bytes for a in sharded) <= sum(a.variable.global_bytes for a in rest):
        return  # at most half of the model is sharded, so a replicated table is not an exception
    suggestions = LayoutSuggestions(linted)
    for w in tables:
        a = w.assignment
        proposed = suggestions.suggest_layout(a) if a.layout.is_fully_replicated() else None
        if proposed is None or a.shard_bytes < _LEAST_SHARE * weight_bytes:
            continue
        saved = a.shard_bytes - a.shard_bytes // proposed.num_distinct_shards
        is_table, size = bool(w.list_axes("rows")), " x ".join(map(str, w.shape))
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
                ("bytes", f"{a.shard_bytes:,} of the {weight_bytes:,} that a device holds in weights"),
                ("beside it", f"{len(sharded)} of the {len(rest)} other weights are sharded"),
            ),
            f"{saved:,} bytes per device would be saved, and as many for its gradient and for each optimizer slot",
            "shard it",
        )
        yield Finding(problem, ((a, proposed),))


def _find_sums_of_logits(linted: LintedPlan) -> Iterator[Finding]:
    """Yield a finding for each output layer that sums over a sharded axis, and shards no outputs.

    An output layer is a kernel that no other kernel takes, with as many outputs as a table has rows, or with the name
    of an output layer and more outputs than inputs, or a table with the path of an output layer as an alias. Another
    table sharded by features is no mistake: its outputs are gathered, which takes no more bytes than the sum of those
    of a table sharded by rows.
    """
    rows = {w.list_axis_sizes("rows") for w in linted.weights}
    taken = {w.list_axis_sizes("in") for w in linted.kernels}
    has_maker = {*linted.kernels_before, *LayoutSuggestions(linted).previous_kernels}
    outputs = [
        (w, "in", "out")
        for w in linted.kernels
        if id(w) not in has_maker
        and (
            w.list_axis_sizes("out") in rows - taken
            or (HEAD.fullmatch(w.layer_name) and _has_more_outputs(w) and id(w) not in linted.kernels_after)
        )
    ]
    outputs += [
        (w, "out", "rows")
        for w in linted.weights
        if w.list_axes("rows")
        and any(HEAD.fullmatch(name) for path in w.assignment.variable.aliases for name in path.split("."))
    ]
    for w, summed, output in outputs:
        (axis, *_), (out, *_) = w.list_axes(summed), w.list_axes(output)
        dims = tuple(dim for dim in w.list_dims(axis) if dim not in linted.batch_dims)
        moved = _make_swapped_layout(w, axis, out)
        if dims and not {*w.list_dims(out)} - {*linted.batch_dims} and not moved.find_uneven_axes(w.shape):
            yield _make_weight_finding(
                "swapped",
                w,
                f"it sums over axis {axis}, which is sharded over {_join_dims(dims)}, for {w.shape[out]} outputs",
                {},
                f"all outputs are partial sums, the largest of the model: each step adds them over {_join_dims(dims)}",
                "shard the outputs; its axes seem to be swapped",
                moved,
            )


def _has_more_outputs(w: Weight) -> bool:
    return math.prod(w.list_axis_sizes("out")) > math.prod(w.list_axis_sizes("in"))


def _find_layout_contradictions(linted: LintedPlan, changed: Mapping[int, Layout]) -> Iterator[Finding]:
    """Yield a finding for each bias or derived variable that is sharded differently from its kernel or parent.

    Args:
        linted: The plan.
        changed: The layouts that other findings propose, by the id of the assignment.
    """
    suggestions = LayoutSuggestions(linted)
    for w in linted.weights:
        kernel = linted.find_kernel_of_bias(w)
        if kernel is None:
            continue
        axes = {kernel.use.roles[axis]: axis for axis in kernel.list_axes("out")}
        for axis in w.list_axes("out"):
            # A replicated bias costs little memory and no communication, so it is no finding.
            if not w.list_dims(axis) or w.list_dims(axis) == kernel.list_dims(axes[w.use.roles[axis]]):
                continue
            if not {id(w.assignment), id(kernel.assignment)} & changed.keys():
                layout = suggestions.suggest_kernel_layout_from_bias(kernel, w, axes[w.use.roles[axis]])
                if layout is None:
                    follows = make_bias_layout(w, kernel)
                    yield _make_kernel_contradiction_finding(
                        w.assignment, kernel.assignment, kernel.name, follows
                    )
                else:
                    fix = f"shard its outputs as {w.name} is"
                    yield Finding(
                        _make_contradiction_problem(
                            "contradicts its bias", kernel.assignment, w.assignment, w.name, fix
                        ),
                        ((kernel.assignment, layout),),
                    )
            break
    assignments = {(a.variable.model, a.variable.path): a for a in linted.plan.assignments}
    for a in linted.plan.assignments:
        v = a.variable
        parent = assignments.get((v.model, v.parent or ""))
        if not v.is_derived or v.axes is None or a.match is None or parent is None or not a.fits:
            continue
        if parent.layout.rank == len(v.rule_shape) and not a.layout.is_fully_replicated():
            follows = apply_uneven_policy(derive_layout_from_parent(parent.layout, v.axes), v.shape, "shrink")
            if a.layout != follows:
                yield _make_kernel_contradiction_finding(
                    a, parent, parent.variable.path.rpartition(".")[2], follows
                )


def _make_kernel_contradiction_finding(
    a: Assignment, kernel: Assignment, name: str, layout: Layout | None
) -> Finding:
    """Return the finding that a variable should get the layout of its kernel, or be replicated if `layout` is None."""
    fix = "shard it as those axes of the kernel are" if layout else "replicate it"
    layout = layout or Layout.replicated(a.layout.mesh, len(a.variable.shape))
    return Finding(
        _make_contradiction_problem("contradicts its kernel", a, kernel, name, fix), ((a, layout),)
    )


def _make_contradiction_problem(kind: str, a: Assignment, other: Assignment, name: str, fix: str) -> Problem:
    """Return the problem that a variable is sharded differently from its kernel or bias, which has the name `name`."""
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


def _find_unused_dims(linted: LintedPlan) -> Iterator[Finding]:
    """Yield a finding for each mesh dim over which no weight, layer output, or batch is sharded."""
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


def _find_unused_rules(linted: LintedPlan) -> Iterator[Finding]:
    """Return the plan's problems of unused and shadowed rules as findings."""
    rule_problems = (p for p in linted.plan.problems if p.kind in RULE_KINDS and p.severity != "note")
    return (Finding(problem) for problem in rule_problems)


def _find_large_unsharded_arrays(linted: LintedPlan) -> Iterator[Finding]:
    """Yield a finding for each large array that was created after the model was sharded, and stayed on one device."""
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


LATER_CHECKS = (_find_replicated_neighbor_kernels, _find_layout_contradictions, _find_replicated_biases)
"""The checks that also get the changes of the findings before them."""

CHECKS = (
    _find_unused_rules,
    _find_sums_over_batch_dim,
    find_tables_over_batch_dim,
    _find_swapped_axes,
    _find_attention_mismatches,
    _find_split_heads,
    find_less_sharded_blocks,
    _find_replicated_tables,
    _find_sums_of_logits,
    _find_unused_dims,
    _find_large_unsharded_arrays,
)


def _join_dims(dims: Sequence[str]) -> str:
    return " and ".join(dims)
