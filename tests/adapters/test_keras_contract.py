"""The Keras adapter keeps the contract, with Keras on JAX."""

import inspect

import jax
import keras
import pytest
from keras_models import MODELS, RULES, batch

from layoutmap.adapters.keras.hooks import CommonVariable
from layoutmap.testing.adapter_contract import AdapterContract

pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")


def hooked():
    """Every attribute of Keras's classes that a scope could replace, as it is now."""
    kinds = (keras.Variable, keras.layers.Dense, keras.Sequential, keras.Model, keras.optimizers.Adam)
    classes = {base for kind in kinds for base in kind.__mro__ if base is not object}
    names = {f"{c.__module__}.{c.__qualname__}.{n}": value for c in classes for n, value in vars(c).items()}
    module = inspect.getmodule(CommonVariable)
    return names | {f"module.{name}": value for name, value in vars(module).items()}


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

    def num_arrays(self):
        return len(jax.live_arrays())

    def hooked(self):
        return hooked()
