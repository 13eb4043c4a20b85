"""What a checkpoint keeps of a model of JAX, and of the state of an optimizer of optax."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from layoutmap.adapters.jax.objects import is_variable
from layoutmap.adapters.jax.optimizers import describe, is_nnx_optimizer, params_of
from layoutmap.adapters.jax.tracing import is_key
from layoutmap.adapters.jax.training import arrays_of, model_in, put_values
from layoutmap.adapters.protocol import Stored
from layoutmap.core.variables import Kind, VariableSpec


def stored(model: Any, optimizer: Any) -> list[Stored]:
    """Return the arrays of a model, and those of an optimizer's state; of random keys their data."""
    found: list[Stored] = []
    for leaf in arrays_of(model).leaves:
        array = _data(leaf.value)
        spec = VariableSpec(leaf.path, tuple(array.shape), array.dtype.name, leaf.kind, leaf.aliases)
        found.append(Stored(spec, array))
    if optimizer is not None:
        specs = describe(lambda _: _state(optimizer), _params(model, optimizer)).slots
        found += map(Stored, specs, _leaves(_state(optimizer)))
        if is_nnx_optimizer(optimizer):
            step = optimizer.step.get_raw_value()
            found.append(Stored(VariableSpec("optimizer.step", (), step.dtype.name, Kind.SLOT), step))
    return found


def restored(model: Any, optimizer: Any, arrays: Iterable[tuple[str, Any]]) -> tuple[Any, Any]:
    """Return a model and its optimizer's state with other arrays; modules of nnx are changed in place."""
    new = dict(arrays)
    leaves = arrays_of(model).leaves
    values = [_like(leaf.value, new[leaf.path]) if leaf.path in new else leaf.value for leaf in leaves]
    slots = (
        [] if optimizer is None else describe(lambda _: _state(optimizer), _params(model, optimizer)).slots
    )
    model = put_values(model, values)
    if optimizer is None:
        return model, None
    moved = iter(slots)

    def put(leaf: Any) -> Any:
        path = next(moved).path
        return jnp.asarray(new[path]) if path in new else leaf

    def put_all(leaf: Any) -> Any:
        if not is_variable(leaf):
            return put(leaf)
        leaf.set_raw_value(jax.tree.map(put, leaf.get_raw_value()))
        return leaf

    state = jax.tree.map(put_all, _state(optimizer), is_leaf=is_variable)
    if not is_nnx_optimizer(optimizer):
        return model, state
    if "optimizer.step" in new:
        optimizer.step.set_raw_value(jnp.asarray(new["optimizer.step"]))
    return model, optimizer


def _state(optimizer: Any) -> Any:
    return optimizer.opt_state if is_nnx_optimizer(optimizer) else optimizer


def _params(model: Any, optimizer: Any) -> Any:
    return params_of(model_in(model), optimizer.wrt if is_nnx_optimizer(optimizer) else None)


def _leaves(state: Any) -> list[Any]:
    from layoutmap.adapters.jax.optimizers import named_leaves

    return [leaf for _, leaf in named_leaves(state)]


def _data(array: Any) -> Any:
    return jax.random.key_data(array) if is_key(array) else array


def _like(old: Any, new: Any) -> Any:
    new = jnp.asarray(new)
    return jax.random.wrap_key_data(new, impl=jax.random.key_impl(old)) if is_key(old) else new
