"""List and replace the arrays in a checkpoint of a JAX model. Random keys are stored as their data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from layoutmap.adapters.jax.mutable_arrays import check_no_mutable_or_hidden_arrays
from layoutmap.adapters.jax.nnx_types import is_nnx_module, is_nnx_optimizer, is_nnx_variable
from layoutmap.adapters.jax.optimizers import describe_weights, get_parameter_tree
from layoutmap.adapters.jax.pytrees import flatten_with_paths
from layoutmap.adapters.jax.slots import OptimizerLeaf, PathParts, describe_slots
from layoutmap.adapters.jax.tracing import is_array, is_random_key
from layoutmap.adapters.jax.training import (
    TrainState,
    replace_arrays,
    unwrap_and_split_model,
    unwrap_train_state,
)
from layoutmap.adapters.protocol import SavedOptimizer, StoredVariable
from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import CheckpointError
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.engines import get_engine
from layoutmap.engines.jax.padded import (
    PaddedArray,
    replace_padded_arrays_by_shapes,
    unwrap_padded_array,
    wrap_padded_array,
)
from layoutmap.engines.jax.trees import find_memory_kind


def list_stored_arrays(
    model: object, optimizer: object, saved: SavedOptimizer | None = None
) -> list[StoredVariable]:
    """List the arrays that a checkpoint of a model and its optimizer's state contains, each with its description."""
    check_no_mutable_or_hidden_arrays(unwrap_train_state(model))
    found: list[StoredVariable] = []
    for leaf in unwrap_and_split_model(model).leaves:
        array = _convert_random_keys_to_integers(leaf.value)
        shape, dtype, memory = tuple(array.shape), array.dtype.name, find_memory_kind(array)
        spec = VariableSpec(leaf.path, shape, dtype, leaf.kind, leaf.aliases, memory=memory)
        found.append(StoredVariable(spec, array))
    state = _get_optimizer_state(model, optimizer, allow_shapes=saved is not None and bool(saved.slots))
    slots = _list_slots(model, optimizer, state)
    found += [StoredVariable(spec, _convert_random_keys_to_integers(leaf)) for spec, leaf in slots]
    return found + _list_nnx_step_counter(optimizer)


def list_optimizer_arrays(
    model: object, optimizer: object, weights: Mapping[PathParts, VariableSpec] | None = None
) -> list[StoredVariable]:
    """List the arrays of an optimizer's state, each with its description.

    Args:
        model: The model.
        optimizer: The optimizer's state, or an `nnx.Optimizer`; `None`: the state in a `TrainState`, if it has one.
        weights: The parameters, by the parts of their paths in the state; `None`: the parameters of the model.
    """
    state = _get_optimizer_state(model, optimizer, allow_shapes=False)
    slots = _describe_optimizer_arrays(model, optimizer, state, weights)
    return [StoredVariable(spec, leaf) for spec, leaf in slots] + _list_nnx_step_counter(optimizer)


def _list_nnx_step_counter(optimizer: object) -> list[StoredVariable]:
    """Return the step counter of an nnx optimizer as a list of one array, or an empty list for other optimizers."""
    if not is_nnx_optimizer(optimizer):
        return []
    step = optimizer.step.get_raw_value()
    return [StoredVariable(VariableSpec("optimizer.step", (), step.dtype.name, Kind.SLOT), step)]


