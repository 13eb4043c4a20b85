"""Convert meshes and layouts to DTensor's meshes, layouts, and devices, and back.

Devices are named `CPU:0`, `GPU:3`: the type, and a number over the devices of all processes, starting with those of the
first process. TensorFlow's own full names (`/job:worker/replica:0/task:1/device:CPU:0`) are accepted, too.
"""

from __future__ import annotations

import functools
import re
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from layoutmap.core.errors import EngineError
from layoutmap.core.layout import UNSHARDED, Layout
from layoutmap.core.mesh import Mesh
from layoutmap.engines.checks import (
    bind_mesh_to_devices,
    check_devices_are_simulated,
    check_no_explicit_axes,
    format_fix_for_too_few_devices,
    make_no_devices_error,
    refuse_layout_in_host_memory,
    resolve_device_names,
)
from layoutmap.engines.tensorflow.refusals import install_refusal_patches
from layoutmap.engines.tensorflow.selfcheck import make_operations_wait_for_devices

dtensor = tf.experimental.dtensor
NativeMesh: TypeAlias = tf.experimental.dtensor.Mesh
NativeLayout: TypeAlias = tf.experimental.dtensor.Layout

_MAX_NATIVES = 4096
_FULL_NAME = re.compile(r"/job:([^/]+)/replica:0/task:(\d+)/device:([A-Za-z]+):(\d+)$")


def list_device_names(device_type: str | None = None) -> tuple[str, ...]:
    """Return the names of all devices of a type. The default is TPU or GPU if there are any, otherwise CPU."""
    if device_type is None:
        device_type = next((kind for kind in ("TPU", "GPU") if tf.config.list_logical_devices(kind)), "CPU")
    kind = device_type.upper()
    number = _count_local_devices(kind)
    if not number:
        there = sorted({device.device_type for device in tf.config.list_logical_devices()})
        why = f"it has devices of these types: {', '.join(there)}"
        raise make_no_devices_error("TensorFlow", kind, there[0], why)
    return tuple(f"{kind}:{i}" for i in range(number * dtensor.num_clients()))


def _count_local_devices(device_type: str) -> int:
    """Return the number of this process's devices of a type, which is equal in all processes."""
    mine = dtensor.client_id()
    devices = [tf.DeviceSpec.from_string(d.name) for d in tf.config.list_logical_devices(device_type)]
    return sum(spec.task in (None, mine) for spec in devices)


def simulate_devices(num_devices: int) -> None:
    """Start TensorFlow with this number of simulated CPU devices (see `Engine.simulate_devices`)."""
    try:
        tf.config.set_visible_devices([], "GPU")
        dtensor.initialize_accelerator_system("CPU", num_logical_cpu_devices=num_devices)
    except (RuntimeError, ValueError):
        there = list_device_names()
        check_devices_are_simulated("TensorFlow", num_devices, there[: len(there) // dtensor.num_clients()])


def bind_mesh(mesh: Mesh) -> Mesh:
    """Return a mesh with devices of this machine: its own devices, or the first devices for an abstract mesh."""
    check_no_explicit_axes(mesh, "TensorFlow")
    fix = format_fix_for_too_few_devices("TensorFlow", mesh.size)
    names = resolve_device_names(mesh, list_device_names, "TensorFlow", fix, shorten_device_name)
    here = (i for i, name in enumerate(names) if _expand_device_name(name).task == dtensor.client_id())
    return bind_mesh_to_devices(mesh, mesh.devices or names, here)


def shorten_device_name(name: str) -> str:
    """Shorten a device name: `/job:worker/replica:0/task:1/device:CPU:1` is `CPU:5` with four devices per process."""
    found = _FULL_NAME.match(name)
    if not found:
        return name.upper()
    kind = found.group(3).upper()
    return f"{kind}:{int(found.group(2)) * _count_local_devices(kind) + int(found.group(4))}"


def _expand_device_name(name: str) -> tf.DeviceSpec:
    kind, _, number = shorten_device_name(name).partition(":")
    task, index = divmod(int(number), _count_local_devices(kind))
    return tf.DeviceSpec(job=dtensor.job_name(), replica=0, task=task, device_type=kind, device_index=index)


@functools.lru_cache(_MAX_NATIVES)
def make_native_mesh(mesh: Mesh) -> NativeMesh:
    """Return the mesh of DTensor for a mesh of layoutmap."""
    bound = bind_mesh(mesh)
    make_operations_wait_for_devices()
    install_refusal_patches()
    everywhere = [_expand_device_name(name) for name in bound.devices or ()]
    return dtensor.Mesh(
        dim_names=list(mesh.dim_names),
        global_device_ids=np.arange(mesh.size).reshape(mesh.shape),
        local_device_ids=list(bound.local_device_ids),
        local_devices=[everywhere[i] for i in bound.local_device_ids],
        mesh_name=mesh.name,
        global_devices=everywhere if dtensor.num_clients() > 1 else None,
    )


@functools.lru_cache(_MAX_NATIVES)
def make_native_layout(layout: Layout, *, keeps_dims_of_size_1: bool = False) -> NativeLayout:
    """Return the layout of DTensor for a layout of layoutmap, on devices of this machine (see `make_native_specs`)."""
    return dtensor.Layout(
        make_native_specs(layout, keeps_dims_of_size_1=keeps_dims_of_size_1), make_native_mesh(layout.mesh)
    )


def make_native_specs(layout: Layout, *, keeps_dims_of_size_1: bool = False) -> list[str]:
    """Return the sharding specs of DTensor for a layout of layoutmap, without using a device.

    Without `keeps_dims_of_size_1`, mesh dims of size 1 are left out, because DTensor would not treat an axis over such
    a dim as replicated.
    """
    refuse_layout_in_host_memory(layout, "TensorFlow", "a layout of DTensor names no memory")
    specs: list[str] = []
    for axis in range(layout.rank):
        sharding = [dim for dim in layout.list_mesh_dims(axis) if layout.mesh.dim_size(dim) > 1]
        if len(sharding) > 1:
            raise EngineError(
                f"TensorFlow cannot shard one axis over several mesh dims: axis {axis} over {', '.join(sharding)}",
                facts={"layout": str(layout), "mesh": str(layout.mesh)},
                why="a layout of DTensor has at most one mesh dim per axis",
                fix=f"shard axis {axis} over one dim, or use a mesh with one dim of size "
                f"{layout.num_shards(axis)} in their place",
            )
        single = layout.list_mesh_dims(axis) if keeps_dims_of_size_1 else ()
        specs.append([*sharding, *single, UNSHARDED][0])
    return specs


def convert_from_native_mesh(native_mesh: NativeMesh) -> Mesh:
    """Return the `Mesh` of layoutmap for a mesh of DTensor, with short device names."""
    mesh = Mesh.from_string(native_mesh.to_string())
    names = mesh.devices or ()
    if any(not name for name in names):  # names of other processes' devices are missing, so list all
        return mesh.with_devices(
            list_device_names(mesh.device_type)[: mesh.size], local_device_ids=mesh.local_device_ids
        )
    return mesh.with_devices(
        [shorten_device_name(name) for name in names], local_device_ids=mesh.local_device_ids
    )
