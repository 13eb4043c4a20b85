"""How variables of Keras models get their first values: early, late, from one another, and never twice."""

import gc
import threading
import weakref

import keras
import numpy as np
import pytest
from keras_models import assert_held, compiled_function, is_traced
from quiet import OF_ARRAYS, OF_MAPS

import layoutmap as lm
from layoutmap.adapters.keras.paths import find_variables
from layoutmap.adapters.keras.pending import is_pending
from layoutmap.engines import get_engine

PROCESSES = ("jax", "tensorflow", "torch")
L = keras.layers
pytestmark = [OF_MAPS, OF_ARRAYS]
RULES = {r".*kernel$": (None, "model"), r".*embeddings$": ("model", None)}
X = np.ones((2, 4), "float32")


def make_map(mesh="batch=2,model=4", rules=RULES):
    return lm.LayoutMap(lm.create_mesh(mesh), rules)


def values(model):
    return {f.path: f.variable.numpy() for f in find_variables(model)}


def seeded(make):
    keras.utils.set_random_seed(11)
    return make()


def assert_as_plain(make_model, use=lambda model: None, rules=RULES):
    """The model is bit for bit what it is without a scope, and each variable is in the layout of its rule."""
    keras.utils.set_random_seed(11)
    plain = make_model()
    use(plain)
    keras.utils.set_random_seed(11)
    layout_map = make_map(rules=rules)
    with layout_map.scope():
        model = make_model()
    use(model)
    expected, actual = values(plain), values(model)

    assert list(expected) == list(actual)
    for path, value in expected.items():
        assert np.array_equal(value, actual[path], equal_nan=True), path
    for found in find_variables(model):
        layout = layout_map[found.path] or lm.Layout.replicated(layout_map.mesh, found.variable.ndim)
        assert not is_pending(found.variable)
        assert layout == found.variable.layout, found.path
        assert_held(found.variable)
    return model


class TwoDense(keras.Model):
    """The model of TensorFlow's documents."""

    def __init__(self, name=None):
        super().__init__(name=name)
        self.d1 = L.Dense(1000)
        self.d2 = L.Dense(1000)

    def call(self, inputs):
        x = self.d1(inputs)
        return self.d2(x)


class TestTheDocumentsExamples:
    """The examples of TensorFlow's documents of `LayoutMap` run as they are written there."""

    def layouts(self):
        mesh = lm.create_mesh([("batch", 2), ("model", 4)])
        return mesh, [
            lm.Layout([lm.UNSHARDED, "model"], mesh),
            lm.Layout(["model"], mesh),
            lm.Layout(["model", lm.UNSHARDED], mesh),
            lm.Layout([lm.UNSHARDED], mesh),
        ]

    def layout_map(self):
        mesh, (layout_1, layout_2, layout_3, layout_4) = self.layouts()
        layout_map = lm.LayoutMap(mesh=mesh)
        layout_map["d1.kernel"] = layout_1
        layout_map["d1.bias"] = layout_2
        layout_map["d2.kernel"] = layout_3
        layout_map["d2.bias"] = layout_4
        return layout_map

    @pytest.mark.parametrize("inputs", ["symbols", "numbers"])
    def test_a_subclassed_model(self, inputs):
        """Weights that the first call makes, after the scope, lie where the map says."""
        _, (layout_1, layout_2, layout_3, layout_4) = self.layouts()
        layout_map = self.layout_map()

        with layout_map.scope():
            model = TwoDense()
        x = keras.Input((10,), batch_size=10) if inputs == "symbols" else np.zeros((10, 10))
        results = model(x)

        assert (10, 1000) == tuple(results.shape)
        assert model.d1.kernel.layout == layout_1
        assert model.d1.bias.layout == layout_2
        assert model.d2.kernel.layout == layout_3
        assert model.d2.bias.layout == layout_4


