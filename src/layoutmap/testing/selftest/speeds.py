"""Measured speeds, as a table beside those of a machine file, and as a new machine file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from statistics import median
from typing import Any

import yaml

from layoutmap.core.mesh import Mesh
from layoutmap.core.text_table import format_bytes
from layoutmap.cost.cost import format_duration
from layoutmap.cost.machine import Device, DeviceGroup, Machine, Network
from layoutmap.testing.laws import Outcome
from layoutmap.testing.schedule import LawResult

COLUMNS = ("on", "what", "over", "measured", "expected")
_MAX_SLOWDOWN = {True: 3, False: 10}
"""Largest factors of a collective's time: to that of the machine file (True), or over another mesh dim (False)."""
_HEAD = """\
# Written by layoutmap selftest. The bandwidth of a network is the median over all its collectives.
# A network that was not measured has the bandwidth of the other one.
"""
_DEVICE_MEASUREMENTS = {"memory": ("memory", "B"), "memory_bandwidth": ("copy in memory", "B/s")}
_DEVICE_FIELDS = {"memory": "memory_bytes", "memory_bandwidth": "memory_bandwidth"}
_STEP_MEASUREMENTS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "step": ("a step", format_duration),
    "step_bytes": ("peak of a step", format_bytes),
    "created_bytes": ("peak of creation", format_bytes),
}
SLOW_COLLECTIVE_LAW = "no collective is far slower than expected"
_Key = tuple[str, int, int]


