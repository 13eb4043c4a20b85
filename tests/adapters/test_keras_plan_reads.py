"""Makers that read and write weights while they make a model: a plan takes them as a scope does."""

import gc

import keras
import numpy as np
import pytest
from keras_models import num_arrays
from quiet import OF_ARRAYS

import layoutmap as lm
from layoutmap.adapters.keras import call_stack, materialize, paths, session

PROCESSES = ("jax", "tensorflow", "torch")
L = keras.layers
ops = keras.ops
pytestmark = [
    OF_ARRAYS,
    # The rules of other models
    pytest.mark.filterwarnings("ignore:layout map:layoutmap.core.errors.LayoutMapWarning"),
]


class Positions(L.Layer):
    """A table that is computed, while it is built, from a longer one; keras-hub's DINOv2 has such a layer."""

    def build(self, shape):
        self.source = self.add_weight(shape=(1, 9, 8), initializer="normal", trainable=False, name="source")
        self.table = self.add_weight(shape=(1, 4, 8), initializer="zeros", name="table")
        source = ops.convert_to_tensor(self.source)
        grid = ops.image.resize(ops.reshape(source[:, 1:], (1, 4, 2, 8)), (3, 1), interpolation="bicubic")
        self.table.assign(ops.concatenate([source[:, :1], ops.reshape(grid, (1, 3, 8))], axis=1))

    def call(self, x):
        return x + self.table


class Scaled(L.Layer):
    """A weight whose initializer gives a number of Python, as the heads of keras-hub's CLIP do."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer=lambda *args, **kwargs: 2.6, name="scale")

    def call(self, x):
        return x * ops.exp(self.scale)


class Alike(L.Layer):
    """Two weights, of which one starts as the other, by way of numpy."""

    def build(self, shape):
        self.one = self.add_weight(shape=(8,), initializer="normal", name="one")
        self.two = self.add_weight(shape=(8,), initializer="zeros", name="two")
        self.two.assign(np.asarray(self.one) + 1)
        self.two.assign_add(self.one)

    def call(self, x):
        return x * self.one + self.two


def positions():
    return keras.Sequential([keras.Input((4, 8)), Positions(name="positions")])


def scaled():
    return keras.Sequential([keras.Input((4, 8)), Scaled(name="scaled"), L.Dense(8, name="d1")])


def alike():
    return keras.Sequential([keras.Input((4, 8)), Alike(name="alike")])


def copied():
    """All weights of one model, given to another of the same kind."""
    one, two = (keras.Sequential([keras.Input((8,)), L.Dense(8, name="d1")], name=n) for n in "ab")
    two.set_weights(one.get_weights())
    two.layers[0].bias.assign([1.0] * 8)
    return two


def adapted():
    """Statistics that are taken from data."""
    norm = L.Normalization(name="norm")
    norm.adapt(np.arange(24, dtype="float32").reshape(3, 8))
    return keras.Sequential([keras.Input((8,)), norm, L.Dense(8, name="d1")])


MAKERS = {f.__name__: f for f in (positions, scaled, alike, copied, adapted)}


def layout_map():
    """Rules for all of the models; each has a weight for some of them."""
    # Not for Positions.source: what is computed from shards may be rounded in another way.
    rules = {
        r".*\.kernel": (None, "model"),
        r".*\.table": (None, None, "model"),
        r".*\.(one|two)": ("model",),
    }
    return lm.LayoutMap(lm.create_mesh("batch=2,model=4"), rules)


def values(model):
    return [np.asarray(keras.ops.convert_to_numpy(v.value)) for v in model.weights]


@pytest.mark.parametrize("name", MAKERS)
def test_a_plan_takes_what_a_scope_takes(name):
    """Weights read and written while the model is made: the plan is the scope's, no array stays, values are plain."""
    make = MAKERS[name]
    gc.collect()
    before = num_arrays()
    plan = lm.plan(make, layout_map())
    gc.collect()

    assert before == num_arrays()
    keras.utils.set_random_seed(3)
    expected = values(make())
    keras.utils.set_random_seed(3)
    with layout_map().scope() as scope:
        model = make()
    actual = [np.asarray(v) for v in model.weights]

    assert [np.array_equal(a, b) for a, b in zip(expected, actual, strict=True)] == [True] * len(expected)
    assert [(a.variable, a.layout) for a in scope.plan.assignments] == [
        (a.variable, a.layout) for a in plan.assignments
    ]


def test_a_plan_loads_weights(tmp_path):
    """A function that loads a file is planned: its shapes are checked, nothing of it is kept."""
    scaled().save_weights(tmp_path / "a.weights.h5")

    def loaded():
        model = scaled()
        model.load_weights(tmp_path / "a.weights.h5")
        return model

    assert lm.plan(scaled, layout_map()) == lm.plan(loaded, layout_map())


def test_a_plan_loads_a_model(tmp_path):
    """A function that loads a model with its optimizer is planned: the plan is that of a scope that loads it."""
    model = keras.Sequential([keras.Input((8,)), L.Dense(8, name="d1")])
    model.compile("adam", "mse")
    model.fit(np.ones((4, 8), "float32"), np.ones((4, 8), "float32"), verbose=0)
    model.save(tmp_path / "a.keras")
    plan = lm.plan(lambda: keras.models.load_model(tmp_path / "a.keras"), layout_map())
    with layout_map().scope() as scope:
        _model = keras.models.load_model(tmp_path / "a.keras")

    assert [(a.variable, a.layout) for a in scope.plan.assignments] == [
        (a.variable, a.layout) for a in plan.assignments
    ]