def restore_arrays(
    model: object, optimizer: object, arrays: Iterable[tuple[str, object]]
) -> tuple[object, object]:
    """Replace arrays of a model and of its optimizer's state, and return the model and the optimizer.

    The array of an nnx Variable is freed as soon as it is replaced. For a pytree, a new pytree is returned.
    """
    state = _get_optimizer_state(model, optimizer, allow_shapes=True)
    module = unwrap_train_state(model)
    tree = sys.modules["flax.nnx"].state(module) if is_nnx_module(module) else None
    found = unwrap_and_split_model(model).leaves
    leaves = [(leaf.path, leaf.value) for leaf in found]
    slots = [(spec.path, leaf) for spec, leaf in _list_slots(model, optimizer, state)]
    likes = {path: _make_array_converter(value) for path, value in leaves + slots}
    holders = dict(
        zip(
            (path for path, _ in leaves),
            [] if tree is None else _find_nnx_variable_of_each_array(tree),
            strict=False,
        )
    )
    holders |= zip((path for path, _ in slots), _find_nnx_variable_of_each_array(state), strict=True)
    if is_nnx_optimizer(optimizer):
        likes["optimizer.step"] = _make_array_converter(optimizer.step.get_raw_value())
        holders["optimizer.step"] = optimizer.step
    paths = [path for path, _ in leaves], [path for path, _ in slots]
    # The caller has the arrays of a pytree anyway. Those of a module are freed one by one, so do not keep them here.
    known = found if tree is None else None
    del leaves, slots, found
    new: dict[str, object] = {}
    for path, array in arrays:
        value = likes[path](array)
        if (holder := holders.get(path)) is not None:
            holder.set_raw_value(value)
        else:
            new[path] = value
        del array, value
    if any(path in new for path in paths[0]):
        values = [new.get(leaf.path, leaf.value) for leaf in known or unwrap_and_split_model(model).leaves]
        model = replace_arrays(model, values)
    state = _replace_arrays_by_path(state, paths[1], new)
    if optimizer is not None:
        return model, optimizer if is_nnx_optimizer(optimizer) else state
    if isinstance(model, TrainState) and not any(map(_is_shape_dtype_struct, jax.tree.leaves(state))):
        model.opt_state = state
    return model, None


def has_optimizer_state(model: object, optimizer: object) -> bool:
    """Return whether there is optimizer state to save, even if it contains no arrays."""
    return optimizer is not None or (isinstance(model, TrainState) and model.opt_state is not None)


def _get_optimizer_state(model: object, optimizer: object, *, allow_shapes: bool) -> Any:
    """Return the optimizer's state, or None. With `allow_shapes`, return shapes if the state is not created yet."""
    if is_nnx_optimizer(optimizer):
        return optimizer.opt_state
    if optimizer is not None or not isinstance(model, TrainState):
        return optimizer
    if model.opt_state is not None or not allow_shapes or model.optimizer is None:
        return model.opt_state
    return jax.eval_shape(model.optimizer.init, replace_padded_arrays_by_shapes(_get_parameters(model, None)))


def _get_parameters(model: object, optimizer: object) -> Any:
    if isinstance(model, TrainState) and optimizer is None:
        return model.list_weights()
    wrt = optimizer.wrt if is_nnx_optimizer(optimizer) else None
    return get_parameter_tree(unwrap_train_state(model), wrt)


def _list_slots(model: object, optimizer: object, state: object) -> list[tuple[VariableSpec, jax.Array]]:
    """Return a description and an array for each slot. Arrays without values get the shardings of their weights."""
    found = _describe_optimizer_arrays(model, optimizer, state)
    weights = (
        _get_parameters(model, optimizer)
        if any(_is_shape_dtype_struct(_convert_random_keys_to_integers(leaf)) for _, leaf in found)
        else {}
    )
    return [(spec, _add_weight_sharding_to_shape(leaf, weights, spec)) for spec, leaf in found]


def _describe_optimizer_arrays(
    model: object, optimizer: object, state: object, params: Mapping[PathParts, VariableSpec] | None = None
) -> list[tuple[VariableSpec, Any]]:
    """Return the arrays of an optimizer's state in their order, each with its description."""
    leaves = [(parts, leaf) for parts, leaf in flatten_with_paths(state) if is_array(leaf)]
    if not leaves and callable(getattr(state, "init", None)):
        raise CheckpointError(
            f"optimizer: an object {describe_type(state)} contains no state",
            why="an optax optimizer is a pair of functions, and its init function returns the state",
            fix="pass the state: layout_map.build_optimizer(tx, params), or tx.init(params); load also takes a "
            "function: optimizer=lambda model: layout_map.build_optimizer(tx, model)",
        )
    data = [_convert_random_keys_to_integers(leaf) for _, leaf in leaves]
    described = [
        OptimizerLeaf(parts, tuple(array.shape), array.dtype.name)
        for (parts, _), array in zip(leaves, data, strict=True)
    ]
    if params is None:
        params = describe_weights(_get_parameters(model, optimizer))[0] if leaves else {}
    specs = describe_slots(params, described)
    return [
        (replace(spec, memory=find_memory_kind(leaf)), leaf)
        for spec, (_, leaf) in zip(specs, leaves, strict=True)
    ]


