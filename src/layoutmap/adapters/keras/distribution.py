"""Convert layouts to a `keras.distribution.LayoutMap`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import keras

from layoutmap.core.errors import MeshError
from layoutmap.core.layout import UNSHARDED, Layout
from layoutmap.core.mesh import Mesh


def make_keras_layout_map(mesh: Mesh, layouts: Mapping[str, Layout], device_mesh: object) -> object:
    """Return a `keras.distribution.LayoutMap` with a key for each variable name. A key matches exactly this name.

    Without a `DeviceMesh`, one is made of the mesh's devices, or of all.

    Raises:
        MeshError: The `DeviceMesh` has other dims, or there are not as many devices.
    """
    if device_mesh:
        _check_device_mesh(mesh, device_mesh)
    keras_map = keras.distribution.LayoutMap(device_mesh or _make_device_mesh(mesh))
    for name, layout in layouts.items():
        keras_map[re.escape(name)] = tuple(
            None if spec == UNSHARDED else spec for spec in layout.sharding_specs
        )
    return keras_map


def _check_device_mesh(mesh: Mesh, device_mesh: Any) -> None:
    """Raise if the dims of a `DeviceMesh` differ from those of a mesh."""
    dims = list(zip(device_mesh.axis_names, device_mesh.shape, strict=True))
    if dims != list(mesh.dim_sizes.items()):
        raise MeshError(
            "to_keras: the DeviceMesh has different dims than the plan's mesh",
            facts={"plan": str(mesh), "DeviceMesh": ", ".join(f"{name}={size}" for name, size in dims)},
            why="layouts name the dims of the plan's mesh",
            fix="pass a DeviceMesh with the plan's dims, or plan on a mesh with the DeviceMesh's dims",
        )


def _make_device_mesh(mesh: Mesh) -> object:
    """Return a `DeviceMesh` of the mesh's devices, or of all devices if the mesh is abstract."""
    names = [name.rpartition("device:")[2].lower() for name in mesh.devices or ()]
    devices = names or keras.distribution.list_devices()
    if len(devices) != mesh.size:
        raise MeshError(
            f"to_keras: the plan's mesh has {mesh.size} devices, but Keras has {len(devices)}",
            facts={"mesh": str(mesh)},
            why="the mesh is abstract, and Keras's layout map needs real devices",
            fix="pass device_mesh=, or plan on a mesh of this machine's size",
        )
    return keras.distribution.DeviceMesh(mesh.shape, mesh.dim_names, devices)