class Early(L.Layer):
    """Reads and changes its weights while it is made."""

    def __init__(self):
        super().__init__()
        self.kernel = self.add_weight(shape=(4, 4), initializer="glorot_uniform", name="kernel")
        self.seen = self.kernel.numpy()
        self.doubled = self.add_weight(
            shape=(4, 4), name="doubled", initializer=lambda shape, dtype: self.kernel.value * 2
        )
        self.assigned = self.add_weight(shape=(4,), name="assigned", initializer="zeros")
        self.assigned.assign(np.arange(4, dtype="float32"))

    def call(self, x):
        return x @ self.kernel + self.doubled[0] + self.assigned


class Shared(keras.Model):
    """Two layers that draw their weights from one seed generator."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)
        self.a = L.Dense(8, kernel_initializer=keras.initializers.GlorotUniform(seed=self.seeds))
        self.b = L.Dense(8, kernel_initializer=keras.initializers.GlorotUniform(seed=self.seeds))

    def call(self, x):
        return self.b(self.a(x))


class Outer(keras.Model):
    """Holds a layer under a name that the layer's own name does not show."""

    def __init__(self, layer):
        super().__init__()
        self.inner = layer

    def call(self, x):
        return self.inner(x)


INITIALIZERS = [
    *("glorot_uniform", "he_normal", "random_uniform", "truncated_normal", "orthogonal", "ones", "identity"),
    keras.initializers.Constant(2.5),
    keras.initializers.VarianceScaling(2.0, mode="fan_out", distribution="untruncated_normal"),
]


@pytest.mark.parametrize(
    "initializer", INITIALIZERS, ids=lambda i: i if isinstance(i, str) else type(i).__name__
)
def test_every_initializer_gives_the_plain_values(initializer):
    """Keras's own initializers give the bits of the plain model, drawn in shards or whole."""
    assert_as_plain(
        lambda: keras.Sequential([keras.Input((8,)), L.Dense(8, name="d1", kernel_initializer=initializer)])
    )


def test_an_initializer_of_ones_own_gives_the_plain_values():
    """A function is an initializer, also one that draws from Keras's global generator."""

    def initializer(shape, dtype=None):
        return keras.random.normal(shape, dtype=dtype) + 1

    def make_model():
        return keras.Sequential(
            [keras.Input((8,)), *(L.Dense(8, name=n, kernel_initializer=initializer) for n in ("a", "b"))]
        )

    assert_as_plain(make_model)


def test_reading_and_assigning_while_a_layer_is_made():
    """A weight that is read in `__init__` or by an initializer is made then, and moves when its path is known."""
    model = assert_as_plain(
        lambda: Outer(Early()), lambda m: m(X), {r"inner\.(kernel|doubled)": ("batch", "model")}
    )

    assert np.array_equal(model.inner.seen, model.inner.kernel.numpy())


def test_an_early_read_does_not_hide_a_rule_that_does_not_fit():
    """A weight that was made early is checked with all others when the scope ends."""
    layout_map = make_map(rules={r"inner\.kernel": ("model",)})
    with pytest.raises(lm.PlanError, match=r"^inner\.kernel: .*rank") as caught, layout_map.scope():
        Outer(Early())

    assert ["inner.kernel"] == [p.subject for p in caught.value.problems]


def test_one_seed_generator_for_two_initializers():
    """A generator that several initializers share advances in the order in which their variables were born."""
    assert_as_plain(Shared, lambda m: m(X))


def test_a_value_that_is_assigned_first_is_never_drawn():
    """Assigning to a weight that waits places the value; its initializer does not run."""

    def initializer(shape, dtype=None):
        raise AssertionError("drawn")

    with make_map().scope():
        model = keras.Sequential([keras.Input((4,)), L.Dense(8, name="d1", kernel_initializer=initializer)])
        model.layers[0].kernel.assign(np.full((4, 8), 3.0))

    assert np.array_equal(np.full((4, 8), 3.0), model.layers[0].kernel.numpy())
    assert ("unsharded", "model") == model.layers[0].kernel.layout.sharding_specs


def test_losses_may_be_read_inside():
    """A regularizer reads its weight at once and gets the plain number."""

    def make_model():
        model = keras.Sequential(
            [keras.Input((4,)), L.Dense(8, name="d1", kernel_regularizer="l2", bias_constraint="non_neg")]
        )
        losses.append(float(keras.ops.convert_to_numpy(sum(model.losses))))
        return model

    losses = []
    assert_as_plain(make_model)

    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # torch sums up pieces


