"""Measure the time of `lm.inspect`, and the share of a training run that `lm.guard` takes with steps of 100 ms.

    python benchmarks/inspect_model.py

A model of `--variables` variables, sharded over eight simulated devices, is inspected without and with a comparison of
its values. A guard inspects the model at the first step and at every 1000th. The last column is the interval of
inspections that takes 0.1 % of a run. With `--devices 1` the process has one device, as on most clusters. All times are
CPU times.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from measure import make_parser, time_call

import layoutmap as lm

STEP_SECONDS, EVERY = 0.1, 1000


def make(number: int, shape: tuple[int, int], devices: int) -> dict[str, dict[str, jax.Array]]:
    """Return a model with this many weights, of which a sixteenth are replicated."""
    mesh = jax.make_mesh((2, devices // 2) if devices > 1 else (1, 1), ("data", "model"))
    columns, replicated = (jax.NamedSharding(mesh, jax.P(*specs)) for specs in ((None, "model"), ()))
    weights = [jax.device_put(jnp.ones(shape), columns if n % 16 else replicated) for n in range(number)]
    return {f"block_{n}": {"kernel": weight} for n, weight in enumerate(weights)}


def measure_cpu_seconds(function: Callable[[], object], repeats: int = 5) -> float:
    """Return the median CPU seconds of several calls."""
    return statistics.median(time_call(function, time.process_time)[0] for _ in range(repeats))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--variables", type=int, nargs="+", default=[300, 10_000])
    parser.add_argument("--devices", type=int, default=8)
    options = parser.parse_args()
    lm.simulate_devices(options.devices)
    print("variables     bytes     inspect      across      a call  share of a run  every, for 0.1 %")
    for number in options.variables:
        model = make(number, (64, 256) if number < 1000 else (8, 8), options.devices)
        size = sum(each["kernel"].nbytes for each in model.values())
        look = measure_cpu_seconds(functools.partial(lm.inspect, model))
        across = measure_cpu_seconds(functools.partial(lm.inspect, model, across=True))
        guard = lm.guard(model, lm.inspect(model), every=10**9)
        guard()
        call = measure_cpu_seconds(lambda: [guard() for _ in range(EVERY - 1)])  # noqa: B023
        share = (across + call) / (EVERY * STEP_SECONDS)
        print(
            f"{number:>9,}  {size / 1e6:>5.1f} MB  {look * 1e3:>7.1f} ms  {across * 1e3:>7.1f} ms  "
            f"{call / EVERY * 1e6:>7.2f} us  {share:>14.3%}  {across / STEP_SECONDS / 0.001:>16,.0f}"
        )


if __name__ == "__main__":
    main()
