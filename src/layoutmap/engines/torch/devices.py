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
    bind_devices,
    check_auto_axes,
    make_no_devices_error,
    resolve_device_names,
)
from layoutmap.engines.tested import Needed, check_names
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.changes import call_on_restore, meshes
from layoutmap.engines.torch.dtensor_ops import prepare_mesh
from layoutmap.engines.torch.simulation import default_group
from layoutmap.engines.torch.specs import DTensorSpec, cache_by_mesh

with Needed("torch"):
    from torch.distributed.tensor._dtensor_spec import ShardOrderEntry

check_names(
    "torch", (DTensorSpec, "_convert_shard_order_to_StridedShard _maybe_convert_StridedShard_to_shard_order")
)

_TYPES = {"CPU": "cpu", "GPU": "cuda"}
_NAME = re.compile(r"[A-Z]+:\d+$", re.IGNORECASE)
_lock = threading.RLock()
_device_meshes: dict[tuple[Any, ...], DeviceMesh] = {}
_mesh_cache: dict[tuple[Mesh, Any], DeviceMesh] = {}  # cached for the current process group
# An abstract mesh and the same mesh with devices map to one DeviceMesh. DTensors use the first one unless they record
# another (see `arrays.mark`).
_mesh_of: weakref.WeakKeyDictionary[DeviceMesh, Mesh] = weakref.WeakKeyDictionary()


def list_device_names(device_type: str | None = None) -> tuple[str, ...]:
    """Return the names of all devices of a type. The default is GPUs if the process group supports them."""
    there = _list_device_types()
    kind = next(iter(there)) if device_type is None else device_type.upper()
    if kind not in there:
        why = f"it has devices of these types: {', '.join(there)}"
        raise make_no_devices_error("torch", kind, there[0], why)
    return tuple(f"{kind}:{i}" for i in range(simulation.get_world_size()))


def _list_device_types() -> list[str]:
    """List the device types that the process group supports, the default one first."""
    if simulation.is_simulated():
        return ["CPU", "GPU"] if torch.cuda.is_available() else ["CPU"]
    if not dist.is_initialized():  # torch creates the process group from the launcher's environment variables
        return ["GPU", "CPU"] if torch.cuda.is_available() and dist.is_nccl_available() else ["CPU"]
    served = dist.get_backend_config()
    gpu = ["GPU"] if torch.cuda.is_available() and "cuda:" in served else []
    return gpu + (["CPU"] if "cpu:" in served else [])


def bind_mesh(mesh: Mesh) -> Mesh:
    """Bind a mesh to this machine: an abstract mesh gets the first devices, and other meshes keep theirs."""
    check_auto_axes(mesh, "torch")
    names = resolve_device_names(mesh, list_device_names, "torch", _fix_too_few(mesh.size))
    here = set(simulation.filter_local_ranks(map(_rank, names)))
    return bind_devices(mesh, names, [i for i, name in enumerate(names) if _rank(name) in here])


def _fix_too_few(size: int) -> str:
    if simulation.is_simulated():
        return (
            f"call lm.simulate_devices({size}) before the first mesh is used, or restart the program with "
            f"torchrun --nproc-per-node {size}; or make the mesh smaller"
        )
    return f"restart the program with torchrun --nproc-per-node {size}, or make the mesh smaller"


def convert_device_type(device_type: str) -> str:
    """Return torch's name of a device type: `"cuda"` for `"GPU"`."""
    return _TYPES[device_type]


def _rank(name: str) -> int:
    return int(name.rpartition(":")[2])


def get_device(mesh: DeviceMesh) -> torch.device:
    """Return the device for this process's shards of tensors on a mesh."""
    if mesh.device_type == "cpu":  # the CPU has no device number in torch
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.cuda.current_device())  # DeviceMesh selected this device


def make_device_mesh(mesh: Mesh) -> DeviceMesh:
    """Make the `DeviceMesh` of a mesh. Equal meshes share one object and its process groups.

    Raises:
        MeshError: The machine does not have the mesh's devices.
        EngineError: The devices do not come in an order that torch keeps.
    """
    simulation.start()
    group = simulation.get_group()  # discard the meshes of a group that has ended
    known = _mesh_cache.get((mesh, group))
    if known is None:
        known = _mesh_cache[mesh, group] = _create_device_mesh(mesh)
    if known not in meshes:  # do not search for ended groups if the mesh is cached
        prepare_mesh(known)
    _mesh_of.setdefault(known, mesh)
    return known


def forget_process_group(group: dist.ProcessGroup | None) -> None:
    """Discard the device meshes of a process group that ends."""
    with _lock:
        for known in (_mesh_cache, _device_meshes):
            for key in [key for key in known if key[-1] is group]:
                del known[key]


def _end_process_groups(native: DeviceMesh) -> None:
    """End the process groups of simulated ranks before the default group ends."""
    # torch creates no groups for a mesh without this rank.
    is_here = simulation.get_rank() in simulation.list_ranks(native)
    for group in native.get_all_groups() if is_here else ():
        if group is not simulation.get_group():  # torch destroys the default group itself
            dist.destroy_process_group(group)
    forget_process_group(simulation.get_group())