def _add_weight_sharding_to_shape(leaf: Any, weights: Mapping[str, object], spec: VariableSpec) -> Any:
    """Return a slot without values with the sharding of its weight, if both have one shape, or the leaf unchanged."""
    weight = weights.get(spec.parent) if spec.parent is not None and _is_shape_dtype_struct(leaf) else None
    if not isinstance(weight, (jax.Array, PaddedArray)) or weight.shape != leaf.shape:
        return leaf
    shape = unwrap_padded_array(weight).shape
    return wrap_padded_array(jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=weight.sharding), leaf.shape)


def _is_shape_dtype_struct(leaf: object) -> bool:
    return isinstance(unwrap_padded_array(leaf), jax.ShapeDtypeStruct)


def _find_nnx_variable_of_each_array(tree: object) -> list[Any]:
    """Return, for each array of a pytree, the nnx Variable with the array as its value, or None if there is none."""
    found: list[Any] = []
    for node in jax.tree.leaves(tree, is_leaf=is_nnx_variable):
        if is_nnx_variable(node):
            value = node.get_raw_value()
            found += [node] if is_array(value) else [None] * sum(map(is_array, jax.tree.leaves(value)))
        elif is_array(node):
            found.append(None)
    return found


def _replace_arrays_by_path(state: object, paths: Iterable[str], new_arrays: dict[str, object]) -> object:
    """Return a pytree with the arrays of `new_arrays`, a dict from paths. Its nnx Variables change in place."""
    rest = iter(paths)

    def replace_leaf(leaf: object) -> object:
        if is_nnx_variable(leaf):
            leaf.set_raw_value(jax.tree.map(replace_leaf, leaf.get_raw_value()))
            return leaf
        return new_arrays.get(next(rest), leaf) if is_array(leaf) else leaf

    return jax.tree.map(replace_leaf, state, is_leaf=is_nnx_variable)


def _convert_random_keys_to_integers(array: Any) -> Any:
    """Return the integers of random keys, or their shape if the keys are deleted. Return other arrays unchanged."""
    if not is_random_key(array):
        return array
    if not _is_shape_dtype_struct(array) and not array.is_deleted():
        return jax.random.key_data(array)
    shape = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(array.shape, array.dtype))
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        specs = [*sharding.spec, *[None] * (array.ndim - len(sharding.spec)), None]
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*specs))
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _make_array_converter(existing: Any) -> Callable[[object], object]:
    """Return a function that converts arrays to the layout, devices, and key type of an existing array."""
    if isinstance(existing, np.ndarray):
        return np.asarray
    if isinstance(existing, np.generic):
        return lambda array: np.asarray(array)[()]
    engine = get_engine("jax")
    layout, sharding = engine.get_layout(existing), getattr(existing, "sharding", None)
    implementation = jax.random.key_impl(existing) if is_random_key(existing) else None
    is_weak = getattr(existing, "weak_type", False)
    committed = getattr(existing, "committed", False)

    def convert_array(array: object) -> object:
        converted: Any = array if isinstance(array, (PaddedArray, jax.Array)) else jnp.asarray(array)
        if implementation is not None:
            converted = jax.random.wrap_key_data(converted, impl=implementation)
        if is_weak:  # keep the weak type, so that operations use the other operand's dtype
            converted = jax.lax.convert_element_type_p.bind(
                converted, new_dtype=converted.dtype, weak_type=True, sharding=None
            )
        if layout is None:
            return jax.device_put(converted, sharding) if committed else converted
        return converted if array is converted else engine.relayout(converted, layout, pad=True)

    return convert_array
