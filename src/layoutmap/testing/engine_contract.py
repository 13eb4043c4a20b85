"""What every engine must do, as tests: inherit them to test yours.

    class TestMyEngine(EngineContract):
        engine_name = "mine"

        def make_array(self, values): return mine.array(values)
        def device_values(self, array): return {shard.device: shard.numpy() for shard in array.shards}

The laws use the engine protocol, numpy and hypothesis, and no framework. They want 8 devices, or just the one that
`one_device` names, such as a machine's only GPU. Where an engine runs as several processes, each runs the tests, with
the same `hypothesis` seed, and `gathered` joins what they hold.
"""

# ruff: noqa: SIM300
from __future__ import annotations

import contextlib
import gc
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings

from layoutmap.core.blocks import Index, assemble, block_shape, whole_index
from layoutmap.core.errors import EngineError, LayoutError, MeshError
from layoutmap.core.initializers import Initializer
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.specs import ShardingSpec
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines import engine_of_array, get_engine
from layoutmap.engines.protocol import Engine

__all__ = ["EngineContract", "all_specs", "assert_same_bits", "random_values"]

NumpyArray = npt.NDArray[Any]

_few = settings(
    deadline=None,
    max_examples=settings().max_examples // 2,  # of the profile that is loaded: each example is many arrays
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)


