"""One process of a run that saves, goes back and saves on until it is ended; run by test_killed_runs.py."""

import os
import random
import sys
from pathlib import Path

import layoutmap as lm
from layoutmap.testing.killed_saves import build_model_in_saving_program


def run(side, directory, seed):
    rng, deletes = random.Random(seed), random.Random(f"deletes {seed}")
    manager = lm.CheckpointManager(directory, keep_last=3, keep_every=10, best="loss", preemption_seconds=30)
    step = 0
    if manager.steps:
        side.model = manager.load(side.model)
        step = manager.history()[-1].step
    while not manager.is_preempted:
        step += rng.randint(1, 3)
        value = max(side.read_distinct_values()) + 1
        side.set_all_weights(value)
        manager.save(side.model, step, metrics={"loss": rng.random()}, metadata=value)
        if deletes.random() < 0.1:  # and it is saved once more, or not
            manager.delete(step)
            if deletes.random() < 0.5:
                manager.save(side.model, step, metrics={"loss": 0.0}, metadata=value)
        if rng.random() < 0.3 and manager.history():
            place = rng.random()
            there = manager.history()  # others may delete some of them meanwhile
            step = int(side.group.gather_text(str(there[int(place * len(there))].step))[0])
            side.model = manager.load(side.model, step=step, later=rng.choice(("keep", "delete")))
    manager.close()


def main():
    engine, directory, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    try:
        run(build_model_in_saving_program(engine), directory, seed)
    except Exception as error:  # where another process was killed
        print(error, file=sys.stderr, flush=True)
        os._exit(3)
    os._exit(0)  # a group of processes does not end well without one of them


if __name__ == "__main__":
    main()