class Stack(L.Layer):
    """Layers in a list, of which each is used while the layer that holds them is built."""

    def __init__(self, count, use):
        super().__init__(name="stack")
        self.dense = [L.Dense(8) for _ in range(count)]
        self.use = use

    def build(self, shape):
        for layer in self.dense:
            layer.build(shape)
            self.use(layer)

    def call(self, x):
        return x


def stacked(count, use):
    return keras.Sequential([keras.Input((8,)), Stack(count, use)])


def functional(count, use):
    x = inputs = keras.Input((8,))
    for number in range(count):
        layer = L.Dense(8, name=f"d{number}")
        x = layer(x)
        use(layer)
    return keras.Model(inputs, x)


def read(layer):
    np.asarray(keras.ops.convert_to_numpy(layer.kernel))


def assign(layer):
    layer.set_weights([np.ones((8, 8), "float32"), np.ones((8,), "float32")])


@pytest.mark.parametrize("make", [stacked, functional], ids=lambda f: f.__name__)
@pytest.mark.parametrize("use", [read, assign], ids=lambda f: f.__name__)
def test_weights_that_are_used_one_by_one(make, use, monkeypatch):
    """Each is stored once, in the layout of its rule, and to find its path takes no longer with more layers."""
    stored, looks = [], []
    plain_store, plain_look = materialize.Materializer._store_array, paths.iterate_public_attributes
    monkeypatch.setattr(
        materialize.Materializer,
        "_store_array",
        lambda self, variable, *rest: (stored.append(id(variable)), plain_store(self, variable, *rest))[1],
    )
    monkeypatch.setattr(
        paths,
        "iterate_public_attributes",
        lambda owner, *rest: (looks.append(owner), plain_look(owner, *rest))[1],
    )
    num_looks = []
    for count in (4, 8, 12):
        stored.clear(), looks.clear()
        with layout_map().scope() as scope:
            model = make(count, use)
        num_looks.append(len(looks))

        assert sorted(map(id, model.weights)) == sorted(stored)
        kernels = [
            a.layout.sharding_specs for a in scope.plan.assignments if a.variable.path.endswith("kernel")
        ]
        assert [("unsharded", "model")] * count == kernels
    assert num_looks[2] - num_looks[1] == num_looks[1] - num_looks[0]


def test_a_plan_checks_the_shapes_of_what_is_assigned():
    """A value of another shape is refused while planning, by the variable's name."""

    def wrong():
        model = scaled()
        model.layers[1].kernel.assign(np.zeros((8, 9), "float32"))
        return model

    with pytest.raises(lm.LayoutError, match=r"d1\.kernel: the value has a different shape"):
        lm.plan(wrong, layout_map())


def test_a_call_with_arrays_names_what_to_do():
    """A plan computes nothing; it says to call the model with keras.Input, or to pass inputs."""

    def called():
        model = keras.Sequential([L.Dense(8, name="d1")])
        model(np.zeros((2, 8), "float32"))
        return model

    with pytest.raises(
        lm.PlanError, match=r"(?s)only a plan.*keras\.Input\(\.\.\.\), or pass inputs="
    ) as caught:
        lm.plan(called, layout_map())

    if keras.backend.backend() == "jax":
        assert "d1.kernel: this model is only a plan, so it has no values" == caught.value.what
        assert "Dense.call of layer 'd1'" == caught.value.facts["read by"]


def test_a_layer_that_is_called_with_a_constant_moves_into_a_layer():
    """Keras does not train a layer of a functional model that takes a constant. The fix trains it."""

    class Positions(L.Layer):
        def __init__(self):
            super().__init__(name="positions")
            self.table = L.Embedding(4, 8)

        def call(self, x):
            return x + self.table(keras.ops.arange(4))

    def make(add_positions):
        x = keras.Input((4, 8))
        return keras.Model(x, L.Dense(8, name="d1")(add_positions(x)))

    def make_with_constant():
        return make(lambda x: x + L.Embedding(4, 8, name="positions")(keras.ops.arange(4)))

    with pytest.raises(lm.PlanError, match=r"only a plan(?s:.*)in the call of a layer of your own"):
        lm.plan(make_with_constant, layout_map())
    assert ["d1/kernel", "d1/bias"] == [each.path for each in make_with_constant().trainable_variables]
    assert "positions.table.embeddings" in lm.plan(lambda: make(Positions()), layout_map())


def test_a_read_that_is_too_large_is_named(monkeypatch):
    """The weight, the layer that reads it, and what to do instead."""
    monkeypatch.setattr(session, "_MAX_ZEROS", 71)

    with pytest.raises(lm.PlanError) as caught:
        lm.plan(positions, layout_map())

    said = str(caught.value)
    assert said.startswith("positions.source: its value is read while the model is planned")
    assert "read by  Positions.build of layer 'positions'" in said


def test_nobody_reads():
    """Outside of layers there is no layer to name."""
    assert ("", False) == (call_stack.format_running_layer(), call_stack.is_calling_layer())
