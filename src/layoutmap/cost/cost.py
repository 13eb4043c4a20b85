"""The cost of a training step on a machine: what was counted, and how long it takes at least."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from layoutmap.core.paths import merge_paths, replace_numbers, split_at_numbers
from layoutmap.core.text_table import format_bytes, format_html_table, format_table
from layoutmap.cost.machine import Group, Machine
from layoutmap.cost.table import PARTITIONED, Collective, Held, StepCost
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
_MOST_ROWS = 12


@dataclass(frozen=True, slots=True)
class Wait:
    """A part of a step's time.

    Args:
        what: What the device does, or waits for.
        seconds: How long.
        kind: `"computing"`, `"memory"`, `"weights"` or `"activations"`.
        dims: The mesh dims over which is exchanged what it waits for.
    """

    what: str
    seconds: float
    kind: str
    dims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """Equal collectives of repeated blocks.

    Args:
        first: The first of them.
        cause: The paths of all their causes in one.
        calls: How often a step does this, in all.
        sent_bytes: What each device sends in a step, in all.
        seconds: How long they take in a step, in all.
        network: What they run over, in words.
        overlaps: Whether they overlap with computing.
    """

    first: Collective
    cause: str
    calls: int
    sent_bytes: int
    seconds: float
    network: str
    overlaps: bool

    @property
    def cells(self) -> tuple[str, ...]:
        """A text for each of `COLUMNS`."""
        c = self.first
        sizes = format_bytes(c.tensor_bytes), format_bytes(self.sent_bytes), duration(self.seconds)
        kind, over, why = c.kind.replace("_", "-"), ", ".join(c.dims), self.cause or "?"
        return kind, f"{self.calls:,}", over, self.network, *sizes, why, c.phase

    @property
    def text(self) -> str:
        """The collective in a sentence, without its cause."""
        kind, times, over, network, tensor, sent, seconds, _, phase = self.cells
        often = "once" if times == "1" else f"{times} times"
        often += f" for all of {self.cause}" if "*" in self.cause else ""
        where = f" ({phase})" if phase else ""
        return f"{kind} of {tensor} over {over}, {often}{where}: sends {sent} in {seconds} on {network}"


@dataclass(frozen=True, repr=False)
class Cost:  # why: decisions/0092
    """The cost of a training step on a machine; printed, it says what travels, and what the step waits for.

    Args:
        step: What each device sends, computes and holds.
        machine: What it does that on.
        weights: Paths of the variables, with stars for numbers: what is exchanged because of one is a weight or a
            gradient, and all else are activations.
        batch_dim: The mesh dim over which batches are sharded; `None`: they are replicated.
        verified: The figures of XLA's own compiler beside those of the step; files of plans do not have them.
        tried: Other ways, counted where the step does not fit, best first.
        untried: What was not counted, for lack of time.

    Attributes:
        step: See above.
        machine: See above.
        batch_dim: See above.
        verified: See above.
        tried: See above.
        untried: See above.
    """

    step: StepCost
    machine: Machine
    weights: frozenset[str] = field(default=frozenset(), compare=False)
    batch_dim: str | None = None
    verified: Verified | None = field(default=None, compare=False)
    tried: tuple[Advice, ...] = field(default=(), compare=False)
    untried: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self):
        object.__setattr__(self, "step", self.step.on(self.machine.device.memory_bytes))

    # -- seconds

    @property
    def compute_seconds(self) -> float:
        """Matrix products and convolutions, at the device's peak."""
        return sum(count / self.machine.device.rate(dtype) for dtype, count in self.step.flops.items())

    @property
    def memory_seconds(self) -> float:
        """Reading and writing the device's own memory, at its peak."""
        return self.step.traffic_bytes / self.machine.device.memory_bandwidth

    @property
    def device_seconds(self) -> float:
        """Seconds in which a device is busy without the others: computing and memory overlap."""
        return max(self.compute_seconds, self.memory_seconds)

    def seconds_of(self, collective: Collective) -> float:
        """How long all calls of a collective take in a step."""
        group = self._groups[collective.dims, collective.group]
        return collective.calls * self.machine.seconds(collective.kind, collective.tensor_bytes, group)

    def overlaps(self, collective: Collective) -> bool:
        """Whether a collective overlaps with computing: that of a weight or of its gradient."""
        kinds = ("all_gather", "reduce_scatter", "all_reduce")
        return collective.kind in kinds and replace_numbers(collective.cause) in self.weights

    @property
    def weights_seconds(self) -> float:
        """Gathering weights and summing gradients."""
        return sum(self.seconds_of(c) for c in self.step.collectives if self.overlaps(c))

    @property
    def activations_seconds(self) -> float:
        """Exchanging activations."""
        return sum(self.seconds_of(c) for c in self.step.collectives if not self.overlaps(c))

    @property
    def step_seconds(self) -> float:
        """A step, where the collectives of weights overlap with computing."""
        return max(self.device_seconds, self.weights_seconds) + self.activations_seconds

    @property
    def serial_seconds(self) -> float:
        """A step, where no collective overlaps with computing."""
        return self.device_seconds + self.weights_seconds + self.activations_seconds

    @cached_property
    def waits(self) -> tuple[Wait, ...]:
        """The parts of a step's time, which add up to `step_seconds`; the longest waits first."""
        computing, memory = self.compute_seconds, self.memory_seconds
        waits: list[Wait] = []
        for overlaps, kind in ((True, "weights"), (False, "activations")):
            by_dims: dict[tuple[str, ...], float] = {}
            for c in self.step.collectives:
                if self.overlaps(c) is overlaps:
                    by_dims[c.dims] = by_dims.get(c.dims, 0.0) + self.seconds_of(c)
            # What overlaps is taken from all of them alike.
            share = 1.0 - min(1.0, self.device_seconds / (self.weights_seconds or 1.0)) if overlaps else 1.0
            waits += [
                Wait(f"waiting for {kind} over {', '.join(dims)}", seconds * share, kind, dims)
                for dims, seconds in by_dims.items()
            ]
        waits.sort(key=lambda wait: -wait.seconds)
        own = [
            Wait("computing", computing, "computing"),
            Wait("waiting for its own memory", max(0.0, memory - computing), "memory"),
        ]
        return tuple(wait for wait in (*own, *waits) if wait.seconds > 0)

    # -- memory

    @property
    def activation_bytes(self) -> int:
        """The most that a device holds beside the step's arguments: activations, gradients, gathered weights."""
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
    def held(self) -> tuple[Held, ...]:
        """Tensors on a device at the peak, beside what the step is given."""
        return self.step.held

    def mark_weight_collectives(self, paths: frozenset[str]) -> Cost:
        """Return the same cost with other paths of weights; see `weights`."""
        return replace(self, weights=paths)

    def on_memory(self, num_bytes: int) -> Cost:
        """Return the same cost on devices with another memory."""
        device = replace(self.machine.device, memory_bytes=num_bytes)
        return replace(self, machine=replace(self.machine, device=device))

    @property
    def fits(self) -> bool:
        """Whether a device has the memory."""
        return self.step.peak_bytes <= self.machine.device.memory_bytes

    # -- where

    @cached_property
    def _groups(self) -> dict[tuple[tuple[str, ...], int], Group]:
        mesh = self.step.mesh
        return {
            (c.dims, c.group): self.machine.group(mesh, c.dims).part(c.group) for c in self.step.collectives
        }

    @property
    def networks(self) -> dict[str, str]:
        """The network that each mesh dim runs over, by its name; dims of size 1 run over none."""
        mesh, machine = self.step.mesh, self.machine
        return {
            dim.name: machine.network_text(machine.group(mesh, [dim.name]))
            for dim in mesh.mesh_dims
            if dim.size > 1
        }

    @cached_property
    def rows(self) -> tuple[CollectiveRow, ...]:
        """The collectives with those of repeated blocks in one row, the longest first."""
        return self._merged(self.step.collectives)

    def _merged(self, collectives: Iterable[Collective]) -> tuple[CollectiveRow, ...]:
        groups: dict[object, list[Collective]] = {}
        for c in collectives:
            key = c.kind, c.dims, c.tensor_bytes, split_at_numbers(c.cause), c.phase, c.group
            groups.setdefault(key, []).append(c)
        rows = [
            CollectiveRow(
                group[0],
                merge_paths(list(dict.fromkeys(c.cause for c in group))),
                sum(c.calls for c in group),
                sum(c.sent_bytes(self.step.mesh) for c in group),
                sum(map(self.seconds_of, group)),
                self.machine.network_text(self._groups[group[0].dims, group[0].group]),
                self.overlaps(group[0]),
            )
            for group in groups.values()
        ]
        return tuple(sorted(rows, key=lambda row: -row.seconds))

    @cached_property
    def _by_cause(self) -> dict[str, list[Collective]]:
        found: dict[str, list[Collective]] = {}
        for c in self.step.collectives:
            found.setdefault(c.cause, []).append(c)
        return found

    def describe_collectives(self, paths: Iterable[str]) -> list[str]:
        """The collectives that some variables or layers cause, a text for each row."""
        causes = dict.fromkeys(cause for path in paths for cause in (path, replace_numbers(path)))
        return [
            row.text for row in self._merged(c for cause in causes for c in self._by_cause.get(cause, ()))
        ]

    # -- texts

    @property
    def line(self) -> str:
        """The cost in one line."""
        sizes = f"{format_bytes(self.step.peak_bytes)} of {format_bytes(self.machine.device.memory_bytes)}"
        seconds = duration(self.step_seconds)
        return f"{seconds} a step on {self.machine}; {sizes} per device at the peak ({self.known_by})"

    @property
    def known_by(self) -> str:
        """The source of the figures: XLA's partitioner, or an estimate; and the compiler whose own are beside them."""
        beside = f", beside what XLA compiles for {self.verified.target}" if self.verified else ""
        return f"{self.step.known_by}{beside}"

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions of the time and of the count, in sentences."""
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
    def counts(self) -> tuple[str, str]:
        """The numbers that each device computes, sends, moves and holds, in two sentences."""
        step = self.step
        flops = ", ".join(f"{count_text(count)}FLOP in {dtype}" for dtype, count in step.flops.items())
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

    def _parts(self) -> Iterator[tuple[str, str, str]]:
        total = self.step_seconds
        for wait in self.waits:
            yield wait.what, duration(wait.seconds), f"{100 * wait.seconds / total:.0f} %"

    def to_text(self, width: int | None = None) -> str:
        """Return the text that `print` shows; `width`: see `Plan.to_text`."""
        device = self.machine.device
        lines = [
            f"Cost: {self.line}",
            f"{device.about}; no overlap at all: {duration(self.serial_seconds)}",
            "",
        ]
        lines += format_table(
            ("of the step", "takes", "share"), self._parts(), ("takes", "share"), width=width
        )
        if self.rows:
            cells = [row.cells for row in self.rows[:_MOST_ROWS]]
            lines += ["", *format_table(COLUMNS, cells, _RIGHT, width=width, drop=_DROP)]
        if len(self.rows) > _MOST_ROWS:
            rest = self.rows[_MOST_ROWS:]
            seconds, sent = sum(row.seconds for row in rest), sum(row.sent_bytes for row in rest)
            lines.append(
                f"... and {len(rest)} more, which take {duration(seconds)} and send {format_bytes(sent)}"
            )
        mesh = ", ".join(f"{name} over {network}" for name, network in self.networks.items())
        lines += [
            "",
            *self.counts,
            *([f"devices in the order of the mesh: {mesh}"] if mesh else []),
            *(f"assumed: {each}" for each in self.assumptions),
            *(["", self.verified.to_text(width)] if self.verified else []),
        ]
        return "\n".join(lines)

    __str__ = to_text

    def __repr__(self) -> str:
        return f"<Cost: {self.line}>"

    def to_html(self) -> str:
        """The cost as two tables, for a notebook."""
        parts = format_html_table(f"Cost: {self.line}", ("of the step", "takes", "share"), self._parts())
        return parts + format_html_table("Collectives", COLUMNS, (row.cells for row in self.rows))

    _repr_html_ = to_html


def duration(seconds: float) -> str:
    """A time as people read it.

    Example:
        >>> duration(0.0314), duration(2.5), duration(0)
        ('31.4 ms', '2.50 s', '0 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * scale:
            return f"{seconds / scale:.{max(0, 2 - len(str(int(seconds / scale))) + 1)}f} {unit}"
    return "0 s" if seconds <= 0 else "< 1 us"


def count_text(count: float) -> str:
    """A large count as people read it, before its unit.

    Example:
        >>> count_text(1.97e14) + "FLOP"
        '197 TFLOP'
    """
    for prefix in ("", "K", "M", "G", "T"):
        if count < 1000:
            return f"{count:.3g} {prefix}"
        count /= 1000
    return f"{count:.3g} P"
