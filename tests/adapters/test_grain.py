"""Data loaders of grain feed `fit` and compiled steps, and go on from a checkpoint where they were."""

import grain
import keras
import numpy as np
import optax
import pytest
from flax import nnx

import layoutmap as lm

ROWS, BATCH = 22, 4  # the last batch does not divide
RULES = {r"up\.kernel": (None, "model"), r"down\.kernel": ("model", None)}
X, Y = np.random.default_rng(0).normal(size=(2, ROWS, 16)).astype("float32")


class Rows:
    """A source of rows."""

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return X[row], Y[row]

    def __repr__(self):
        return "Rows()"  # by which grain knows it again


def map_dataset(epochs):
    return grain.MapDataset.source(Rows()).seed(3).shuffle().batch(BATCH).repeat(epochs)


def iter_dataset(epochs):
    return map_dataset(epochs).to_iter_dataset()


def data_loader(epochs):
    sampler = grain.samplers.IndexSampler(ROWS, seed=1, shuffle=True, num_epochs=epochs)
    return grain.DataLoader(data_source=Rows(), sampler=sampler, operations=[grain.transforms.Batch(BATCH)])


KINDS = [map_dataset, iter_dataset, data_loader]


def layout_map():
    return lm.LayoutMap(lm.create_mesh("batch=2,model=4"), RULES, rest="replicated")


@pytest.mark.long
# Keras does not ask for its length
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_fit_takes_it_as_on_one_device(kind):
    """`fit` and `evaluate` of all three kinds give the losses of one device."""

    def make_model():
        keras.utils.set_random_seed(1)
        layers = [keras.Input((16,)), keras.layers.Dense(64, name="up"), keras.layers.Dense(16, name="down")]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.Adam(1e-2), "mse")
        return model

    def losses(model):
        found = model.fit(kind(1), shuffle=False, verbose=0).history["loss"]
        return [*found, model.evaluate(kind(1), verbose=0)]

    expected = losses(make_model())
    np.testing.assert_allclose(losses(layout_map().build(make_model, batch_dim="batch")), expected, rtol=1e-5)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_goes_on_with_the_next_batch(kind, tmp_path):
    """`lm.save(data=)` keeps the state of its iterator: after a load the losses are those of the run that went on."""

    @lm.jit_step(batch_dim="batch")
    def step(net, optimizer, x, y):
        loss, gradients = nnx.value_and_grad(lambda net: ((net(x) - y) ** 2).mean())(net)
        optimizer.update(net, gradients)
        return loss

    def begun():
        net = layout_map().build(lambda: Net(nnx.Rngs(0)), library="jax")
        return net, layout_map().build_optimizer(optax.adam(1e-2), net), iter(kind(2))

    net, optimizer, data = begun()
    for _ in range(2):
        step(net, optimizer, *next(data))
    lm.save(net, tmp_path, step=2, optimizer=optimizer, data=data)
    expected = [float(step(net, optimizer, *batch)) for batch in data]
    net, optimizer, data = begun()
    lm.load(net, tmp_path, optimizer=optimizer, data=data)

    assert expected == [float(step(net, optimizer, *batch)) for batch in data]
    assert 9 <= len(expected)  # a DataLoader joins the last rows of an epoch with the first of the next
