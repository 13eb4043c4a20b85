"""Read and replace the arrays of a JAX model: a flax.nnx module or any pytree."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from layoutmap.adapters.jax import pytrees
from layoutmap.adapters.jax.objects import is_nnx
from layoutmap.adapters.jax.pytrees import Parts
from layoutmap.core.policy import LayoutPolicy
from layoutmap.engines.tested import import_for, warn_if_untested


def take_apart(model: object) -> Parts:
    """Split a model into its arrays and its structure.

    Raises:
        ScopeError: Two arrays have one path.
    """
    if is_nnx(model):
        # flax may not be installed, so import it only for its modules.
        nnx = import_for("flax", "layoutmap.adapters.jax.nnx")
        warn_if_untested("flax")
        return nnx.take_apart(model)
    return pytrees.take_apart(model)


def put_values(model: object, values: Sequence[object]) -> Any:
    """Replace the arrays of a model: in place for a module, in a new object for a pytree."""
    if is_nnx(model):
        from layoutmap.adapters.jax import nnx

        nnx.put_values(model, values)
        return model
    return pytrees.take_apart(model).put_together(values)


def constrain_outputs(model: object, policy: LayoutPolicy) -> None:
    """Make modules of an nnx model apply activation rules to their outputs. Pytrees stay unchanged."""
    if is_nnx(model):
        from layoutmap.adapters.jax import nnx

        nnx.constrain_outputs(model, policy)


def make_unsharded(make: Callable[[], object], model_in: Callable[[object], Any]) -> Any:
    """Build a model, ignoring its own sharding annotations.

    Args:
        make: The function.
        model_in: Returns the model in what it returns.
    """
    if "flax.nnx" not in sys.modules:
        return make()
    from layoutmap.adapters.jax import nnx

    with nnx.annotations_unused():
        made = make()
    if is_nnx(model := model_in(made)):
        nnx.restore_metadata(model)
    return made
