"""From meshes and layouts of names to JAX's devices, meshes and shardings."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from layoutmap.core.errors import EngineError, MeshError
from layoutmap.core.layout import UNSHARDED, Layout
from layoutmap.core.mesh import Mesh

__all__ = ["Device", "bound_devices", "jax_devices", "name_of", "named_sharding"]

Device = Any
_MAX_NATIVES = 4096


def name_of(device: Device) -> str:
    """The name of a device: its platform and JAX's number of it."""
    return f"{_type_of(device)}:{device.id}"


def _type_of(device: Device) -> str:
    return device.platform.upper()


def jax_devices(device_type: str | None) -> Sequence[Device]:
    """All devices of a type, or of the default one."""
    if device_type is None:
        return jax.devices()
    try:
        return jax.devices(device_type.lower())
    except RuntimeError as error:
        raise EngineError(
            f"JAX has no {device_type.upper()} devices here",
            why=str(error).partition("\n")[0],
            fix=f"use device_type={_type_of(jax.devices()[0])!r}, or install JAX for {device_type.upper()}",
        ) from None


def bound_devices(mesh: Mesh) -> list[Device]:
    """The devices of a mesh, in its order."""
    fix = (
        "make the mesh smaller, or on virtual CPU devices first: jax.config.update('jax_num_cpu_devices', N)"
    )
    if mesh.devices is None:
        devices = jax.devices()
        if len(devices) < mesh.size:
            raise MeshError(
                f"mesh of {mesh.size} devices, and JAX has {len(devices)}",
                facts={"mesh": str(mesh), "devices": _listed(list(map(name_of, devices)))},
                why="each place of the mesh needs a device",
                fix=fix,
            )
        return list(devices[: mesh.size])
    try:
        there = {name_of(device): device for device in jax_devices(mesh.device_type)}
    except EngineError as error:
        raise MeshError(error.what, facts={"mesh": str(mesh)}, why=error.why, fix=error.fix) from None
    unknown = [name for name in mesh.devices if name.upper() not in there]
    if unknown:
        raise MeshError(
            f"device {unknown[0]!r} does not exist",
            facts={"mesh": str(mesh), "missing": _listed(unknown), "devices": _listed(list(there))},
            why=f"JAX has {len(there)} devices of that type here, named by their platform and number",
            fix=fix if len(there) < mesh.size else "name devices that exist, or pass devices=None",
        )
    return [there[name.upper()] for name in mesh.devices]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 8 else [*names[:7], f"... {len(names) - 7} more"])


@functools.lru_cache(_MAX_NATIVES)
def _native_mesh(mesh: Mesh) -> jax.sharding.Mesh:
    devices = np.empty(mesh.size, object)
    devices[:] = bound_devices(mesh)
    return jax.sharding.Mesh(devices.reshape(mesh.shape), mesh.dim_names)


@functools.lru_cache(_MAX_NATIVES)
def named_sharding(layout: Layout) -> NamedSharding:
    """The sharding of a layout, one entry for each axis."""
    specs = [None if spec == UNSHARDED else spec for spec in layout.sharding_specs]
    return NamedSharding(_native_mesh(layout.mesh), PartitionSpec(*specs))
