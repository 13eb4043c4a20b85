"""`check_parity` agrees where the numbers agree, and names the first place where they do not."""

import textwrap

import jax
import keras
import numpy as np
import pytest

import layoutmap as lm
from layoutmap.adapters import get_adapter
from layoutmap.engines import get_engine
from layoutmap.inspecting.parity import ParityReport, ParityRow, compare_models
from layoutmap.scope import progress

PROCESSES = ("jax",)
L = keras.layers
pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")


MLP = {r"d1\.kernel": (None, "model"), r"d2\.kernel": ("model", None), r"d1\.bias": ("model",)}


def mlp(first=L.Dense, optimizer="sgd", compiled=True):
    layers = [keras.Input((8,)), first(16, name="d1", activation="tanh"), L.Dense(8, name="d2")]
    model = keras.Sequential(layers)
    if compiled:
        model.compile(optimizer=optimizer, loss="mse")
    return model


def make_map(rules, mesh="batch=2,model=4"):
    on = lm.create_mesh(mesh)
    cut = {p: tuple(s if s in on.dim_names else None for s in specs) for p, specs in rules.items()}
    return lm.LayoutMap(on, cut)


def numbers():
    random = np.random.default_rng(0)
    return tuple(random.normal(size=(8, 8)).astype("float32") for _ in "xy")


def test_a_report_of_what_agrees():
    """It has each stage, in order, with the largest difference; steps are those that were asked for."""
    report = lm.check_parity(mlp, make_map(MLP), numbers(), steps=2, batch_dim="batch")

    assert report.agrees
    assert 0.0 == report.worst("weights")
    stages = ["weights", "forward", "loss", "gradient", "step 1", "step 2"]
    assert stages == list(dict.fromkeys(row.stage for row in report.rows))
    assert 2 == len(report.losses)
    assert str(report).startswith("parity holds; largest relative differences:\n  weights   0\n  forward ")


def test_a_long_comparison_shows_its_stage_in_a_log(capsys, monkeypatch):
    """It is no terminal here. `progress=False` prints nothing."""
    monkeypatch.setattr(progress, "_LOG_SECONDS", 0.0)
    lm.check_parity(mlp, make_map(MLP), numbers(), steps=1)
    shown = capsys.readouterr().err.splitlines()
    lm.check_parity(mlp, make_map(MLP), numbers(), steps=1, progress=False)

    assert all(line.startswith("layoutmap: comparing the model with one device, ") for line in shown)
    assert {"weights", "forward", "loss", "gradient", "step 1"} <= {line.split(", ")[-1] for line in shown}
    assert "" == capsys.readouterr().err


def test_gradients_leave_no_tracer_in_a_model():
    """Trackers of several losses are made before JAX traces; they kept tracers, which processes could not compare."""
    x, y = numbers()

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.d1, self.d2 = L.Dense(8, name="d1"), L.Dense(8, name="d2")

        def call(self, x):
            return [self.d1(x), self.d2(x)]

    def make():
        model = Net()
        model.compile("sgd", ["mse", "mae"])
        return model

    adapter = get_adapter("keras")
    model = lm.build(make, make_map(MLP), batch_dim="batch", progress=False)
    adapter.create_lazy_variables(model, (x, [y, y]))
    adapter.gradients(model, (x, [y, y]))

    assert 3 <= len(model.metrics_variables)
    assert not any(isinstance(each._value, jax.core.Tracer) for each in model.metrics_variables)


def test_a_model_that_is_not_compiled():
    """Without steps, weights and the forward pass are compared, and nothing else."""
    report = lm.check_parity(lambda: mlp(compiled=False), make_map(MLP), numbers(), steps=0)

    assert {"weights", "forward"} == {row.stage for row in report.rows}
    assert report.agrees


