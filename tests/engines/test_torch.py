"""The torch engine keeps the contract, on eight simulated devices, and what only torch can be asked."""

import gc
from typing import ClassVar

import numpy as np
import torch

from layoutmap.core.initializers import Initializer, InitializerProgram
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.element_types import to_numpy
from layoutmap.engines.torch.engine import engine
from layoutmap.testing.engine_contract import EngineContract


def drawn_by(name, function, seed=1):
    return Initializer(global_value=lambda: function(seed), program=InitializerProgram(name, seed, function))


def random_draw(shape, dtype, seed):
    def function(seed):
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(shape, generator=generator, dtype=getattr(torch, dtype))
        return drawn * 0.05 + 0.013

    return drawn_by(("normal", shape, dtype), function, seed)


class TestTorchEngine(EngineContract):
    engine_name = "torch"
    holds_any_device_order: ClassVar[bool] = False

    def make_array(self, values):
        return torch.from_numpy(values.copy()) if values.dtype != "bfloat16" else self._bfloat16(values)

    def _bfloat16(self, values):
        return torch.from_numpy(values.view(np.uint16).copy()).view(torch.bfloat16)

    def get_device_values(self, array):
        pieces = simulation.get_tensors_by_rank(array.to_local())
        return {f"CPU:{rank}": to_numpy(piece) for rank, piece in pieces.items()}

    def make_random_initializer(self, shape, dtype, seed):
        return random_draw(shape, dtype, seed)

    def num_live_arrays(self):
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_a_plain_tensor_is_on_the_first_device_of_a_simulation():
    """Beside simulated devices, a tensor in no layout is held by the first one."""
    engine().relayout(torch.zeros(2), Layout(["x"], Mesh(None, "x=2")))

    assert ["CPU:0"] == [device for device, _ in engine().iterate_device_values(torch.zeros(2))]
