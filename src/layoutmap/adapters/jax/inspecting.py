"""Describe the variables of any JAX model and its optimizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from layoutmap.adapters.jax.checkpoints import list_optimizer_arrays
from layoutmap.adapters.jax.models import is_nnx
from layoutmap.adapters.jax.mutable_arrays import check_immutable
from layoutmap.adapters.jax.objects import is_nnx_optimizer
from layoutmap.adapters.jax.optimizers import describe_weights
from layoutmap.adapters.jax.training import TrainState, split_model, unwrap_model
from layoutmap.adapters.protocol import Stored
from layoutmap.core.variables import Kind

_STATE = "opt_state"


def describe_arrays(model: Any, optimizer: object = None) -> list[Stored]:
    """Return a model's arrays as variables of a plan, and those of its optimizer's state as slots."""
    check_immutable(unwrap_model(model))
    parts = split_model(model)
    specs = parts.specs
    found = [Stored(specs[number], parts.leaves[number].value) for number in parts.order or range(len(specs))]
    if is_nnx_optimizer(model):
        return [replace(each, variable=replace(each.variable, kind=Kind.SLOT)) for each in found]
    if optimizer is None and _is_flax_train_state(model):
        found_weights = describe_weights(model.params)[0].items()
        weights = {parts: replace(spec, path=f"params.{spec.path}") for parts, spec in found_weights}
        found = [each for each in found if not each.variable.path.startswith(f"{_STATE}.")]
        return found + list_optimizer_arrays(model, model.opt_state, weights)
    return found + list_optimizer_arrays(model, optimizer)


def _is_flax_train_state(model: object) -> bool:
    """Return whether a pytree is like flax's `TrainState`, with parameters and their optimizer's state."""
    is_pytree = not isinstance(model, TrainState) and not is_nnx(model)
    return is_pytree and hasattr(model, "params") and hasattr(model, _STATE)
