"""The layouts that JAX's arrays have, in the words of meshes and layouts."""

from __future__ import annotations

import weakref
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.engines.jax.devices import mesh_on, named_sharding


class ArrayLayouts:
    """Knows the layout of each array.

    Two meshes of ours, an abstract one and the same one bound, are one mesh of JAX's. Arrays are on the first that was
    used, for as long as JAX's lives, but for those that were made on another one.
    """

    def __init__(self) -> None:
        self._mesh_of_native: weakref.WeakKeyDictionary[jax.sharding.Mesh, Mesh] = weakref.WeakKeyDictionary()
        self._mesh_of_array: dict[int, tuple[weakref.ref[Any], Mesh]] = {}  # by id: JAX's arrays have no hash

    def sharding(self, layout: Layout) -> NamedSharding:
        """The sharding of a layout, one entry for each axis; its mesh is remembered, for `layout_of`."""
        sharding = named_sharding(layout)
        self._mesh_of_native.setdefault(sharding.mesh, layout.mesh)  # type: ignore[arg-type]
        return sharding

    def fitting(self, layout: Layout, shape: tuple[int, ...], name: str = "layout") -> NamedSharding:
        """The sharding of a layout that fits a shape.

        Raises:
            LayoutError: It does not fit.
        """
        layout.check_fits(shape, name)
        return self.sharding(layout)

    def mesh_of(self, native_mesh: jax.sharding.Mesh) -> Mesh:
        """The mesh of a `jax.sharding.Mesh`: the first it was made from, or one of its devices and axis names.

        The types of its axes (`Auto`, `Explicit`) say how JAX's compiler treats them, not where things are, and are
        not kept: `sharding` always makes `Auto` axes.

        Raises:
            MeshError: An axis has a name that a mesh dim cannot have.
        """
        known = self._mesh_of_native.get(native_mesh)
        if known is not None:
            return known
        dims = list(zip(map(str, native_mesh.axis_names), native_mesh.devices.shape, strict=True))
        return mesh_on(Mesh(None, dims), list(native_mesh.devices.flat))

    def layout_of(self, array: Any) -> Layout | None:
        """The layout of an array, or `None` if it is on no mesh of named dims."""
        sharding = getattr(array, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, jax.sharding.Mesh):
            return None
        specs: list[Any] = [*sharding.spec, *[None] * (array.ndim - len(sharding.spec))]
        if any(spec is PartitionSpec.UNCONSTRAINED for spec in specs):
            return None
        _, made_on = self._mesh_of_array.get(id(array), (None, None))
        return Layout(specs, made_on or self.mesh_of(sharding.mesh))

    def noted(self, array: Any, layout: Layout, *, given: Any = None) -> Any:
        """An array that was made in a layout; its mesh is noted where JAX's own stands for another one of ours.

        Args:
            array: The array.
            layout: Its layout.
            given: What it was made from, and may be itself: that keeps its layout.
        """
        first = self._mesh_of_native[array.sharding.mesh]
        _, made_on = self._mesh_of_array.get(id(array), (None, first))
        if made_on == layout.mesh:
            return array
        if array is given:
            pieces = [shard.data for shard in array.addressable_shards]
            array = jax.make_array_from_single_device_arrays(
                array.shape, array.sharding, pieces, dtype=array.dtype
            )
        if first != layout.mesh:
            key = id(array)
            forget = weakref.ref(array, lambda _: self._mesh_of_array.pop(key, None))
            self._mesh_of_array[key] = forget, layout.mesh
        return array