def test_a_pending_weight_may_be_read_in_a_compiled_function():
    """A read under `jax.jit` or `tf.function` makes the real weight, not a tracer."""
    with make_map().scope():
        model = keras.Sequential([keras.Input((4,)), L.Dense(8, name="d1")])
        read = compiled_function(lambda: model.layers[0].kernel.value * 1)()

    engine = get_engine(keras.backend.backend())
    assert np.array_equal(engine.to_numpy(read), model.layers[0].kernel.numpy())
    assert ("unsharded", "model") == model.layers[0].kernel.layout.sharding_specs


def test_the_global_seed_generator_stays_plain():
    """The state of Keras's global generator belongs to no model: after a scope it is an ordinary variable."""
    keras.utils.set_random_seed(1)
    with make_map().scope() as scope:
        keras.random.uniform((2,))
        model = keras.Sequential([keras.Input((4,)), L.Dense(8), L.Dropout(0.5)])
    seed = keras.src.random.seed_generator.global_seed_generator().state

    assert not is_pending(seed)
    assert not hasattr(seed, "layout")
    assert not [a for a in scope.plan.assignments if "global" in a.variable.path]
    model(X, training=True)


def test_an_array_becomes_a_variable_in_its_layout():
    """`keras.Variable(array)` keeps its value and is placed."""

    class Constant(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = keras.Variable(np.arange(32, dtype="float32").reshape(4, 8), trainable=False)

        def call(self, x):
            return x @ self.table

    assert_as_plain(Constant, lambda m: m(X), {"table": ("batch", "model")})


def test_a_layer_that_existed_before_joins_a_scoped_model():
    """A plain layer inside a scoped model keeps its values and is laid out with it."""
    old = L.Dense(8, name="old")
    old.build((None, 4))
    expected = old.kernel.numpy()
    with make_map().scope() as scope:
        model = keras.Sequential([keras.Input((4,)), old, L.Dense(8, name="new")])

    assert np.array_equal(expected, old.kernel.numpy())
    assert {"old.kernel", "old.bias", "new.kernel", "new.bias"} == {
        a.variable.path for a in scope.plan.assignments
    }
    assert model.layers[0].kernel.layout == model.layers[1].kernel.layout


def test_an_optimizer_that_is_built_inside():
    """Slots that are made by hand in the scope follow their weights and are in the plan."""
    with make_map().scope() as scope:
        model = keras.Sequential([keras.Input((4,)), L.Dense(8, name="d1")])
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    momentum = scope.plan["optimizer.d1.kernel.momentum"]

    assert "d1.kernel" == momentum.variable.parent
    assert model.layers[0].kernel.layout == momentum.layout
    slots = {v.path for v in optimizer.variables if getattr(v, "layout", None) == momentum.layout}
    assert 2 == len(slots)
    assert all(hasattr(v, "layout") for v in optimizer.variables)


@pytest.mark.parametrize("first", ["predict", "call"])
def test_a_first_call_draws_in_shards(first, monkeypatch):
    """The call that builds a model reads its weights from their layouts; no initializer runs in between."""
    drawn = []
    plain = keras.initializers.GlorotUniform.__call__

    def counted(self, shape, dtype=None, **options):
        value = plain(self, shape, dtype, **options)
        drawn.append(is_traced(value))
        return value

    monkeypatch.setattr(keras.initializers.GlorotUniform, "__call__", counted)
    with make_map().scope():
        model = Outer(L.Dense(24, name="d1"))
    if first == "predict":
        model.predict(X, verbose=0)
    else:
        model(X)

    assert [] == [real for real in drawn if not real]
    assert ("unsharded", "model") == model.inner.kernel.layout.sharding_specs


def test_what_is_dead_is_forgotten():
    """A scope that builds many models keeps none of them, nor anything about their variables."""
    with make_map().scope() as scope:
        gone = []
        for _ in range(3):
            model = keras.Sequential([keras.Input((4,)), L.Dense(8, name="d1")])
            gone += [weakref.ref(model), *(weakref.ref(v) for v in model.variables)]
            model.layers[0].kernel.numpy()
            del model
            keras.utils.clear_session()
            gc.collect()
        kept = keras.Sequential([keras.Input((4,)), L.Dense(8, name="d1")])

    assert [] == [ref() for ref in gone if ref() is not None]
    assert 2 == len(scope.session.registry._records) == len(scope.plan)
    assert ("unsharded", "model") == kept.layers[0].kernel.layout.sharding_specs


def test_creation_decides_the_order_of_draws_also_after_deletions():
    """A variable that has the memory of a dead one is not taken for it: it was born last."""

    def make_model():
        seeds = keras.random.SeedGenerator(3)
        draw = keras.initializers.GlorotUniform(seed=seeds)
        for _ in range(20):
            L.Dense(8, kernel_initializer="zeros").build((None, 4))
        gc.collect()
        layers = [L.Dense(4, name=f"d{i}", kernel_initializer=draw) for i in range(12)]
        return keras.Sequential([keras.Input((4,)), *layers])

    assert_as_plain(make_model)


def test_two_threads_that_first_call_one_model():
    """Weights are made once, whichever thread comes first."""
    for _ in range(5):
        with make_map().scope():
            model = TwoDense()
        barrier, results = threading.Barrier(2), []

        def call(model=model, barrier=barrier, results=results):
            barrier.wait(240)
            results.append(keras.ops.convert_to_numpy(model(X)))

        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert ["d1.kernel", "d1.bias", "d2.kernel", "d2.bias"] == [f.path for f in find_variables(model)]
        assert 2 == len(results)
        assert np.array_equal(*results)


def test_the_first_model_of_a_class_that_becomes_functional():
    """Keras makes a class Functional while its first model is being made; that model computes and trains, too."""

    class Late(keras.Model):
        def __init__(self):
            x = keras.Input((4,))
            super().__init__(x, L.Dense(8, name="d1")(L.Dropout(0.5, seed=3)(x)))

    with make_map().scope():
        model = seeded(Late)
    plain = seeded(Late)
    expected, actual = plain(X, training=True), model(X, training=True)

    assert plain._call_has_training_arg == model._call_has_training_arg
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(actual), keras.ops.convert_to_numpy(expected), rtol=1e-6
    )


