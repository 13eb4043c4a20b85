"""Describe the training step of a planned model, and load the class that computes costs of its framework's steps."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from layoutmap.core.errors import EngineError
from layoutmap.core.steps import TrainingStep
from layoutmap.scope.context import Scope

# Only costs use descriptions of steps, so the modules that make them are here, not in the adapters (decisions/0196).
_MODULES = {
    "keras": "layoutmap.cost.jax.keras_step",
    "jax": "layoutmap.cost.jax.pytree_step",
    "torch": "layoutmap.cost.torch_module_step",
}
"""Dict from a library to the module with `describe_training_step` for its models, which imports a framework."""


def make_training_step(
    context: Scope, model: Any, inputs: Any, optimizer: Any, loss: Callable[..., Any] | None
) -> TrainingStep:
    """Return the training step of a model that was built in a dry run.

    Without `optimizer` or `loss`, the model's own is used, or else no slots and the mean of the squared outputs.
    """
    module = import_module(_MODULES[context.adapter.name])
    return module.describe_training_step(context.session, model, inputs, optimizer, loss)


_STEP_COST_COUNTERS = {"jax": "layoutmap.cost.jax.lowered", "torch": "layoutmap.cost.torch_step"}


def load_step_cost_counter(engine_name: str) -> Any:
    """Return the class `StepCostCounter` of a framework. Its `compute_cost` returns the cost of a `TrainingStep`."""
    if engine_name not in _STEP_COST_COUNTERS:
        raise EngineError(
            f"the cost of a step cannot be computed on {engine_name}",
            facts={"computed on": ", ".join(_STEP_COST_COUNTERS)},
            why=f"the compiler of {engine_name} chooses the collectives, and needs the devices of the mesh for that",
            fix="plan the same rules with the model on JAX: the layouts are the same (KERAS_BACKEND=jax)",
        )
    return import_module(_STEP_COST_COUNTERS[engine_name]).StepCostCounter
