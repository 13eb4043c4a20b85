"""Make the views of a plan that the checks of lint need, such as its blocks and consecutive kernels."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property

from layoutmap.core.paths import split_path_at_numbers
from layoutmap.core.specs import BatchDim, list_batch_dims
from layoutmap.core.unsupported import UNKNOWN_ORDER_KIND
from layoutmap.core.variables import Assignment, Kind
from layoutmap.plan.lint.experts import ExpertWeightIds, find_expert_weights
from layoutmap.plan.lint.inferred_roles import (
    ATTENTION_PARTS,
    FIRST_KERNEL,
    SECOND_KERNEL,
    infer_axis_roles,
)
from layoutmap.plan.lint.kernel_pairs import (
    can_be_pair,
    iterate_chain_pairs,
    iterate_fused_pairs,
    iterate_joined_kernels,
    iterate_list_pairs,
    iterate_query_and_fused_key_value_pairs,
    iterate_wide_pairs,
)
from layoutmap.plan.lint.low_rank import find_low_rank_factors
from layoutmap.plan.lint.weights import Weight, is_attention_output_name, make_sibling_key
from layoutmap.plan.lint.wrappers import find_layer_places
from layoutmap.plan.table import PlanTable


class LintedPlan:
    """A plan with views that the checks of lint need: weights with axis roles, blocks, and consecutive kernels."""

    def __init__(self, plan: PlanTable, batch_dim: BatchDim | None) -> None:
        self.plan = plan
        self.batch_dim = batch_dim
        self._typical_pairs: dict[int, list[tuple[Weight, Weight]]] = {}  # by the id of a typical block
        self.batch_dims = list_batch_dims(batch_dim)
        fitting = [a for a in plan.assignments if a.variable.kind is Kind.WEIGHT and a.fits]
        uses = {
            v.key: (v.use, v.path.rpartition(".")[0]) for a in fitting if (v := a.variable).use is not None
        }
        # Checks compare weights in the order of `uses`. JAX sorts the keys of a dict, so `down` is before `up`, but
        # the inferred uses are in the order of the calls.
        uses |= infer_axis_roles(tuple(a.variable for a in plan.assignments))
        by_key = {a.variable.key: a for a in fitting}
        weights = [
            Weight(by_key[key], use, layer, plan.gathered_dims, self.batch_dims)
            for key, (use, layer) in uses.items()
            if key in by_key
        ]
        self.low_rank_factors = find_low_rank_factors(weights, plan.assignments)
        """The low-rank factors by the ids of their assignments."""
        self.weights = [
            w
            for w in weights
            if w.assignment.variable.use is not None or id(w.assignment) not in self.low_rank_factors
        ]
        places = find_layer_places(
            [w for w in self.weights if self._is_kernel(w) and not w.assignment.variable.is_derived]
        )
        if places:
            keys = [(w.assignment.variable.model, w.layer) for w in self.weights]
            self.weights = [
                replace(w, place=places.get(key, "")) for key, w in zip(keys, self.weights, strict=True)
            ]

    @property
    def call_error(self) -> str:
        """The error of the call that was to record the order of calls, or "" if there was none."""
        return next((p.why for p in self.plan.problems if p.kind == UNKNOWN_ORDER_KIND), "")

    @property
    def guessed_order_reason(self) -> str:
        """Explanation of the order of `guessed_pairs`."""
        known = (
            "by sizes and the order in which the layers were made; "
            "names such as up and down show the order of calls, "
        )
        how = (
            f"but the call with inputs= failed: {self.call_error}"
            if self.call_error
            else "and so does inputs="
        )
        return known + how

    @property
    def unknown_order_reason(self) -> str:
        """Explanation of the layouts of `unordered_kernels`."""
        how = f"the call failed: {self.call_error}" if self.call_error else "inputs= (--inputs) shows it"
        return f"the order of calls is unknown: {how}"

    @property
    def are_batch_outputs_free(self) -> bool:
        """Whether a compiler chooses where to gather values sharded over the batch dim, because no rule does."""
        return self.batch_dim is not None and not self.plan.activations and self.plan.free_activations

    @cached_property
    def weights_by_id(self) -> Mapping[int, Weight]:
        """A dict from the id of an assignment to its weight with known axis roles."""
        return {id(w.assignment): w for w in self.weights}

    @cached_property
    def kernels(self) -> list[Weight]:
        """The weights with summed axes and output axes, except low-rank factors and depthwise kernels."""
        return [w for w in self.weights if self._is_kernel(w)]

    def _is_kernel(self, w: Weight) -> bool:
        is_product = w.list_axes("in") and w.list_axes("out") and not w.is_depthwise
        return bool(is_product) and id(w.assignment) not in self.low_rank_factors

    @cached_property
    def blocks(self) -> list[list[Weight]]:
        """The kernels, grouped by the block (the parent layer) that contains their layers.

        They are in the order of calls if it is known, else in the order in which the layers were made. Equal blocks
        have one order, that of their typical block.
        """
        found: list[list[Weight]] = []
        for block in self._unsorted_blocks:
            order = {w.name: number for number, w in enumerate(self._typical_blocks[id(block[0])])}
            found.append(sorted(block, key=lambda w: order[w.name]))
        return found

    @cached_property
    def _unsorted_blocks(self) -> Sequence[Sequence[Weight]]:
        groups: dict[tuple[str, str], list[Weight]] = defaultdict(list)
        for w in self.kernels:
            groups[w.assignment.variable.model, w.block].append(w)
        return [*groups.values()]

    # Layers of equal blocks have equal roles, but in the first block, attention may read one tensor as queries, keys,
    # and values, and in the later ones a memory as keys and values only.
    @cached_property
    def _typical_blocks(self) -> Mapping[int, Sequence[Weight]]:
        """A dict from the id of each kernel to the one of the blocks equal to its own that reads the fewest tensors."""
        groups: dict[object, list[Sequence[Weight]]] = defaultdict(list)
        for block in self._unsorted_blocks:
            parts = split_path_at_numbers(block[0].block)
            layers = frozenset((w.name, w.shape, w.use) for w in block)
            groups[block[0].assignment.variable.model, parts, layers].append(block)
        found: dict[int, Sequence[Weight]] = {}
        for blocks in groups.values():
            typical = min(blocks, key=_count_inputs)
            if math.isfinite(_count_inputs(typical)):
                typical = sorted(typical, key=lambda w: w.use.reads or 0)
            found |= {id(w): typical for block in blocks for w in block}
        return found

    def _find_typical_block(self, block: Sequence[Weight]) -> tuple[Sequence[Weight], Mapping[int, Weight]]:
        """Return the typical block of a block, and a dict from the ids of its kernels to those of the block."""
        typical = self._typical_blocks[id(block[0])]
        return typical, {id(w): own for w, own in zip(typical, block, strict=True)}

    def list_kernel_pairs(self, block: Sequence[Weight]) -> list[tuple[Weight, Weight]]:
        """Return the pairs of kernels of a block, which are the same in all equal blocks."""
        typical, own = self._find_typical_block(block)
        if id(typical) not in self._typical_pairs:
            self._typical_pairs[id(typical)] = [*_iterate_kernel_pairs(self, typical)]
        return [(own[id(w)], own[id(taker)]) for w, taker in self._typical_pairs[id(typical)]]

    @cached_property
    def kernel_pairs(self) -> list[tuple[Weight, Weight]]:
        """The pairs of kernels in which the second takes the output of the first."""
        return [pair for block in self.blocks for pair in self.list_kernel_pairs(block)]

    @cached_property
    def unordered_kernels(self) -> Set[int]:
        """The ids of kernels in no pair that can be one with another kernel of their block, by their sizes."""
        found = set[int]()
        paired = self.kernels_before.keys() | self.kernels_after.keys()
        unordered = dict[int, Set[int]]()  # by the id of a typical block
        for block in self.blocks:
            typical, own = self._find_typical_block(block)
            if id(typical) not in unordered:
                known = {id(w) for w in self.find_attention_kernels(typical).values()}
                known.update(id(w) for pair in iterate_list_pairs(typical) for w in pair)
                rest = [
                    w for w in typical if w.use.reads is None and id(w) not in paired and id(w) not in known
                ]
                pairs = (pair for pair in itertools.permutations(rest, 2) if can_be_pair(*pair))
                unordered[id(typical)] = {id(w) for pair in pairs for w in pair}
            found |= {id(own[each]) for each in unordered[id(typical)]}
        return found

    @cached_property
    def guessed_pairs(self) -> Set[tuple[int, int]]:
        """The ids of two kernels of `kernel_pairs` that only the order in which they were made, or sizes, pair.

        They fit in both orders, or the second fits several kernels of equal shapes, of which some may be fused keys and
        values.
        """
        found = set[tuple[int, int]]()
        attention = {id(w) for block in self.blocks for w in self.find_attention_kernels(block).values()}
        for first, second in self.kernel_pairs:
            is_known = (
                None not in (first.use.reads, second.use.reads)
                or first.assignment.variable.use is None
                or id(first) in attention
                or ATTENTION_PARTS["query"].fullmatch(first.layer_name)
                or _has_names_of_pair(first, second)
            )
            fits = first.list_axis_sizes("in") == second.list_axis_sizes("out")
            if is_known or not fits or len(self.kernels_after[id(first)]) > 1:
                continue
            are_numbered = split_path_at_numbers(first.layer) == split_path_at_numbers(second.layer)
            if len(self.kernels_before[id(second)]) > 1 or not (
                are_numbered or _is_first_of_two(self, first, second) is not None
            ):
                found.add((id(first), id(second)))
        return found

    def is_next_call(self, first: Weight, second: Weight) -> bool:
        """Return whether `second` is called after `first` of its block, and no pair of another block between them.

        Attention beside an MLP has no pair between, because both read one tensor.
        """
        calls = self._calls[first.assignment.variable.model]
        start = bisect_right(calls, first.use.reads or 0, key=lambda w: w.use.reads or 0)
        end = bisect_left(calls, second.use.reads or 0, key=lambda w: w.use.reads or 0)
        is_later = (first.use.reads or 0) < (second.use.reads or 0)
        between = {(w.block, w.use.reads) for w in calls[start:end] if w.block != first.block}
        return is_later and len(between) == len({block for block, _ in between})

    @cached_property
    def _calls(self) -> Mapping[str, Sequence[Weight]]:
        """A dict from each model to its kernels in the order of calls, without those of unknown order."""
        found: dict[str, list[Weight]] = defaultdict(list)
        for w in sorted(self.kernels, key=lambda w: w.use.reads or 0):
            if w.use.reads is not None:
                found[w.assignment.variable.model].append(w)
        return found

    def count_sizes(self, sizes: Sequence[int]) -> int:
        """Return how many axes of the model's weights have one of these sizes."""
        return sum(map(self._axis_counts.__getitem__, sizes))

    @cached_property
    def _axis_counts(self) -> Counter[int]:
        return Counter(
            size for a in self.plan.assignments if a.variable.kind is Kind.WEIGHT for size in a.variable.shape
        )

    @cached_property
    def kernels_before(self) -> Mapping[int, Sequence[Weight]]:
        """A dict from the id of a kernel to the kernels that compute its input."""
        return _group_second_weights_by_first((then, first) for first, then in self.kernel_pairs)

    @cached_property
    def kernels_after(self) -> Mapping[int, Sequence[Weight]]:
        """A dict from the id of a kernel to the kernels that take its output as their input."""
        return _group_second_weights_by_first(self.kernel_pairs)

    @cached_property
    def kernels_by_layer(self) -> Mapping[tuple[str, str], Weight]:
        """A dict from the model and path of a layer to its kernel, the last one of several."""
        return {(w.assignment.variable.model, w.layer): w for w in self.kernels}

    def find_kernel_of_bias(self, w: Weight) -> Weight | None:
        """Return the kernel of the layer of a bias, or None if the layer has none or the weight is no bias."""
        is_bias = w.list_axes("out") and not w.list_axes("in")
        return self.kernels_by_layer.get((w.assignment.variable.model, w.layer)) if is_bias else None

    @cached_property
    def biases(self) -> Mapping[tuple[str, str], Sequence[Weight]]:
        """A dict from the model and path of a layer to its weights with output axes but no summed axis."""
        found: dict[tuple[str, str], list[Weight]] = defaultdict(list)
        for w in self.weights:
            if w.list_axes("out") and not w.list_axes("in"):
                found[w.assignment.variable.model, w.layer].append(w)
        return found

    def count_agreeing_weights(self, w: Weight, axis: int, dims: tuple[str, ...]) -> int:
        """Return how many other weights agree with sharding an axis of a kernel over these mesh dims.

        They are its bias, the kernels that share the axis, and the same weight in other blocks. For dims of the batch,
        the number of all these weights is subtracted, because an axis between two kernels should not be sharded so.
        """
        role = w.use.roles[axis]
        is_out = role.startswith("out")
        biases = self.biases.get((w.assignment.variable.model, w.layer), ()) if is_out else ()
        near = (self.kernels_after if is_out else self.kernels_before).get(id(w), ())
        votes = [b.list_dims(b.use.roles.index(role)) for b in biases if role in b.use.roles]
        votes += [other.list_dims(other.list_axes("in" if is_out else "out")[0]) for other in near]
        votes += [
            other.list_dims(axis) for other in self.siblings[make_sibling_key(w.assignment)] if other is not w
        ]
        return votes.count(dims) - len(votes) * bool({*dims} & {*self.batch_dims})

    @cached_property
    def experts(self) -> ExpertWeightIds:
        """The weights of experts and their routers."""
        return find_expert_weights([a for a in self.plan.assignments if a.variable.kind is Kind.WEIGHT])

    def is_expert_stack(self, a: Assignment) -> bool:
        """Return whether a weight is a stack of experts, by its router or by its path."""
        return id(a) in self.experts.stacks or (len(a.variable.shape) > 2 and "expert" in a.variable.path)

    @cached_property
    def unchecked_weights(self) -> list[Assignment]:
        """The sharded weights with several axes of unknown roles or order, which the checks of roles leave out."""
        ordered = {id(w.assignment) for w in self.weights if id(w) not in self.unordered_kernels}
        known = ordered | self.experts.routers
        return [
            a
            for a in self.plan.assignments
            if a.variable.kind is Kind.WEIGHT
            and a.variable.parent is None
            and len(a.variable.shape) > 1
            and not a.layout.is_fully_replicated()
            and a.fits
            and id(a) not in known
            and not self.is_expert_stack(a)
        ]

    @property
    def has_unknown_order(self) -> bool:
        """Whether inputs of the model would give a kernel of `unchecked_weights` its place in the order of calls."""
        uses = [a.variable.use for a in self.unchecked_weights]
        return any(use is not None and use.reads is None for use in uses)

    @cached_property
    def kernels_after_fused(self) -> Mapping[int, Weight]:
        """A dict from the id of each fused kernel to the kernel after the split of its outputs."""
        found: dict[int, Weight] = {}
        for block in self.blocks:
            typical, own = self._find_typical_block(block)
            found |= {id(own[id(w)]): own[id(taker)] for w, taker in iterate_fused_pairs(typical)}
        return found

    @cached_property
    def siblings(self) -> Mapping[object, Sequence[Weight]]:
        """A dict from the result of `make_sibling_key` to the weights with this key."""
        found: dict[object, list[Weight]] = defaultdict(list)
        for w in self.weights:
            found[make_sibling_key(w.assignment)].append(w)
        return found

    def find_attention_kernels(self, block: Sequence[Weight]) -> dict[str, Weight]:
        """Return the query, key, and value kernels of a block, or {} if it lacks one or has several.

        They have these names, the shortest if several have, as `key` beside `position_key`, or are three that read one
        tensor, of which the other two have equal shapes.
        """
        found = dict[str, list[Weight]]()
        for part, pattern in ATTENTION_PARTS.items():
            named = [w for w in block if pattern.fullmatch(w.layer_name)]
            least = min((len(w.layer_name) for w in named), default=0)
            found[part] = [w for w in named if len(w.layer_name) == least]
        if all(len(each) == 1 for each in found.values()):
            return {part: each[0] for part, each in found.items()}
        typical, own = self._find_typical_block(block)
        for makers, taker in iterate_joined_kernels(typical):
            first, *rest = sorted(
                makers, key=lambda w: w.list_axis_sizes("out") != taker.list_axis_sizes("in")
            )
            sizes = first.list_axis_sizes("out")
            # An MLP beside attention reads the same tensor, and has more outputs.
            rest = [w for w in rest if math.prod(w.list_axis_sizes("out")) <= math.prod(sizes)]
            is_query = sizes == taker.list_axis_sizes("in")
            if is_query and len(rest) == 2 and rest[0].shape == rest[1].shape:
                return {part: own[id(w)] for part, w in zip(ATTENTION_PARTS, (first, *rest), strict=True)}
        return {}

    def find_attention_output(self, block: Sequence[Weight]) -> Weight | None:
        """Return the output kernel of an attention block, by its name or its sizes, or None if it is unclear.

        Beside query, key, and value, it is the only kernel with the axes of the query in the other order.
        """
        parts = self.find_attention_kernels(block)
        takers = [w for w in block if is_attention_output_name(w.layer_name)]
        if parts and not takers:
            ids = {*map(id, parts.values())}
            into, out = map(parts["query"].list_axis_sizes, ("in", "out"))
            takers = [
                w
                for w in block
                if id(w) not in ids and (w.list_axis_sizes("in"), w.list_axis_sizes("out")) == (out, into)
            ]
        return takers[0] if len(takers) == 1 else None

    @cached_property
    def attention_outputs(self) -> Set[int]:
        """The ids of the output kernels of attention, by their names or beside query, key, and value."""
        named = {id(w) for w in self.kernels if is_attention_output_name(w.layer_name)}
        return named | {id(w) for block in self.blocks if (w := self.find_attention_output(block))}

    def choose_head_dims(self, block: Sequence[Weight]) -> tuple[str, ...]:
        """Return the mesh dims over which most attention kernels of a block shard heads, or () if no dims fit.

        Dims of the batch are returned only if no kernel uses other dims.
        """
        parts = self.find_attention_kernels(block)
        members = [(w, "out") for w in parts.values()]
        if taker := self.find_attention_output(block):
            members.append((taker, "in"))
        dims = [found for w, role in members if (found := w.list_dims(w.list_axes(role)[0]))]
        fitting = [
            each
            for each in dims
            if not parts["query"].count_heads("out") % math.prod(map(self.plan.mesh.dim_size, each))
        ]
        return max(fitting, key=lambda each: (not {*each} & {*self.batch_dims}, dims.count(each)), default=())


