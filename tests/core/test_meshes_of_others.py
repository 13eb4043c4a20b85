"""Meshes of JAX are taken as ours; those of torch in tests/engines/test_torch.py."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

import layoutmap as lm

PROCESSES = ("jax",)


@pytest.mark.parametrize("order", [range(8), [3, 1, 2, 0, 7, 6, 5, 4]])
def test_a_mesh_of_jax(order):
    """With its devices, in their order."""
    devices = np.array(jax.devices()[:8])[list(order)].reshape(2, 4)
    layout_map = lm.LayoutMap(Mesh(devices, ("batch", "model")), {"up": (None, "model")})

    assert lm.Mesh([f"CPU:{i}" for i in order], "batch=2,model=4") == layout_map.mesh
    tree = layout_map.build(lambda: {"up": jax.numpy.ones((8, 8))}, library="flax")
    assert list(devices.flat) == list(tree["up"].sharding.mesh.devices.flat)


def test_an_abstract_mesh_of_jax():
    """Without devices, as `Mesh` makes one of text alone."""
    assert lm.Mesh("batch=2,model=4") == lm.LayoutMap(AbstractMesh((2, 4), ("batch", "model"))).mesh
    assert lm.Mesh("batch=2,model=4") == lm.Mesh(None, "batch=2,model=4")
    with pytest.raises(lm.MeshError, match="a mesh needs dims"):
        lm.Mesh(["CPU:0"])
