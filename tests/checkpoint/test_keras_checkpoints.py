"""What a checkpoint keeps of a Keras model: the variables under the paths of a plan, and what a load does with them."""

import keras
import numpy as np
import pytest
from keras_models import MODELS, RULES, functional, sequential
from quiet import OF_ARRAYS, OF_MAPS

import layoutmap as lm
from layoutmap.core.variables import Kind

PROCESSES = ("jax", "torch")
L = keras.layers
pytestmark = [OF_MAPS, OF_ARRAYS, *([pytest.mark.long] if keras.backend.backend() == "torch" else [])]


class Sampler:
    """An object that is no layer and holds a generator and a count."""

    def __init__(self):
        self.generator = keras.random.SeedGenerator(7)
        self.count = keras.Variable(0, dtype="int32", trainable=False, name="count")


class Holding(keras.Model):
    """Two layers, one of them under two names, a layer of nobody's, and an object with variables."""

    def __init__(self):
        super().__init__()
        self.first = L.Dense(4)
        self.again = self.first
        self.rest = [L.Dense(4), L.Dropout(0.5)]
        self.sampler = Sampler()

    def call(self, x):
        for layer in (self.first, *self.rest, self.again):
            x = layer(x)
        return x


def holding():
    model = Holding()
    model(keras.Input((4,)))
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def unnamed():
    """Layers without names, in a model inside of a model."""
    x = keras.Input((4,))
    inner = keras.Sequential([L.Dense(4), L.BatchNormalization(), L.Dense(4)])
    model = keras.Model(x, inner(L.Dense(4)(L.Dense(4)(x))))
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def lora():
    model = unnamed()
    model.layers[1].enable_lora(2)
    return model


def quantized():
    model = keras.Sequential([keras.Input((4,)), L.Dense(8), L.Dense(4)])
    model.quantize("int8", filters="dense")
    return model


EVERY = {**MODELS, "holding": holding, "unnamed": unnamed, "lora": lora, "quantized": quantized}


def layout_map(rules=(), dims="batch=2,model=4"):
    return lm.LayoutMap(lm.create_mesh(dims), rules)


def described(directory):
    """What is in a checkpoint."""
    return facts(lm.describe(directory).variables.values())


def facts(variables):
    """Shape, element type and aliases of variables by path, but of metrics, which a model makes when it is trained."""
    return {v.path: (v.shape, v.dtype, v.aliases) for v in variables if not v.path.startswith("loss.")}


def values(directory):
    step = lm.describe(directory)
    return {path: step.read(path) for path in step.variables if not path.startswith("loss.")}


def is_concrete(value):
    """Whether an array has values, and is not one that stands for its shape alone."""
    try:
        keras.ops.convert_to_numpy(value)
    except (TypeError, NotImplementedError):  # of a tracer of JAX, of torch's device "meta"
        return False
    return True


@pytest.mark.parametrize("name", ["holding", *(name for name in EVERY if name != "holding")])
def test_the_paths_are_those_of_a_plan(name, tmp_path):
    """A model in layouts and the same model, plain, are saved under the paths that a plan of it shows."""
    make, rules = EVERY[name], layout_map(RULES.get(name, {}))
    make()  # so that Keras gives the next one other names
    plain = make()
    if plain.compiled and not plain.optimizer.built:
        plain.optimizer.build(plain.trainable_variables)
    lm.save(plain, tmp_path / "plain")
    lm.save(rules.build(make), tmp_path / "laid out")
    planned = facts(a.variable for a in lm.plan(make, rules).assignments)

    assert planned == described(tmp_path / "laid out")
    assert planned == described(tmp_path / "plain")


@pytest.mark.parametrize("name", ["unnamed", "holding", "quantized"])
def test_a_model_is_loaded_however_it_was_saved(name, tmp_path):
    """Saved plain, loaded in a scope, saved, loaded plain and saved: names and values are the same."""
    make = EVERY[name]
    lm.save(make(), tmp_path / "first")
    model = lm.load(make, tmp_path / "first", layout_map=layout_map({r".*\bkernel": (None, "model")}))
    lm.save(model, tmp_path / "second")
    lm.save(lm.load(make, tmp_path / "second"), tmp_path / "third")

    np.testing.assert_equal(values(tmp_path / "third"), values(tmp_path / "first"))


