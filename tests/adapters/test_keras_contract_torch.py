"""The Keras adapter keeps the contract, with Keras on torch."""

import gc

import torch
from keras_contract import KerasContract
from keras_models import one_model
from quiet import OF_ARRAYS, OF_MAPS

PROCESSES = ("torch",)
pytestmark = [OF_MAPS, OF_ARRAYS]


class TestKerasOnTorch(KerasContract):
    meshes = ("model=8", "batch=2,model=4", "batch=4,model=2")  # simulated devices run one after the other

    def get_first_model(self):
        return one_model()

    def num_arrays(self):
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
