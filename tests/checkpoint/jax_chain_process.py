"""One of several processes of JAX that save, load and train a model; run by test_jax_chain.py."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from checkpoint.chains import BATCH, Worker
from flax import nnx

import layoutmap as lm
from layoutmap.adapters.jax.steps import jit_step


class Net(nnx.Module):
    """Weights of several MB, random keys, and a count that is no weight."""

    def __init__(self, rngs, width=1024):
        self.up = nnx.Linear(8, width, rngs=rngs)
        self.middle = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(width, 8, rngs=rngs)
        self.drop = nnx.Dropout(0.0, rngs=rngs)
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.count[...] += 1
        return self.down(self.drop(jnp.tanh(self.middle(jnp.tanh(self.up(x))))))


class JaxWorker(Worker):
    """What this does in JAX."""

    def make_model(self):
        return Net(nnx.Rngs(self.seed))

    def make_optimizer(self, model):
        return self.layout_map.build_optimizer(optax.adamw(1e-2), model)

    def train(self, model, optimizer, steps):
        layout = lm.Layout(["batch", None], self.layout_map.mesh)

        @jit_step
        def step(model, optimizer, x):
            def loss(model):
                return ((model(x) - 1) ** 2).mean()

            value, gradients = nnx.value_and_grad(loss)(model)
            optimizer.update(model, gradients)
            return value

        return [float(step(model, optimizer, lm.dtensor.relayout(BATCH(n), layout))) for n in steps]

    def arrays(self, model, optimizer):
        leaves = jax.tree.leaves((nnx.state(model), nnx.state(optimizer)))
        leaves = [leaf for leaf in leaves if leaf.dtype == jnp.float32]
        return dict(enumerate(leaves))


def main():
    number, folder, port, size = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    if size > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=size, process_id=number)
    JaxWorker("jax", number, size, folder, *sys.argv[5:]).work()
    if size > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
