"""What only Keras on torch can be asked: parameters, gradients, plain tensors, loops of one's own."""

import keras
import numpy as np
import pytest
import torch
from keras.src.backend.torch import core as keras_core
from keras_models import assert_held, batch, compiled
from quiet import OF_ARRAYS, OF_MAPS
from torch.distributed.tensor import DTensor

import layoutmap as lm
from layoutmap.engines import get_engine

PROCESSES = ("torch",)
L = keras.layers
pytestmark = [OF_MAPS, OF_ARRAYS]
MESH = "batch=2,model=4"
ENGINE = get_engine("torch")
X = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")


def mlp(**options):
    layers = [L.Dense(32, name="d1", activation="relu", **options), L.Dense(64, name="d2")]
    return compiled(keras.Sequential([keras.Input((16,)), *layers]))


MLP_RULES = {r"d1\.kernel": (None, "model"), r"d2\.kernel": ("model", "batch"), r"d1\.bias": ("model",)}


def both(make_model, rules=MLP_RULES):
    """A plain model and one in layouts, from one seed."""
    made = []
    for layout_map in (None, lm.LayoutMap(lm.create_mesh(MESH), rules)):
        keras.utils.clear_session()
        keras.utils.set_random_seed(3)
        if layout_map is None:
            made.append(make_model())
        else:
            with layout_map.scope(batch_dim="batch"):
                made.append(make_model())
    return made


def assert_equal(expected, actual, tolerance=1e-5):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def assert_same_weights(expected, actual, tolerance=1e-5):
    for plain, ours in zip(expected.variables, actual.variables, strict=True):
        np.testing.assert_allclose(ours.numpy(), plain.numpy(), tolerance, tolerance, err_msg=plain.path)


# -- variables and parameters


def test_a_weight_is_a_parameter_that_holds_a_dtensor():
    """`variable.value` is a `torch.nn.Parameter`; `model.parameters()` gives these very objects."""
    plain, model = both(mlp)
    expected = [p.requires_grad for p in plain.parameters()]
    parameters = list(model.parameters())

    assert expected == [p.requires_grad for p in parameters]
    assert all(isinstance(v.value, torch.nn.Parameter) for v in model.variables)
    assert all(isinstance(v.value, DTensor) for v in model.trainable_variables)
    assert {id(v.value) for v in model.variables} == {id(p) for p in parameters}
    model.layers[0].trainable = False
    assert [False, False, True, True] == [v.value.requires_grad for v in model.weights]


def test_parameters_stay_in_step():
    """Weights that come later, and a second layout map, change what `parameters()` gives."""
    _, model = both(mlp)
    assert 4 == len(list(model.parameters()))
    model.layers[0].enable_lora(4)
    lora = {id(v.value) for v in model.variables}
    assert lora == {id(p) for p in model.parameters()}

    lm.LayoutMap(lm.create_mesh("model=8"), {r"d2\.kernel": (None, "model")}).apply(model)
    assert {id(v.value) for v in model.variables} == {id(p) for p in model.parameters()}
    assert not lora & {id(p) for p in model.parameters()}


def test_reads_and_writes_are_global():
    """`numpy`, `np.asarray`, `get_weights`, `assign` and `set_weights` know nothing of pieces."""
    _, model = both(mlp)
    kernel = model.layers[1].kernel
    new = np.arange(32 * 64, dtype="float32").reshape(32, 64)
    kernel.assign(new)
    assert np.array_equal(new, kernel.numpy())
    assert np.array_equal(new, np.asarray(kernel))
    kernel.assign_add(kernel)
    assert np.array_equal(2 * new, model.get_weights()[2])
    model.set_weights([w + 1 for w in model.get_weights()])
    assert np.array_equal(2 * new + 1, kernel.numpy())
    assert_held(kernel)


def test_what_belongs_to_no_weight_stays_plain():
    """Metrics, seeds and an optimizer's counters are plain tensors, which Keras reads between steps."""
    _, model = both(lambda: compiled(keras.Sequential([keras.Input((16,)), L.Dropout(0.5), L.Dense(64)])))
    model.fit(*batch("sequential", 4), verbose=0)
    optimizer = model.optimizer

    assert type(optimizer.learning_rate.value) is torch.nn.Parameter
    assert 1 == int(optimizer.iterations.value)
    assert not any(isinstance(v.value, DTensor) for v in model.metrics_variables)
    assert not isinstance(model.layers[0].seed_generator.state.value, DTensor)


# -- calls


def test_plain_tensors_go_in_and_come_out():
    """A call gives a plain tensor; what is computed with it has the plain gradients, of inputs, too."""
    plain, model = both(mlp)
    results = []
    for each in (plain, model):
        x = torch.tensor(X, requires_grad=True)
        y = each(x)
        loss = torch.nn.functional.cross_entropy(y, torch.arange(8))
        loss.backward()
        results.append((y.detach(), loss.detach(), x.grad))

        assert torch.Tensor is type(y)
    for expected, actual in zip(*results, strict=True):
        assert_equal(expected, actual)
    for expected, actual in zip(plain.trainable_variables, model.trainable_variables, strict=True):
        assert actual.layout == lm.dtensor.fetch_layout(actual.value.grad)
        assert_equal(expected.value.grad, ENGINE.to_numpy(actual.value.grad))


