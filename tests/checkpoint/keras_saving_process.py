"""One of two processes of Keras that train, save, and go on from what was saved; run by test_keras_saving.py."""

import json
import os
import sys
import time
import warnings
from pathlib import Path

import keras
import numpy as np

import layoutmap as lm


def make():
    keras.utils.set_random_seed(3)
    layers = [
        keras.layers.Dense(16, name="up"),
        keras.layers.Dropout(0.5, seed=5),
        keras.layers.Dense(8, name="down"),
    ]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile("adam", "mse")
    return model


def losses(model):
    x = np.random.default_rng(0).normal(size=(8, 8)).astype("float32")
    return model.fit(x, x, batch_size=8, epochs=2, verbose=0, shuffle=False).history["loss"]


def main():
    number, folder, port = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    warnings.simplefilter("ignore", lm.LayoutMapWarning)
    if keras.backend.backend() == "jax":
        import jax

        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=number)
    elif keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        tf.experimental.dtensor.initialize_accelerator_system("CPU", num_logical_cpu_devices=1)
    else:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {"RANK": str(number), "WORLD_SIZE": "2"}
    mesh = lm.create_mesh("batch=1,model=2")
    columns = lm.LayoutMap(mesh, {r"up\.kernel": (None, "model"), r"down\.kernel": ("model", None)})
    rows = lm.LayoutMap(mesh, {r"up\.kernel": ("model", None)})
    model = columns.build(make, batch_dim="batch")
    losses(model)
    with lm.CheckpointManager(folder / "steps") as manager:
        manager.save(model, 2)
    told = {"on": losses(model)}
    told["same"] = losses(lm.load(make, folder / "steps", layout_map=columns, batch_dim="batch"))
    told["other"] = losses(lm.load(make, folder / "steps", layout_map=rows, batch_dim="batch"))
    there = rows.build(make, batch_dim="batch")
    told["existing"] = losses(lm.load(there, folder / "steps"))
    told["plain"] = losses(lm.load(make(), folder / "steps"))
    (folder / f"{number}.json").write_text(json.dumps(told))
    while not (folder / f"{1 - number}.json").exists():  # JAX ends a process whose first one has ended
        time.sleep(0.05)
    os._exit(0)


if __name__ == "__main__":
    main()
