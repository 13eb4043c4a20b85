"""Laws about calls, variables, conversion to numpy, and computation on a mesh."""

from __future__ import annotations

import contextlib
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from layoutmap.core.errors import EngineError, LayoutError
from layoutmap.core.layout import Layout
from layoutmap.testing.engine.cases import (
    EngineCases,
    assert_same_bits,
    draw_half_as_many_examples,
    generate_values,
    list_matrix_specs,
)


class ComputingLaws(EngineCases):
    """Laws about calls, variables, conversion to numpy, and computation on a mesh."""

    def test_call_with_layout_returns_the_values_in_the_layout(self):
        """`call_with_layout` returns the function's result in the layout, on every mesh."""
        values = generate_values((16, 8), "uint32", seed=12)
        array = self.make_array(values)
        for mesh in self._list_meshes():
            for specs in filter(self.supports_specs, list_matrix_specs(mesh)):
                layout = Layout(specs, mesh)
                result = self.engine.call_with_layout(
                    lambda a, times: a * times, layout, [array], {"times": 3}
                )

                assert layout == self.engine.get_layout(result)
                self._assert_each_device_has_its_shard(result, layout, values * np.uint32(3))

    def test_call_with_layout_refuses_a_result_that_does_not_fit(self):
        """`call_with_layout` refuses a result of a wrong rank, a result with uneven shards, and several results."""
        layout = Layout(["x"], self.make_mesh("x=2"))
        # On one device, shards cannot be uneven, so only a wrong rank can be tested.
        shapes: list[tuple[int, ...]] = [(2, 2), *[(3,)] * (layout.mesh.size > 1)]
        for shape in shapes:
            array = self.make_array(np.zeros(shape, np.float32))
            with pytest.raises(LayoutError):
                self.engine.call_with_layout(lambda a: a, layout, [array], {})
        array = self.make_array(np.zeros(2, np.float32))
        with pytest.raises(EngineError, match="2 arrays"):
            self.engine.call_with_layout(lambda a: (a, a), layout, [array], {})

    def test_a_variable_keeps_layout_and_values(self):
        """A variable has the layout and the values of its array."""
        values = generate_values((16, 8), "float32", seed=13)
        for mesh in self._list_meshes():
            for specs in filter(self.supports_specs, list_matrix_specs(mesh)):
                array = self.engine.relayout(values, Layout(specs, mesh))
                variable = self.engine.make_variable(array, name="w", trainable=False)

                assert Layout(specs, mesh) == self.engine.get_layout(variable)
                assert_same_bits(values, self.assemble_array(variable, values.shape, "float32"))

    @draw_half_as_many_examples
    @given(data=st.data())
    def test_to_numpy_returns_all_values(self, data: st.DataObject):
        """`to_numpy` returns all values of an array, with or without a layout."""
        _, (layout,), shape, dtype = data.draw(self._make_case_strategy(num_layouts=1))
        values = generate_values(shape, dtype, seed=14)

        assert_same_bits(values, self.engine.to_numpy(self.make_array(values)))
        assert_same_bits(values, self.engine.to_numpy(self.engine.relayout(values, layout)))

    def test_gather_from_one_process_returns_its_values(self):
        """In one process, `gather_from_processes` returns the values of this process as one row."""
        for dtype in ("uint8", "float64"):
            values = generate_values((3, 2), dtype, seed=0)

            assert_same_bits(values[None], self.engine.gather_from_processes(values, self._list_meshes()[0]))

    def test_arrays_computed_in_run_on_are_replicated(self):
        """Arrays that are computed inside `run_on` are replicated on the mesh. An exception also ends `run_on`."""
        values = np.arange(8, dtype=np.int32).reshape(4, 2)
        # Engines reuse the first of two equal meshes, which may have no devices, so use dims that no other law uses.
        for mesh in (self.make_mesh("p=2,q=4"), self.make_mesh("r=4", first=2)):
            result: Any = None
            with contextlib.suppress(ZeroDivisionError), self.engine.run_on(mesh):
                array = self.make_array(values)
                result = array + array
                raise ZeroDivisionError

            assert Layout.replicated(mesh, 2) == self.engine.get_layout(result)
            self._assert_each_device_has_its_shard(result, Layout.replicated(mesh, 2), values + values)
            array = self.make_array(values)
            assert self.engine.get_layout(array + array) is None

    def test_an_unknown_random_mode_is_refused(self):
        """`run_on` refuses an unknown mode of random numbers, and lists the known modes."""
        with (
            pytest.raises(EngineError, match=r"modes +'exact'"),
            self.engine.run_on(self.make_mesh("x=2"), "fast"),
        ):
            pass

    @pytest.mark.parametrize("dtype", ["float64", "int64", "float32", "bool"])
    def test_canonicalize_values_predicts_the_element_type(self, dtype: str):
        """`canonicalize_values` returns values in the dtype that an array of them has, and is idempotent."""
        values = np.ones(4, dtype)
        canonical = self.engine.canonicalize_values(values)
        array = self.engine.relayout(values, Layout(["x"], self.make_mesh("x=2")))

        assert_same_bits(canonical, self.assemble_array(array, (4,), str(canonical.dtype)))
        assert_same_bits(canonical, self.engine.canonicalize_values(canonical))

    def test_arrays_of_texts_or_objects_are_refused(self):
        """The error for an array of texts or objects contains its element type."""
        for values in (np.array(["a", "b"]), np.array([None, None])):
            with pytest.raises(EngineError, match=str(values.dtype)):
                self.engine.canonicalize_values(values)
            with pytest.raises(EngineError, match=str(values.dtype)):
                self.engine.relayout(values, Layout(["x"], self.make_mesh("x=2")))