@pytest.mark.parametrize("before", [1, 0])
def test_losses_of_outputs_without_names(before):
    """They are compared although Keras calls them by layers, whose numbers go on with each build."""
    keras.utils.clear_session()
    for _ in range(before):
        L.Dense(8)

    def make_model():
        x = keras.Input((8,))
        model = keras.Model(x, [L.Dense(8)(x) for _ in range(11)])  # a 9 is sorted behind a 10
        model.compile(keras.optimizers.SGD(0.1), ["mse", "mae"] + ["mse"] * 9)
        return model

    layout_map = lm.LayoutMap(
        lm.create_mesh("batch=2,model=4"), {r".*\.kernel": (None, "model")}, rest="replicated"
    )
    random = np.random.default_rng(0)
    x, *targets = random.normal(size=(12, 8, 8)).astype("float32")

    assert lm.check_parity(make_model, layout_map, (x, targets), batch_dim="batch", steps=1).agrees


def test_a_wrong_seed_is_found_at_its_variable():
    """A first value that differs is found bit for bit, by the variable's path, before anything is computed."""
    calls = []

    def make_model():
        calls.append(1)
        drawn = keras.initializers.GlorotUniform(seed=len(calls))
        layers = [keras.Input((8,)), L.Dense(16, name="d1"), L.Dense(8, name="d2", kernel_initializer=drawn)]
        return keras.Sequential(layers)

    with pytest.raises(lm.ParityError) as caught:
        lm.check_parity(make_model, make_map(MLP), numbers(), steps=0)

    what, differs, mesh, then, why, fix = str(caught.value).splitlines()
    assert "d2.kernel: the sharded model differs from the unsharded one, first in its weights" == what
    assert differs.startswith("  differs by  ")
    assert differs.endswith(" (allowed 0)")
    assert "  mesh        batch=2, model=4" == mesh
    assert then.startswith("  then        forward   output 0: differs by ")
    assert why == (
        "  why         initial values must be equal bit for bit, "
        "but the models used different seeds or initializers"
    )
    assert "  fix         call with raises=False and look at the report's rows" == fix


class WrongWhenSharded(L.Dense):
    """A planted bug: a layer that computes something else when its kernel is laid out."""

    def call(self, inputs):
        return super().call(inputs) * (1.001 if hasattr(self.kernel, "layout") else 1.0)


class LossWhenSharded(L.Dense):
    """A planted bug: a loss that counts twice when the kernel is laid out."""

    def call(self, inputs):
        outputs = super().call(inputs)
        self.add_loss((0.02 if hasattr(self.kernel, "layout") else 0.01) * keras.ops.sum(self.kernel**2))
        return outputs


class FasterWhenSharded(keras.optimizers.SGD):
    """A planted bug: an optimizer that steps further for variables that are laid out."""

    def update_step(self, gradient, variable, learning_rate):
        rate = learning_rate * (1.1 if hasattr(variable, "layout") else 1.0)
        super().update_step(gradient, variable, rate)


@jax.custom_gradient
def slope_of_copies(x):
    return x, lambda gradient: 4 * gradient


class GradientWhenSharded(L.Dense):
    """A planted bug: a gradient that adds up the copies which devices of another dim hold."""

    def call(self, inputs):
        kernel = self.kernel.value
        outputs = inputs @ (slope_of_copies(kernel) if hasattr(self.kernel, "layout") else kernel)
        return self.activation(outputs + self.bias)


def test_a_gradient_that_is_a_multiple():
    """A gradient that is off by a factor is named with the factor, and the dims of the mesh of that size."""
    report = lm.check_parity(
        lambda: mlp(GradientWhenSharded), make_map(MLP), numbers(), batch_dim="batch", raises=False
    )
    first = report.first_difference

    assert ("gradient", "d1.kernel") == (first.stage, first.name)
    assert 4.0 == pytest.approx(first.factor, 1e-5)
    assert str(first).endswith(", 4 times the unsharded one")
    with pytest.raises(
        lm.ParityError, match=r"4 times the unsharded one, the size of the mesh in model: a sum"
    ):
        lm.check_parity(lambda: mlp(GradientWhenSharded), make_map(MLP), numbers(), batch_dim="batch")


