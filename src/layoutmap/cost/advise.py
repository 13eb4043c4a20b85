"""Compute the costs of variants of a plan if its step does not fit the memory, and rank the variants as advice."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from layoutmap.core.errors import LayoutMapWarning
from layoutmap.core.paths import format_merged_paths, make_path_regex
from layoutmap.cost.cost import Cost, format_duration
from layoutmap.cost.search.options import MeshRoles, list_activation_options
from layoutmap.cost.search.space import BlockStack
from layoutmap.plan.advice import Advice
from layoutmap.plan.table import PlanTable
from layoutmap.plan.variants import PlanVariant, call_or_none, format_variant_change
from layoutmap.scope.progress import ElapsedTime

MAX_COUNTING_SECONDS = 10.0
"""CPU seconds of this process after which no more variants are tried. Wall time would depend on other processes."""

CostFn = Callable[[PlanVariant], Cost]
MakeVariants = Callable[[], Iterable[PlanVariant | None]]


# A variant of the plan may save too little memory, so its cost is computed before it is advised (decisions/0120).
def rank_variants_by_cost(
    original: PlanVariant,
    plan: PlanTable,
    peak_bytes: int,
    compute_cost: CostFn,
    *,
    blocks: Sequence[BlockStack],
    can_recompute: bool,
    can_fuse: bool,
    cost_seconds: float,
) -> tuple[tuple[Advice, ...], tuple[str, ...]]:
    """Compute costs of plan variants. Return advice, best first, and names of variants for which time ran out.

    Variants that fit come first, then those with the same batch, the same devices, and less time. `original` is the
    plan, `peak_bytes` is its peak memory, and `cost_seconds` is the time that computing its cost took.
    """
    trials, data = (
        _VariantTrials(original, peak_bytes, compute_cost, cost_seconds),
        original.guessed_batch_dim,
    )
    with ElapsedTime("counting what would fit") as show_progress:
        # Each entry makes variants of one kind, of which only the best is advised, because they differ little.
        makers: dict[str, MakeVariants] = {
            "a fused kernel for attention": lambda: [replace(original, fuse_attention=True)] * can_fuse,
            "recomputing activations": lambda: [replace(original, remat="blocks")] * can_recompute,
            "weights sharded over the mesh dim of the batch": lambda: (
                [original.with_sharded_weights(data, plan)] if data else _iterate_batch_dim_variants(original)
            ),
            "other layouts of what blocks return": lambda: _iterate_activation_rule_variants(
                original, blocks
            ),
            "twice as many devices": lambda: map(original.with_doubled_devices, original.mesh.dim_names),
            "half the batch": lambda: [original.with_halved_batch()],
        }
        for name, make_variants in makers.items():
            trials.add_best_variant(name, make_variants, show_progress)
        if not trials.has_fitting_variant():
            trials.try_combined_variant(show_progress)
    return trials.list_advice(), tuple(trials.untried)


class _VariantTrials:
    """Plan variants that were tried within a time limit, with their costs."""

    def __init__(self, original: PlanVariant, peak_bytes: int, compute_cost: CostFn, cost_seconds: float):
        self._original, self._peak_bytes, self._compute_cost = (original, peak_bytes, compute_cost)
        self._end, self._longest = time.process_time() + MAX_COUNTING_SECONDS, cost_seconds
        self._found: list[tuple[PlanVariant, Cost]] = []
        self.untried: list[str] = []

    def add_best_variant(
        self, name: str, make_variants: MakeVariants, show_progress: Callable[[], object]
    ) -> None:
        """Store the best of similar variants. If no time is left, add their common `name` to `untried` instead."""
        made = call_or_none(lambda: list(make_variants())) or ()
        known = [variant for variant in made if variant is not None]
        if known and not self._has_time_left():
            self.untried.append(name)
            return
        counted = [(variant, self._compute_cost_within_time(variant, show_progress)) for variant in known]
        found = [(variant, cost) for variant, cost in counted if cost is not None]
        self._found += [min(found, key=self._make_sort_key)] if found else []

    def _has_time_left(self) -> bool:
        return time.process_time() + self._longest <= self._end

    def _compute_cost_within_time(
        self, variant: PlanVariant, show_progress: Callable[[], object]
    ) -> Cost | None:
        if not self._has_time_left():
            return None
        show_progress()
        begin = time.process_time()
        with warnings.catch_warnings():
            # For example, only the variant's mesh may split heads.
            warnings.simplefilter("ignore", LayoutMapWarning)
            cost = call_or_none(lambda: self._compute_cost(variant))
        self._longest = max(self._longest, time.process_time() - begin)
        return cost

    def has_fitting_variant(self) -> bool:
        """Return whether one of the stored variants fits the memory."""
        return any(cost.fits for _, cost in self._found)

    def try_combined_variant(self, show_progress: Callable[[], object]) -> None:
        """Try a variant with all changes that save memory. Halve its batch until it fits or needs as much as before."""
        found, together = sorted(self._found, key=self._make_sort_key), self._original
        for variant, cost in found:
            is_same = variant.mesh == self._original.mesh and variant.inputs == self._original.inputs
            if is_same and cost.step.peak_bytes < self._peak_bytes:
                together = together.with_changes_between(self._original, variant)
        known, last, variant = (
            [self._original, *(variant for variant, _ in found)],
            self._peak_bytes,
            together,
        )
        while variant is not None:
            if variant not in known:
                cost = self._compute_cost_within_time(variant, show_progress)
                if cost is None or cost.step.peak_bytes >= last:
                    return
                self._found, last = [*found, (variant, cost)], cost.step.peak_bytes
                if cost.fits:
                    return
            variant = variant.with_halved_batch()

    def list_advice(self) -> tuple[Advice, ...]:
        """Return the advice, best first."""
        return tuple(
            Advice(
                *format_variant_change(self._original, variant),
                cost.step.peak_bytes,
                f"{format_duration(cost.step_seconds)} a step",
            )
            for variant, cost in sorted(self._found, key=self._make_sort_key)
        )

    def _make_sort_key(self, variant_and_cost: tuple[PlanVariant, Cost]) -> Any:
        variant, cost = variant_and_cost
        others = variant.inputs != self._original.inputs, variant.mesh != self._original.mesh
        return (not cost.fits, *others, cost.step_seconds if cost.fits else cost.step.peak_bytes)


def _iterate_batch_dim_variants(original: PlanVariant) -> Iterator[PlanVariant]:
    """Yield plan variants that shard the batch over one mesh dim."""
    for dim in original.mesh.mesh_dims:
        if dim.size > 1 and original.batch_size % dim.size == 0:
            yield replace(original, batch_dim=dim.name)


def _iterate_activation_rule_variants(
    original: PlanVariant, stacks: Sequence[BlockStack]
) -> Iterator[PlanVariant]:
    """Yield plan variants that lay out the outputs of blocks differently."""
    names = " and ".join(format_merged_paths(each.paths) for each in stacks)
    others = [
        dim.name for dim in original.mesh.mesh_dims if dim.size > 1 and dim.name != original.guessed_batch_dim
    ]
    all_mesh_roles = [
        MeshRoles(original.mesh, original.guessed_batch_dim, other) for other in others or [None]
    ]
    shapes = dict.fromkeys(each.shape for each in stacks)
    for specs in {
        s: None for shape in shapes for roles in all_mesh_roles for s in list_activation_options(shape, roles)
    }:
        rules: dict[str, Any] = {}
        for each in stacks:
            match = original.rules.activations.match(each.paths[0])
            if specs is not None and len(each.shape) == len(specs):
                rules[match.rule.pattern if match.rule else make_path_regex(each.paths)] = specs
        made = original.with_changed_rules({}, rules)
        if made.rules != original.rules:
            yield replace(made, preset=original.preset, block_names=names)
