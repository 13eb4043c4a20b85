"""Describe the variables of any JAX model and its optimizer, and find the scope that sharded a model."""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import replace
from typing import Any

from layoutmap.adapters.jax.checkpoints import list_optimizer_arrays
from layoutmap.adapters.jax.models import is_nnx
from layoutmap.adapters.jax.mutable_arrays import check_immutable
from layoutmap.adapters.jax.objects import is_nnx_optimizer
from layoutmap.adapters.jax.optimizers import describe_weights
from layoutmap.adapters.jax.training import TrainState, split_model, unwrap_model
from layoutmap.adapters.protocol import ScopeContext, Stored
from layoutmap.core.variables import Kind

_contexts: dict[int, tuple[weakref.ref[object], ScopeContext]] = {}
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


def note_context(model: object, context: ScopeContext) -> None:
    """Record the scope that shards a model, while the model lives. A dict or tuple cannot be recorded."""
    for each in (model, unwrap_model(model)):
        key = id(each)
        with suppress(TypeError):
            _contexts[key] = weakref.ref(each, lambda _, key=key: _contexts.pop(key, None)), context


def find_context(model: object) -> ScopeContext | None:
    """Return the context of the scope that sharded a model, or None."""
    ref, context = _contexts.get(id(model), (None, None))
    return context if ref is not None and ref() is model else None
