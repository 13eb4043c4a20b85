"""What a model of JAX consists of: a module of flax.nnx, or any pytree."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from layoutmap.adapters.jax import pytrees
from layoutmap.adapters.jax.pytrees import Parts


def is_nnx(model: Any) -> bool:
    """Return whether a model is a module of flax.nnx."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(model, nnx.Module)


def take_apart(model: Any) -> Parts:
    """Return a model as its arrays.

    Raises:
        ScopeError: Two arrays have one path.
    """
    if is_nnx(model):
        from layoutmap.adapters.jax import nnx  # late: not every program of JAX has flax

        return nnx.take_apart(model)
    return pytrees.take_apart(model)


def put_values(model: Any, values: Sequence[Any]) -> Any:
    """Return a model with other arrays: the same module, or, since a pytree cannot be changed, another one."""
    if is_nnx(model):
        from layoutmap.adapters.jax import nnx

        nnx.put_values(model, values)
        return model
    return pytrees.take_apart(model).put_together(values)
