"""Recognize objects of flax.nnx, without importing flax."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from flax import nnx


def _is_nnx_instance(value: object, class_name: str) -> bool:
    """Return whether a value is an instance of a class of flax.nnx. Flax need not be imported."""
    nnx = sys.modules.get("flax.nnx")  # nnx objects exist only if flax was imported
    return nnx is not None and isinstance(value, getattr(nnx, class_name))


def is_nnx_module(model: object) -> TypeGuard[nnx.Module]:
    """Return whether a model is a module of flax.nnx."""
    return _is_nnx_instance(model, "Module")


def is_nnx_object(value: object) -> bool:
    """Return whether a value is an nnx module, an optimizer, or another object that contains Variables."""
    return _is_nnx_instance(value, "Pytree")


def is_nnx_variable(value: object) -> TypeGuard[nnx.Variable[Any]]:
    """Return whether a value is an nnx Variable."""
    return _is_nnx_instance(value, "Variable")


def is_nnx_optimizer(state: object) -> TypeGuard[nnx.Optimizer[Any]]:
    """Return whether an object is an nnx optimizer."""
    return _is_nnx_instance(state, "Optimizer")


def is_nnx_object_or_variable(value: object) -> bool:
    """Return whether a value is an nnx object or Variable."""
    return is_nnx_object(value) or is_nnx_variable(value)
