"""Compute the time of a training step on a machine from its operations, collectives, and memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from layoutmap.core.paths import format_merged_paths, replace_numbers_with_stars, split_path_at_numbers
from layoutmap.core.specs import BatchDim
from layoutmap.core.text_table import format_bytes, format_html_table, format_table
from layoutmap.cost.machine import DeviceGroup, Machine
from layoutmap.cost.table import PARTITIONED, Collective, PeakTensors, StepCost
from layoutmap.cost.verified import Verified
from layoutmap.plan.advice import Advice

OVERLAP = (
    "gathering weights and summing gradients overlaps with computing, as far as computing takes; "
    "exchanging activations does not overlap: the next layer waits for them"
)
PEAK = "all figures of the machine are its peak, and starting a collective takes no time: a measured step takes longer"
COLUMNS = ("collective", "times", "over", "network", "tensor", "sent", "takes", "because of", "phase")
_RIGHT = ("times", "tensor", "sent", "takes")
_DROP = ("network", "tensor", "sent", "over", "times", "phase")
_MAX_SHOWN_ROWS = 12


@dataclass(frozen=True, slots=True)
class TimePart:
    """Part of a step's time."""

    label: str  # text for the user, such as "waiting for weights over data"
    seconds: float
    kind: str  # what takes the time: "computing", "memory", "weights", or "activations"
    dims: tuple[str, ...] = ()  # mesh dims of the collective that the device waits for


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """Row of the table of collectives. Equal collectives of repeated blocks share a row."""

    first: Collective  # one of the merged collectives
    cause: str  # paths of the weights or layers that cause the collectives, merged into one text
    calls: int  # number per step; bytes and seconds are per step, too
    sent_bytes: int
    seconds: float
    network: str
    is_overlapped: bool

    @property
    def cells(self) -> tuple[str, ...]:
        """Text for each of `COLUMNS`."""
        c = self.first
        sizes = format_bytes(c.tensor_bytes), format_bytes(self.sent_bytes), format_duration(self.seconds)
        kind, over, why = c.kind.replace("_", "-"), ", ".join(c.dims), self.cause or "?"
        return kind, f"{self.calls:,}", over, self.network, *sizes, why, c.phase

    @property
    def description(self) -> str:
        """Sentence that describes the collective, without its cause."""
        kind, times, over, network, tensor, sent, seconds, _, phase = self.cells
        often = "once" if times == "1" else f"{times} times"
        often += f" for all of {self.cause}" if "*" in self.cause else ""
        where = f" ({phase})" if phase else ""
        return f"{kind} of {tensor} over {over}, {often}{where}: sends {sent} in {seconds} on {network}"


