"""Define pending variables, which have a shape, a dtype, and an initializer, but no value.

A pending variable is an ordinary Keras variable whose class was swapped for a subclass with a few methods of its own.
Inside Keras's symbolic and stateless code it acts as Keras's own valueless variables do. Anywhere else, a read makes
the one variable, straight in its layout, and an assignment places the assigned value without running the initializer.
Once it has its value the class is swapped back, so nothing is paid later.

While a model is only planned, it never gets one: a read returns zeros of its shape, an assignment checks the shape.
"""

from __future__ import annotations

from typing import Any

import keras
import ml_dtypes
import numpy as np

from layoutmap.adapters.keras.loading import is_on_host
from layoutmap.adapters.keras.paths import SESSION
from layoutmap.adapters.keras.private import in_stateless_scope

_classes: dict[type, type] = {}


# No device may store a full weight, so a variable gets its value only together with its layout (decisions/0006).
class _PendingVariable:
    """Override methods of a variable without a value."""

    shape: tuple[int, ...]
    _dtype: Any

    @property
    def value(self) -> object:
        if in_stateless_scope():
            return super().value  # type: ignore[misc]
        getattr(self, SESSION).make_now(self)
        if is_pending(self):  # during a plan
            return self._maybe_autocast(keras.ops.broadcast_to(keras.ops.zeros((), self._dtype), self.shape))
        return self.value  # the real class's property, because the variable now has its value

    def _maybe_autocast(self, value: object) -> object:
        # An initializer may return a Python number, which Keras converts only on storing.
        if not keras.ops.is_tensor(value):
            value = keras.ops.convert_to_tensor(value, dtype=self._dtype)
        return super()._maybe_autocast(value)  # type: ignore[misc]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> object:
        if in_stateless_scope():
            return super().__array__(dtype)  # type: ignore[misc]
        getattr(self, SESSION).make_now(self)
        if is_pending(self):  # during a plan
            own = getattr(ml_dtypes, self._dtype, self._dtype)
            return np.broadcast_to(np.zeros((), dtype or own), self.shape)
        return np.asarray(self, dtype=dtype)

    def assign(self, value: object) -> object:
        if in_stateless_scope() or not is_on_host(value):
            return super().assign(value)  # type: ignore[misc]
        getattr(self, SESSION).assign_now(self, value)
        return value if is_pending(self) else self.value

    def _direct_assign(self, value: object) -> None:
        getattr(self, SESSION).assign_now(self, value)


def make_pending(variable: object, session: object) -> None:
    """Turn a variable without a value into a pending one."""
    plain = type(variable)
    if plain not in _classes:
        _classes[plain] = type(plain.__name__, (_PendingVariable, plain), {"__module__": plain.__module__})
    setattr(variable, SESSION, session)
    variable.__class__ = _classes[plain]


def is_pending(variable: object) -> bool:
    """Return whether a variable has no value yet."""
    return isinstance(variable, _PendingVariable)


def end_pending(variable: object) -> None:
    """Restore the original class of a pending variable when it gets its value."""
    if isinstance(variable, _PendingVariable):
        variable.__class__ = type(variable).__mro__[2]
        delattr(variable, SESSION)
