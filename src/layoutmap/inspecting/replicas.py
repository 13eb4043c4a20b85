"""Compare the replicas of a model between devices and processes, bit by bit.

Devices that hold the same piece of a variable must hold the same values. A program that averages gradients by hand, or
seeds its processes differently, has replicas that drift apart, and trains on without an error.
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
from layoutmap.engines.agreement import label_processes
from layoutmap.engines.protocol import Unplaced
from layoutmap.plan.problems import Problem
from layoutmap.scope.process_group import Group

_NO_SHARD = "nothing"


@dataclass(frozen=True, slots=True)
class StoredVariable:
    """A variable with its array and layout in this process.

    Args:
        variable: The variable.
        array: Its array.
        place: The layout of the array, or the placement of an array without one.
        layout: The layout on the plan's mesh; `None`: it has none, and its values are not compared.
    """

    variable: VariableSpec
    array: Any
    place: Layout | Unplaced
    layout: Layout | None

    @property
    def text(self) -> str:
        """The dtype, shape, and layout as text, which processes compare."""
        how = f"{self.place} on {self.place.mesh}" if isinstance(self.place, Layout) else self.place.what
        return f"{self.variable.dtype}{list(self.variable.shape)} {how}"


def find_differences(held: Sequence[StoredVariable], engine: Engine, mesh: Mesh) -> list[Problem]:
    """Return a problem for each variable that differs between devices or processes. All processes must call this."""

    @cache
    def name_shards(layout: Layout) -> Mapping[str, str]:
        """Return the name of each device's shard, or an empty mapping for replicated layouts."""
        dims = {dim for axis in range(layout.rank) for dim in layout.list_mesh_dims(axis)}
        if not dims:
            return {}
        return {
            name: ", ".join(
                f"{dim}={place}"
                for dim, place in zip(layout.mesh.dim_names, layout.mesh.coords(i), strict=True)
                if dim in dims
            )
            for i, name in enumerate(engine.bind(layout.mesh).devices or ())
        }

    own = {each.variable.path: (each.text, [*_list_shards(each, engine, name_shards)]) for each in held}
    group = Group(engine, mesh if any(pieces for _, pieces in own.values()) else None)
    told: list[Mapping[str, Any]] = [own]
    if group.has_others:
        told = [json.loads(text) for text in group.texts(json.dumps(own))]
    found: list[Problem] = []
    for path in dict.fromkeys(path for each in told for path in each):
        texts = [each.get(path, (_NO_SHARD, []))[0] for each in told]
        if len(set(texts)) > 1:
            what = f"{path}: the processes hold it in different ways"
            why = "each holds its part of one model, so all must make the same one"
            fix = "make it in each process by the same code, with the same map, sizes and element types"
            found.append(
                Problem("differs", "error", path, what, _format_facts(label_processes(texts)), why, fix)
            )
        found += _find_drift(path, [piece for each in told for piece in each.get(path, ("", []))[1]])
    return found


def _list_shards(
    held: StoredVariable, engine: Engine, pieces_of: Callable[[Layout], Mapping[str, str]]
) -> Iterator[tuple[str, str, int]]:
    """Yield the shards on this process's devices: the device, the shard's name, and a checksum."""
    layout = held.layout
    if layout is None:
        return
    pieces = pieces_of(layout)
    for device, values in engine.iterate_by_device(held.array):
        # An unsharded array may be on a device that belongs to no mesh.
        yield device, pieces[device] if pieces else "", compute_checksum(values)


def _find_drift(path: str, pieces: Sequence[Sequence[Any]]) -> Iterator[Problem]:
    by_piece: dict[str, dict[int, list[str]]] = {}
    for device, piece, bits in pieces:
        by_piece.setdefault(piece, {}).setdefault(bits, []).append(device)
    wrong = {piece: by_bits for piece, by_bits in by_piece.items() if len(by_bits) > 1}
    if wrong:
        piece, by_bits = next(iter(wrong.items()))
        facts = {"piece": piece or "all of it"} | {
            f"checksum {bits:08x}": join_names(devices) for bits, devices in by_bits.items()
        }
        if len(wrong) > 1:
            facts["pieces that differ"] = f"{len(wrong)} of {len(by_piece)}"
        why = "devices that hold the same piece must hold the same values: what was computed from them differs since"
        fix = "load a checkpoint, and have all processes take the same steps: the same gradients, seeds and data order"
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
