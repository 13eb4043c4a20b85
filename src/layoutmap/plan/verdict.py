"""The verdict on a plan: one answer, worked out here alone, for the page, the terminal, JSON and the exit code.

What it goes by is in the plan: see docs/decisions/0120.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from layoutmap.core.errors import aligned, counted
from layoutmap.core.escaping import escaped
from layoutmap.core.paths import starred
from layoutmap.core.text_table import size
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.plan.advice import Advice
from layoutmap.plan.completeness import NOT_BUILT, what_is_missing
from layoutmap.plan.memory import memory_of
from layoutmap.plan.planner import make_table
from layoutmap.plan.table import PlanTable
from layoutmap.plan.ways import Way, needs_of, typed, way_of

_MOST_ADVICE = 6
_MOST_CAUSES = 10
_LEAST_SHARE = 0.01  # of what is needed: what saves less changes nothing


@dataclass(frozen=True, slots=True)
class Cause:
    """A group of tensors that takes memory of a device at the moment that decides.

    Args:
        what: What it is, as in `"weights"` or `"gathered weights"`.
        path: The weight or the layer that it is of, with `*` for the number of repeated blocks; empty: of several.
        shape: Type and shape of one of its tensors on a device, as in `"bfloat16[512, 128]"`.
        num_bytes: Bytes that each device holds of it, of all repeated blocks.
    """

    what: str
    path: str
    shape: str
    num_bytes: int

    @property
    def text(self) -> str:
        """The group in words, without its bytes."""
        return " ".join(filter(None, (self.what, escaped(self.path), self.shape)))

    def __str__(self) -> str:
        return f"{self.text}  {size(self.num_bytes)}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a model can be built as planned, and whether it fits its devices.

    Args:
        num_errors: Problems with which the model cannot be built.
        num_warnings: Problems that `strict` counts as errors.
        strict: Whether they count so.
        missing: What the plan lacks of the model; empty: it is complete.
        fits: Whether a device has the memory; `None`: that is not known.
        needed_bytes: What a device holds, as far as it is planned.
        available_bytes: The memory of a device; `None`: nobody has said.
        moment: When it holds that.
        because: What it holds then, the largest first.
        advice: What would take less, counted, best first; empty where it fits.
        untried: What was not counted, since it takes too long, in words.
    """

    num_errors: int
    num_warnings: int
    strict: bool
    missing: str
    fits: bool | None
    needed_bytes: int
    available_bytes: int | None
    moment: Literal["at the peak of a step", "before activations"]
    because: tuple[Cause, ...]
    advice: tuple[Advice, ...]
    untried: tuple[str, ...] = ()

    @property
    def passes(self) -> bool:
        """Whether there is nothing for which the exit code is 1."""
        return not (self.num_errors or (self.strict and self.num_warnings) or self.fits is False)

    @property
    def is_so_far(self) -> bool:
        """Whether the bytes are those of a part of the model: with the rest, it needs more."""
        return bool(self.num_errors or self.missing)

    @property
    def mood(self) -> Literal["well", "doubt", "bad"]:
        """How a page shows it: `"bad"` exactly if it does not pass."""
        doubt = self.missing or self.num_warnings
        return "bad" if not self.passes else "doubt" if doubt else "well"

    @property
    def headline(self) -> str:
        """The verdict in one line, the worst first."""
        errors = f"cannot be built: {counted(self.num_errors, 'error')}"
        warnings = counted(self.num_warnings, "warning") + self.strict * ", which strict counts as errors"
        known = [
            (self.num_errors, errors),
            (self.missing, f"incomplete: {self.missing}"),
            (self.fits is False, self._memory),
            (self.num_warnings and self.strict, warnings),
            (self.mood == "well" and self.fits is None, "no problems"),
            (self.fits is not False, self._memory),
            (self.num_warnings and not self.strict, warnings),
        ]
        return "; ".join(text for is_so, text in known if is_so)

    @property
    def _memory(self) -> str:
        there, so_far = self.available_bytes, self.is_so_far
        if there is None:
            return f"{size(self.needed_bytes)} per device{so_far * ' so far'}, {self.moment}"
        sizes = f"{size(self.needed_bytes)} of {size(there)} per device"
        if self.fits and self.moment == "before activations":
            return f"fits: {sizes}, and {size(there - self.needed_bytes)} are left for activations"
        start = "does not fit: " if self.fits is False else "fits: " if self.fits else ""
        return f"{start}{sizes}{so_far * ' so far'}, {self.moment}"

    def text(self, **typed: Any) -> str:
        """The group in words, without its bytes."""
        if self.fits is not False:
            return f"Verdict: {self.headline}"
        there = self.available_bytes or 0
        rows = [
            ("because of", "\n".join(text_rows(self.because))),
            ("try", "\n".join(a.text(there, **typed) for a in self.advice)),
            ("not tried", f"{', '.join(self.untried)}: counting that takes too long" if self.untried else ""),
        ]
        return aligned(f"Verdict: {self.headline}", [row for row in rows if row[1]])

    def __str__(self) -> str:
        return self.text()


def text_rows(causes: Sequence[Cause]) -> list[str]:
    """Causes in lines, their bytes in a column before them."""
    sizes = [size(cause.num_bytes) for cause in causes]
    width = max(map(len, sizes), default=0)
    return [f"{num_bytes:>{width}}  {cause.text}" for num_bytes, cause in zip(sizes, causes, strict=True)]


