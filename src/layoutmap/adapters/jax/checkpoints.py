"""The arrays that a checkpoint keeps of a model of JAX and of an optimizer's state; of random keys their data."""

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
from layoutmap.adapters.jax.optimizers import params_of, weights_of
from layoutmap.adapters.jax.pytrees import named_leaves
from layoutmap.adapters.jax.slots import Parts, StateLeaf, slot_variables
from layoutmap.adapters.jax.tracing import is_array, is_key
from layoutmap.adapters.jax.training import TrainState, arrays_of, model_in, put_values
from layoutmap.adapters.protocol import Saved, Stored
from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import CheckpointError
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.engines import get_engine
from layoutmap.engines.jax.trees import find_memory


def stored(model: object, optimizer: object, saved: Saved | None = None) -> list[Stored]:
    """Return the arrays of a model, and those of an optimizer's state."""
    check_immutable(model_in(model))
    found: list[Stored] = []
    for leaf in arrays_of(model).leaves:
        array = _data(leaf.value)
        shape, dtype, memory = tuple(array.shape), array.dtype.name, find_memory(array)
        spec = VariableSpec(leaf.path, shape, dtype, leaf.kind, leaf.aliases, memory=memory)
        found.append(Stored(spec, array))
    state = _state(model, optimizer, make=saved is not None and bool(saved.slots))
    found += [Stored(spec, _data(leaf)) for spec, leaf in _slots(model, optimizer, state)]
    return found + _step(optimizer)


def optimizer_arrays(
    model: object, optimizer: object, weights: Mapping[Parts, VariableSpec] | None = None
) -> list[Stored]:
    """Return the arrays of an optimizer's state as they are, each with what it is.

    Args:
        model: The model.
        optimizer: The state, or an optimizer of nnx; `None`: the state of a `TrainState`, if it has one.
        weights: The parameters, by the parts of their paths in the state; `None`: those of the model.
    """
    slots = _slots_as_they_are(model, optimizer, _state(model, optimizer, make=False), weights)
    return [Stored(spec, leaf) for spec, leaf in slots] + _step(optimizer)


def _step(optimizer: object) -> list[Stored]:
    if not is_nnx_optimizer(optimizer):
        return []
    step = optimizer.step.get_raw_value()
    return [Stored(VariableSpec("optimizer.step", (), step.dtype.name, Kind.SLOT), step)]


def restored(model: object, optimizer: object, arrays: Iterable[tuple[str, object]]) -> tuple[object, object]:
    """Return a model and its optimizer's state with other arrays.

    What Variables of nnx hold is replaced one by one, and freed then; a pytree is replaced by another one.
    """
    state = _state(model, optimizer, make=True)
    tree = sys.modules["flax.nnx"].state(model_in(model)) if is_nnx(model_in(model)) else None
    leaves = [(leaf.path, leaf.value) for leaf in arrays_of(model).leaves]
    slots = [(spec.path, leaf) for spec, leaf in _slots(model, optimizer, state)]
    likes = {path: _like(value) for path, value in leaves + slots}
    holders = dict(zip((path for path, _ in leaves), [] if tree is None else _holders(tree), strict=False))
    holders |= zip((path for path, _ in slots), _holders(state), strict=True)
    if is_nnx_optimizer(optimizer):
        likes["optimizer.step"] = _like(optimizer.step.get_raw_value())
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
        model = put_values(model, [new.get(leaf.path, leaf.value) for leaf in arrays_of(model).leaves])
    state = _with_arrays(state, paths[1], new)
    if optimizer is not None:
        return model, optimizer if is_nnx_optimizer(optimizer) else state
    if isinstance(model, TrainState) and not any(map(_has_no_value, jax.tree.leaves(state))):
        model.opt_state = state
    return model, None


def has_optimizer(model: object, optimizer: object) -> bool:
    """Whether there is the state of an optimizer to keep, which may have no arrays."""
    return optimizer is not None or (isinstance(model, TrainState) and model.opt_state is not None)


def _state(model: object, optimizer: object, *, make: bool) -> Any:
    """The state of an optimizer as a pytree; of a `TrainState` that has not begun, without values, if that is asked."""
    if is_nnx_optimizer(optimizer):
        return optimizer.opt_state
    if optimizer is not None or not isinstance(model, TrainState):
        return optimizer
    if model.opt_state is not None or not make or model.optimizer is None:
        return model.opt_state
    return jax.eval_shape(model.optimizer.init, _params(model, None))