class Branching(keras.Model):
    """A model that Keras cannot trace: it looks at its numbers."""

    def __init__(self):
        super().__init__()
        self.d1 = L.Dense(8)
        self.d2 = L.Dense(8)

    def call(self, x):
        return self.d2(self.d1(x)) if float(np.asarray(x).sum()) > 0 else x


def test_a_model_that_cannot_be_traced():
    """Layers that are built one by one, in the middle of a call, are laid out by their paths in the model."""
    model = assert_as_plain(Branching, lambda m: m(X), {r"d[12]\.kernel": (None, "model")})

    assert model.d1.kernel.layout == model.d2.kernel.layout


def test_a_bad_layout_is_reported_by_the_first_call_of_a_model_that_cannot_be_traced():
    """Keras tries other ways to build such a model when one fails; the plan's error is not lost there."""
    with make_map(rules={r"d1\.kernel": ("model",)}).scope():
        model = Branching()
    with pytest.raises(lm.PlanError, match=r"d1\.kernel: a layout of rank 1 does not fit a tensor of rank 2"):
        model(X)


def test_a_saved_model_knows_nothing_of_layouts(tmp_path):
    """What is loaded outside of a scope is plain Keras, whatever it was saved from."""
    with make_map().scope():
        model = keras.Sequential([keras.Input((4,)), L.Dense(8, name="d1")])
    model.save(tmp_path / "m.keras")
    with pytest.warns(lm.LayoutMapWarning, match="is loaded outside of a scope"):
        loaded = keras.models.load_model(tmp_path / "m.keras")

    assert not hasattr(loaded.layers[0].kernel, "layout")
    assert np.array_equal(model.layers[0].kernel.numpy(), loaded.layers[0].kernel.numpy())
