"""From meshes and layouts of names to JAX's devices, meshes and shardings."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from layoutmap.core.layout import UNSHARDED, Layout
from layoutmap.core.mesh import Mesh
from layoutmap.engines.checks import bound, check_simulated, device_names_of, fix_too_few, no_devices
from layoutmap.engines.jax.corrections import correct_for

Device = Any
_MAX_NATIVES = 4096


def name_of(device: Device) -> str:
    """The name of a device: its platform and JAX's number of it."""
    return f"{device.platform.upper()}:{device.id}"


def device_names(device_type: str | None = None) -> tuple[str, ...]:
    """The names of all devices of a type, or of JAX's default platform, in JAX's order."""
    return tuple(map(name_of, _devices(device_type)))


def _devices(device_type: str | None) -> Sequence[Device]:
    if device_type is None:
        return jax.devices()
    try:
        return jax.devices(device_type.lower())
    except RuntimeError as error:
        usable, why = jax.devices()[0].platform.upper(), str(error).partition("\n")[0]
        raise no_devices("JAX", device_type.upper(), usable, why) from None


def simulate(number: int) -> None:
    """Have JAX start on so many devices of the CPU; see `Engine.simulate`."""
    try:
        jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError:
        check_simulated("JAX", number, [name_of(device) for device in jax.local_devices()])
    else:
        jax.config.update("jax_platforms", "cpu")


def bound_devices(mesh: Mesh) -> list[Device]:
    """The devices of a mesh, in its order.

    Raises:
        MeshError: The machine has too few devices, or not the ones that are named.
    """
    names = device_names_of(mesh, device_names, "JAX", fix_too_few("JAX", mesh.size))
    there = {name_of(device): device for device in _devices(mesh.device_type)}
    return [there[name] for name in names]


def bound_mesh(mesh: Mesh) -> Mesh:
    """The mesh on this machine."""
    return mesh_on(mesh, bound_devices(mesh))


def mesh_on(mesh: Mesh, devices: Sequence[Device]) -> Mesh:
    """A mesh with the devices of JAX that it consists of."""
    here = (i for i, device in enumerate(devices) if device.process_index == jax.process_index())
    return bound(mesh, [name_of(device) for device in devices], here)


@functools.lru_cache(_MAX_NATIVES)
def _native_mesh(mesh: Mesh) -> jax.sharding.Mesh:
    devices = np.empty(mesh.size, object)
    devices[:] = bound_devices(mesh)
    correct_for(mesh.shape)
    return jax.sharding.Mesh(devices.reshape(mesh.shape), mesh.dim_names)


@functools.lru_cache(_MAX_NATIVES)
def named_sharding(layout: Layout) -> NamedSharding:
    """The sharding of a layout, one entry for each axis."""
    return NamedSharding(_native_mesh(layout.mesh), partition_spec(layout))


def partition_spec(layout: Layout) -> PartitionSpec:
    """The spec of a layout's sharding; it needs no device."""
    return PartitionSpec(*[None if spec == UNSHARDED else spec for spec in layout.sharding_specs])
