"""Torch models with axes that do not divide compute, train, save and load as on one device, with uneven="pad"."""

from pathlib import Path

import pytest
from cases import few
from engines import several_processes
from uneven_models import MODELS, OPTIMIZERS, compare_training, find_array_faults, find_file_faults

PROCESSES = ("torch",)
WORKER = Path(__file__).with_name("torch_uneven_process.py")
NEAR = 1e-5
MESHES = ("batch=2,model=4", "model=8", "model=2,batch=4")


def is_near(found):
    first, numbers, last = found
    return first == 0 and max(numbers, last) < NEAR


@pytest.mark.parametrize("mesh", MESHES)
def test_arrays(mesh):
    """Arrays in uneven shards, empty ones among them, have the values and the places of their layout."""
    assert [] == find_array_faults(mesh)


@pytest.mark.parametrize("mesh", few(MESHES, MESHES[0]))
@pytest.mark.parametrize("name", MODELS)
def test_models(name, mesh):
    """Initial values have the bits of one device, and three steps its losses, norms and weights."""
    assert is_near(compare_training(name, mesh))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    """Each optimizer steps uneven shards as one device steps the weights."""
    assert is_near(compare_training("by batch", "batch=2,model=4", name))


def test_files(tmp_path):
    """What is saved of uneven shards loads with equal bits on other meshes, and back."""
    assert [] == find_file_faults(tmp_path / "saved", "batch=2,model=4")


@pytest.mark.parametrize("mesh", few(["batch=2,model=2", "model=4"], "batch=2,model=2"))
def test_processes(mesh, tmp_path):
    """Four processes do the same."""
    (port,) = several_processes.free_ports(1)
    for told, _ in several_processes.run(WORKER, tmp_path, [{}] * 4, str(port), "4", mesh):
        assert {"arrays": [], "files": []} == {name: told.pop(name) for name in ("arrays", "files")}
        assert {} == {
            name: found for name, found in told.items() if isinstance(found, str) or not is_near(found)
        }
