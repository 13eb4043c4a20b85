"""The speeds that were measured: beside those of a machine file, and as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from statistics import median
from typing import Any

import yaml

from layoutmap.core.mesh import Mesh
from layoutmap.core.text_table import size
from layoutmap.cost.cost import duration
from layoutmap.cost.machine import Device, Group, Machine, Network
from layoutmap.testing.laws import Outcome
from layoutmap.testing.schedule import Tried

COLUMNS = ("on", "what", "over", "measured", "expected")
_FAR_BELOW = {True: 3, False: 10}
"""How many times slower than a machine's peak, or than the same collective elsewhere, is a finding."""
_HEAD = """\
# Written by layoutmap selftest. A network has the median of all collectives over it;
# one that was not measured has that of the other one.
"""
_OF_A_DEVICE = {"memory": ("memory", "B"), "memory_bandwidth": ("copy in memory", "B/s")}
_FIELDS = {"memory": "memory_bytes", "memory_bandwidth": "memory_bandwidth"}
_OF_A_STEP: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "step": ("a step", duration),
    "step_bytes": ("peak of a step", size),
    "created_bytes": ("peak of creation", size),
}
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
        """A row for each figure, beside that of the machine file, or that which was counted."""
        rows: list[list[str]] = []
        for key, (figure, group, bandwidth) in sorted(self._collectives.items()):
            over = f"{figure['dim']} of {figure['mesh']}" + f", {group.nodes} hosts" * (group.nodes > 1)
            expected = self._expected(key) if self.on else None
            rows.append(
                self._row(f"{_named(figure)} of {size(figure['bytes'])}", over, _rate, bandwidth, expected)
            )
        for name, number in self._best.items():
            what, unit = _OF_A_DEVICE.get(name, (f"product in {name}", "FLOP/s"))
            expected = self.on and (self.on.flops.get(name) or getattr(self.on, _FIELDS.get(name, ""), None))
            rows.append(self._row(what, "one device", partial(_rate, unit=unit), number, expected))
        for name, (what, text) in _OF_A_STEP.items() if self.step else ():
            rows.append(self._row(what, self.step["mesh"], text, self.step[name], self.counted.get(name)))
        return rows or [[self.engine, "not measured", "", "", ""]]

    def _row(
        self, what: str, over: str, text: Callable[[float], str], number: float | None, expected: float | None
    ) -> list[str]:
        figures = "not reported" if number is None else text(number), text(expected) if expected else ""
        return [self.engine, what, over, *figures]

    def to_machine_file(self, about: str) -> str:
        """Return a machine file with one device, `here`, that `--on` takes.

        Args:
            about: What was measured, and when.
        """
        best = dict(self._best)
        device: dict[str, Any] = {"about": about}
        device |= {name: f"{best.pop(name):.0f} {unit}" for name, (_, unit) in _OF_A_DEVICE.items()}
        device["flops"] = {dtype: f"{number:.0f} FLOP/s" for dtype, number in best.items()}
        bandwidths = [(group.nodes > 1, bandwidth) for _, group, bandwidth in self._collectives.values()]
        for network, is_far, where in (("fast", False, "in a host"), ("slow", True, "between hosts")):
            own = [bandwidth for each, bandwidth in bandwidths if each == is_far]
            rate = median(own or [bandwidth for _, bandwidth in bandwidths])
            device[network] = {"name": where + " (not measured)" * (not own), "bandwidth": f"{rate:.0f} B/s"}
        device["fast"]["devices"] = self.node_size
        return _HEAD + yaml.safe_dump({"version": 1, "devices": {"here": device}}, sort_keys=False)


def _named(figure: Mapping[str, Any]) -> str:
    return figure["kind"].replace("_", "-")


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
