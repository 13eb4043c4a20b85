"""The Keras adapter keeps the contract, with Keras on JAX."""

import inspect

import keras
import pytest
from keras_models import MODELS, RULES, batch

from layoutmap.adapters.keras.hooks import CommonVariable
from layoutmap.testing.adapter_contract import AdapterContract

pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")


class TestKerasOnJax(AdapterContract):
    library = "keras"

    def models(self):
        return MODELS

    def rules(self, name):
        return RULES[name]

    def batch(self, name):
        return batch(name)

    def array_of(self, variable):
        return variable.value

    def hooked(self):
        classes = {
            base
            for kind in (
                keras.Variable,
                keras.layers.Dense,
                keras.Sequential,
                keras.Model,
                keras.optimizers.Adam,
            )
            for base in kind.__mro__
            if base is not object
        }
        names = {
            f"{c.__module__}.{c.__qualname__}.{name}": value
            for c in classes
            for name, value in vars(c).items()
        }
        module = inspect.getmodule(CommonVariable)
        return names | {f"module.{name}": value for name, value in vars(module).items()}
