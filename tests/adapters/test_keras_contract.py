"""The Keras adapter keeps the contract, with Keras on JAX."""

import jax
import pytest
from keras_models import MODELS, RULES, batch, hooked

from layoutmap.testing.adapter_contract import ScopeContract

pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")


class TestKerasOnJax(ScopeContract):
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