def verdict_of(plan: PlanTable) -> Verdict:
    """Judge a plan by the memory of a device, as far as that is known, and by its problems."""
    memory, cost, missing = memory_of(plan), plan.cost, what_is_missing(plan)
    needed = cost.peak_bytes if cost else memory.total
    there = cost.memory_bytes if cost else plan.device_memory
    is_known = there is not None and (needed > there or not (plan.errors or missing))
    fits = needed <= there if there is not None and is_known else None
    return Verdict(
        len(plan.errors),
        sum(problem.kind != NOT_BUILT for problem in plan.warnings),
        plan.strict,
        escaped(missing.what) if missing else "",
        fits,
        needed,
        there,
        "at the peak of a step" if cost else "before activations",
        _causes(plan, needed),
        _best(plan, needed, there) if there is not None and fits is False else (),
        cost.untried if cost and fits is False else (),
    )


def _causes(plan: PlanTable, peak: int) -> tuple[Cause, ...]:
    """The groups of tensors on a device, the largest first, those of repeated blocks as one, and the rest."""
    held = plan.cost.held if plan.cost else ()
    found: dict[tuple[str, str, str], int] = {}
    for kind, path, shape, num_bytes in [
        *_given(plan),
        *((h.kind, h.path, f"{h.dtype}{list(h.shape)}", h.num_bytes) for h in held),
    ]:
        found[kind, path, shape] = found.get((kind, path, shape), 0) + num_bytes
    causes = [
        Cause(kind, path, shape, num_bytes) for (kind, path, shape), num_bytes in found.items() if num_bytes
    ]
    causes.sort(key=lambda cause: -cause.num_bytes)
    rest = peak - sum(cause.num_bytes for cause in causes[:_MOST_CAUSES])
    name = (
        "all else" if held or plan.cost is None else "activations, gradients, the batch and gathered weights"
    )
    others = [Cause(name, "", "", rest)] if rest > 0 and causes else []
    return (*causes[:_MOST_CAUSES], *others)


def _given(plan: PlanTable) -> Iterator[tuple[str, str, str, int]]:
    """The variables, and without a counted step their gradients: kind, path, shape on a device, bytes."""
    for a in plan.assignments:
        v = a.variable
        if not a.fits:
            continue
        kind = "optimizer slots" if v.kind is Kind.SLOT else "weights" if v.is_trained else "state"
        path, shape = (
            starred(v.parent or v.path if v.kind is Kind.SLOT else v.path),
            f"{v.dtype}{list(a.shard_shape)}",
        )
        yield kind, path, shape, a.shard_bytes
        if v.is_trained and plan.cost is None:
            yield "gradients", path, shape, a.shard_bytes


def _best(plan: PlanTable, needed: int, there: int) -> tuple[Advice, ...]:
    """Return the counted advice that saves memory, that which fits first; in each half the order is kept."""
    tried = plan.cost.tried if plan.cost else _planned(plan, needed, there)
    helps = [each for each in tried if each.needed_bytes <= (1 - _LEAST_SHARE) * needed]
    return tuple(sorted(helps, key=lambda each: each.needed_bytes > there)[:_MOST_ADVICE])


def _planned(plan: PlanTable, needed: int, there: int) -> tuple[Advice, ...]:
    """Return advice for a plan without a counted step: its variables are planned again in each other way."""
    counts = _alike(plan)
    before = way_of(plan)

    def needs(way: Way) -> int:
        variables = [replace(v, dtype=way.dtype) if way.dtype and _is_made(v) else v for v in counts]
        table = make_table(variables, way.rules, complete=False).check()
        found = zip(table.assignments, counts.values(), strict=True)
        return sum(a.shard_bytes * (1 + a.variable.is_trained) * number for a, number in found)

    if needs_of(lambda: needs(before)) != needed:  # a layout follows from more than the rules
        return ()
    dims = plan.mesh.dim_names
    sharded = [way for dim in dims if plan.mesh.dim_size(dim) > 1 and (way := before.sharded_over(dim, plan))]
    narrow = [replace(before, dtype="bfloat16")] * any(map(_is_made, counts))
    found: list[tuple[int, Way]] = []
    together = (way.doubled(dim) for way in sharded for dim in dims)
    for ways in (sharded, [before.doubled(dim) for dim in dims], together, narrow):
        if ways is together and any(n <= there for n, _ in found):
            continue
        # Of several that are the same but for a dim, the best one.
        known = [(n, way) for way in ways if (n := needs_of(lambda way=way: needs(way))) is not None]
        found += [min(known, key=lambda each: each[0])] if known else []
    return tuple(Advice(*typed(before, way), needed_bytes=n) for n, way in found)


def _is_made(v: VariableSpec) -> bool:
    """Whether it is of float32, and a layer of bfloat16 would make it in that."""
    return v.dtype == "float32" and (v.is_trained or (v.kind is Kind.SLOT and v.parent is not None))


def _alike(plan: PlanTable) -> dict[VariableSpec, int]:
    """One of each sort of variables that are planned alike, and how many of them there are."""
    first: dict[object, VariableSpec] = {}
    counts: dict[VariableSpec, int] = {}
    for a in plan.assignments:
        v, rule = a.variable, a.match and a.match.rule
        key = (
            v.model,
            starred(v.path),
            v.shape,
            v.dtype,
            v.kind,
            rule and rule.number,
            a.layout.sharding_specs,
        )
        one = first.setdefault(key, v)
        counts[one] = counts.get(one, 0) + 1
    return counts
