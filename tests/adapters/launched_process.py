"""One of several processes that train one model, each started by a launcher; run by test_launchers.py.

It is given the kind of model, what happens, its number, how many processes there are, and the address of the first.
"""

import os
import signal
import sys
import warnings

import numpy as np

BOUND = []
STEPS = 5


def join(kind, number, count, address):
    """Join the other processes, as a program does before it calls the library."""
    if kind == "torch":
        import torch.distributed as dist

        dist.init_process_group("gloo", f"tcp://{address}", rank=number, world_size=count)
    elif os.environ["KERAS_BACKEND"] == "tensorflow":
        from tensorflow.experimental import dtensor

        dtensor.initialize_accelerator_system("CPU", num_logical_cpu_devices=1)
    else:
        import jax

        jax.distributed.initialize(address, count, number, heartbeat_timeout_seconds=10)


def train_keras(mesh, after_step):
    """Train with `fit`."""
    sys.modules.setdefault("tensorflow", None)  # Keras imports it to seed it
    import keras

    import layoutmap as lm

    class AfterStep(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            after_step(batch)

    with lm.LayoutMap(lm.create_mesh(mesh), {"up.kernel": (None, "model")}, rest="replicated").scope():
        model = keras.Sequential([keras.Input((24,)), keras.layers.Dense(24, name="up")])
        model.compile("sgd", "mse")
    x = np.ones((4 * (STEPS + 1), 24), np.float32)
    model.fit(x, x, batch_size=4, epochs=1000, verbose=0, callbacks=[AfterStep()], shuffle=False)


def train_jit_step(mesh, after_step):
    """Train with a step of `lm.jit_step`."""
    import jax

    import layoutmap as lm

    layout_map = lm.LayoutMap(lm.create_mesh(mesh), {"kernel": (None, "model")})
    params = layout_map.build(lambda: {"kernel": jax.random.normal(jax.random.key(0), (8, 8))}, library="jax")

    @lm.jit_step(donate_argnums=0)
    def step(params, x):
        loss, gradients = jax.value_and_grad(lambda p: ((x @ p["kernel"]) ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), loss

    for at in range(10**6):
        params, loss = step(params, np.ones((4, 8), np.float32))
        float(loss)
        after_step(at)


def train_torch(mesh, after_step):
    """Train with a loop of the program."""
    import torch

    import layoutmap as lm

    torch.manual_seed(0)
    with lm.LayoutMap(lm.create_mesh(mesh), {"weight": ("model", None)}, rest="replicated").scope():
        model = torch.nn.Linear(96, 96)
    for at in range(10**6):
        model(torch.ones(4, 96)).sum().backward()
        after_step(at)


def note_bound(event, arguments):
    """Note each address that Python binds a socket to; `listen` raises no event of its own, and needs `bind`."""
    if event == "socket.bind":
        BOUND.append(str(arguments[1]))


def main():
    kind, what, number, count = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5])
    number = int(os.environ.get("RANK", number))
    address = sys.argv[5] if len(sys.argv) > 5 else f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    join(kind, number, count, address)

    import layoutmap as lm

    warnings.simplefilter("ignore", lm.LayoutMapWarning)

    def after_step(step):
        if what == "listens" and step == 1:
            print(f"bound: {BOUND}", flush=True)
            os._exit(0)
        if what == "killed" and step == STEPS and number == count - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    if what == "listens":
        sys.addaudithook(note_bound)
    train = {"keras": train_keras, "jit_step": train_jit_step, "torch": train_torch}[kind]
    train(f"model={count}", after_step)


if __name__ == "__main__":
    main()
