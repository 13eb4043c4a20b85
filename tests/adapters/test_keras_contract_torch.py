"""The Keras adapter keeps the contract, with Keras on torch."""

import gc

import pytest
import torch
from keras_models import MODELS, RULES, batch, hooked, one_model

from layoutmap.testing.adapter_contract import ScopeContract

PROCESSES = ("torch",)
pytestmark = [
    pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning"),
    # Torch 2.13 and Keras 3.15 know only the older form of __array__.
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
    ),
]


class TestKerasOnTorch(ScopeContract):
    library = "keras"
    meshes = ("model=8", "batch=2,model=4", "batch=4,model=2")  # simulated devices run one after the other

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
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    def hooked(self):
        return hooked()
