"""The library of a model is found without a call that makes unsharded arrays, if the function names no other."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import jax
import keras
import pytest
from flax import nnx

import layoutmap as lm
from layoutmap.scope.owner import choose_library_to_import, find_libraries_named_in_code

PROCESSES = ("jax",)
RULES = {r"up\.kernel": (None, "model")}
SHAPE = (64, 4096)
MADE: list[int] = []


def count_arrays():
    """Return how many arrays have the shape of the weight."""
    gc.collect()
    return sum(array.shape == SHAPE for array in jax.live_arrays())


class Net(nnx.Module):
    """A module with a weight of a shape that no other array has."""

    def __init__(self, rngs: nnx.Rngs):
        before = count_arrays()
        self.up = nnx.Linear(*SHAPE, use_bias=False, rngs=rngs)
        # Arrays that are made at once exist now, unless the function is traced.
        MADE.append(count_arrays() - before)


def make_module():
    return Net(nnx.Rngs(0))


def make_tree():
    return {"up": {"kernel": jax.random.normal(jax.random.key(0), SHAPE)}}


def make_keras():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])


MAKERS = {
    "a function": make_module,
    "a lambda": lambda: Net(nnx.Rngs(0)),
    "a partial": functools.partial(lambda seed: Net(nnx.Rngs(seed)), 0),
    "a function that calls another": lambda: make_module(),
    "a method": SimpleNamespace(make=make_module).make,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_model_of_jax_is_made_once_and_never_unsharded(make):
    """Although Keras is imported, and the library is not given."""
    MADE.clear()
    lm.plan(make, lm.LayoutMap("model=4", RULES, rest="replicated"))
    assert [0] == MADE  # one call, and no array

    MADE.clear()
    model = lm.LayoutMap(lm.create_mesh("model=4"), RULES, rest="replicated").build(make)
    assert [0] == MADE
    assert {(64, 1024)} == {shard.data.shape for shard in model.up.kernel[...].addressable_shards}


def test_a_pytree_is_traced():
    """Its function names only JAX."""
    lm.plan(make_tree, lm.LayoutMap("model=4", RULES))
    (kernel,) = lm.LayoutMap(lm.create_mesh("model=4"), RULES).build(make_tree)["up"].values()
    assert {(64, 1024)} == {shard.data.shape for shard in kernel.addressable_shards}


def test_the_libraries_that_a_function_names():
    """A function of several is called for the first one that is imported, and then for that of its model."""
    assert {"jax"} == find_libraries_named_in_code(make_tree) == find_libraries_named_in_code(Net)
    assert {"keras"} == find_libraries_named_in_code(make_keras)
    assert {"jax", "keras"} == find_libraries_named_in_code(lambda: (make_tree(), make_keras()))
    assert set() == find_libraries_named_in_code(lambda: None) == find_libraries_named_in_code(None)
    assert ["dense" in path for path in lm.plan(make_keras, lm.LayoutMap("model=4"))] == [True, True]


def test_a_model_of_another_library_than_its_function_names_is_found():
    """The call for JAX only traces, and the next one is for the library of the model."""
    layers = SimpleNamespace(make=make_keras)

    def make():
        jax.numpy.zeros(())
        return layers.make()

    assert {"jax"} == find_libraries_named_in_code(make)
    assert 2 == len(lm.plan(make, lm.LayoutMap("model=4")).assignments)


def make_with_imports():
    from flax import nnx

    return nnx.Linear(8, 8, rngs=nnx.Rngs(0))


def make_with_import_of_another_package():
    import hub_of_models  # type: ignore[import-not-found]

    return hub_of_models.make()


def test_the_library_that_is_tried_first_if_none_is_imported():
    """Import statements in functions count, and a lazy module is asked for the names that the function uses."""
    lazy = ModuleType("hub_of_models")
    lazy.__getattr__ = {"Net": Net}.__getitem__  # type: ignore[method-assign]
    make_of_lazy_module = eval("lambda: hub.Net() or hub.missing", {"hub": lazy})

    assert (
        "jax" == choose_library_to_import(make_with_imports) == choose_library_to_import(make_of_lazy_module)
    )
    assert "keras" == choose_library_to_import(lambda: (make_with_imports(), make_keras()))
    assert "torch" == choose_library_to_import(make_with_import_of_another_package)
    assert None is choose_library_to_import(lambda: None) is choose_library_to_import(None)


@pytest.mark.parametrize(("name", "paths"), {"jax": ["kernel"], "keras": ["kernel", "bias"]}.items())
def test_a_model_is_planned_by_a_program_that_has_imported_no_library(tmp_path, name, paths):
    """The first call imports torch, since the code does not name the library; the next one is for the model's."""
    made = {
        "jax": "{'kernel': importlib.import_module('jax.numpy').ones((8, 8))}",
        "keras": "importlib.import_module('keras').Sequential([importlib.import_module('keras').layers.Dense(8)])",
    }
    program = f"import importlib, sys\nimport layoutmap as lm\ndef make():\n    return {made[name]}\n"
    program += (
        "plan = lm.plan(make, lm.LayoutMap('model=4'), inputs=type('', (), dict(shape=(4, 8), dtype='float32')))\n"
        "print([path.rpartition('.')[2] for path in plan])"
    )
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
    )

    assert f"{paths}\n" == done.stdout, done.stderr
