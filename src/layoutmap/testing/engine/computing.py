"""The laws of computing on every engine: calls, variables, values as numpy arrays, computing on a mesh."""

from __future__ import annotations

import contextlib
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from layoutmap.core.errors import EngineError, LayoutError
from layoutmap.core.layout import Layout
from layoutmap.testing.engine.cases import EngineCases, assert_same_bits, few, random_values, some_specs


class ComputingLaws(EngineCases):
    """Calls, variables, values as numpy arrays, computing on a mesh."""

    def test_a_call_returns_the_values_in_the_layout(self):
        """A function that is called with a layout returns its plain result in that layout, on every mesh."""
        values = random_values((16, 8), "uint32", seed=12)
        array = self.make_array(values)
        for mesh in self._all_meshes():
            for specs in filter(self.held, some_specs(mesh)):
                layout = Layout(specs, mesh)
                made = self.engine.call(lambda a, times: a * times, layout, [array], {"times": 3})

                assert layout == self.engine.layout_of(made)
                self._assert_each_device_has_its_shard(made, layout, values * np.uint32(3))

    def test_a_call_that_does_not_fit_is_refused(self):
        """A function whose result has another rank, does not divide, or is not one array is refused."""
        layout = Layout(["x"], self.mesh("x=2"))
        # Every axis divides by one.
        shapes: list[tuple[int, ...]] = [(2, 2), *[(3,)] * (layout.mesh.size > 1)]
        for shape in shapes:
            array = self.make_array(np.zeros(shape, np.float32))
            with pytest.raises(LayoutError):
                self.engine.call(lambda a: a, layout, [array], {})
        array = self.make_array(np.zeros(2, np.float32))
        with pytest.raises(EngineError, match="2 arrays"):
            self.engine.call(lambda a: (a, a), layout, [array], {})

    def test_a_variable_holds_the_array_in_its_layout(self):
        """What a variable holds an array in has the array's layout and values."""
        values = random_values((16, 8), "float32", seed=13)
        for mesh in self._all_meshes():
            for specs in filter(self.held, some_specs(mesh)):
                array = self.engine.relayout(values, Layout(specs, mesh))
                held = self.engine.variable(array, name="w", trainable=False)

                assert Layout(specs, mesh) == self.engine.layout_of(held)
                assert_same_bits(values, self.assembled(held, values.shape, "float32"))

    @few
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
        """What is computed while computing runs on a mesh is on it, replicated; an exception ends that."""
        values = np.arange(8, dtype=np.int32).reshape(4, 2)
        # Dims of no other law: an array is on the first of two equal meshes, one of which may name its devices.
        for mesh in (self.mesh("p=2,q=4"), self.mesh("r=4", first=2)):
            made: Any = None
            with contextlib.suppress(ZeroDivisionError), self.engine.run_on(mesh):
                array = self.make_array(values)
                made = array + array
                raise ZeroDivisionError

            assert Layout.replicated(mesh, 2) == self.engine.layout_of(made)
            self._assert_each_device_has_its_shard(made, Layout.replicated(mesh, 2), values + values)
            array = self.make_array(values)
            assert self.engine.layout_of(array + array) is None

    def test_a_way_to_draw_that_is_not_known_is_refused(self):
        """Computing on a mesh with another way to draw random numbers is refused, with the ways that there are."""
        with pytest.raises(EngineError, match=r"ways +'exact'"), self.engine.run_on(self.mesh("x=2"), "fast"):
            pass

    @pytest.mark.parametrize("dtype", ["float64", "int64", "float32", "bool"])
    def test_canonical_says_what_becomes_of_numpy_values(self, dtype: str):
        """An array made from numpy values has the element type of their canonical form, which is its own."""
        values = np.ones(4, dtype)
        held = self.engine.canonical(values)
        array = self.engine.relayout(values, Layout(["x"], self.mesh("x=2")))

        assert_same_bits(held, self.assembled(array, (4,), str(held.dtype)))
        assert_same_bits(held, self.engine.canonical(held))

    def test_what_is_no_number_is_refused(self):
        """Texts and objects are refused by their element type."""
        for values in (np.array(["a", "b"]), np.array([None, None])):
            with pytest.raises(EngineError, match=str(values.dtype)):
                self.engine.canonical(values)
            with pytest.raises(EngineError, match=str(values.dtype)):
                self.engine.relayout(values, Layout(["x"], self.mesh("x=2")))
