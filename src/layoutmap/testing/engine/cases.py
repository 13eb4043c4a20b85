"""The cases of the laws of engines: meshes, layouts, values, and what an engine's own tests say of it."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings

from layoutmap.core.blocks import Index, NumpyArray, assemble
from layoutmap.core.initializers import Initializer
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.specs import ShardingSpec
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines import get_engine
from layoutmap.engines.protocol import Engine
from layoutmap.testing.subjects import QUICK_XLA

few = settings(
    deadline=None,
    max_examples=settings().max_examples // 2,  # of the profile that is loaded: each example is many arrays
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)


class EngineCases:
    """The cases of an engine, and what its own tests say of it; see `EngineContract`."""

    engine_name: ClassVar[str]
    meshes: ClassVar[Sequence[str]] = ("x=8", "x=2,y=4", "x=4,y=2", "x=2,y=2,z=2", "x=1,y=8", "x=1")
    dtypes: ClassVar[Sequence[str]] = ("float32", "bfloat16", "int8", "bool", "uint32")
    cannot_hold: ClassVar[Mapping[tuple[ShardingSpec, ...], str]] = {}
    holds_any_device_order: ClassVar[bool] = True
    one_device: ClassVar[str | None] = None

    # -- what a subclass says

    def make_array(self, values: NumpyArray) -> Any:
        """A plain array of the framework, in no layout."""
        raise NotImplementedError

    def device_values(self, array: Any) -> Mapping[str, NumpyArray]:
        """The values that each device of this process holds of an array, by device name."""
        raise NotImplementedError

    def random_initializer(self, shape: tuple[int, ...], dtype: str, seed: int) -> Initializer:
        """An initializer of random numbers, as the framework's model libraries hand them to the engine."""
        values = random_values(shape, dtype, seed)
        return Initializer(global_value=lambda: values)

    def gathered(self, shards: Iterable[tuple[Index, NumpyArray]]) -> list[tuple[Index, NumpyArray]]:
        """The shards of all processes, each index once."""
        return list(shards)

    def num_live_arrays(self) -> int:
        """How many arrays of the framework there are now; 0 if it cannot be known."""
        return 0

    # -- cases

    @property
    def engine(self) -> Engine:
        """The engine under test."""
        return get_engine(self.engine_name)

    def assembled(self, array: Any, shape: tuple[int, ...], dtype: str) -> NumpyArray:
        """Return the global values of an array, from its shards; fails where they leave gaps or overlap."""
        return assemble(self.gathered(self.engine.to_shards(array)), shape, np.dtype(dtype))

    def held(self, specs: tuple[ShardingSpec, ...]) -> bool:
        """Whether the engine says it can hold such a layout."""
        several = any(isinstance(spec, tuple) for spec in specs)
        return specs not in self.cannot_hold and (self.engine.several_dims or not several)

    def mesh(self, dims: str, first: int | None = None, name: str = "") -> Mesh:
        """A grid on whatever devices come first, or on those from a number on; or one on the one device."""
        mesh = Mesh(None, self._sizes(dims), name)
        if self.one_device is not None:
            return mesh.with_devices([self.one_device])
        return mesh if first is None else mesh.with_devices(self.engine.devices()[first : first + mesh.size])

    def _plain(self, value: Any, shape: tuple[int, ...], dtype: str) -> NumpyArray:
        """Return the global value of an initializer, as a numpy array."""
        if isinstance(value, np.ndarray):
            return value
        return self.assembled(value, shape, dtype)

    @property
    def _device_type(self) -> str | None:
        return self.one_device and self.one_device.partition(":")[0]

    def _sizes(self, dims: str) -> list[tuple[str, int]]:
        """The dims of a mesh with their sizes; on one device each is 1."""
        mesh = Mesh(None, dims)
        return [(dim, mesh.dim_size(dim) if self.one_device is None else 1) for dim in mesh.dim_names]

    def _all_meshes(self) -> list[Mesh]:
        """The grids on the first devices, and two on other parts of the machine; each once."""
        meshes = [
            *(self.mesh(dims) for dims in self.meshes),
            self.mesh("x=2,y=2", first=0, name="first"),
            self.mesh("x=2,y=2", first=2),
        ]
        return list(dict.fromkeys(meshes))

    def _cases(
        self, num_layouts: int
    ) -> st.SearchStrategy[tuple[Mesh, tuple[Layout, ...], tuple[int, ...], str]]:
        """A mesh, layouts on it, a shape that all of them divide, and an element type."""

        @st.composite
        def cases(draw: st.DrawFn) -> tuple[Mesh, tuple[Layout, ...], tuple[int, ...], str]:
            mesh = draw(st.sampled_from(self._all_meshes()))
            rank = draw(st.integers(0, 4))
            one = st.builds(Layout, _specs(mesh, rank), st.just(mesh)).filter(
                lambda layout: self.held(layout.sharding_specs)
            )
            layouts = draw(st.tuples(*[one] * num_layouts))
            times = draw(st.tuples(*[st.integers(0, 2)] * rank))
            counts = (math.lcm(*(layout.num_shards(axis) for layout in layouts)) for axis in range(rank))
            shape = tuple(n * count for n, count in zip(times, counts, strict=True))
            return mesh, layouts, shape, draw(st.sampled_from(self.dtypes))

        return cases()

    def _assert_each_device_has_its_shard(self, array: Any, layout: Layout, values: NumpyArray) -> None:
        """Each device of this process holds its shard of the values and nothing else."""
        mesh = self.engine.bind(layout.mesh)
        held = self.device_values(array)
        names = mesh.devices or ()

        assert set(held) == {names[i] for i in mesh.local_device_ids}
        for i in mesh.local_device_ids:
            assert_same_bits(values[layout.shard_slices(values.shape, i)], held[names[i]])


