"""Judge a plan in one place: whether the model can be built, and whether it fits the memory of its devices.

The page, the terminal, JSON, and the exit code show this verdict. It follows from the plan alone (decisions/0120).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from layoutmap.core.errors import format_aligned_rows, format_count
from layoutmap.core.escaping import escape_text
from layoutmap.core.paths import replace_numbers_with_stars
from layoutmap.core.text_table import format_bytes
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.plan.advice import Advice
from layoutmap.plan.completeness import NOT_BUILT, find_unbuilt_layers_problem
from layoutmap.plan.lint import Findings
from layoutmap.plan.memory import count_memory_by_purpose
from layoutmap.plan.planner import make_plan_table
from layoutmap.plan.table import PlanTable
from layoutmap.plan.variants import (
    PlanVariant,
    call_or_none,
    extract_variant_from_plan,
    format_variant_change,
)

_MAX_ADVICE = 6
_MAX_MEMORY_GROUPS = 10
_MIN_SAVED_SHARE = 0.01  # advice that saves a smaller share of the needed memory is left out


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A group of tensors on a device at the time when the device needs most memory.

    Args:
        what: The kind of tensors, such as `"weights"` or `"gathered weights"`.
        path: The path of their weight or layer, with `*` for the numbers of repeated blocks; empty: of several.
        shape: The dtype and shape of one of the tensors on a device, such as `"bfloat16[512, 128]"`.
        num_bytes: The memory that the tensors of all repeated blocks take on each device.
    """

    what: str
    path: str
    shape: str
    num_bytes: int

    @property
    def text(self) -> str:
        """The kind, path, and shape of the tensors as text, without the bytes."""
        return " ".join(filter(None, (self.what, escape_text(self.path), self.shape)))

    def __str__(self) -> str:
        return f"{self.text}  {format_bytes(self.num_bytes)}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a model can be built as planned, and whether it fits its devices.

    Args:
        num_errors: The number of problems with which the model cannot be built.
        num_warnings: The number of problems that `strict` counts as errors.
        strict: Whether warnings count as errors.
        missing: The variables that the plan lacks, in words; empty: it is complete.
        fits: Whether a device has enough memory; `None`: unknown.
        needed_bytes: The memory that a device needs for the planned variables.
        available_bytes: The memory of a device; `None`: unknown.
        moment: The time at which a device needs `needed_bytes`.
        because: The tensors on a device at that time, the largest first.
        advice: Changes with which a device needs less memory, the best first; empty if the model fits.
        untried: Changes whose memory was not computed, because that takes too long, in words.
        num_findings: The number of findings of lint, if lint was asked.
        num_unchecked: The number of sharded weights that lint could not check, if lint was asked.
    """

    num_errors: int
    num_warnings: int
    strict: bool
    missing: str
    fits: bool | None
    needed_bytes: int
    available_bytes: int | None
    moment: Literal["at the peak of a step", "before activations"]
    because: tuple[MemoryGroup, ...]
    advice: tuple[Advice, ...]
    untried: tuple[str, ...] = ()
    num_findings: int = 0
    num_unchecked: int = 0

    def add_findings(self, findings: Findings) -> Verdict:
        """Return the verdict with the number of findings of lint, and of the weights that lint could not check."""
        return replace(self, num_findings=len(findings), num_unchecked=len(findings.unchecked_paths))

    @property
    def passes(self) -> bool:
        """Whether the exit code of a command is 0: no errors, no warnings under `strict`, and not too little memory."""
        return not (self.num_errors or (self.strict and self.num_warnings) or self.fits is False)

    @property
    def is_lower_bound(self) -> bool:
        """Whether `needed_bytes` is too low, because variables with errors or missing variables are not counted."""
        return bool(self.num_errors or self.missing)

    @property
    def color_class(self) -> Literal["well", "doubt", "bad"]:
        """The color class of the verdict on a page. It is `"bad"` exactly if the verdict does not pass."""
        doubt = self.missing or self.num_warnings
        return "bad" if not self.passes else "doubt" if doubt else "well"

    @property
    def headline(self) -> str:
        """The verdict in one line, with the worst finding first."""
        errors = f"cannot be built: {format_count(self.num_errors, 'error')}"
        warnings = (
            format_count(self.num_warnings, "warning") + self.strict * ", which strict counts as errors"
        )
        findings = f", {format_count(self.num_findings, 'finding')} of lint" if self.num_findings else ""
        if self.num_unchecked:
            findings += f", {format_count(self.num_unchecked, 'sharded weight')} not checked"
        texts = [
            (self.num_errors, errors),
            (self.missing, f"incomplete: {self.missing}"),
            (self.fits is False, self._memory_summary),
            (self.num_warnings and self.strict, warnings),
            (self.color_class == "well" and self.fits is None, f"no problems{findings}"),
            (self.fits is not False, self._memory_summary),
            (self.num_warnings and not self.strict, warnings),
        ]
        return "; ".join(text for is_shown, text in texts if is_shown)

    @property
    def _memory_summary(self) -> str:
        available_bytes, so_far = self.available_bytes, self.is_lower_bound
        if available_bytes is None:
            return f"{format_bytes(self.needed_bytes)} per device{so_far * ' so far'}, {self.moment}"
        sizes = f"{format_bytes(self.needed_bytes)} of {format_bytes(available_bytes)} per device"
        if self.fits and self.moment == "before activations":
            return f"fits: {sizes}, and {format_bytes(available_bytes - self.needed_bytes)} are left for activations"
        start = "does not fit: " if self.fits is False else "fits: " if self.fits else ""
        return f"{start}{sizes}{so_far * ' so far'}, {self.moment}"

    def format_text(self, **options: Any) -> str:
        """Return the verdict, with the largest tensors and advice (`Advice.format_text`) if the model does not fit."""
        if self.fits is not False:
            return f"Verdict: {self.headline}"
        available_bytes = self.available_bytes or 0
        rows = [
            ("because of", "\n".join(format_memory_groups(self.because))),
            ("try", "\n".join(a.format_text(available_bytes, **options) for a in self.advice)),
            ("not tried", f"{', '.join(self.untried)}: counting that takes too long" if self.untried else ""),
        ]
        return format_aligned_rows(f"Verdict: {self.headline}", [row for row in rows if row[1]])

    def __str__(self) -> str:
        return self.format_text()


def format_memory_groups(groups: Sequence[MemoryGroup]) -> list[str]:
    """Return a line of text for each group, with the bytes in a column before the text."""
    sizes = [format_bytes(group.num_bytes) for group in groups]
    width = max(map(len, sizes), default=0)
    return [f"{num_bytes:>{width}}  {group.text}" for num_bytes, group in zip(sizes, groups, strict=True)]


def judge_plan(plan: PlanTable) -> Verdict:
    """Return the verdict on a plan: whether the model can be built, and whether it fits its devices, if known."""
    memory, cost, missing = count_memory_by_purpose(plan), plan.cost, find_unbuilt_layers_problem(plan)
    needed = cost.peak_bytes if cost else memory.total
    available_bytes = cost.memory_bytes if cost else plan.device_memory
    is_known = available_bytes is not None and (needed > available_bytes or not (plan.errors or missing))
    fits = needed <= available_bytes if available_bytes is not None and is_known else None
    return Verdict(
        len(plan.errors),
        sum(problem.kind != NOT_BUILT for problem in plan.warnings),
        plan.strict,
        escape_text(missing.what) if missing else "",
        fits,
        needed,
        available_bytes,
        "at the peak of a step" if cost else "before activations",
        _list_largest_memory_groups(plan, needed),
        _choose_advice(plan, needed, available_bytes)
        if available_bytes is not None and fits is False
        else (),
        cost.untried if cost and fits is False else (),
    )


def _list_largest_memory_groups(plan: PlanTable, peak_bytes: int) -> tuple[MemoryGroup, ...]:
    """Return the largest groups of tensors on a device, with repeated blocks merged, and one group for the rest."""
    tensors = plan.cost.peak_tensors if plan.cost else ()
    found: dict[tuple[str, str, str], int] = {}
    for kind, path, shape, num_bytes in [
        *_iterate_variable_sizes(plan),
        *((t.kind, t.path, f"{t.dtype}{list(t.shape)}", t.num_bytes) for t in tensors),
    ]:
        found[kind, path, shape] = found.get((kind, path, shape), 0) + num_bytes
    groups = [MemoryGroup(*key, num_bytes) for key, num_bytes in found.items() if num_bytes]
    groups.sort(key=lambda group: -group.num_bytes)
    rest = peak_bytes - sum(group.num_bytes for group in groups[:_MAX_MEMORY_GROUPS])
    name = (
        "all else"
        if tensors or plan.cost is None
        else "activations, gradients, the batch and gathered weights"
    )
    others = [MemoryGroup(name, "", "", rest)] if rest > 0 and groups else []
    return (*groups[:_MAX_MEMORY_GROUPS], *others)


def _iterate_variable_sizes(plan: PlanTable) -> Iterator[tuple[str, str, str, int]]:
    """Yield the kind, path, dtype with shard shape, and bytes of each variable in device memory.

    For a plan without the cost of a step, also yield those of each gradient.
    """
    for a in plan.assignments:
        v = a.variable
        if not a.fits:
            continue
        kind = "optimizer slots" if v.kind is Kind.SLOT else "weights" if v.is_trained else "state"
        path, shape = (
            replace_numbers_with_stars(v.parent or v.path if v.kind is Kind.SLOT else v.path),
            f"{v.dtype}{list(a.shard_shape)}",
        )
        if not a.layout.host_memory:
            yield kind, path, shape, a.shard_bytes
        if v.is_trained and plan.cost is None:
            yield "gradients", path, shape, a.shard_bytes


def _choose_advice(plan: PlanTable, needed_bytes: int, available_bytes: int) -> tuple[Advice, ...]:
    """Return the changes of the plan that save memory. Changes with which the model fits come first."""
    tried = (
        plan.cost.tried
        if plan.cost
        else _make_advice_for_plan_without_cost(plan, needed_bytes, available_bytes)
    )
    helps = [each for each in tried if each.needed_bytes <= (1 - _MIN_SAVED_SHARE) * needed_bytes]
    return tuple(sorted(helps, key=lambda each: each.needed_bytes > available_bytes)[:_MAX_ADVICE])


def _make_advice_for_plan_without_cost(
    plan: PlanTable, needed_bytes: int, available_bytes: int
) -> tuple[Advice, ...]:
    """Return advice for a plan without a step cost, by the bytes of variables and gradients in variants of the plan."""
    counts = _count_similar_variables(plan)
    before = extract_variant_from_plan(plan)

    def count_device_bytes(variant: PlanVariant) -> int:
        variables = [
            replace(v, dtype=variant.dtype) if variant.dtype and _can_use_bfloat16(v) else v for v in counts
        ]
        table = make_plan_table(variables, variant.rules, complete=False).check()
        found = zip(table.assignments, counts.values(), strict=True)
        return sum((a.device_bytes + a.shard_bytes * a.variable.is_trained) * number for a, number in found)

    # If the variant with the plan's rules needs a different amount of memory, the rules alone do not determine the
    # layouts, so no variant can be trusted.
    if call_or_none(lambda: count_device_bytes(before)) != needed_bytes:
        return ()
    dims = plan.mesh.dim_names
    sharded = [
        variant
        for dim in dims
        if plan.mesh.dim_size(dim) > 1 and (variant := before.with_sharded_weights(dim, plan))
    ]
    narrow = [replace(before, dtype="bfloat16")] * any(map(_can_use_bfloat16, counts))
    found: list[tuple[int, PlanVariant]] = []
    together = (variant.with_doubled_devices(dim) for variant in sharded for dim in dims)
    for variants in (sharded, [before.with_doubled_devices(dim) for dim in dims], together, narrow):
        if variants is together and any(n <= available_bytes for n, _ in found):
            continue
        # Variants that differ only in the mesh dim would be similar advice, so keep the one with the least memory.
        known = [
            (n, variant)
            for variant in variants
            if (n := call_or_none(lambda variant=variant: count_device_bytes(variant))) is not None
        ]
        found += [min(known, key=lambda each: each[0])] if known else []
    return tuple(Advice(*format_variant_change(before, variant), needed_bytes=n) for n, variant in found)


def _can_use_bfloat16(v: VariableSpec) -> bool:
    """Return whether a variable is in float32 and would be in bfloat16 if the layers of the model were."""
    return v.dtype == "float32" and (v.is_trained or (v.kind is Kind.SLOT and v.parent is not None))


def _count_similar_variables(plan: PlanTable) -> dict[VariableSpec, int]:
    """Return a dict from the first variable of each group of similar variables to the size of the group.

    The variables of a group have equal layouts and attributes, and their paths differ only in numbers.
    """
    first: dict[object, VariableSpec] = {}
    counts: dict[VariableSpec, int] = {}
    for a in plan.assignments:
        v, rule = a.variable, a.match and a.match.rule
        key = (
            v.model,
            replace_numbers_with_stars(v.path),
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
