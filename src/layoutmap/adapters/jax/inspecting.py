"""The variables of a model of JAX that any program has made, with its optimizer's state; and the scope of ours."""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import replace
from typing import Any

from layoutmap.adapters.jax.checkpoints import optimizer_arrays
from layoutmap.adapters.jax.models import is_nnx
from layoutmap.adapters.jax.mutable_arrays import check_immutable
from layoutmap.adapters.jax.objects import is_nnx_optimizer
from layoutmap.adapters.jax.optimizers import weights_of
from layoutmap.adapters.jax.training import TrainState, arrays_of, model_in
from layoutmap.adapters.protocol import ScopeContext, Stored
from layoutmap.core.variables import Kind

_contexts: dict[int, tuple[weakref.ref[object], ScopeContext]] = {}
_STATE = "opt_state"


def described(model: Any, optimizer: object = None) -> list[Stored]:
    """Return the arrays of a model as variables of a plan, and those of an optimizer's state as slots."""
    check_immutable(model_in(model))
    parts = arrays_of(model)
    specs = parts.specs
    found = [Stored(specs[number], parts.leaves[number].value) for number in parts.order or range(len(specs))]
    if is_nnx_optimizer(model):
        return [replace(each, variable=replace(each.variable, kind=Kind.SLOT)) for each in found]
    if optimizer is None and _has_both(model):
        found_weights = weights_of(model.params)[0].items()
        weights = {parts: replace(spec, path=f"params.{spec.path}") for parts, spec in found_weights}
        found = [each for each in found if not each.variable.path.startswith(f"{_STATE}.")]
        return found + optimizer_arrays(model, model.opt_state, weights)
    return found + optimizer_arrays(model, optimizer)


def _has_both(model: object) -> bool:
    """Whether a pytree is a train state, as flax has one: parameters, and the state of their optimizer."""
    is_pytree = not isinstance(model, TrainState) and not is_nnx(model)
    return is_pytree and hasattr(model, "params") and hasattr(model, _STATE)


def note_context(model: object, context: ScopeContext) -> None:
    """Note the scope that a model is laid out in, for as long as it lives; a dict or a tuple cannot be noted."""
    for each in (model, model_in(model)):
        key = id(each)
        with suppress(TypeError):
            _contexts[key] = weakref.ref(each, lambda _, key=key: _contexts.pop(key, None)), context


def context_of(model: object) -> ScopeContext | None:
    """Return the scope that a model was laid out in."""
    ref, context = _contexts.get(id(model), (None, None))
    return context if ref is not None and ref() is model else None
