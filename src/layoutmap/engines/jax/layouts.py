"""The layouts that JAX's arrays have, in the words of meshes and layouts."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from layoutmap.core.errors import MeshError
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh, convert_mesh
from layoutmap.engines.jax.devices import mesh_on, name_of, named_sharding, partition_spec
from layoutmap.engines.protocol import Unplaced


class ArrayLayouts:  # why: decisions/0033
    """Knows the layout of each array.

    Two meshes of ours, an abstract one and the same one bound, are one mesh of JAX's. Arrays are on the first that was
    used, for as long as JAX's lives, but for those that were made on another one.
    """

    def __init__(self) -> None:
        self._mesh_of_native: weakref.WeakKeyDictionary[jax.sharding.Mesh, Mesh] = weakref.WeakKeyDictionary()
        self._read_of_native: weakref.WeakKeyDictionary[jax.sharding.Mesh, Mesh] = weakref.WeakKeyDictionary()
        self._mesh_of_array: dict[int, tuple[weakref.ref[Any], Mesh]] = {}  # by id: JAX's arrays have no hash

    def sharding(self, layout: Layout) -> NamedSharding:
        """The sharding of a layout, one entry for each axis; its mesh is remembered, for `layout_of`."""
        sharding = named_sharding(layout)
        self._mesh_of_native.setdefault(sharding.mesh, layout.mesh)  # type: ignore[arg-type]
        return sharding

    def fitting(
        self, layout: Layout, shape: tuple[int, ...], name: str = "layout", memory: str = ""
    ) -> NamedSharding:
        """The sharding of a layout that fits a shape, in a kind of memory; empty: that of the devices.

        Raises:
            LayoutError: It does not fit.
        """
        layout.check_fits(shape, name)
        sharding = self.sharding(layout)
        return sharding.with_memory_kind(memory) if memory else sharding

    def mesh_of(self, native_mesh: jax.sharding.Mesh) -> Mesh:
        """The mesh of a `jax.sharding.Mesh`: the first it was made from, or one of its devices and axis names.

        The types of its axes (`Auto`, `Explicit`) say how JAX's compiler treats them, not where things are, and are
        not kept: `sharding` always makes `Auto` axes.

        Raises:
            MeshError: An axis has a name that a mesh dim cannot have.
        """
        known = self._mesh_of_native.get(native_mesh) or self._read_of_native.get(native_mesh)
        if known is None:
            dims = list(zip(map(str, native_mesh.axis_names), native_mesh.devices.shape, strict=True))
            known = mesh_on(Mesh(None, dims), list(native_mesh.devices.flat))
            self._read_of_native[native_mesh] = known
        return known

    def layout_of(self, array: Any) -> Layout | None:
        """The layout of an array, or `None` if it is on no mesh of named dims."""
        sharding = getattr(array, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, jax.sharding.Mesh):
            return None
        if _says_no_layout(sharding.spec):
            return None
        _, made_on = self._mesh_of_array.get(id(array), (None, None))
        return Layout(_specs(sharding.spec, array.ndim), made_on or self.mesh_of(sharding.mesh))

    def found(self, array: Any, meshes: Sequence[Mesh]) -> Layout | Unplaced:
        """The layout of an array, or how it is held otherwise; see `Engine.found`."""
        sharding = getattr(array, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return _without_names(array, sharding, meshes)
        if (why := _says_no_layout(sharding.spec)) is not None:
            return Unplaced(why)
        try:
            if isinstance(sharding.mesh, jax.sharding.Mesh):
                layout = self.layout_of(array)
                assert layout is not None
                return layout
            return Layout(_specs(sharding.spec, array.ndim), convert_mesh(sharding.mesh))
        except MeshError as error:
            return Unplaced(f"{sharding.spec} on a mesh that has no form here: {error.what}")

    def noted(self, array: Any, layout: Layout, *, given: object = None) -> jax.Array:
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


def _specs(spec: PartitionSpec, rank: int) -> list[str | tuple[str, ...] | None]:
    return [*spec, *[None] * (rank - len(spec))]


def _says_no_layout(spec: PartitionSpec) -> str | None:
    """How a spec leaves open what devices hold; `None`: it does not."""
    if spec.unreduced:
        return f"each device has a summand of it: the sum over {', '.join(sorted(map(str, spec.unreduced)))} is pending"
    if any(each is PartitionSpec.UNCONSTRAINED for each in spec):
        return f"{spec} leaves an axis to the compiler"
    return None


def _without_names(array: Any, sharding: object, meshes: Sequence[Mesh]) -> Layout | Unplaced:
    """The layout of an array whose sharding names no dims, if one on these meshes is the same; or how it is held."""
    if not isinstance(sharding, Sharding):
        kind = "an array of numpy" if hasattr(array, "__array__") else "a shape without a sharding"
        return Unplaced(f"{kind}, which JAX copies to where it is used", is_copied=True)
    if len(sharding.device_set) == 1:
        (device,) = sharding.device_set
        if not getattr(array, "committed", False):
            return Unplaced(
                "on no mesh: JAX copies it to where it is used", (name_of(device),), is_copied=True
            )
        return Unplaced(f"on {name_of(device)} alone", (name_of(device),))
    by_name = {name_of(device): device for device in sharding.device_set}
    for mesh in meshes:
        if {*(mesh.devices or ())} != {*by_name}:
            continue
        devices = np.array([by_name[name] for name in mesh.devices or ()]).reshape(mesh.shape)
        native = jax.sharding.Mesh(devices, mesh.dim_names)
        for layout in _of_shard_shape(array.shape, sharding.shard_shape(array.shape), mesh):
            if sharding.is_equivalent_to(NamedSharding(native, partition_spec(layout)), array.ndim):
                return layout
    return Unplaced(f"{sharding}, which names no mesh dims")


def _of_shard_shape(shape: Sequence[int], shard: Sequence[int], mesh: Mesh) -> Iterator[Layout]:
    """The layouts on a mesh with shards of this shape."""
    sizes = {name: size for name, size in mesh.dim_sizes.items() if size > 1}
    ways: list[list[tuple[str, ...]]] = []
    for axis, part in zip(shape, shard, strict=True):
        number = axis // part if part else 1
        some = (dims for n in range(len(sizes) + 1) for dims in itertools.permutations(sizes, n))
        ways.append([dims for dims in some if math.prod(sizes[dim] for dim in dims) == number])
    for specs in itertools.product(*ways):
        if len({dim for spec in specs for dim in spec}) == sum(map(len, specs)):
            yield Layout(specs, mesh)