def _group_second_weights_by_first(pairs: Iterable[tuple[Weight, Weight]]) -> Mapping[int, Sequence[Weight]]:
    """Return a dict from the id of each first weight of the pairs to its second weights."""
    found: dict[int, list[Weight]] = defaultdict(list)
    for key, value in pairs:
        found[id(key)].append(value)
    return dict(found)


def _count_inputs(block: Sequence[Weight]) -> float:
    """Return the number of tensors that the kernels of a block read, or infinity if it is unknown."""
    numbers = {w.use.reads for w in block}
    return math.inf if None in numbers else len(numbers)


def _iterate_kernel_pairs(linted: LintedPlan, block: Sequence[Weight]) -> Iterator[tuple[Weight, Weight]]:
    """Yield each pair of kernels in a block in which the second takes the output of the first.

    These are kernels with the output sizes that only one other kernel has as input sizes, or several in turns, and the
    kernels of `iterate_fused_pairs`. If all sizes of an attention layer are equal, the query and the output kernel are
    found by the names of their layers, and so are two square kernels such as up and down.
    """
    yield from iterate_fused_pairs(block)
    order = {id(w): number for number, w in enumerate(block)}
    outs: dict[tuple[int, ...], list[Weight]] = defaultdict(list)
    ins: dict[tuple[int, ...], list[Weight]] = defaultdict(list)
    for w in block:
        outs[w.list_axis_sizes("out")].append(w)
        ins[w.list_axis_sizes("in")].append(w)
    for sizes, makers in outs.items():
        takers = ins.get(sizes, [])
        if len(takers) > 1:
            yield from [*iterate_wide_pairs(sizes, block)] or iterate_chain_pairs(sizes, block)
        elif takers and not any(w is takers[0] for w in makers):
            (taker,) = takers
            outer = taker.list_axis_sizes("out")
            is_unclear = len(ins.get(outer, ())) == len(outs.get(outer, ())) == 1
            are_siblings = len(makers) > 1 and {w.list_axis_sizes("in") for w in makers} == {outer}
            firsts: list[Weight] = []
            for maker in makers:
                is_first = None
                if maker.use.reads is not None and taker.use.reads is not None:
                    is_first = linted.is_next_call(maker, taker)
                elif is_unclear and maker.list_axis_sizes("in") == outer:
                    is_first = _is_first_of_two(linted, maker, taker)
                if is_first is None:
                    # This order decides last, because some libraries sort layers by their names.
                    is_first = are_siblings or order[id(maker)] < order[id(taker)]
                if is_first:
                    firsts.append(maker)
            # Of kernels with different shapes and inputs, the taker reads the one that is called last.
            calls = [w.use.reads for w in firsts if w.use.reads is not None]
            if len({w.shape for w in firsts}) > 1 and len(calls) == len(firsts):
                firsts = [w for w in firsts if w.use.reads == max(calls)]
            yield from ((maker, taker) for maker in firsts)
    yield from iterate_query_and_fused_key_value_pairs(block)
    query = linted.find_attention_kernels(block).get("query")
    pairs = [
        (w, taker)
        for makers, taker in iterate_joined_kernels(block)
        for w in makers
        if taker.list_axis_sizes("in") == w.list_axis_sizes("in") == w.list_axis_sizes("out")
    ]
    yield from pairs
    taker = linted.find_attention_output(block)
    if (
        not pairs
        and query is not None
        and taker is not None
        and query.list_axis_sizes("out") == query.list_axis_sizes("in") == taker.list_axis_sizes("in")
    ):
        yield query, taker
    seconds = [
        w
        for w in block
        if SECOND_KERNEL.fullmatch(w.layer_name)
        and not (query is not None and id(w) in linted.attention_outputs)
    ]
    if len(seconds) == 1 and seconds[0].list_axis_sizes("in") == seconds[0].list_axis_sizes("out"):
        firsts = [w for w in outs[seconds[0].list_axis_sizes("in")] if FIRST_KERNEL.fullmatch(w.layer_name)]
        yield from (
            (first, seconds[0])
            for first in firsts
            if first.list_axis_sizes("in") == first.list_axis_sizes("out")
        )


def _is_first_of_two(linted: LintedPlan, w: Weight, other: Weight) -> bool | None:
    """Return whether `other` takes the output of `w` and not `w` that of `other`, if their sizes allow both.

    Names decide, then the sizes: the one between the two occurs less often than the width of the model. Return None if
    neither decides.
    """
    for first, second in ((w, other), (other, w)):
        if _has_names_of_pair(first, second):
            return first is w
    if w.assignment.variable.use is None:
        return None  # inferred roles come in the order of calls
    inner, outer = (linted.count_sizes(w.list_axis_sizes(role)) for role in ("out", "in"))
    return None if inner == outer else inner < outer


def _has_names_of_pair(first: Weight, second: Weight) -> bool:
    """Return whether two kernels have names such as up and down."""
    is_first = FIRST_KERNEL.fullmatch(first.layer_name) is not None
    return is_first and SECOND_KERNEL.fullmatch(second.layer_name) is not None
