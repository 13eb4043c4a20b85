"""Describe the variables of any JAX model and its optimizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from layoutmap.adapters.jax.checkpoints import list_optimizer_arrays
from layoutmap.adapters.jax.mutable_arrays import check_no_mutable_arrays
from layoutmap.adapters.jax.nnx_types import is_nnx_module, is_nnx_optimizer
from layoutmap.adapters.jax.optimizers import describe_weights
from layoutmap.adapters.jax.training import TrainState, unwrap_and_split, unwrap_model
from layoutmap.adapters.protocol import StoredVariable
from layoutmap.core.variables import Kind

_STATE = "opt_state"


def describe_arrays(model: Any, optimizer: object = None) -> list[StoredVariable]:
    """Return a model's arrays as variables of a plan, followed by the arrays of its optimizer's state as slots."""
    check_no_mutable_arrays(unwrap_model(model))
    parts = unwrap_and_split(model)
    specs = parts.specs
    order = parts.order or range(len(specs))
    found = [StoredVariable(specs[n], parts.leaves[n].value) for n in order]
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
    is_pytree = not isinstance(model, TrainState) and not is_nnx_module(model)
    return is_pytree and hasattr(model, "params") and hasattr(model, _STATE)
