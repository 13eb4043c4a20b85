"""The torch adapter keeps the contract."""

import pytest
from torch_models import MODELS, RULES, batch, hooked, num_tensors

from layoutmap.testing.adapter_contract import ScopeContract

PROCESSES = ("torch",)
pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")


class TestTorch(ScopeContract):
    library = "torch"

    def models(self):
        return MODELS

    def rules(self, name):
        return RULES[name]

    def batch(self, name):
        return batch(name)

    def get_array(self, variable):
        return variable.tensor

    def num_arrays(self):
        return num_tensors()

    def snapshot_hooks(self):
        return hooked()
