"""One of two processes of JAX that sync trees; run by test_sync_jax.py."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import layoutmap as lm
from layoutmap.core.mesh import Mesh
from layoutmap.engines.jax.devices import make_named_sharding
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import draw_sharding_specs

PLACES = (
    (range(8), range(8)),
    ((0, 1, 4, 5), (2, 3, 6, 7)),
    (range(4), range(4, 8)),
    (range(4), range(8)),
)


def place(values, mesh, choices, dtype):
    """Place values in a drawn layout. A process may have no part of them."""
    sharding = make_named_sharding(lm.Layout(draw_sharding_specs(choices, mesh, values.shape, "error"), mesh))
    values = values.astype(dtype)
    return jax.make_array_from_callback(values.shape, sharding, values.__getitem__, dtype=values.dtype)


def sync_pair(seed):
    """Sync a drawn pair, and return the names of variables whose local shards differ."""
    choices, rng = Choices.from_seed(seed), np.random.default_rng(seed)
    names = [f"CPU:{device.id}" for device in jax.devices()]
    meshes = [
        Mesh([names[n] for n in numbers], choices.pick(f"a=2,b={len(numbers) // 2}", f"x={len(numbers)}"))
        for numbers in PLACES[seed % len(PLACES)]
    ]
    shapes = [tuple(choices.pick(8, 16) for _ in range(choices.pick(2, 1, 3, 0))) for _ in range(5)]
    values = {f"w{n}": rng.normal(size=shape).astype(np.float32) for n, shape in enumerate(shapes)}
    dtypes = [choices.pick("float32", "bfloat16") for _ in shapes]
    trainer = {name: place(each, meshes[0], choices, np.float32) for name, each in values.items()}
    sampler = {
        name: place(np.zeros_like(values[name]), meshes[1], choices, jnp.dtype(dtype))
        for name, dtype in zip(values, dtypes, strict=True)
    }
    sync = lm.plan_sync(trainer, sampler)
    synced = sync(verify=True)
    wrong = [
        name
        for name, array in synced.items()
        if array.sharding != sampler[name].sharding
        or any(
            not np.array_equal(values[name].astype(array.dtype)[shard.index], shard.data)
            for shard in array.addressable_shards
        )
    ]
    return {"wrong": wrong, "version": sync.version}


def main():
    number, folder, address, count = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    jax.distributed.initialize(address, num_processes=2, process_id=number)
    pairs = [sync_pair(seed) for seed in range(count)]
    (folder / f"{number}.json").write_text(json.dumps(pairs))


if __name__ == "__main__":
    main()
