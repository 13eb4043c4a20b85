"""The laws of an array's values on every engine: moved, written and read shard by shard."""

from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from layoutmap.core.blocks import Index, NumpyArray, assemble, block_shape, ends_of, full_index
from layoutmap.core.errors import EngineError, LayoutError
from layoutmap.core.initializers import Initializer
from layoutmap.core.layout import Layout
from layoutmap.testing.engine.cases import (
    EngineCases,
    all_specs,
    assert_same_bits,
    assignment_of,
    few,
    random_values,
)


class ShardLaws(EngineCases):
    """Relayouts and shards."""

    def test_every_relayout_is_exact(self):
        """From each layout to each other one, all bits stay and the layout is the one asked for."""
        mesh = self.mesh("x=2,y=4")
        values = random_values((8, 16), "float32", seed=1)
        layouts = [Layout(specs, mesh) for specs in all_specs(mesh, 2) if self.held(specs)]
        arrays = [self.engine.relayout(values, layout) for layout in layouts]
        for (before, array), after in itertools.product(zip(layouts, arrays, strict=True), layouts):
            moved = self.engine.relayout(array, after)

            assert after == self.engine.layout_of(moved), (before, after)
            assert_same_bits(values, self.assembled(moved, values.shape, "float32"))

    @few
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
        assert_same_bits(values, self.assembled(array, shape, dtype))
        assert_same_bits(values, self.assembled(moved, shape, dtype))
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
        assignment = assignment_of((64,), "float32", layout)
        source = np.zeros(64, np.float32)
        arrays = [
            self.engine.relayout(source, layout),
            self.engine.from_shards(assignment, lambda index: source[index]),
            self.engine.create({"w": assignment}, {"w": Initializer(global_value=lambda: source)})["w"],
        ]
        source[:] = 1
        for array in arrays:
            assert_same_bits(np.zeros(64, np.float32), self.assembled(array, (64,), "float32"))

    @few
    @given(data=st.data())
    def test_shards_round_trip(self, data: st.DataObject):
        """Shards written and read again are the same bits; each is read once, and indices have both ends."""
        _, (layout,), shape, dtype = data.draw(self._cases(num_layouts=1))
        values = random_values(shape, dtype, seed=5)
        asked: list[Index] = []

        def read(index: Index) -> NumpyArray:
            asked.append(index)
            return values[index]

        assignment = assignment_of(shape, dtype, layout)
        array = self.engine.from_shards(assignment, read, copy=data.draw(st.booleans()))
        shards = self.gathered(self.engine.to_shards(array, copy=data.draw(st.booleans())))

        assert layout == self.engine.layout_of(array)
        assert_same_bits(values, assemble(shards, shape, values.dtype))
        self._assert_each_device_has_its_shard(array, layout, values)
        assert len(asked) == len(set(map(ends_of, asked)))
        for index in [*asked, *(index for index, _ in shards)]:
            assert layout.shard_shape(shape) == block_shape(index)
        if math.prod(shape):
            assert layout.num_distinct_shards == len(shards)

    def test_what_is_written_to_the_memory_of_an_array_is_in_it(self):
        """Values written to the memory that an engine gives are in the array; it is the memory of all shards."""
        values = random_values((4, 8), "float32", seed=7)
        layout = Layout(["x", "y"], self.mesh("x=2,y=4"))
        arrays = [
            self.make_array(values),
            self.engine.from_shards(assignment_of((4, 8), "float32", layout), lambda index: values[index]),
        ]
        for array in arrays:
            for index, memory in (shards := self.engine.own_memory(array)):
                assert_same_bits(values[index], memory)
                memory += 1
            assert len(shards) in (0, len(list(self.engine.to_shards(array))))
            assert_same_bits(values + 1 if shards else values, self.engine.to_numpy(array))

    def test_a_plain_array_is_one_shard(self):
        """An array in no layout is one shard, which is all of it."""
        values = random_values((3, 5), "float32", seed=6)
        ((index, shard),) = self.engine.to_shards(self.make_array(values))

        assert full_index((3, 5)) == index
        assert_same_bits(values, shard)

    def test_a_shard_read_wrong_is_refused(self):
        """A reader that returns another shape or element type is refused by the variable's path."""
        assignment = assignment_of((8,), "float32", Layout(["x"], self.mesh("x=2")), "block.w")
        shape = assignment.layout.shard_shape((8,))
        for wrong in (np.zeros(3, np.float32), np.zeros(shape, np.int8)):
            with pytest.raises(EngineError, match=r"block\.w"):
                self.engine.from_shards(assignment, lambda _: wrong)  # noqa: B023