@dataclass(frozen=True, repr=False)
# The machines were not measured, so times are computed from their published peak speeds (decisions/0092).
class Cost:
    """Cost of a training step on a machine. When printed, it shows the collectives and the parts of the time."""

    step: StepCost
    machine: Machine
    # paths of the weights, with stars for numbers; a collective whose cause is not among them exchanges activations
    weights: frozenset[str] = field(default=frozenset(), compare=False)
    batch_dim: BatchDim | None = None  # mesh dim that shards batches; None: batches are replicated
    # sizes that XLA's compiler reports; None if nothing was compiled, or if the plan was read from a file
    verified: Verified | None = field(default=None, compare=False)
    # plan variants that were tried because the step does not fit the memory, the best one first
    tried: tuple[Advice, ...] = field(default=(), compare=False)
    # names of the variants that were not tried, because time ran out
    untried: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self):
        object.__setattr__(self, "step", self.step.cap_peak_for_memory(self.machine.device.memory_bytes))

    # -- durations

    @property
    def flops_seconds(self) -> float:
        """Seconds that matrix products and convolutions take at the device's peak FLOP rate."""
        return sum(
            count / self.machine.device.get_flops_rate(dtype) for dtype, count in self.step.flops.items()
        )

    @property
    def memory_seconds(self) -> float:
        """Seconds that reads and writes of the device's own memory take at its peak bandwidth."""
        return self.step.traffic_bytes / self.machine.device.memory_bandwidth

    @property
    def local_seconds(self) -> float:
        """Seconds of a step without collectives: those of computing or of memory access, whichever takes longer."""
        return max(self.flops_seconds, self.memory_seconds)

    def sum_call_seconds(self, collective: Collective) -> float:
        """Return the seconds that all calls of a collective take in a step."""
        group = self._groups_by_dims[collective.dims, collective.group]
        return collective.calls * self.machine.estimate_seconds(
            collective.kind, collective.tensor_bytes, group
        )

    def is_overlapped(self, collective: Collective) -> bool:
        """Return whether a collective overlaps with computing: it gathers a weight or reduces a weight's gradient."""
        kinds = ("all_gather", "reduce_scatter", "all_reduce")
        return collective.kind in kinds and replace_numbers_with_stars(collective.cause) in self.weights

    @property
    def weight_collective_seconds(self) -> float:
        """Seconds of the collectives that gather weights and reduce gradients."""
        return sum(self.sum_call_seconds(c) for c in self.step.collectives if self.is_overlapped(c))

    @property
    def activation_collective_seconds(self) -> float:
        """Seconds of the collectives that exchange activations."""
        return sum(self.sum_call_seconds(c) for c in self.step.collectives if not self.is_overlapped(c))

    @property
    def step_seconds(self) -> float:
        """Seconds of a step if the collectives of weights overlap with computing."""
        return max(self.local_seconds, self.weight_collective_seconds) + self.activation_collective_seconds

    @property
    def serial_seconds(self) -> float:
        """Seconds of a step if no collective overlaps with computing."""
        return self.local_seconds + self.weight_collective_seconds + self.activation_collective_seconds

    @cached_property
    def time_parts(self) -> tuple[TimePart, ...]:
        """Parts that add up to `step_seconds`: computing, memory, and waits for collectives, the longest first."""
        computing, memory = self.flops_seconds, self.memory_seconds
        waits: list[TimePart] = []
        for overlaps, kind in ((True, "weights"), (False, "activations")):
            by_dims: dict[tuple[str, ...], float] = {}
            for c in self.step.collectives:
                if self.is_overlapped(c) is overlaps:
                    by_dims[c.dims] = by_dims.get(c.dims, 0.0) + self.sum_call_seconds(c)
            # Collectives of weights run while the device computes, so a device waits only for a part of their time.
            hidden = (
                min(1.0, self.local_seconds / (self.weight_collective_seconds or 1.0)) if overlaps else 0.0
            )
            waits += [
                TimePart(f"waiting for {kind} over {', '.join(dims)}", seconds * (1.0 - hidden), kind, dims)
                for dims, seconds in by_dims.items()
            ]
        waits.sort(key=lambda wait: -wait.seconds)
        local = [
            TimePart("computing", computing, "computing"),
            TimePart("waiting for its own memory", max(0.0, memory - computing), "memory"),
        ]
        return tuple(part for part in (*local, *waits) if part.seconds > 0)

    # -- memory

    @property
    def activation_bytes(self) -> int:
        """Bytes on a device at the peak without the step's arguments: activations, gradients, gathered weights."""
        return max(0, self.step.peak_bytes - self.step.argument_bytes)

    @property
    def peak_bytes(self) -> int:
        """Bytes on a device at the peak of a step."""
        return self.step.peak_bytes

    @property
    def memory_bytes(self) -> int:
        """Memory of a device in bytes."""
        return self.machine.device.memory_bytes

    @property
    def peak_tensors(self) -> tuple[PeakTensors, ...]:
        """Tensors on a device at the peak of a step, without the step's arguments."""
        return self.step.held

    def with_weight_paths(self, paths: frozenset[str]) -> Cost:
        """Return this cost with `paths` as the weights, so that their collectives overlap with computing."""
        return replace(self, weights=paths)

    def on_memory(self, num_bytes: int) -> Cost:
        """Return this cost for devices with `num_bytes` of memory."""
        device = replace(self.machine.device, memory_bytes=num_bytes)
        return replace(self, machine=replace(self.machine, device=device))

    @property
    def fits(self) -> bool:
        """Whether the peak of the step fits into a device's memory."""
        return self.step.peak_bytes <= self.machine.device.memory_bytes

    # -- collectives and their causes

    @cached_property
    def _groups_by_dims(self) -> dict[tuple[tuple[str, ...], int], DeviceGroup]:
        mesh = self.step.mesh
        return {
            (c.dims, c.group): self.machine.group(mesh, c.dims).make_subgroup(c.group)
            for c in self.step.collectives
        }

    @property
    def networks(self) -> dict[str, str]:
        """Dict from the name of each mesh dim with several devices to a text that names its networks."""
        mesh, machine = self.step.mesh, self.machine
        return {
            dim.name: machine.network_text(machine.group(mesh, [dim.name]))
            for dim in mesh.mesh_dims
            if dim.size > 1
        }

    @cached_property
    def collective_rows(self) -> tuple[CollectiveRow, ...]:
        """Table rows of the collectives, the slowest first. Equal collectives of repeated blocks share a row."""
        return self._merge_into_rows(self.step.collectives)

    def _merge_into_rows(self, collectives: Iterable[Collective]) -> tuple[CollectiveRow, ...]:
        groups: dict[object, list[Collective]] = {}
        for c in collectives:
            key = c.kind, c.dims, c.tensor_bytes, split_path_at_numbers(c.cause), c.phase, c.group
            groups.setdefault(key, []).append(c)
        rows = [
            CollectiveRow(
                group[0],
                format_merged_paths(list(dict.fromkeys(c.cause for c in group))),
                sum(c.calls for c in group),
                sum(c.count_sent_bytes(self.step.mesh) for c in group),
                sum(map(self.sum_call_seconds, group)),
                self.machine.network_text(self._groups_by_dims[group[0].dims, group[0].group]),
                self.is_overlapped(group[0]),
            )
            for group in groups.values()
        ]
        return tuple(sorted(rows, key=lambda row: -row.seconds))

    @cached_property
    def _collectives_by_cause(self) -> dict[str, list[Collective]]:
        found: dict[str, list[Collective]] = {}
        for c in self.step.collectives:
            found.setdefault(c.cause, []).append(c)
        return found

    def format_collectives(self, paths: Iterable[str]) -> list[str]:
        """Return a description for each collective that the variables or layers at `paths` cause."""
        causes = dict.fromkeys(cause for path in paths for cause in (path, replace_numbers_with_stars(path)))
        return [
            row.description
            for row in self._merge_into_rows(
                c for cause in causes for c in self._collectives_by_cause.get(cause, ())
            )
        ]

    # -- text and HTML

    @property
    def line(self) -> str:
        """Summary of the cost in one line: time, machine, peak memory, and how the cost is known."""
        sizes = f"{format_bytes(self.step.peak_bytes)} of {format_bytes(self.machine.device.memory_bytes)}"
        seconds = format_duration(self.step_seconds)
        return f"{seconds} a step on {self.machine}; {sizes} per device at the peak ({self.known_by})"

    @property
    def known_by(self) -> str:
        """The source of the cost: an estimate, XLA's partitioner, or XLA's compiler."""
        beside = f", beside what XLA compiles for {self.verified.target}" if self.verified else ""
        return f"{self.step.known_by}{beside}"

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Assumptions behind the time and the counts, in sentences."""
        device = self.machine.device
        slowest = min(device.flops, key=lambda dtype: device.flops[dtype])
        unknown = [dtype for dtype in self.step.flops if dtype not in device.flops]
        found = (
            [f"{device.name} has no figure for {', '.join(unknown)}: that of {slowest} counts"]
            if unknown
            else []
        )
        return (OVERLAP, PEAK, *found, *self.step.notes)

    @property
    def work_and_memory_sentences(self) -> tuple[str, str]:
        """Two sentences: the FLOPs and the traffic of each device, and its memory at the peak of a step."""
        step = self.step
        flops = ", ".join(f"{format_number(count)}FLOP in {dtype}" for dtype, count in step.flops.items())
        sent, moved = format_bytes(step.sent_bytes), format_bytes(step.traffic_bytes)
        given, beside = format_bytes(step.argument_bytes), format_bytes(self.activation_bytes)
        most = "at most " * (step.known_by == PARTITIONED)
        least, short = step.least_peak_bytes - step.argument_bytes, ""
        if step.known_by == PARTITIONED and 0 < least < 0.95 * self.activation_bytes:
            short = f", {format_bytes(least)} where memory is short"
        return (
            f"each device computes {flops or 'nothing'}, sends {sent}, and reads and writes {moved}",
            f"it holds {given} of weights, state, slots and batch, and at the peak {most}{beside} beside them{short}",
        )

    def _iterate_time_part_rows(self) -> Iterator[tuple[str, str, str]]:
        total = self.step_seconds
        for wait in self.time_parts:
            yield wait.label, format_duration(wait.seconds), f"{100 * wait.seconds / total:.0f} %"

    def to_text(self, width: int | None = None) -> str:
        """Return the text that `print` shows. See `Plan.to_text` for `width`."""
        device = self.machine.device
        lines = [
            f"Cost: {self.line}",
            f"{device.about}; no overlap at all: {format_duration(self.serial_seconds)}",
            "",
        ]
        lines += format_table(
            ("of the step", "takes", "share"), self._iterate_time_part_rows(), ("takes", "share"), width=width
        )
        if self.collective_rows:
            cells = [row.cells for row in self.collective_rows[:_MAX_SHOWN_ROWS]]
            lines += ["", *format_table(COLUMNS, cells, _RIGHT, width=width, drop=_DROP)]
        if len(self.collective_rows) > _MAX_SHOWN_ROWS:
            rest = self.collective_rows[_MAX_SHOWN_ROWS:]
            seconds, sent = sum(row.seconds for row in rest), sum(row.sent_bytes for row in rest)
            lines.append(
                f"... and {len(rest)} more, which take {format_duration(seconds)} and send {format_bytes(sent)}"
            )
        mesh = ", ".join(f"{name} over {network}" for name, network in self.networks.items())
        lines += [
            "",
            *self.work_and_memory_sentences,
            *([f"devices in the order of the mesh: {mesh}"] if mesh else []),
            *(f"assumed: {each}" for each in self.assumptions),
            *(["", self.verified.to_text(width)] if self.verified else []),
        ]
        return "\n".join(lines)

    __str__ = to_text

    def __repr__(self) -> str:
        return f"<Cost: {self.line}>"

    def to_html(self) -> str:
        """Return the cost as two tables for a notebook."""
        parts = format_html_table(
            f"Cost: {self.line}", ("of the step", "takes", "share"), self._iterate_time_part_rows()
        )
        return parts + format_html_table("Collectives", COLUMNS, (row.cells for row in self.collective_rows))

    _repr_html_ = to_html


def format_duration(seconds: float) -> str:
    """Return a time as text, such as `31.4 ms`.

    Example:
        >>> format_duration(0.0314), format_duration(2.5), format_duration(0)
        ('31.4 ms', '2.50 s', '0 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * scale:
            return f"{seconds / scale:.{max(0, 2 - len(str(int(seconds / scale))) + 1)}f} {unit}"
    return "0 s" if seconds <= 0 else "< 1 us"


def format_number(count: float) -> str:
    """Return a large number as text with a prefix for its unit, such as `197 T`.

    Example:
        >>> format_number(1.97e14) + "FLOP"
        '197 TFLOP'
    """
    for prefix in ("", "K", "M", "G", "T"):
        if count < 1000:
            return f"{count:.3g} {prefix}"
        count /= 1000
    return f"{count:.3g} P"
