"""Measure the time that two processes take to compare their programs and their batches.

python benchmarks/same_program.py [--kinds keras-jax keras-tensorflow keras-torch jit_step torch] [--blocks 12]

The benchmark prints the time of comparing programs before the first step, the time of comparing in a step with and
without a comparison of batches, and the share of both in 10,000 steps of 50 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from measure import make_parser, run_process_group

import layoutmap as lm
from layoutmap.engines import agreement

WIDTH, ROWS, STEPS = 256, 8, 20
RUN_STEPS, STEP_SECONDS = 10_000, 0.05
RULES = {r".*(query|key|value|up)\.kernel": (None, "model"), r".*(out|down)\.kernel": ("model", None)}


def make_keras_step(blocks: int) -> Callable[[], object]:
    """Return a step of `train_on_batch`."""
    from models import Decoder

    with lm.LayoutMap(lm.create_mesh("model=2"), RULES, rest="replicated").scope():
        model = Decoder(1024, WIDTH, 4 * WIDTH, 8, blocks)
        model.compile("adamw", "mse")
    x, y = np.zeros((ROWS, 64), np.int32), np.zeros((ROWS, 64, 1024), np.float32)
    model.predict_on_batch(x)  # creates the weights
    return lambda: model.train_on_batch(x, y)


def make_jit_step(blocks: int) -> Callable[[], object]:
    """Return a step of `lm.jit_step`."""
    import jax

    rules = {r".*up": (None, "model"), r".*down": ("model", None)}
    shapes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}

    def make() -> Any:
        key = jax.random.key(0)
        return [{n: jax.random.normal(key, s) / 16 for n, s in shapes.items()} for _ in range(blocks)]

    params = lm.LayoutMap(lm.create_mesh("model=2"), rules).build(make)

    @lm.jit_step
    def step(params: Any, x: Any) -> Any:
        def compute_loss(params: Any) -> Any:
            out = x
            for block in params:
                out = out + jax.nn.gelu(out @ block["up"]) @ block["down"]
            return (out**2).mean()

        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, jax.grad(compute_loss)(params))

    return lambda: jax.block_until_ready(step(params, np.ones((64 * ROWS, WIDTH), np.float32)))


def make_torch_step(blocks: int) -> Callable[[], object]:
    """Return a step of a training loop in torch."""
    import torch
    from torch_models import Decoder

    rules = {r".*\.(q|k|v|up)\.weight": ("model", None), r".*\.(o|down)\.weight": (None, "model")}
    torch.manual_seed(0)
    with lm.LayoutMap(lm.create_mesh("model=2"), rules, rest="replicated").scope():
        model = Decoder(1024, WIDTH, blocks, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.zeros((ROWS, 64), dtype=torch.int64)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


KINDS = {"keras": make_keras_step, "jit_step": make_jit_step, "torch": make_torch_step}


class Timer:
    """A function that sums the seconds of its calls.

    A call that gathers waits for the other process, as the step's own collectives would. That wait does not count.
    """

    def __init__(self, function: Callable[..., Any], *, is_gathering: bool = False):
        self.function, self.is_gathering = function, is_gathering
        self.seconds, self.calls = 0.0, 0

    def __call__(self, *args: Any) -> Any:
        if self.is_gathering:
            args[1](np.zeros(2, np.uint32))
        begin = time.perf_counter()
        try:
            return self.function(*args)
        finally:
            self.seconds += time.perf_counter() - begin
            self.calls += 1


def join(kind: str) -> None:
    """Connect to the other process."""
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    if kind == "keras-tensorflow":
        os.environ |= {"DTENSOR_JOBS": f"127.0.0.1:{port},127.0.0.1:{port + 1}", "DTENSOR_JOB_NAME": "worker"}
        os.environ["DTENSOR_CLIENT_ID"] = str(rank)
        from tensorflow.experimental import dtensor

        dtensor.initialize_accelerator_system("CPU", num_logical_cpu_devices=1)
        return
    sys.modules["tensorflow"] = None  # type: ignore[assignment] # keeps Keras from importing it
    if kind.endswith("torch"):
        import torch.distributed as dist

        dist.init_process_group("gloo")
    else:
        import jax

        jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)


def measure_kind(kind: str, blocks: int) -> dict[str, float]:
    """Return the milliseconds of each comparison in this process."""
    library, _, backend = kind.partition("-")
    os.environ["KERAS_BACKEND"] = backend or "jax"
    programs = Timer(agreement.check_same_program)
    # These compare batches and torch's random numbers. A step that is not due counts `count_call_and_check_due` alone.
    timers = [
        Timer(agreement.gather_unequal_texts_and_checksums, is_gathering=True),
        Timer(agreement.compute_checksum),
        Timer(agreement.CallComparisonSchedule.count_call_and_check_due),
    ]
    agreement.check_same_program = programs  # type: ignore[assignment]
    agreement.gather_unequal_texts_and_checksums, agreement.compute_checksum = timers[:2]  # type: ignore[assignment]
    due = list[bool]()

    def count_call_and_check_due(schedule: agreement.CallComparisonSchedule) -> bool:
        due.append(timers[2](schedule))
        return due[-1]

    agreement.CallComparisonSchedule.count_call_and_check_due = count_call_and_check_due  # type: ignore[method-assign]
    join(kind)
    step = KINDS[library](blocks)
    shares: dict[bool, list[float]] = {True: [0.0], False: [0.0]}
    for _ in range(STEPS):
        before = sum(each.seconds for each in timers)
        due.clear()
        step()
        shares[any(due)].append(sum(each.seconds for each in timers) - before)
    seconds = {"programs": programs.seconds / max(programs.calls, 1)}
    seconds |= {"compared": statistics.median(shares[True]), "not compared": statistics.median(shares[False])}
    return {name: each * 1e3 for name, each in seconds.items()}


def main() -> None:
    kinds = ["keras-jax", "keras-tensorflow", "keras-torch", "jit_step", "torch"]
    parser = make_parser(__doc__)
    parser.add_argument("--kinds", nargs="+", default=kinds, choices=kinds)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure_kind(options.child, options.blocks)))
        return
    schedule = agreement.CallComparisonSchedule()
    num_due = sum(schedule.count_call_and_check_due() for _ in range(RUN_STEPS))
    for kind in options.kinds:
        milliseconds = run_process_group(__file__, ["--blocks", str(options.blocks), "--child", kind], 2)
        spent = num_due * milliseconds["compared"] + (RUN_STEPS - num_due) * milliseconds["not compared"]
        print(
            f"{kind}, {options.blocks} blocks: programs {milliseconds['programs']:.1f} ms; a step that is compared "
            f"{milliseconds['compared']:.3f} ms, another {milliseconds['not compared']:.4f} ms; {num_due} of "
            f"{RUN_STEPS} steps of {STEP_SECONDS * 1e3:.0f} ms are compared: "
            f"{spent / 1e3 / (RUN_STEPS * STEP_SECONDS):.4%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