def test_no_initializer_is_called(tmp_path):
    """A model that is loaded in a scope is read, and no initial value is computed: built at once, or at a call."""
    computed = []

    class Counting(keras.initializers.Initializer):
        def __call__(self, shape, dtype=None):
            value = keras.ops.ones(shape, dtype)
            computed.extend([shape] * is_concrete(value))  # Keras asks for shapes with symbols
            return value

    def dense():
        return L.Dense(4, kernel_initializer=Counting(), bias_initializer=Counting())

    class Lazy(keras.Model):
        def __init__(self):
            super().__init__()
            self.d1, self.d2 = dense(), dense()

        def call(self, x):
            return self.d2(self.d1(x))

    x = np.ones((2, 4), "float32")
    before = []
    for make in (lambda: keras.Sequential([keras.Input((4,)), dense(), dense()]), Lazy):
        model = make()
        directory = tmp_path / type(model).__name__
        expected = model(x)
        lm.save(model, directory)
        before.append(len(computed))
        loaded = lm.load(
            make, directory, layout_map=layout_map({".*kernel": (None, "model")}), inputs=keras.Input((4,))
        )
        before.append(len(computed))
        np.testing.assert_array_equal(*map(keras.ops.convert_to_numpy, (loaded(x), expected)))

    assert [4, 4, 8, 8] == before


def test_a_model_without_weights_is_not_loaded_and_not_saved(tmp_path):
    """A model that would make its weights later is refused, in a scope and plain, and the message says inputs=."""

    class Lazy(keras.Model):
        def __init__(self):
            super().__init__()
            self.d1 = L.Dense(4)

        def call(self, x):
            return self.d1(x)

    built = Lazy()
    built(np.ones((2, 4), "float32"))
    lm.save(built, tmp_path)
    refused = []
    for act in (
        lambda: lm.load(Lazy, tmp_path, layout_map=layout_map()),
        lambda: lm.load(Lazy(), tmp_path),
        lambda: lm.save(Lazy(), tmp_path, step=1),
    ):
        with pytest.raises(lm.CheckpointError, match="has no weights yet") as error:
            act()
        refused.append("pass inputs=" in str(error.value))
    loaded = lm.load(Lazy, tmp_path, inputs=keras.Input((4,)))

    assert [True] * 3 == refused
    np.testing.assert_array_equal(loaded.d1.kernel, built.d1.kernel)


def test_for_inference_slots_are_left(tmp_path):
    """A model that is not compiled loads a checkpoint with slots, and one whose optimizer made none loads that."""
    make = functional
    trained = make()
    trained.optimizer.build(trained.trainable_variables)
    lm.save(trained, tmp_path / "trained")
    lm.save(make(), tmp_path / "new")

    def bare():
        model = make()
        return keras.Model(model.inputs, model.outputs)

    kinds = {
        name: {v.kind for v in lm.describe(tmp_path / name).variables.values()} for name in ("trained", "new")
    }
    assert [True, False] == [Kind.SLOT in kinds[name] for name in ("trained", "new")]
    for name, built in (("trained", True), ("new", False)):
        assert lm.load(bare, tmp_path / name).get_layer("out") is not None
        assert built == lm.load(make(), tmp_path / name).optimizer.built


def test_what_a_model_makes_later_is_not_read(tmp_path):
    """Slots that an optimizer makes after a load begin as they do, and not as those that were saved."""
    model = sequential()
    x = np.ones((8, 16), "float32")
    model.train_on_batch(x, np.zeros(8, "int32"))
    lm.save(model, tmp_path)
    loaded = lm.load(sequential, tmp_path, layout_map=layout_map())
    steps = [int(loaded.optimizer.iterations)]
    loaded.compile("adamw", "mse")
    loaded.optimizer.build(loaded.trainable_variables)
    steps += [int(loaded.optimizer.iterations)]

    assert [1, 0] == steps
    assert 0 == float(keras.ops.max(keras.ops.abs(loaded.optimizer.variables[2])))


