"""The JAX adapter keeps the contract, with modules of flax.nnx and with pytrees."""

import jax
import pytest
from jax_models import NNX, PYTREES, RULES, batch

from layoutmap.testing.adapter_contract import AdapterContract

pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")


class OnJax(AdapterContract):
    library = "jax"

    def rules(self, name):
        return RULES[name]

    def batch(self, name):
        return batch(name)

    def get_array(self, variable):
        return variable.array

    def num_arrays(self):
        return len(jax.live_arrays())


class TestNnx(OnJax):
    def models(self):
        return NNX


class TestPytrees(OnJax):
    def models(self):
        return PYTREES
