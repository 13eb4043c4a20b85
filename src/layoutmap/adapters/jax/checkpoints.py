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

from layoutmap.adapters.jax.models import is_nnx
from layoutmap.adapters.jax.mutable_arrays import check_immutable
from layoutmap.adapters.jax.objects import is_nnx_optimizer, is_variable
from layoutmap.adapters.jax.optimizers import describe_weights, find_params
from layoutmap.adapters.jax.pytrees import list_leaves
from layoutmap.adapters.jax.slots import Parts, StateLeaf, describe_slots
from layoutmap.adapters.jax.tracing import is_array, is_key
from layoutmap.adapters.jax.training import TrainState, put_values, split_model, unwrap_model
from layoutmap.adapters.protocol import Saved, Stored
from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import CheckpointError
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.engines import get_engine
from layoutmap.engines.jax.padded import PaddedArray, describe_logical, unwrap, wrap
from layoutmap.engines.jax.trees import find_memory


def list_stored(model: object, optimizer: object, saved: Saved | None = None) -> list[Stored]:
    """List the arrays in a checkpoint of a model and its optimizer's state."""
    check_immutable(unwrap_model(model))
    found: list[Stored] = []
    for leaf in split_model(model).leaves:
        array = _unwrap_key(leaf.value)
        shape, dtype, memory = tuple(array.shape), array.dtype.name, find_memory(array)
        spec = VariableSpec(leaf.path, shape, dtype, leaf.kind, leaf.aliases, memory=memory)
        found.append(Stored(spec, array))
    state = _find_state(model, optimizer, make=saved is not None and bool(saved.slots))
    found += [Stored(spec, _unwrap_key(leaf)) for spec, leaf in _list_slots(model, optimizer, state)]
    return found + _get_step_variable(optimizer)


def list_optimizer_arrays(
    model: object, optimizer: object, weights: Mapping[Parts, VariableSpec] | None = None
) -> list[Stored]:
    """List the arrays of an optimizer's state, each with its description.

    Args:
        model: The model.
        optimizer: The state, or an optimizer of nnx; `None`: the state of a `TrainState`, if it has one.
        weights: The parameters, by the parts of their paths in the state; `None`: those of the model.
    """
    slots = _list_raw_slots(model, optimizer, _find_state(model, optimizer, make=False), weights)
    return [Stored(spec, leaf) for spec, leaf in slots] + _get_step_variable(optimizer)


def _get_step_variable(optimizer: object) -> list[Stored]:
    if not is_nnx_optimizer(optimizer):
        return []
    step = optimizer.step.get_raw_value()
    return [Stored(VariableSpec("optimizer.step", (), step.dtype.name, Kind.SLOT), step)]


def restore_values(
    model: object, optimizer: object, arrays: Iterable[tuple[str, object]]
) -> tuple[object, object]:
    """Replace the arrays of a model and its optimizer's state.

    What Variables of nnx hold is replaced one by one, and freed then; a pytree is replaced by another one.
    """
    state = _find_state(model, optimizer, make=True)
    tree = sys.modules["flax.nnx"].state(unwrap_model(model)) if is_nnx(unwrap_model(model)) else None
    leaves = [(leaf.path, leaf.value) for leaf in split_model(model).leaves]
    slots = [(spec.path, leaf) for spec, leaf in _list_slots(model, optimizer, state)]
    likes = {path: _make_converter(value) for path, value in leaves + slots}
    holders = dict(
        zip((path for path, _ in leaves), [] if tree is None else _find_variables(tree), strict=False)
    )
    holders |= zip((path for path, _ in slots), _find_variables(state), strict=True)
    if is_nnx_optimizer(optimizer):
        likes["optimizer.step"] = _make_converter(optimizer.step.get_raw_value())
        holders["optimizer.step"] = optimizer.step
    paths = [path for path, _ in leaves], [path for path, _ in slots]
    del leaves, slots
    new: dict[str, object] = {}
    for path, array in arrays:
        value = likes[path](array)
        if (holder := holders.get(path)) is not None:
            holder.set_raw_value(value)
        else:
            new[path] = value
        del array, value
    if any(path in new for path in paths[0]):
        model = put_values(model, [new.get(leaf.path, leaf.value) for leaf in split_model(model).leaves])
    state = _replace_arrays(state, paths[1], new)
    if optimizer is not None:
        return model, optimizer if is_nnx_optimizer(optimizer) else state
    if isinstance(model, TrainState) and not any(map(_has_no_value, jax.tree.leaves(state))):
        model.opt_state = state
    return model, None


def has_optimizer(model: object, optimizer: object) -> bool:
    """Return whether there is optimizer state to save, even without arrays."""
    return optimizer is not None or (isinstance(model, TrainState) and model.opt_state is not None)


def _find_state(model: object, optimizer: object, *, make: bool) -> Any:
    """Return the optimizer's state as a pytree. With `make`, return shapes for a `TrainState` before its first step."""
    if is_nnx_optimizer(optimizer):
        return optimizer.opt_state
    if optimizer is not None or not isinstance(model, TrainState):
        return optimizer
    if model.opt_state is not None or not make or model.optimizer is None:
        return model.opt_state
    return jax.eval_shape(model.optimizer.init, describe_logical(_find_params(model, None)))


