"""Load the counter of training steps for a framework."""

from __future__ import annotations

import importlib
from typing import Any

from layoutmap.core.errors import EngineError

_STEP_COUNTERS = {"jax": "layoutmap.cost.jax.lowered", "torch": "layoutmap.cost.torch_step"}


def load_step_counter(name: str) -> Any:
    """Return the class that counts a `TrainingStep` of a framework with its method `count`.

    Raises:
        EngineError: Steps of that framework cannot be counted.
    """
    if name not in _STEP_COUNTERS:
        raise EngineError(
            f"the cost of a step cannot be counted on {name}",
            facts={"counted on": ", ".join(_STEP_COUNTERS)},
            why=f"what {name} sends between devices is decided by a compiler that needs the devices",
            fix="plan the same rules with the model on JAX: the layouts are the same (KERAS_BACKEND=jax)",
        )
    return importlib.import_module(_STEP_COUNTERS[name]).LoweredStep
