"""Torch models with axes that do not divide compute, train, save and load as on one device, with uneven="pad"."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from cases import few
from engines import several_processes
from uneven_models import MODELS, OPTIMIZERS, compare_training, find_array_faults, find_file_faults

import layoutmap as lm
from layoutmap.core.errors import LayoutError
from layoutmap.engines.torch.devices import explain_why_padding_is_impossible
from layoutmap.engines.torch.engine import engine

PROCESSES = ("torch",)
WORKER = Path(__file__).with_name("torch_uneven_process.py")
NEAR = 1e-5
MESHES = ("batch=2,model=4", "model=8", "model=2,batch=4")


def is_near(found):
    first, numbers, last = found
    return first == 0 and max(numbers, last) < NEAR


@pytest.mark.filterwarnings("ignore:torch.ops.aten.*norm.* computed on gathered:layoutmap.LayoutMapWarning")
@pytest.mark.parametrize("mesh", MESHES)
def test_arrays(mesh):
    """Arrays in uneven shards, empty ones among them, have the values and the places of their layout."""
    assert [] == find_array_faults(mesh)


@pytest.mark.parametrize("mesh", few(MESHES, MESHES[0]))
@pytest.mark.parametrize("name", few(MODELS, "by batch", "tied by batch", "images"))
def test_models(name, mesh):
    """Initial values have the bits of one device, and some steps its losses, norms and weights."""
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


@pytest.mark.parametrize("mesh", ["x=2,y=4", "x=4,y=2", "x=2,y=2"])
def test_axes_over_several_dims(mesh):
    """Along an axis over several mesh dims, DTensor's shards are those of the layout, or padding is refused."""
    mesh, refused = lm.Mesh(None, mesh), 0
    for size, spec in itertools.product(range(1, 34), (("x", "y"), ("y", "x"))):
        layout, values = lm.Layout([spec], mesh), np.arange(size, dtype=np.float32)
        everywhere = engine().relayout(values, lm.Layout.replicated(mesh, 1))
        if explain_why_padding_is_impossible(layout, (size,)):
            refused += 1
            with pytest.raises(LayoutError, match="is not a multiple of"):
                engine().relayout(everywhere, layout, pad=True)
        else:
            shards = list(engine().iterate_shards(engine().relayout(everywhere, layout, pad=True)))
            assert all(np.array_equal(values[index], shard) for index, shard in shards), (size, spec)
    assert 0 < refused < 66
