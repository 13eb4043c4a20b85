"""A run that saves, goes back and saves on until it is killed; run by test_killed_runs.py."""

import random
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import layoutmap as lm

SHAPE = (256, 256)


def main():
    directory, seed = Path(sys.argv[1]), int(sys.argv[2])
    rng = random.Random(seed)
    manager = lm.CheckpointManager(directory, keep_last=3, keep_every=10, best="loss", preemption_seconds=30)
    model, step = {"w": jnp.zeros(SHAPE)}, 0
    if manager.steps:
        model = manager.load(model)
        step = manager.history()[-1].step
    while not manager.is_preempted:
        step += rng.randint(1, 3)
        value = int(np.asarray(model["w"])[0, 0]) + 1
        model = {"w": jnp.full(SHAPE, float(value))}
        manager.save(model, step, metrics={"loss": rng.random()}, metadata=value)
        print("saved", flush=True)
        if rng.random() < 0.3:
            step = rng.choice(manager.history()).step
            model = manager.load(model, step=step, later=rng.choice(("keep", "delete")))
    manager.close()


if __name__ == "__main__":
    main()
