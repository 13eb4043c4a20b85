"""The speeds that were measured: beside those of a machine file, and as one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

from layoutmap.core.mesh import Mesh
from layoutmap.core.text_table import size
from layoutmap.cost.cost import duration
from layoutmap.cost.machine import Device, Group, Machine, Network
from layoutmap.testing.laws import Outcome
from layoutmap.testing.schedule import Tried

COLUMNS = ("on", "what", "over", "measured", "expected")
_FAR_BELOW = {True: 3, False: 10}
"""How many times slower than a machine's peak, or than the same collective elsewhere, is a finding."""
_OF_A_STEP = {"step": "a step", "step_bytes": "peak of a step", "created_bytes": "peak of creation"}
LAW = "no collective is far slower than expected"
_Key = tuple[str, int, int]


@dataclass(frozen=True)
class Speeds:
    """The speeds of an engine's devices.

    Args:
        engine: The engine's name.
        node_size: How many devices a host has.
        tried: The outcomes that have figures.
        on: What a machine file says of the device; `None`: none was named.
        share_cores: Whether devices are computed by fewer cores, so that one slows another down.
        counted: What was counted of the step that was measured; empty: nothing.
    """

    engine: str
    node_size: int
    tried: Sequence[Tried]
    on: Device | None = None
    share_cores: bool = False
    counted: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def is_enough(self) -> bool:
        """Whether a machine file can be made of it."""
        return bool(self._collectives) and "memory" in self._best

    @cached_property
    def step(self) -> Mapping[str, Any]:
        """The first step that was measured; empty if none was."""
        return next((each for each in self.figures if "step" in each), {})

    @property
    def figures(self) -> list[Mapping[str, Any]]:
        """All that was measured."""
        return [figure for each in self.tried for figure in each.outcome.figures]

    @cached_property
    def _collectives(self) -> dict[_Key, tuple[Mapping[str, Any], Group, float]]:
        """The fastest of each kind among as many devices as far apart, and what bandwidth follows."""
        found: dict[_Key, tuple[Mapping[str, Any], Group, float]] = {}
        for each in self.figures:
            if "kind" not in each:
                continue
            mesh = Mesh(None, each["mesh"])
            group = Machine(_unit(self.node_size), mesh.size).group(mesh, [each["dim"]])
            # At one byte per second it takes as many seconds as it sends bytes over the slowest network.
            unit = _unit(self.node_size, inside=1.0 if group.nodes == 1 else math.inf)
            sent = Machine(unit, mesh.size).seconds(each["kind"], each["bytes"], group)
            key = each["kind"], group.size, mesh.strides[mesh.dim_names.index(each["dim"])]
            if key not in found or sent / each["seconds"] > found[key][2]:
                found[key] = each, group, sent / each["seconds"]
        return found

    @cached_property
    def _best(self) -> dict[str, float]:
        """All other figures, by name, each the best that was measured."""
        found: dict[str, float] = {}
        for each in self.figures:
            named = {each["dtype"]: each["flops"]} if "dtype" in each else {} if "mesh" in each else each
            found |= {name: max(number, found.get(name, 0.0)) for name, number in named.items()}
        return found

    def judged(self) -> Tried:
        """Return the outcome of a law: no collective is far slower than it should be."""
        first = self.tried[0]
        what, why = "held", "\n".join(self._slow())
        if self.share_cores:
            what, why = "not tried", "there are more devices than cores: one slows another down"
        elif not any(self._expected(key) for key in self._collectives):
            what, why = "not tried", "there is nothing to compare with: no machine by --on, no other mesh dim"
        elif why:
            what, why = "wrong", f"{why}\nMeasure again: layoutmap selftest --only {first.subject}"
        return Tried(first.subject, first.seed, Outcome(LAW, what, why, 0.0))

    def _slow(self) -> Iterator[str]:
        """Yield the collectives that are far slower than the machine file says, or than the same kind elsewhere."""
        for key, (figure, _, bandwidth) in self._collectives.items():
            expected = self._expected(key)
            if expected and bandwidth * _FAR_BELOW[self.on is not None] < expected:
                beside = f"{self.on.name} has" if self.on else "over other dims it has"
                what = f"{_named(figure)} over {figure['dim']} of {figure['mesh']}"
                yield f"{what}: {_rate(bandwidth)}, and {beside} {_rate(expected)}"

    def _expected(self, key: _Key) -> float | None:
        """The bandwidth that the machine file says; without one, that of the same kind elsewhere, if there is any."""
        group = self._collectives[key][1]
        if self.on is not None:
            return self.on.slow.bandwidth if group.nodes > 1 else self.on.fast.bandwidth_among(group.size)
        others = [
            bandwidth
            for other, (_, g, bandwidth) in self._collectives.items()
            if other != key and other[0] == key[0] and (g.nodes > 1) == (group.nodes > 1)
        ]
        return max(others, default=None)

    def rows(self) -> list[list[str]]:
        """A row for each figure, beside that of the machine file."""
        rows: list[list[str]] = []
        for key, (figure, group, bandwidth) in sorted(self._collectives.items()):
            what = f"{_named(figure)} of {size(figure['bytes'])}"
            expected = self._expected(key) if self.on else None
            over = f"{figure['dim']} of {figure['mesh']}" + f", {group.nodes} hosts" * (group.nodes > 1)
            rows.append([self.engine, what, over, _rate(bandwidth), _rate(expected) if expected else ""])
        for name, number in self._best.items():
            expected = None if self.on is None else _said(self.on, name)
            what = {"memory": "memory", "memory_bandwidth": "copy in memory"}.get(name, f"product in {name}")
            unit = {"memory": "B", "memory_bandwidth": "B/s"}.get(name, "FLOP/s")
            rows.append(
                [self.engine, what, "one device", *(_rate(n, unit) if n else "" for n in (number, expected))]
            )
        for name, what in _OF_A_STEP.items() if self.step else ():
            both = self.step[name], self.counted.get(name)
            texts = [
                "" if each is None else duration(each) if name == "step" else size(each) for each in both
            ]
            rows.append(
                [self.engine, what, self.step["mesh"], texts[0] or "not reported", texts[1] or "not counted"]
            )
        return rows or [[self.engine, "not measured", "", "", ""]]

    def to_machine_file(self, about: str) -> str:
        """Return a machine file with one device, `here`, that `--on` takes.

        Args:
            about: What was measured, and when.
        """
        by_distance: dict[bool, list[float]] = {False: [], True: []}
        for _, group, bandwidth in self._collectives.values():
            by_distance[group.nodes > 1].append(bandwidth)
        fast, slow = (
            f"{{name: {where}{' (not measured)' * (not by_distance[is_far])}, "
            f"bandwidth: {median(by_distance[is_far] or by_distance[not is_far]):.0f} B/s"
            for is_far, where in ((False, "in a host"), (True, "between hosts"))
        )
        best = dict(self._best)
        memory, memory_bandwidth = best.pop("memory"), best.pop("memory_bandwidth")
        flops = "".join(f"      {dtype}: {number:.0f} FLOP/s\n" for dtype, number in best.items())
        return (
            "# Written by layoutmap selftest. A network has the median of all collectives over it;\n"
            "# one that was not measured has that of the other one.\n"
            f"version: 1\ndevices:\n  here:\n    about: {about!r}\n    memory: {memory:.0f} B\n"
            f"    memory_bandwidth: {memory_bandwidth:.0f} B/s\n    flops:\n{flops}"
            f"    fast: {fast}, devices: {self.node_size}}}\n"
            f"    slow: {slow}}}\n"
        )


def _named(figure: Mapping[str, Any]) -> str:
    return figure["kind"].replace("_", "-")


def _said(device: Device, name: str) -> float | None:
    own = {"memory": device.memory_bytes, "memory_bandwidth": device.memory_bandwidth}
    return own.get(name) or device.flops.get(name)


def _unit(node_size: int, inside: float = 1.0) -> Device:
    """A device that sends one byte per second."""
    return Device("", "", 1, 1.0, {}, Network("", inside), Network("", 1.0), node_size)


def _rate(number: float, unit: str = "B/s") -> str:
    """A figure as people read it.

    Example:
        >>> _rate(4.5e11), _rate(989e12, "FLOP/s")
        ('450 GB/s', '989 TFLOP/s')
    """
    for prefix in ("", "K", "M", "G", "T"):
        if number < 1000 or prefix == "T":
            return f"{number:.3g} {prefix}{unit}"
        number /= 1000
    raise AssertionError("unreachable")
