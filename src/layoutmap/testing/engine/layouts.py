"""Laws about devices, meshes, and layouts."""

from __future__ import annotations

import numpy as np
import pytest

from layoutmap.core.errors import EngineError, LayoutError, MeshError
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.engines import find_engine
from layoutmap.engines.protocol import PlacementWithoutLayout
from layoutmap.testing.engine.cases import (
    EngineCases,
    generate_values,
    list_all_specs,
    make_assignment,
    make_recording_initializer,
)


class LayoutLaws(EngineCases):
    """Laws about devices, meshes, and supported layouts."""

    def test_devices_are_named(self):
        """Each device has a unique name, which contains its type and its number."""
        names = self.engine.list_device_names(self._device_type)
        number = 8 if self.one_device is None else 1

        assert number <= len(names)
        assert self.one_device in (None, *names)
        assert len(names) == len(set(names))
        assert tuple(names[:number]) == Mesh(names[:number], {"x": number}).devices
        assert names == self.engine.list_device_names(names[0].partition(":")[0].lower())

    def test_devices_cannot_be_simulated_after_the_framework_started(self):
        """A new number of simulated devices is refused after the framework has started, and nothing changes."""
        before = self.engine.list_device_names()
        self.engine.relayout(np.zeros(2, np.float32), Layout([None], self.make_mesh("x=2")))

        with pytest.raises(EngineError, match="cannot be simulated"):
            self.engine.simulate_devices(len(before) + 1)
        assert before == self.engine.list_device_names()

    def test_an_unknown_device_type_is_refused(self):
        """The error for an unknown device type contains its name."""
        with pytest.raises(EngineError, match="NOSUCH"):
            self.engine.list_device_names("nosuch")

    def test_an_abstract_mesh_is_bound_to_the_first_devices(self):
        """`bind_mesh` gives the first devices to an abstract mesh, and returns a bound mesh unchanged."""
        abstract = Mesh(None, self._parse_dims_for_tested_devices("x=2,y=2"), "name")
        bound = self.engine.bind_mesh(abstract)

        assert abstract.with_devices(self.engine.list_device_names()[: abstract.size]) == bound
        for mesh in (bound, self.make_mesh("x=2,y=2", first=0)):
            assert mesh == self.engine.bind_mesh(mesh)

    def test_a_mesh_of_more_devices_than_there_are_is_refused(self):
        """The error for a mesh with too many devices contains the number of available devices."""
        mesh = Mesh(None, {"x": 1 << 20})
        number = str(len(self.engine.list_device_names()))

        with pytest.raises(MeshError, match=number):
            self.engine.bind_mesh(mesh)
        with pytest.raises(MeshError, match=number):
            self.engine.make_native_layout(Layout(["x"], mesh), 1)

    def test_a_mesh_of_unknown_devices_is_refused(self):
        """The error for a mesh with an unknown device contains the device's name."""
        known = self.engine.list_device_names(self._device_type)[0]
        unknown = f"{known.partition(':')[0]}:77777"
        mesh = Mesh([known, unknown], "x=2") if self.one_device is None else Mesh([unknown], "x=1")

        with pytest.raises(MeshError, match=unknown):
            self.engine.bind_mesh(mesh)
        with pytest.raises(MeshError, match=unknown):
            self.engine.relayout(np.zeros(2, np.float32), Layout(["x"], mesh))

    def test_the_engine_recognizes_its_arrays(self):
        """An engine accepts arrays of its framework and no other objects."""
        array = self.make_array(np.zeros(2, np.float32))

        assert isinstance(array, self.engine.array_types)
        assert not isinstance(np.zeros(2), self.engine.array_types)
        assert not isinstance(None, self.engine.array_types)
        assert self.engine is find_engine(array)
        assert self.engine.get_layout(array) is None

    def test_find_placement_recognizes_an_array_without_layout(self):
        """`find_placement` returns `PlacementWithoutLayout` for an array without a layout, and otherwise the layout."""
        unplaced = self.engine.find_placement(self.make_array(np.zeros(2, np.float32)))
        layout = Layout(["x"], self.make_mesh("x=2"))
        array = self.engine.relayout(np.zeros(2, np.float32), layout)

        assert isinstance(unplaced, PlacementWithoutLayout)
        assert unplaced.is_copied
        assert {*unplaced.devices} <= {*self.engine.list_device_names(self._device_type)}
        assert layout == self.engine.find_placement(array) == self.engine.get_layout(array)
        assert layout == self.engine.find_placement(array, [self.make_mesh("x=2,y=2")])

    def test_iterate_device_values_returns_each_shard(self):
        """`iterate_device_values` returns the shard of each device with all bits, also of replicas."""
        mesh = self.engine.bind_mesh(self.make_mesh("x=2,y=4"))
        values = generate_values((8, 8), "float32", seed=5)
        for specs in ((None, None), ("x", None), ("x", "y")):
            array = self.engine.relayout(values, Layout(specs, mesh))
            shards = dict(self.engine.iterate_device_values(array))

            assert {*(mesh.devices or ())} == {*shards}
            assert len(shards) == len(self.get_device_values(array))
            for device, shard in self.get_device_values(array).items():
                np.testing.assert_array_equal(shard, shards[device])
        ((_, only_shard),) = self.engine.iterate_device_values(self.make_array(values))
        np.testing.assert_array_equal(values, only_shard)

    def test_make_native_layout_refuses_a_wrong_rank(self):
        """`make_native_layout` refuses a layout with a rank other than the given rank."""
        with pytest.raises(LayoutError, match="rank"):
            self.engine.make_native_layout(Layout(["x", None], self.make_mesh("x=2")), 1)

    def test_unsupported_layouts_are_refused(self):
        """An unsupported layout is refused before any initializer runs."""
        for specs, words in self.cannot_hold.items():
            layout = Layout(specs, self.make_mesh("x=2,y=4"))
            shape = (8,) * layout.rank
            used: list[str] = []
            for refuse in (
                lambda: self.engine.check_layout(layout),  # noqa: B023
                lambda: self.engine.make_native_layout(layout, layout.rank),  # noqa: B023
                lambda: self.engine.relayout(np.zeros(shape, np.float32), layout),  # noqa: B023
                lambda: self.engine.create_initial_values(
                    {"w": make_assignment(shape, "float32", layout, "w")},  # noqa: B023
                    {"w": make_recording_initializer(np.zeros(shape, np.float32), used, "w")},  # noqa: B023
                ),
            ):
                with pytest.raises(EngineError, match=words):
                    refuse()

            assert [] == used

    def test_several_dims_along_an_axis_are_supported_as_declared(self):
        """`check_layout` accepts an axis over two mesh dims if and only if the engine's `several_dims` is true."""
        layout = Layout([("x", "y"), None], Mesh(None, "x=2,y=4"))
        if self.engine.several_dims:
            self.engine.check_layout(layout)
        else:
            with pytest.raises(EngineError):
                self.engine.check_layout(layout)

    def test_check_layout_needs_no_devices(self):
        """`check_layout` depends only on the layout, also on a mesh of any size or without devices."""
        for mesh in (Mesh(None, "x=2,y=4"), self.make_mesh("x=2,y=4", first=0), Mesh(None, "x=256,y=512")):
            for specs in list_all_specs(mesh, 2):
                is_refused = False
                try:
                    self.engine.check_layout(Layout(specs, mesh))
                except EngineError:
                    is_refused = True

                assert is_refused == (mesh.size > 1 and not self.supports_specs(specs))

    def test_arrays_keep_their_own_layouts(self):
        """Arrays on meshes of the same devices keep their layouts if order, shape, or names of the meshes differ."""
        names = self.engine.list_device_names(self._device_type)
        grids = [self._parse_dims_for_tested_devices(dims) for dims in ("x=2,y=4", "x=4,y=2", "y=2,x=4")]
        meshes = [
            Mesh(None, grids[0]),
            *[self.make_mesh("x=2,y=4", first=0, name=name) for name in ("", "b", "a")],
        ]
        meshes += [self.make_mesh(grid, first=0) for grid in ("x=4,y=2", "y=2,x=4", "a=2,b=4")]
        if self.holds_any_device_order and self.one_device is None:
            meshes.append(meshes[1].with_devices(names[:8][::-1]))
        layouts = [Layout(mesh.dim_names, mesh) for mesh in (*meshes, *reversed(meshes))]
        values = generate_values((8, 8), "float32", seed=11)
        first = self.engine.relayout(values, layouts[0])
        arrays = [self.engine.relayout(values, layout) for layout in layouts]
        moved = [self.engine.relayout(first, layout) for layout in layouts]
        read = [
            self.engine.create_from_shards(make_assignment((8, 8), "float32", layout), values.__getitem__)
            for layout in layouts
        ]

        assert layouts[0] == self.engine.get_layout(first)
        for each_way in (arrays, moved, read):
            assert layouts == list(map(self.engine.get_layout, each_way))
            for array, layout in zip(each_way, layouts, strict=True):
                self._assert_each_device_has_its_shard(array, layout, values)
