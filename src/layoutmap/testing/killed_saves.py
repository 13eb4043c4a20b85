"""Programs that save until they are killed, and what is loaded of their steps.

`python -m layoutmap.testing.killed_saves jax DIRECTORY` is one that saves step after step.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from layoutmap.adapters import Adapter, capable, get_adapter
from layoutmap.checkpoint.reader import StepSource
from layoutmap.checkpoint.storage import LocalStorage
from layoutmap.dtensor import unpack
from layoutmap.engines import get_engine
from layoutmap.engines.launchers import launcher
from layoutmap.saving.manager import CheckpointManager
from layoutmap.scope.devices import simulate_devices
from layoutmap.scope.process_group import Group
from layoutmap.testing.laws import Outcome, tried
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import EIGHT, Devices
from layoutmap.testing.stack import Stack
from layoutmap.testing.subjects import alone_on_cpus, started_together

_WIDTH = 120  # of the stack of layers; most numbers of devices divide it
_SECONDS = 120.0


def try_killed_saves(engine: str, seed: int, devices: Devices = EIGHT) -> Iterator[tuple[Outcome, str]]:
    """Kill a program that saves, and load what it leaves on the devices; yields the outcome. All processes do so.

    Args:
        engine: The engine's name.
        seed: Draws a mesh, and the moment of the kill.
        devices: The devices that there are.
    """
    dims = Choices.of_seed(seed).weighted(devices.meshes)
    law = "a save that is killed leaves the steps before it, for any mesh"
    yield tried(law, lambda: _lost(engine, dims, random.Random(seed))), ""


def _lost(engine: str, dims: str, rng: random.Random) -> Iterator[str]:
    """Yield what is not on a mesh as it was saved."""
    saved = Saved(engine, dims)
    with tempfile.TemporaryDirectory() as own:
        folder, *steps = saved.group.first(lambda: [own, *_left_by_kill(engine, Path(own), rng)])
        for step in map(int, steps):
            saved.model = CheckpointManager(folder).load(saved.model, step=step)
            if saved.values() != {step}:
                yield f"step {step} is {saved.values()} on {dims}"
        saved.group.texts("")  # the folder is there until all have read it


def _left_by_kill(engine: str, folder: Path, rng: random.Random) -> list[str]:
    """The steps that a program has left which was killed; each is complete."""
    storage = LocalStorage(folder)
    (running,) = started([sys.executable, "-m", __name__, engine, str(folder)], folder)
    while not storage.steps() and running.poll() is None:
        time.sleep(0.002)
    time.sleep(rng.random() * 0.4)
    running.kill()
    said = running.communicate()[1]
    problems = [problem for step in storage.steps() for problem in StepSource(storage, step).problems()]
    assert (running.returncode, problems) == (-signal.SIGKILL, []), said[-3000:] or problems
    return [str(step) for step in storage.steps()]


def started(command: Sequence[str], folder: Path, count: int = 1) -> list[subprocess.Popen[str]]:
    """Start a program on two CPU devices, which saves in a folder; returns its processes once it writes there.

    Args:
        command: How it is started.
        folder: Where it saves.
        count: How many processes it has.
    """
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={2 // count}"}
    environment = alone_on_cpus() | flags
    options: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    before, until = {*os.listdir(folder)}, time.monotonic() + _SECONDS
    running = [
        subprocess.Popen(command, env=environment | each, **options) for each in started_together(count)
    ]
    while {*os.listdir(folder)} == before and time.monotonic() < until:  # it imports and loads
        if any(each.poll() is not None for each in running):
            raise AssertionError([each.communicate()[1][-3000:] for each in running])
        time.sleep(0.002)
    return running


class Saved:
    """A stack of layers in which all weights have one value.

    Args:
        engine: The engine's name.
        dims: The mesh.
    """

    def __init__(self, engine: str, dims: str):
        stack = Stack(engine, dims, _WIDTH)
        self._adapter = capable(get_adapter(stack.library), Adapter, "a run")
        self._adapter.set_seed(0)  # all processes make the same model
        self.model: Any = stack.built()
        self.group = Group(get_engine(engine), stack.mesh)
        self.fill(0)

    def values(self) -> set[int]:
        """Return the values of this process's shards."""
        arrays = [each.array for each in self._adapter.stored(self.model)]
        return {int(value) for each in arrays for shard in unpack(each) for value in np.unique(shard)}

    def fill(self, value: int) -> None:
        """Give all weights a value."""
        for variable in self._adapter.variables(self.model).values():
            self._adapter.write(variable, np.full((_WIDTH, _WIDTH), value, np.float32))


def saved_on_two_devices(engine: str) -> Saved:
    """Return a model on the two devices of a program that `started` has started."""
    if (started_by := launcher()) is None:
        simulate_devices(2, engine)
    elif engine == "jax":
        import jax

        at = f"127.0.0.1:{os.environ['MASTER_PORT']}"
        jax.distributed.initialize(at, started_by.num_processes, started_by.process)
    return Saved(engine, "x=2")


def main(engine: str, folder: str) -> None:
    """Save steps until this process is ended."""
    saved, manager, step = saved_on_two_devices(engine), CheckpointManager(folder, keep_last=3), 0
    while True:
        step += 1
        saved.fill(step)
        manager.save(saved.model, step)


if __name__ == "__main__":
    main(*sys.argv[1:])
