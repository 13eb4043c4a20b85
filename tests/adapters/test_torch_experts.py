"""Layers of experts compute only the tokens of their process, and the numbers are those of one process."""

from pathlib import Path

import pytest
from engines import several_processes

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
        assert 'experts": needs all tokens: True in process 0, False in process 1' in error
        for each in told:
            assert each["difference"] < 1, each
            assert each["hooks"][0] == each["hooks"][1], each
            assert each["rows"][0] == each["rows"][1], each
