"""What grouped convolutions take with the forms in which this library lowers them on JAX, beside XLA's own.

    python benchmarks/kernel_gradients.py                 twenty drawn convolutions: 14 minutes on two cores
    python benchmarks/kernel_gradients.py --seed 7 --count 50

A convolution in groups is drawn (depthwise or not, one or two dimensions, window, stride, dilation, features, rows),
its batch sharded over `batch` of a mesh of 2 x 4 CPU devices. Timed is one call of its value and the gradients of its
input and kernel. XLA's own is what JAX compiles without this library: its gradient of the kernel is wrong
(docs/xla-faults.md). Both take turns in one process; medians of each, then the median and the worst ratio of all.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import layoutmap as lm

CALLS = 15


def drawn(rng: random.Random) -> dict[str, Any]:
    """Return a convolution in groups."""
    rank = rng.choice([1, 2, 2])
    groups = rng.choice([2, 4, 8, 32, 64])
    of_group = rng.choice([1, 1, 2, 4])
    return {
        "rows": rng.choice([8, 16, 32]),
        "size": [rng.choice([8, 14, 28] if rank == 2 else [64, 128, 512])] * rank,
        "window": [rng.choice([3, 5, 7] if rank == 2 else [3, 4, 8])] * rank,
        "stride": rng.choice([1, 1, 2]),
        "dilation": rng.choice([1, 1, 2]),
        "groups": groups,
        "features": groups * of_group,
    }


def make_step(
    *, rows: int, size: list[int], window: list[int], stride: int, dilation: int, groups: int, features: int
) -> tuple[Any, list[Any]]:
    """Return a new function of value and gradients, and its arrays."""
    rank, space = len(size), "HW"[: len(size)]
    numbers = (f"N{space}C", f"{space}IO", f"N{space}C")

    def loss(x: Any, kernel: Any) -> Any:
        y = jax.lax.conv_general_dilated(
            x,
            kernel,
            [stride] * rank,
            "SAME",
            rhs_dilation=[dilation] * rank,
            dimension_numbers=numbers,
            feature_group_count=groups,
        )
        return (y**2).sum()

    rng = np.random.default_rng(0)
    shapes = ((rows, *size, features), (*window, features // groups, features))
    arrays = [rng.normal(size=shape).astype("float32") for shape in shapes]
    return jax.jit(jax.value_and_grad(loss, (0, 1))), arrays


def place(arrays: list[Any]) -> list[Any]:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("batch", "model"))
    specs = PartitionSpec("batch"), PartitionSpec()
    return [jax.device_put(each, NamedSharding(mesh, spec)) for each, spec in zip(arrays, specs, strict=True)]


def timed(step: Any, arrays: list[Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(step(*arrays))
    return (time.perf_counter() - begin) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seed", type=int, default=int(time.strftime("%Y%m%d")), help="default: today's date"
    )
    parser.add_argument("--count", type=int, default=20)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    cases = [drawn(rng) for _ in range(options.count)]
    own = []
    for case in cases:  # compiled before this library corrects anything
        step, arrays = make_step(**case)
        own.append((step, place(arrays)))
        timed(*own[-1])
    mesh = lm.create_mesh("batch=2,model=4", device_type="cpu")
    lm.dtensor.relayout(np.zeros(()), lm.Layout.replicated(mesh, 0))
    ratios = []
    for case, xla in zip(cases, own, strict=True):
        here = make_step(**case)[0], xla[1]
        timed(*here)
        times = [(timed(*here), timed(*xla)) for _ in range(CALLS)]
        one, other = (statistics.median(each) for each in zip(*times, strict=True))
        ratios.append(one / other)
        print(f"{one:8.2f} / {other:8.2f} ms = {ratios[-1]:5.2f}   {case}", flush=True)
    print(
        f"seed {options.seed}, {len(ratios)} drawn: median {statistics.median(ratios):.2f}, worst {max(ratios):.2f}"
    )


if __name__ == "__main__":
    main()
