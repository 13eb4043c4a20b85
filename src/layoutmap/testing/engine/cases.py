"""Cases of engine laws: meshes, layouts, values, and the methods that tests of an engine define."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings

from layoutmap.core.blocks import Index, NumpyArray, assemble_blocks
from layoutmap.core.initializers import Initializer
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.specs import ShardingSpec
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines import get_engine
from layoutmap.engines.protocol import Engine
from layoutmap.testing.old_names import OldMethodNames
from layoutmap.testing.subjects import QUICK_XLA

draw_half_as_many_examples = settings(
    deadline=None,
    # Each example creates many arrays, so draw only half as many examples as the current profile says.
    max_examples=settings().max_examples // 2,
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)


class EngineCases(OldMethodNames):
    """The base class of all engine laws: cases, and methods that a subclass defines (see `EngineContract`)."""

    engine_name: ClassVar[str]
    meshes: ClassVar[Sequence[str]] = ("x=8", "x=2,y=4", "x=4,y=2", "x=2,y=2,z=2", "x=1,y=8", "x=1")
    dtypes: ClassVar[Sequence[str]] = ("float32", "bfloat16", "int8", "bool", "uint32")
    cannot_hold: ClassVar[Mapping[tuple[ShardingSpec, ...], str]] = {}
    holds_any_device_order: ClassVar[bool] = True
    one_device: ClassVar[str | None] = None

    old_names: ClassVar[Mapping[str, str]] = {
        "device_values": "get_device_values",
        "random_initializer": "make_random_initializer",
        "gathered": "gather_shards",
        "assembled": "assemble_array",
        "held": "supports_specs",
        "mesh": "make_mesh",
    }

    # -- methods that a subclass defines

    def make_array(self, values: NumpyArray) -> Any:
        """Return an array of the framework without a layout."""
        raise NotImplementedError

    def get_device_values(self, array: Any) -> Mapping[str, NumpyArray]:
        """Return a dict from the name of each device of this process to the device's shard of an array."""
        raise NotImplementedError

    def make_random_initializer(self, shape: tuple[int, ...], dtype: str, seed: int) -> Initializer:
        """Return an initializer of random numbers as the framework's model libraries create it."""
        values = generate_values(shape, dtype, seed)
        return Initializer(global_value=lambda: values)

    def gather_shards(self, shards: Iterable[tuple[Index, NumpyArray]]) -> list[tuple[Index, NumpyArray]]:
        """Return pairs of the index and the values of each shard in all processes. Each index occurs once."""
        return list(shards)

    def num_live_arrays(self) -> int:
        """Return the number of live arrays of the framework, or 0 if the framework cannot count them."""
        return 0

    # -- cases

    @property
    def engine(self) -> Engine:
        """The engine under test."""
        return get_engine(self.engine_name)

    def assemble_array(self, array: Any, shape: tuple[int, ...], dtype: str) -> NumpyArray:
        """Return the global values of an array. Raise if the array's shards leave gaps or overlap."""
        return assemble_blocks(self.gather_shards(self.engine.iterate_shards(array)), shape, np.dtype(dtype))

    def supports_specs(self, specs: tuple[ShardingSpec, ...]) -> bool:
        """Return whether the engine declares that it supports layouts with these sharding specs."""
        has_combined_dims = any(isinstance(spec, tuple) for spec in specs)
        return specs not in self.cannot_hold and (self.engine.several_dims or not has_combined_dims)

    def make_mesh(self, dims: str, first: int | None = None, name: str = "") -> Mesh:
        """Return a mesh on `one_device`, on the devices from number `first` on, or without devices."""
        mesh = Mesh(None, self._parse_dims_for_tested_devices(dims), name)
        if self.one_device is not None:
            return mesh.with_devices([self.one_device])
        if first is None:
            return mesh
        return mesh.with_devices(self.engine.list_device_names()[first : first + mesh.size])

    def _assemble_initial_values(self, value: Any, shape: tuple[int, ...], dtype: str) -> NumpyArray:
        """Return the value of an initializer as a numpy array, also if it is an array of the framework."""
        if isinstance(value, np.ndarray):
            return value
        return self.assemble_array(value, shape, dtype)

    @property
    def _device_type(self) -> str | None:
        return self.one_device and self.one_device.partition(":")[0]

    def _parse_dims_for_tested_devices(self, dims: str) -> list[tuple[str, int]]:
        """Return the dims of a mesh with their sizes. On one device, each size is 1."""
        mesh = Mesh(None, dims)
        return [(dim, mesh.dim_size(dim) if self.one_device is None else 1) for dim in mesh.dim_names]

    def _list_meshes(self) -> list[Mesh]:
        """Return abstract meshes, a named mesh on the first devices, and a mesh that begins at the third device."""
        meshes = [
            *(self.make_mesh(dims) for dims in self.meshes),
            self.make_mesh("x=2,y=2", first=0, name="first"),
            self.make_mesh("x=2,y=2", first=2),
        ]
        return list(dict.fromkeys(meshes))

    def _make_case_strategy(
        self, num_layouts: int
    ) -> st.SearchStrategy[tuple[Mesh, tuple[Layout, ...], tuple[int, ...], str]]:
        """Return a strategy that draws a mesh, layouts, a shape that they shard evenly, and an element type."""

        @st.composite
        def draw_case(draw: st.DrawFn) -> tuple[Mesh, tuple[Layout, ...], tuple[int, ...], str]:
            mesh = draw(st.sampled_from(self._list_meshes()))
            rank = draw(st.integers(0, 4))
            one = st.builds(Layout, _make_specs_strategy(mesh, rank), st.just(mesh)).filter(
                lambda layout: self.supports_specs(layout.sharding_specs)
            )
            layouts = draw(st.tuples(*[one] * num_layouts))
            times = draw(st.tuples(*[st.integers(0, 2)] * rank))
            counts = (math.lcm(*(layout.num_shards(axis) for layout in layouts)) for axis in range(rank))
            shape = tuple(n * count for n, count in zip(times, counts, strict=True))
            return mesh, layouts, shape, draw(st.sampled_from(self.dtypes))

        return draw_case()

    def _assert_each_device_has_its_shard(self, array: Any, layout: Layout, values: NumpyArray) -> None:
        """Assert that each device of this process has its shard of the values and nothing else."""
        mesh = self.engine.bind_mesh(layout.mesh)
        shards = self.get_device_values(array)
        names = mesh.devices or ()

        assert set(shards) == {names[i] for i in mesh.local_device_ids}
        for i in mesh.local_device_ids:
            assert_same_bits(values[layout.shard_slices(values.shape, i)], shards[names[i]])


