"""How long it takes to plan models that no machine here could hold, and how much memory that needs.

    python benchmarks/hub_plan.py                  Llama 3 of 8, 70 and 405 billion parameters, on 4,096 devices

Backbones of keras-hub under the preset for Llama, on a mesh of 512 x 8 devices that do not exist. Each is a fresh
process; imports are not counted.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time

MESH = "batch=512,model=8"
NAMES = ("llama3_8b", "llama3_70b", "llama3_405b")


def child(name: str) -> None:
    """One plan, in this process."""
    os.environ["KERAS_BACKEND"] = "jax"
    import jax  # noqa: F401 - so that it is not counted
    import keras_hub  # noqa: F401 - nor this

    import layoutmap as lm
    from layoutmap.rules import zoo

    layout_map = lm.LayoutMap.preset("llama", lm.Mesh(None, MESH))
    before, start = _peak_mib(), time.perf_counter()
    plan = lm.plan(zoo.model(name).make, layout_map, library="keras")
    seconds = time.perf_counter() - start
    print(f"{name:>11}  {len(plan):>5} variables  {seconds:.2f} s  {_peak_mib() - before:.0f} MiB  {plan!r}")


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    if len(sys.argv) > 1:
        child(sys.argv[1])
    else:
        for each in NAMES:
            subprocess.run([sys.executable, __file__, each], check=True, stderr=subprocess.DEVNULL)