def test_slots_of_frozen_weights_are_kept(tmp_path):
    """What an optimizer made for a weight that was frozen since is saved under the weight's path."""
    model = unnamed()
    paths = []
    for name in ("trained", "frozen"):
        lm.save(model, tmp_path / name)
        paths.append(sorted(lm.describe(tmp_path / name).variables))
        model.trainable = False

    assert paths[0] == paths[1]


def test_what_is_drawn_goes_on(tmp_path):
    """After a load, Python, numpy, Keras and its layers draw what they would have drawn next."""
    import random

    def drawn(model):
        numbers = [random.random(), np.random.rand(), *np.asarray(keras.random.uniform((2,)))]  # noqa: NPY002
        return [*numbers, *keras.ops.convert_to_numpy(model(np.ones((1, 64), "float32"), training=True))[0]]

    def make():
        return keras.Sequential([keras.Input((64,)), L.Dense(64), L.Dropout(0.5)])

    model = make()
    drawn(model)
    lm.save(model, tmp_path)
    expected = drawn(model)

    assert expected == drawn(lm.load(make, tmp_path))
    assert expected == drawn(lm.load(model, tmp_path))


def test_a_random_state_that_does_not_fit_is_refused(tmp_path):
    """A state that has no equal in the type of this backend is not converted, and the model stays as it was."""

    class Noise(keras.Model):
        def __init__(self, dtype="uint32"):
            super().__init__()
            self.d1 = L.Dense(2)
            self.generator = keras.random.SeedGenerator(1)
            self.generator.state = keras.Variable(
                [2**31, 5], dtype=dtype, trainable=False, name="seed_generator_state"
            )
            self.d1.build((2, 2))
            self.built = True

    lm.save(Noise(), tmp_path)
    model = Noise()
    model.generator.state = keras.Variable(
        [1, 0], dtype="int32", trainable=False, name="seed_generator_state"
    )
    kernel = np.asarray(model.d1.kernel)
    with pytest.raises(lm.CheckpointError, match="random state does not fit"):
        lm.load(model, tmp_path)

    np.testing.assert_array_equal(kernel, model.d1.kernel)


def test_unsigned_integers_are_saved_as_such(tmp_path):
    """Keras on torch holds them as larger signed integers: a checkpoint has what Keras says."""

    class Counts(keras.Model):
        def __init__(self, of_all=(0, 0)):
            super().__init__()
            self.d1 = L.Dense(2)
            self.d1.build((2, 2))
            self.large = keras.Variable(list(of_all), dtype="uint32", trainable=False, name="large")
            self.small = keras.Variable([each % 2**16 for each in of_all], dtype="uint16", trainable=False)
            self.built = True

    most = [2**32 - 1, 7]
    lm.save(Counts(most), tmp_path / "plain")
    lm.save(lm.load(Counts, tmp_path / "plain", layout_map=layout_map()), tmp_path / "laid out")
    loaded = lm.load(Counts(), tmp_path / "laid out")

    for name in ("plain", "laid out"):
        read = lm.describe(tmp_path / name).read("large")
        assert ("uint32", most) == (read.dtype.name, read.tolist())
    assert [most, [2**16 - 1, 7]] == [np.asarray(each).tolist() for each in (loaded.large, loaded.small)]


@pytest.mark.parametrize("how", ["scope to plain", "plain to scope", "plain to plain"])
def test_layers_that_names_do_not_tell_apart_are_not_exchanged(how, tmp_path):
    """Layers without names beside one that was given a name like Keras's own: as saved in a scope, or refused."""

    def make():
        x = keras.Input((4,))
        return keras.Model(x, L.Dense(4)(L.Dense(4)(L.Dense(4, name="dense_1")(x))))

    saved_in, _, loaded_in = how.partition(" to ")
    keras.backend.clear_session()
    L.Dense(1), L.Dense(1), L.Dense(1)
    lm.save(layout_map().build(make) if saved_in == "scope" else make(), tmp_path)
    L.Dense(1)
    with pytest.raises(lm.CheckpointError, match="dense_1"):
        lm.load(make, tmp_path, layout_map=layout_map() if loaded_in == "scope" else None)
    if how == "scope to plain":
        assert lm.load(make, tmp_path, layout_map=layout_map()) is not None
