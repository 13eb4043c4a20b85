"""Convert meshes and layouts to torch's device meshes and placements, and back.

Devices are named `CPU:0`, `GPU:3`: the type, and the rank of the process that the device belongs to, or a simulated
rank. A layout is `(DeviceMesh, placements)`, one placement for each mesh dim. An axis over several dims is split from
the first placement to the last, so an order other than the mesh's becomes a `_StridedShard`.
"""

from __future__ import annotations

import functools
import re
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from layoutmap.core.errors import EngineError, join_names
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.engines.checks import (
    bind_mesh_to_devices,
    check_no_explicit_axes,
    make_no_devices_error,
    resolve_device_names,
)
from layoutmap.engines.tested import ImportErrorConverter, check_names_exist
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.changes import call_when_patches_are_removed, meshes
from layoutmap.engines.torch.dtensor_ops import install_patches_for_mesh
from layoutmap.engines.torch.simulation import replace_default_group_temporarily
from layoutmap.engines.torch.specs import DTensorSpec, cache_while_meshes_exist

with ImportErrorConverter("torch"):
    from torch.distributed.tensor._dtensor_spec import ShardOrderEntry

check_names_exist(
    "torch", (DTensorSpec, "_convert_shard_order_to_StridedShard _maybe_convert_StridedShard_to_shard_order")
)

_TYPES = {"CPU": "cpu", "GPU": "cuda"}
_NAME = re.compile(r"[A-Z]+:\d+$", re.IGNORECASE)
_lock = threading.RLock()
_device_meshes: dict[tuple[Any, ...], DeviceMesh] = {}
# A DeviceMesh works only as long as its process group exists, so keys contain this group, too.
_mesh_cache: dict[tuple[Mesh, Any], DeviceMesh] = {}
# Meshes with and without devices share a DeviceMesh, so this stores the mesh for which it was first made, and the
# layout of each DTensor is recorded separately (see `arrays.record_layout`).
_mesh_of: weakref.WeakKeyDictionary[DeviceMesh, Mesh] = weakref.WeakKeyDictionary()


def list_device_names(device_type: str | None = None) -> tuple[str, ...]:
    """Return the names of all devices of a type, by default GPUs if the process group supports them."""
    there = _list_device_types()
    kind = next(iter(there)) if device_type is None else device_type.upper()
    if kind not in there:
        why = f"torch has devices of these types: {', '.join(there)}"
        raise make_no_devices_error("torch", kind, there[0], why)
    return tuple(f"{kind}:{i}" for i in range(simulation.get_world_size()))


def _list_device_types() -> list[str]:
    """Return the device types that the process group supports, the default type first."""
    if simulation.is_simulated():
        return ["CPU", "GPU"] if torch.cuda.is_available() else ["CPU"]
    # If there is no process group, torch will create one from torchrun's environment variables, for all device types.
    if not dist.is_initialized():
        return ["GPU", "CPU"] if torch.cuda.is_available() and dist.is_nccl_available() else ["CPU"]
    served = dist.get_backend_config()
    gpu = ["GPU"] if torch.cuda.is_available() and "cuda:" in served else []
    return gpu + (["CPU"] if "cpu:" in served else [])


def bind_mesh(mesh: Mesh) -> Mesh:
    """Return a mesh with devices of this machine. An abstract mesh gets the first devices."""
    check_no_explicit_axes(mesh, "torch")
    names = resolve_device_names(mesh, list_device_names, "torch", _format_fix_for_too_few_devices(mesh.size))
    here = set(simulation.filter_local_ranks(map(_parse_rank_of_device, names)))
    return bind_mesh_to_devices(
        mesh, names, [i for i, name in enumerate(names) if _parse_rank_of_device(name) in here]
    )


def _format_fix_for_too_few_devices(num_devices: int) -> str:
    if simulation.is_simulated():
        return (
            f"call lm.simulate_devices({num_devices}) before the first mesh is used, or restart the program with "
            f"torchrun --nproc-per-node {num_devices}; or make the mesh smaller"
        )
    return f"restart the program with torchrun --nproc-per-node {num_devices}, or make the mesh smaller"


