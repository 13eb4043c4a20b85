"""One of two processes of TensorFlow or torch that train a Keras model, each with the whole batch.

Run by test_keras_processes_same_batch.py.
"""

import importlib
import json
import os
import random
import sys
import warnings
from pathlib import Path

import numpy as np

ON_TORCH = os.environ["KERAS_BACKEND"] == "torch"
if ON_TORCH:
    sys.modules["tensorflow"] = None  # Keras imports it to seed it
else:
    dtensor = importlib.import_module("tensorflow").experimental.dtensor
    dtensor.initialize_accelerator_system("CPU", num_logical_cpu_devices=1)

import keras  # noqa: E402 - TensorFlow's devices are made before

import layoutmap as lm  # noqa: E402
from layoutmap.core.errors import LayoutMapError  # noqa: E402

L = keras.layers
RULES = {r"up\.kernel": (None, "all"), r"down\.kernel": ("all", None)}


def make_model(activation="relu"):
    layers = [
        keras.Input((6,)),
        L.Dense(8, name="up", activation=activation),
        L.Dropout(0.5, name="drop"),
        L.Dense(4, name="down"),
    ]
    model = keras.Sequential(layers)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def laid_out(rules=RULES, **options):
    """The model in both processes: the batch is sharded over them, and the weights over the same dim."""
    with lm.LayoutMap(lm.create_mesh("all=2"), rules).scope(batch_dim="all"):
        return make_model(**options)


def trained(model, x, y):
    keras.utils.set_random_seed(2)  # on torch a dropout draws from the process's generator
    losses = model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False).history["loss"]
    return {"losses": losses, "predict": model.predict(x, verbose=0).tolist()}


def refusal(function):
    try:
        function()
    except LayoutMapError as error:
        return str(error)
    return ""


def main():
    number, folder = int(sys.argv[1]), Path(sys.argv[2])
    warnings.simplefilter("ignore", lm.LayoutMapWarning)
    warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy keyword")
    numbers = np.random.default_rng(0)
    x, y = numbers.normal(size=(8, 6)).astype("float32"), numbers.integers(0, 4, (8,), "int32")
    random.seed(number)
    unseeded = [float(np.abs(value).sum()) for value in laid_out().get_weights()]
    models = []
    for make in (make_model, laid_out):
        keras.utils.set_random_seed(1)
        models.append(make())
    first = [model.get_weights() for model in models]
    told = {
        "unseeded": unseeded,
        "first": all(a.tobytes() == b.tobytes() for a, b in zip(*first, strict=True)),
        "expected": trained(models[0], x, y),
        "actual": trained(models[1], x, y),
        "plan": refusal(lambda: laid_out(RULES | ({r"up\.bias": ("all",)} if number else {}))),
        "program": refusal(lambda: trained(laid_out(activation=("relu", "gelu")[number]), x, y)),
        "batch": refusal(lambda: models[1].train_on_batch(x + number, y)),
    }
    (folder / f"{number}.json").write_text(json.dumps(told))
    if ON_TORCH:
        importlib.import_module("torch").distributed.destroy_process_group()


if __name__ == "__main__":
    main()
