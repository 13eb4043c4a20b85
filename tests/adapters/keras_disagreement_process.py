"""One of two processes of Keras, on any backend, that do not do the same; run by test_keras_disagreements.py."""

import functools
import importlib
import os
import sys
import warnings
from pathlib import Path

import numpy as np
from disagreements import held, run

BACKEND = os.environ["KERAS_BACKEND"]
if BACKEND == "tensorflow":
    dtensor = importlib.import_module("tensorflow").experimental.dtensor
    dtensor.initialize_accelerator_system("CPU", num_logical_cpu_devices=1)
else:
    sys.modules["tensorflow"] = None  # Keras imports it to seed it

import keras  # noqa: E402 - TensorFlow's devices are made before

import layoutmap as lm  # noqa: E402

L = keras.layers
I = keras.initializers  # noqa: E741
RULES = {r"up\.kernel": (None, "model"), r"up\.bias": (None,), r"own\.held": (None,)}


class Own(L.Layer):
    """Holds a variable that is made of values."""

    def __init__(self, values):
        super().__init__(name="own")
        self.held = keras.Variable(values, name="held")

    def call(self, x):
        return x + self.held


def make(kernel="glorot_uniform", value=0.0, dropout=0.0, activation=None, more=()):
    up = L.Dense(8, activation, name="up", kernel_initializer=kernel)
    layers = [keras.Input((6,)), up, Own(np.full(8, value, np.float32)), *more]
    return keras.Sequential([*layers, L.Dropout(dropout)] if dropout else layers)


def laid_out(how, number, make=make, seed=0, rules=RULES, **options):
    keras.utils.set_random_seed(seed)
    layout_map = lm.LayoutMap(lm.create_mesh("model=2"), rules)
    if how == "apply":
        model = make()
        return layout_map.apply(model, **options)
    with layout_map.scope(**options):
        return make()


def of(model):
    return held(BACKEND, {v.path: v.value for v in model.variables})


def fitted(model, rows, optimizer="sgd", loss="mse", **options):
    model.compile(optimizer, loss, **options)
    x = np.arange(24, dtype=np.float32).reshape(4, 6) / 24 + rows
    model.fit(x, np.zeros((4, 8), np.float32), batch_size=4, epochs=1, verbose=0, shuffle=False)
    return of(model)


class Epochs(keras.utils.PyDataset):
    """Ten batches, of which the first of the second epoch is another one."""

    def __init__(self, change):
        super().__init__()
        self.change, self.epoch = change, 0

    def __len__(self):
        return 10

    def __getitem__(self, place):
        changes = self.change if (self.epoch, place) == (1, 0) else 0
        return np.full((4, 6), changes, np.float32), np.zeros((4, 8), np.float32)

    def on_epoch_end(self):
        self.epoch += 1


def fitted_late(model, number, calls):
    """Train, on other rows from the call before the last."""
    model.compile("sgd", "mse")
    x = np.ones((4 * calls, 6), np.float32)
    x[-4:] += number
    model.fit(x, np.zeros((4 * calls, 8), np.float32), batch_size=4, verbose=0, shuffle=False)
    return of(model)


def stepped_late(model, number, calls):
    """Train by hand, on other rows in the last call."""
    model.compile("sgd", "mse")
    for call in range(1, calls + 1):
        model.train_on_batch(
            np.full((4, 6), number * (call == calls), np.float32), np.zeros((4, 8), np.float32)
        )
    return of(model)


def fitted_in_epochs(model, number):
    model.compile("sgd", "mse")
    model.fit(Epochs(number), epochs=2, verbose=0, shuffle=False)
    return of(model)


def cases(number):
    """What this process does in each case."""
    found = {}
    for how in ("scope", "apply"):

        def add(name, how=how, fit=None, **options):
            def case():
                model = laid_out(how, number, **options)
                told = of(model) if fit is None else fitted(model, fit)
                return told if options.get("check_batches", True) else {"none": {"compared": 0}}

            found[f"{how} {name}"] = case

        add("same")
        add("seed", seed=7 + number)
        add("seed of one", make=lambda: make(I.GlorotUniform(seed=number)))
        add("argument", make=lambda: make(I.VarianceScaling(1.0 + number, seed=0)))
        add("kind", make=lambda: make((I.GlorotUniform, I.HeUniform)[number](seed=0)))
        add("constant", make=lambda: make(I.Constant([0.2, 0.9][number])))
        add("constant array", make=lambda: make(I.Constant(np.full((6, 8), number, np.float32))))
        add("own initializer", make=lambda: make(lambda s, dtype=None: np.full(s, number, np.float32)))
        add("global init", make=lambda: make(I.Orthogonal(1.0 + number, seed=0)))
        add("existing", make=lambda: make(value=float(number)))
        add("strict", strict=bool(number))
        add("batch_dim", batch_dim="model" if number else None)
        add("wrong batch_dim", batch_dim="none" if number else "model")
        add("unused rule", strict=True, rules=RULES | ({"none": (None,)} if number else {}))
        add("rows", fit=number)
        found[f"{how} rows of call 16"] = lambda how=how: fitted_late(laid_out(how, number), number, 16)
        found[f"{how} rows by hand"] = lambda how=how: stepped_late(laid_out(how, number), number, 9)
        found[f"{how} rows of an epoch"] = lambda how=how: fitted_in_epochs(laid_out(how, number), number)
        add("split rows", fit=number, batch_dim="model")
        add("rows that are not compared", fit=number, check_batches=False)
        add("masks", fit=0, seed=7 + number, make=lambda: make(dropout=0.5))
        add("same rows", fit=0, batch_dim="model")
    return found