def convert_to_torch_device_type(device_type: str) -> str:
    """Return torch's name of a device type: `"cuda"` for `"GPU"`."""
    return _TYPES[device_type]


def _parse_rank_of_device(name: str) -> int:
    return int(name.rpartition(":")[2])


def get_local_device(mesh: DeviceMesh) -> torch.device:
    """Return the device that stores this process's shards on a mesh."""
    if mesh.device_type == "cpu":  # in torch, the CPU has no device number
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.cuda.current_device())  # the GPU that DeviceMesh has selected


def make_device_mesh(mesh: Mesh) -> DeviceMesh:
    """Return the `DeviceMesh` of a mesh. Equal meshes share one object and its process groups.

    Raises:
        MeshError: The machine does not have the mesh's devices.
        EngineError: The devices do not come in an order that torch keeps.
    """
    simulation.ensure_process_group()
    # A DeviceMesh ends with its process group, so the cache key needs the group.
    group = simulation.get_global_group()
    known = _mesh_cache.get((mesh, group))
    if known is None:
        known = _mesh_cache[mesh, group] = _create_device_mesh(mesh)
    if known not in meshes:  # patches may have been removed after the mesh was cached, so install them again
        install_patches_for_mesh(known)
    _mesh_of.setdefault(known, mesh)
    return known


def discard_meshes_of_group(group: dist.ProcessGroup | None) -> None:
    """Remove the device meshes of a process group from the caches, because the group ends."""
    with _lock:
        for known in (_mesh_cache, _device_meshes):
            for key in [key for key in known if key[-1] is group]:
                del known[key]


def _end_process_groups_of_mesh(device_mesh: DeviceMesh) -> None:
    """End the process groups of a simulated mesh, before torch destroys the default group."""
    # If this process's rank is not in the mesh, it has no groups of the mesh to destroy.
    is_here = simulation.get_rank() in simulation.list_ranks(device_mesh)
    for group in device_mesh.get_all_groups() if is_here else ():
        if group is not simulation.get_global_group():  # torch destroys the default group itself, so skip it
            dist.destroy_process_group(group)
    discard_meshes_of_group(simulation.get_global_group())


def _create_device_mesh(mesh: Mesh) -> DeviceMesh:
    bound = bind_mesh(mesh)
    check_device_order(mesh)
    names = list(bound.devices or ())
    ranks = np.array([_parse_rank_of_device(name) for name in names]).reshape(bound.shape)
    kind = convert_to_torch_device_type(names[0].partition(":")[0])
    key = (kind, tuple(ranks.flat), bound.shape, bound.dim_names, simulation.get_global_group())
    with _lock:
        if key not in _device_meshes:
            with (
                replace_default_group_temporarily(simulation.get_global_group()),
                simulation.simulate_ranks(ranks.flat),
            ):
                _device_meshes[key] = DeviceMesh(kind, ranks.tolist(), mesh_dim_names=bound.dim_names)
            if simulation.is_simulated():
                call_when_patches_are_removed(
                    functools.partial(_end_process_groups_of_mesh, _device_meshes[key])
                )
        return _device_meshes[key]


def check_device_order(mesh: Mesh) -> None:
    """Raise an `EngineError` if torch cannot keep the order of a mesh's devices. No device is used."""
    if not all(map(_NAME.match, mesh.devices or ("",))):
        # An abstract mesh gets its devices in order, and device names of other frameworks contain no rank, so neither
        # is checked.
        return
    ranks = np.array([_parse_rank_of_device(name) for name in mesh.devices or ()]).reshape(mesh.shape)
    if all((np.diff(ranks, axis=axis) > 0).all() for axis in range(ranks.ndim)):
        return
    raise EngineError(
        "torch does not support a mesh with this order of devices",
        facts={"mesh": str(mesh), "devices": join_names(mesh.devices or ())},
        why="torch sorts the ranks of each process group, so shards would silently change places",
        fix="order the devices so that their numbers increase along every mesh dim",
    )


