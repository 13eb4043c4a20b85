"""Layers of experts compute only the tokens of their process, and the numbers are those of one process."""

import warnings
from pathlib import Path

import pytest
import torch
import transformers
from engines import several_processes
from transformers_models import SIZES

import layoutmap as lm
from layoutmap.engines.torch.dtensor_ops import gathered

PROCESSES = ("torch",)
WORKER = Path(__file__).with_name("torch_experts_process.py")


@pytest.mark.parametrize(
    ("size", "seed", "count"), [(2, 0, 8), pytest.param(4, 1000, 40, marks=pytest.mark.long)]
)
def test_drawn_models_with_experts(tmp_path, size, seed, count):
    """Models, layouts, and programs are drawn. Hooks see all tokens, and all processes must have them."""
    (port,) = several_processes.free_ports(1)
    results = several_processes.run(WORKER, tmp_path, [{}] * size, *map(str, (port, size, seed, count)))
    for (told, error), _ in results:
        assert count == len(told), told[-1].get("error")
        assert 'experts": hooks, dropout, or tensors inside: True in process 0, False in process 1' in error
        for each in told:
            assert each["difference"] < 1, each
            assert each["hooks"][0] == each["hooks"][1], each
            assert each["rows"][0] == each["rows"][1], each


@pytest.mark.parametrize(("rows", "warns"), [(4, False), (3, True)])
def test_simulated_devices_warn_of_what_several_processes_gather(rows, warns, monkeypatch):
    """An uneven batch is gathered in several processes, too."""
    monkeypatch.setattr(gathered, "_warned_functions", set())
    model = lm.LayoutMap("batch=2", rest="replicated").build(
        lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES)),
        batch_dim="batch",
        library="torch",
    )
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model(torch.zeros(rows, 5, dtype=torch.int64))
    assert warns == any("gathered" in str(each.message) for each in found)
