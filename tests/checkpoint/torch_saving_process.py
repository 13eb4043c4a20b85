"""One of two processes of torch that save one model; run by test_torch_saving_processes.py."""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import layoutmap as lm
from layoutmap.checkpoint import step_writer


class Failing:
    """Data without a state, in one process."""

    def __init__(self, fails):
        self.fails = fails

    def state_dict(self):
        if self.fails:
            raise RuntimeError("the reader has gone away")
        return {"row": 1}


def refusal(action):
    """What an action is refused with, or nothing."""
    try:
        action()
    except lm.CheckpointError as error:
        return str(error)
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return ""


def small_files(number):
    """Let one process write small files only."""
    if number:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))


def all_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def refusals(model, number, folder):
    """What is said where one process asks for something else, or fails."""
    steps = folder / "steps"
    lm.save(model, steps, step=1, data=Failing(False), metadata={"epoch": 1})
    told = {
        "directory": refusal(lambda: lm.save(model, folder / f"other{number}", step=2)),
        "step": refusal(lambda: lm.save(model, steps, step=2 + number)),
        "metadata": refusal(lambda: lm.save(model, steps, step=2, metadata={"epoch": number})),
        "state": refusal(lambda: lm.save(model, steps, step=2, data=Failing(number == 1))),
        "no step": refusal(lambda: lm.save(model, steps, step=2 - 4 * number)),
        "there": refusal(lambda: lm.save(model, steps, step=1)),
    }
    small_files(number)
    began = time.monotonic()
    told["disk"] = refusal(lambda: lm.save(model, steps, step=2))
    told["seconds"] = time.monotonic() - began
    manager = lm.CheckpointManager(steps)
    manager.save(model, 2)
    told["thread"] = refusal(lambda: manager.save(model, 3))
    all_files()
    dist.barrier()
    told["left"] = sorted(os.listdir(steps))
    return told


def managed(model, number, folder):
    """What a manager does whose clock is another one in each process, and what it has written."""
    told = {"due": []}
    with lm.CheckpointManager(folder / "managed", keep_last=2, every_minutes=1) as manager:
        for step in range(6):
            manager._saved_at -= (60 if step % 2 else 0) if number == 0 else 1000
            told["due"].append(manager.save(model, step))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
        told["back"] = refusal(lambda: manager.save(model, 4, force=True))
    dist.barrier()
    told["steps"] = manager.steps
    return told


def deleted(model, number, folder):
    """What remains of a step that is deleted while one process has not yet seen that it is there."""
    is_committed = step_writer.StepWriter._is_step_committed
    if number == 1:
        step_writer.StepWriter._is_step_committed = lambda self: (time.sleep(0.5), is_committed(self))[1]
    with lm.CheckpointManager(folder / "deleted") as manager:
        for step in (1, 2):
            manager.save(model, step)
        manager.delete(2)
        told = {"deleted": refusal(manager.wait), "saved again": manager.save(model, 2)}
    step_writer.StepWriter._is_step_committed = is_committed
    dist.barrier()
    return told | {"in the end": manager.steps}


def main():
    number, folder, port, ends = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(number), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layout_map = lm.LayoutMap(lm.create_mesh("x=2"), {"weight": ("x", None), "bias": (None,)})
    model = layout_map.build(lambda: torch.nn.Linear(64, 32))
    told = {}
    if ends == "well":
        told = refusals(model, number, folder) | managed(model, number, folder)
        told |= deleted(model, number, folder)
    else:
        lm.save(model, folder / "steps", step=1)
        step_writer.PATIENCE_SECONDS = 1.0
        if number == int(ends):  # it dies when it has written half
            write_process_part = step_writer.write_process_part
            step_writer.write_process_part = lambda *a: (
                write_process_part(*a),
                os.kill(os.getpid(), signal.SIGKILL),
            )
        told["died"] = refusal(lambda: lm.save(model, folder / "steps", step=2))
    (folder / f"{number}.json").write_text(json.dumps(told))
    if ends == "well":
        dist.destroy_process_group()
    else:
        os._exit(0)  # the other one is gone


if __name__ == "__main__":
    main()
