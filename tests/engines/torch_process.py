"""One of several processes of torch, each one device; run by test_torch_processes.py."""

import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from several_processes import SHAPE, Framework, refusal, work

from layoutmap.core.initializers import Initializer, InitializerProgram
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines.torch.engine import engine


def normal(seed):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * 0.3 + 0.1


def other_numbers(number, with_programs):
    """What is said when one process makes one variable more than the others."""
    layout = Layout(["x", None], Mesh(None, {"x": len(engine().list_device_names())}))
    keys = ["first", "second"][: 1 + (number == 1)]
    program = InitializerProgram("normal", 0, normal) if with_programs else None
    draw = Initializer(global_value=lambda: np.zeros(SHAPE, np.float32), program=program)
    assignments = {key: Assignment(VariableSpec(key, SHAPE, "float32"), layout) for key in keys}
    return refusal(lambda: engine().create_initial_values(assignments, dict.fromkeys(keys, draw)))


def other_states(number):
    """What is said when the processes were seeded differently."""
    torch.manual_seed(number)
    layout = Layout(["x", None], Mesh(None, {"x": len(engine().list_device_names())}))
    assignment = Assignment(VariableSpec("w", SHAPE, "float32"), layout)
    draw = Initializer(
        global_value=lambda: torch.rand(SHAPE), blocks=lambda indices: [torch.rand(SHAPE)[i] for i in indices]
    )
    return refusal(lambda: engine().create_initial_values({"w": assignment}, {"w": draw}))


def moved_off_and_on(values):
    """The values after a way over a mesh of half the processes, where the others hold nothing."""
    names = engine().list_device_names()
    half = Mesh(names[len(names) // 2 :], {"a": len(names) // 2})
    there = engine().relayout(
        engine().relayout(values, Layout(["x"], Mesh(None, {"x": 2}))), Layout(["a"], half)
    )
    back = engine().relayout(there, Layout.replicated(Mesh(None, {"x": len(names)}), 1))
    return engine().to_numpy(back).tolist()


def main():
    number, folder, port, size = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    # What torchrun would set; the engine joins the group by itself.
    os.environ |= {"RANK": str(number), "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    framework = Framework(
        seed=lambda number: number,
        normal=normal,
        summed=lambda seed: normal(seed) / normal(seed).norm(),
        plain=lambda values: torch.from_numpy(values.copy()),
        dtypes=("float32", "bfloat16", "bool", "int8", "uint32", "float64"),
        cuts_over_several_dims=True,
    )
    engine().list_device_names()
    said = [other_numbers(number, with_programs) for with_programs in (True, False)]
    moved = moved_off_and_on(np.arange(8, dtype=np.float32))
    work(
        engine(),
        framework,
        number,
        folder,
        dims=f"x=2,y={int(size) // 2}",
        other_numbers=said,
        other_states=other_states(number),
        moved=moved,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
