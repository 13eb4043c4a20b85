"""Write and read the cost of a step in a plan's JSON, with the speeds and sizes of the machine.

    "cost": {"flops": {"bfloat16": 25000000}, "traffic_bytes": 9000, "argument_bytes": 800, "peak_bytes": 1200,
             "machine": {"name": "h100", "devices": 64, ...}},
    "collectives": [
     ["all_gather", ["data"], 2, 4096, "blocks.0.up.kernel", "forward"]
    ]

Times follow from the counts and the machine, so they are not stored. The machine's speeds are stored, because they may
have changed under the same name in a different release of layoutmap, or in the user's own file of machines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from layoutmap.core.mesh import Mesh
from layoutmap.core.specs import BatchDim, list_batch_dims
from layoutmap.cost.machine import Device, Machine, Network
from layoutmap.cost.table import (
    ESTIMATE,
    Collective,
    CollectiveKind,
    PeakTensorKind,
    PeakTensors,
    Phase,
    StepCost,
)
from layoutmap.plan.advice import Advice
from layoutmap.plan.json_fields import (
    Count,
    Number,
    PlanJsonList,
    PlanJsonObject,
    PositiveFloat,
    convert_json_to_type,
    convert_json_values_to_type,
    make_plan_file_error,
)

_COUNTS = ("traffic_bytes", "argument_bytes", "peak_bytes")


def make_cost_fields(
    step: StepCost,
    machine: Machine,
    batch_dim: BatchDim | None,
    tried: Sequence[Advice],
    untried: Sequence[str],
) -> tuple[Iterator[list[Any]], dict[str, Any]]:
    """Return a cost as a plan's file stores it: rows of collectives, and an object with all other fields."""
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
    device = dataclasses.asdict(dataclasses.replace(machine.device, flops=dict(machine.device.flops)))
    written["machine"] = {"devices": machine.num_devices, **device}
    rows = (
        [c.kind, c.dims, c.calls, c.tensor_bytes, c.cause, c.phase, *[c.group] * bool(c.group)]
        for c in step.collectives
    )
    return rows, written


class _CollectiveJson(PlanJsonList):
    kind: CollectiveKind
    dims: tuple[str, ...]
    calls: Number
    tensor_bytes: Number
    cause: str
    phase: Phase
    group: Number = 0


class _NetworkJson(PlanJsonObject):
    name: str
    bandwidth: PositiveFloat
    ring_from: Number = 0


class _MachineJson(PlanJsonObject):
    name: str
    about: str
    memory_bytes: Number
    memory_bandwidth: PositiveFloat
    flops: dict[str, Any]
    fast: _NetworkJson
    slow: _NetworkJson
    node_size: Count
    devices: Count
    sources: tuple[str, ...] = ()


class _CostJson(PlanJsonObject):
    flops: dict[str, Any]
    traffic_bytes: Number
    argument_bytes: Number
    peak_bytes: Number
    machine: _MachineJson
    held: tuple[tuple[PeakTensorKind, str, tuple[Number, ...], str, Number], ...] = ()
    notes: tuple[str, ...] = ()
    known_by: str = ESTIMATE
    least_peak_bytes: Number = 0
    batch_dim: str | tuple[str, ...] | None = None
    tried: tuple[tuple[str, str, str, Number, str], ...] = ()
    untried: tuple[str, ...] = ()


def read_cost_fields(
    data: dict[str, Any], rows: list[Any], mesh: Mesh
) -> tuple[StepCost, Machine, BatchDim | None, tuple[Advice, ...], tuple[str, ...]]:
    """Return the arguments of `make_cost_fields`, read from a plan's cost object and its rows of collectives."""
    collectives = [
        convert_json_to_type(row, _CollectiveJson, f"collectives[{i}]") for i, row in enumerate(rows)
    ]
    for i, row in enumerate(collectives):
        for dim in row.dims:
            _check_dim_exists(dim, f"collectives[{i}]", mesh)
    found = convert_json_to_type(data, _CostJson, "cost")
    for dim in list_batch_dims(found.batch_dim):
        _check_dim_exists(dim, "cost.batch_dim", mesh)
    step = StepCost(
        mesh,
        tuple(Collective(*msgspec.structs.astuple(each)) for each in collectives),
        convert_json_values_to_type(found.flops, Number, "cost.flops"),
        found.traffic_bytes,
        found.argument_bytes,
        found.peak_bytes,
        found.notes,
        found.least_peak_bytes,
        tuple(PeakTensors(*each) for each in found.held),
        found.known_by,
    )
    tried = tuple(Advice(*each) for each in found.tried)
    return step, _read_machine(found.machine), found.batch_dim, tried, found.untried


def _check_dim_exists(dim: str, field: str, mesh: Mesh) -> None:
    if dim not in mesh:
        raise make_plan_file_error(
            f"{field}: {dim!r} is not a mesh dim", f"the mesh has {', '.join(mesh.dim_names)}"
        )


def _read_machine(item: _MachineJson) -> Machine:
    flops = convert_json_values_to_type(item.flops, PositiveFloat, "cost.machine.flops")
    if not flops:
        raise make_plan_file_error(
            "cost.machine.flops lists no element type",
            "the time of a step follows from the FLOP rate of each element type",
        )
    fast, slow = (Network(*msgspec.structs.astuple(each)) for each in (item.fast, item.slow))
    fields: dict[str, Any] = {f.name: getattr(item, f.name) for f in dataclasses.fields(Device)}
    fields |= {"flops": flops, "fast": fast, "slow": slow}
    return Machine(Device(**fields), item.devices)
