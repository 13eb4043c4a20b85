"""Describe the training step of a planned model, and load the counter of its framework."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from layoutmap.core.errors import EngineError
from layoutmap.core.steps import TrainingStep
from layoutmap.scope.context import Scope

# Only the cost needs a step's description, so it is kept here and not in the adapters (decisions/0196).
_MODULES = {
    "keras": "layoutmap.cost.jax.keras_step",
    "jax": "layoutmap.cost.jax.pytree_step",
    "torch": "layoutmap.cost.torch_module_step",
}
"""Model library -> the module whose `describe_step` knows its models. Imported late: each imports a framework."""


def make_training_step(
    context: Scope, model: Any, inputs: Any, optimizer: Any, loss: Callable[..., Any] | None
) -> TrainingStep:
    """Return the training step of a model from a dry run.

    Without `optimizer` or `loss`, the model's own is used, or else none, or a loss that stands for it.
    """
    module = import_module(_MODULES[context.adapter.name])
    return module.describe_step(context.session, model, inputs, optimizer, loss)


_STEP_COUNTERS = {"jax": "layoutmap.cost.jax.lowered", "torch": "layoutmap.cost.torch_step"}


def load_step_counter(name: str) -> Any:
    """Return the class that counts a `TrainingStep` of a framework with its method `count`."""
    if name not in _STEP_COUNTERS:
        raise EngineError(
            f"the cost of a step cannot be counted on {name}",
            facts={"counted on": ", ".join(_STEP_COUNTERS)},
            why=f"a compiler that needs the devices decides what {name} sends between them",
            fix="plan the same rules with the model on JAX: the layouts are the same (KERAS_BACKEND=jax)",
        )
    return import_module(_STEP_COUNTERS[name]).LoweredStep
