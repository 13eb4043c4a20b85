"""Find kernels of a block of which one takes the output of another, by their sizes, names, and inputs."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from layoutmap.plan.lint.inferred_roles import (
    ATTENTION_OUTPUT,
    ATTENTION_PARTS,
    FIRST_KERNEL,
    FUSED_KEY_VALUE,
    FUSED_QKV,
    SECOND_KERNEL,
)
from layoutmap.plan.lint.weights import Weight


def iterate_joined_kernels(block: Sequence[Weight]) -> Iterator[tuple[Sequence[Weight], Weight]]:
    """Yield kernels that read one tensor, as of attention, with the next called one, which takes their joined outputs.

    Two of equal shapes can be of keys and values, before a query that reads another tensor, and an output kernel.
    """
    groups: dict[int, list[Weight]] = defaultdict(list)
    for w in block:
        if w.use.reads is not None:
            groups[w.use.reads].append(w)
    for makers, takers in itertools.pairwise(groups[number] for number in sorted(groups)):
        is_joined = len(makers) > 2 or len({w.shape for w in makers}) > 1 or len(makers) == len(groups) == 2
        if len(takers) == 1 and is_joined:
            yield makers, takers[0]


def iterate_list_pairs(block: Sequence[Weight]) -> Iterator[tuple[Weight, Weight]]:
    """Yield each two consecutive kernels of a list of layers, if their sizes show that each takes the one before.

    Equal sizes do not show it, as of the query, key, value, and output layers in one list.
    """
    numbered = [w for w in block if w.layer_name.isdigit()]
    pairs = [*itertools.pairwise(numbered)]
    if len({w.shape for w in numbered}) > 1 and all(
        first.list_axis_sizes("out") == second.list_axis_sizes("in") for first, second in pairs
    ):
        yield from pairs


def iterate_wide_pairs(sizes: tuple[int, ...], block: Sequence[Weight]) -> Iterator[tuple[Weight, Weight]]:
    """Yield the pairs of kernels that output these sizes and take them in turns, as in a model without blocks.

    If an outer size is not smaller, the kernels can also be in the other order: one narrows, and the next one widens.
    """
    makers, groups = list[Weight](), list[tuple[list[Weight], Weight]]()
    for w in block:
        into, out = w.list_axis_sizes("in"), w.list_axis_sizes("out")
        if sizes not in (into, out):
            continue
        if math.prod(into if out == sizes else out) >= math.prod(sizes) or not (makers or out == sizes):
            return
        if out == sizes:
            makers.append(w)
        else:
            groups.append((makers, w))
            makers = []
    if not makers and len({len(group) for group, _ in groups}) == 1:
        yield from ((maker, taker) for group, taker in groups for maker in group)


def iterate_chain_pairs(sizes: tuple[int, ...], block: Sequence[Weight]) -> Iterator[tuple[Weight, Weight]]:
    """Yield the pairs of a chain of hidden layers of these sizes, in the order of calls: each two are a pair.

    The first of the chain has other inputs, the last one other outputs, and each reads another tensor. Two square
    kernels that are alone in a module, as in a residual block, are a chain, too.
    """
    members = [w for w in block if sizes in (w.list_axis_sizes("in"), w.list_axis_sizes("out"))]
    reads = {w.use.reads for w in members}
    chain = sorted(members, key=lambda w: w.use.reads or 0)
    is_chain = all(w.list_axis_sizes("in") == sizes for w in chain[1:]) and all(
        w.list_axis_sizes("out") == sizes for w in chain[:-1]
    )
    is_open = sizes not in (chain[0].list_axis_sizes("in"), chain[-1].list_axis_sizes("out"))
    are_alone = len(chain) == len(block) == 2 and bool(chain[0].block)
    if is_chain and (is_open or are_alone) and None not in reads and len(reads) == len(chain):
        yield from zip(chain[::2], chain[1::2], strict=False)


def iterate_query_and_fused_key_value_pairs(block: Sequence[Weight]) -> Iterator[tuple[Weight, Weight]]:
    """Yield a query kernel, and that of fused keys and values, each with the kernel that takes their joined outputs.

    Their names show them, because in cross attention they read different tensors. The last kernel has the sizes of the
    query in the other order.
    """
    queries = [w for w in block if ATTENTION_PARTS["query"].fullmatch(w.layer_name)]
    fused = [w for w in block if FUSED_KEY_VALUE.fullmatch(w.layer_name)]
    if len(queries) != 1 or len(fused) != 1:
        return
    into, out = map(queries[0].list_axis_sizes, ("in", "out"))
    takers = [
        w
        for w in block
        if w not in (queries[0], fused[0])
        and (w.list_axis_sizes("in"), w.list_axis_sizes("out")) == (out, into)
    ]
    if len(takers) == 1:
        yield queries[0], takers[0]
        yield fused[0], takers[0]


def iterate_fused_pairs(block: Sequence[Weight]) -> Iterator[tuple[Weight, Weight]]:
    """Yield each fused kernel (query, key, and value, or gate and up), with the kernel that takes its split outputs.

    By their shapes alone, these are two consecutive kernels, of which the second takes a third or a half of the outputs
    of the first. By the names of their layers, they have any order. With fewer heads of keys than of queries, the
    second takes more than a third.
    """
    found: dict[int, tuple[Weight, Weight]] = {}
    outs = {w.list_axis_sizes("out") for w in block}
    joined = ((w, taker) for makers, taker in iterate_joined_kernels(block) for w in makers)
    for fused, taker in itertools.chain(itertools.pairwise(block), joined):
        parts = _count_fused_parts(fused, taker)
        is_glu = parts == 2 and taker.list_axis_sizes("in") not in outs
        if parts == 3 or is_glu or (parts and FUSED_QKV.fullmatch(fused.layer_name)):
            found[id(fused)] = fused, taker
    for fused_name, taker_name, is_qkv in (
        (FUSED_QKV, ATTENTION_OUTPUT, True),
        (FIRST_KERNEL, SECOND_KERNEL, False),
    ):
        named = [w for w in block if fused_name.fullmatch(w.layer_name)]
        takers = [w for w in block if taker_name.fullmatch(w.layer_name)]
        for fused in named:
            fitting = [
                w for w in takers if (parts := _count_fused_parts(fused, w)) and (is_qkv or parts == 2)
            ]
            if len(fitting) == 1:
                found[id(fused)] = fused, fitting[0]
    yield from found.values()


def _count_fused_parts(fused: Weight, taker: Weight) -> float:
    """Return the outputs of `fused` per input of `taker`, or 0 if this is not above 1, or the shapes do not fit."""
    if fused.list_axis_sizes("in") != taker.list_axis_sizes("out"):
        return 0
    match fused.list_axis_sizes("out"), taker.list_axis_sizes("in"):
        case (columns,), (width,) if columns > width:
            return columns / width
        case _:
            return 0


def can_be_pair(first: Weight, second: Weight) -> bool:
    """Return whether one kernel may take the outputs of another, or a part of fused ones, by their sizes."""
    is_transposed = first.list_axis_sizes("in") == second.list_axis_sizes("out")
    fits = is_transposed and first.list_axis_sizes("out") == second.list_axis_sizes("in")
    parts = _count_fused_parts(first, second)
    return fits or parts in (2, 3) or (parts > 1 and FUSED_QKV.fullmatch(first.layer_name) is not None)
