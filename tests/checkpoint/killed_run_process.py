"""One process of a run that saves, goes back and saves on until it is ended; run by test_killed_runs.py."""

import os
import random
import sys
from pathlib import Path

import numpy as np

import layoutmap as lm

SHAPE = (256, 256)
LIBRARY = os.environ["KERAS_BACKEND"]


class Jax:
    """A pytree, in a layout; a step makes another one."""

    def __init__(self, number, count, port):
        if count > 1:
            import jax

            jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=count, process_id=number)
        self.layout = lm.Layout(["x", None], lm.create_mesh("x=2", engine="jax"))
        self.count = count
        self.model = self.made(0)

    def made(self, value):
        return {"w": lm.dtensor.relayout(np.full(SHAPE, value, np.float32), self.layout)}

    def value(self):
        return int(np.asarray(self.model["w"].addressable_data(0))[0, 0])

    def step(self, value):
        self.model = self.made(value)

    def same(self, number):
        """The number of the first process, in all."""
        if self.count == 1:
            return number
        from jax.experimental import multihost_utils

        return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


class Torch:
    """A module whose weight has a slot of an optimizer; a step changes both in place."""

    def __init__(self, number, count, port):
        import torch

        self.torch, self.count = torch, count
        if count > 1:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ |= {"RANK": str(number), "WORLD_SIZE": str(count)}
            torch.distributed.init_process_group("gloo")
            layout_map = lm.LayoutMap(lm.create_mesh("x=2"), {"weight": ("x", None)})
            self.model = layout_map.build(lambda: torch.nn.Linear(*SHAPE, bias=False))
        else:
            self.model = torch.nn.Linear(*SHAPE, bias=False)
        with torch.no_grad():
            self.model.weight.fill_(0)

    def value(self):
        weight = self.model.weight.detach()
        return int((weight.to_local() if self.count > 1 else weight)[0, 0])

    def step(self, value):
        with self.torch.no_grad():
            self.model.weight.fill_(value)

    def same(self, number):
        if self.count == 1:
            return number
        told = [number]
        self.torch.distributed.broadcast_object_list(told)
        return told[0]


def run(side, directory, seed):
    rng, deletes = random.Random(seed), random.Random(f"deletes {seed}")
    manager = lm.CheckpointManager(directory, keep_last=3, keep_every=10, best="loss", preemption_seconds=30)
    step = 0
    if manager.steps:
        side.model = manager.load(side.model)
        step = manager.history()[-1].step
    while not manager.is_preempted:
        step += rng.randint(1, 3)
        value = side.value() + 1
        side.step(value)
        manager.save(side.model, step, metrics={"loss": rng.random()}, metadata=value)
        if deletes.random() < 0.1:  # and it is saved once more, or not
            manager.delete(step)
            if deletes.random() < 0.5:
                manager.save(side.model, step, metrics={"loss": 0.0}, metadata=value)
        if rng.random() < 0.3 and manager.history():
            place = rng.random()
            there = manager.history()  # others may delete some of them meanwhile
            step = side.same(there[int(place * len(there))].step)
            side.model = manager.load(side.model, step=step, later=rng.choice(("keep", "delete")))
    manager.close()


def main():
    number, directory, seed, port, count = int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:6]
    side = {"jax": Jax, "torch": Torch}[LIBRARY](number, int(count), port)
    try:
        run(side, directory, int(seed))
    except Exception as error:  # where another process was killed
        print(error, file=sys.stderr, flush=True)
        os._exit(3)
    os._exit(0)  # a group of processes does not end well without one of them


if __name__ == "__main__":
    main()
