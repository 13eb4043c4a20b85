"""Copies of a model in layouts, and models around one that are made outside: laid out, too, or warned of."""

import copy
import pickle
import warnings

import keras
import numpy as np
import pytest

import layoutmap as lm
from layoutmap.adapters import get_adapter

PROCESSES = ("jax", "tensorflow", "torch")

# Keras's own: it hands variables to numpy where it saves them.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

RULES = {r"(.*\.)?d\d\.kernel$": (None, "model"), r"(.*\.)?d\d\.bias$": (None,)}
X, Y = np.ones((4, 8), "float32"), np.ones((4, 16), "float32")


def make_model():
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(16, name="d1")(inputs)
    return keras.Model(inputs, keras.layers.Dense(16, name="d2")(hidden), name="backbone")


@pytest.fixture(scope="module")
def layout_map():
    return lm.LayoutMap(lm.create_mesh("batch=2,model=4"), RULES)


@pytest.fixture(scope="module")
def model(layout_map):
    model = layout_map.build(make_model, batch_dim="batch")
    model.compile("adam", "mse")
    model.fit(X, Y, verbose=0)
    return model


def layouts(model):
    return {v.name: v.layout.sharding_specs for v in model.variables if hasattr(v, "layout")}


@pytest.mark.every_backend
def test_a_deep_copy_has_the_layouts_and_the_values(model):
    """Of weights and slots; it trains as the original does, which it leaves alone."""
    twin = copy.deepcopy(model)
    read = get_adapter("keras").read

    for ours, theirs in zip(
        [*model.variables, *model.optimizer.variables],
        [*twin.variables, *twin.optimizer.variables],
        strict=True,
    ):
        assert ours is not theirs
        assert (ours.name, ours.layout) == (theirs.name, theirs.layout)
        assert np.array_equal(read(ours), read(theirs))
    before = model.predict(X, verbose=0)
    twin.fit(X, Y, verbose=0)
    assert np.array_equal(before, model.predict(X, verbose=0))
    model_loss, twin_loss = (
        each.fit(X, Y, verbose=0).history["loss"][0] for each in (copy.deepcopy(model), copy.deepcopy(model))
    )
    assert model_loss == twin_loss


def test_a_pickle_has_no_layouts_and_says_so(model, layout_map):
    """What is read from it has the values, and in a scope the layouts, too."""
    with pytest.warns(lm.LayoutMapWarning, match="backbone: a pickle of this layer has no layouts") as caught:
        data = pickle.dumps(model)
    assert [__file__] == [w.filename for w in caught if w.category is lm.LayoutMapWarning]

    with layout_map.scope():
        twin = pickle.loads(data)
    assert layouts(model) == layouts(twin)
    np.testing.assert_array_equal(model.predict(X, verbose=0), twin.predict(X, verbose=0))


def test_a_clone_is_laid_out_in_a_scope_and_warned_of_outside(model, layout_map):
    """One warning at the user's line, whose fix gives the clone the same layouts."""
    with pytest.warns(lm.LayoutMapWarning, match="a sharded model is cloned outside of a scope") as caught:
        plain = keras.models.clone_model(model)
    assert {(__file__, caught[0].lineno)} == {(w.filename, w.lineno) for w in caught}
    assert {} == layouts(plain)

    with layout_map.scope():
        twin = keras.models.clone_model(model)
    assert layouts(model) == layouts(twin)


@pytest.mark.every_backend
@pytest.mark.parametrize(
    "save", [lambda m, path: m.save(path), keras.saving.save_model], ids=["save", "save_model"]
)
def test_a_file_that_is_loaded_outside_is_warned_of(save, layout_map, tmp_path):
    """One warning at the user's line for a file of a model in layouts, wherever the file is moved; the fixes end it."""
    model, path, moved = layout_map.build(make_model), tmp_path / "own.keras", tmp_path / "moved.keras"
    save(model, path)
    path.rename(moved)
    with pytest.warns(lm.LayoutMapWarning) as caught:
        plain = keras.models.load_model(moved)
    assert [f"{moved}: it contains a sharded model, and is loaded outside of a scope"] == [
        str(w.message).splitlines()[0] for w in caught
    ]
    assert [__file__] == [w.filename for w in caught]
    assert {} == layouts(plain)

    with layout_map.scope():
        twin = keras.models.load_model(moved)
    assert layouts(model) == layouts(twin) == layouts(layout_map.apply(plain))
    outside = make_model()
    outside.load_weights(moved)
    outside.save(tmp_path / "plain.keras")
    keras.models.load_model(tmp_path / "plain.keras")


def functional(model):
    return keras.Model(model.input, keras.layers.Dense(3, name="head")(model.output), name="outer")


def sequential(model):
    return keras.Sequential([keras.Input((8,)), model, keras.layers.Dense(3, name="head")], name="outer")


def subclass(model):
    class Outer(keras.Model):
        def __init__(self):
            super().__init__(name="outer")
            self.backbone, self.head = model, keras.layers.Dense(3, name="head")

        def call(self, x):
            return self.head(self.backbone(x))

    outer = Outer()
    outer(keras.Input((8,)))
    return outer


@pytest.mark.parametrize("outer", [functional, sequential, subclass])
def test_a_head_made_outside_is_warned_of_once(outer, layout_map):
    """It names the layers that are not laid out; to lay out the whole model, as the fix says, ends it."""
    backbone = layout_map.build(make_model)
    made = []

    def make_and_call():
        made.append(outer(backbone))
        made[0](X)
        made[0](X)

    with pytest.warns(lm.LayoutMapWarning) as caught:
        make_and_call()
    assert [
        """\
outer: it has sharded layers, but was created outside of their scope
  without layouts  head
  why              weights created outside are unsharded, and the model's batches are not sharded over batch_dim
  fix              create it in the scope, too: with layout_map.scope(): ...; or shard it: layout_map.apply(model)"""
    ] == [str(w.message) for w in caught]

    rules = {r"(.*\.)?d\d\.kernel$": (None, "model")}
    lm.LayoutMap(layout_map.mesh, rules, rest="replicated").apply(made[0])(X)
    assert all(v.layout.mesh == layout_map.mesh for v in made[0].variables)


@pytest.mark.parametrize("outer", [functional, sequential, subclass])
def test_a_head_made_outside_is_trained_or_refused(outer, layout_map):
    """JAX trains it; elsewhere `fit` says that it is to be made in the scope; laid out as a whole it trains."""
    rows, rules = np.ones((4, 3), "float32"), {r"(.*\.)?d\d\.kernel$": (None, "model")}
    with warnings.catch_warnings(action="ignore"):
        model = outer(layout_map.build(make_model))
        model.compile("sgd", "mse")
        if keras.backend.backend() != "jax":
            with pytest.raises(lm.ScopeError, match="made outside of their scope") as caught:
                model.fit(X, rows, verbose=0)
            assert "in the scope" in str(caught.value)
            lm.LayoutMap(layout_map.mesh, rules, rest="replicated").apply(model)
            model.compile("sgd", "mse")
        assert np.isfinite(model.fit(X, rows, verbose=0).history["loss"]).all()


def test_a_model_around_it_without_weights_is_not_warned_of(model):
    """Outputs of an inner layer, or a wrapper that trains it in its own way."""
    keras.Model(model.input, model.get_layer("d1").output)(X)
    keras.Sequential([keras.Input((8,)), model, keras.layers.Activation("relu")])(X)