def convert_device_mesh_to_mesh(device_mesh: DeviceMesh) -> Mesh | None:
    """Return the layoutmap mesh of a `DeviceMesh`, or None if its dims have no names."""
    known = _mesh_of.get(device_mesh)
    if known is not None or device_mesh.mesh_dim_names is None:
        return known
    return _make_mesh_from_device_mesh(device_mesh)


@cache_while_meshes_exist
def _make_mesh_from_device_mesh(device_mesh: DeviceMesh) -> Mesh:
    assert device_mesh.mesh_dim_names is not None
    kind = next(name for name, theirs in _TYPES.items() if theirs == device_mesh.device_type)
    ranks = simulation.list_ranks(device_mesh)
    here = set(simulation.filter_local_ranks(ranks))
    return Mesh(
        [f"{kind}:{each}" for each in ranks],
        list(zip(device_mesh.mesh_dim_names, device_mesh.mesh.shape, strict=True)),
        local_device_ids=[i for i, each in enumerate(ranks) if each in here],
    )


@functools.lru_cache(maxsize=4096)
def convert_layout_to_placements(layout: Layout, device_mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Return the placements of a layout, one per mesh dim."""
    dims = layout.mesh.dim_names
    axes = [[dims.index(dim) for dim in layout.list_mesh_dims(axis)] for axis in range(layout.rank)]
    placements: list[Placement] = [Replicate() for _ in dims]
    for axis, numbers in enumerate(axes):
        for number in numbers:
            placements[number] = Shard(axis)
    if all(numbers == sorted(numbers) for numbers in axes):  # in torch's default order, placements suffice
        return tuple(placements)
    order = tuple(
        ShardOrderEntry(tensor_dim=axis, mesh_dims=tuple(numbers))
        for axis, numbers in enumerate(axes)
        if numbers
    )
    return DTensorSpec._convert_shard_order_to_StridedShard(order, tuple(placements), device_mesh)  # pyright: ignore[reportPrivateUsage]


# DTensor splits an axis by one mesh dim after another, so uneven shards may differ from the layout's (decisions/0235).
def explain_why_padding_is_impossible(layout: Layout, shape: Sequence[int]) -> str:
    """Return why DTensor's uneven shards would differ from those of a layout, or an empty text if they are equal."""
    for axis in layout.find_uneven_axes(shape):
        sizes, dims = [shape[axis]], layout.list_mesh_dims(axis)
        for dim in dims:
            sizes = [part for size in sizes for part in _compute_part_sizes(size, layout.mesh.dim_size(dim))]
        if sizes != _compute_part_sizes(shape[axis], layout.num_shards(axis)):
            return f"torch splits axis {axis} over {', '.join(dims)} one after another, which gives different shards"
    return ""


def _compute_part_sizes(size: int, num_parts: int) -> list[int]:
    part = -(-size // num_parts)
    return [max(0, min(part, size - i * part)) for i in range(num_parts)]


def find_layout_of_placements(
    device_mesh: DeviceMesh, placements: Sequence[Placement], rank: int
) -> Layout | None:
    """Return the layout that equals DTensor placements, or None if no layout does or the mesh has no dim names.

    Placements do not tell the order of dims of size 1 on an axis, so these get the order of the mesh.
    """
    mesh = convert_device_mesh_to_mesh(device_mesh)
    if mesh is None or any(placement.is_partial() for placement in placements):
        return None
    order = DTensorSpec._maybe_convert_StridedShard_to_shard_order(tuple(placements), device_mesh)  # pyright: ignore[reportPrivateUsage]
    if order is None:  # no order of mesh dims makes these shards
        return None
    axes: list[tuple[str, ...]] = [()] * rank
    for entry in order:
        axes[entry.tensor_dim] = tuple(mesh.dim_names[number] for number in entry.mesh_dims)
    return Layout(axes, mesh)
