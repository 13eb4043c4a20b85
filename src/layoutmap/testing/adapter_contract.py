"""The laws of every adapter, as tests: inherit them to test yours.

    class TestMyAdapter(ScopeContract):  # or AdapterContract, if the library has no `with layout_map.scope():`
        library = "mine"

        def models(self): return {"mlp": make_mlp, ...}
        def rules(self, name): return {r".*\\.kernel": (None, "model"), ...}
        ...

The laws use `scope`, `build`, `plan`, `apply`, the adapter protocol, numpy and pytest, and no model library. They want
8 devices.
"""

# ruff: noqa: SIM300
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
from layoutmap.adapters.protocol import Building, Inspecting, Keeping, Training
from layoutmap.engines import get_engine

__all__ = ["AdapterContract", "ScopeContract"]


class AdapterContract:
    """The laws of adapters. Inherit it and say what is below.

    Attributes:
        library: The model library's name.
        meshes: The grids to try, 8 devices each; all have a dim `model`, and rules lose the dims that a grid has not.
    """

    library: ClassVar[str]
    meshes: ClassVar[Sequence[str]] = (
        "model=8",
        "batch=2,model=4",
        "batch=4,model=2",
        "batch=2,model=2,more=2",
        "batch=1,model=8",
    )

    # -- what a subclass says

    def models(self) -> Mapping[str, Callable[[], Any]]:
        """Functions that each make a small model, with its weights, by name."""
        raise NotImplementedError

    def rules(self, name: str) -> Mapping[str, tuple[str | None, ...]]:
        """Rules that fit a model on every mesh; sizes divide by 8."""
        raise NotImplementedError

    def batch(self, name: str) -> tuple[Any, Any]:
        """Inputs and targets for one training step of a model."""
        raise NotImplementedError

    def array_of(self, variable: Any) -> Any:
        """The engine's array in a variable."""
        raise NotImplementedError

    def num_arrays(self) -> int:
        """How many arrays of the engine are alive in this process."""
        raise NotImplementedError

    # -- words of the laws

    @property
    def adapter(self) -> Building:
        """The adapter under test."""
        return get_adapter(self.library)

    def one_model(self) -> tuple[str, Callable[[], Any]]:
        """The model of laws that are about one, and its name: the first."""
        return next(iter(self.models().items()))

    def layout_map(self, name: str, mesh: str = "batch=2,model=4") -> lm.LayoutMap:
        """The rules of a model on a mesh."""
        on = lm.create_mesh(mesh)
        rules = {
            p: tuple(s if s in on.dim_names else None for s in specs) for p, specs in self.rules(name).items()
        }
        return lm.LayoutMap(on, rules)

    def plain(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """The values of a model that is built plainly, by path."""
        return self.values(self.made(name))

    def made(self, name: str) -> Any:
        """A model that is built plainly, with all that training makes."""
        self.adapter.set_seed(7)
        model = self.models()[name]()
        self.adapter.complete(model, self.batch(name))
        return model

    def built(self, name: str, mesh: str = "batch=2,model=4") -> Any:
        """A model that is built in layouts, from the same seed."""
        self.adapter.set_seed(7)
        return self.layout_map(name, mesh).build(self.models()[name], library=self.library)

    def values(self, model: Any) -> dict[str, npt.NDArray[Any]]:
        """The values of a model's variables, by path."""
        return {path: self.adapter.read(v) for path, v in self.adapter.variables(model).items()}

    def needed(self, capability: type[Capable]) -> Capable:
        """The adapter as one that a law needs; a law of what it does not know does not apply to it."""
        if not isinstance(self.adapter, capability):
            pytest.skip(f"the adapter of {self.library} is no {capability.__name__} adapter")
        return self.adapter

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test of its own for each model, and for each mesh, that a law is about."""
        for argument, values in (("mesh", self.meshes), ("name", self.models())):
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, list(values))

    # -- the laws

    def test_values_do_not_depend_on_the_mesh(self, name: str, mesh: str):
        """Same seed, same first values, bit for bit, on every mesh: those of the plain model."""
        expected = self.plain(name)
        actual = self.values(self.built(name, mesh))

        assert list(expected) == list(actual)
        for path, value in expected.items():
            assert value.dtype == actual[path].dtype, path
            assert np.array_equal(value, actual[path]), path

    def test_each_variable_lies_in_the_layout_of_its_rule(self, name: str, mesh: str):
        """An array is in the layout of the rule that matches its path, and each device holds just its shard."""
        engine = get_engine(self.adapter.engine_name)
        layout_map = self.layout_map(name, mesh)
        model = self.built(name, mesh)
        for path, variable in self.adapter.variables(model).items():
            array = self.array_of(variable)
            expected = layout_map[path] or lm.Layout.replicated(lm.create_mesh(mesh), len(array.shape))

            if not path.startswith("optimizer."):
                assert expected == variable.layout, path
            shard = variable.layout.shard_shape(array.shape)
            held = {tuple(part.stop - part.start for part in index) for index, _ in engine.to_shards(array)}
            assert {shard} == held, path

    def test_a_plan_changes_no_number(self):
        """A model that is built after it was planned has the values of one that was not planned."""
        name, make_model = self.one_model()
        expected = self.plain(name)
        self.adapter.set_seed(7)
        lm.plan(make_model, self.layout_map(name), library=self.library)
        model = make_model()
        self.adapter.complete(model, self.batch(name))

        actual = self.values(model)
        assert all(np.array_equal(a, b) for a, b in zip(expected.values(), actual.values(), strict=True))

    def test_paths_are_stable(self):
        """Building a model again in one process, after other models and in layouts, gives the same paths."""
        first = {name: list(self.adapter.variables(self.made(name))) for name in self.models()}
        for name in (*self.models(), self.one_model()[0]):
            assert first[name] == list(self.adapter.variables(self.built(name)))

    def test_an_existing_model_is_laid_out(self, name: str):
        """`apply` keeps every value and gives every variable its layout."""
        model = self.made(name)
        expected = self.values(model)
        layout_map = self.layout_map(name)
        layout_map.apply(model)

        for path, variable in self.adapter.variables(model).items():
            assert np.array_equal(expected[path], self.adapter.read(variable)), (name, path)
            if layout_map[path] is not None:
                assert layout_map[path] == variable.layout

    def test_a_model_that_existed_is_refused(self):
        """`plan`, `build` and `check_parity` refuse a model that existed before, name `apply`, and change nothing."""
        name, make_model = self.one_model()
        trained = self.needed(Training)
        self.adapter.set_seed(7)
        model, layout_map = make_model(), self.layout_map(name)
        expected = self.values(model)
        refused = pytest.raises(lm.ScopeError, match=r"(?s)existed before.*fix .*layout_map\.apply\(model\)")
        with refused:
            lm.plan(lambda: model, layout_map, library=self.library)
        with refused:
            layout_map.build(lambda: model, library=self.library)
        with refused:
            lm.check_parity(lambda: model, layout_map, self.batch(name), library=self.library)

        actual = self.values(model)
        assert list(expected) == list(actual)
        assert all(np.array_equal(a, b) for a, b in zip(expected.values(), actual.values(), strict=True))
        trained.complete(model, self.batch(name))
        assert np.isfinite([*trained.train_step(model, self.batch(name)).values()]).all()

    def test_it_trains_like_one_device(self, name: str):
        """Forward pass, gradients and optimizer steps agree with the plain model."""
        self.needed(Training)
        make_model = self.models()[name]
        report = lm.check_parity(
            make_model,
            self.layout_map(name),
            self.batch(name),
            steps=2,
            batch_dim="batch",
            library=self.library,
        )

        assert report.agrees
        assert 0.0 == report.worst("weights")

    def test_a_checkpoint_is_loaded_on_any_mesh(self, tmp_path: Path):
        """What is saved on one mesh is loaded on another, and into a plain model, bit for bit; it is laid out anew."""
        self.needed(Keeping)
        name, make_model = self.one_model()
        model = self.built(name)
        self.adapter.complete(model, self.batch(name))
        for path, value in self.values(model).items():
            if value.dtype.kind == "f":  # other values than those of any initializer
                self.adapter.write(self.adapter.variables(model)[path], value + 1)
        lm.save(model, tmp_path)
        kept = lm.describe(tmp_path)  # all but what the library itself keeps out of files
        expected = {path: value for path, value in self.values(model).items() if path in kept}
        other = self.layout_map(name, "batch=4,model=2")
        loaded = lm.load(make_model, tmp_path, layout_map=other, library=self.library)

        assert expected
        for path, variable in self.adapter.variables(loaded).items():
            if path in expected:
                assert np.array_equal(expected[path], self.adapter.read(variable)), path
            if other[path] is not None:
                assert other[path] == variable.layout
        plain = self.values(lm.load(self.made(name), tmp_path))
        assert list(self.values(loaded)) == list(plain)
        assert all(np.array_equal(expected[path], value) for path, value in plain.items() if path in expected)

    def test_all_problems_are_told_and_nothing_is_made(self, name: str):
        """A rule that does not fit raises once with every variable concerned, before any value is made."""
        make_model = self.models()[name]
        mesh = lm.create_mesh("batch=2,model=4")
        layout_map = lm.LayoutMap(mesh, {".*": ("model", None, None, None, None, None)})
        planned = lm.plan(make_model, layout_map, library=self.library)
        with pytest.raises(lm.PlanError) as caught:
            layout_map.build(make_model, library=self.library)

        matched = {a.variable.path for a in planned.assignments if a.match is not None}
        assert matched == {problem.subject for problem in caught.value.problems}

    def test_a_plan_makes_no_array(self, name: str):
        """A dry run allocates nothing, on devices that need not exist."""
        make_model = self.models()[name]
        layout_map = self.layout_map(name)
        gc.collect()
        before = self.num_arrays()
        lm.plan(make_model, layout_map, library=self.library)
        gc.collect()

        assert before == self.num_arrays(), name

    def test_what_is_written_is_read(self, name: str):
        """A value that is written into a variable is read back bit for bit, and the variable keeps its layout."""
        engine = get_engine(self.adapter.engine_name)
        variables = self.adapter.variables(self.built(name))
        for number, (path, variable) in enumerate(variables.items()):
            value = self.adapter.read(variable)
            new = (np.arange(value.size) + number).reshape(value.shape).astype(value.dtype)
            self.adapter.write(variable, new)
            held = {
                tuple(part.stop - part.start for part in index)
                for index, _ in engine.to_shards(self.array_of(variable))
            }

            assert np.array_equal(new, self.adapter.read(variable)), (name, path)
            assert {variable.layout.shard_shape(self.array_of(variable).shape)} == held, (name, path)

    def test_a_plan_has_no_values(self):
        """A model that was only planned refuses to be read, by the variable's path."""
        name, make_model = self.one_model()
        kept: list[Any] = []

        def make_and_keep() -> Any:
            kept.append(make_model())
            return kept[0]

        lm.plan(make_and_keep, self.layout_map(name), library=self.library)
        path, variable = next(iter(self.adapter.variables(kept[0]).items()))
        with pytest.raises(lm.PlanError, match="only a plan, it has no values") as caught:
            self.adapter.read(variable)

        assert caught.value.what.startswith(path)

    def test_the_plan_is_what_is_done(self, name: str):
        """A dry run assigns what the real run then assigns."""
        make_model = self.models()[name]
        planned = lm.plan(make_model, self.layout_map(name), library=self.library)
        layouts = {path: v.layout for path, v in self.adapter.variables(self.built(name)).items()}

        expected = {a.variable.path: a.layout for a in planned.assignments if a.variable.path in layouts}
        assert layouts == expected
        assert len(expected) > 1

    def test_a_model_that_exists_has_the_plan_that_it_was_built_by(self):
        """Read off its arrays, with the rules of its scope; a plain model has the same variables, and no scope."""
        inspecting = self.needed(Inspecting)
        name, _ = self.one_model()
        built, plain = self.built(name), self.made(name)
        plan = lm.plan(self.models()[name], self.layout_map(name), library=self.library)
        planned = {a.variable.path: a for a in plan.assignments}
        found = {a.variable.path: a for a in lm.inspect(built).assignments}

        assert planned == {path: a for path, a in found.items() if path in planned}
        assert planned.keys() <= {each.variable.path for each in inspecting.described(plain)}
        assert inspecting.context_of(built) is not None
        assert inspecting.context_of(plain) is None


class ScopeContract(AdapterContract):
    """The laws of adapters whose library can defer what is made in a `with` block."""

    def hooked(self) -> Mapping[str, Any]:
        """Everything that a scope may replace in the library, as it is now."""
        raise NotImplementedError

    def test_nothing_stays_hooked(self):
        """The library is as before after a scope, after one left by an exception, and after nested ones."""
        name, make_model = self.one_model()
        before = self.hooked()
        with (
            self.layout_map(name).scope(library=self.library),
            self.layout_map(name).scope(library=self.library),
        ):
            assert before != self.hooked()
            make_model()

        assert before == self.hooked()
        with pytest.raises(ZeroDivisionError):
            self._build_and_fail(name, make_model)

        assert before == self.hooked()

    def _build_and_fail(self, name: str, make_model: Callable[[], Any]) -> None:
        with self.layout_map(name).scope(library=self.library):
            make_model()
            raise ZeroDivisionError

    def test_another_thread_is_left_alone(self):
        """While a scope is open here, a model that another thread builds is a plain one."""
        name, make_model = self.one_model()
        made: list[Any] = []
        with self.layout_map(name).scope(library=self.library):
            thread = threading.Thread(target=lambda: made.append(make_model()))
            thread.start()
            thread.join()

        assert not any(hasattr(v, "layout") for v in self.adapter.variables(made[0]).values())

    def test_the_inner_of_two_scopes_counts(self):
        """A model that is built in two scopes has the layouts of the inner one."""
        name, make_model = self.one_model()
        outer = lm.LayoutMap(lm.create_mesh("batch=2,model=4"))
        with (
            outer.scope(library=self.library) as empty,
            self.layout_map(name).scope(library=self.library) as full,
        ):
            _model = make_model()

        assert 0 == len(empty.plan)
        assert len(full.plan) > 0

    def test_an_exception_leaves_no_array(self):
        """A scope that is left by an exception makes nothing."""
        name, make_model = self.one_model()
        gc.collect()
        before = self.num_arrays()
        with contextlib.suppress(ZeroDivisionError), self.layout_map(name).scope(library=self.library):
            make_model()
            raise ZeroDivisionError
        gc.collect()

        assert before == self.num_arrays()

    def test_threads_have_scopes_of_their_own(self):
        """Two threads that build at once under two maps each get their own layouts."""
        name, make_model = self.one_model()
        maps = {mesh: self.layout_map(name, mesh) for mesh in self.meshes[:2]}
        made: dict[str, Any] = {}
        barrier = threading.Barrier(len(maps))

        def work(mesh: str) -> None:
            with maps[mesh].scope(library=self.library):
                barrier.wait(60)
                model = make_model()
                barrier.wait(60)
            made[mesh] = model

        threads = [threading.Thread(target=work, args=(mesh,)) for mesh in maps]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert set(maps) == set(made)
        for mesh, model in made.items():
            assert {maps[mesh].mesh} == {v.layout.mesh for v in self.adapter.variables(model).values()}
