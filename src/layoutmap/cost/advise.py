"""Count other ways to train a model with a step that does not fit, and rank them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from layoutmap.core.paths import make_path_regex, merge_paths
from layoutmap.cost.cost import Cost, format_duration
from layoutmap.cost.search.options import Grid, list_activation_options
from layoutmap.cost.search.space import Blocks
from layoutmap.plan.advice import Advice
from layoutmap.plan.table import PlanTable
from layoutmap.plan.ways import Way, describe_change, try_count_bytes
from layoutmap.scope.progress import ElapsedTime

PATIENCE_SECONDS = 20.0
"""How much time of the processor is spent on counting; all of a process, so that a busy machine advises the same."""

Count = Callable[[Way], Cost]
Ways = Callable[[], Iterable[Way | None]]


# Advice without a figure may not be enough, so each change is counted like a plan (decisions/0120).
def advise(
    before: Way,
    plan: PlanTable,
    needed: int,
    count: Count,
    *,
    blocks: Sequence[Blocks],
    can_recompute: bool,
    can_fuse: bool,
    seconds: float,
) -> tuple[tuple[Advice, ...], tuple[str, ...]]:
    """Count other ways to train a model, and return advice, best first, and the names of uncounted ways.

    Ways that fit come first, then those with the same batch, on the same devices, in less time. `seconds` is the time
    that counting `before` took, and `needed` its peak memory.
    """
    trials, data = _Trials(before, needed, count, seconds), before.data
    with ElapsedTime("counting what would fit") as shown:
        # Advise the best of similar changes.
        alike: dict[str, Ways] = {
            "a fused kernel for attention": lambda: [replace(before, fuse_attention=True)] * can_fuse,
            "recomputing activations": lambda: [replace(before, remat="blocks")] * can_recompute,
            "weights sharded over the dim of the batch": lambda: (
                [before.shard_weights(data, plan)] if data else _shard_batch(before)
            ),
            "other layouts of what blocks return": lambda: _change_activations(before, blocks),
            "twice as many devices": lambda: map(before.doubled, before.mesh.dim_names),
            "half the batch": lambda: [before.halve_batch()],
        }
        for name, ways in alike.items():
            trials.add_best(name, ways, shown)
        if not trials.can_any_fit():
            trials.count_combination(shown)
    return trials.list_advice(), tuple(trials.untried)


class _Trials:
    """Other ways to train that were counted within a time limit."""

    def __init__(self, before: Way, needed: int, count: Count, seconds: float):
        self._before, self._needed, self._count = before, needed, count
        self._end, self._longest = time.process_time() + PATIENCE_SECONDS, seconds
        self._found: list[tuple[Way, Cost]] = []
        self.untried: list[str] = []

    def add_best(self, name: str, ways: Ways, shown: Callable[[], object]) -> None:
        """Count similar ways and store the best of them."""
        known = [way for way in try_count_bytes(lambda: list(ways())) or () if way is not None]
        if known and not self._has_time():
            self.untried.append(name)
            return
        counted = [(way, self._count_way(way, shown)) for way in known]
        found = [(way, cost) for way, cost in counted if cost is not None]
        self._found += [min(found, key=self._rank)] if found else []

    def _has_time(self) -> bool:
        return time.process_time() + self._longest <= self._end

    def _count_way(self, way: Way, shown: Callable[[], object]) -> Cost | None:
        if not self._has_time():
            return None
        shown()
        begin = time.process_time()
        cost = try_count_bytes(lambda: self._count(way))
        self._longest = max(self._longest, time.process_time() - begin)
        return cost

    def can_any_fit(self) -> bool:
        """Return whether one of the counted ways fits."""
        return any(cost.fits for _, cost in self._found)

    def count_combination(self, shown: Callable[[], object]) -> None:
        """Count all changes that save memory together, then halve the batch until the step fits."""
        found, together = sorted(self._found, key=self._rank), self._before
        for way, cost in found:
            is_same = way.mesh == self._before.mesh and way.inputs == self._before.inputs
            if is_same and cost.step.peak_bytes < self._needed:
                together = together.joined(self._before, way)
        known, last, way = [self._before, *(way for way, _ in found)], self._needed, together
        while way is not None:
            if way not in known:
                cost = self._count_way(way, shown)
                if cost is None or cost.step.peak_bytes >= last:
                    return
                self._found, last = [*found, (way, cost)], cost.step.peak_bytes
                if cost.fits:
                    return
            way = way.halve_batch()

    def list_advice(self) -> tuple[Advice, ...]:
        """Return the advice, best first."""
        return tuple(
            Advice(
                *describe_change(self._before, way),
                cost.step.peak_bytes,
                f"{format_duration(cost.step_seconds)} a step",
            )
            for way, cost in sorted(self._found, key=self._rank)
        )

    def _rank(self, found: tuple[Way, Cost]) -> Any:
        way, cost = found
        others = way.inputs != self._before.inputs, way.mesh != self._before.mesh
        return (not cost.fits, *others, cost.step_seconds if cost.fits else cost.step.peak_bytes)


def _shard_batch(before: Way) -> Iterator[Way]:
    """Yield plan variants that shard the batch over one mesh dim."""
    for dim in before.mesh.mesh_dims:
        if dim.size > 1 and before.batch_size % dim.size == 0:
            yield replace(before, batch_dim=dim.name)


def _change_activations(before: Way, blocks: Sequence[Blocks]) -> Iterator[Way]:
    """Yield ways with other rules for the outputs of blocks."""
    names = " and ".join(merge_paths(each.paths) for each in blocks)
    others = [dim.name for dim in before.mesh.mesh_dims if dim.size > 1 and dim.name != before.data]
    grids = [Grid(before.mesh, before.data, other) for other in others or [None]]
    shapes = dict.fromkeys(each.shape for each in blocks)
    for specs in {
        s: None for shape in shapes for grid in grids for s in list_activation_options(shape, grid)
    }:
        rules: dict[str, Any] = {}
        for each in blocks:
            match = before.rules.activations.match(each.paths[0])
            if specs is not None and len(each.shape) == len(specs):
                rules[match.rule.pattern if match.rule else make_path_regex(each.paths)] = specs
        made = before.change_rules({}, rules)
        if made.rules != before.rules:
            yield replace(made, preset=before.preset, blocks=names)
