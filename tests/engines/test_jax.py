"""The JAX engine keeps the contract, and what only JAX can be asked."""

import jax
import jax.numpy as jnp
import numpy as np

from layoutmap.draws import Draw, Program
from layoutmap.testing.engine_contract import EngineContract


def normal(seed, shape, dtype):
    """A program that rounds at each operation: compiled as one it would round less often."""
    return jax.random.normal(seed, shape, dtype) * np.asarray(0.05, dtype) + np.asarray(0.013, dtype)


def random_draw(shape, dtype, seed):
    key = jnp.array([seed, 0], jnp.uint32)

    def function(seed):
        return normal(seed, shape, dtype)

    return Draw(whole=lambda: function(key), program=Program(("normal", shape, dtype), key, function))


class TestJaxEngine(EngineContract):
    engine_name = "jax"

    def make_array(self, values):
        return jnp.asarray(values)

    def device_values(self, array):
        return {
            f"{shard.device.platform.upper()}:{shard.device.id}": np.asarray(shard.data)
            for shard in array.addressable_shards
        }

    def random_draw(self, shape, dtype, seed):
        return random_draw(shape, dtype, seed)

    def num_live_arrays(self):
        return len(jax.live_arrays())
