"""Run DTensor collectives, products, and copies on torch devices, to measure their speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from layoutmap.core.mesh import Mesh
from layoutmap.cost.table import CollectiveKind
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.devices import get_local_device, list_device_names, make_device_mesh

_PLACEMENTS = {
    "all_gather": (Shard(0), Replicate()),
    "reduce_scatter": (Partial(), Shard(0)),
    "all_reduce": (Partial(), Replicate()),
    "all_to_all": (Shard(0), Shard(1)),
}


def make_collective_function(
    kind: CollectiveKind, mesh: Mesh, dim: str, num_bytes: int
) -> Callable[[], object]:
    """Return a function without arguments that runs a collective of float32 values over a mesh dim."""
    native, size = make_device_mesh(mesh), mesh.dim_size(dim)
    before, after = ([Replicate()] * len(mesh.dim_names) for _ in range(2))
    number = mesh.dim_names.index(dim)
    before[number], after[number] = _PLACEMENTS[kind]
    rows = num_bytes // 4 // size**2 // (size if kind == "all_gather" else 1)
    with simulation.simulate_ranks_of_mesh(native):
        ranks = simulation.filter_local_ranks(simulation.list_ranks(native))
        pieces = {rank: torch.ones(rows * size, size, device=get_local_device(native)) for rank in ranks}
        tensor = DTensor.from_local(
            simulation.make_local_tensor(pieces, torch.float32), native, before, run_check=False
        )

    def run_collective() -> object:
        with simulation.simulate_ranks_of_mesh(native), torch.no_grad():
            return tensor.redistribute(native, after)

    return run_collective


def make_matmul_function(dtype: str, size: int) -> Callable[[], object]:
    """Return a function that multiplies two square matrices on one device."""
    matrix = torch.ones(size, size, dtype=getattr(torch, dtype), device=_get_device())
    return lambda: matrix @ matrix


def make_memory_copy_function(num_bytes: int) -> Callable[[], Any]:
    """Return a function that reads and writes `num_bytes` on one device."""
    values = torch.ones(num_bytes // 4, device=_get_device())
    return values.clone


def get_device_memory_bytes() -> int | None:
    """Return the memory of a device in bytes, or None if the device uses the host's memory."""
    return (
        torch.cuda.get_device_properties(_get_device()).total_memory if _get_device().type == "cuda" else None
    )  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def make_peak_bytes_function() -> Callable[[], int | None]:
    """Return a function that returns the most bytes in use since this call, or None on CPUs."""
    if _get_device().type == "cpu":
        return lambda: None
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated


def make_device_facts() -> dict[str, str]:
    """Return a dict with the kind of the devices of this process for a report."""
    device = _get_device()
    return {"kind": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"}


def wait_for_result(result: object) -> None:
    """Wait until the devices have computed all results."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _get_device() -> torch.device:
    """Return the device of this process, which the creation of a mesh selects."""
    names = list_device_names()
    return get_local_device(make_device_mesh(Mesh(names, {"all": len(names)})))
