"""Compare the time of grouped convolutions as this library lowers them on JAX with XLA's own lowering.

    python benchmarks/kernel_gradients.py                 twenty random convolutions: 14 minutes on two cores
    python benchmarks/kernel_gradients.py --seed 7 --count 50

Each grouped convolution is random: depthwise or not, one or two dimensions, window, stride, dilation, features, rows.
Its batch is sharded over `batch` of a mesh of 2 x 4 CPU devices. One call computes its value and the gradients of its
input and kernel. XLA's own lowering is the one of JAX without this library, and its gradient of the kernel is wrong
(docs/xla-faults.md). Both take turns in one process. Each line has their medians, and the last line the median and the
worst of all ratios.
"""

from __future__ import annotations

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
from measure import make_parser, time_call

import layoutmap as lm

CALLS = 15


def draw_convolution(rng: random.Random) -> dict[str, Any]:
    """Return the parameters of a random grouped convolution."""
    rank = rng.choice([1, 2, 2])
    groups = rng.choice([2, 4, 8, 32, 64])
    group_features = rng.choice([1, 1, 2, 4])
    return {
        "rows": rng.choice([8, 16, 32]),
        "size": [rng.choice([8, 14, 28] if rank == 2 else [64, 128, 512])] * rank,
        "window": [rng.choice([3, 5, 7] if rank == 2 else [3, 4, 8])] * rank,
        "stride": rng.choice([1, 1, 2]),
        "dilation": rng.choice([1, 1, 2]),
        "groups": groups,
        "features": groups * group_features,
    }


def make_step(
    *, rows: int, size: list[int], window: list[int], stride: int, dilation: int, groups: int, features: int
) -> tuple[Any, list[Any]]:
    """Return a function that computes the value and gradients of a convolution, and its arrays."""
    rank, space = len(size), "HW"[: len(size)]
    numbers = (f"N{space}C", f"{space}IO", f"N{space}C")

    def compute_loss(x: Any, kernel: Any) -> Any:
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
    return jax.jit(jax.value_and_grad(compute_loss, (0, 1))), arrays


def place(arrays: list[Any]) -> list[Any]:
    """Place an input sharded by rows, and a replicated kernel."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("batch", "model"))
    specs = PartitionSpec("batch"), PartitionSpec()
    return [jax.device_put(each, NamedSharding(mesh, spec)) for each, spec in zip(arrays, specs, strict=True)]


def measure_milliseconds(step: Any, arrays: list[Any]) -> float:
    """Return the milliseconds of one step."""
    return 1e3 * time_call(lambda: jax.block_until_ready(step(*arrays)))[0]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--seed", type=int, default=int(time.strftime("%Y%m%d")), help="default: today's date"
    )
    parser.add_argument("--count", type=int, default=20)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    cases = [draw_convolution(rng) for _ in range(options.count)]
    xla_steps = []
    for case in cases:  # compiles before this library replaces the lowering
        step, arrays = make_step(**case)
        xla_steps.append((step, place(arrays)))
        measure_milliseconds(*xla_steps[-1])
    mesh = lm.create_mesh("batch=2,model=4", device_type="cpu")
    lm.dtensor.relayout(np.zeros(()), lm.Layout.replicated(mesh, 0))
    ratios = []
    for case, xla in zip(cases, xla_steps, strict=True):
        own = make_step(**case)[0], xla[1]
        measure_milliseconds(*own)  # compiles
        times = [(measure_milliseconds(*own), measure_milliseconds(*xla)) for _ in range(CALLS)]
        own_ms, xla_ms = (statistics.median(each) for each in zip(*times, strict=True))
        ratios.append(own_ms / xla_ms)
        print(f"{own_ms:8.2f} / {xla_ms:8.2f} ms = {ratios[-1]:5.2f}   {case}", flush=True)
    print(
        f"seed {options.seed}, {len(ratios)} drawn: median {statistics.median(ratios):.2f}, worst {max(ratios):.2f}"
    )


if __name__ == "__main__":
    main()