def generate_values(shape: tuple[int, ...], dtype: str, seed: int) -> NumpyArray:
    """Return an array of random bits. Arrays of floats start with -0.0 and infinity, and may contain NaNs."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    element = np.dtype(dtype)
    flat = np.frombuffer(rng.bytes(math.prod(shape) * element.itemsize), element).copy()
    if len(flat) > 1 and not np.issubdtype(element, np.integer):
        flat[:2] = (-0.0, np.inf)
    if dtype == "bfloat16" and QUICK_XLA in os.environ.get("XLA_FLAGS", ""):
        bits = flat.view("uint16")  # XLA on CPUs changes each NaN to 0x7FC0, so draw no other NaN
        bits[bits & 0x7FFF > 0x7F80] = 0x7FC0
    return flat.reshape(shape)


def assert_same_bits(expected: NumpyArray, actual: NumpyArray) -> None:
    """Fail unless two arrays have the same shape, element type and bits."""
    assert (expected.dtype, expected.shape) == (actual.dtype, actual.shape)
    assert expected.tobytes() == actual.tobytes()


def list_all_specs(mesh: Mesh, rank: int) -> list[tuple[ShardingSpec, ...]]:
    """Return the sharding specs of all layouts of a rank: each dim on any axis or none, in all orders of dims."""
    all_specs: dict[tuple[ShardingSpec, ...], None] = {}
    for axes in itertools.product(range(-1, rank), repeat=len(mesh.dim_names)):
        for order in itertools.permutations(range(len(axes))):
            all_specs[_convert_axes_to_specs(mesh, axes, order, rank)] = None
    return list(all_specs)


def _convert_axes_to_specs(
    mesh: Mesh, axes: Sequence[int], order: Sequence[int], rank: int
) -> tuple[ShardingSpec, ...]:
    """Return specs in which mesh dim `i` shards axis `axes[i]`. Dims of the same axis are sorted as in `order`."""
    dims: list[list[str]] = [[] for _ in range(rank)]
    for i in order:
        if axes[i] >= 0:
            dims[axes[i]].append(mesh.dim_names[i])
    return Layout([tuple(names) for names in dims], mesh).sharding_specs


def list_matrix_specs(mesh: Mesh) -> list[tuple[ShardingSpec, ...]]:
    """Return sharding specs of a matrix: replicated, one axis over one dim, one axis over all dims, and both axes."""
    first, last, names = mesh.dim_names[0], mesh.dim_names[-1], mesh.dim_names
    specs: list[list[Any]] = [[None, None], [first, None], [names, None], [names[::-1], None]]
    if first != last:
        specs.append([last, first])
    return list(dict.fromkeys(Layout(each, mesh).sharding_specs for each in specs))


def _make_specs_strategy(mesh: Mesh, rank: int) -> st.SearchStrategy[tuple[ShardingSpec, ...]]:
    number = len(mesh.dim_names)
    return st.builds(
        lambda axes, order: _convert_axes_to_specs(mesh, axes, order, rank),
        st.tuples(*[st.integers(-1, rank - 1)] * number),
        st.permutations(range(number)),
    )


def make_assignment(shape: tuple[int, ...], dtype: str, layout: Layout, path: str = "w") -> Assignment:
    """Return the assignment of a new variable to a layout."""
    return Assignment(VariableSpec(path, shape, dtype), layout)


def make_recording_initializer(values: NumpyArray, used_names: list[str], name: str) -> Initializer:
    """Return an initializer that returns `values` and appends `name` to `used_names` at each use."""

    def record_use_and_return_values() -> NumpyArray:
        used_names.append(name)
        return values

    return Initializer(global_value=record_use_and_return_values)
