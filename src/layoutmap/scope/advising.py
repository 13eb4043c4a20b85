"""Other ways to train a model whose step does not fit: each is counted, the best first."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from layoutmap.core.paths import merge_paths, path_regex
from layoutmap.cost.advice import Advice
from layoutmap.cost.cost import Cost, duration
from layoutmap.plan.table import PlanTable
from layoutmap.plan.ways import Way, needs_of, typed
from layoutmap.scope.progress import Waiting
from layoutmap.searching.options import activation_options, grid_of
from layoutmap.searching.space import Blocks

PATIENCE_SECONDS = 20.0
"""How long ways are counted at most, if none of them takes longer by itself."""

Count = Callable[[Way], Cost]


def advise(
    before: Way,
    plan: PlanTable,
    count: Count,
    *,
    blocks: Iterable[Blocks],
    can_recompute: bool,
    can_fuse: bool,
    seconds: float,
) -> tuple[tuple[Advice, ...], tuple[str, ...]]:
    """Count other ways to train a model.

    Args:
        before: The way that does not fit.
        plan: Its plan.
        count: Returns what a step costs in a way.
        blocks: The layers between which activations pass.
        can_recompute: Whether activations of blocks could be computed again in the backward pass.
        can_fuse: Whether attention could be one fused kernel.
        seconds: How long counting one took.

    Returns:
        Advice, best first: what fits before what does not, with the same batch, on the same devices, in less time; and
        what was not counted, for lack of time.
    """
    trials = _Trials(before, count, seconds)
    fused = replace(before, fuse_attention=True) if can_fuse else None
    recomputed = replace(before, remat="blocks") if can_recompute else None
    data = before.data
    with Waiting("counting what would fit") as shown:
        for ways in (
            [fused],
            [recomputed],
            [before.sharded_over(data, plan)] if data else _over_batch(before),
            _activations(before, blocks),
            [before.doubled(dim) for dim in _growing(before)],
            [before.halved()],
        ):
            trials.add_best(ways, shown)
        if not trials.fits():  # what saves, together
            trials.add_together(shown)
    return trials.advice(), tuple(trials.untried)


class _Trials:
    def __init__(self, before: Way, count: Count, seconds: float):
        self._before, self._count = before, count
        self._end, self._longest = time.monotonic() + PATIENCE_SECONDS, seconds
        self._found: list[tuple[Way, Cost]] = []
        self.untried: list[str] = []

    def add_best(self, ways: Iterable[Way | None], shown: Callable[[], object]) -> None:
        """Count ways that differ in little, and keep the best of them."""
        known = [(way, cost) for way in ways if way and (cost := self._counted(way, shown))]
        if known:
            self._found.append(min(known, key=self._rank))

    def _counted(self, way: Way, shown: Callable[[], object]) -> Cost | None:
        begin = time.monotonic()
        if begin + self._longest > self._end:
            self.untried.append(typed(self._before, way)[0])
            return None
        shown()
        cost = needs_of(way, self._count)
        self._longest = max(self._longest, time.monotonic() - begin)
        return cost

    def fits(self) -> bool:
        """Whether one fits."""
        return any(cost.fits for _, cost in self._found)

    def add_together(self, shown: Callable[[], object]) -> None:
        """Count all at once that save something on the same machine with the same batch; then with half the batch."""
        together, same = self._before, []
        for way, cost in sorted(self._found, key=self._rank):
            if way.mesh == self._before.mesh and way.inputs == self._before.inputs:
                together = _joined(together, self._before, way)
                same.append(cost)
        way: Way | None = together if len(same) > 1 else together.halved()
        while way is not None and not self.fits():
            number = len(self._found)
            self.add_best([way], shown)
            if len(self._found) == number:
                return
            way = way.halved()

    def advice(self) -> tuple[Advice, ...]:
        """What was found, the best first."""
        return tuple(
            Advice(
                *typed(self._before, way),
                needed_bytes=cost.step.peak_bytes,
                step=f"{duration(cost.step_seconds)} a step",
            )
            for way, cost in sorted(self._found, key=self._rank)
        )

    def _rank(self, found: tuple[Way, Cost]) -> tuple[bool, bool, bool, float]:
        way, cost = found
        others = way.inputs != self._before.inputs, way.mesh != self._before.mesh
        return not cost.fits, *others, cost.step_seconds if cost.fits else cost.step.peak_bytes


def _joined(way: Way, before: Way, other: Way) -> Way:
    """A way with what another one changes."""
    changed = {
        name: getattr(other, name)
        for name in ("fuse_attention", "remat", "batch_dim")
        if getattr(other, name) != getattr(before, name)
    }
    if other.rules == before.rules:
        return replace(way, **changed)
    if way.rules == before.rules:
        return replace(way, rules=other.rules, preset=other.preset, **changed)
    return replace(way, **changed)


def _growing(way: Way) -> Iterator[str]:
    """The dims along which there could be more devices."""
    sizes = {dim.name: dim.size for dim in way.mesh.mesh_dims}
    yield from sorted(sizes, key=lambda dim: (dim != way.data, sizes[dim] == 1))


def _over_batch(before: Way) -> Iterator[Way]:
    """Ways with the batch sharded, which is not."""
    for dim in before.mesh.mesh_dims:
        if dim.size > 1 and before.batch_size % dim.size == 0:
            yield replace(before, batch_dim=dim.name)


def _activations(before: Way, blocks: Iterable[Blocks]) -> Iterator[Way]:
    """Ways with other rules for what blocks return."""
    every = list(blocks)
    for first in every[:1]:
        for specs in activation_options(first.shape, grid_of(before.mesh, before.data)):
            if specs is None:
                continue
            changed: dict[str, object] = {}
            for each in every:
                match = before.rules.activations.match(each.paths[0])
                pattern = match.rule.pattern if match.rule else path_regex(each.paths)
                if len(each.shape) == len(specs):
                    changed[pattern] = specs
            names = " and ".join(merge_paths(each.paths) for each in every)
            made = needs_of(before, functools.partial(Way.with_rules, rules={}, activations=changed))
            if made is not None and made.rules != before.rules:
                yield replace(made, blocks=names, preset=before.preset)
