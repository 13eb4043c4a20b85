"""One of two processes of JAX that save and load on several meshes; run by test_jax_meshes.py."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils

import layoutmap as lm
from layoutmap.core.errors import CheckpointError

SHAPE = (16, 8)


def values(seed):
    return {"w": np.random.default_rng(seed).random(SHAPE, np.float32), "b": np.arange(8, dtype=np.float32)}


def on(mesh, specs, seed):
    """A pytree in layouts, with values of a seed."""
    layout_map = lm.LayoutMap(mesh, {"w": specs, "b": (None,)})
    return layout_map.build(lambda: jax.tree.map(jnp.asarray, values(seed)), library="jax")


def assert_holds(model, seed):
    for name, expected in values(seed).items():
        for shard in model[name].addressable_shards:
            assert np.array_equal(np.asarray(shard.data), expected[shard.index]), name


def main(number, folder, port):
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=number)
    names = [f"CPU:{device.id}" for device in jax.devices()]
    halves = [lm.create_mesh("x=4", devices=names[:4]), lm.create_mesh("y=2,x=2", devices=names[4:])]
    everywhere, row = lm.create_mesh("x=2,y=4", engine="jax"), lm.create_mesh("z=8", engine="jax")

    # A model on all devices, and one on the devices of each process, which it saves alone.
    lm.save(on(everywhere, ("x", "y"), 1), folder / "all")
    lm.save(on(halves[number], ("x", None), 2 + number), folder / f"half{number}")
    multihost_utils.sync_global_devices("saved")

    # Each is loaded on the other meshes, at the same time.
    own = lm.load(on(halves[number], (None, "x"), 9), folder / "all")
    assert_holds(own, 1)
    for other in (0, 1):
        assert_holds(lm.load(on(row, (None, "z"), 9), folder / f"half{other}"), 2 + other)

    # What is on several meshes is loaded, and is not saved as one.
    parts = {"w": on(everywhere, ("x", "y"), 1)["w"], "b": on(row, (None, "z"), 1)["b"]}
    with pytest.raises(CheckpointError, match="are on different meshes"):
        lm.save(parts, folder / "parts")
    assert_holds(lm.load(parts, folder / "all"), 1)

    # A process that holds nothing of a model takes no part in saving it.
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    expected = values(5)
    theirs = {
        name: jax.make_array_from_callback(value.shape, sharding, value.__getitem__, dtype=value.dtype)
        for name, value in expected.items()
    }
    if number == 0:
        lm.save(theirs, folder / "theirs")
    else:
        with pytest.raises(CheckpointError, match="w: this process has no device of the variable's mesh"):
            lm.save(theirs, folder / "theirs")
    multihost_utils.sync_global_devices("saved")
    assert_holds(lm.load(on(everywhere, ("x", "y"), 9), folder / "theirs"), 5)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
