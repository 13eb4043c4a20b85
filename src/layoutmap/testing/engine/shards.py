"""Laws about relayouts, and about arrays that are read and written by shard."""

from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from layoutmap.core.blocks import (
    Index,
    NumpyArray,
    assemble_blocks,
    compute_block_shape,
    get_starts_and_stops,
    make_full_index,
)
from layoutmap.core.errors import EngineError, LayoutError
from layoutmap.core.initializers import Initializer
from layoutmap.core.layout import Layout
from layoutmap.core.pieces import ArrayMove
from layoutmap.testing.engine.cases import (
    EngineCases,
    assert_same_bits,
    draw_half_as_many_examples,
    generate_values,
    list_all_specs,
    make_assignment,
)


class ShardLaws(EngineCases):
    """Laws about relayouts, and about arrays that are read and written by shard."""

    def test_every_relayout_is_exact(self):
        """A relayout between any two layouts keeps all bits and gives the new layout."""
        mesh = self.make_mesh("x=2,y=4")
        values = generate_values((8, 16), "float32", seed=1)
        layouts = [Layout(specs, mesh) for specs in list_all_specs(mesh, 2) if self.supports_specs(specs)]
        arrays = [self.engine.relayout(values, layout) for layout in layouts]
        for (before, array), after in itertools.product(zip(layouts, arrays, strict=True), layouts):
            moved = self.engine.relayout(array, after)

            assert after == self.engine.get_layout(moved), (before, after)
            assert_same_bits(values, self.assemble_array(moved, values.shape, "float32"))

    @draw_half_as_many_examples
    @given(data=st.data())
    def test_relayout_keeps_every_bit(self, data: st.DataObject):
        """An array keeps its bits through two relayouts, for any mesh, shape, and element type."""
        _, (first, second), shape, dtype = data.draw(self._make_case_strategy(num_layouts=2))
        values = generate_values(shape, dtype, seed=2)
        source = self.make_array(values) if data.draw(st.booleans()) else values
        array = self.engine.relayout(source, first)
        moved = self.engine.relayout(array, second)

        assert first == self.engine.get_layout(array)
        assert second == self.engine.get_layout(moved)
        assert_same_bits(values, self.assemble_array(array, shape, dtype))
        assert_same_bits(values, self.assemble_array(moved, shape, dtype))
        self._assert_each_device_has_its_shard(moved, second, values)

    def test_relayout_moves_between_meshes(self):
        """A relayout between meshes with different shapes and devices keeps all bits."""
        values = generate_values((8, 16), "float32", seed=3)
        layouts = [
            Layout(["x", "y"], self.make_mesh("x=2,y=4")),
            Layout([None, "a"], self.make_mesh("a=4", first=0)),
            Layout(["b", "a"], self.make_mesh("a=2,b=2", first=2)),
        ]
        over_two = Layout([("b", "a"), None], self.make_mesh("a=2,b=2", first=2))
        layouts += [over_two] * self.supports_specs(over_two.sharding_specs)
        for before, after in itertools.product(layouts, layouts):
            moved = self.engine.relayout(self.engine.relayout(values, before), after)

            assert after == self.engine.get_layout(moved)
            self._assert_each_device_has_its_shard(moved, after, values)

    @draw_half_as_many_examples
    @given(data=st.data())
    def test_a_mover_keeps_every_bit(self, data: st.DataObject):
        """`make_array_mover` copies an array to the layout of another, keeps all bits, and changes neither array."""
        if self.engine.make_array_mover is None:
            return
        _, (first, second), shape, dtype = data.draw(self._make_case_strategy(num_layouts=2))
        values, zeros = generate_values(shape, dtype, seed=5), np.zeros(shape, np.dtype(dtype))
        array, like = self.engine.relayout(values, first), self.engine.relayout(zeros, second)
        (moved,) = self.engine.make_array_mover([ArrayMove((0,))], [array], [like])([array])

        assert second == self.engine.get_layout(moved)
        self._assert_each_device_has_its_shard(moved, second, values)
        assert_same_bits(values, self.assemble_array(array, shape, dtype))
        assert_same_bits(zeros, self.assemble_array(like, shape, dtype))

    def test_a_mover_moves_between_meshes(self):
        """`make_array_mover` keeps all bits between meshes with different shapes and devices."""
        if self.engine.make_array_mover is None:
            return
        values = generate_values((8, 16), "float32", seed=6)
        layouts = [
            Layout(["x", "y"], self.make_mesh("x=2,y=4")),
            Layout([None, "a"], self.make_mesh("a=4", first=0)),
            Layout(["b", "a"], self.make_mesh("a=2,b=2", first=2)),
        ]
        for before, after in itertools.product(layouts, layouts):
            array, like = (
                self.engine.relayout(values, before),
                self.engine.relayout(np.zeros_like(values), after),
            )
            (moved,) = self.engine.make_array_mover([ArrayMove((0,))], [array], [like])([array])

            assert after == self.engine.get_layout(moved)
            self._assert_each_device_has_its_shard(moved, after, values)

    def test_reordered_devices_have_their_shards_or_are_refused(self):
        """On a mesh with devices in an unusual order, each device has its shard, or the engine refuses the mesh."""
        mesh = self.make_mesh("x=2,y=4", first=0)
        names = mesh.devices or ()
        mesh = mesh.with_devices([names[i] for i in (3, 1, 0, 2, 7, 6, 4, 5) if i < len(names)])
        layout = Layout(["y", "x"], mesh)
        values = generate_values((8, 16), "float32", seed=4)
        if self.holds_any_device_order or mesh.size == 1:  # each engine accepts the only order of one device
            array = self.engine.relayout(values, layout)

            assert layout == self.engine.get_layout(array)
            self._assert_each_device_has_its_shard(array, layout, values)
        else:
            with pytest.raises(EngineError, match="order"):
                self.engine.relayout(values, layout)

    def test_a_layout_that_does_not_fit_is_refused(self):
        """A relayout refuses uneven shards and a layout of a wrong rank."""
        mesh = self.make_mesh("x=2,y=4")
        if mesh.size > 1:  # on one device, shards cannot be uneven
            with pytest.raises(LayoutError, match="6 is not a multiple of 4"):
                self.engine.relayout(np.zeros((4, 6), np.float32), Layout(["x", "y"], mesh))
        with pytest.raises(LayoutError, match="rank"):
            self.engine.relayout(np.zeros(4, np.float32), Layout(["x", "y"], mesh))

    def test_an_array_owns_its_values(self):
        """An array keeps its values when its numpy source changes."""
        layout = Layout.replicated(self.make_mesh("x=2"), 1)
        assignment = make_assignment((64,), "float32", layout)
        source = np.zeros(64, np.float32)
        arrays = [
            self.engine.relayout(source, layout),
            self.engine.create_from_shards(assignment, lambda index: source[index]),
            self.engine.create_initial_values(
                {"w": assignment}, {"w": Initializer(global_value=lambda: source)}
            )["w"],
        ]
        source[:] = 1
        for array in arrays:
            assert_same_bits(np.zeros(64, np.float32), self.assemble_array(array, (64,), "float32"))

    @draw_half_as_many_examples
    @given(data=st.data())
    def test_shards_round_trip(self, data: st.DataObject):
        """`create_from_shards` and `iterate_shards` keep all bits, and read each shard once."""
        _, (layout,), shape, dtype = data.draw(self._make_case_strategy(num_layouts=1))
        values = generate_values(shape, dtype, seed=5)
        read_indices: list[Index] = []

        def read_block(index: Index) -> NumpyArray:
            read_indices.append(index)
            return values[index]

        assignment = make_assignment(shape, dtype, layout)
        array = self.engine.create_from_shards(assignment, read_block, copy=data.draw(st.booleans()))
        shards = self.gather_shards(self.engine.iterate_shards(array, copy=data.draw(st.booleans())))

        assert layout == self.engine.get_layout(array)
        assert_same_bits(values, assemble_blocks(shards, shape, values.dtype))
        self._assert_each_device_has_its_shard(array, layout, values)
        assert len(read_indices) == len(set(map(get_starts_and_stops, read_indices)))
        for index in [*read_indices, *(index for index, _ in shards)]:
            assert layout.shard_shape(shape) == compute_block_shape(index)
        if math.prod(shape):
            assert layout.num_distinct_shards == len(shards)

    def test_writes_to_writable_memory_change_the_array(self):
        """Values written to `get_writable_memory` are in the array. The memory contains all shards or none."""
        values = generate_values((4, 8), "float32", seed=7)
        layout = Layout(["x", "y"], self.make_mesh("x=2,y=4"))
        arrays = [
            self.make_array(values),
            self.engine.create_from_shards(
                make_assignment((4, 8), "float32", layout), lambda index: values[index]
            ),
        ]
        for array in arrays:
            for index, memory in (shards := self.engine.get_writable_memory(array)):
                assert_same_bits(values[index], memory)
                memory += 1
            assert len(shards) in (0, len(list(self.engine.iterate_shards(array))))
            assert_same_bits(values + 1 if shards else values, self.engine.to_numpy(array))

    def test_an_array_without_layout_is_one_shard(self):
        """An array without a layout is one shard with all values."""
        values = generate_values((3, 5), "float32", seed=6)
        ((index, shard),) = self.engine.iterate_shards(self.make_array(values))

        assert make_full_index((3, 5)) == index
        assert_same_bits(values, shard)

    def test_a_shard_of_a_wrong_shape_or_type_is_refused(self):
        """The error for a shard of a wrong shape or element type contains the variable's path."""
        assignment = make_assignment((8,), "float32", Layout(["x"], self.make_mesh("x=2")), "block.w")
        shape = assignment.layout.shard_shape((8,))
        for wrong in (np.zeros(3, np.float32), np.zeros(shape, np.int8)):
            with pytest.raises(EngineError, match=r"block\.w"):
                self.engine.create_from_shards(assignment, lambda _: wrong)  # noqa: B023
