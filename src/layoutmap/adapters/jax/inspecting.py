"""Describe the variables of any JAX model and its optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from layoutmap.adapters.jax.checkpoints import list_optimizer_arrays
from layoutmap.adapters.jax.mutable_arrays import check_no_mutable_or_hidden_arrays
from layoutmap.adapters.jax.nnx_types import is_nnx_module, is_nnx_optimizer
from layoutmap.adapters.jax.optimizers import describe_weights
from layoutmap.adapters.jax.pytrees import flatten_with_paths, format_pytree_key
from layoutmap.adapters.jax.slots import OptimizerLeaf, PathParts, describe_slots
from layoutmap.adapters.jax.training import TrainState, unwrap_and_split_model, unwrap_train_state
from layoutmap.adapters.protocol import StoredVariable
from layoutmap.core.variables import Kind, VariableSpec

_STATE = "opt_state"


def describe_arrays(model: Any, optimizer: object = None) -> list[StoredVariable]:
    """Return a model's arrays as variables of a plan, followed by the arrays of its optimizer's state as slots."""
    check_no_mutable_or_hidden_arrays(unwrap_train_state(model))
    parts = unwrap_and_split_model(model)
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
    if optimizer is None and not isinstance(model, TrainState) and not is_nnx_module(model):
        return _list_optax_states_as_slots(model, found)
    return found + list_optimizer_arrays(model, optimizer)


def _list_optax_states_as_slots(tree: object, arrays: Sequence[StoredVariable]) -> list[StoredVariable]:
    """Return the arrays of a pytree. Those in states of optax come last, described as slots of their weights."""
    by_path = {each.variable.path: each for each in arrays}
    leaves = {".".join(parts): parts for parts, _ in flatten_with_paths(tree)}
    inside = [
        ".".join((*map(format_pytree_key, top), *parts))
        for top, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_optax_state)[0]
        if _is_optax_state(node)
        for parts, _ in flatten_with_paths(node)
    ]
    slots = [by_path.pop(path) for path in inside if path in by_path]
    # A slot's path contains only the end of its weight's path, so find the weights by the ends of their paths.
    ends: dict[PathParts, VariableSpec | None] = {}
    for path, each in by_path.items():
        parts = leaves[path]
        for start in range(len(parts) if each.variable.kind is Kind.WEIGHT else 0):
            if not parts[start].isdecimal():  # skip parts that may be positions in a chain of states
                ends[parts[start:]] = None if parts[start:] in ends else each.variable
    weights = {parts: spec for parts, spec in ends.items() if spec is not None}
    described = [OptimizerLeaf(leaves[v.path], v.shape, v.dtype) for v in (slot.variable for slot in slots)]
    specs = describe_slots(weights, described)
    return [
        *by_path.values(),
        *(
            replace(slot, variable=replace(spec, memory=slot.variable.memory))
            for slot, spec in zip(slots, specs, strict=True)
        ),
    ]


def _is_optax_state(node: object) -> bool:
    """Return whether a node of a pytree is a state of optax. `LookaheadParams` is not: it contains parameters."""
    kind = type(node)
    return kind.__module__.partition(".")[0] == "optax" and kind.__name__ != "LookaheadParams"


def _is_flax_train_state(model: object) -> bool:
    """Return whether a pytree is like flax's `TrainState`, with parameters and their optimizer's state."""
    is_pytree = not isinstance(model, TrainState) and not is_nnx_module(model)
    return is_pytree and hasattr(model, "params") and hasattr(model, _STATE)
