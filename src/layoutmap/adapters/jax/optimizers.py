"""Describe, create, and redistribute the state of optax optimizers and of `nnx.Optimizer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding

from layoutmap.adapters.jax.nnx_types import is_nnx_module, is_nnx_variable
from layoutmap.adapters.jax.pytrees import flatten_with_paths
from layoutmap.adapters.jax.slots import OptimizerLeaf, PathParts, describe_slots
from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import LayoutError, ScopeError, shorten_repr
from layoutmap.core.layout import Layout
from layoutmap.core.variables import VariableSpec
from layoutmap.engines import get_engine
from layoutmap.engines.jax.ambient import use_mesh
from layoutmap.engines.jax.padded import (
    pad_array,
    replace_padded_arrays_by_shapes,
    wrap_function_for_stored_arrays,
    wrap_padded_array,
)
from layoutmap.engines.jax.programs import suspend_jax_context


def resolve_optax_optimizer(optimizer: object) -> object:
    """Return an optimizer of optax, which may be given by its name, such as `"adamw"`.

    Given by name, it has an arbitrary learning rate, so it serves only to determine slots.

    Raises:
        ScopeError: It is no optimizer, or optax has none of this name.
    """
    why = f"it is {describe_type(optimizer)}, without init and update"
    found: Any = optimizer
    if isinstance(optimizer, str):
        why = "a name must be that of an optimizer in optax, which is called with a learning rate"
        with suppress(ImportError, AttributeError, TypeError):
            found = getattr(import_module("optax"), optimizer.lower())(1e-3)
    if callable(getattr(found, "init", None)) and callable(getattr(found, "update", None)):
        return found
    raise ScopeError(
        f"optimizer={shorten_repr(optimizer)} is not an optimizer",
        why=why,
        fix="pass an optax optimizer, as in optimizer=optax.adamw(1e-3)",
    )


@dataclass(frozen=True, slots=True)
class OptimizerVariables:
    """Describe the variables of an optimizer: its parameters and their slots.

    Args:
        weights: The parameters.
        layouts: The layout of each sharded parameter, by `VariableSpec.key`.
        slots: The leaves of the optimizer's state, in order.
    """

    weights: list[VariableSpec]
    layouts: dict[tuple[str, str], Layout]
    slots: list[VariableSpec]


def get_parameter_tree(params: object, wrt: Any = None) -> object:
    """Return the pytree of parameters. For an nnx module, it is the part of the module's state that `wrt` selects."""
    if not is_nnx_module(params):
        return params
    from flax import nnx

    return nnx.state(params, nnx.Param if wrt is None else wrt)


def describe_weights(params: object) -> tuple[dict[PathParts, VariableSpec], dict[tuple[str, str], Layout]]:
    """Return two dicts: from path parts to parameters' descriptions, and from `key` to layouts of sharded parameters.

    Args:
        params: A pytree of arrays, or of objects with `shape` and `dtype`.

    Raises:
        LayoutError: A parameter is no array.
    """
    engine = get_engine("jax")
    weights, layouts = dict[PathParts, VariableSpec](), dict[tuple[str, str], Layout]()
    for parts, leaf in flatten_with_paths(params):
        path = ".".join(parts) or "params"
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise LayoutError(
                f"{path}: this parameter is not an array",
                why=f"it is {describe_type(leaf)}, and an optimizer has slots only for arrays",
                fix="pass the arrays only, as in eqx.filter(model, eqx.is_array) or nnx.state(model, nnx.Param)",
            )
        weights[parts] = weight = VariableSpec(path, *_read_shape_and_dtype(leaf))
        layout = engine.get_layout(leaf)
        if layout is not None:
            layouts[weight.key] = layout
    return weights, layouts


