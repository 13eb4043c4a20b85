"""The Keras adapter keeps the contract, with Keras on TensorFlow."""

import gc

import pytest
import tensorflow as tf
from keras_models import MODELS, RULES, batch, hooked, one_model

from layoutmap.testing.adapter_contract import ScopeContract

PROCESSES = ("tensorflow",)
pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")


class TestKerasOnTensorFlow(ScopeContract):
    library = "keras"
    meshes = ("model=8", "batch=2,model=4", "batch=4,model=2")  # DTensor compiles slowly

    def models(self):
        return MODELS

    def one_model(self):
        return one_model()

    def rules(self, name):
        return RULES[name]

    def batch(self, name):
        return batch(name)

    def array_of(self, variable):
        return variable.value

    def num_arrays(self):
        return sum(isinstance(thing, (tf.Tensor, tf.Variable)) for thing in gc.get_objects())

    def hooked(self):
        return hooked()
