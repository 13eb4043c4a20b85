"""Read and replace the arrays of a JAX model: a flax.nnx module or any pytree."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from layoutmap.adapters.jax import pytrees
from layoutmap.adapters.jax.nnx_types import is_nnx_module
from layoutmap.adapters.jax.pytrees import SplitModel
from layoutmap.core.policy import LayoutPolicy
from layoutmap.engines.tested import import_module_needing_framework, warn_if_untested


def split_model(model: object) -> SplitModel:
    """Split a module or pytree into its arrays and a function that rebuilds it.

    Raises:
        ScopeError: Two arrays have one path.
    """
    if is_nnx_module(model):
        # flax may not be installed, so import it only if the model is a module of flax.
        nnx = import_module_needing_framework("flax", "layoutmap.adapters.jax.nnx")
        warn_if_untested("flax")
        return nnx.split_module(model)
    return pytrees.split_pytree(model)


def replace_arrays(model: object, values: Sequence[object]) -> Any:
    """Replace the arrays of a model, and return it. A module changes in place, and a pytree is a new object."""
    if is_nnx_module(model):
        from layoutmap.adapters.jax import nnx

        nnx.replace_arrays(model, values)
        return model
    return pytrees.split_pytree(model).rebuild_model(values)


def constrain_module_outputs(model: object, policy: LayoutPolicy) -> None:
    """Make modules of an nnx model apply activation rules to their outputs. Pytrees stay unchanged."""
    if is_nnx_module(model):
        from layoutmap.adapters.jax import nnx

        nnx.constrain_module_outputs(model, policy)


def build_without_sharding_annotations(make: Callable[[], object], get_model: Callable[[object], Any]) -> Any:
    """Call a function that builds a model, with the sharding annotations in the model's code disabled.

    Args:
        make: The function.
        get_model: Returns the model, given the function's result.
    """
    if "flax.nnx" not in sys.modules:
        return make()
    from layoutmap.adapters.jax import nnx

    with nnx.suspend_sharding_annotations():
        made = make()
    if is_nnx_module(model := get_model(made)):
        nnx.restore_eager_sharding(model)
    return made