def describe_optimizer_variables(init: Callable[[object], object], params: object) -> OptimizerVariables:
    """Describe an optimizer's parameters and state without computing anything.

    Args:
        init: Returns the state of the optimizer for the parameters, as optax's `init` does.
        params: See `describe_weights`.

    Raises:
        LayoutError: A parameter is no array.
        ScopeError: `init` cannot be traced.
    """
    weights, layouts = describe_weights(params)
    try:
        with suspend_jax_context(), use_mesh(_find_parameter_mesh(params)):
            state = jax.eval_shape(init, replace_padded_arrays_by_shapes(params))
    except jax.errors.ConcretizationTypeError as error:
        raise ScopeError(
            "the optimizer's init cannot be traced",
            why=f"init reads values of the parameters: {str(error).partition(chr(10))[0]}",
            fix="create the state first, then shard it: layout_map.apply_optimizer(tx.init(params), params)",
        ) from error
    leaves = [OptimizerLeaf(parts, *_read_shape_and_dtype(leaf)) for parts, leaf in flatten_with_paths(state)]
    return OptimizerVariables(list(weights.values()), layouts, describe_slots(weights, leaves))


def create_sharded_optimizer_state(
    init: Callable[[object], object], params: object, layouts: Sequence[Layout]
) -> object:
    """Return the state of an optimizer, with each leaf computed directly in its layout."""
    shardings: list[Any] = [get_engine("jax").make_native_layout(layout, layout.rank) for layout in layouts]
    mesh = _find_parameter_mesh(params)
    # use the mesh of the parameters, because an equal mesh in the layouts may have different axis types
    if isinstance(mesh, jax.sharding.Mesh):
        shardings = [NamedSharding(mesh, each.spec, memory_kind=each.memory_kind) for each in shardings]
    with suspend_jax_context(), use_mesh(mesh) if isinstance(mesh, AbstractMesh) else jax.set_mesh(mesh):
        leaves, tree = jax.tree.flatten(jax.eval_shape(init, replace_padded_arrays_by_shapes(params)))
        padded = [layout.pad_shape(leaf.shape) for layout, leaf in zip(layouts, leaves, strict=True)]
        run, arguments = wrap_function_for_stored_arrays(init, params)

        def compute_padded_leaves(*arrays: object) -> list[Any]:
            return list(map(pad_array, jax.tree.leaves(run(*arrays)), padded))

        made = jax.block_until_ready(jax.jit(compute_padded_leaves, out_shardings=shardings)(*arguments))
        shapes = [leaf.shape for leaf in leaves]
        return jax.tree.unflatten(tree, list(map(wrap_padded_array, made, shapes)))


def _find_parameter_mesh(params: object) -> AbstractMesh | jax.sharding.Mesh:
    """Return the mesh of the first sharded parameter, or an empty mesh if none is sharded."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(params))
    meshes = (each.mesh for each in shardings if isinstance(each, NamedSharding))
    return next(meshes, AbstractMesh((), ()))


def relayout_optimizer_state(state: object, layouts: Sequence[Layout]) -> object:
    """Return an optimizer's state in new layouts, one for each leaf. nnx Variables in it change in place."""
    moved = iter(layouts)

    def relayout_next_array(leaf: object) -> object:
        return get_engine("jax").relayout(leaf, next(moved), pad=True)

    def relayout_array_or_variable(leaf: Any) -> object:
        if not hasattr(leaf, "set_raw_value"):
            return relayout_next_array(leaf)
        leaf.set_raw_value(jax.tree.map(relayout_next_array, leaf.get_raw_value()))
        return leaf

    return jax.tree.map(relayout_array_or_variable, state, is_leaf=is_nnx_variable)


def make_nnx_optimizer(model: object, tx: Any, wrt: object, make_state: Callable[[object], object]) -> object:
    """Create an `nnx.Optimizer`. Its state comes from the function `make_state`, and not from `tx.init`."""
    from flax import nnx

    class TransformationWithGivenInit:
        init = staticmethod(make_state)
        update = staticmethod(tx.update)

    optimizer = nnx.Optimizer(model, TransformationWithGivenInit(), wrt=nnx.Param if wrt is None else wrt)  # type: ignore[arg-type]
    optimizer.tx = tx
    return optimizer


def _read_shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], str]:
    # A random key has no dtype with a size, so describe it by the dtype of its integers.
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    return tuple(leaf.shape), "uint32" if is_key else jnp.dtype(leaf.dtype).name
