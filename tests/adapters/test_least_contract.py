"""An adapter that only builds keeps the contract; laws of training, files and inspection do not apply to it."""

import equinox as eqx
import jax
import pytest

from layoutmap import adapters
from layoutmap.testing.adapter_contract import AdapterContract

pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")


class Net(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self):
        one, other = jax.random.split(jax.random.key(7))
        self.up, self.down = eqx.nn.Linear(16, 32, key=one), eqx.nn.Linear(32, 16, key=other)


class TestEquinox(AdapterContract):
    library = "equinox"

    @pytest.fixture(autouse=True)
    def known(self, monkeypatch):
        monkeypatch.setitem(adapters.ADAPTERS, "equinox", "equinox_adapter")

    def models(self):
        return {"mlp": Net}

    def rules(self, name):
        return {r"up\.weight": ("model", None), r"down\.weight": (None, "model")}

    def batch(self, name):
        return None

    def get_array(self, variable):
        return variable.array

    def num_arrays(self):
        return len(jax.live_arrays())