# -- programs


THEIRS = """
import keras

class Scale(keras.layers.Layer):
    def call(self, x):
        return x * 2.0

def loss(y, y_pred):
    return keras.ops.mean((y - y_pred) ** 2)
"""
POWER = 2
power = 2


class Scale(L.Layer):
    """Reads what nothing but its code knows of."""

    def __init__(self, factor, place):
        super().__init__()
        self.factor, self.place = factor, place

    def call(self, x):
        return x * self.factor


class Power(L.Layer):
    """Reads a number of its module."""

    def call(self, x):
        return x**POWER


class Powers(L.Layer):
    """Reads what is no constant, and may change."""

    def call(self, x):
        return x**power


def skipping(order):
    """Two layers one after the other, and what goes around them both or around one."""
    x = keras.Input((6,))
    up = L.Dense(8, name="up")(x)
    down = L.Dense(8, name="down")(up)
    return keras.Model(x, L.Add(name="sum")([down, down if order else up]))


def closed_over(scale):
    def loss(y, y_pred):
        return keras.ops.mean((y - y_pred) ** 2) * scale

    return loss


def absolute(y, y_pred):
    return keras.ops.mean(keras.ops.abs(y - y_pred))


def weighted(weight, y, y_pred):
    return keras.ops.mean((y - y_pred) ** 2) * weight


def programs(number, folder):
    """What this process does in each case: it trains, and its program differs somewhere or nowhere."""
    one, other = ("gelu", "mse"), ("relu", "mae")
    activation, loss = other if number else one

    def fit(make=make, **options):
        return fitted(laid_out("scope", number, make), 0, **options)

    def named_anew():
        for _ in range(3 * number):  # so that Keras gives other numbers to what has no name
            make(more=[L.Dense(8), L.ReLU()])
        return fit(lambda: make(more=[L.Dense(8), L.ReLU()]))

    def from_another_path():
        path = folder / f"host{number}"
        path.mkdir(exist_ok=True)
        (path / "theirs.py").write_text("\n" * number + THEIRS)
        sys.path.insert(0, str(path))
        theirs = importlib.import_module("theirs")
        return fit(lambda: make(more=[theirs.Scale()]), loss=theirs.loss)

    def of_another_release():
        before, keras.__version__ = keras.__version__, f"3.{number}.0"
        try:
            return fit()
        finally:
            keras.__version__ = before

    def other_numbers():
        globals().update(POWER=2 + number)
        return fit(lambda: make(more=[Power()]))

    def other_variables():
        globals().update(power=2 + number)
        return fit(lambda: make(more=[Powers()]))

    def evaluated():
        model = laid_out("scope", number, lambda: make(activation=activation))
        model.compile(loss="mse")
        return {"loss": {"it": model.evaluate(np.ones((4, 6)), np.ones((4, 8)), verbose=0)}}

    def predicted():
        model = laid_out("scope", number, lambda: make(activation=activation))
        return {"sum": {"it": float(model.predict_on_batch(np.ones((4, 6))).sum())}}

    def compared_with_plain():
        def compiled():
            model = make()
            model.compile("sgd", "mse")
            return model

        layout_map = lm.LayoutMap(lm.create_mesh("model=2"), RULES)
        batch = np.full((4, 6), number, np.float32), np.zeros((4, 8), np.float32)
        return {"losses": str(lm.check_parity(compiled, layout_map, batch))}

    clipped = keras.optimizers.SGD(0.01, clipnorm=1.0 if number else None)
    scaled = [lambda x: x * 2.0, lambda x: x * 3.0][number]
    compiled = {  # only what JAX compiles shows it
        "lambda": lambda: fit(lambda: make(activation=scaled)),
        "closure": lambda: fit(loss=closed_over(1.0 + number)),
        "attribute": lambda: fit(lambda: make(more=[Scale(2.0 + number, "a")])),
        "constant of a module": other_numbers,
        "variable of a module": other_variables,
    }
    found = compiled if BACKEND == "jax" else {}
    found |= {
        "activation": lambda: fit(lambda: make(activation=activation)),
        "loss": lambda: fit(loss=loss),
        "clipnorm": lambda: fit(optimizer=clipped),
        "release": of_another_release,
        "evaluate": evaluated,
        "predict": predicted,
        "rate": lambda: fit(lambda: make(dropout=0.1 + 0.1 * number)),
        "way": lambda: fit(lambda: skipping(number)),
        "function": lambda: fit(loss=absolute if number else closed_over(1.0)),
        "alike": lambda: fit(
            lambda: make(activation=lambda x: keras.ops.tanh(x), more=[Scale(2.0, f"rank{number}")]),
            loss=functools.partial(weighted, 2.0),
            metrics=["mse", absolute],
        ),
        "names": named_anew,
        "paths": from_another_path,
        "batch of check_parity": compared_with_plain,
    }
    return {f"program {name}": case for name, case in found.items()}


def main():
    number, folder = int(sys.argv[1]), Path(sys.argv[2])
    warnings.simplefilter("ignore", lm.LayoutMapWarning)
    warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy keyword")
    if BACKEND == "jax":
        jax = importlib.import_module("jax")
        jax.distributed.initialize(sys.argv[3], 2, number, heartbeat_timeout_seconds=100)
    run(cases(number) | programs(number, folder), number, folder, *sys.argv[4:])
    if BACKEND == "jax":
        jax.distributed.shutdown()
    if BACKEND == "torch":
        importlib.import_module("torch").distributed.destroy_process_group()


if __name__ == "__main__":
    main()
