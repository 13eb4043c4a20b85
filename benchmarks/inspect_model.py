"""How long it takes to look at a model, and what a guard costs a training run; beside steps of 100 ms.

    python benchmarks/inspect_model.py

A model of as many variables as asked, sharded over eight simulated devices, is inspected, with and without its values
compared. A guard looks at the first step and every 1000th; the last column is how far apart its looks are to be for
0.1 % of a run. With `--devices 1` the process has one device, as on most clusters. All times are the processor's.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

import layoutmap as lm

STEP_SECONDS, EVERY = 0.1, 1000


def make(number: int, shape: tuple[int, int], devices: int) -> dict[str, dict[str, jax.Array]]:
    """Return a model of so many weights, a sixteenth of them replicated."""
    mesh = jax.make_mesh((2, devices // 2) if devices > 1 else (1, 1), ("data", "model"))
    columns, whole = (jax.NamedSharding(mesh, jax.P(*specs)) for specs in ((None, "model"), ()))
    weights = [jax.device_put(jnp.ones(shape), columns if n % 16 else whole) for n in range(number)]
    return {f"block_{n}": {"kernel": weight} for n, weight in enumerate(weights)}


def seconds(function: Callable[[], object], repeats: int = 5) -> float:
    """Return the median of several times of the processor, which others on the machine do not change."""
    times: list[float] = []
    for _ in range(repeats):
        begun = time.process_time()
        function()
        times.append(time.process_time() - begun)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variables", type=int, nargs="+", default=[300, 10_000])
    parser.add_argument("--devices", type=int, default=8)
    options = parser.parse_args()
    lm.simulate_devices(options.devices)
    print("variables     bytes     inspect      across      a call  share of a run  every, for 0.1 %")
    for number in options.variables:
        model = make(number, (64, 256) if number < 1000 else (8, 8), options.devices)
        size = sum(each["kernel"].nbytes for each in model.values())
        look = seconds(functools.partial(lm.inspect, model))
        across = seconds(functools.partial(lm.inspect, model, across=True))
        guard = lm.guard(model, lm.inspect(model), every=10**9)
        guard()
        call = seconds(lambda: [guard() for _ in range(EVERY - 1)])  # noqa: B023
        share = (across + call) / (EVERY * STEP_SECONDS)
        print(
            f"{number:>9,}  {size / 1e6:>5.1f} MB  {look * 1e3:>7.1f} ms  {across * 1e3:>7.1f} ms  "
            f"{call / EVERY * 1e6:>7.2f} us  {share:>14.3%}  {across / STEP_SECONDS / 0.001:>16,.0f}"
        )


if __name__ == "__main__":
    main()
