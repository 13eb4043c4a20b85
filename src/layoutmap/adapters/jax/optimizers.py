"""Describe, create, and redistribute the state of optax optimizers and of `nnx.Optimizer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding

from layoutmap.adapters.jax.models import is_nnx
from layoutmap.adapters.jax.objects import is_variable
from layoutmap.adapters.jax.pytrees import list_leaves
from layoutmap.adapters.jax.slots import Parts, StateLeaf, describe_slots
from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import LayoutError, ScopeError
from layoutmap.core.layout import Layout
from layoutmap.core.variables import VariableSpec
from layoutmap.engines import get_engine
from layoutmap.engines.jax.ambient import use_mesh
from layoutmap.engines.jax.padded import describe_logical, pad, unpad_arguments, wrap
from layoutmap.engines.jax.programs import leave_program_context


@dataclass(frozen=True, slots=True)
class OptimizerVariables:
    """The variables of an optimizer: its parameters and their slots.

    Args:
        weights: The parameters.
        layouts: The layout of each that has one, by `key`.
        slots: The leaves of the optimizer's state, in order.
    """

    weights: list[VariableSpec]
    layouts: dict[tuple[str, str], Layout]
    slots: list[VariableSpec]


def find_params(params: object, wrt: Any = None) -> object:
    """Return the pytree of parameters, which for an nnx module is its state."""
    if not is_nnx(params):
        return params
    from flax import nnx

    return nnx.state(params, nnx.Param if wrt is None else wrt)


def describe_weights(params: object) -> tuple[dict[Parts, VariableSpec], dict[tuple[str, str], Layout]]:
    """Return the parameters by the parts of their paths, and the layouts of sharded ones by `key`.

    Args:
        params: A pytree of arrays, or of what has their shapes and element types.

    Raises:
        LayoutError: A parameter is no array.
    """
    engine, weights, layouts = get_engine("jax"), dict[Parts, VariableSpec](), dict[tuple[str, str], Layout]()
    for parts, leaf in list_leaves(params):
        path = ".".join(parts) or "params"
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise LayoutError(
                f"{path}: it is not an array",
                why=f"params has {describe_type(leaf)} there, and an optimizer keeps slots for arrays",
                fix="pass the arrays only, as in eqx.filter(model, eqx.is_array) or nnx.state(model, nnx.Param)",
            )
        weights[parts] = weight = VariableSpec(path, *_read_shape_and_dtype(leaf))
        layout = engine.get_layout(leaf)
        if layout is not None:
            layouts[weight.key] = layout
    return weights, layouts


def describe(init: Callable[[object], object], params: object) -> OptimizerVariables:
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
        with leave_program_context(), use_mesh(_find_mesh(params)):
            state = jax.eval_shape(init, describe_logical(params))
    except jax.errors.ConcretizationTypeError as error:
        raise ScopeError(
            "the optimizer's init cannot be traced",
            why=f"it reads values of the parameters: {str(error).partition(chr(10))[0]}",
            fix="create the state first, then shard it: layout_map.apply_optimizer(tx.init(params), params)",
        ) from error
    leaves = [StateLeaf(parts, *_read_shape_and_dtype(leaf)) for parts, leaf in list_leaves(state)]
    return OptimizerVariables(list(weights.values()), layouts, describe_slots(weights, leaves))


def make_state(init: Callable[[object], object], params: object, layouts: Sequence[Layout]) -> object:
    """Create an optimizer's state, with each leaf computed directly in its layout."""
    shardings: list[Any] = [get_engine("jax").native(layout, layout.rank) for layout in layouts]
    mesh = _find_mesh(params)
    # use the parameters' axis types, because an equal layout may have others
    if isinstance(mesh, jax.sharding.Mesh):
        shardings = [NamedSharding(mesh, each.spec, memory_kind=each.memory_kind) for each in shardings]
    with leave_program_context(), use_mesh(mesh) if isinstance(mesh, AbstractMesh) else jax.set_mesh(mesh):
        leaves, tree = jax.tree.flatten(jax.eval_shape(init, describe_logical(params)))
        padded = [layout.pad_shape(leaf.shape) for layout, leaf in zip(layouts, leaves, strict=True)]
        run, arguments = unpad_arguments(init, params)

        def run_and_pad(*arrays: object) -> list[Any]:
            return list(map(pad, jax.tree.leaves(run(*arrays)), padded))

        made = jax.block_until_ready(jax.jit(run_and_pad, out_shardings=shardings)(*arguments))
        return jax.tree.unflatten(tree, [wrap(a, leaf.shape) for a, leaf in zip(made, leaves, strict=True)])


def _find_mesh(params: object) -> AbstractMesh | jax.sharding.Mesh:
    """Return the mesh that parameters are on, or an empty one."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(params))
    meshes = (each.mesh for each in shardings if isinstance(each, NamedSharding))
    return next(meshes, AbstractMesh((), ()))


def move_state(state: object, layouts: Sequence[Layout]) -> object:
    """Move an optimizer's state to these layouts. nnx Variables change in place."""
    moved = iter(layouts)

    def move_leaf(leaf: object) -> object:
        return get_engine("jax").relayout(leaf, next(moved), pad=True)

    def move(leaf: Any) -> object:
        if not hasattr(leaf, "set_raw_value"):
            return move_leaf(leaf)
        leaf.set_raw_value(jax.tree.map(move_leaf, leaf.get_raw_value()))
        return leaf

    return jax.tree.map(move, state, is_leaf=is_variable)


def make_nnx_optimizer(model: object, tx: Any, wrt: object, make: Callable[[object], object]) -> object:
    """Make an `nnx.Optimizer` with the state that a function returns instead of `tx.init`."""
    from flax import nnx

    class Made:
        init = staticmethod(make)
        update = staticmethod(tx.update)

    optimizer = nnx.Optimizer(model, Made(), wrt=nnx.Param if wrt is None else wrt)  # type: ignore[arg-type]
    optimizer.tx = tx
    return optimizer


def _read_shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], str]:
    # The size of a PRNG key is that of its integers.
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    return tuple(leaf.shape), "uint32" if is_key else jnp.dtype(leaf.dtype).name
