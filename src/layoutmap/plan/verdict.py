"""Judge a plan in one place, for the page, the terminal, JSON, and the exit code.

What it goes by is in the plan: see docs/decisions/0120.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from layoutmap.core.errors import align_rows, format_count
from layoutmap.core.escaping import escape_text
from layoutmap.core.paths import replace_numbers
from layoutmap.core.text_table import format_bytes
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.plan.advice import Advice
from layoutmap.plan.completeness import NOT_BUILT, find_missing_weights
from layoutmap.plan.memory import count_memory
from layoutmap.plan.planner import make_table
from layoutmap.plan.table import PlanTable
from layoutmap.plan.ways import Way, describe_change, read_way, try_count_bytes

_MOST_ADVICE = 6
_MOST_CAUSES = 10
_LEAST_SHARE = 0.01  # smallest saving to report, as a share of the needed memory


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
        return " ".join(filter(None, (self.what, escape_text(self.path), self.shape)))

    def __str__(self) -> str:
        return f"{self.text}  {format_bytes(self.num_bytes)}"


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
        errors = f"cannot be built: {format_count(self.num_errors, 'error')}"
        warnings = (
            format_count(self.num_warnings, "warning") + self.strict * ", which strict counts as errors"
        )
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
            return f"{format_bytes(self.needed_bytes)} per device{so_far * ' so far'}, {self.moment}"
        sizes = f"{format_bytes(self.needed_bytes)} of {format_bytes(there)} per device"
        if self.fits and self.moment == "before activations":
            return f"fits: {sizes}, and {format_bytes(there - self.needed_bytes)} are left for activations"
        start = "does not fit: " if self.fits is False else "fits: " if self.fits else ""
        return f"{start}{sizes}{so_far * ' so far'}, {self.moment}"

    def text(self, **typed: Any) -> str:
        """Return the verdict with the causes and the advice below it."""
        if self.fits is not False:
            return f"Verdict: {self.headline}"
        there = self.available_bytes or 0
        rows = [
            ("because of", "\n".join(format_causes(self.because))),
            ("try", "\n".join(a.text(there, **typed) for a in self.advice)),
            ("not tried", f"{', '.join(self.untried)}: counting that takes too long" if self.untried else ""),
        ]
        return align_rows(f"Verdict: {self.headline}", [row for row in rows if row[1]])

    def __str__(self) -> str:
        return self.text()


def format_causes(causes: Sequence[Cause]) -> list[str]:
    """Return one line per cause, with the bytes in a column before the text."""
    sizes = [format_bytes(cause.num_bytes) for cause in causes]
    width = max(map(len, sizes), default=0)
    return [f"{num_bytes:>{width}}  {cause.text}" for num_bytes, cause in zip(sizes, causes, strict=True)]


def judge_plan(plan: PlanTable) -> Verdict:
    """Judge a plan by a device's memory, if that is known, and by the plan's problems."""
    memory, cost, missing = count_memory(plan), plan.cost, find_missing_weights(plan)
    needed = cost.peak_bytes if cost else memory.total
    there = cost.memory_bytes if cost else plan.device_memory
    is_known = there is not None and (needed > there or not (plan.errors or missing))
    fits = needed <= there if there is not None and is_known else None
    return Verdict(
        len(plan.errors),
        sum(problem.kind != NOT_BUILT for problem in plan.warnings),
        plan.strict,
        escape_text(missing.what) if missing else "",
        fits,
        needed,
        there,
        "at the peak of a step" if cost else "before activations",
        _collect_causes(plan, needed),
        _choose_advice(plan, needed, there) if there is not None and fits is False else (),
        cost.untried if cost and fits is False else (),
    )


def _collect_causes(plan: PlanTable, peak: int) -> tuple[Cause, ...]:
    """Return the groups of tensors on a device, largest first, repeated blocks merged, and the rest as one."""
    held = plan.cost.held if plan.cost else ()
    found: dict[tuple[str, str, str], int] = {}
    for kind, path, shape, num_bytes in [
        *_iterate_variables(plan),
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


def _iterate_variables(plan: PlanTable) -> Iterator[tuple[str, str, str, int]]:
    """Yield the kind, path, shard shape, and bytes of each variable, and of gradients if no step is counted."""
    for a in plan.assignments:
        v = a.variable
        if not a.fits:
            continue
        kind = "optimizer slots" if v.kind is Kind.SLOT else "weights" if v.is_trained else "state"
        path, shape = (
            replace_numbers(v.parent or v.path if v.kind is Kind.SLOT else v.path),
            f"{v.dtype}{list(a.shard_shape)}",
        )
        if not a.layout.host_memory:
            yield kind, path, shape, a.shard_bytes
        if v.is_trained and plan.cost is None:
            yield "gradients", path, shape, a.shard_bytes


def _choose_advice(plan: PlanTable, needed: int, there: int) -> tuple[Advice, ...]:
    """Return the counted advice that saves memory, with the advice that fits first."""
    tried = plan.cost.tried if plan.cost else _plan_alternatives(plan, needed, there)
    helps = [each for each in tried if each.needed_bytes <= (1 - _LEAST_SHARE) * needed]
    return tuple(sorted(helps, key=lambda each: each.needed_bytes > there)[:_MOST_ADVICE])


def _plan_alternatives(plan: PlanTable, needed: int, there: int) -> tuple[Advice, ...]:
    """Return advice for a plan without a step cost, by planning its variables again with other options."""
    counts = _count_similar(plan)
    before = read_way(plan)

    def count_bytes(way: Way) -> int:
        variables = [replace(v, dtype=way.dtype) if way.dtype and _can_use_bfloat16(v) else v for v in counts]
        table = make_table(variables, way.rules, complete=False).check()
        found = zip(table.assignments, counts.values(), strict=True)
        return sum((a.device_bytes + a.shard_bytes * a.variable.is_trained) * number for a, number in found)

    # The memory does not follow from the rules alone.
    if try_count_bytes(lambda: count_bytes(before)) != needed:
        return ()
    dims = plan.mesh.dim_names
    sharded = [
        way for dim in dims if plan.mesh.dim_size(dim) > 1 and (way := before.shard_weights(dim, plan))
    ]
    narrow = [replace(before, dtype="bfloat16")] * any(map(_can_use_bfloat16, counts))
    found: list[tuple[int, Way]] = []
    together = (way.doubled(dim) for way in sharded for dim in dims)
    for ways in (sharded, [before.doubled(dim) for dim in dims], together, narrow):
        if ways is together and any(n <= there for n, _ in found):
            continue
        # Keep the best of several options that differ only in the mesh dim.
        known = [
            (n, way) for way in ways if (n := try_count_bytes(lambda way=way: count_bytes(way))) is not None
        ]
        found += [min(known, key=lambda each: each[0])] if known else []
    return tuple(Advice(*describe_change(before, way), needed_bytes=n) for n, way in found)


def _can_use_bfloat16(v: VariableSpec) -> bool:
    """Return whether a float32 variable would be bfloat16 in a model with bfloat16 layers."""
    return v.dtype == "float32" and (v.is_trained or (v.kind is Kind.SLOT and v.parent is not None))


def _count_similar(plan: PlanTable) -> dict[VariableSpec, int]:
    """Return one of each group of variables that are planned alike, with the size of the group."""
    first: dict[object, VariableSpec] = {}
    counts: dict[VariableSpec, int] = {}
    for a in plan.assignments:
        v, rule = a.variable, a.match and a.match.rule
        key = (
            v.model,
            replace_numbers(v.path),
            v.shape,
            v.dtype,
            v.kind,
            rule and rule.number,
            a.layout.sharding_specs,
            a.layout.host_memory,
        )
        one = first.setdefault(key, v)
        counts[one] = counts.get(one, 0) + 1
    return counts