def _params(model: object, optimizer: object) -> Any:
    if isinstance(model, TrainState) and optimizer is None:
        return model.weights()
    return params_of(model_in(model), optimizer.wrt if is_nnx_optimizer(optimizer) else None)


def _slots(model: object, optimizer: object, state: object) -> list[tuple[VariableSpec, jax.Array]]:
    """The arrays of an optimizer's state, those without values in the layouts that they are to have."""
    found = _slots_as_they_are(model, optimizer, state)
    weights = _params(model, optimizer) if any(_has_no_value(_data(leaf)) for _, leaf in found) else {}
    return [(spec, _in_weights_layout(leaf, weights, spec)) for spec, leaf in found]


def _slots_as_they_are(
    model: object, optimizer: object, state: object, params: Mapping[Parts, VariableSpec] | None = None
) -> list[tuple[VariableSpec, Any]]:
    """The arrays of an optimizer's state, in its order, each with what it is."""
    leaves = [(parts, leaf) for parts, leaf in named_leaves(state) if is_array(leaf)]
    if not leaves and callable(getattr(state, "init", None)):
        raise CheckpointError(
            f"optimizer: {describe_type(state)}, it has no state",
            why="an optimizer of optax is two functions; what is saved is what its init returns",
            fix="pass the state: layout_map.build_optimizer(tx, params), or tx.init(params)",
        )
    data = [_data(leaf) for _, leaf in leaves]
    described = [
        StateLeaf(parts, tuple(array.shape), array.dtype.name)
        for (parts, _), array in zip(leaves, data, strict=True)
    ]
    if params is None:
        params = weights_of(_params(model, optimizer))[0] if leaves else {}
    specs = slot_variables(params, described)
    return [
        (replace(spec, memory=find_memory(leaf)), leaf) for spec, (_, leaf) in zip(specs, leaves, strict=True)
    ]


def _in_weights_layout(leaf: Any, weights: Mapping[str, object], spec: VariableSpec) -> Any:
    """A leaf; of one without values, one in the layout of its weight, if it has its shape."""
    weight = weights.get(spec.parent) if spec.parent is not None and _has_no_value(leaf) else None
    if not isinstance(weight, jax.Array) or weight.shape != leaf.shape:
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=weight.sharding)


def _has_no_value(leaf: object) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _holders(tree: object) -> list[Any]:
    """For each array of a pytree the Variable of nnx that holds it alone, or `None`."""
    found: list[Any] = []
    for node in jax.tree.leaves(tree, is_leaf=is_variable):
        if is_variable(node):
            value = node.get_raw_value()
            found += [node] if is_array(value) else [None] * sum(map(is_array, jax.tree.leaves(value)))
        elif is_array(node):
            found.append(None)
    return found


def _with_arrays(state: object, paths: Iterable[str], new: dict[str, object]) -> object:
    """A pytree with other arrays, by the paths of all of its own; Variables in it are changed in place."""
    rest = iter(paths)

    def put(leaf: object) -> object:
        if is_variable(leaf):
            leaf.set_raw_value(jax.tree.map(put, leaf.get_raw_value()))
            return leaf
        return new.get(next(rest), leaf) if is_array(leaf) else leaf

    return jax.tree.map(put, state, is_leaf=is_variable)


def _data(array: Any) -> Any:
    """An array; of random keys their data, or what has its shape and layout if the keys have been donated."""
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


def _like(old: Any) -> Callable[[object], object]:
    """A function that makes arrays like another one, of which it keeps nothing: on its devices, keys of its kind."""
    if isinstance(old, np.ndarray):
        return np.asarray
    if isinstance(old, np.generic):
        return lambda array: np.asarray(array)[()]
    engine = get_engine("jax")
    layout, sharding = engine.layout_of(old), getattr(old, "sharding", None)
    implementation = jax.random.key_impl(old) if is_key(old) else None
    is_weak = getattr(old, "weak_type", False)
    committed = getattr(old, "committed", False)

    def make(array: object) -> object:
        made = jnp.asarray(array)
        if implementation is not None:
            made = jax.random.wrap_key_data(made, impl=implementation)
        if is_weak:  # it gives way to the types of what it is computed with
            made = jax.lax.convert_element_type_p.bind(
                made, new_dtype=made.dtype, weak_type=True, sharding=None
            )
        if layout is None:
            return jax.device_put(made, sharding) if committed else made
        return made if array is made else engine.relayout(made, layout)

    return make
