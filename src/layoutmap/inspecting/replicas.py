"""Compare the replicas of a model between devices and processes bit for bit.

Devices that store the same shard of a variable must store the same values. In a program that averages gradients by
hand, or seeds its processes differently, replicas may drift apart without an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from layoutmap.core.checksums import compute_checksum
from layoutmap.core.errors import join_names
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.variables import VariableSpec
from layoutmap.engines import Engine
from layoutmap.engines.agreement import map_process_names_to_texts
from layoutmap.engines.protocol import PlacementWithoutLayout
from layoutmap.plan.problems import Problem
from layoutmap.scope.process_group import MeshProcesses

_NO_SHARD = "nothing"


@dataclass(frozen=True, slots=True)
class PlacedVariable:
    """Store a variable with its array and its layout in this process.

    Args:
        variable: The variable.
        array: The array of the variable.
        placement: The layout of the array, or a description of where an array without a layout is.
        layout: The layout on the plan's mesh; `None`: there is none, so the values are not compared.
    """

    variable: VariableSpec
    array: Any
    placement: Layout | PlacementWithoutLayout
    layout: Layout | None

    @property
    def comparison_text(self) -> str:
        """The dtype, shape, and layout as text, which processes compare."""
        placement = self.placement
        how = f"{placement} on {placement.mesh}" if isinstance(placement, Layout) else placement.what
        return f"{self.variable.dtype}{list(self.variable.shape)} {how}"


def find_replica_problems(variables: Sequence[PlacedVariable], engine: Engine, mesh: Mesh) -> list[Problem]:
    """Return a problem for each variable that differs between devices or processes. All processes must call this."""

    @cache
    def name_device_shards(layout: Layout) -> Mapping[str, str]:
        """Return the name of each device's shard, or an empty mapping for replicated layouts."""
        dims = {dim for axis in range(layout.rank) for dim in layout.list_mesh_dims(axis)}
        if not dims:
            return {}
        return {
            name: ", ".join(
                f"{dim}={coordinate}"
                for dim, coordinate in zip(layout.mesh.dim_names, layout.mesh.coords(i), strict=True)
                if dim in dims
            )
            for i, name in enumerate(engine.bind_mesh(layout.mesh).devices or ())
        }

    local = dict[str, tuple[str, list[tuple[str, str, int]]]]()
    for each in variables:
        shards = [*_iterate_shard_checksums(each, engine, name_device_shards)]
        local[each.variable.path] = each.comparison_text, shards
    group = MeshProcesses(engine, mesh if any(shards for _, shards in local.values()) else None)
    by_process: list[Mapping[str, Any]] = [local]
    if group.has_other_processes:
        by_process = [json.loads(text) for text in group.gather_text(json.dumps(local))]
    found: list[Problem] = []
    for path in dict.fromkeys(path for each in by_process for path in each):
        texts = [each.get(path, (_NO_SHARD, []))[0] for each in by_process]
        if len(set(texts)) > 1:
            what = f"{path}: its shape, dtype, or layout differs between processes"
            why = "each process stores a part of the same model, so all must create it equally"
            fix = "create it in each process by the same code, with the same layout map, sizes, and dtypes"
            found.append(
                Problem(
                    "differs", "error", path, what, _format_facts(map_process_names_to_texts(texts)), why, fix
                )
            )
        shards = [shard for each in by_process for shard in each.get(path, ("", []))[1]]
        found += _iterate_replica_difference_problems(path, shards)
    return found


def _iterate_shard_checksums(
    placed: PlacedVariable, engine: Engine, name_device_shards: Callable[[Layout], Mapping[str, str]]
) -> Iterator[tuple[str, str, int]]:
    """Yield for each device of this process: the device, the name of its shard, and a checksum of the shard."""
    layout = placed.layout
    if layout is None:
        return
    shard_names = name_device_shards(layout)
    for device, values in engine.iterate_device_values(placed.array):
        # An unsharded array may be on a device that the mesh lacks, so its shard has no name.
        yield device, shard_names[device] if shard_names else "", compute_checksum(values)


def _iterate_replica_difference_problems(path: str, shards: Sequence[Sequence[Any]]) -> Iterator[Problem]:
    """Yield a problem if devices that store the same shard of a variable have different checksums of it."""
    by_shard: dict[str, dict[int, list[str]]] = {}
    for device, shard, checksum in shards:
        by_shard.setdefault(shard, {}).setdefault(checksum, []).append(device)
    wrong = {shard: by_checksum for shard, by_checksum in by_shard.items() if len(by_checksum) > 1}
    if wrong:
        shard, by_checksum = next(iter(wrong.items()))
        facts = {"shard": shard or "all of it"} | {
            f"checksum {checksum:08x}": join_names(devices) for checksum, devices in by_checksum.items()
        }
        if len(wrong) > 1:
            facts["shards that differ"] = f"{len(wrong)} of {len(by_shard)}"
        why = "devices that store the same shard must store the same values, or their results differ"
        fix = "load a checkpoint, and let all processes take the same steps: the same gradients, seeds, and data order"
        yield Problem(
            "drifted",
            "error",
            path,
            f"{path}: its replicas have drifted apart",
            _format_facts(facts),
            why,
            fix,
        )


def _format_facts(facts: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(value)) for name, value in facts.items())
