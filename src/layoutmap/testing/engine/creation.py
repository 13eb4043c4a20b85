"""The laws of initial values on every engine."""

# ruff: noqa: SIM300
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
    assignment_of,
    few,
    random_values,
    recorded,
    some_specs,
)


class CreationLaws(EngineCases):
    """Initial values."""

    def test_created_values_do_not_depend_on_the_layout(self):
        """A random initializer has the same bits on every mesh and layout: those of the plain initializer."""
        shape = (16, 8)
        for dtype in ("float32", "bfloat16"):
            initializer = self.random_initializer(shape, dtype, seed=7)
            expected = self._plain(initializer.global_value(), shape, dtype)
            for mesh in self._all_meshes() if dtype == "float32" else [self.mesh("x=2,y=4")]:
                layouts = [Layout(specs, mesh) for specs in some_specs(mesh) if self.held(specs)]
                assignments = {str(i): assignment_of(shape, dtype, each) for i, each in enumerate(layouts)}
                arrays = self.engine.create(assignments, dict.fromkeys(assignments, initializer))
                for i, layout in enumerate(layouts):
                    actual = self.assembled(arrays[str(i)], shape, dtype)

                    assert layout == self.engine.layout_of(arrays[str(i)])
                    assert_same_bits(expected, actual)
                    self._assert_each_device_has_its_shard(arrays[str(i)], layout, expected)

    @few
    @given(data=st.data())
    def test_created_arrays_are_the_initial_values(self, data: st.DataObject):
        """An initializer of any shape and element type has its values, on any mesh and layout."""
        _, (layout,), shape, dtype = data.draw(self._cases(num_layouts=1))
        values = random_values(shape, dtype, seed=8)
        made = self.engine.create(
            {"w": assignment_of(shape, dtype, layout)}, {"w": Initializer(global_value=lambda: values)}
        )

        assert ["w"] == list(made)
        assert layout == self.engine.layout_of(made["w"])
        assert_same_bits(values, self.assembled(made["w"], shape, dtype))
        self._assert_each_device_has_its_shard(made["w"], layout, values)

    def test_an_element_type_is_asked_about_before_there_are_arrays(self):
        """What `check_dtype` says of an element type is what `create` does: refused with the path, or held as it is."""
        layout = Layout(["x"], self.mesh("x=2"))
        for dtype in ("float32", "bfloat16", "int8", "uint64", "int64", "float64", "complex128", "no_type"):
            told: list[str] = []
            for ask in (
                lambda: self.engine.check_dtype(dtype, "w"),  # noqa: B023
                lambda: self.engine.create(
                    {"w": assignment_of((4,), dtype, layout, "w")},  # noqa: B023
                    {"w": Initializer(global_value=lambda: np.ones(4, dtype))},  # noqa: B023
                ),
            ):
                try:
                    ask()
                    told.append("held")
                except EngineError as error:
                    told.append(str(error))

            assert told[0] == told[1]

    def test_equal_initializers_with_other_seeds_differ(self):
        """Variables of equal initializers, each with its seed, have each its own values."""
        layout = Layout(["x", None], self.mesh("x=2"))
        initializers = {str(seed): self.random_initializer((16, 8), "float32", seed) for seed in range(3)}
        assignments = {key: assignment_of((16, 8), "float32", layout) for key in initializers}
        made = self.engine.create(assignments, initializers)
        for key, initializer in initializers.items():
            expected = self._plain(initializer.global_value(), (16, 8), "float32")

            assert_same_bits(expected, self.assembled(made[key], (16, 8), "float32"))

    def test_progress_is_called(self):
        """Progress is called with each key, in order, once its variable is made."""
        layout = Layout(["x"], self.mesh("x=2"))
        initializers = {key: self.random_initializer((4,), "float32", seed=9) for key in "cab"}
        called: list[str] = []
        made = self.engine.create(
            {k: assignment_of((4,), "float32", layout) for k in initializers}, initializers, called.append
        )

        assert ["c", "a", "b"] == called == list(made)

    def test_nothing_is_initialized_if_a_layout_does_not_fit(self):
        """One layout that does not fit, of many, is refused by its variable's path before anything is initialized."""
        mesh = self.mesh("x=2")
        good = assignment_of((4,), "float32", Layout(["x"], mesh), "good")
        too_many = Mesh(None, {"x": 1 << 20})
        bad = {
            "uneven": (LayoutError, assignment_of((3,), "float32", Layout(["x"], mesh), "uneven")),
            "rank": (LayoutError, assignment_of((3, 2), "float32", Layout(["x"], mesh), "rank")),
            "devices": (MeshError, assignment_of((1 << 20,), "float32", Layout(["x"], too_many), "devices")),
            "missing": (EngineError, assignment_of((4,), "float32", Layout(["x"], mesh), "missing")),
            "nosuchtype": (EngineError, assignment_of((4,), "string", Layout(["x"], mesh), "nosuchtype")),
        }
        if mesh.size == 1:  # every axis divides by one
            del bad["uneven"]
        for path, (kind, assignment) in bad.items():
            used: list[str] = []
            initializers = {key: recorded(np.zeros(4, np.float32), used, key) for key in ("good", path)}
            if path == "missing":
                del initializers[path]
            with pytest.raises(kind, match=path):
                self.engine.create({"good": good, path: assignment}, initializers)

            assert [] == used

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_nothing_is_left_when_an_initializer_fails(self, error: type[BaseException]):
        """An initializer that fails half way is the error that is seen, and no array made before it stays."""
        layout = Layout(["x"], self.mesh("x=2"))
        assignments = {key: assignment_of((4,), "float32", layout) for key in "abc"}
        called: list[str] = []

        def fail() -> Any:
            raise error("broken initializer")

        initializers = {key: self.random_initializer((4,), "float32", seed=10) for key in "abc"}
        self.engine.create(assignments, initializers)
        gc.collect()
        before = self.num_live_arrays()
        with pytest.raises(error, match="broken initializer"):
            self.engine.create(
                assignments, {**initializers, "c": Initializer(global_value=fail)}, called.append
            )
        gc.collect()

        assert ["a", "b"] == called
        assert before == self.num_live_arrays()

    def test_an_initial_value_of_another_shape_or_type_is_refused(self):
        """An initializer that returns another shape or element type than its variable has is refused by the path."""
        layout = Layout(["x"], self.mesh("x=2"))
        assignments = {"w": assignment_of((4,), "float32", layout, "block.w")}
        for wrong in (np.zeros(8, np.float32), np.zeros((4, 1), np.float32), np.zeros(4, np.int8)):
            with pytest.raises(EngineError, match=r"block\.w"):
                self.engine.create(assignments, {"w": Initializer(global_value=lambda: wrong)})  # noqa: B023
        for shape, dtype in (((8,), "float32"), ((4,), "bfloat16")):
            with pytest.raises(EngineError, match=r"block\.w"):
                self.engine.create(assignments, {"w": self.random_initializer(shape, dtype, seed=11)})

    def test_nothing_asked_is_nothing_made(self):
        """Creating no variables returns no arrays."""
        assert {} == self.engine.create({}, {})
