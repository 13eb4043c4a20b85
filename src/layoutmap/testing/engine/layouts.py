"""The laws of devices, meshes and layouts on every engine."""

# ruff: noqa: SIM300
from __future__ import annotations

import numpy as np
import pytest

from layoutmap.core.errors import EngineError, LayoutError, MeshError
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.engines import engine_of_array
from layoutmap.engines.protocol import Unplaced
from layoutmap.testing.engine.cases import EngineCases, all_specs, assignment_of, random_values, recorded


class LayoutLaws(EngineCases):
    """Devices, meshes, and what an engine holds and refuses."""

    def test_devices_are_named(self):
        """Each device has a name of its own, made of its type and its number."""
        names = self.engine.devices(self._device_type)
        number = 8 if self.one_device is None else 1

        assert number <= len(names)
        assert self.one_device in (None, *names)
        assert len(names) == len(set(names))
        assert tuple(names[:number]) == Mesh(names[:number], {"x": number}).devices
        assert names == self.engine.devices(names[0].partition(":")[0].lower())

    def test_devices_are_not_simulated_once_there_are_others(self):
        """Another number than the framework has started with is refused, and changes nothing."""
        there = self.engine.devices()
        self.engine.relayout(np.zeros(2, np.float32), Layout([None], self.mesh("x=2")))

        with pytest.raises(EngineError, match="cannot be simulated"):
            self.engine.simulate(len(there) + 1)
        assert there == self.engine.devices()

    def test_an_unknown_device_type_is_refused(self):
        """Devices of a type that the machine has not are refused by the name of the type."""
        with pytest.raises(EngineError, match="NOSUCH"):
            self.engine.devices("nosuch")

    def test_an_abstract_mesh_is_bound_to_the_first_devices(self):
        """Binding returns an abstract mesh the first devices, and leaves a bound one as it is."""
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

    def test_an_array_is_known_again(self):
        """An engine holds its framework's arrays and nothing else, and a plain one has no layout."""
        array = self.make_array(np.zeros(2, np.float32))

        assert isinstance(array, self.engine.array_types)
        assert not isinstance(np.zeros(2), self.engine.array_types)
        assert not isinstance(None, self.engine.array_types)
        assert self.engine is engine_of_array(array)
        assert self.engine.layout_of(array) is None

    def test_a_plain_array_is_told_as_what_it_is(self):
        """A plain array has no layout, and is copied to the mesh that it is used on; any other has its own."""
        plain = self.engine.found(self.make_array(np.zeros(2, np.float32)))
        layout = Layout(["x"], self.mesh("x=2"))
        array = self.engine.relayout(np.zeros(2, np.float32), layout)

        assert isinstance(plain, Unplaced)
        assert plain.is_copied
        assert {*plain.devices} <= {*self.engine.devices(self._device_type)}
        assert layout == self.engine.found(array) == self.engine.layout_of(array)
        assert layout == self.engine.found(array, [self.mesh("x=2,y=2")])

    def test_what_each_device_holds_is_its_shard(self):
        """By the names of the mesh: replicas, too, each with all bits."""
        mesh = self.engine.bind(self.mesh("x=2,y=4"))
        values = random_values((8, 8), "float32", seed=5)
        for specs in ((None, None), ("x", None), ("x", "y")):
            array = self.engine.relayout(values, Layout(specs, mesh))
            held = dict(self.engine.by_device(array))

            assert {*(mesh.devices or ())} == {*held}
            assert len(held) == len(self.device_values(array))
            for device, piece in self.device_values(array).items():
                np.testing.assert_array_equal(piece, held[device])
        ((_, alone),) = self.engine.by_device(self.make_array(values))
        np.testing.assert_array_equal(values, alone)

    def test_native_checks_the_rank(self):
        """A layout of another rank than asked for is refused."""
        with pytest.raises(LayoutError, match="rank"):
            self.engine.native(Layout(["x", None], self.mesh("x=2")), 1)

    def test_what_cannot_be_held_is_refused(self):
        """A layout that the engine cannot hold is refused by name, before anything is initialized."""
        for specs, words in self.cannot_hold.items():
            layout = Layout(specs, self.mesh("x=2,y=4"))
            shape = (8,) * layout.rank
            used: list[str] = []
            for refuse in (
                lambda: self.engine.check_layout(layout),  # noqa: B023
                lambda: self.engine.native(layout, layout.rank),  # noqa: B023
                lambda: self.engine.relayout(np.zeros(shape, np.float32), layout),  # noqa: B023
                lambda: self.engine.create(
                    {"w": assignment_of(shape, "float32", layout, "w")},  # noqa: B023
                    {"w": recorded(np.zeros(shape, np.float32), used, "w")},  # noqa: B023
                ),
            ):
                with pytest.raises(EngineError, match=words):
                    refuse()

            assert [] == used

    def test_an_axis_over_several_dims_is_held_as_the_engine_says(self):
        """By what an engine says of such layouts, a plan takes one of the dims before anything is made."""
        layout = Layout([("x", "y"), None], Mesh(None, "x=2,y=4"))
        if self.engine.several_dims:
            self.engine.check_layout(layout)
        else:
            with pytest.raises(EngineError):
                self.engine.check_layout(layout)

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
            self.engine.from_shards(assignment_of((8, 8), "float32", layout), values.__getitem__)
            for layout in layouts
        ]

        assert layouts[0] == self.engine.layout_of(first)
        for made in (arrays, moved, read):
            assert layouts == list(map(self.engine.layout_of, made))
            for array, layout in zip(made, layouts, strict=True):
                self._assert_each_device_has_its_shard(array, layout, values)