@pytest.mark.parametrize(
    ("make_model", "stage", "name"),
    [
        (lambda: mlp(WrongWhenSharded), "forward", "output 0"),
        (lambda: mlp(LossWhenSharded), "loss", "loss"),
        (lambda: mlp(optimizer=FasterWhenSharded(0.1)), "step 1", "d1.kernel"),
    ],
    ids=["forward", "loss", "step"],
)
def test_a_planted_bug_is_found_in_its_stage(make_model, stage, name):
    """Each kind of mistake is found in the stage where it first shows, and nowhere before."""
    report = lm.check_parity(make_model, make_map(MLP), numbers(), steps=1, raises=False)
    first = report.first_difference

    assert (stage, name) == (first.stage, first.name)
    assert not report.agrees
    assert str(report).startswith(f"parity fails, first at {first}; largest relative differences:\n")
    assert repr(report) == f"<ParityReport: {first}>"


class PartsTakenForWhole(L.Dense):
    """A planted wrong layout: each device has a part of a sum, and the layer says that each has all of it."""

    def call(self, inputs):
        layout = getattr(self.kernel, "layout", None)
        if layout is None:
            return super().call(inputs)
        mesh = get_engine("jax").make_native_layout(layout, 2).mesh
        specs = jax.sharding.PartitionSpec(None, "model"), jax.sharding.PartitionSpec("model", None)
        parts = jax.shard_map(
            lambda x, kernel: x @ kernel,
            mesh=mesh,
            in_specs=specs,
            out_specs=jax.sharding.PartitionSpec(),  # the truth is: to be summed over "model"
            check_vma=False,
        )
        return parts(inputs, self.kernel.value) + self.bias


def test_elements_are_left_out_whatever_layers_are_called():
    """Those of one comparison, in another one of the same model: layers without names have numbers in each build."""

    def made():
        model = keras.Sequential([keras.Input((8,)), L.Dense(8)])
        model.compile("sgd", "mse")
        return model

    adapter, batch = get_adapter("keras"), numbers()
    found = compare_models(adapter, made(), made(), batch, steps=1).only_rounding
    everywhere = {path: np.ones(mask.shape, bool) for path, mask in found.items()}
    report = compare_models(adapter, made(), made(), batch, steps=1, left_out=everywhere)
    counts = [row.left_out for row in report.rows if row.stage == "step 1" and row.name.endswith("kernel")]

    assert [64] == counts


def test_a_wrong_layout_of_an_activation_is_found():
    """An array that says of itself that it is placed otherwise than it is shows in a model's output."""

    def make_model():
        layers = [keras.Input((8,)), PartsTakenForWhole(16, name="d1"), L.Dense(8, name="d2")]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
        return model

    rules = {**MLP, r"d1\.kernel": ("model", None), r"d2\.kernel": (None, None)}
    report = lm.check_parity(make_model, make_map(rules), numbers(), steps=1, raises=False)

    assert ("forward", "output 0") == (report.first_difference.stage, report.first_difference.name)


def test_two_builds_that_differ_are_no_comparison():
    """A function that does not make the same model twice is refused, with the variables concerned."""
    calls = []

    def make_model():
        calls.append(1)
        layers = [keras.Input((8,)), *(L.Dense(8, name=f"d{i}") for i in range(len(calls)))]
        return keras.Sequential(layers)

    with pytest.raises(lm.ParityError) as caught:
        lm.check_parity(make_model, make_map({}), numbers(), steps=0)

    assert str(caught.value).startswith("the two builds created different variables\n")


def test_a_plan_that_does_not_fit_is_reported_as_such():
    """A layout map that does not fit the model raises its plan's problems, not a difference."""
    with pytest.raises(
        lm.PlanError, match=r"^d1\.kernel: a layout of rank 1 does not fit a tensor of rank 2\n"
    ):
        lm.check_parity(mlp, make_map({r"d1\.kernel": ("model",)}), numbers())


def test_a_nan_never_agrees():
    """A comparison that is not a number is a difference, and the first of them is reported."""
    rows = (ParityRow("weights", "a", 0.0, 0.0), ParityRow("forward", "output 0", float("nan"), 1e-5))
    report = ParityReport(rows, ())

    assert rows[1] is report.first_difference
    assert textwrap.dedent("""\
        parity fails, first at forward   output 0: differs by nan, allowed 1e-05; largest relative differences:
          weights   0
          forward   nan""") == str(report)
