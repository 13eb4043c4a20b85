"""Hooks on gradients and optimizers see and change in layouts what they see and change on one device."""

from pathlib import Path

import pytest
import torch
from cases import EVERYTHING
from engines import several_processes
from gradient_hook_cases import wrong_programs

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
