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


class TestOneCPU(test_torch.TestTorchEngine):
    """All laws hold on one CPU: they can be asked of a mesh of one, also where there is no GPU to ask."""

    one_device: ClassVar[str | None] = "CPU:0"


@pytest.mark.skipif(not HAS_GPU, reason=f"the laws of engines on a GPU: torch is built {CUDA}")
def test_a_gpu_is_there():
    """Where torch finds a GPU, the engine names it; skipped once for all laws of the class below."""
    assert "GPU:0" in engine().devices("gpu")


PEAK = """
import torch
from layoutmap.engines.torch import speeds

kind = speeds.facts()["kind"]
torch.empty(2**26, device="cuda" if kind != "CPU" else "cpu")
peak = speeds.watched_peak()
torch.empty(2**24, device="cuda" if kind != "CPU" else "cpu")
print(kind, peak(), sep=",")
"""


def test_the_peak_of_memory_is_watched():
    """What tensors took at most since it was asked, not what they took before; a CPU does not report it."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = forked.run(PEAK, environment=alone)
    kind, _, peak = done.stdout.strip().rpartition(",")

    assert HAS_GPU == (kind != "CPU"), done.stderr
    assert (str(4 * 2**24) if HAS_GPU else "None") == peak


class TestOneGPU(test_torch.TestTorchEngine):
    """All laws hold on one GPU."""

    __test__ = HAS_GPU
    one_device: ClassVar[str | None] = "GPU:0"

    def device_values(self, array):
        pieces = simulation.pieces_of(array.to_local())

        assert {"cuda"} == {piece.device.type for piece in pieces.values()}
        return {f"GPU:{rank}": to_numpy(piece) for rank, piece in pieces.items()}
