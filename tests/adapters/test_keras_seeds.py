"""Seed generators that initializers draw from, and the user's code as well: all numbers are those of plain Keras."""

import keras
import numpy as np
import pytest
from quiet import OF_ARRAYS, OF_MAPS

import layoutmap as lm

PROCESSES = ("jax", "tensorflow", "torch")
L = keras.layers
I = keras.initializers  # noqa: E741 - as Keras's users abbreviate it
pytestmark = [OF_MAPS, OF_ARRAYS]


def layout_map():
    return lm.LayoutMap(lm.create_mesh("batch=2,model=4"), {r".*\.kernel": (None, "model")})


def dense(initializer, number):
    layer = L.Dense(8, kernel_initializer=initializer, name=f"d{number}")
    layer.build((None, 8))
    return layer


def of_ones_own(generator):
    return lambda shape, dtype=None: keras.random.uniform(shape, dtype=dtype, seed=generator)


def by_hand(generator):
    """Drawn by hand between two layers, and after them."""
    initializer, found = I.RandomUniform(seed=generator), []
    for number in range(2):
        found += [dense(initializer, number), keras.random.uniform((2,), seed=generator)]
    return found


def of_two_sorts(generator):
    """Initializers of Keras and of one's own, in turn."""
    initializers = of_ones_own(generator), I.RandomUniform(seed=generator)
    return [dense(initializers[number % 2], number) for number in range(4)]


def with_an_early_read(generator):
    """One weight is read before those that were made before it, another one is assigned."""
    layers = [dense(I.RandomUniform(seed=generator), number) for number in range(2)]
    np.asarray(keras.ops.convert_to_numpy(layers[1].kernel))
    layers.append(dense(I.RandomUniform(seed=generator), 2))
    layers[2].kernel.assign(np.ones((8, 8), "float32"))
    return [*layers, dense(I.RandomUniform(seed=generator), 3)]


def without_a_seed(generator):
    """The same with the generator of the process."""
    found = []
    for number in range(2):
        found += [dense(of_ones_own(None), number), keras.random.uniform((2,))]
    return found


def built_by_a_call(generator):
    """Layers that a model builds in symbolic code, and draws by hand between two such models."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.d1 = L.Dense(8, kernel_initializer=I.RandomUniform(seed=generator))
            self.d2 = L.Dense(8, kernel_initializer=I.RandomUniform(seed=generator))

        def call(self, x):
            return self.d2(self.d1(x))

    found = []
    for _ in range(2):
        model = Model()
        model(keras.Input((8,)))
        found += [model, keras.random.uniform((2,), seed=generator)]
    return found


def values(found, generator):
    variables = [v for each in found for v in (each.weights if isinstance(each, L.Layer) else [each])]
    return [np.asarray(keras.ops.convert_to_numpy(v)) for v in (*variables, generator.state)]


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize(
    "make",
    [by_hand, of_two_sorts, with_an_early_read, without_a_seed, built_by_a_call],
    ids=lambda f: f.__name__,
)
def test_numbers_are_those_of_plain_keras(make, where):
    """First weights, what is drawn by hand, and what the generator draws next; it may be made in the scope or not."""
    keras.utils.set_random_seed(5)
    generator = keras.random.SeedGenerator(3)
    expected = values(make(generator), generator)
    keras.utils.set_random_seed(5)
    generator = keras.random.SeedGenerator(3)
    with layout_map().scope():
        if where == "inside":
            generator = keras.random.SeedGenerator(3)
        found = make(generator)
    actual = values(found, generator)

    assert [True] * len(expected) == [np.array_equal(a, b) for a, b in zip(expected, actual, strict=True)]


def test_a_plan_draws_nothing():
    """A generator from before is after a plan what it was, though the function that makes the model draws from it."""
    generator = keras.random.SeedGenerator(3)
    before = np.array(keras.ops.convert_to_numpy(generator.state))
    lm.plan(lambda: keras.Sequential([keras.Input((8,)), *by_hand(generator)[::2]]), layout_map())

    assert np.array_equal(before, keras.ops.convert_to_numpy(generator.state))
