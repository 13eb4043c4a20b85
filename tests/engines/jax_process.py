"""One of two processes of JAX; run by test_jax_processes.py."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from several_processes import SHAPE, Framework, work

from layoutmap.engines.jax.engine import engine


def normal(seed):
    return jax.random.normal(seed, SHAPE) * 0.3 + 0.1


def main():
    number, folder, address = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    jax.distributed.initialize(address, num_processes=2, process_id=number)
    framework = Framework(
        seed=lambda number: jnp.array([number, 0], jnp.uint32),
        normal=normal,
        summed=lambda seed: normal(seed) / jnp.linalg.norm(normal(seed)),
        plain=jnp.asarray,
        # XLA's relayout over several CPU processes changes NaNs of bfloat16: the signalling ones become quiet.
        dtypes=("float32", "bool", "int8", "uint32"),
        cuts_over_several_dims=True,
    )
    work(engine(), framework, number, folder)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