class EngineContract:
    """The laws of engines. Inherit it and set what is below.

    Attributes:
        engine_name: The engine's name.
        meshes: The grids to try; each needs at most 8 devices.
        dtypes: The element types to try.
        cannot_hold: Sharding specs on the mesh `x=2,y=4` that the engine cannot hold, each with words of its refusal.
        holds_any_device_order: Whether a mesh may name devices in any order; if not, the engine must refuse others.
        one_device: The name of a device that all grids are then on, each dim of size 1; `None`: eight devices.
    """

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
        """What each device of this process holds of an array, by device name."""
        raise NotImplementedError

    def random_draw(self, shape: tuple[int, ...], dtype: str, seed: int) -> Initializer:
        """A draw of random numbers, as the framework's model libraries hand them to the engine."""
        values = random_values(shape, dtype, seed)
        return Initializer(whole=lambda: values)

    def gathered(self, shards: Iterable[tuple[Index, NumpyArray]]) -> list[tuple[Index, NumpyArray]]:
        """The shards of all processes, each index once."""
        return list(shards)

    def num_live_arrays(self) -> int:
        """How many arrays of the framework there are now; 0 if it cannot be known."""
        return 0

    # -- words of the laws

    @property
    def engine(self) -> Engine:
        """The engine under test."""
        return get_engine(self.engine_name)

    def whole(self, array: Any, shape: tuple[int, ...], dtype: str) -> NumpyArray:
        """An array put together from its shards; fails where they leave gaps or overlap."""
        return assemble(self.gathered(self.engine.to_shards(array)), shape, _numpy_dtype(dtype))

    def held(self, specs: tuple[ShardingSpec, ...]) -> bool:
        """Whether the engine says it can hold such a layout."""
        return specs not in self.cannot_hold

    def mesh(self, dims: str, first: int | None = None, name: str = "") -> Mesh:
        """A grid on whatever devices come first, or on those from a number on; or one on the one device."""
        mesh = Mesh(None, self._sizes(dims), name)
        if self.one_device is not None:
            return mesh.with_devices([self.one_device])
        return mesh if first is None else mesh.with_devices(self.engine.devices()[first : first + mesh.size])

    # -- devices and meshes

    def test_devices_are_named(self):
        """Each device has a name of its own, made of its type and its number."""
        names = self.engine.devices(self._device_type)
        number = 8 if self.one_device is None else 1

        assert number <= len(names)
        assert self.one_device in (None, *names)
        assert len(names) == len(set(names))
        assert tuple(names[:number]) == Mesh(names[:number], {"x": number}).devices
        assert names == self.engine.devices(names[0].partition(":")[0].lower())

    def test_an_unknown_device_type_is_refused(self):
        """Devices of a type that the machine has not are refused by the name of the type."""
        with pytest.raises(EngineError, match="NOSUCH"):
            self.engine.devices("nosuch")

    def test_an_abstract_mesh_is_bound_to_the_first_devices(self):
        """Binding gives an abstract mesh the first devices, and leaves a bound one as it is."""
        abstract = Mesh(None, self._sizes("x=2,y=2"), "name")
        bound = self.engine.bind(abstract)

        assert abstract.with_devices(self.engine.devices()[: abstract.size]) == bound
        for mesh in (bound, self.mesh("x=2,y=2", first=0)):
            assert mesh == self.engine.bind(mesh)

    def test_a_mesh_of_more_devices_than_there_are_is_refused(self):
        """A mesh that the machine is too small for is refused, saying how many devices there are."""
        mesh = Mesh(None, {"x": 1 << 20})
        number = str(len(self.engine.devices()))

        with pytest.raises(MeshError, match=number):
            self.engine.bind(mesh)
        with pytest.raises(MeshError, match=number):
            self.engine.native(Layout(["x"], mesh), 1)

    def test_a_mesh_of_unknown_devices_is_refused(self):
        """A mesh that names a device that does not exist is refused by the device's name."""
        known = self.engine.devices(self._device_type)[0]
        unknown = f"{known.partition(':')[0]}:77777"
        mesh = Mesh([known, unknown], "x=2") if self.one_device is None else Mesh([unknown], "x=1")

        with pytest.raises(MeshError, match=unknown):
            self.engine.bind(mesh)
        with pytest.raises(MeshError, match=unknown):
            self.engine.relayout(np.zeros(2, np.float32), Layout(["x"], mesh))

    # -- what an engine holds

    def test_an_array_is_known_again(self):
        """An engine holds its framework's arrays and nothing else, and a plain one has no layout."""
        array = self.make_array(np.zeros(2, np.float32))

        assert self.engine.holds(array)
        assert not self.engine.holds(np.zeros(2))
        assert not self.engine.holds(None)
        assert self.engine is engine_of_array(array)
        assert self.engine.layout_of(array) is None

    def test_native_checks_the_rank(self):
        """A layout of another rank than asked for is refused."""
        with pytest.raises(LayoutError, match="rank"):
            self.engine.native(Layout(["x", None], self.mesh("x=2")), 1)

    def test_what_cannot_be_held_is_refused(self):
        """A layout that the engine cannot hold is refused by name, before anything is drawn."""
        for specs, words in self.cannot_hold.items():
            layout = Layout(specs, self.mesh("x=2,y=4"))
            shape = (8,) * layout.rank
            drawn: list[str] = []
            for refuse in (
                lambda: self.engine.check_layout(layout),  # noqa: B023
                lambda: self.engine.native(layout, layout.rank),  # noqa: B023
                lambda: self.engine.relayout(np.zeros(shape, np.float32), layout),  # noqa: B023
                lambda: self.engine.create(
                    {"w": _assignment(shape, "float32", layout, "w")},  # noqa: B023
                    {"w": _recorded(np.zeros(shape, np.float32), drawn, "w")},  # noqa: B023
                ),
            ):
                with pytest.raises(EngineError, match=words):
                    refuse()

            assert [] == drawn

    def test_a_layout_is_asked_about_before_there_are_devices(self):
        """Whether a layout can be held depends on it alone: on a mesh of any size, with devices or without."""
        for mesh in (Mesh(None, "x=2,y=4"), self.mesh("x=2,y=4", first=0), Mesh(None, "x=256,y=512")):
            for specs in all_specs(mesh, 2):
                refused = False
                try:
                    self.engine.check_layout(Layout(specs, mesh))
                except EngineError:
                    refused = True

                assert refused == (mesh.size > 1 and not self.held(specs))

    def test_the_layout_of_an_array_stays_as_it_is(self):
        """Meshes of the same devices in another order, shape, names or no names take none of each other's arrays."""
        names = self.engine.devices(self._device_type)
        grids = [self._sizes(dims) for dims in ("x=2,y=4", "x=4,y=2", "y=2,x=4")]
        meshes = [
            Mesh(None, grids[0]),
            *[self.mesh("x=2,y=4", first=0, name=name) for name in ("", "b", "a")],
        ]
        meshes += [self.mesh(grid, first=0) for grid in ("x=4,y=2", "y=2,x=4", "a=2,b=4")]
        if self.holds_any_device_order and self.one_device is None:
            meshes.append(meshes[1].with_devices(names[:8][::-1]))
        layouts = [Layout(mesh.dim_names, mesh) for mesh in (*meshes, *reversed(meshes))]
        values = random_values((8, 8), "float32", seed=11)
        first = self.engine.relayout(values, layouts[0])
        arrays = [self.engine.relayout(values, layout) for layout in layouts]
        moved = [self.engine.relayout(first, layout) for layout in layouts]
        read = [
            self.engine.from_shards(_assignment((8, 8), "float32", layout), values.__getitem__)
            for layout in layouts
        ]

        assert layouts[0] == self.engine.layout_of(first)
        for made in (arrays, moved, read):
            assert layouts == list(map(self.engine.layout_of, made))
            for array, layout in zip(made, layouts, strict=True):
                self._assert_each_device_has_its_shard(array, layout, values)

    # -- relayout

    def test_every_relayout_is_exact(self):
        """From each layout to each other one, all bits stay and the layout is the one asked for."""
        mesh = self.mesh("x=2,y=4")
        values = random_values((8, 16), "float32", seed=1)
        layouts = [Layout(specs, mesh) for specs in all_specs(mesh, 2) if self.held(specs)]
        arrays = [self.engine.relayout(values, layout) for layout in layouts]
        for (before, array), after in itertools.product(zip(layouts, arrays, strict=True), layouts):
            moved = self.engine.relayout(array, after)

            assert after == self.engine.layout_of(moved), (before, after)
            assert_same_bits(values, self.whole(moved, values.shape, "float32"))

    @_few
    @given(data=st.data())
    def test_relayout_keeps_every_bit(self, data: st.DataObject):
        """On any mesh, for any shape and element type, an array in one layout and then another has the bits it had."""
        _, (first, second), shape, dtype = data.draw(self._cases(num_layouts=2))
        values = random_values(shape, dtype, seed=2)
        plain = self.make_array(values) if data.draw(st.booleans()) else values
        array = self.engine.relayout(plain, first)
        moved = self.engine.relayout(array, second)

        assert first == self.engine.layout_of(array)
        assert second == self.engine.layout_of(moved)
        assert_same_bits(values, self.whole(array, shape, dtype))
        assert_same_bits(values, self.whole(moved, shape, dtype))
        self._assert_each_device_has_its_shard(moved, second, values)

    def test_relayout_moves_between_meshes(self):
        """An array moves between meshes of other shapes and other devices with all its bits."""
        values = random_values((8, 16), "float32", seed=3)
        layouts = [
            Layout(["x", "y"], self.mesh("x=2,y=4")),
            Layout([None, "a"], self.mesh("a=4", first=0)),
            Layout(["b", "a"], self.mesh("a=2,b=2", first=2)),
        ]
        over_two = Layout([("b", "a"), None], self.mesh("a=2,b=2", first=2))
        layouts += [over_two] * self.held(over_two.sharding_specs)
        for before, after in itertools.product(layouts, layouts):
            moved = self.engine.relayout(self.engine.relayout(values, before), after)

            assert after == self.engine.layout_of(moved)
            self._assert_each_device_has_its_shard(moved, after, values)

    def test_devices_in_another_order(self):
        """On a mesh of devices in another order each holds its shard, or the mesh is refused."""
        mesh = self.mesh("x=2,y=4", first=0)
        names = mesh.devices or ()
        mesh = mesh.with_devices([names[i] for i in (3, 1, 0, 2, 7, 6, 4, 5) if i < len(names)])
        layout = Layout(["y", "x"], mesh)
        values = random_values((8, 16), "float32", seed=4)
        if self.holds_any_device_order or mesh.size == 1:  # one has one order
            array = self.engine.relayout(values, layout)

            assert layout == self.engine.layout_of(array)
            self._assert_each_device_has_its_shard(array, layout, values)
        else:
            with pytest.raises(EngineError, match="order"):
                self.engine.relayout(values, layout)

    def test_what_does_not_fit_is_refused(self):
        """An axis that does not divide, or another rank, is refused and said so."""
        mesh = self.mesh("x=2,y=4")
        if mesh.size > 1:  # every axis divides by one
            with pytest.raises(LayoutError, match="6 is not a multiple of 4"):
                self.engine.relayout(np.zeros((4, 6), np.float32), Layout(["x", "y"], mesh))
        with pytest.raises(LayoutError, match="rank"):
            self.engine.relayout(np.zeros(4, np.float32), Layout(["x", "y"], mesh))

    def test_an_array_owns_its_values(self):
        """An array keeps its values when the numpy array it came from is changed."""
        layout = Layout.replicated(self.mesh("x=2"), 1)
        assignment = _assignment((64,), "float32", layout)
        source = np.zeros(64, np.float32)
        arrays = [
            self.engine.relayout(source, layout),
            self.engine.from_shards(assignment, lambda index: source[index]),
            self.engine.create({"w": assignment}, {"w": Initializer(whole=lambda: source)})["w"],
        ]
        source[:] = 1
        for array in arrays:
            assert_same_bits(np.zeros(64, np.float32), self.whole(array, (64,), "float32"))

    # -- shards

    @_few
    @given(data=st.data())
    def test_shards_round_trip(self, data: st.DataObject):
        """Shards written and read again are the same bits; each is read once, and indices have both ends."""
        _, (layout,), shape, dtype = data.draw(self._cases(num_layouts=1))
        values = random_values(shape, dtype, seed=5)
        asked: list[Index] = []

        def read(index: Index) -> NumpyArray:
            asked.append(index)
            return values[index]

        array = self.engine.from_shards(_assignment(shape, dtype, layout), read)
        shards = self.gathered(self.engine.to_shards(array))

        assert layout == self.engine.layout_of(array)
        assert_same_bits(values, assemble(shards, shape, values.dtype))
        self._assert_each_device_has_its_shard(array, layout, values)
        assert len(asked) == len(set(map(_ends, asked)))
        for index in [*asked, *(index for index, _ in shards)]:
            assert layout.shard_shape(shape) == block_shape(index)
        if math.prod(shape):
            assert layout.num_distinct_shards == len(shards)

    def test_a_plain_array_is_one_shard(self):
        """An array in no layout is one shard, which is all of it."""
        values = random_values((3, 5), "float32", seed=6)
        ((index, shard),) = self.engine.to_shards(self.make_array(values))

        assert whole_index((3, 5)) == index
        assert_same_bits(values, shard)

    def test_a_shard_read_wrong_is_refused(self):
        """A reader that gives another shape or element type is refused by the variable's path."""
        assignment = _assignment((8,), "float32", Layout(["x"], self.mesh("x=2")), "block.w")
        shape = assignment.layout.shard_shape((8,))
        for wrong in (np.zeros(3, np.float32), np.zeros(shape, np.int8)):
            with pytest.raises(EngineError, match=r"block\.w"):
                self.engine.from_shards(assignment, lambda _: wrong)  # noqa: B023

    # -- create

    def test_created_values_do_not_depend_on_the_layout(self):
        """A random draw has the same bits on every mesh and layout: those of the unsharded draw."""
        shape = (16, 8)
        for dtype in ("float32", "bfloat16"):
            draw = self.random_draw(shape, dtype, seed=7)
            expected = self._plain(draw.whole(), shape, dtype)
            for mesh in self._all_meshes() if dtype == "float32" else [self.mesh("x=2,y=4")]:
                layouts = [Layout(specs, mesh) for specs in _some_specs(mesh) if self.held(specs)]
                assignments = {str(i): _assignment(shape, dtype, each) for i, each in enumerate(layouts)}
                arrays = self.engine.create(assignments, dict.fromkeys(assignments, draw))
                for i, layout in enumerate(layouts):
                    actual = self.whole(arrays[str(i)], shape, dtype)

                    assert layout == self.engine.layout_of(arrays[str(i)])
                    assert_same_bits(expected, actual)
                    self._assert_each_device_has_its_shard(arrays[str(i)], layout, expected)

    @_few
    @given(data=st.data())
    def test_created_arrays_are_what_was_drawn(self, data: st.DataObject):
        """A draw of any shape and element type has its values, on any mesh and layout."""
        _, (layout,), shape, dtype = data.draw(self._cases(num_layouts=1))
        values = random_values(shape, dtype, seed=8)
        made = self.engine.create(
            {"w": _assignment(shape, dtype, layout)}, {"w": Initializer(whole=lambda: values)}
        )

        assert ["w"] == list(made)
        assert layout == self.engine.layout_of(made["w"])
        assert_same_bits(values, self.whole(made["w"], shape, dtype))
        self._assert_each_device_has_its_shard(made["w"], layout, values)

    def test_equal_draws_with_other_seeds_differ(self):
        """Variables that are drawn alike, each with its seed, get each its own values."""
        layout = Layout(["x", None], self.mesh("x=2"))
        draws = {str(seed): self.random_draw((16, 8), "float32", seed) for seed in range(3)}
        assignments = {key: _assignment((16, 8), "float32", layout) for key in draws}
        made = self.engine.create(assignments, draws)
        for key, draw in draws.items():
            expected = self._plain(draw.whole(), (16, 8), "float32")

            assert_same_bits(expected, self.whole(made[key], (16, 8), "float32"))

    def test_progress_is_told(self):
        """Progress is called with each key, in order, once its variable is made."""
        layout = Layout(["x"], self.mesh("x=2"))
        draws = {key: self.random_draw((4,), "float32", seed=9) for key in "cab"}
        told: list[str] = []
        made = self.engine.create(
            {k: _assignment((4,), "float32", layout) for k in draws}, draws, told.append
        )

        assert ["c", "a", "b"] == told == list(made)

    def test_nothing_is_drawn_if_a_layout_does_not_fit(self):
        """One layout that does not fit, of many, is refused by its variable's path before anything is drawn."""
        mesh = self.mesh("x=2")
        good = _assignment((4,), "float32", Layout(["x"], mesh), "good")
        too_many = Mesh(None, {"x": 1 << 20})
        bad = {
            "uneven": (LayoutError, _assignment((3,), "float32", Layout(["x"], mesh), "uneven")),
            "rank": (LayoutError, _assignment((3, 2), "float32", Layout(["x"], mesh), "rank")),
            "devices": (MeshError, _assignment((1 << 20,), "float32", Layout(["x"], too_many), "devices")),
            "missing": (EngineError, _assignment((4,), "float32", Layout(["x"], mesh), "missing")),
            "nosuchtype": (EngineError, _assignment((4,), "string", Layout(["x"], mesh), "nosuchtype")),
        }
        if mesh.size == 1:  # every axis divides by one
            del bad["uneven"]
        for path, (kind, assignment) in bad.items():
            drawn: list[str] = []
            draws = {key: _recorded(np.zeros(4, np.float32), drawn, key) for key in ("good", path)}
            if path == "missing":
                del draws[path]
            with pytest.raises(kind, match=path):
                self.engine.create({"good": good, path: assignment}, draws)

            assert [] == drawn

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_nothing_is_left_when_a_draw_fails(self, error: type[BaseException]):
        """A draw that fails half way is the error that is seen, and no array made before it stays."""
        layout = Layout(["x"], self.mesh("x=2"))
        assignments = {key: _assignment((4,), "float32", layout) for key in "abc"}
        told: list[str] = []

        def fail() -> Any:
            raise error("broken draw")

        draws = {key: self.random_draw((4,), "float32", seed=10) for key in "abc"}
        self.engine.create(assignments, draws)
        gc.collect()
        before = self.num_live_arrays()
        with pytest.raises(error, match="broken draw"):
            self.engine.create(assignments, {**draws, "c": Initializer(whole=fail)}, told.append)
        gc.collect()

        assert ["a", "b"] == told
        assert before == self.num_live_arrays()

    def test_a_draw_of_another_shape_or_type_is_refused(self):
        """A draw that gives another shape or element type than its variable has is refused by the path."""
        layout = Layout(["x"], self.mesh("x=2"))
        assignments = {"w": _assignment((4,), "float32", layout, "block.w")}
        for wrong in (np.zeros(8, np.float32), np.zeros((4, 1), np.float32), np.zeros(4, np.int8)):
            with pytest.raises(EngineError, match=r"block\.w"):
                self.engine.create(assignments, {"w": Initializer(whole=lambda: wrong)})  # noqa: B023
        for shape, dtype in (((8,), "float32"), ((4,), "bfloat16")):
            with pytest.raises(EngineError, match=r"block\.w"):
                self.engine.create(assignments, {"w": self.random_draw(shape, dtype, seed=11)})

    def test_nothing_asked_is_nothing_made(self):
        """Creating no variables gives no arrays."""
        assert {} == self.engine.create({}, {})

    # -- calls

    def test_a_call_gives_the_values_in_the_layout(self):
        """A function that is called with a layout gives its plain result in that layout, on every mesh."""
        values = random_values((16, 8), "uint32", seed=12)
        array = self.make_array(values)
        for mesh in self._all_meshes():
            for specs in filter(self.held, _some_specs(mesh)):
                layout = Layout(specs, mesh)
                made = self.engine.call(lambda a, times: a * times, layout, [array], {"times": 3})

                assert layout == self.engine.layout_of(made)
                self._assert_each_device_has_its_shard(made, layout, values * np.uint32(3))

    def test_a_call_that_does_not_fit_is_refused(self):
        """A function whose result has another rank, does not divide, or is not one array is refused."""
        layout = Layout(["x"], self.mesh("x=2"))
        shapes: list[tuple[int, ...]] = [
            (2, 2),
            *[(3,)] * (layout.mesh.size > 1),
        ]  # every axis divides by one
        for shape in shapes:
            array = self.make_array(np.zeros(shape, np.float32))
            with pytest.raises(LayoutError):
                self.engine.call(lambda a: a, layout, [array], {})
        array = self.make_array(np.zeros(2, np.float32))
        with pytest.raises(EngineError, match="2 arrays"):
            self.engine.call(lambda a: (a, a), layout, [array], {})

    # -- variables, whole values, computing on a mesh

    def test_a_variable_holds_the_array_in_its_layout(self):
        """What a variable holds an array in has the array's layout and values."""
        values = random_values((16, 8), "float32", seed=13)
        for mesh in self._all_meshes():
            for specs in filter(self.held, _some_specs(mesh)):
                array = self.engine.relayout(values, Layout(specs, mesh))
                held = self.engine.variable(array, name="w", trainable=False)

                assert Layout(specs, mesh) == self.engine.layout_of(held)
                assert_same_bits(values, self.whole(held, values.shape, "float32"))

    @_few
    @given(data=st.data())
    def test_an_array_as_numpy_is_its_values(self, data: st.DataObject):
        """All values of an array, in a layout or in none, are those that it was made of."""
        _, (layout,), shape, dtype = data.draw(self._cases(num_layouts=1))
        values = random_values(shape, dtype, seed=14)

        assert_same_bits(values, self.engine.to_numpy(self.make_array(values)))
        assert_same_bits(values, self.engine.to_numpy(self.engine.relayout(values, layout)))

    def test_what_one_process_gathers_is_its_own(self):
        """With one process, what is gathered from all is one row: the values as they were given."""
        for dtype in ("uint8", "float64"):
            values = random_values((3, 2), dtype, seed=0)

            assert_same_bits(values[None], self.engine.all_gather(values, self._all_meshes()[0]))

    def test_computing_on_a_mesh(self):
        """What is computed while computing runs on a mesh lies on it, whole; an exception ends that."""
        values = np.arange(8, dtype=np.int32).reshape(4, 2)
        for mesh in (self.mesh("x=2,y=4"), self.mesh("a=4", first=2)):
            made = self._doubled_until_an_exception(mesh, values)

            assert Layout.replicated(mesh, 2) == self.engine.layout_of(made)
            self._assert_each_device_has_its_shard(made, Layout.replicated(mesh, 2), values + values)
            array = self.make_array(values)
            assert self.engine.layout_of(array + array) is None

    def _doubled_until_an_exception(self, mesh: Mesh, values: NumpyArray) -> Any:
        made: Any = None
        with contextlib.suppress(ZeroDivisionError), self.engine.run_on(mesh):
            array = self.make_array(values)
            made = array + array
            raise ZeroDivisionError
        return made

    @pytest.mark.parametrize("dtype", ["float64", "int64", "float32", "bool"])
    def test_canonical_says_what_becomes_of_numpy_values(self, dtype: str):
        """An array made from numpy values has the element type of their canonical form, which is its own."""
        values = np.ones(4, dtype)
        held = self.engine.canonical(values)
        array = self.engine.relayout(values, Layout(["x"], self.mesh("x=2")))

        assert_same_bits(held, self.whole(array, (4,), str(held.dtype)))
        assert_same_bits(held, self.engine.canonical(held))

    def test_what_is_no_number_is_refused(self):
        """Texts and objects are refused by their element type."""
        for values in (np.array(["a", "b"]), np.array([None, None])):
            with pytest.raises(EngineError, match=str(values.dtype)):
                self.engine.canonical(values)
            with pytest.raises(EngineError, match=str(values.dtype)):
                self.engine.relayout(values, Layout(["x"], self.mesh("x=2")))

    def test_a_draw_without_a_program_is_said_to_be_whole(self):
        """A draw that can only give its whole value is said to be made whole, and a reason is given."""
        assert self.engine.why_global(Initializer(whole=lambda: np.zeros(4, np.float32)))

    # -- parts

    def _plain(self, value: Any, shape: tuple[int, ...], dtype: str) -> NumpyArray:
        """The values of a whole draw, as a numpy array."""
        if isinstance(value, np.ndarray):
            return value
        return self.whole(value, shape, dtype)

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
    element = _numpy_dtype(dtype)
    flat = np.frombuffer(rng.bytes(math.prod(shape) * element.itemsize), element).copy()
    if len(flat) > 1 and not np.issubdtype(element, np.integer):
        flat[:2] = (-0.0, np.inf)
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
    """Specs in which mesh dim `i` cuts axis `axes[i]`, those on one axis in the order given."""
    dims: list[list[str]] = [[] for _ in range(rank)]
    for i in order:
        if axes[i] >= 0:
            dims[axes[i]].append(mesh.dim_names[i])
    return Layout([tuple(names) for names in dims], mesh).sharding_specs


def _some_specs(mesh: Mesh) -> list[tuple[ShardingSpec, ...]]:
    """A few layouts of rank 2: whole, cut along each axis, along both, and along one by all dims in both orders."""
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


def _assignment(shape: tuple[int, ...], dtype: str, layout: Layout, path: str = "w") -> Assignment:
    return Assignment(VariableSpec(path, shape, dtype), layout)


def _recorded(values: NumpyArray, drawn: list[str], key: str) -> Initializer:
    """A draw that notes when it is used."""

    def whole() -> NumpyArray:
        drawn.append(key)
        return values

    return Initializer(whole=whole)


def _ends(index: Index) -> tuple[tuple[int, int], ...]:
    return tuple((part.start, part.stop) for part in index)


def _numpy_dtype(name: str) -> np.dtype[Any]:
    """The element type of a name; `bfloat16` is known to numpy once a framework has registered it."""
    return np.dtype(name)
