"""Training goes on from a checkpoint as if it had not stopped, on each backend of Keras."""

import tempfile

import keras
import numpy as np
import pytest

import layoutmap as lm

PROCESSES = ("jax", "tensorflow", "torch")
L = keras.layers
pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
STEPS = 2


def make_model():
    """A model without names, with all that changes in training: statistics, seeds, slots, a schedule's count."""
    layers = [
        keras.Input((8,)),
        L.Dense(16, activation="relu"),
        L.BatchNormalization(),
        L.Dropout(0.5, seed=3),
        L.Dense(4),
    ]
    model = keras.Sequential(layers)
    rate = keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5)
    model.compile(keras.optimizers.Adam(rate), "mse")
    return model


def layout_map(dims, specs):
    return lm.LayoutMap(lm.create_mesh(dims), {r".*kernel": specs})


def trained(model):
    """The losses of some steps."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(8, 8)).astype("float32"), random.normal(size=(8, 4)).astype("float32")
    return [float(np.asarray(model.train_on_batch(x, y))) for _ in range(STEPS)]


def values(model):
    """The values of all that is kept of a model, by path."""
    with tempfile.TemporaryDirectory() as directory:
        lm.save(model, directory)
        step = lm.describe(directory)
        return {path: step.read(path) for path in step.variables if not path.startswith("loss")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where a model was saved after some steps, and the losses and values after some more."""
    directory = tmp_path_factory.mktemp("run")
    keras.utils.set_random_seed(1)
    model = layout_map("batch=2,model=4", (None, "model")).build(make_model, batch_dim="batch")
    trained(model)
    lm.save(model, directory, step=STEPS)
    return directory, trained(model), values(model)


def test_training_goes_on_bit_for_bit_in_the_same_layouts(saved):
    """Steps, a save, a load and more steps give the losses and the values of as many steps without a break."""
    directory, losses, after = saved
    same = layout_map("batch=2,model=4", (None, "model"))
    model = lm.load(make_model, directory, layout_map=same, batch_dim="batch")

    assert losses == trained(model)
    np.testing.assert_equal(values(model), after)


@pytest.mark.parametrize("dims", ["batch=4,model=2", None])
def test_training_goes_on_in_other_layouts(saved, dims):
    """On another mesh, and as a plain model, the losses and values are those of the first to 1e-6."""
    directory, losses, after = saved
    if dims is None:
        model = lm.load(make_model, directory)
    else:
        model = lm.load(
            make_model, directory, layout_map=layout_map(dims, ("model", None)), batch_dim="batch"
        )

    np.testing.assert_allclose(trained(model), losses, rtol=1e-6)
    found = values(model)
    assert sorted(after) == sorted(found)
    for path, value in found.items():
        np.testing.assert_allclose(value, after[path], rtol=1e-6, atol=1e-6, err_msg=path)
