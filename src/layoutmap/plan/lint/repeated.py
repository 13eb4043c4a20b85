"""Compare repeated blocks: weights with paths that differ in one number."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from layoutmap.core.variables import Assignment, Kind
from layoutmap.plan.lint.changes import Finding
from layoutmap.plan.lint.linted_plan import LintedPlan
from layoutmap.plan.lint.suggest import make_bias_layout
from layoutmap.plan.lint.weights import format_rule_suffix, list_sharding_dims_in_compute
from layoutmap.plan.problems import Problem

_NUMBER = re.compile(r"\d+")
_LEAST_SHARE = 3 / 4  # if at least this share of the blocks are equal, a block that differs is an exception
_LEAST_BLOCKS = 3  # with fewer equal blocks, it is unclear which layout is the exception
_MAX_SHOWN = 4


@dataclass(frozen=True, slots=True)
class _LessShardedWeight:
    """A weight that is not sharded over `dims`, unlike `sibling`, the same weight of another block.

    `share` is the text for how many of the blocks are like the sibling.
    """

    block: str
    assignment: Assignment
    sibling: Assignment
    dims: frozenset[str]
    share: str


# A block that is sharded over fewer dims than its siblings is probably a mistake, so report it (decisions/0022).
def find_less_sharded_blocks(linted: LintedPlan) -> Iterator[Finding]:
    """Return a finding for each repeated block with weights that lack mesh dims which most of the blocks use."""
    found: dict[int, _LessShardedWeight] = {}
    for group in _group_sibling_weights(linted).values():
        if len(group) <= _LEAST_BLOCKS:
            continue
        dims = [_find_sharding_dims(a) for _, a in group]
        usual, count = Counter(dims).most_common(1)[0]
        if count < max(_LEAST_BLOCKS, _LEAST_SHARE * len(group)):
            continue
        sibling = group[dims.index(usual)][1]
        for (block, a), over in zip(group, dims, strict=True):
            known = found.get(id(a))
            # A path with several numbers is in nested blocks, so report only the innermost one.
            if over < usual and (known is None or len(known.block) < len(block)):
                found[id(a)] = _LessShardedWeight(block, a, sibling, usual - over, f"{count} of {len(group)}")
    # A bias is sharded as its kernel, which may be sharded by its input, so a bias alone is no exception.
    for w in linted.weights:
        kernel = linted.find_kernel_of_bias(w)
        is_kept = kernel and (id(kernel) in linted.unordered_kernels or make_bias_layout(w, kernel) is None)
        if kernel and is_kept and id(kernel.assignment) not in found:
            found.pop(id(w.assignment), None)
    blocks: dict[tuple[str, str], list[_LessShardedWeight]] = defaultdict(list)
    for odd in found.values():
        blocks[odd.assignment.variable.model, odd.block].append(odd)
    return (_make_block_finding(linted, block, weights) for (_, block), weights in blocks.items())


def _group_sibling_weights(linted: LintedPlan) -> dict[object, list[tuple[str, Assignment]]]:
    """Group weights of equal shape and use with paths that differ in one number, as pairs: path of a block, weight."""
    groups: dict[object, list[tuple[str, Assignment]]] = defaultdict(list)
    for a in linted.plan.assignments:
        v = a.variable
        if v.kind is not Kind.WEIGHT or not a.fits:
            continue
        for number in _NUMBER.finditer(v.path):
            block = v.path[: number.end()] + v.path[number.end() :].partition(".")[0]
            starred = f"{v.path[: number.start()]}*{v.path[number.end() :]}"
            groups[v.model, starred, number.start(), v.shape, v.dtype, v.use].append((block, a))
    return groups


def _find_sharding_dims(a: Assignment) -> frozenset[str]:
    """Return the mesh dims of size above 1 over which a weight is stored in shards, also those of `fully_shard`."""
    return frozenset(dim for axis in list_sharding_dims_in_compute(a.layout, (), ()) for dim in axis)


def _make_block_finding(linted: LintedPlan, block: str, weights: Sequence[_LessShardedWeight]) -> Finding:
    """Return the finding that some weights of a block are sharded over fewer dims than in most equal blocks."""
    first = weights[0]
    computes = first.dims - {*linted.batch_dims, *linted.plan.gathered_dims}
    over = " and ".join(dim for dim in first.assignment.layout.mesh.dim_names if dim in first.dims)
    facts = [
        (
            each.assignment.variable.path.removeprefix(f"{block}."),
            f"{each.assignment.layout}{format_rule_suffix(each.assignment)}; others {each.sibling.layout}",
        )
        for each in weights[:_MAX_SHOWN]
    ]
    if len(weights) > _MAX_SHOWN:
        facts.append(("and", f"{len(weights) - _MAX_SHOWN} more weights"))
    problem = Problem(
        "odd one out",
        "warning",
        block,
        f"{block}: it is not sharded over {over}, and {first.share} such blocks are",
        tuple(facts),
        f"each device along {over} holds all of its weights"
        + " and computes all of its products" * bool(computes),
        "lay it out as the others",
    )
    return Finding(problem, tuple((each.assignment, each.sibling.layout) for each in weights))
