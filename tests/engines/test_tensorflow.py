"""The TensorFlow engine keeps the contract, and what only TensorFlow can be asked."""

import gc

import numpy as np
import tensorflow as tf

from layoutmap.draws import Draw, Program
from layoutmap.layout import Layout
from layoutmap.mesh import Mesh
from layoutmap.testing.engine_contract import EngineContract

dtensor = tf.experimental.dtensor


def random_draw(shape, dtype, seed):
    key = tf.constant([seed, 0], tf.int32)

    def function(seed):
        drawn = tf.random.stateless_normal(shape, seed, dtype=dtype)
        return drawn * tf.cast(0.05, dtype) + tf.cast(0.013, dtype)

    return Draw(whole=lambda: function(key), program=Program(("normal", shape, dtype), key, function))


class TestTensorFlowEngine(EngineContract):
    engine_name = "tensorflow"
    cannot_hold = {(("x", "y"), "unsharded"): "one axis over several mesh dims"}

    def make_array(self, values):
        return tf.constant(values)

    def device_values(self, array):
        return {
            device.removeprefix("/job:localhost/replica:0/task:0/device:"): component.numpy()
            for device, component in zip(
                dtensor.fetch_layout(array).mesh.local_devices(), dtensor.unpack(array), strict=True
            )
        }

    def random_draw(self, shape, dtype, seed):
        return random_draw(shape, dtype, seed)

    def held(self, specs):
        return not any(isinstance(spec, tuple) for spec in specs)

    def num_live_arrays(self):
        return sum(isinstance(thing, tf.Tensor) for thing in gc.get_objects())
