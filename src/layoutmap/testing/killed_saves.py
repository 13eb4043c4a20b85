"""Run programs that save until they are killed, and test that the steps that they have saved can be loaded.

`python -m layoutmap.testing.killed_saves jax FOLDER` saves step after step.
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

from layoutmap.adapters import Adapter, get_adapter, require_capability
from layoutmap.checkpoint.reader import StepSource
from layoutmap.checkpoint.storage import LocalStorage
from layoutmap.dtensor import unpack
from layoutmap.engines import get_engine
from layoutmap.engines.launchers import detect_launcher
from layoutmap.saving.manager import CheckpointManager
from layoutmap.scope.devices import simulate_devices
from layoutmap.scope.process_group import MeshProcesses
from layoutmap.testing.laws import Outcome, run_law
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import EIGHT, Devices
from layoutmap.testing.stack import LayerStack
from layoutmap.testing.subjects import make_cpu_environment, make_launcher_environments

_WIDTH = 120  # width of all layers, which most numbers of devices divide
_MAX_SECONDS = 120.0


def try_killed_save_law(engine: str, seed: int, devices: Devices = EIGHT) -> Iterator[tuple[Outcome, str]]:
    """Kill a program that saves, load its steps on the devices, and yield the outcome. All processes call this."""
    dims = Choices.from_seed(seed).pick_weighted(devices.mesh_frequencies)
    law = "a save that is killed leaves the steps before it, for any mesh"
    yield run_law(law, lambda: _kill_save_and_check_steps(engine, dims, random.Random(seed))), ""


def _kill_save_and_check_steps(engine: str, dims: str, rng: random.Random) -> Iterator[str]:
    """Kill a program while it saves, and load its steps on the mesh. Yield a text for each step with wrong values."""
    constant = ConstantModel(engine, dims)
    with tempfile.TemporaryDirectory() as own_folder:
        folder, *steps = constant.group.run_in_first_process(
            lambda: [own_folder, *_run_and_kill_saving_program(engine, Path(own_folder), rng)]
        )
        for step in map(int, steps):
            constant.model = CheckpointManager(folder).load(constant.model, step=step)
            if constant.read_distinct_values() != {step}:
                yield f"step {step} is {constant.read_distinct_values()} on {dims}"
        constant.group.gather_text("")  # wait until all processes have read the folder


def _run_and_kill_saving_program(engine: str, folder: Path, rng: random.Random) -> list[str]:
    """Run a program that saves, kill it, and return the numbers of the saved steps. Raise if a step is damaged."""
    storage = LocalStorage(folder)
    (process,) = start_processes([sys.executable, "-m", __name__, engine, str(folder)], folder)
    while not storage.list_steps() and process.poll() is None:
        time.sleep(0.002)
    time.sleep(rng.random() * 0.4)
    process.kill()
    errors = process.communicate()[1]
    problems = [
        problem for step in storage.list_steps() for problem in StepSource(storage, step).iterate_damage()
    ]
    assert (process.returncode, problems) == (-signal.SIGKILL, []), errors[-3000:] or problems
    return [str(step) for step in storage.list_steps()]


def start_processes(command: Sequence[str], folder: Path, count: int = 1) -> list[subprocess.Popen[str]]:
    """Start a program in `count` processes with two CPU devices in all. Return after a first write to `folder`."""
    environment = make_cpu_environment() | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={2 // count}"
    }
    options: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    before, deadline = {*os.listdir(folder)}, time.monotonic() + _MAX_SECONDS
    processes = [
        subprocess.Popen(command, env=environment | own, **options)
        for own in make_launcher_environments(count)
    ]
    while {*os.listdir(folder)} == before and time.monotonic() < deadline:
        if any(process.poll() is not None for process in processes):
            errors = "\n".join(process.communicate()[1][-3000:] for process in processes)
            raise AssertionError(f"a saving program ended before its first write to {folder}:\n{errors}")
        time.sleep(0.002)
    return processes


class ConstantModel:
    """A stack of layers in which all weights have the same value."""

    def __init__(self, engine: str, dims: str):
        stack = LayerStack(engine, dims, _WIDTH)
        self._adapter = require_capability(get_adapter(stack.library), Adapter, "a run")
        self._adapter.set_seed(0)  # all processes must create equal models
        self.model: Any = stack.build_model()
        self.group = MeshProcesses(get_engine(engine), stack.mesh)
        self.set_all_weights(0)

    def read_distinct_values(self) -> set[int]:
        """Return the distinct values of all weights in the shards of this process."""
        arrays = [stored.array for stored in self._adapter.list_stored_variables(self.model)]
        return {int(value) for array in arrays for shard in unpack(array) for value in np.unique(shard)}

    def set_all_weights(self, value: int) -> None:
        """Set all weights to a value."""
        for variable in self._adapter.variables(self.model).values():
            self._adapter.write(variable, np.full((_WIDTH, _WIDTH), value, np.float32))


def build_model_in_saving_program(engine: str) -> ConstantModel:
    """Return a model on the two devices of this program, which `start_processes` started."""
    if (started_by := detect_launcher()) is None:
        simulate_devices(2, engine)
    elif engine == "jax":
        import jax

        coordinator = f"127.0.0.1:{os.environ['MASTER_PORT']}"
        jax.distributed.initialize(coordinator, started_by.num_processes, started_by.process)
    return ConstantModel(engine, "x=2")


def main(engine: str, folder: str) -> None:
    """Save steps until this process is killed."""
    constant, manager, step = build_model_in_saving_program(engine), CheckpointManager(folder, keep_last=3), 0
    while True:
        step += 1
        constant.set_all_weights(step)
        manager.save(constant.model, step)


if __name__ == "__main__":
    main(*sys.argv[1:])
