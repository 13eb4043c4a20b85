"""`check_parity` of models with a `train_step` of their own: what it compares, and what it says that it did not."""

import importlib

import keras
import numpy as np
import pytest
from quiet import OF_ARRAYS, OF_MAPS

import layoutmap as lm

PROCESSES = ("jax", "tensorflow", "torch")
L = keras.layers
pytestmark = [OF_MAPS, OF_ARRAYS]


class Own(keras.Model):
    """A model whose step knows its loss alone; the bias before the normalization has a gradient of rounding only."""

    log = "loss"
    by_hand = False

    def __init__(self):
        super().__init__()
        self.d1, self.bn, self.d2 = L.Dense(16), L.BatchNormalization(), L.Dense(8)

    def call(self, x, training=None):
        return self.d2(self.bn(self.d1(x), training=training))

    def train_step(self, *args):
        return getattr(self, f"{keras.backend.backend()}_step")(*args)

    def error(self, x, y):
        return keras.ops.mean((self(x, training=True) - y) ** 2)

    def jax_step(self, state, data):
        jax = importlib.import_module("jax")
        trainable, other, slots, metrics = state

        def loss_of(trainable):
            out, new = self.stateless_call(trainable, other, data[0], training=True)
            return keras.ops.mean((out - data[1]) ** 2), new

        (loss, other), grads = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        if self.by_hand:
            trainable = [v - 0.1 * g for v, g in zip(trainable, grads, strict=True)]
        else:
            trainable, slots = self.optimizer.stateless_apply(slots, grads, trainable)
        return {self.log: loss}, (trainable, other, slots, metrics)

    def tensorflow_step(self, data):
        with importlib.import_module("tensorflow").GradientTape() as tape:
            loss = self.error(*data[:2])
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, [w.value for w in weights]), weights)
        return {self.log: loss}

    def torch_step(self, data):
        self.zero_grad()
        loss = self.error(*data[:2])
        loss.backward()
        weights = self.trainable_variables
        with importlib.import_module("torch").no_grad():
            self.optimizer.apply([w.value.grad for w in weights], weights)
        return {self.log: loss}


def check(**attributes):
    def make_model():
        model = Own()
        for name, value in attributes.items():
            setattr(model, name, value)
        model(keras.Input((8,)))
        model.compile("adam")
        return model

    rules = {r"d1\.kernel": (None, "model"), r"d2\.kernel": ("model", None)}
    random = np.random.default_rng(0)
    batch = tuple(random.normal(size=(8, 8)).astype("float32") for _ in "xy")
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), rules)
    return lm.check_parity(make_model, layout_map, batch, steps=1, batch_dim="batch")


def test_gradients_are_those_that_the_step_passes_to_the_optimizer():
    """A step without a compiled loss is compared in its loss and gradients, and what is only rounding is left out."""
    report = check()

    gradients = [row for row in report.rows if row.stage == "gradient"]
    assert ["d1.kernel", "d1.bias", "bn.gamma", "bn.beta", "d2.kernel", "d2.bias"] == [
        r.name for r in gradients
    ]
    assert 0.5 < report.losses[0][0]
    assert {"loss"} == {row.name for row in report.rows if row.stage == "loss"}
    assert 0 < sum(row.left_out for row in report.rows if row.name == "d1.bias")
    assert () == report.not_compared


def test_a_step_that_logs_no_loss_is_compared_in_what_it_logs():
    """Numbers of any name are compared; there are no losses to report."""
    report = check(log="mean_error")

    assert {"mean_error"} == {row.name for row in report.rows if row.stage == "loss"}
    assert () == report.losses


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="the same on each backend")
def test_gradients_that_no_optimizer_gets_are_named_as_not_compared():
    """A step that updates weights by hand is compared in its weights, and the report says what was not."""
    report = check(by_hand=True)

    assert [] == [row for row in report.rows if row.stage == "gradient"]
    (why,) = report.not_compared
    assert why == (
        "gradients of d1.kernel, d1.bias, bn.gamma and 3 more, "
        "since the model's train_step passes them to no optimizer of the model"
    )
    assert f"\n  not compared: {why}" in str(report)
