"""Collectives of DTensor, products and copies on torch's devices, to be measured; and facts of the devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from layoutmap.core.mesh import Mesh
from layoutmap.cost.table import CollectiveKind
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.devices import device_mesh, device_names, device_of

_PLACEMENTS = {
    "all_gather": (Shard(0), Replicate()),
    "reduce_scatter": (Partial(), Shard(0)),
    "all_reduce": (Partial(), Replicate()),
    "all_to_all": (Shard(0), Shard(1)),
}


def collective(kind: CollectiveKind, mesh: Mesh, dim: str, num_bytes: int) -> Callable[[], object]:
    """Return a function that runs a collective of float32 over a mesh dim."""
    native, size = device_mesh(mesh), mesh.dim_size(dim)
    there, wanted = ([Replicate()] * len(mesh.dim_names) for _ in range(2))
    number = mesh.dim_names.index(dim)
    there[number], wanted[number] = _PLACEMENTS[kind]
    rows = num_bytes // 4 // size**2 // (size if kind == "all_gather" else 1)
    with simulation.on_mesh(native):
        ranks = simulation.ranks_here(simulation.ranks_of(native))
        pieces = {rank: torch.ones(rows * size, size, device=device_of(native)) for rank in ranks}
        tensor = DTensor.from_local(simulation.join(pieces, torch.float32), native, there, run_check=False)

    def run() -> object:
        with simulation.on_mesh(native), torch.no_grad():
            return tensor.redistribute(native, wanted)

    return run


def product(dtype: str, size: int) -> Callable[[], object]:
    """Return a function that multiplies two square matrices on one device."""
    matrix = torch.ones(size, size, dtype=getattr(torch, dtype), device=_device())
    return lambda: matrix @ matrix


def copy(num_bytes: int) -> Callable[[], Any]:
    """Return a function that copies on one device: it reads so many bytes and writes as many."""
    values = torch.ones(num_bytes // 4, device=_device())
    return values.clone


def memory_bytes() -> int | None:
    """Return the memory of a device; `None`: it is that of the host."""
    return torch.cuda.get_device_properties(_device()).total_memory if _device().type == "cuda" else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def watched_peak() -> Callable[[], int | None]:
    """Return what returns the most memory that tensors have taken since this call; `None`: CPUs do not report it."""
    if _device().type == "cpu":
        return lambda: None
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated


def facts() -> dict[str, str]:
    """Return what torch knows of the devices of this process, for people."""
    device = _device()
    return {"kind": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"}


def wait(done: object) -> None:
    """Return when all is computed that was begun."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _device() -> torch.device:
    """The device of this process. Making a mesh chooses it, unless something is on another one before."""
    names = device_names()
    return device_of(device_mesh(Mesh(names, {"all": len(names)})))
