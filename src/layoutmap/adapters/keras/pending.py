"""Define pending variables, which have a shape, a dtype, and an initializer, but no value.

A pending variable is an ordinary Keras variable whose class was swapped for a subclass with a few methods of its own.
In Keras's symbolic and stateless code, it behaves like Keras's own variables without values. Elsewhere, a read
initializes this variable in its layout, and an assignment stores the assigned value without running the initializer.
When it gets its value, its class is restored, so later uses cost nothing.

In a plan it never gets a value: a read returns zeros of its shape, and an assignment checks the shape.
"""

from __future__ import annotations

from typing import Any

import keras
import ml_dtypes
import numpy as np

from layoutmap.adapters.keras.loading import is_host_array
from layoutmap.adapters.keras.paths import SESSION
from layoutmap.adapters.keras.private import in_stateless_scope

_classes: dict[type, type] = {}


# No device may store a full weight, so a variable gets its value only together with its layout (decisions/0006).
class _PendingVariable:
    """Override the methods that read or assign the value of a variable, as long as it has no value."""

    shape: tuple[int, ...]
    _dtype: Any

    @property
    def value(self) -> object:
        if in_stateless_scope():
            return super().value  # type: ignore[misc]
        getattr(self, SESSION).initialize_pending_variable(self)
        if is_pending(self):  # a plan gives it no value, so return zeros
            return self._maybe_autocast(keras.ops.broadcast_to(keras.ops.zeros((), self._dtype), self.shape))
        return self.value  # the property of the original class, which the variable now has again

    def _maybe_autocast(self, value: object) -> object:
        # An initializer may return a Python number, which Keras would convert only when it stores it.
        if not keras.ops.is_tensor(value):
            value = keras.ops.convert_to_tensor(value, dtype=self._dtype)
        return super()._maybe_autocast(value)  # type: ignore[misc]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> object:
        if in_stateless_scope():
            return super().__array__(dtype)  # type: ignore[misc]
        getattr(self, SESSION).initialize_pending_variable(self)
        if is_pending(self):  # a plan gives it no value, so return zeros
            own = getattr(ml_dtypes, self._dtype, self._dtype)
            return np.broadcast_to(np.zeros((), dtype or own), self.shape)
        return np.asarray(self, dtype=dtype)

    def assign(self, value: object) -> object:
        if in_stateless_scope() or not is_host_array(value):
            return super().assign(value)  # type: ignore[misc]
        getattr(self, SESSION).assign_to_pending_variable(self, value)
        return value if is_pending(self) else self.value

    def _direct_assign(self, value: object) -> None:
        getattr(self, SESSION).assign_to_pending_variable(self, value)


def make_variable_pending(variable: object, session: object) -> None:
    """Turn a variable without a value into a pending one."""
    original = type(variable)
    if original not in _classes:
        names = {"__module__": original.__module__}
        _classes[original] = type(original.__name__, (_PendingVariable, original), names)
    setattr(variable, SESSION, session)
    variable.__class__ = _classes[original]


def is_pending(variable: object) -> bool:
    """Return whether a variable has no value yet."""
    return isinstance(variable, _PendingVariable)


def restore_variable_class(variable: object) -> None:
    """Restore the original class of a pending variable when it gets its value."""
    if isinstance(variable, _PendingVariable):
        variable.__class__ = type(variable).__mro__[2]
        delattr(variable, SESSION)
