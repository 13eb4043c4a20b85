"""One of two processes that train together, the second of which ends before the first; run by test_processes_end.py."""

import os
import signal
import sys
import time
import warnings

import numpy as np

import layoutmap as lm

STEPS = 5


def with_keras(number, end):
    """Train with `fit`, for ever unless nothing ends it."""
    sys.modules["tensorflow"] = None  # Keras imports it to seed it
    import keras

    class Ends(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == STEPS and number:
                end()

    with lm.LayoutMap(lm.create_mesh("model=2"), {"up.kernel": (None, "model")}, rest="replicated").scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, name="up")])
        model.compile("sgd", "mse")
    x = np.ones((100, 8), np.float32)
    callbacks = [Ends()] if end else []
    model.fit(x, x, batch_size=4, epochs=10**6 if end else 1, verbose=0, callbacks=callbacks, shuffle=False)
    return model


def with_jit_step(number, end):
    """Train with a step of one's own."""
    import jax

    layout_map = lm.LayoutMap(lm.create_mesh("model=2"), {"kernel": (None, "model")})
    params = layout_map.build(lambda: {"kernel": jax.random.normal(jax.random.key(0), (8, 8))}, library="jax")

    @lm.jit_step(donate_argnums=0)
    def step(params, x):
        loss, gradients = jax.value_and_grad(lambda p: ((x @ p["kernel"]) ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), loss

    for at in range(10**6 if end else STEPS):
        params, loss = step(params, np.ones((4, 8), np.float32))
        float(loss)
        if at == STEPS and number and end:
            end()
    return params, step


def with_torch(number, end):
    """Train with a loop of one's own."""
    import torch

    torch.manual_seed(0)
    with lm.LayoutMap(lm.create_mesh("model=2"), {"weight": ("model", None)}, rest="replicated").scope():
        model = torch.nn.Linear(64, 64)
    for at in range(10**6 if end else STEPS):
        model(torch.ones(4, 64)).sum().backward()
        if at == STEPS and number and end:
            end()
    return model


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def exits():
    sys.exit(3)


def raises():
    raise ValueError("no more disk")


def main():
    kind, how, number, address = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    warnings.simplefilter("ignore", lm.LayoutMapWarning)
    if kind == "torch":
        import torch.distributed as dist

        dist.init_process_group("gloo", f"tcp://{address}", rank=number, world_size=2)
    else:
        import jax

        jax.distributed.initialize(address, 2, number)
    train = {"keras": with_keras, "jit_step": with_jit_step, "torch": with_torch}[kind]
    kept = train(number, {"killed": killed, "exits": exits, "raises": raises, "staggered": None}[how])
    time.sleep(0 if number else 6.5)  # longer than a process has where it must end
    print("to the end", flush=True)
    del kept


if __name__ == "__main__":
    main()
