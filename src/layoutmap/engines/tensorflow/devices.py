"""From meshes and layouts of names to TensorFlow's devices and DTensor's meshes and layouts, and back.

Devices are named `CPU:0`, `GPU:3`: the type, and a number that counts the devices of all processes, those of the first
process first. TensorFlow's own full names (`/job:worker/replica:0/task:1/device:CPU:0`) are understood as well.
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
from layoutmap.engines.checks import bound, check_simulated, device_names_of, fix_too_few, no_devices
from layoutmap.engines.tensorflow.selfcheck import wait_for_devices

dtensor = tf.experimental.dtensor
NativeMesh: TypeAlias = tf.experimental.dtensor.Mesh
NativeLayout: TypeAlias = tf.experimental.dtensor.Layout

_MAX_NATIVES = 4096
_FULL_NAME = re.compile(r"/job:([^/]+)/replica:0/task:(\d+)/device:([A-Za-z]+):(\d+)$")


def device_names(device_type: str | None = None) -> tuple[str, ...]:
    """The names of all devices of a type, or of the default one: accelerators if there are any."""
    if device_type is None:
        device_type = next((kind for kind in ("TPU", "GPU") if tf.config.list_logical_devices(kind)), "CPU")
    kind = device_type.upper()
    number = _num_local(kind)
    if not number:
        there = sorted({device.device_type for device in tf.config.list_logical_devices()})
        why = f"it has devices of these types: {', '.join(there)}"
        raise no_devices("TensorFlow", kind, there[0], why)
    return tuple(f"{kind}:{i}" for i in range(number * dtensor.num_clients()))


def _num_local(device_type: str) -> int:
    """How many devices of a type this process has; all processes have as many."""
    mine = dtensor.client_id()
    devices = [tf.DeviceSpec.from_string(d.name) for d in tf.config.list_logical_devices(device_type)]
    return sum(spec.task in (None, mine) for spec in devices)


def simulate(number: int) -> None:
    """Have TensorFlow start on so many devices of the CPU; see `Engine.simulate`."""
    try:
        tf.config.set_visible_devices([], "GPU")
        dtensor.initialize_accelerator_system("CPU", num_logical_cpu_devices=number)
    except (RuntimeError, ValueError):
        there = device_names()
        check_simulated("TensorFlow", number, there[: len(there) // dtensor.num_clients()])


def bound_mesh(mesh: Mesh) -> Mesh:
    """The mesh on this machine: an abstract one gets the first devices, one with devices is checked to exist."""
    fix = fix_too_few("TensorFlow", mesh.size)
    names = device_names_of(mesh, device_names, "TensorFlow", fix, short_name)
    here = (i for i, name in enumerate(names) if _full_name(name).task == dtensor.client_id())
    return bound(mesh, mesh.devices or names, here)


def short_name(name: str) -> str:
    """`CPU:5` of `/job:worker/replica:0/task:1/device:CPU:1`, where each process has four."""
    found = _FULL_NAME.match(name)
    if not found:
        return name.upper()
    kind = found.group(3).upper()
    return f"{kind}:{int(found.group(2)) * _num_local(kind) + int(found.group(4))}"


def _full_name(name: str) -> tf.DeviceSpec:
    kind, _, number = short_name(name).partition(":")
    task, index = divmod(int(number), _num_local(kind))
    return tf.DeviceSpec(job=dtensor.job_name(), replica=0, task=task, device_type=kind, device_index=index)


@functools.lru_cache(_MAX_NATIVES)
def native_mesh(mesh: Mesh) -> NativeMesh:
    """DTensor's mesh of a mesh that is bound or can be."""
    bound = bound_mesh(mesh)
    wait_for_devices()
    everywhere = [_full_name(name) for name in bound.devices or ()]
    return dtensor.Mesh(
        dim_names=list(mesh.dim_names),
        global_device_ids=np.arange(mesh.size).reshape(mesh.shape),
        local_device_ids=list(bound.local_device_ids),
        local_devices=[everywhere[i] for i in bound.local_device_ids],
        mesh_name=mesh.name,
        global_devices=everywhere if dtensor.num_clients() > 1 else None,
    )


@functools.lru_cache(_MAX_NATIVES)
def native_layout(layout: Layout) -> NativeLayout:
    """DTensor's layout of a layout; its mesh has the machine's devices."""
    return dtensor.Layout(native_specs(layout), native_mesh(layout.mesh))


def native_specs(layout: Layout) -> list[str]:
    """DTensor's sharding specs of a layout; no device is asked for.

    A mesh dim of size 1 shards nothing, and is left out: DTensor refuses such layouts where it wants replicated ones.
    """
    specs: list[str] = []
    for axis in range(layout.rank):
        sharding = [dim for dim in layout.list_mesh_dims(axis) if layout.mesh.dim_size(dim) > 1]
        if len(sharding) > 1:
            raise EngineError(
                f"TensorFlow cannot shard one axis over several mesh dims: axis {axis} over {', '.join(sharding)}",
                facts={"layout": str(layout), "mesh": str(layout.mesh)},
                why="a layout of DTensor has one mesh dim for each axis",
                fix=f"shard axis {axis} over one dim, or make a mesh with one dim of size "
                f"{layout.num_shards(axis)} in their place",
            )
        specs.append((sharding or [UNSHARDED])[0])
    return specs


def to_mesh(native: NativeMesh) -> Mesh:
    """The mesh of one of DTensor's, with short device names."""
    mesh = Mesh.from_string(native.to_string())
    names = mesh.devices or ()
    if any(not name for name in names):  # TensorFlow does not know the names of other processes' devices
        return mesh.with_devices(
            device_names(mesh.device_type)[: mesh.size], local_device_ids=mesh.local_device_ids
        )
    return mesh.with_devices([short_name(name) for name in names], local_device_ids=mesh.local_device_ids)
