"""Train one small GPT in Keras, flax.nnx, and PyTorch, and shard all three by one rules file.

    python examples/one_rules_file.py               plan and train in each library, on 8 simulated devices
    python examples/one_rules_file.py --plan-only   only the three plans, side by side

Each library has its own model, in gpt_keras.py, gpt_nnx.py, and gpt_torch.py. The modules have the same names in all
three. The rules are in gpt_rules.yaml. Each library trains its model on one device and on the mesh, in its own process,
and the losses are equal. decisions/0024 explains how one file serves several libraries.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import pathlib
import re
import sysconfig
from concurrent.futures import ProcessPoolExecutor

import numpy as np

import layoutmap as lm

LIBRARIES = ("keras", "nnx", "torch")
VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS = 128, 64, 64, 4, 2
BATCH = 16
RULES = pathlib.Path(__file__).with_name("gpt_rules.yaml")


def run(library: str, steps: int) -> tuple[str, list[float], list[float]]:
    """Plan and train the model of one library, and return the plan as JSON and both lists of losses."""
    gpt = importlib.import_module(f"gpt_{library}")
    lm.simulate_devices(8)  # in the framework of this library
    layout_map = lm.LayoutMap.from_yaml(RULES.read_text())
    plan = lm.plan(gpt.make_gpt, layout_map, strict=True)  # nothing is allocated
    if not steps:
        return plan.to_json(), [], []
    text = read_standard_library(steps)
    one_device = gpt.train(gpt.make_gpt(), text)
    model = layout_map.build(gpt.make_gpt, batch_dim="batch", strict=True)
    return plan.to_json(), one_device, gpt.train(model, text)


def read_standard_library(num_batches: int) -> np.ndarray:
    """Return the source text of Python's standard library, shape (num_batches, BATCH, LENGTH + 1)."""
    wanted = num_batches * BATCH * (LENGTH + 1)
    text = b""
    for path in sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += bytes(c for c in path.read_bytes() if c < VOCABULARY)
        if len(text) >= wanted:
            break
    rows = np.frombuffer(text[:wanted], np.uint8).reshape(-1, LENGTH + 1).astype("int32")
    return np.random.default_rng(0).permutation(rows).reshape(num_batches, BATCH, LENGTH + 1)


def show_plans(plans: dict[str, lm.Plan]) -> None:
    """Print the name and the layout of each weight in each library, with one line for all blocks."""
    lines: dict[tuple[str, bool], dict[str, str]] = {}
    for library, plan in plans.items():
        for assignment in plan.assignments:
            module, _, name = assignment.variable.path.rpartition(".")
            module = re.sub(r"\.\d+\.", ".*.", module)
            layout = ", ".join(
                str(spec).replace("unsharded", "-") for spec in assignment.layout.sharding_specs
            )
            lines.setdefault((module, name in ("bias", "beta")), {})[library] = f"{name:11}({layout})"
    print(f"{'':27}" + "".join(f"{library:26}" for library in plans))
    for (module, _), cells in lines.items():
        print(f"{module:27}" + "".join(f"{cells.get(library, 'none'):26}" for library in plans))
    print(f"{'bytes on each device':27}" + "".join(f"{plan.device_bytes:<26,}" for plan in plans.values()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: 20)")
    parser.add_argument("--plan-only", action="store_true", help="print the plans and stop")
    args = parser.parse_args()
    steps = 0 if args.plan_only else args.steps
    spawn = multiprocessing.get_context("spawn")  # keeps torch and JAX in separate processes
    with ProcessPoolExecutor(len(LIBRARIES), mp_context=spawn, max_tasks_per_child=1) as processes:
        runs = dict(zip(LIBRARIES, processes.map(run, LIBRARIES, [steps] * len(LIBRARIES)), strict=True))
    show_plans({library: lm.Plan.from_json(plan) for library, (plan, _, _) in runs.items()})
    if not steps:
        return
    print(f"\n{steps} steps on one device and on 8")
    for library, (_, one_device, mesh) in runs.items():
        difference = max(abs(a - b) for a, b in zip(one_device, mesh, strict=True))
        print(
            f"{library:8}first loss {mesh[0]:.4f}   last {mesh[-1]:.4f}   largest difference {difference:.1e}"
        )


if __name__ == "__main__":
    os.environ.setdefault("KERAS_BACKEND", "jax")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Keras imports TensorFlow, which logs
    main()
