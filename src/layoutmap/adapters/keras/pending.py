"""A variable that has a shape, a type and an initializer, and no value yet.

A pending variable is an ordinary Keras variable whose class was swapped for a subclass with a few methods of its own.
Inside Keras's symbolic and stateless code it acts as Keras's own valueless variables do. Anywhere else, a read makes
the one variable, straight in its layout, and an assignment places the assigned value without running the initializer.
Once it has its value the class is swapped back, so nothing is paid later.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from layoutmap.adapters.keras.hooks import in_stateless_scope
from layoutmap.adapters.keras.loading import is_on_host

__all__ = ["is_pending", "make_pending", "settle"]

_SESSION = "_layoutmap_session"
_classes: dict[type, type] = {}


class _Pending:
    """The methods in which a pending variable differs from its class."""

    @property
    def value(self) -> Any:
        if in_stateless_scope():
            return super().value  # type: ignore[misc]
        getattr(self, _SESSION).make_now(self)
        return self.value  # that of its own class now

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        _ = self.value  # it has one now, unless Keras runs symbolically
        return super().__array__(dtype) if is_pending(self) else np.asarray(self, dtype=dtype)  # type: ignore[misc]

    def assign(self, value: Any) -> Any:
        if in_stateless_scope() or not is_on_host(value):
            return super().assign(value)  # type: ignore[misc]
        getattr(self, _SESSION).assign_now(self, value)
        return self.value

    def _direct_assign(self, value: Any) -> None:
        getattr(self, _SESSION).assign_now(self, value)


def make_pending(variable: Any, session: Any) -> None:
    """Turn a variable without a value into a pending one."""
    plain = type(variable)
    if plain not in _classes:
        _classes[plain] = type(plain.__name__, (_Pending, plain), {"__module__": plain.__module__})
    setattr(variable, _SESSION, session)
    variable.__class__ = _classes[plain]


def is_pending(variable: Any) -> bool:
    """Whether a variable still waits for its value."""
    return isinstance(variable, _Pending)


def settle(variable: Any) -> None:
    """Turn a pending variable back into what it was; it has its value, or is about to."""
    if isinstance(variable, _Pending):
        variable.__class__ = type(variable).__mro__[2]
        delattr(variable, _SESSION)
