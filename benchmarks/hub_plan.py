"""How long it takes to plan models that no machine here could hold, and how much memory that needs.

    python benchmarks/hub_plan.py                  Llama 3 of 8, 70 and 405 billion parameters, on 4,096 devices

Backbones of keras-hub under examples/rules/llama3.yaml, on a mesh of 512 x 8 devices that do not exist. Each is a fresh
process; imports are not counted.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

RULES = Path(__file__).resolve().parents[1] / "examples" / "rules" / "llama3.yaml"
MESH = "batch=512,model=8"
COMMON = {"vocabulary_size": 128_256, "num_key_value_heads": 8}
SIZES = {
    "8B": {"num_layers": 32, "num_query_heads": 32, "hidden_dim": 4096, "intermediate_dim": 14_336},
    "70B": {"num_layers": 80, "num_query_heads": 64, "hidden_dim": 8192, "intermediate_dim": 28_672},
    "405B": {"num_layers": 126, "num_query_heads": 128, "hidden_dim": 16_384, "intermediate_dim": 53_248},
}


def child(name: str) -> None:
    """One plan, in this process."""
    os.environ["KERAS_BACKEND"] = "jax"
    import jax  # noqa: F401 - so that it is not counted
    import keras_hub

    import layoutmap as lm

    layout_map = lm.LayoutMap.from_yaml(RULES.read_text(encoding="utf-8"), lm.Mesh(None, MESH))
    before, start = _peak_mib(), time.perf_counter()
    plan = lm.plan(
        lambda: keras_hub.models.Llama3Backbone(**COMMON, **SIZES[name]), layout_map, library="keras"
    )
    seconds = time.perf_counter() - start
    print(f"{name:>5}  {len(plan):>5} variables  {seconds:.2f} s  {_peak_mib() - before:.0f} MiB  {plan!r}")


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    if len(sys.argv) > 1:
        child(sys.argv[1])
    else:
        for each in SIZES:
            subprocess.run([sys.executable, __file__, each], check=True, stderr=subprocess.DEVNULL)