def _find_params(model: object, optimizer: object) -> Any:
    if isinstance(model, TrainState) and optimizer is None:
        return model.list_weights()
    return find_params(unwrap_model(model), optimizer.wrt if is_nnx_optimizer(optimizer) else None)


def _list_slots(model: object, optimizer: object, state: object) -> list[tuple[VariableSpec, jax.Array]]:
    """Return the arrays of an optimizer's state. Shapes without values get the layouts of their weights."""
    found = _list_raw_slots(model, optimizer, state)
    weights = (
        _find_params(model, optimizer) if any(_has_no_value(_unwrap_key(leaf)) for _, leaf in found) else {}
    )
    return [(spec, _copy_weight_layout(leaf, weights, spec)) for spec, leaf in found]


def _list_raw_slots(
    model: object, optimizer: object, state: object, params: Mapping[Parts, VariableSpec] | None = None
) -> list[tuple[VariableSpec, Any]]:
    """Return the arrays of an optimizer's state in its order, each with its description."""
    leaves = [(parts, leaf) for parts, leaf in list_leaves(state) if is_array(leaf)]
    if not leaves and callable(getattr(state, "init", None)):
        raise CheckpointError(
            f"optimizer: {describe_type(state)}, it has no state",
            why="an optax optimizer is two functions, and its state is what its init returns",
            fix="pass the state: layout_map.build_optimizer(tx, params), or tx.init(params)",
        )
    data = [_unwrap_key(leaf) for _, leaf in leaves]
    described = [
        StateLeaf(parts, tuple(array.shape), array.dtype.name)
        for (parts, _), array in zip(leaves, data, strict=True)
    ]
    if params is None:
        params = describe_weights(_find_params(model, optimizer))[0] if leaves else {}
    specs = describe_slots(params, described)
    return [
        (replace(spec, memory=find_memory(leaf)), leaf) for spec, (_, leaf) in zip(specs, leaves, strict=True)
    ]


def _copy_weight_layout(leaf: Any, weights: Mapping[str, object], spec: VariableSpec) -> Any:
    """Give a leaf without values the layout of its weight, if the shapes are equal."""
    weight = weights.get(spec.parent) if spec.parent is not None and _has_no_value(leaf) else None
    if not isinstance(weight, (jax.Array, PaddedArray)) or weight.shape != leaf.shape:
        return leaf
    shape = unwrap(weight).shape
    return wrap(jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=weight.sharding), leaf.shape)


def _has_no_value(leaf: object) -> bool:
    return isinstance(unwrap(leaf), jax.ShapeDtypeStruct)


def _find_variables(tree: object) -> list[Any]:
    """Return, for each array of a pytree, the nnx Variable that contains only this array, or None."""
    found: list[Any] = []
    for node in jax.tree.leaves(tree, is_leaf=is_variable):
        if is_variable(node):
            value = node.get_raw_value()
            found += [node] if is_array(value) else [None] * sum(map(is_array, jax.tree.leaves(value)))
        elif is_array(node):
            found.append(None)
    return found


def _replace_arrays(state: object, paths: Iterable[str], new: dict[str, object]) -> object:
    """Replace arrays of a pytree by path. nnx Variables in it change in place."""
    rest = iter(paths)

    def put(leaf: object) -> object:
        if is_variable(leaf):
            leaf.set_raw_value(jax.tree.map(put, leaf.get_raw_value()))
            return leaf
        return new.get(next(rest), leaf) if is_array(leaf) else leaf

    return jax.tree.map(put, state, is_leaf=is_variable)


def _unwrap_key(array: Any) -> Any:
    """Return the data of random keys, and other arrays unchanged. Donated keys give a shape with a layout."""
    if not is_key(array):
        return array
    if not _has_no_value(array) and not array.is_deleted():
        return jax.random.key_data(array)
    shape = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(array.shape, array.dtype))
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        specs = [*sharding.spec, *[None] * (array.ndim - len(sharding.spec)), None]
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*specs))
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _make_converter(old: Any) -> Callable[[object], object]:
    """Return a function that converts arrays to the layout, devices, and key type of an existing one."""
    if isinstance(old, np.ndarray):
        return np.asarray
    if isinstance(old, np.generic):
        return lambda array: np.asarray(array)[()]
    engine = get_engine("jax")
    layout, sharding = engine.get_layout(old), getattr(old, "sharding", None)
    implementation = jax.random.key_impl(old) if is_key(old) else None
    is_weak = getattr(old, "weak_type", False)
    committed = getattr(old, "committed", False)

    def make(array: object) -> object:
        made: Any = array if isinstance(array, PaddedArray) else jnp.asarray(array)
        if implementation is not None:
            made = jax.random.wrap_key_data(made, impl=implementation)
        if is_weak:  # keep the weak type, so that operations use the other operand's dtype
            made = jax.lax.convert_element_type_p.bind(
                made, new_dtype=made.dtype, weak_type=True, sharding=None
            )
        if layout is None:
            return jax.device_put(made, sharding) if committed else made
        return made if array is made else engine.relayout(made, layout, pad=True)

    return make
