"""Laws about initial values."""

from __future__ import annotations

import gc
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from layoutmap.core.errors import EngineError, LayoutError, MeshError
from layoutmap.core.initializers import Initializer
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.testing.engine.cases import (
    EngineCases,
    assert_same_bits,
    draw_half_as_many_examples,
    generate_values,
    list_matrix_specs,
    make_assignment,
    make_recording_initializer,
)


class CreationLaws(EngineCases):
    """Laws about initial values."""

    def test_created_values_do_not_depend_on_the_layout(self):
        """On every mesh and in every layout, a random initializer's values equal unsharded values bit for bit."""
        shape = (16, 8)
        for dtype in ("float32", "bfloat16"):
            initializer = self.make_random_initializer(shape, dtype, seed=7)
            expected = self._assemble_initial_values(initializer.global_value(), shape, dtype)
            for mesh in self._list_meshes() if dtype == "float32" else [self.make_mesh("x=2,y=4")]:
                layouts = [
                    Layout(specs, mesh) for specs in list_matrix_specs(mesh) if self.supports_specs(specs)
                ]
                assignments = {str(i): make_assignment(shape, dtype, each) for i, each in enumerate(layouts)}
                arrays = self.engine.create_initial_values(
                    assignments, dict.fromkeys(assignments, initializer)
                )
                for i, layout in enumerate(layouts):
                    actual = self.assemble_array(arrays[str(i)], shape, dtype)

                    assert layout == self.engine.get_layout(arrays[str(i)])
                    assert_same_bits(expected, actual)
                    self._assert_each_device_has_its_shard(arrays[str(i)], layout, expected)

    @draw_half_as_many_examples
    @given(data=st.data())
    def test_created_arrays_are_the_initial_values(self, data: st.DataObject):
        """A created array has its initializer's values, for any shape, element type, mesh, and layout."""
        _, (layout,), shape, dtype = data.draw(self._make_case_strategy(num_layouts=1))
        values = generate_values(shape, dtype, seed=8)
        arrays = self.engine.create_initial_values(
            {"w": make_assignment(shape, dtype, layout)}, {"w": Initializer(global_value=lambda: values)}
        )

        assert ["w"] == list(arrays)
        assert layout == self.engine.get_layout(arrays["w"])
        assert_same_bits(values, self.assemble_array(arrays["w"], shape, dtype))
        self._assert_each_device_has_its_shard(arrays["w"], layout, values)

    def test_check_dtype_agrees_with_create_initial_values(self):
        """`check_dtype` and `create_initial_values` accept the same element types, and raise equal errors."""
        layout = Layout(["x"], self.make_mesh("x=2"))
        for dtype in ("float32", "bfloat16", "int8", "uint64", "int64", "float64", "complex128", "no_type"):
            results: list[str] = []
            for check in (
                lambda: self.engine.check_dtype(dtype, "w"),  # noqa: B023
                lambda: self.engine.create_initial_values(
                    {"w": make_assignment((4,), dtype, layout, "w")},  # noqa: B023
                    {"w": Initializer(global_value=lambda: np.ones(4, dtype))},  # noqa: B023
                ),
            ):
                try:
                    check()
                    results.append("accepted")
                except EngineError as error:
                    results.append(str(error))

            assert results[0] == results[1]

    def test_equal_initializers_with_other_seeds_differ(self):
        """Initializers that differ only in their seed each create the values of their own seed."""
        layout = Layout(["x", None], self.make_mesh("x=2"))
        initializers = {
            str(seed): self.make_random_initializer((16, 8), "float32", seed) for seed in range(3)
        }
        assignments = {key: make_assignment((16, 8), "float32", layout) for key in initializers}
        arrays = self.engine.create_initial_values(assignments, initializers)
        for key, initializer in initializers.items():
            expected = self._assemble_initial_values(initializer.global_value(), (16, 8), "float32")

            assert_same_bits(expected, self.assemble_array(arrays[key], (16, 8), "float32"))

    def test_progress_is_called_after_each_variable(self):
        """The progress callback is called with the key of each variable in order, after the variable is created."""
        layout = Layout(["x"], self.make_mesh("x=2"))
        initializers = {key: self.make_random_initializer((4,), "float32", seed=9) for key in "cab"}
        called: list[str] = []
        arrays = self.engine.create_initial_values(
            {k: make_assignment((4,), "float32", layout) for k in initializers}, initializers, called.append
        )

        assert ["c", "a", "b"] == called == list(arrays)

    def test_nothing_is_initialized_if_a_layout_does_not_fit(self):
        """The error for one wrong layout contains the variable's path, and is raised before any initializer runs."""
        mesh = self.make_mesh("x=2")
        good = make_assignment((4,), "float32", Layout(["x"], mesh), "good")
        too_many = Mesh(None, {"x": 1 << 20})
        bad = {
            "uneven": (LayoutError, make_assignment((3,), "float32", Layout(["x"], mesh), "uneven")),
            "rank": (LayoutError, make_assignment((3, 2), "float32", Layout(["x"], mesh), "rank")),
            "devices": (
                MeshError,
                make_assignment((1 << 20,), "float32", Layout(["x"], too_many), "devices"),
            ),
            "missing": (EngineError, make_assignment((4,), "float32", Layout(["x"], mesh), "missing")),
            "nosuchtype": (EngineError, make_assignment((4,), "string", Layout(["x"], mesh), "nosuchtype")),
        }
        if mesh.size == 1:  # on one device, shards cannot be uneven, so this layout fits
            del bad["uneven"]
        for path, (kind, assignment) in bad.items():
            used: list[str] = []
            value = np.zeros(4, np.float32)
            initializers = {key: make_recording_initializer(value, used, key) for key in ("good", path)}
            if path == "missing":
                del initializers[path]
            with pytest.raises(kind, match=path):
                self.engine.create_initial_values({"good": good, path: assignment}, initializers)

            assert [] == used

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_no_array_stays_after_an_initializer_fails(self, error: type[BaseException]):
        """The error of an initializer is raised, and earlier arrays are freed."""
        layout = Layout(["x"], self.make_mesh("x=2"))
        assignments = {key: make_assignment((4,), "float32", layout) for key in "abc"}
        called: list[str] = []

        def raise_error() -> Any:
            raise error("broken initializer")

        initializers = {key: self.make_random_initializer((4,), "float32", seed=10) for key in "abc"}
        self.engine.create_initial_values(assignments, initializers)
        gc.collect()
        before = self.num_live_arrays()
        with pytest.raises(error, match="broken initializer"):
            self.engine.create_initial_values(
                assignments, {**initializers, "c": Initializer(global_value=raise_error)}, called.append
            )
        gc.collect()

        assert ["a", "b"] == called
        assert before == self.num_live_arrays()

    def test_an_initial_value_of_another_shape_or_type_is_refused(self):
        """The error for an initial value of a wrong shape or element type contains the variable's path."""
        layout = Layout(["x"], self.make_mesh("x=2"))
        assignments = {"w": make_assignment((4,), "float32", layout, "block.w")}
        for wrong in (np.zeros(8, np.float32), np.zeros((4, 1), np.float32), np.zeros(4, np.int8)):
            with pytest.raises(EngineError, match=r"block\.w"):
                self.engine.create_initial_values(assignments, {"w": Initializer(global_value=lambda: wrong)})  # noqa: B023
        for shape, dtype in (((8,), "float32"), ((4,), "bfloat16")):
            with pytest.raises(EngineError, match=r"block\.w"):
                self.engine.create_initial_values(
                    assignments, {"w": self.make_random_initializer(shape, dtype, seed=11)}
                )

    def test_creating_no_variables_returns_no_arrays(self):
        """Creating no variables returns no arrays."""
        assert {} == self.engine.create_initial_values({}, {})
