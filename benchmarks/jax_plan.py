"""How long it takes to plan a Llama in flax.nnx that no machine here could hold, beside `nnx.eval_shape` of it.

    python benchmarks/jax_plan.py                  Llama 3 of 8 and 70 billion parameters, on 4,096 devices


On a mesh of 512 x 8 devices that do not exist. Each is a fresh process; imports are not counted. The time of the
processor is given beside that of the clock, for machines that do other things at the same time.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

MESH = "batch=512,model=8"


def child(name: str) -> None:
    """One plan and one abstract model, in this process."""
    from flax import nnx
    from nnx_models import RULES, SIZES, LlamaModel

    import layoutmap as lm
    from layoutmap.adapters import get_adapter

    get_adapter("jax")
    layout_map = lm.LayoutMap(MESH, RULES)

    def make() -> nnx.Module:
        return LlamaModel(SIZES[name], nnx.Rngs(0))

    plan, planning = timed(lambda: lm.plan(make, layout_map, library="jax"))
    _, shapes = timed(lambda: nnx.eval_shape(make))
    print(f"{name:>11}  {len(plan)} variables  plan {planning}  nnx.eval_shape {shapes}  {plan!r}")


def timed(function: Callable[[], Any]) -> tuple[Any, str]:
    """Return the result of a function, and how long it took."""
    wall, processor = time.perf_counter(), time.process_time()
    result = function()
    return (
        result,
        f"{time.perf_counter() - wall:.2f} s ({time.process_time() - processor:.2f} s of processor)",
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        child(sys.argv[1])
    else:
        for each in ("llama3_8b", "llama3_70b"):
            subprocess.run([sys.executable, __file__, each], check=True)
