"""Compare the time of planning a large Llama in flax.nnx with `nnx.eval_shape` of it.

    python benchmarks/jax_plan.py                  Llama 3 of 8 and 70 billion parameters, on 4,096 devices

The mesh has 512 x 8 devices that do not exist. Each model runs in a fresh process, and imports do not count. CPU
seconds stand beside wall seconds, because a busy machine changes only the latter.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from measure import time_call

MESH = "batch=512,model=8"


def plan_model(name: str) -> None:
    """Plan one model and evaluate its shapes in this process, and print the times."""
    from flax import nnx
    from nnx_models import RULES, SIZES, LlamaModel

    import layoutmap as lm
    from layoutmap.adapters import get_adapter

    get_adapter("jax")
    layout_map = lm.LayoutMap(MESH, RULES)

    def make() -> nnx.Module:
        return LlamaModel(SIZES[name], nnx.Rngs(0))

    plan, planning = describe_time(lambda: lm.plan(make, layout_map, library="jax"))
    _, shapes = describe_time(lambda: nnx.eval_shape(make))
    print(f"{name:>11}  {len(plan)} variables  plan {planning}  nnx.eval_shape {shapes}  {plan!r}")


def describe_time(function: Callable[[], Any]) -> tuple[Any, str]:
    """Call a function, and return its result and a text with its wall and CPU seconds."""
    wall, (cpu, result) = time_call(lambda: time_call(function, time.process_time))
    return result, f"{wall:.2f} s ({cpu:.2f} s of processor)"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        plan_model(sys.argv[1])
    else:
        for each in ("llama3_8b", "llama3_70b"):
            subprocess.run([sys.executable, __file__, each], check=True)
