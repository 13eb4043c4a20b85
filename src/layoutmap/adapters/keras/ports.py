"""What differs between Keras's backends: one small port for each.

A port knows how the backend's variables store a value, and how its compiled steps keep layouts. Engines know the
arrays; ports know the few places where Keras's backends treat them each in its own way.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import keras
import numpy as np

from layoutmap.errors import ScopeError

__all__ = ["Port", "port_of"]


class Port(Protocol):
    """One Keras backend."""

    engine_name: str

    def outside(self) -> AbstractContextManager[Any]:
        """Leave any tracing that goes on, so that what is made in here are real arrays."""
        ...

    def is_tracing(self) -> bool:
        """Whether the code runs inside a compiled function's trace."""
        ...

    def store(self, variable: Any, array: Any, native: Any) -> Any:
        """Give a variable its value; later values keep the native layout. Gives the tag that slots will carry."""
        ...

    def pin(self, array: Any, variable: Any) -> Any:
        """A new value of a variable inside a compiled step, kept in the variable's layout."""
        ...

    def copy(self, array: Any) -> Any:
        """The same values in memory of their own."""
        ...

    def gradients(self, model: Any, x: Any, y: Any, sample_weight: Any) -> tuple[Any, list[Any]]:
        """The loss in training, and its gradient for each of the model's trainable variables."""
        ...


class JaxPort:
    """Keras on JAX: `Variable._value` is a `jax.Array`, `Variable._layout` may be a `NamedSharding`."""

    engine_name = "jax"

    def outside(self) -> AbstractContextManager[Any]:
        import jax.core

        # Not ensure_compile_time_eval: that folds the constants of what is compiled in there, whole arrays of them.
        return jax.core.eval_context()

    def is_tracing(self) -> bool:
        import jax.core

        return isinstance(jax.numpy.add(0, 0), jax.core.Tracer)

    def store(self, variable: Any, array: Any, native: Any) -> Any:
        import jax

        # A sharding object of its own for each variable: Keras hands a variable's `_layout` to the optimizer's slots,
        # and by that very object a slot's weight is known again.
        tag = jax.sharding.NamedSharding(native.mesh, native.spec)
        variable._layout = tag
        variable._value = array
        return tag

    def pin(self, array: Any, variable: Any) -> Any:
        import jax

        sharding = variable._layout
        if isinstance(sharding, jax.sharding.Sharding):
            return jax.lax.with_sharding_constraint(array, sharding)
        return array

    def copy(self, array: Any) -> Any:
        return array.copy()

    def gradients(self, model: Any, x: Any, y: Any, sample_weight: Any) -> tuple[Any, list[Any]]:
        import jax

        optimizer = getattr(model, "optimizer", None)
        slots = [v.value for v in optimizer.variables] if optimizer is not None else None

        def loss_of(trainable: Any, other: Any, metrics: Any) -> Any:
            loss, _ = model.compute_loss_and_updates(
                trainable, other, metrics, x, y, sample_weight, training=True, optimizer_variables=slots
            )
            return loss

        values = [
            [v.value for v in variables]
            for variables in (
                model.trainable_variables,
                model.non_trainable_variables,
                model.metrics_variables,
            )
        ]
        loss, gradients = jax.jit(jax.value_and_grad(loss_of))(*values)
        return np.asarray(loss), gradients


_PORTS: dict[str, Callable[[], Port]] = {"jax": JaxPort}


def port_of(backend: str) -> Port:
    """The port of a Keras backend.

    Raises:
        ScopeError: There is none.
    """
    if backend not in _PORTS:
        raise ScopeError(
            f"Keras runs on {backend}, where layout maps do not work yet",
            why=f"the supported backends are {', '.join(_PORTS)}",
            mend="set KERAS_BACKEND=jax before Keras is imported",
        )
    return _PORTS[backend]()


def backend_name() -> str:
    """The backend that Keras runs on."""
    return keras.backend.backend()
