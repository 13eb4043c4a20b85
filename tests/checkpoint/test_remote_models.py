"""A model is saved to an object store and loaded from it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import layoutmap as lm


def test_a_model_is_saved_to_a_store_and_loaded_on_another_mesh(url: str) -> None:
    """What is saved to a URL is described, and loaded on another mesh, as from a folder."""
    values = {"w": np.arange(64, dtype=np.float32).reshape(8, 8)}

    def make() -> dict[str, object]:
        return {"w": jnp.asarray(values["w"])}

    first, second = (
        lm.LayoutMap(lm.create_mesh(mesh), {"w": ("x", None)}) for mesh in ("x=4,y=2", "x=2,y=4")
    )
    folder = lm.save(first.build(make, library="jax"), url, step=7)
    loaded = lm.load(make, url, layout_map=second, library="jax")

    assert f"{url}/step-7" == folder
    assert ["w"] == list(lm.describe(url).variables)
    assert 2 == len({str(shard.index) for shard in loaded["w"].addressable_shards})
    assert np.array_equal(values["w"], loaded["w"])
