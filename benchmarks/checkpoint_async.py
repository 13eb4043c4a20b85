"""Compare the time that an asynchronous save blocks training with the time of a synchronous save.

    python benchmarks/checkpoint_async.py                 1 GiB of weights, 5 rounds, JAX and torch
    python benchmarks/checkpoint_async.py --gib 4         weights of 4 GiB; needs as much memory again on torch

Each framework runs in its own process. `layoutmap.save` and `CheckpointManager.save` take turns and write to one
directory. On JAX the weights are sharded over eight CPU devices, and a step after each save takes them by donation. On
torch the modules are unsharded, and the step changes the weights in place.

Columns are medians over the rounds, in seconds. "save": `layoutmap.save` until the step is durable. "blocks": the call
of the manager's `save`. "then there": the time until the manager's step is durable. "share": blocks / save. "copies":
one memcpy of all weights into memory that was used before.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from measure import EIGHT_DEVICES, make_parser, run_script

FRAMEWORKS = ("jax", "torch")
NUM_WEIGHTS = 16
WIDTH = 4096


def make_jax_model(rows: int) -> tuple[Any, Callable[[Any], Any]]:
    """Return a model and a step that donates it and returns the new one."""
    import jax

    import layoutmap as lm

    layout_map = lm.LayoutMap(lm.create_mesh("x=8"), {r".*": ("x", None)})
    model = layout_map.build(
        lambda: {f"w{n}": jax.random.normal(jax.random.key(n), (rows, WIDTH)) for n in range(NUM_WEIGHTS)},
        library="jax",
    )
    step = jax.jit(lambda weights: jax.tree.map(lambda w: w * 0.5, weights), donate_argnums=0)
    return model, lambda weights: jax.block_until_ready(step(weights))


def make_torch_model(rows: int) -> tuple[Any, Callable[[Any], Any]]:
    """Return a model and a step that changes it in place."""
    import torch

    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, rows, bias=False) for _ in range(NUM_WEIGHTS)])

    def step(model: Any) -> Any:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        return model

    return model, step


def time_memcpy(num_bytes: int) -> float:
    """Return the seconds that memcpy takes for these bytes."""
    source = np.ones(num_bytes // NUM_WEIGHTS // 4, np.float32)
    target = source.copy()
    start = time.perf_counter()
    for _ in range(NUM_WEIGHTS):
        np.copyto(target, source)
    return time.perf_counter() - start


def measure_framework(framework: str, gib: float, rounds: int, folder: str) -> None:
    """Measure one framework in this process, and print the medians as JSON."""
    import layoutmap as lm

    rows = 8 * max(1, round(gib * 2**30 / 4 / NUM_WEIGHTS / WIDTH / 8))
    model, step = {"jax": make_jax_model, "torch": make_torch_model}[framework](rows)
    times: dict[str, list[float]] = {"save": [], "blocks": [], "then there": [], "copies": []}
    with lm.CheckpointManager(f"{folder}/managed", keep_last=1) as manager:
        for number in range(rounds + 1):
            start = time.perf_counter()
            lm.save(model, f"{folder}/saved", step=number)
            saved = time.perf_counter()
            shutil.rmtree(f"{folder}/saved")
            begin = time.perf_counter()
            manager.save(model, number)
            returned = time.perf_counter()
            model = step(model)
            manager.wait()
            durable = time.perf_counter()
            if number:  # the first round warms up
                times["save"].append(saved - start)
                times["blocks"].append(returned - begin)
                times["then there"].append(durable - begin)
                times["copies"].append(time_memcpy(NUM_WEIGHTS * rows * WIDTH * 4))
    print(json.dumps({name: statistics.median(each) for name, each in times.items()}))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--frameworks", nargs="*", default=FRAMEWORKS, choices=FRAMEWORKS)
    parser.add_argument("--directory", help="a directory on the file system to measure")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        measure_framework(arguments.child[0], arguments.gib, arguments.rounds, arguments.child[1])
        return
    print(f"{'':8}{'save':>10}{'blocks':>10}{'share':>10}{'then there':>12}{'copies':>10}   seconds")
    for framework in arguments.frameworks:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
            options = ["--gib", str(arguments.gib), "--rounds", str(arguments.rounds)]
            command = [__file__, *options, "--child", framework, folder]
            times = run_script(command, EIGHT_DEVICES | {"JAX_PLATFORMS": "cpu"})
        print(
            f"{framework:8}{times['save']:>10.3f}{times['blocks']:>10.3f}{times['blocks'] / times['save']:>10.1%}"
            f"{times['then there']:>12.3f}{times['copies']:>10.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
