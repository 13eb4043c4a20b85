"""Enter and leave the mesh of `jax.set_mesh`, to which JAX programs refer by dim names."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import jax
import jax.core
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from layoutmap.core.errors import LayoutMapWarning
from layoutmap.core.mesh import Mesh
from layoutmap.core.users_line import find_user_stacklevel

AnyMesh = AbstractMesh | jax.sharding.Mesh
T = TypeVar("T")


def get_jax_axis_types(mesh: Mesh) -> tuple[AxisType, ...]:
    """Return the JAX `AxisType` of each dim of a mesh."""
    return tuple(AxisType.Explicit if name == "explicit" else AxisType.Auto for name in mesh.axis_types)


def make_abstract_mesh(mesh: Mesh) -> AbstractMesh:
    """Return a mesh without devices, under which programs can be traced."""
    return AbstractMesh(mesh.shape, mesh.dim_names, axis_types=get_jax_axis_types(mesh))


def make_one_device_mesh(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """Return a mesh of this process's first device in `mesh`, with the dims of `mesh`, all of size 1."""
    device = mesh.local_devices[:1]
    return jax.sharding.Mesh(
        np.array(device).reshape([1] * mesh.devices.ndim), mesh.axis_names, axis_types=mesh.axis_types
    )


def suspend_ambient_mesh() -> AbstractContextManager[object]:
    """Return a context manager that suspends the mesh of `jax.set_mesh`."""
    if jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    return jax.set_mesh(None)  # type: ignore[arg-type]


# The mesh that the user's code has set may have different axis types, so enter the layout map's mesh (decisions/0201).
def use_mesh(mesh: AnyMesh) -> AbstractContextManager[object]:
    """Return a context manager that sets the mesh to which mesh dim names refer, even inside a trace."""
    return jax.sharding.use_abstract_mesh(mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh)


def differs_from_ambient_mesh(mesh: AnyMesh) -> bool:
    """Return whether `jax.set_mesh` has set a mesh unlike `mesh`. Always return False inside `jax.shard_map`."""
    ambient = jax.sharding.get_abstract_mesh()
    if AxisType.Manual in ambient.axis_types:  # in `jax.shard_map`, arrays are local, so no mesh conflicts
        return False
    return not ambient.empty and (ambient.shape, ambient.axis_types) != (mesh.shape, mesh.axis_types)


def make_auto_axes_mesh(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """Return a mesh with the same devices and dims, and with the axis type `Auto` for all dims."""
    if AxisType.Explicit not in mesh.axis_types:
        return mesh
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names)


def convert_to_axis_types_of_mesh(tree: T, mesh: AbstractMesh) -> T:
    """Return a tree of the same arrays, not copied, on meshes that have the axis types of `mesh`."""

    def change_leaf(leaf: object) -> object:
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            return leaf
        sharding = leaf.sharding
        if not isinstance(sharding, NamedSharding) or sharding.mesh.shape != mesh.shape:
            return leaf
        assert sharding.mesh.devices is not None, "an array has devices"
        other = jax.sharding.Mesh(sharding.mesh.devices, mesh.axis_names, axis_types=mesh.axis_types)
        changed = NamedSharding(other, sharding.spec, memory_kind=sharding.memory_kind)
        return jax.device_put(leaf, changed)

    return jax.tree.map(change_leaf, tree)


def warn_of_different_axis_types(mesh: AnyMesh) -> None:
    """Warn if the mesh of `jax.set_mesh` and a different mesh of a model differ only in their axis types."""
    ambient = jax.sharding.get_abstract_mesh()
    if ambient.shape != mesh.shape:
        return
    warning = LayoutMapWarning(
        "the mesh of jax.set_mesh and the layout map's mesh have different axis types",
        facts={"jax.set_mesh": _format_mesh(ambient), "layout map": _format_mesh(mesh)},
        why="JAX refuses to mix arrays of both meshes, so the model and its steps run under the map's mesh",
        fix="create the map on the active mesh:  LayoutMap(jax.sharding.get_mesh()); or activate the "
        "map's dims as jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto, ..))",
    )
    warnings.warn(warning, stacklevel=find_user_stacklevel())


def _format_mesh(mesh: AnyMesh) -> str:
    types = (each.name.lower() for each in mesh.axis_types)
    return ", ".join(
        f"{name}={size} ({kind})" for (name, size), kind in zip(mesh.shape.items(), types, strict=True)
    )