@dataclass(frozen=True)
class MeasuredSpeeds:
    """The measured speeds of one engine's devices."""

    engine: str
    node_size: int  # number of devices per host
    results: Sequence[LawResult]  # results of the laws that measure
    on: Device | None = None  # device of a machine file with which to compare the speeds
    share_cores: bool = False  # whether devices share cores, and so slow each other down
    # predicted cost of the measured step
    predicted: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def has_enough_measurements(self) -> bool:
        """Whether enough was measured for a machine file: a collective and the memory."""
        return bool(self._fastest_collectives) and "memory" in self._best_measurements

    @cached_property
    def measured_step(self) -> Mapping[str, Any]:
        """The first measured step, or an empty mapping."""
        return next((figure for figure in self.measurements if "step" in figure), {})

    @property
    def measurements(self) -> list[Mapping[str, Any]]:
        """All measurements."""
        return [figure for result in self.results for figure in result.outcome.figures]

    @cached_property
    def _fastest_collectives(self) -> dict[_Key, tuple[Mapping[str, Any], DeviceGroup, float]]:
        """A dict from kind, group size, and stride to the fastest measured collective, its group, and its speed."""
        collectives: dict[_Key, tuple[Mapping[str, Any], DeviceGroup, float]] = {}
        for figure in self.measurements:
            if "kind" not in figure:
                continue
            mesh = Mesh(None, figure["mesh"])
            group = Machine(_make_unit_speed_device(self.node_size), mesh.size).group(mesh, [figure["dim"]])
            # Estimate the seconds at one byte per second. They equal the bytes on the network that limits the
            # collective.
            device = _make_unit_speed_device(self.node_size, fast=1.0 if group.nodes == 1 else math.inf)
            num_bytes = Machine(device, mesh.size).estimate_seconds(figure["kind"], figure["bytes"], group)
            bandwidth = num_bytes / figure["seconds"]
            key = figure["kind"], group.size, mesh.strides[mesh.dim_names.index(figure["dim"])]
            if key not in collectives or bandwidth > collectives[key][2]:
                collectives[key] = figure, group, bandwidth
        return collectives

    @cached_property
    def _best_measurements(self) -> dict[str, float]:
        """A dict from each measured property of a single device to its largest measured value."""
        best: dict[str, float] = {}
        for figure in self.measurements:
            named = {figure["dtype"]: figure["flops"]} if "dtype" in figure else figure
            if "mesh" not in figure:
                best |= {name: max(number, best.get(name, 0.0)) for name, number in named.items()}
        return best

    def run_collectives_law(self) -> LawResult:
        """Return the result of the law about slow collectives."""
        first = self.results[0]
        what, why = "held", "\n".join(self._format_slow_collectives())
        if self.share_cores:
            what, why = "not tried", "there are more devices than cores, so they slow each other down"
        elif not any(self._find_expected_bandwidth(key) for key in self._fastest_collectives):
            what, why = (
                "not tried",
                "there is no speed to compare with: no machine of --on, and no other mesh dim",
            )
        elif why:
            what, why = "wrong", f"{why}\nMeasure again: layoutmap selftest --only {first.subject}"
        return LawResult(first.subject, first.seed, Outcome(SLOW_COLLECTIVE_LAW, what, why, 0.0))

    def _format_slow_collectives(self) -> Iterator[str]:
        for key, (figure, _, bandwidth) in self._fastest_collectives.items():
            expected = self._find_expected_bandwidth(key)
            if expected and bandwidth * _MAX_SLOWDOWN[self.on is not None] < expected:
                reference = f"{self.on.name} has" if self.on else "over other dims it has"
                name = f"{_format_collective_name(figure)} over {figure['dim']} of {figure['mesh']}"
                yield f"{name}: {_format_rate(bandwidth)}, and {reference} {_format_rate(expected)}"

    def _find_expected_bandwidth(self, key: _Key) -> float | None:
        """Return the bandwidth in the machine file. Without one, return the best of this kind over other mesh dims."""
        group = self._fastest_collectives[key][1]
        if self.on is not None:
            return self.on.slow.bandwidth if group.nodes > 1 else self.on.fast.get_bandwidth(group.size)
        other_bandwidths = [
            bandwidth
            for other, (_, g, bandwidth) in self._fastest_collectives.items()
            if other != key and other[0] == key[0] and (g.nodes > 1) == (group.nodes > 1)
        ]
        return max(other_bandwidths, default=None)

    def make_table_rows(self) -> list[list[str]]:
        """Return a table row for each measurement, with the value that was expected or predicted."""
        rows: list[list[str]] = []
        for key, (figure, group, bandwidth) in sorted(self._fastest_collectives.items()):
            group_text = f"{figure['dim']} of {figure['mesh']}" + f", {group.nodes} hosts" * (group.nodes > 1)
            expected = self._find_expected_bandwidth(key) if self.on else None
            what = f"{_format_collective_name(figure)} of {format_bytes(figure['bytes'])}"
            rows.append(self._make_row(what, group_text, _format_rate, bandwidth, expected))
        for name, value in self._best_measurements.items():
            what, unit = _DEVICE_MEASUREMENTS.get(name, (f"product in {name}", "FLOP/s"))
            expected = self.on and (
                self.on.flops.get(name) or getattr(self.on, _DEVICE_FIELDS.get(name, ""), None)
            )
            rows.append(self._make_row(what, "one device", partial(_format_rate, unit=unit), value, expected))
        step = self.measured_step
        for name, (what, to_text) in _STEP_MEASUREMENTS.items() if step else ():
            predicted = self.predicted.get(name)
            rows.append(self._make_row(what, step["mesh"], to_text, step[name], predicted))
        return rows or [[self.engine, "not measured", "", "", ""]]

    def _make_row(
        self,
        figure_name: str,
        group_text: str,
        to_text: Callable[[float], str],
        measured: float | None,
        expected: float | None,
    ) -> list[str]:
        measured_text = "not reported" if measured is None else to_text(measured)
        return [self.engine, figure_name, group_text, measured_text, to_text(expected) if expected else ""]

    def to_machine_file(self, about: str) -> str:
        """Return a machine file for `--on` with one device named `here`."""
        best = dict(self._best_measurements)
        device: dict[str, Any] = {"about": about}
        device |= {name: f"{best.pop(name):.0f} {unit}" for name, (_, unit) in _DEVICE_MEASUREMENTS.items()}
        device["flops"] = {dtype: f"{number:.0f} FLOP/s" for dtype, number in best.items()}
        bandwidths = [(group.nodes > 1, rate) for _, group, rate in self._fastest_collectives.values()]
        for network, is_far, where in (("fast", False, "in a host"), ("slow", True, "between hosts")):
            measured = [bandwidth for between_hosts, bandwidth in bandwidths if between_hosts == is_far]
            rate = median(measured or [bandwidth for _, bandwidth in bandwidths])
            name = where + " (not measured)" * (not measured)
            device[network] = {"name": name, "bandwidth": f"{rate:.0f} B/s"}
        device["fast"]["devices"] = self.node_size
        return _HEAD + yaml.safe_dump({"version": 1, "devices": {"here": device}}, sort_keys=False)


def _format_collective_name(figure: Mapping[str, Any]) -> str:
    return figure["kind"].replace("_", "-")


def _make_unit_speed_device(node_size: int, fast: float = 1.0) -> Device:
    """Return a device that sends one byte per second between hosts, and `fast` bytes inside a host."""
    return Device("", "", 1, 1.0, {}, Network("", fast), Network("", 1.0), node_size)


def _format_rate(number: float, unit: str = "B/s") -> str:
    """Format a rate with three digits and a unit.

    Example:
        >>> _format_rate(4.5e11), _format_rate(989e12, "FLOP/s")
        ('450 GB/s', '989 TFLOP/s')
    """
    for prefix in ("", "K", "M", "G", "T"):
        if number < 1000 or prefix == "T":
            return f"{number:.3g} {prefix}{unit}"
        number /= 1000
    raise AssertionError("the loop returns at the latest for the last prefix")