def test_losses_of_layers_are_plain_outside_of_calls():
    """A regularizer's loss, and one that a layer adds, go together with a plain loss."""

    class Adding(L.Layer):
        def call(self, x):
            self.add_loss(keras.ops.mean(x))
            return x

    def make_model():
        layers = [keras.Input((16,)), L.Dense(32, name="d1", kernel_regularizer="l2"), Adding()]
        return keras.Sequential(layers)

    totals = []
    for model in both(make_model):
        loss = keras.ops.mean(model(X)) + sum(model.losses)
        loss.backward()
        totals.append(float(loss.detach()))

    assert totals[0] == pytest.approx(totals[1], rel=1e-5)


def test_a_dropout_without_a_seed():
    """It draws from torch's own generator what it draws on one device."""

    def make_model():
        layers = [keras.Input((16,)), L.Dense(32, name="d1"), L.Dropout(0.5), L.Dense(64, name="d2")]
        return compiled(keras.Sequential(layers))

    layout_map = lm.LayoutMap(lm.create_mesh(MESH), MLP_RULES)

    assert lm.check_parity(make_model, layout_map, batch("sequential"), steps=2, batch_dim="batch").agrees


# -- training


def test_a_loop_of_ones_own():
    """The loop of Keras's guide for torch trains as on one device."""
    optimizers = []

    def make_model():
        optimizers.append(keras.optimizers.AdamW(1e-2))  # in the scope, so that its slots follow the weights
        return mlp()

    def train(model, optimizer):
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        losses = []
        for _ in range(2):
            model.zero_grad()
            loss = loss_fn(batch("sequential")[1], model(X, training=True))
            loss.backward()
            weights = list(model.trainable_weights)
            with torch.no_grad():
                optimizer.apply([v.value.grad for v in weights], weights)
            losses.append(float(loss.detach()))
        return losses

    plain, model = both(make_model)

    assert_equal(train(plain, optimizers[0]), train(model, optimizers[1]))
    assert_same_weights(plain, model)
    assert model.layers[1].kernel.layout in {getattr(v, "layout", None) for v in optimizers[1].variables}


def test_an_optimizer_of_torch():
    """An optimizer of `torch.optim` takes `model.parameters()`; gradients are clipped by their whole norm."""

    def train(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        norms = []
        for _ in range(2):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(X), torch.arange(8)).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            norms.append(float(ENGINE.to_numpy(norm)))
            optimizer.step()
        return norms

    plain, model = both(mlp)

    assert_equal(train(plain), train(model))
    assert_same_weights(plain, model)


def test_fit_takes_a_loader_of_torch():
    """A `DataLoader` feeds `fit`, with a last batch that does not divide, and a step of one's own gets DTensors."""
    seen = []

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.d1, self.d2 = L.Dense(32, activation="relu"), L.Dense(64)

        def call(self, x):
            return self.d2(self.d1(x))

        def train_step(self, data):
            x, y = data
            self.zero_grad()
            loss = torch.nn.functional.cross_entropy(self(x, training=True), y.long())
            loss.backward()
            seen.append(type(loss))
            weights = list(self.trainable_weights)
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in weights], weights)
            return {"loss": loss}

    x, y = (torch.as_tensor(each) for each in batch("sequential", 7))
    data = torch.utils.data.TensorDataset(x, y)
    losses = []
    for model in both(lambda: compiled(Own())):
        loader = torch.utils.data.DataLoader(data, batch_size=4)
        losses.append(model.fit(loader, epochs=2, verbose=0, shuffle=False).history["loss"])

    assert {torch.Tensor, DTensor} == set(seen)
    assert_equal(*losses)


# -- what does not work


def test_compiled_steps_are_refused():
    """`jit_compile=True` is refused by name."""
    _, model = both(mlp)
    model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(lm.ScopeError, match="jit_compile=True does not work in layouts on torch"):
        model.train_on_batch(X, np.zeros((8, 64), "float32"))


def test_an_export_is_refused(tmp_path):
    """A model in layouts says how to export it; what is loaded from its file is plain."""
    _, model = both(mlp)
    with pytest.raises(lm.ScopeError, match="a model in layouts cannot be exported on torch"):
        model.export(tmp_path / "m.onnx", format="onnx")
    model.save(tmp_path / "m.keras")
    with pytest.warns(lm.LayoutMapWarning, match="is loaded outside of a scope"):
        loaded = keras.models.load_model(tmp_path / "m.keras", compile=False)

    assert not any(isinstance(v.value, DTensor) for v in loaded.variables)
    assert_same_weights(model, loaded, 0)


def test_modules_of_torch_are_refused():
    """A torch module in a Keras model is named by the plan, and by the scope that would make it."""
    linear = torch.nn.Linear(8, 8)

    def make_model():
        layers = [L.Dense(8, name="d1"), L.TorchModuleWrapper(linear, name="module")]
        return keras.Sequential([keras.Input((8,)), *layers])

    layout_map = lm.LayoutMap(lm.create_mesh(MESH), {r"d1\.kernel": (None, "model")})
    said = "module: a torch module inside a Keras layer cannot be sharded"

    assert [said] == [p.what for p in lm.plan(make_model, layout_map).problems if p.kind == "unsupported"]
    with pytest.raises(lm.PlanError, match=said):
        layout_map.build(make_model)


def test_devices_that_are_simulated_beside_a_gpu(monkeypatch):
    """Where the machine has a GPU, Keras makes tensors there: not for a model on simulated devices, nor beside it."""
    monkeypatch.setattr(keras_core, "DEFAULT_DEVICE", "cuda")  # without one, torch raises
    layout_map = lm.LayoutMap(lm.create_mesh(MESH), MLP_RULES)
    batch = X, np.zeros(8, "int32")

    assert lm.check_parity(mlp, layout_map, batch, batch_dim="batch").agrees
