"""The laws of every adapter, as tests: inherit them to test yours.

    class TestMyAdapter(ScopeContract):  # or AdapterContract, if the library has no `with layout_map.scope():`
        library = "mine"

        def models(self): return {"mlp": make_mlp, ...}
        def rules(self, name): return {r".*\\.kernel": (None, "model"), ...}
        ...

The laws use `scope`, `build`, `plan`, `apply`, the adapter protocol, numpy, and pytest, and no model library. They
need 8 devices.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

import layoutmap as lm
from layoutmap.adapters import Capable, get_adapter
from layoutmap.adapters.protocol import CheckpointAdapter, InspectionAdapter, ModelAdapter, TrainingAdapter
from layoutmap.engines import get_engine
from layoutmap.testing.old_names import OldMethodNames

__all__ = ["AdapterContract", "ScopeContract"]


class AdapterContract(OldMethodNames):
    """The laws of adapters, as tests. Inherit them, and define the methods that raise `NotImplementedError`.

    Attributes:
        library: The model library's name.
        meshes: The meshes to try, with 8 devices each. All have a dim `model`. Rules skip dims that a mesh lacks.
    """

    library: ClassVar[str]
    meshes: ClassVar[Sequence[str]] = (
        "model=8",
        "batch=2,model=4",
        "batch=4,model=2",
        "batch=2,model=2,more=2",
        "batch=1,model=8",
    )
    old_names: ClassVar[Mapping[str, str]] = {
        "array_of": "get_array",
        "hooked": "snapshot_hooks",
        "one_model": "get_first_model",
        "layout_map": "make_layout_map",
        "plain": "read_unsharded",
        "made": "make_unsharded",
        "built": "build_sharded",
        "values": "read_values",
        "needed": "require",
    }

    # -- methods that a subclass defines

    def models(self) -> Mapping[str, Callable[[], Any]]:
        """Return a dict from the name of each small model to test to the function that creates it."""
        raise NotImplementedError

    def rules(self, name: str) -> Mapping[str, tuple[str | None, ...]]:
        """Return a dict from patterns to specs of a model. The size of each sharded axis must be a multiple of 8."""
        raise NotImplementedError

    def batch(self, name: str) -> tuple[Any, Any]:
        """Return inputs and targets for a training step of a model."""
        raise NotImplementedError

    def get_array(self, variable: Any) -> Any:
        """Return the framework's array that stores the values of a variable."""
        raise NotImplementedError

    def num_arrays(self) -> int:
        """Return how many arrays of the framework exist in this process."""
        raise NotImplementedError

    # -- helpers of the laws

    @property
    def adapter(self) -> ModelAdapter:
        """The adapter under test."""
        return get_adapter(self.library)

    def get_first_model(self) -> tuple[str, Callable[[], Any]]:
        """Return the first model's name and the function that creates it, for laws that need only one model."""
        return next(iter(self.models().items()))

    def make_layout_map(self, name: str, mesh: str = "batch=2,model=4") -> lm.LayoutMap:
        """Return a layout map with the rules of a model. Dims that the mesh lacks are left out of the rules."""
        on = lm.create_mesh(mesh)
        rules = {
            p: tuple(s if s in on.dim_names else None for s in specs) for p, specs in self.rules(name).items()
        }
        return lm.LayoutMap(on, rules)

    def make_unsharded(self, name: str) -> Any:
        """Return an unsharded model with all variables that training creates."""
        self.adapter.set_seed(7)
        model = self.models()[name]()
        self.adapter.create_lazy_variables(model, self.batch(name))
        return model

    def read_unsharded(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """Return a dict from path to value of the variables of a new unsharded model."""
        return self.read_values(self.make_unsharded(name))

    def build_sharded(self, name: str, mesh: str = "batch=2,model=4") -> Any:
        """Return a new model that is sharded over a mesh, with the same random seed as the unsharded model."""
        self.adapter.set_seed(7)
        return self.make_layout_map(name, mesh).build(self.models()[name], library=self.library)

    def read_values(self, model: Any) -> dict[str, npt.NDArray[Any]]:
        """Return a dict from path to value of a model's variables."""
        return {path: self.adapter.read(v) for path, v in self.adapter.variables(model).items()}

    def require(self, capability: type[Capable]) -> Capable:
        """Return the adapter if it implements the protocol `capability`. Otherwise, skip the test."""
        if not isinstance(self.adapter, capability):
            pytest.skip(f"the adapter of {self.library} does not implement {capability.__name__}")
        return self.adapter

    def assert_shard_shape(self, path: str, variable: Any) -> None:
        """Assert that all shards of a variable have the shape that its layout gives."""
        array = self.get_array(variable)
        shards = get_engine(self.adapter.engine_name).iterate_shards(array)
        shapes = {tuple(part.stop - part.start for part in index) for index, _ in shards}
        assert {variable.layout.shard_shape(array.shape)} == shapes, path

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize laws over models and meshes."""
        for argument, values in (("mesh", self.meshes), ("name", self.models())):
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, list(values))

    # -- the laws

    def test_values_do_not_depend_on_the_mesh(self, name: str, mesh: str):
        """For one seed, initial values on every mesh equal those of the unsharded model bit for bit."""
        expected = self.read_unsharded(name)
        actual = self.read_values(self.build_sharded(name, mesh))

        assert list(expected) == list(actual)
        for path, value in expected.items():
            assert value.dtype == actual[path].dtype, path
            assert np.array_equal(value, actual[path]), path

    def test_each_variable_lies_in_the_layout_of_its_rule(self, name: str, mesh: str):
        """An array has the layout of the rule that matches its path, and each device stores only its shard."""
        layout_map = self.make_layout_map(name, mesh)
        model = self.build_sharded(name, mesh)
        for path, variable in self.adapter.variables(model).items():
            rank = len(self.get_array(variable).shape)
            expected = layout_map[path] or lm.Layout.replicated(lm.create_mesh(mesh), rank)

            if not path.startswith("optimizer."):
                assert expected == variable.layout, path
            self.assert_shard_shape(path, variable)

    def test_a_plan_does_not_change_later_builds(self):
        """A plan does not change the values of a model that is built later."""
        name, make_model = self.get_first_model()
        expected = self.read_unsharded(name)
        self.adapter.set_seed(7)
        lm.plan(make_model, self.make_layout_map(name), library=self.library)
        model = make_model()
        self.adapter.create_lazy_variables(model, self.batch(name))

        actual = self.read_values(model)
        assert all(np.array_equal(a, b) for a, b in zip(expected.values(), actual.values(), strict=True))

    def test_paths_are_stable(self):
        """A model has the same paths when a process builds it again, after other models, and sharded."""
        first = {name: list(self.adapter.variables(self.make_unsharded(name))) for name in self.models()}
        for name in (*self.models(), self.get_first_model()[0]):
            assert first[name] == list(self.adapter.variables(self.build_sharded(name)))

    def test_apply_keeps_the_values_of_an_existing_model(self, name: str):
        """`apply` keeps every value and gives every variable its layout."""
        model = self.make_unsharded(name)
        expected = self.read_values(model)
        layout_map = self.make_layout_map(name)
        layout_map.apply(model)

        for path, variable in self.adapter.variables(model).items():
            assert np.array_equal(expected[path], self.adapter.read(variable)), (name, path)
            if layout_map[path] is not None:
                assert layout_map[path] == variable.layout

    def test_an_existing_model_is_refused(self):
        """`plan`, `build`, and `check_parity` refuse an existing model, name `apply`, and change nothing."""
        name, make_model = self.get_first_model()
        training = self.require(TrainingAdapter)
        self.adapter.set_seed(7)
        model, layout_map = make_model(), self.make_layout_map(name)
        expected = self.read_values(model)
        raises_scope_error = pytest.raises(
            lm.ScopeError, match=r"(?s)returned an existing model.*fix .*layout_map\.apply\(model\)"
        )
        with raises_scope_error:
            lm.plan(lambda: model, layout_map, library=self.library)
        with raises_scope_error:
            layout_map.build(lambda: model, library=self.library)
        with raises_scope_error:
            lm.check_parity(lambda: model, layout_map, self.batch(name), library=self.library)

        actual = self.read_values(model)
        assert list(expected) == list(actual)
        assert all(np.array_equal(a, b) for a, b in zip(expected.values(), actual.values(), strict=True))
        training.create_lazy_variables(model, self.batch(name))
        assert np.isfinite([*training.train_step(model, self.batch(name)).values()]).all()

    def test_training_matches_the_unsharded_model(self, name: str):
        """Forward pass, gradients, and optimizer steps agree with the unsharded model."""
        self.require(TrainingAdapter)
        make_model = self.models()[name]
        report = lm.check_parity(
            make_model,
            self.make_layout_map(name),
            self.batch(name),
            steps=2,
            batch_dim="batch",
            library=self.library,
        )

        assert report.agrees
        assert 0.0 == report.worst("weights")

    def test_a_checkpoint_is_loaded_on_any_mesh(self, tmp_path: Path):
        """A checkpoint of one mesh loads bit for bit on another mesh and into an unsharded model."""
        self.require(CheckpointAdapter)
        name, make_model = self.get_first_model()
        model = self.build_sharded(name)
        self.adapter.create_lazy_variables(model, self.batch(name))
        for path, value in self.read_values(model).items():
            if value.dtype.kind == "f":  # no initializer returns `value + 1`, so only a load can restore it
                self.adapter.write(self.adapter.variables(model)[path], value + 1)
        lm.save(model, tmp_path)
        saved = lm.describe(tmp_path)  # compare only saved variables, because some are not saved
        expected = {path: value for path, value in self.read_values(model).items() if path in saved}
        other = self.make_layout_map(name, "batch=4,model=2")
        loaded = lm.load(make_model, tmp_path, layout_map=other, library=self.library)

        assert expected
        for path, variable in self.adapter.variables(loaded).items():
            if path in expected:
                assert np.array_equal(expected[path], self.adapter.read(variable)), path
            if other[path] is not None:
                assert other[path] == variable.layout
        unsharded = self.read_values(lm.load(self.make_unsharded(name), tmp_path))
        assert list(self.read_values(loaded)) == list(unsharded)
        assert all(np.array_equal(expected[p], value) for p, value in unsharded.items() if p in expected)

    def test_all_problems_are_raised_before_anything_is_created(self, name: str):
        """A rule that does not fit raises one error with all its variables, before any value is created."""
        make_model = self.models()[name]
        mesh = lm.create_mesh("batch=2,model=4")
        layout_map = lm.LayoutMap(mesh, {".*": ("model", None, None, None, None, None)})
        planned = lm.plan(make_model, layout_map, library=self.library)
        with pytest.raises(lm.PlanError) as caught:
            layout_map.build(make_model, library=self.library)

        matched = {a.variable.path for a in planned.assignments if a.match is not None}
        assert matched == {problem.subject for problem in caught.value.problems}

    def test_a_plan_creates_no_array(self, name: str):
        """A plan allocates no memory."""
        make_model = self.models()[name]
        layout_map = self.make_layout_map(name)
        gc.collect()
        before = self.num_arrays()
        lm.plan(make_model, layout_map, library=self.library)
        gc.collect()

        assert before == self.num_arrays(), name

    def test_written_values_are_read_back(self, name: str):
        """A value that is written to a variable is read back bit for bit, and the variable keeps its layout."""
        variables = self.adapter.variables(self.build_sharded(name))
        for number, (path, variable) in enumerate(variables.items()):
            value = self.adapter.read(variable)
            new = (np.arange(value.size) + number).reshape(value.shape).astype(value.dtype)
            self.adapter.write(variable, new)

            assert np.array_equal(new, self.adapter.read(variable)), (name, path)
            self.assert_shard_shape(path, variable)

    def test_reading_a_planned_model_raises(self):
        """Reading a model that was only planned raises an error with the variable's path."""
        name, make_model = self.get_first_model()
        created: list[Any] = []

        def create_and_keep_model() -> Any:
            created.append(make_model())
            return created[0]

        lm.plan(create_and_keep_model, self.make_layout_map(name), library=self.library)
        path, variable = next(iter(self.adapter.variables(created[0]).items()))
        with pytest.raises(lm.PlanError, match="has no values") as caught:
            self.adapter.read(variable)

        assert caught.value.what.startswith(path)

    def test_the_build_follows_the_plan(self, name: str):
        """A plan assigns the layouts that the build assigns."""
        make_model = self.models()[name]
        planned = lm.plan(make_model, self.make_layout_map(name), library=self.library)
        layouts = {path: v.layout for path, v in self.adapter.variables(self.build_sharded(name)).items()}

        expected = {a.variable.path: a.layout for a in planned.assignments if a.variable.path in layouts}
        assert layouts == expected
        assert len(expected) > 1

    def test_an_inspected_model_has_the_plan_of_its_build(self):
        """`inspect` returns the assignments of the plan. An unsharded model has the same variables and no scope."""
        inspecting = self.require(InspectionAdapter)
        name, _ = self.get_first_model()
        sharded, unsharded = self.build_sharded(name), self.make_unsharded(name)
        plan = lm.plan(self.models()[name], self.make_layout_map(name), library=self.library)
        planned = {a.variable.path: a for a in plan.assignments}
        inspected = {a.variable.path: a for a in lm.inspect(sharded).assignments}

        assert planned == {path: a for path, a in inspected.items() if path in planned}
        assert planned.keys() <= {stored.variable.path for stored in inspecting.describe_variables(unsharded)}
        assert inspecting.find_scope_context(sharded) is not None
        assert inspecting.find_scope_context(unsharded) is None


class ScopeContract(AdapterContract):
    """The laws of adapters that support `with layout_map.scope():`, as tests."""

    def snapshot_hooks(self) -> Mapping[str, Any]:
        """Return the current value of each attribute of the library that a scope replaces."""
        raise NotImplementedError

    def test_the_library_is_unchanged_after_a_scope(self):
        """The model library is unchanged after a scope, an exception in a scope, and nested scopes."""
        name, make_model = self.get_first_model()
        before = self.snapshot_hooks()
        with (
            self.make_layout_map(name).scope(library=self.library),
            self.make_layout_map(name).scope(library=self.library),
        ):
            assert before != self.snapshot_hooks()
            make_model()

        assert before == self.snapshot_hooks()
        with pytest.raises(ZeroDivisionError):
            self._build_model_and_raise(name, make_model)

        assert before == self.snapshot_hooks()

    def _build_model_and_raise(self, name: str, make_model: Callable[[], Any]) -> None:
        with self.make_layout_map(name).scope(library=self.library):
            make_model()
            raise ZeroDivisionError

    def test_a_scope_does_not_affect_other_threads(self):
        """During a scope, a model that another thread builds is unsharded."""
        name, make_model = self.get_first_model()
        models: list[Any] = []
        with self.make_layout_map(name).scope(library=self.library):
            thread = threading.Thread(target=lambda: models.append(make_model()))
            thread.start()
            thread.join()

        assert not any(hasattr(v, "layout") for v in self.adapter.variables(models[0]).values())

    def test_the_inner_of_two_scopes_gives_the_layouts(self):
        """A model in two scopes has the layouts of the inner scope."""
        name, make_model = self.get_first_model()
        outer = lm.LayoutMap(lm.create_mesh("batch=2,model=4"))
        with (
            outer.scope(library=self.library) as empty,
            self.make_layout_map(name).scope(library=self.library) as full,
        ):
            _model = make_model()

        assert 0 == len(empty.plan)
        assert len(full.plan) > 0

    def test_an_exception_leaves_no_array(self):
        """After an exception in a scope, no array is left."""
        name, make_model = self.get_first_model()
        gc.collect()
        before = self.num_arrays()
        with contextlib.suppress(ZeroDivisionError), self.make_layout_map(name).scope(library=self.library):
            make_model()
            raise ZeroDivisionError
        gc.collect()

        assert before == self.num_arrays()

    def test_threads_have_scopes_of_their_own(self):
        """Two threads with two layout maps build models with their own layouts at the same time."""
        name, make_model = self.get_first_model()
        maps = {mesh: self.make_layout_map(name, mesh) for mesh in self.meshes[:2]}
        models: dict[str, Any] = {}
        barrier = threading.Barrier(len(maps))

        def build_model_in_scope(mesh: str) -> None:
            with maps[mesh].scope(library=self.library):
                barrier.wait(60)
                model = make_model()
                barrier.wait(60)
            models[mesh] = model

        threads = [threading.Thread(target=build_model_in_scope, args=(mesh,)) for mesh in maps]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert set(maps) == set(models)
        for mesh, model in models.items():
            assert {maps[mesh].mesh} == {v.layout.mesh for v in self.adapter.variables(model).values()}
