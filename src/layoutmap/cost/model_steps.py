"""Describe the training step of a planned model, for the counter of its framework."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

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
