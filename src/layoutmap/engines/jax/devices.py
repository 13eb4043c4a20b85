"""Convert meshes and layouts to JAX devices, meshes, and shardings."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from layoutmap.core.errors import EngineError
from layoutmap.core.layout import UNSHARDED, Layout
from layoutmap.core.mesh import Mesh
from layoutmap.engines.checks import (
    bind_mesh_to_devices,
    check_devices_are_simulated,
    format_fix_for_too_few_devices,
    make_no_devices_error,
    resolve_device_names,
)
from layoutmap.engines.jax.ambient import get_jax_axis_types
from layoutmap.engines.jax.corrections import install_lowering_corrections

Device = Any
_MAX_NATIVES = 4096


def get_device_name(device: Device) -> str:
    """Return the name of a device: its platform and JAX's device id."""
    return f"{device.platform.upper()}:{device.id}"


def list_device_names(device_type: str | None = None) -> tuple[str, ...]:
    """Return the names of all devices of a type, or of JAX's default platform, in JAX's order."""
    return tuple(map(get_device_name, _list_jax_devices(device_type)))


def _list_jax_devices(device_type: str | None) -> Sequence[Device]:
    if device_type is None:
        return jax.devices()
    try:
        return jax.devices(device_type.lower())
    except RuntimeError as error:
        usable, why = jax.devices()[0].platform.upper(), str(error).partition("\n")[0]
        raise make_no_devices_error("JAX", device_type.upper(), usable, why) from None


def simulate_devices(num_devices: int) -> None:
    """Start JAX with this number of simulated CPU devices (see `Engine.simulate_devices`)."""
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:
        check_devices_are_simulated(
            "JAX", num_devices, [get_device_name(device) for device in jax.local_devices()]
        )
    else:
        jax.config.update("jax_platforms", "cpu")


def find_devices(mesh: Mesh) -> list[Device]:
    """Return the devices of a mesh, in the mesh's order.

    Raises:
        MeshError: The machine has too few devices, or lacks a named device.
    """
    names = resolve_device_names(
        mesh, list_device_names, "JAX", format_fix_for_too_few_devices("JAX", mesh.size)
    )
    there = {get_device_name(device): device for device in _list_jax_devices(mesh.device_type)}
    return [there[name] for name in names]


def bind_mesh(mesh: Mesh) -> Mesh:
    """Return a mesh with devices of this machine (see `Engine.bind_mesh`)."""
    return add_devices_to_mesh(mesh, find_devices(mesh))


def add_devices_to_mesh(mesh: Mesh, devices: Sequence[Device]) -> Mesh:
    """Return a mesh that is bound to these JAX devices."""
    here = (i for i, device in enumerate(devices) if device.process_index == jax.process_index())
    return bind_mesh_to_devices(mesh, [get_device_name(device) for device in devices], here)


@functools.lru_cache(_MAX_NATIVES)
def _make_native_mesh(mesh: Mesh, axis_types: tuple[AxisType, ...]) -> jax.sharding.Mesh:
    devices = np.empty(mesh.size, object)
    devices[:] = find_devices(mesh)
    install_lowering_corrections(mesh.shape)
    return jax.sharding.Mesh(devices.reshape(mesh.shape), mesh.dim_names, axis_types=axis_types)


def make_named_sharding(layout: Layout) -> NamedSharding:
    """Return the `NamedSharding` of a layout, with one entry per axis."""
    # Meshes that differ only in axis types are equal, so add the types to the cache key.
    return _get_cached_named_sharding(layout, get_jax_axis_types(layout.mesh))


@functools.lru_cache(_MAX_NATIVES)
def _get_cached_named_sharding(layout: Layout, axis_types: tuple[AxisType, ...]) -> NamedSharding:
    mesh, spec = _make_native_mesh(layout.mesh, axis_types), make_partition_spec(layout)
    if layout.host_memory:
        _check_devices_have_memory(layout)
    return NamedSharding(mesh, spec, memory_kind=layout.host_memory or None)


def _check_devices_have_memory(layout: Layout) -> None:
    """Raise an `EngineError` if the devices of this process lack a layout's memory kind."""
    device = jax.local_devices(backend=layout.mesh.device_type and layout.mesh.device_type.lower())[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if layout.host_memory not in kinds:
        raise EngineError(
            f"the devices of this process have no {layout.host_memory} memory",
            facts={"layout": str(layout), "devices": device.platform.upper()},
            why=f"their memory kinds are {', '.join(kinds)}",
            fix='use memory="pinned_host"'
            if "pinned_host" in kinds
            else "leave memory= out of the rule or layout",
        )


def make_partition_spec(layout: Layout) -> PartitionSpec:
    """Return the `PartitionSpec` of a layout, without using a device."""
    return PartitionSpec(*[None if spec == UNSHARDED else spec for spec in layout.sharding_specs])
