"""One of two processes of JAX; run by test_jax_processes.py."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from several_processes import SHAPE, Framework, work

import layoutmap as lm
from layoutmap.engines.jax.devices import make_named_sharding
from layoutmap.engines.jax.engine import engine


def normal(seed):
    return jax.random.normal(seed, SHAPE) * 0.3 + 0.1


def check_corrections():
    """Over two processes, too, the gradient of a depthwise kernel is one device's, and so is that of pooling."""
    rng = np.random.default_rng(0)
    kernel, x = rng.normal(size=(3, 3, 1, 8)), rng.normal(size=(8, 8, 8, 8))

    def loss(kernel, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=8
        )
        return (jax.lax.reduce_window(y, -np.inf, jax.lax.max, (1, 3, 3, 1), (1,) * 4, "SAME") ** 2).sum()

    mesh = lm.create_mesh("batch=2,model=4")
    rows, everywhere = (
        make_named_sharding(lm.Layout([dim, None, None, None], mesh)) for dim in ("batch", None)
    )
    lines = make_named_sharding(lm.Layout(["batch", "model", None, None], mesh))
    kernel, x = np.float32(kernel), np.float32(x)
    expected = jax.jit(jax.grad(loss, (0, 1)))(kernel, x)
    for sharding in (rows, lines):
        placed = (
            jax.make_array_from_callback(each.shape, where, each.__getitem__)
            for each, where in ((kernel, everywhere), (x, sharding))
        )
        found = jax.jit(jax.grad(loss, (0, 1)), out_shardings=(everywhere, everywhere))(*placed)
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_allclose(other.addressable_data(0), one, rtol=1e-4, atol=1e-4)


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
    check_corrections()
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
