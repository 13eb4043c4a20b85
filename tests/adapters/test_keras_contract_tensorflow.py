"""The Keras adapter keeps the contract, with Keras on TensorFlow."""

import gc

import tensorflow as tf
from keras_contract import KerasContract
from keras_models import one_model
from quiet import OF_MAPS

PROCESSES = ("tensorflow",)
pytestmark = OF_MAPS


class TestKerasOnTensorFlow(KerasContract):
    meshes = ("model=8", "batch=2,model=4", "batch=4,model=2")  # DTensor compiles slowly

    def get_first_model(self):
        return one_model()

    def num_arrays(self):
        return sum(isinstance(thing, (tf.Tensor, tf.Variable)) for thing in gc.get_objects())
