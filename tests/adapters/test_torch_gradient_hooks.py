"""Hooks on gradients and optimizers see and change in layouts what they see and change on one device."""

from pathlib import Path

import pytest
import torch
from cases import EVERYTHING
from engines import several_processes
from gradient_hook_cases import wrong_programs
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

import layoutmap as lm

PROCESSES = ("torch",)
WORKER = Path(__file__).with_name("torch_gradient_hooks_process.py")

torch.set_num_threads(1)


def wrong_in_processes(folder, num_processes, number):
    """What each of several processes says of the programs of so many seeds, and of passes that fail."""
    (port,) = several_processes.free_ports(1)
    arguments = str(port), str(num_processes), "0", str(number)
    return [each for each, _ in several_processes.run(WORKER, folder, [{}] * num_processes, *arguments)]


@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
def test_drawn_programs_with_hooks():
    """Hooks are called as often as on one device, with the same numbers, and weights end the same."""
    assert [] == wrong_programs(range(25 if EVERYTHING else 2))


def test_drawn_programs_with_hooks_in_two_processes(tmp_path):
    """The same, however weights are gathered; passes that fail leave nothing."""
    assert [[], []] == wrong_in_processes(tmp_path, 2, 100 if EVERYTHING else 1)


@pytest.mark.long
def test_drawn_programs_with_hooks_in_four_processes(tmp_path):
    """The same, also of weights that two mesh dims shard."""
    assert [[]] * 4 == wrong_in_processes(tmp_path, 4, 50)


@pytest.mark.long
def test_passes_that_fail(tmp_path):
    """A model whose backward passes failed is freed with its last reference, and torch is as it was before it."""
    assert [[]] == wrong_in_processes(tmp_path, 1, 0)


class PartlyUsed(nn.Module):
    """One weight is unused, one is used beside reentrant checkpoints of blocks."""

    def __init__(self):
        super().__init__()
        self.beside, self.unused = (nn.Linear(8, 8, bias=False) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x):
        x = self.beside(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


def hook_calls(model):
    """The calls of hooks on all weights in a backward pass."""
    calls = []
    for name, weight in model.named_parameters():
        weight.register_hook(lambda gradient, name=name: calls.append((name, gradient is None)))
        register_multi_grad_hook([weight], lambda gradients, name=name: calls.append((name, "several")))
    model(torch.ones(4, 8)).sum().backward()
    return sorted(calls, key=str)


@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
def test_a_backward_pass_calls_no_hook_of_a_weight_that_it_does_not_reach():
    """A hook gets gradients only, though weights are gathered together, and again in the backward pass."""
    layout_map = lm.LayoutMap("batch=2", {".*": ("batch", None)})
    sharded = layout_map.build(PartlyUsed, batch_dim="batch", library="torch")

    assert hook_calls(PartlyUsed()) == hook_calls(sharded)
