"""The cost of a step in a plan's JSON: what was counted, a collective in each line, and the machine with its figures.

    "cost": {"flops": {"bfloat16": 25000000}, "traffic_bytes": 9000, "argument_bytes": 800, "peak_bytes": 1200,
             "machine": {"name": "h100", "devices": 64, ...}},
    "collectives": [
     ["all_gather", ["data"], 2, 4096, "blocks.0.up.kernel", "forward"]
    ]

Times are worked out of it, so they are not written down; the machine's figures are, since those of another release of
this library, or of a file of one's own, may be others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from layoutmap.core.mesh import Mesh
from layoutmap.cost.machine import Device, Machine, Network
from layoutmap.cost.table import ESTIMATE, Collective, CollectiveKind, Held, HeldKind, Phase, StepCost
from layoutmap.plan.advice import Advice
from layoutmap.plan.json_fields import (
    Fields,
    Read,
    a_count,
    a_figure,
    a_number,
    a_row,
    a_text,
    an_object,
    list_of,
    one_of,
    or_null,
    refused,
)

_COUNTS = ("traffic_bytes", "argument_bytes", "peak_bytes")
_kind: Read[CollectiveKind] = one_of(*get_args(CollectiveKind))
_phase: Read[Phase] = one_of(*get_args(Phase))
_held_kind: Read[HeldKind] = one_of(*get_args(HeldKind))
_texts = list_of(a_text)


def cost_fields(
    step: StepCost, machine: Machine, batch_dim: str | None, tried: Sequence[Advice], untried: Sequence[str]
) -> tuple[Iterator[list[Any]], dict[str, Any]]:
    """Return the written fields of a cost: the collectives, and all else."""
    written: dict[str, Any] = {"flops": dict(step.flops), **{name: getattr(step, name) for name in _COUNTS}}
    if 0 < step.least_peak_bytes < step.peak_bytes:
        written["least_peak_bytes"] = step.least_peak_bytes
    if batch_dim is not None:
        written["batch_dim"] = batch_dim
    if step.notes:
        written["notes"] = step.notes
    if step.held:
        written["held"] = [dataclasses.astuple(each) for each in step.held]
    if step.known_by != ESTIMATE:
        written["known_by"] = step.known_by
    if tried:
        written["tried"] = [dataclasses.astuple(each) for each in tried]
    if untried:
        written["untried"] = untried
    device = {f.name: getattr(machine.device, f.name) for f in dataclasses.fields(Device)}
    device |= {name: dataclasses.asdict(device[name]) for name in ("fast", "slow")}
    written["machine"] = {"devices": machine.num_devices, **device, "flops": dict(machine.device.flops)}
    return map(_collective, step.collectives), written


def _collective(c: Collective) -> list[Any]:
    return [c.kind, c.dims, c.calls, c.tensor_bytes, c.cause, c.phase, *[c.group] * bool(c.group)]


def read_cost_fields(
    top: Fields, mesh: Mesh
) -> tuple[StepCost, Machine, str | None, tuple[Advice, ...], tuple[str, ...]]:
    """Read the arguments of `cost_fields` from a plan's file."""
    collectives = top("collectives", list_of(lambda each, place: _read_collective(each, place, mesh)))
    fields = top("cost", Fields)
    flops = fields("flops", _numbers(a_number))
    traffic, arguments, peak = (fields(name, a_number) for name in _COUNTS)
    held = fields("held", list_of(_read_held), ())
    notes, known_by = fields("notes", _texts, ()), fields("known_by", a_text, ESTIMATE)
    least = fields("least_peak_bytes", a_number, 0)
    step = StepCost(mesh, collectives, flops, traffic, arguments, peak, notes, least, held, known_by)
    machine = fields("machine", _read_machine)
    batch_dim = fields("batch_dim", or_null(a_text), None)
    if batch_dim is not None:
        _check_dim(batch_dim, "cost.batch_dim", mesh)
    tried, untried = fields("tried", list_of(_read_advice), ()), fields("untried", _texts, ())
    fields.check()
    return step, machine, batch_dim, tried, untried


def _read_collective(item: Any, place: str, mesh: Mesh) -> Collective:
    row = a_row(_kind, _texts, a_number, a_number, a_text, _phase, a_number, least=6)(item, place)
    for dim in row[1]:
        _check_dim(dim, place, mesh)
    return Collective(*row)


def _read_held(item: Any, place: str) -> Held:
    return Held(*a_row(_held_kind, a_text, list_of(a_number), a_text, a_number, least=5)(item, place))


def _read_advice(item: Any, place: str) -> Advice:
    return Advice(*a_row(a_text, a_text, a_text, a_number, a_text, least=5)(item, place))


def _check_dim(dim: str, place: str, mesh: Mesh) -> None:
    if dim not in mesh:
        raise refused(f"{place}: {dim!r} is not a mesh dim", f"the mesh has {', '.join(mesh.dim_names)}")


def _read_machine(item: Any, place: str) -> Machine:
    fields = Fields(item, place)
    device = Device(
        fields("name", a_text),
        fields("about", a_text),
        fields("memory_bytes", a_number),
        fields("memory_bandwidth", a_figure),
        fields("flops", _numbers(a_figure)),
        fields("fast", _read_network),
        fields("slow", _read_network),
        fields("node_size", a_count),
        fields("sources", _texts, ()),
    )
    if not device.flops:
        raise refused(f"{place}.flops has no type", "time follows from how fast a device multiplies")
    machine = Machine(device, fields("devices", a_count))
    fields.check()
    return machine


def _read_network(item: Any, place: str) -> Network:
    fields = Fields(item, place)
    network = Network(fields("name", a_text), fields("bandwidth", a_figure), fields("ring_from", a_number, 0))
    fields.check()
    return network


def _numbers(read: Read[Any]) -> Read[dict[str, Any]]:
    """Return what reads an object of numbers."""
    return lambda value, place: {
        name: read(each, f"{place}.{name}") for name, each in an_object(value, place).items()
    }
