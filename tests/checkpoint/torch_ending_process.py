"""One of two processes of torch whose save is killed, or that is told to end; run by test_torch_ending.py."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import layoutmap as lm
from layoutmap.checkpoint.storage import LocalStorage

create = LocalStorage.create_file


def killed(model, number, folder, dead):
    """What a process says whose peer is killed in a save beside the training, and how long it took."""
    manager = lm.CheckpointManager(folder / "steps", patience_seconds=2)
    manager.save(model, 1)
    manager.wait()

    def kill(*_):
        time.sleep(0.2)  # the other one waits by then
        os.kill(os.getpid(), signal.SIGKILL)

    if number == dead:
        LocalStorage.create_file = kill
    began = time.monotonic()
    try:
        manager.save(model, 2)
        manager.close()
        said = "nothing"
    except lm.CheckpointError as error:
        said = str(error)
    return {"said": said, "seconds": time.monotonic() - began}


def preempted(model, number, folder, saves):
    """Train until SIGTERM, while a save that takes a while is in flight."""
    in_flight = threading.Event()

    def slow(*arguments):
        in_flight.set()
        time.sleep(0.5)
        return create(*arguments)

    LocalStorage.create_file = slow
    with lm.CheckpointManager(folder / "steps", every_steps=10_000, preemption_seconds=20) as manager:
        manager.save(model, 0, force=saves)
        if saves:
            in_flight.wait()
        (folder / f"ready-{number}").touch()
        for step in range(1, 10_000):
            time.sleep(0.01)
            with torch.no_grad():
                model.bias.fill_(step)
            manager.save(model, step)
            if manager.is_preempted:
                break
    return {"step": step, "steps": manager.steps, "ends": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL}


def main():
    number, folder, port, mode, argument = int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:6]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(number), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo")
    layout_map = lm.LayoutMap(lm.create_mesh("x=2"), {"weight": ("x", None), "bias": (None,)})
    model = layout_map.build(lambda: torch.nn.Linear(64, 32))
    work = {"killed": killed, "preempted": preempted}[mode]
    (folder / f"{number}.json").write_text(json.dumps(work(model, number, folder, int(argument))))
    if mode == "killed":
        os._exit(0)  # the other one is gone
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
