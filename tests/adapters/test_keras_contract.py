"""The Keras adapter keeps the contract, with Keras on JAX."""

import jax
from keras_contract import KerasContract
from quiet import OF_MAPS

pytestmark = OF_MAPS


class TestKerasOnJax(KerasContract):
    def num_arrays(self):
        return len(jax.live_arrays())
