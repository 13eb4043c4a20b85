"""Find the layouts of JAX arrays."""

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
from layoutmap.core.specs import UNSHARDED
from layoutmap.engines.jax.devices import (
    add_devices_to_mesh,
    bind_mesh,
    get_device_name,
    make_named_sharding,
    make_partition_spec,
)
from layoutmap.engines.jax.padded import PaddedArray, unwrap_padded_array, wrap_padded_array
from layoutmap.engines.jax.trees import find_memory_kind
from layoutmap.engines.protocol import Array, PlacementWithoutLayout


# Equal meshes share one JAX mesh, so a weak table stores the mesh with which each array was created (decisions/0033).
class ArrayLayoutRegistry:
    """Find the layouts of JAX arrays, and record the meshes on which arrays were created.

    An abstract mesh and the same mesh with devices share one JAX mesh. The layout of an array on it has the mesh that
    was used first, unless the array was created on the other mesh.
    """

    def __init__(self) -> None:
        self._mesh_of_native: weakref.WeakKeyDictionary[jax.sharding.Mesh, Mesh] = weakref.WeakKeyDictionary()
        self._read_of_native: weakref.WeakKeyDictionary[jax.sharding.Mesh, Mesh] = weakref.WeakKeyDictionary()
        # The keys are the ids of the arrays, because JAX arrays are not hashable.
        self._mesh_of_array: dict[int, tuple[weakref.ref[Any], Mesh]] = {}

    def make_sharding(self, layout: Layout) -> NamedSharding:
        """Return the sharding of a layout, with one entry per axis, and record its mesh for later lookups."""
        sharding = make_named_sharding(layout)
        self._mesh_of_native.setdefault(sharding.mesh, layout.mesh)  # type: ignore[arg-type]
        return sharding

    def make_checked_sharding(
        self, layout: Layout, shape: tuple[int, ...], name: str = "layout", *, pad: bool = False
    ) -> NamedSharding:
        """Return the sharding of a layout, after a check that the layout fits a shape.

        Raises:
            LayoutError: The layout does not fit. With `pad`, shards may be uneven.
        """
        (layout.check_rank if pad else layout.check_fits)(shape, name)
        return self.make_sharding(layout)

    def find_or_create_mesh(self, native_mesh: jax.sharding.Mesh) -> Mesh:
        """Return the layoutmap mesh that was first converted to this JAX mesh. If there is none, create it.

        Raises:
            MeshError: An axis has a name that a mesh dim cannot have.
        """
        known = self._mesh_of_native.get(native_mesh) or self._read_of_native.get(native_mesh)
        if known is None:
            dims = list(zip(map(str, native_mesh.axis_names), native_mesh.devices.shape, strict=True))
            mesh = Mesh(None, dims, axis_types=list(native_mesh.axis_types))
            known = add_devices_to_mesh(mesh, list(native_mesh.devices.flat))
            self._read_of_native[native_mesh] = known
        return known

    def get_layout(self, array: Any) -> Layout | None:
        """Return the layout of an array, or None if it is on no mesh with named dims or no layout expresses it."""
        array = unwrap_padded_array(array)
        sharding = getattr(array, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, jax.sharding.Mesh):
            return None
        if _explain_why_spec_has_no_layout(sharding.spec):
            return None
        _, made_on = self._mesh_of_array.get(id(array), (None, None))
        mesh = made_on or self.find_or_create_mesh(sharding.mesh)
        specs = (
            UNSHARDED if spec is None else spec
            for spec in _cut_or_pad_spec_to_rank(sharding.spec, array.ndim)
        )
        return Layout.from_valid_specs(specs, mesh, find_memory_kind(array) or None)

    def find_placement(self, array: Any, meshes: Sequence[Mesh]) -> Layout | PlacementWithoutLayout:
        """Return the layout of an array, or a description of its placement if no layout expresses it."""
        sharding = getattr(array, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return _find_equivalent_layout(array, sharding, meshes)
        if (why := _explain_why_spec_has_no_layout(sharding.spec)) is not None:
            return PlacementWithoutLayout(why)
        try:
            if isinstance(sharding.mesh, jax.sharding.Mesh):
                layout = self.get_layout(array)
                assert layout is not None
                return layout
            return Layout(_cut_or_pad_spec_to_rank(sharding.spec, array.ndim), convert_mesh(sharding.mesh))
        except MeshError as error:
            return PlacementWithoutLayout(
                f"{sharding.spec} on a mesh that layoutmap cannot express: {error.what}"
            )

    def record_layout(self, array: Array, layout: Layout, *, source: object = None) -> Array:
        """Record the mesh of an array's layout. Return `array`, or a new object if `source` must keep another mesh.

        Args:
            array: The array.
            layout: Its layout.
            source: The array from which `array` was made. It may be the same object, and keeps its own layout.
        """
        if isinstance(array, PaddedArray):
            return wrap_padded_array(
                self.record_layout(array.array, layout, source=unwrap_padded_array(source)), array.shape
            )
        first = self._mesh_of_native[array.sharding.mesh]
        _, made_on = self._mesh_of_array.get(id(array), (None, first))
        if made_on == layout.mesh:
            return array
        if array is source:
            pieces = [shard.data for shard in array.addressable_shards]
            array = jax.make_array_from_single_device_arrays(
                array.shape, array.sharding, pieces, dtype=array.dtype
            )
        if first != layout.mesh:
            key = id(array)
            forget = weakref.ref(array, lambda _: self._mesh_of_array.pop(key, None))
            self._mesh_of_array[key] = forget, layout.mesh
        return array


def _cut_or_pad_spec_to_rank(spec: PartitionSpec, rank: int) -> list[str | tuple[str, ...] | None]:
    # Under explicit axes, JAX adds the axes of the key data to the spec of random keys, so remove these entries.
    return [*spec[:rank], *[None] * (rank - len(spec))]


def _explain_why_spec_has_no_layout(spec: PartitionSpec) -> str | None:
    """Return why a spec does not determine the values of each device, or None if it does."""
    if spec.unreduced:
        return f"each device has a summand of it: the sum over {', '.join(sorted(map(str, spec.unreduced)))} is pending"
    if any(each is PartitionSpec.UNCONSTRAINED for each in spec):
        return f"{spec} leaves an axis to the compiler"
    return None


def _find_equivalent_layout(
    array: Any, sharding: object, meshes: Sequence[Mesh]
) -> Layout | PlacementWithoutLayout:
    """Return a layout on one of `meshes` that equals a sharding, or a description of the placement if none does."""
    if not isinstance(sharding, Sharding):
        kind = "an array of numpy" if hasattr(array, "__array__") else "a shape without a sharding"
        return PlacementWithoutLayout(f"{kind}, which JAX copies to where it is used", is_copied=True)
    if len(sharding.device_set) == 1:
        (device,) = sharding.device_set
        if not getattr(array, "committed", False):
            return PlacementWithoutLayout(
                "on no mesh: JAX copies it to where it is used", (get_device_name(device),), is_copied=True
            )
        return PlacementWithoutLayout(f"on {get_device_name(device)} alone", (get_device_name(device),))
    by_name = {get_device_name(device): device for device in sharding.device_set}
    for mesh in meshes:
        if mesh.size != len(by_name):
            continue
        names = bind_mesh(mesh).devices or ()  # an abstract mesh has no devices until it is bound
        if {*names} != {*by_name}:
            continue
        devices = np.array([by_name[name] for name in names]).reshape(mesh.shape)
        native = jax.sharding.Mesh(devices, mesh.dim_names)
        for layout in _iterate_layouts(array.shape, sharding.shard_shape(array.shape), mesh):
            if sharding.is_equivalent_to(NamedSharding(native, make_partition_spec(layout)), array.ndim):
                return layout
    return PlacementWithoutLayout(f"{sharding}, which names no mesh dims")


def _iterate_layouts(shape: Sequence[int], shard_shape: Sequence[int], mesh: Mesh) -> Iterator[Layout]:
    """Yield the layouts on a mesh that split an array of a shape into shards of `shard_shape`."""
    sizes = {name: size for name, size in mesh.dim_sizes.items() if size > 1}
    ways: list[list[tuple[str, ...]]] = []
    for axis, part in zip(shape, shard_shape, strict=True):
        number = axis // part if part else 1
        some = (dims for n in range(len(sizes) + 1) for dims in itertools.permutations(sizes, n))
        ways.append([dims for dims in some if math.prod(sizes[dim] for dim in dims) == number])
    for specs in itertools.product(*ways):
        if len({dim for spec in specs for dim in spec}) == sum(map(len, specs)):
            yield Layout(specs, mesh)
