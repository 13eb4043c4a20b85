"""Runs in one directory that are ended at any moment, and laws of the directory after each, for any mesh.

`python -m layoutmap.testing.killed_runs jax DIRECTORY SEED NUMBER COUNT PORT` is one process of such a run: it saves,
goes back and saves on until it is ended.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from layoutmap.adapters import Adapter, capable, get_adapter
from layoutmap.checkpoint.lineage import History
from layoutmap.checkpoint.reader import Step
from layoutmap.checkpoint.storage import LocalStorage
from layoutmap.dtensor import unpack
from layoutmap.engines import get_engine
from layoutmap.scope.describing import describe
from layoutmap.scope.devices import simulate_devices
from layoutmap.scope.group import Group
from layoutmap.scope.manager import CheckpointManager
from layoutmap.testing.laws import Outcome, quiet
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import EIGHT, Devices
from layoutmap.testing.stack import Stack

LAW = "a save that is killed leaves the step before it, for any mesh"
WIDTH = 120
"""The width of the stack of layers that is saved."""
_SECONDS = 120.0
_ON_THE_CPU = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "127.0.0.1"}
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS")


def try_killed_saves(engine: str, seed: int, devices: Devices = EIGHT) -> Iterator[Outcome]:
    """Kill runs that save, and load what they leave on the devices; yields the outcome. All processes do so together.

    Args:
        engine: The engine's name.
        seed: Draws a mesh, and the moments of the kills.
        devices: The devices that there are.
    """
    begun, what, why = time.perf_counter(), "held", ""
    try:
        with quiet(), tempfile.TemporaryDirectory() as own:
            dims = Choices.of_seed(seed).weighted(devices.meshes)
            saved = Saved(engine, dims)
            folder, expected = saved.group.first(lambda: _left_by_runs(engine, own, seed))
            saved.model = CheckpointManager(folder).load(saved.model)
            if saved.values() != {int(expected)}:
                what, why = "wrong", f"a step of {expected} is {saved.values()} on {dims}"
            saved.group.texts("")  # the folder is there until all have read it
    except Exception:
        what, why = "failed", traceback.format_exc(limit=-4)
    yield Outcome(LAW, what, why, time.perf_counter() - begun)


def _left_by_runs(engine: str, folder: str, seed: int) -> list[str]:
    """A folder in which two runs were killed, and the value of its last step."""
    kill_runs(engine, Path(folder), range(2 * seed, 2 * seed + 2))
    return [folder, str(Step(LocalStorage(Path(folder)), describe(folder).step).metadata)]


def kill_runs(engine: str, directory: Path, seeds: Iterable[int], count: int = 1) -> Counter[str]:
    """Start run after run in one directory; end each after some time, most without notice.

    Args:
        engine: The engine's name. The runs are on CPU devices.
        directory: Where they save.
        seeds: One for each run.
        count: How many processes a run has. With several, all are ended, or one of them.

    Returns:
        How the runs were ended, and how often a step that was being written was left.

    Raises:
        AssertionError: A run has left something else than the steps that were saved, or has not ended as it was told.
    """
    directory.mkdir(exist_ok=True)
    ended_by = Counter[str]()
    for seed in seeds:
        rng = random.Random(seed)
        running = _started(engine, directory, seed, count)
        try:
            _wait_for_a_change(directory, running)
            time.sleep(rng.random() * 0.4)
            number = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
            told = rng.choice(([*range(count)], [rng.randrange(count)]))
            for each in told:
                running[each].send_signal(number)
            errors = [each.communicate(timeout=_SECONDS)[1] for each in running]
        finally:
            for each in running:
                each.kill()
        for place, each in enumerate(running):
            said = f"seed {seed}, process {place}, {number.name} to {told}: {each.returncode} {errors[place][-3000:]}"
            if number == signal.SIGTERM:
                assert each.returncode == 0, said
            elif place in told:
                assert each.returncode == -signal.SIGKILL, said
            else:  # it says who has died, or its framework ends it
                assert each.returncode not in (0, -signal.SIGKILL), said
        ended_by[f"{number.name} to {'all' if len(told) == count else 'one of ' + str(count)}"] += 1
        is_left = any(name.startswith(".step") for name in os.listdir(directory))
        ended_by["a step left half written"] += is_left
        check_directory(directory)
    return ended_by


def check_directory(directory: Path) -> None:
    """Each step is as it was saved, has the values of its own line, and the last one is that of the last save."""
    storage = LocalStorage(directory)
    there = History(storage).steps()
    assert storage.steps() == list(there)
    for each in there.values():
        found = Step(storage, each.step)
        assert not list(found.problems())
        values = {float(value) for path in found.variables for value in {*found.read(path).ravel().tolist()}}
        assert {float(found.metadata)} == values
        before = [Step(storage, other.step).metadata for other in there.values() if each.comes_from(other)]
        assert sorted({*before}) == before
        assert all(value < found.metadata for value in before)
    if there:
        last = max(there.values(), key=lambda each: each.order)
        assert last.step == describe(directory).step == CheckpointManager(directory).history()[-1].step


def _started(engine: str, directory: Path, seed: int, count: int) -> list[subprocess.Popen[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    settings = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={2 // count}", "KERAS_BACKEND": engine}
    environment = {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS}
    environment |= _ON_THE_CPU | settings
    command = [sys.executable, "-m", "layoutmap.testing.killed_runs", engine, str(directory), str(seed)]
    return [
        subprocess.Popen(
            [*command, str(number), str(count), port],
            env=environment
            | ({"RANK": str(number), "WORLD_SIZE": str(count), "MASTER_PORT": port} if count > 1 else {}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]


def _wait_for_a_change(directory: Path, running: list[subprocess.Popen[str]]) -> None:
    """Return when a run has begun to write."""
    until = time.monotonic() + _SECONDS
    before = {*os.listdir(directory)}
    while {*os.listdir(directory)} == before and time.monotonic() < until:  # it imports and loads
        if any(each.poll() is not None for each in running):
            raise AssertionError([each.communicate()[1][-3000:] for each in running])
        time.sleep(0.002)


class Saved:
    """A stack of layers in which all weights have one value.

    Args:
        engine: The engine's name.
        dims: The mesh.
    """

    def __init__(self, engine: str, dims: str):
        stack = Stack(engine, dims, WIDTH)
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
            self._adapter.write(variable, np.full((WIDTH, WIDTH), value, np.float32))

    def save_until_ended(self, directory: Path, seed: str) -> None:
        """Save steps, delete some, and go back to earlier ones."""
        rng, deletes = random.Random(int(seed)), random.Random(f"deletes {seed}")
        manager = CheckpointManager(directory, keep_last=3, keep_every=10, best="loss", preemption_seconds=30)
        step = 0
        if manager.steps:
            self.model = manager.load(self.model)
            step = manager.history()[-1].step
        while not manager.is_preempted:
            step += rng.randint(1, 3)
            value = max(self.values()) + 1
            self.fill(value)
            manager.save(self.model, step, metrics={"loss": rng.random()}, metadata=value)
            if deletes.random() < 0.1:  # and it is saved once more, or not
                manager.delete(step)
                if deletes.random() < 0.5:
                    manager.save(self.model, step, metrics={"loss": 0.0}, metadata=value)
            if rng.random() < 0.3 and manager.history():
                there, place = manager.history(), rng.random()  # others may delete some of them meanwhile
                found = self.group.texts(str(there[int(place * len(there))].step))
                step = int(found[0])
                self.model = manager.load(self.model, step=step, later=rng.choice(("keep", "delete")))
        manager.close()


def main(arguments: list[str]) -> None:
    """Run until this process is ended.

    Args:
        arguments: The engine, the directory, a seed, the number of this process, how many there are, and a port.
    """
    engine, directory, seed, number, count, port = arguments
    try:
        if count == "1":
            simulate_devices(2, engine)
        elif engine == "jax":
            import jax

            jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=int(count), process_id=int(number))
        Saved(engine, "x=2").save_until_ended(Path(directory), seed)
    except Exception as error:  # where another process was killed
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(3)
    os._exit(0)  # a group of processes does not end well without one of them


if __name__ == "__main__":
    main(sys.argv[1:])
