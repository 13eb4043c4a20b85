"""Training goes on from a checkpoint as if it had not stopped, on each backend of Keras."""

import tempfile

import keras
import numpy as np
import pytest
from cases import few

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


KERAS_READS_BY_ARRAY = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
OPTIMIZERS = ("sgd", "adam", "adamw", "adagrad", "rmsprop", "nadam", "lion", "adafactor")


def make_uncompiled():
    return keras.Sequential([keras.Input((8,)), L.Dense(16, name="up"), L.Dense(4, name="down")])


def make_with(optimizer):
    model = make_uncompiled()
    model.compile(optimizer, "mse")
    return model


@pytest.mark.filterwarnings("error::layoutmap.LayoutMapWarning")
@KERAS_READS_BY_ARRAY
@pytest.mark.parametrize("optimizer", few(OPTIMIZERS, "adam"))
@pytest.mark.parametrize("is_sharded", few([True, False], True))
def test_an_optimizer_that_a_load_left_out_is_named_and_restored_by_compile(tmp_path, optimizer, is_sharded):
    """The warning has the variables and the reason. After `compile` the losses are those without a break."""
    rules = layout_map("batch=2,model=4", (None, "model"))
    rules.rest = "replicated"
    keras.utils.set_random_seed(2)
    model = rules.build(lambda: make_with(optimizer), batch_dim="batch")
    trained(model)
    lm.save(model, tmp_path)
    losses = trained(model)
    options = {"layout_map": rules, "batch_dim": "batch"} if is_sharded else {}
    with pytest.warns(lm.LayoutMapWarning, match="optimizer variables were not read") as caught:
        found = lm.load(make_uncompiled, tmp_path, **options)
    (ours,) = (str(each.message) for each in caught if each.category is lm.LayoutMapWarning)
    found.compile(optimizer, "mse")

    assert "optimizer.iteration" in ours
    assert "why       the model has no optimizer" in ours
    assert STEPS == int(np.asarray(keras.ops.cast(found.optimizer.iterations, "int32")))
    assert "compile" not in vars(found) or is_sharded
    np.testing.assert_allclose(trained(found), losses, rtol=1e-6)
    found.compile(optimizer, "mse")  # a later one begins anew
    assert 0 == int(np.asarray(keras.ops.cast(found.optimizer.iterations, "int32")))


class UnusedLayers(keras.Model):
    """A model that has layers, with and without weights, which its call does not reach."""

    def __init__(self):
        super().__init__()
        self.up, self.down = L.Dense(16), L.Dense(4)
        self.spare, self.scale = L.Dense(4), L.Rescaling(2.0)

    def call(self, inputs):
        return self.down(self.up(inputs))


def make_with_unused_layers():
    model = UnusedLayers()
    model(keras.Input((8,)))
    model.compile("adam", "mse")
    return model


@pytest.mark.filterwarnings("error::layoutmap.LayoutMapWarning", "ignore:.*unbuilt state:UserWarning")
@KERAS_READS_BY_ARRAY
def test_slots_are_restored_beside_unused_layers(tmp_path):
    """A layer that no call reaches will have no slots, so those of the others are restored."""
    rules = lm.LayoutMap("batch=2,model=4", {r"up\.kernel": (None, "model")}, rest="replicated")
    model = rules.build(make_with_unused_layers, batch_dim="batch")
    trained(model)
    lm.save(model, tmp_path)
    losses = trained(model)

    np.testing.assert_allclose(
        trained(lm.load(make_with_unused_layers, tmp_path, layout_map=rules, batch_dim="batch")),
        losses,
        rtol=1e-6,
    )
    np.testing.assert_allclose(trained(lm.load(make_with_unused_layers, tmp_path)), losses, rtol=1e-6)


@pytest.mark.filterwarnings("error::layoutmap.LayoutMapWarning")
@KERAS_READS_BY_ARRAY
def test_another_optimizer_is_not_restored(tmp_path):
    """A warning names what was not restored; weights keep what was trained meanwhile. `extra="ignore"` says nothing."""
    model = make_with("adam")
    trained(model)
    lm.save(model, tmp_path)
    with pytest.warns(lm.LayoutMapWarning, match="were not read"):
        found = lm.load(make_uncompiled, tmp_path)
    found.layers[0].kernel.assign(np.zeros((8, 16)))
    with pytest.warns(lm.LayoutMapWarning, match="the optimizer state was not restored"):
        found.compile("sgd", "mse")
    assert 0.0 == float(np.abs(np.asarray(found.layers[0].kernel)).max())
    quiet = lm.load(make_uncompiled, tmp_path, extra="ignore")
    quiet.compile("adam", "mse")
    assert 0 == int(np.asarray(keras.ops.cast(quiet.optimizer.iterations, "int32")))
