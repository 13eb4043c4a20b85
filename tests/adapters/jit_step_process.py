"""One of two processes of JAX, with four devices each, that train with optax; run by test_jit_step.py."""

import functools
import json
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from optax_optimizers import MESH, laid_out, misplaced, plain_params
from test_jit_step import batch, make_step

import layoutmap as lm
from layoutmap.core.errors import LayoutMapError


def update(params, gradients):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def other_update(params, gradients):
    return jax.tree.map(lambda p, g: p - 0.2 * g, params, gradients)


def refusals(number, mesh):
    """What is said where the processes run different steps, and nothing where they run one."""

    def run(step):
        params = laid_out({"kernel": np.ones((4, 8), np.float32)}, mesh)
        try:
            lm.jit_step(step)(params, np.ones((2, 4), np.float32))
        except LayoutMapError as error:
            return str(error)
        return ""

    def step_of(activation=jax.nn.gelu, tx=None, update=update, log=None):
        def step(params, x):
            if log:
                log()
            gradients = jax.grad(lambda p: (activation(x @ p["kernel"]) ** 2).mean())(params)
            return (
                update(params, gradients) if tx is None else tx.update(gradients, tx.init(params), params)[0]
            )

        return step

    def scaled(params, x):
        return jax.tree.map(lambda p: p * (1.0 + jax.process_index()), params)

    def said():
        return f"process {number} traces"

    return {
        "activation": run(step_of((jax.nn.gelu, jax.nn.relu)[number])),
        "learning rate": run(step_of(tx=optax.sgd((0.1, 0.2)[number]))),
        "line": run(step_of(update=(update, other_update)[number])),
        "compiled": run(scaled),
        "alike": run(functools.partial(step_of(log=said, activation=lambda x: jax.nn.gelu(x)))),
    }


def main():
    number, folder, address = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    jax.distributed.initialize(address, 2, number)
    layout_map, tx = lm.LayoutMap(lm.create_mesh(MESH)), optax.adamw(1e-2)
    params = laid_out(plain_params(), layout_map.mesh)
    state = layout_map.build_optimizer(tx, params, zero_dim="batch")
    step = lm.jit_step(make_step(tx), donate_argnums=(0, 1), batch_dim="batch")
    losses = []
    for at in range(2):
        params, state, metrics = step(params, state, batch(at)[2 * number : 2 * number + 2])
        losses.append(float(metrics["loss"]))
    told = {"losses": losses, "misplaced": misplaced(params), "refusals": refusals(number, layout_map.mesh)}
    (folder / f"{number}.json").write_text(json.dumps(told))
    np.savez(folder / f"{number}.npz")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
