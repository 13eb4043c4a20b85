"""One of two processes of Keras, on any backend, that do not do the same; run by test_keras_disagreements.py."""

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


def make(kernel="glorot_uniform", value=0.0, dropout=0.0):
    up = L.Dense(8, name="up", kernel_initializer=kernel)
    layers = [keras.Input((6,)), up, Own(np.full(8, value, np.float32))]
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


def fitted(model, rows):
    model.compile("sgd", "mse")
    x = np.arange(24, dtype=np.float32).reshape(4, 6) / 24 + rows
    model.fit(x, np.zeros((4, 8), np.float32), batch_size=4, epochs=1, verbose=0, shuffle=False)
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
        add("split rows", fit=number, batch_dim="model")
        add("rows that are not compared", fit=number, check_batches=False)
        add("masks", fit=0, seed=7 + number, make=lambda: make(dropout=0.5))
        add("same rows", fit=0, batch_dim="model")
    return found


def main():
    number, folder = int(sys.argv[1]), Path(sys.argv[2])
    warnings.simplefilter("ignore", lm.LayoutMapWarning)
    warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy keyword")
    if BACKEND == "jax":
        jax = importlib.import_module("jax")
        jax.distributed.initialize(sys.argv[3], 2, number, heartbeat_timeout_seconds=100)
    run(cases(number), number, folder, *sys.argv[4:])
    if BACKEND == "jax":
        jax.distributed.shutdown()
    if BACKEND == "torch":
        importlib.import_module("torch").distributed.destroy_process_group()


if __name__ == "__main__":
    main()