def random_values(shape: tuple[int, ...], dtype: str, seed: int) -> NumpyArray:
    """Values of random bits: negative zeros, infinities and NaNs are among them."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    element = np.dtype(dtype)
    flat = np.frombuffer(rng.bytes(math.prod(shape) * element.itemsize), element).copy()
    if len(flat) > 1 and not np.issubdtype(element, np.integer):
        flat[:2] = (-0.0, np.inf)
    if dtype == "bfloat16" and QUICK_XLA in os.environ.get("XLA_FLAGS", ""):
        bits = flat.view("uint16")  # without its emitters of fusions XLA makes each NaN this one, anywhere
        bits[bits & 0x7FFF > 0x7F80] = 0x7FC0
    return flat.reshape(shape)


def assert_same_bits(expected: NumpyArray, actual: NumpyArray) -> None:
    """Fail unless two arrays have the same shape, element type and bits."""
    assert (expected.dtype, expected.shape) == (actual.dtype, actual.shape)
    assert expected.tobytes() == actual.tobytes()


def all_specs(mesh: Mesh, rank: int) -> list[tuple[ShardingSpec, ...]]:
    """The sharding specs of every layout of a rank on a mesh: each dim on any axis or none, tuples in every order."""
    found: dict[tuple[ShardingSpec, ...], None] = {}
    for axes in itertools.product(range(-1, rank), repeat=len(mesh.dim_names)):
        for order in itertools.permutations(range(len(axes))):
            found[_to_specs(mesh, axes, order, rank)] = None
    return list(found)


def _to_specs(mesh: Mesh, axes: Sequence[int], order: Sequence[int], rank: int) -> tuple[ShardingSpec, ...]:
    """Specs in which mesh dim `i` shards axis `axes[i]`, those on one axis in the order given."""
    dims: list[list[str]] = [[] for _ in range(rank)]
    for i in order:
        if axes[i] >= 0:
            dims[axes[i]].append(mesh.dim_names[i])
    return Layout([tuple(names) for names in dims], mesh).sharding_specs


def some_specs(mesh: Mesh) -> list[tuple[ShardingSpec, ...]]:
    """Return a few layouts of rank 2: replicated, sharded on each axis, on both, on one by all dims in both orders."""
    first, last, names = mesh.dim_names[0], mesh.dim_names[-1], mesh.dim_names
    specs: list[list[Any]] = [[None, None], [first, None], [names, None], [names[::-1], None]]
    if first != last:
        specs.append([last, first])
    return list(dict.fromkeys(Layout(each, mesh).sharding_specs for each in specs))


def _specs(mesh: Mesh, rank: int) -> st.SearchStrategy[tuple[ShardingSpec, ...]]:
    number = len(mesh.dim_names)
    return st.builds(
        lambda axes, order: _to_specs(mesh, axes, order, rank),
        st.tuples(*[st.integers(-1, rank - 1)] * number),
        st.permutations(range(number)),
    )


def assignment_of(shape: tuple[int, ...], dtype: str, layout: Layout, path: str = "w") -> Assignment:
    """A variable of a path, shape and element type, in a layout."""
    return Assignment(VariableSpec(path, shape, dtype), layout)


def recorded(values: NumpyArray, used: list[str], key: str) -> Initializer:
    """An initializer that notes when it is used."""

    def value() -> NumpyArray:
        used.append(key)
        return values

    return Initializer(global_value=value)
