"""One of two processes of JAX, with four devices each, that train with optax; run by test_jit_step.py."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from optax_optimizers import MESH, laid_out, misplaced, plain_params
from test_jit_step import batch, make_step

import layoutmap as lm


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
    (folder / f"{number}.json").write_text(json.dumps({"losses": losses, "misplaced": misplaced(params)}))
    np.savez(folder / f"{number}.npz")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
