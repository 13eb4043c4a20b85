"""Measure the time and memory of planning models that are too large for this machine.

    python benchmarks/hub_plan.py                  Llama 3 of 8, 70 and 405 billion parameters, on 4,096 devices

The models are backbones of keras-hub under the preset for Llama, on a mesh of 512 x 8 devices that do not exist. Each
plan runs in a fresh process, and imports do not count.
"""

from __future__ import annotations

import os
import subprocess
import sys

from measure import read_peak_bytes, time_call

MESH = "batch=512,model=8"
NAMES = ("llama3_8b", "llama3_70b", "llama3_405b")


def plan_model(name: str) -> None:
    """Plan one model in this process, and print the measurements."""
    os.environ["KERAS_BACKEND"] = "jax"
    import jax  # noqa: F401 - excludes its import from the measurement
    import keras_hub  # noqa: F401 - likewise

    import layoutmap as lm
    from layoutmap.rules import zoo

    layout_map = lm.LayoutMap.preset("llama", lm.Mesh(None, MESH))
    before = read_peak_bytes()
    seconds, plan = time_call(lambda: lm.plan(zoo.find_model(name).make, layout_map, library="keras"))
    mib = (read_peak_bytes() - before) / 2**20
    print(f"{name:>11}  {len(plan):>5} variables  {seconds:.2f} s  {mib:.0f} MiB  {plan!r}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        plan_model(sys.argv[1])
    else:
        for each in NAMES:
            subprocess.run([sys.executable, __file__, each], check=True, stderr=subprocess.DEVNULL)