def _create_device_mesh(mesh: Mesh) -> DeviceMesh:
    bound = bind_mesh(mesh)
    check_device_order(mesh)
    names = list(bound.devices or ())
    ranks = np.array([_rank(name) for name in names]).reshape(bound.shape)
    kind = convert_device_type(names[0].partition(":")[0])
    key = (kind, tuple(ranks.flat), bound.shape, bound.dim_names, simulation.get_group())
    with _lock:
        if key not in _device_meshes:
            with default_group(simulation.get_group()), simulation.simulate_ranks(ranks.flat):
                _device_meshes[key] = DeviceMesh(kind, ranks.tolist(), mesh_dim_names=bound.dim_names)
            if simulation.is_simulated():
                call_on_restore(functools.partial(_end_process_groups, _device_meshes[key]))
        return _device_meshes[key]


def check_device_order(mesh: Mesh) -> None:
    """Raise for a device order that torch cannot keep, without using a device.

    Raises:
        EngineError: It does.
    """
    if not all(map(_NAME.match, mesh.devices or ("",))):
        return  # devices in default order, or of another framework
    ranks = np.array([_rank(name) for name in mesh.devices or ()]).reshape(mesh.shape)
    if all((np.diff(ranks, axis=axis) > 0).all() for axis in range(ranks.ndim)):
        return
    raise EngineError(
        "torch does not support a mesh with this order of devices",
        facts={"mesh": str(mesh), "devices": join_names(mesh.devices or ())},
        why="torch sorts the ranks of each process group, so shards would silently change places",
        fix="order the devices so that their numbers increase along every mesh dim",
    )


def find_mesh(native: DeviceMesh) -> Mesh | None:
    """Return the mesh of a `DeviceMesh`, or None if its dims have no names."""
    known = _mesh_of.get(native)
    if known is not None or native.mesh_dim_names is None:
        return known
    return _convert_mesh(native)


@cache_by_mesh
def _convert_mesh(native: DeviceMesh) -> Mesh:
    assert native.mesh_dim_names is not None
    kind = next(name for name, theirs in _TYPES.items() if theirs == native.device_type)
    ranks = simulation.list_ranks(native)
    here = set(simulation.filter_local_ranks(ranks))
    return Mesh(
        [f"{kind}:{each}" for each in ranks],
        list(zip(native.mesh_dim_names, native.mesh.shape, strict=True)),
        local_device_ids=[i for i, each in enumerate(ranks) if each in here],
    )


@functools.lru_cache(maxsize=4096)
def make_placements(layout: Layout, native: DeviceMesh) -> tuple[Placement, ...]:
    """Convert a layout to placements, one per mesh dim."""
    dims = layout.mesh.dim_names
    axes = [[dims.index(dim) for dim in layout.list_mesh_dims(axis)] for axis in range(layout.rank)]
    placements: list[Placement] = [Replicate() for _ in dims]
    for axis, numbers in enumerate(axes):
        for number in numbers:
            placements[number] = Shard(axis)
    if all(numbers == sorted(numbers) for numbers in axes):  # torch splits in this order
        return tuple(placements)
    order = tuple(
        ShardOrderEntry(tensor_dim=axis, mesh_dims=tuple(numbers))
        for axis, numbers in enumerate(axes)
        if numbers
    )
    return DTensorSpec._convert_shard_order_to_StridedShard(order, tuple(placements), native)  # pyright: ignore[reportPrivateUsage]


# DTensor splits an axis by one mesh dim after another, so uneven shards may differ from the layout's (decisions/0235).
def explain_no_padding(layout: Layout, shape: Sequence[int]) -> str:
    """Return why DTensor's uneven shards differ from those of a layout, or an empty text if they agree."""
    for axis in layout.find_uneven_axes(shape):
        sizes, dims = [shape[axis]], layout.list_mesh_dims(axis)
        for dim in dims:
            sizes = [part for size in sizes for part in _split_size(size, layout.mesh.dim_size(dim))]
        if sizes != _split_size(shape[axis], layout.num_shards(axis)):
            return (
                f"torch splits axis {axis} over {', '.join(dims)} one after another, which gives other shards"
            )
    return ""


def _split_size(size: int, number: int) -> list[int]:
    part = -(-size // number)
    return [max(0, min(part, size - i * part)) for i in range(number)]


def convert_placements(native: DeviceMesh, placements: Sequence[Placement], rank: int) -> Layout | None:
    """Convert placements to a layout, or return None for partial sums and meshes without dim names.

    The order of the dims on one axis is that of the mesh where torch does not say it: among dims of size 1.
    """
    mesh = find_mesh(native)
    if mesh is None or any(placement.is_partial() for placement in placements):
        return None
    order = DTensorSpec._maybe_convert_StridedShard_to_shard_order(tuple(placements), native)  # pyright: ignore[reportPrivateUsage]
    if order is None:  # no order of the mesh dims gives these shards
        return None
    axes: list[tuple[str, ...]] = [()] * rank
    for entry in order:
        axes[entry.tensor_dim] = tuple(mesh.dim_names[number] for number in entry.mesh_dims)
    return Layout(axes, mesh)
