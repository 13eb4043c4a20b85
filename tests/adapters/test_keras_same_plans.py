"""A model has one plan: whenever and however often it is made, and whatever was thrown away on the way."""

import contextlib
import gc
import json
import subprocess
import sys
import textwrap
import weakref

import keras
import numpy as np
import pytest

import layoutmap as lm

PROCESSES = ("jax", "tensorflow", "torch")
pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
L = keras.layers


@contextlib.contextmanager
def without_collecting():
    """Nothing is collected in here but what is asked for."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def rules():
    return lm.LayoutMap(lm.create_mesh("model=2"), {r".*kernel$": (None, "model")})


def paths(plan):
    return [a.variable.path for a in plan.assignments]


def small(**options):
    return keras.Sequential([keras.Input((4,)), L.Dense(4, name="d")], **options)


class Sampler:
    """Holds random state, and is no layer."""

    def __init__(self):
        self.seed_generator = keras.random.SeedGenerator(3)


class Generating(keras.Model):
    """A model whose `compile` takes more than Keras's, and is called twice."""

    def __init__(self):
        super().__init__()
        self.d = L.Dense(4)
        self.d.build((None, 4))
        self.compile(optimizer="sgd", loss="mse", metrics=[keras.metrics.MeanSquaredError()])

    def compile(self, *args, sampler=None, **options):
        super().compile(*args, **options)
        self.sampler = [sampler or Sampler()]

    def call(self, x):
        return self.d(x)


class Numbered(keras.metrics.Metric):
    """A metric that has no name of its own."""

    def __init__(self):
        super().__init__()
        self.count = self.add_variable(shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(1.0)

    def result(self):
        return self.count


class Odd(L.Layer):
    """A weight that has no name and is no attribute."""

    def build(self, input_shape):
        self.add_weight(shape=(4,), initializer="ones")

    def call(self, x):
        return x


def generating():
    model = Generating()
    model.compile(
        optimizer="adam", loss="mse", metrics=[keras.metrics.MeanAbsoluteError()], sampler=Sampler()
    )
    return model


def numbered():
    x = keras.Input((4,))
    model = keras.Model(x, L.Dense(4)(Odd()(x)))
    model.compile(optimizer="nadam", loss="mse", metrics=[Numbered()])
    model.free = {"variable": [keras.Variable(np.zeros(2, "float32"))]}
    return model


def from_others():
    """A model that shares layers with one that is thrown away, beside a copied layer."""
    x = keras.Input((1, 4))
    y = L.Bidirectional(L.SimpleRNN(4, dropout=0.1, unroll=True))(x)
    first = keras.Model(x, L.Dense(4)(y))
    keras.optimizers.Adam()
    return keras.Model(x, L.Dense(2)(first.output))


MAKERS = {each.__name__: each for each in (generating, numbered, from_others)}


@pytest.mark.parametrize("name", MAKERS)
def test_three_plans_of_one_model_are_equal(name):
    """Whatever numbers Keras gives and whenever Python collects garbage, variables have the same paths."""
    plans = []
    for number in range(3):
        keras.random.SeedGenerator(), Numbered(), small()
        with without_collecting() if number else contextlib.nullcontext():
            plans.append(lm.plan(MAKERS[name], rules()))

    assert [plans[0].fingerprint] * 3 == [plan.fingerprint for plan in plans]
    assert [paths(plans[0])] * 3 == [paths(plan) for plan in plans]


def test_state_goes_by_the_attribute_that_holds_it():
    """The generator of a sampler that is no layer is random state of its model, by the way to it."""
    plan = lm.plan(generating, rules())

    assert ["sampler.0.seed_generator.state"] == [
        a.variable.path for a in plan.assignments if a.variable.kind == "rng"
    ]
    assert {"generating"} == {a.variable.model for a in plan.assignments if a.variable.kind == "rng"}


def test_the_slots_of_a_variable_made_from_an_array_follow_it():
    """Where a weight was given its value, a plan knows its optimizer slots, too."""
    plan = lm.plan(numbered, lm.LayoutMap(lm.create_mesh("model=2"), {r"free\..*": ("model",)}))

    assert plan["free.variable.0"].layout == plan["optimizer.free.variable.0.momentum"].layout


def test_what_a_second_compile_replaced_is_in_no_plan():
    """A plan has the optimizer and the metrics that the model has, and their names have no numbers."""

    def twice():
        model = small()
        first = keras.optimizers.Adam()
        model.compile(first, "mse", metrics=["mae"])
        model.compile("sgd", "mse", metrics=["mse"])
        model.first = lambda: first  # it is alive
        return model

    def once():
        model = small()
        model.compile("sgd", "mse", metrics=["mse"])
        return model

    with without_collecting():
        assert paths(lm.plan(once, rules())) == paths(lm.plan(twice, rules()))


def test_a_second_compile_frees_the_slots_of_the_first():
    """After fit, compile, fit the plan has as many slots as before, and the old ones take no memory, as in Keras."""
    x = np.zeros((4, 4), "float32")
    with rules().scope() as scope:
        model = small()
    model.compile("adam", "mse")
    model.fit(x, x, verbose=0)
    expected = scope.plan.memory.slots, paths(scope.plan), scope.plan.fingerprint
    with without_collecting():
        replaced = weakref.ref(model.optimizer)
        model.compile("adam", "mse")
        left = replaced()
        model.fit(x, x, verbose=0)

    assert expected == (scope.plan.memory.slots, paths(scope.plan), scope.plan.fingerprint)
    assert left is None


MODULE = """
import sys
sys.path.append({folder!r})
from test_keras_same_plans import generating as make
"""


@pytest.mark.long  # for the other process; the numbers of this one are what the tests above are about
@pytest.mark.parametrize("name", ["generating"])
def test_the_command_line_has_the_same_plan(name, tmp_path):
    """The plan that another process prints is that of this one, where other models were made before."""
    folder = str(__import__("pathlib").Path(__file__).parent)
    (tmp_path / "same_models.py").write_text(textwrap.dedent(MODULE.format(folder=folder)))
    (tmp_path / "rules.yaml").write_text(rules().to_yaml())
    for _ in range(2):
        MAKERS[name]()
    plan = lm.plan(MAKERS[name], rules())
    command = [
        sys.executable,
        "-m",
        "layoutmap",
        "plan",
        "same_models:make",
        "--rules",
        "rules.yaml",
        "--json",
        "-",
    ]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert json.loads(plan.to_json()) == json.loads(printed.stdout)
