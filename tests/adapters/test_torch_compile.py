"""A laid out torch module that `torch.compile` meets computes what one device computes, in any number of processes."""

from pathlib import Path

import pytest
from engines import several_processes

PROCESSES = ("torch",)

WORKER = Path(__file__).with_name("torch_compile_process.py")


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each of four processes found, by what was compiled and where."""
    (port,) = several_processes.free_ports(1)
    results = several_processes.run(WORKER, tmp_path_factory.mktemp("compile"), [{}] * 4, str(port))
    return [told for told, _ in results]


@pytest.mark.parametrize("mesh", ["model=4", "batch=2,model=2"])
@pytest.mark.parametrize("way", ["each block", "the model", "a function that calls it"])
def test_a_compiled_model_trains_as_on_one_device(told, way, mesh):
    """Whatever is compiled: each block, the model, or a function that calls it."""
    for each in told:
        assert each[f"{way}, {mesh}"]["losses"] < 1e-5
        assert each[f"{way}, {mesh}"]["weights"] < 1e-5
