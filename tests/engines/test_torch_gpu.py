"""The torch engine keeps the contract on a mesh of one device: on a GPU where there is one, and on a CPU anywhere."""

from typing import ClassVar

import forked
import pytest
import torch
from engines import test_torch

from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.element_types import to_numpy
from layoutmap.engines.torch.engine import engine

HAS_GPU = torch.cuda.is_available()
CUDA = "with CUDA, and finds no device" if torch.backends.cuda.is_built() else "without CUDA"

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


class TestOneCPU(test_torch.TestTorchEngine):
    """All laws hold on one CPU: they can be asked of a mesh of one, also where there is no GPU to ask."""

    one_device: ClassVar[str | None] = "CPU:0"


@pytest.mark.skipif(not HAS_GPU, reason=f"the laws of engines on a GPU: torch is built {CUDA}")
def test_a_gpu_is_there():
    """Where torch finds a GPU, the engine names it; skipped once for all laws of the class below."""
    assert "GPU:0" in engine().list_device_names("gpu")


PEAK = """
import torch
from layoutmap.testing import torch_speeds as speeds

kind = speeds.make_device_facts()["kind"]
torch.empty(2**26, device="cuda" if kind != "CPU" else "cpu")
peak = speeds.make_peak_bytes_function()
torch.empty(2**24, device="cuda" if kind != "CPU" else "cpu")
print(kind, peak(), sep=",")
"""


def test_the_peak_of_memory_is_watched():
    """What tensors took at most since it was asked, not what they took before; a CPU does not report it."""
    done = forked.run(PEAK, environment=ALONE)
    kind, _, peak = done.stdout.strip().rpartition(",")

    assert HAS_GPU == (kind != "CPU"), done.stderr
    assert (str(4 * 2**24) if HAS_GPU else "None") == peak


RECURRENT = """
import torch
from torch import nn

import layoutmap as lm

layout_map = lm.LayoutMap("batch=1,model=1", {"weight": (None, "batch")}, rest="replicated")  # a call gathers them
x = torch.ones(8, 3, 4)
if not torch.cuda.is_available():  # the same is asked, and the answer would be given in CUDA
    torch.backends.cudnn.is_acceptable = lambda _: True
    torch._use_cudnn_rnn_flatten_weight = lambda: print("joined")
for kind in (nn.LSTM, nn.GRU, nn.RNN):
    def make_model():
        torch.manual_seed(0)
        return kind(4, 8, batch_first=True, bias=False)

    expected = make_model()(x)[0]
    model = layout_map.build(make_model, batch_dim="batch", library="torch")
    if not torch.cuda.is_available():
        torch.Tensor.is_cuda = True
    model.flatten_parameters()
    output = model(x)[0]
    if not torch.cuda.is_available():
        del torch.Tensor.is_cuda
    print(torch.allclose(expected, output.cpu(), atol=1e-3), output.requires_grad)
"""


def test_recurrent_layers_have_their_weights_where_they_are():
    """On a GPU torch asks where the weights of a layer lie, to join them: on a mesh, gathered or not, they stay."""
    done = forked.run(RECURRENT, environment=ALONE)

    assert ["True True"] * 3 == done.stdout.splitlines(), done.stderr


class TestOneGPU(test_torch.TestTorchEngine):
    """All laws hold on one GPU."""

    __test__ = HAS_GPU
    one_device: ClassVar[str | None] = "GPU:0"

    def get_device_values(self, array):
        pieces = simulation.get_tensors_by_rank(array.to_local())

        assert {"cuda"} == {piece.device.type for piece in pieces.values()}
        return {f"GPU:{rank}": to_numpy(piece) for rank, piece in pieces.items()}
