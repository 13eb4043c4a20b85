"""What differs between Keras's backends: one small backend for each.

A backend knows how the backend's variables store a value, and how its compiled steps keep layouts. Engines know the
arrays; ports know the few places where Keras's backends treat them each in its own way.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import keras

from layoutmap.core.errors import ScopeError
from layoutmap.core.layout import Layout
from layoutmap.core.unsupported import Unsupported
from layoutmap.core.variables import Assignment

if TYPE_CHECKING:
    from layoutmap.adapters.keras.session import KerasSession

__all__ = ["Backend", "backend_name", "backend_of"]

Wraps = Mapping[str, Callable[..., Any]]
"""Methods to wrap on an instance, by name."""


class Backend(Protocol):
    """One Keras backend."""

    engine_name: str

    global_init: Mapping[str, str]
    """Keras's own initializers, by class name, that this backend's engine draws whole, and why."""

    quiet: Sequence[tuple[Any, str]]
    """Classes of Keras, and methods of theirs that do nothing on a thread that is in a scope."""

    def private_names(self) -> Sequence[tuple[Any, Sequence[str]]]:
        """Classes or modules of Keras, and the private names of theirs that this backend uses."""
        ...

    def outside(self) -> AbstractContextManager[Any]:
        """Leave any tracing that goes on, so that what is made in here are real arrays."""
        ...

    def is_tracing(self) -> bool:
        """Whether the code runs inside a compiled function's trace."""
        ...

    def store(self, variable: Any, held: Any, assignment: Assignment, session: KerasSession) -> Any:
        """Give a variable its value; later values keep the layout. Gives the tag that slots will carry."""
        ...

    def read(self, variable: Any) -> Any:
        """The whole value of a variable, as a numpy array."""
        ...

    chooses_layouts: bool
    """Whether a compiler chooses the layouts of activations where no rule gives them."""

    def lay_out(self, array: Any, layout: Layout, session: KerasSession) -> Any:
        """What a layer puts out, in a layout; gradients find their way back."""
        ...

    def settled(self, optimizers: Sequence[Any], layers: Sequence[Any]) -> None:
        """Variables have got new values: fix what optimizers and layers remember of them."""
        ...

    def own_memory(self, variables: Sequence[Any]) -> None:
        """Make sure that no two variables share memory, where a step would give it away twice."""
        ...

    def quantizing(self, layer: Any, session: KerasSession) -> AbstractContextManager[Any]:
        """While open, Keras quantizes a layer."""
        ...

    def layer_wraps(self, layer: Any, session: KerasSession) -> Wraps:
        """What to wrap on a layer or model so that it computes in its layouts."""
        ...

    def training_wraps(self, model: Any, session: KerasSession) -> Wraps:
        """What to wrap on a model so that `fit`, `evaluate` and `predict` work in its layouts."""
        ...

    def optimizer_wraps(self, optimizer: Any, session: KerasSession) -> Wraps:
        """What to wrap on an optimizer so that it updates variables in their layouts."""
        ...

    def unsupported_of(self, layer: Any, path: str, weights: list[str]) -> list[Unsupported]:
        """What the backend cannot do with a layer, given its path and those of its own weights."""
        ...

    def gradients(self, model: Any, x: Any, y: Any, sample_weight: Any) -> tuple[Any, list[Any]]:
        """The loss in training, and its gradient for each of the model's trainable variables, as numpy arrays."""
        ...

    def drawing(self, model: Any) -> AbstractContextManager[Any]:
        """While open, what is drawn from a generator of the process depends on how often the model drew before."""
        ...


_PORTS = {
    "jax": "layoutmap.adapters.keras.backends.jax:JaxBackend",
    "tensorflow": "layoutmap.adapters.keras.backends.tensorflow:TensorFlowBackend",
    "torch": "layoutmap.adapters.keras.backends.torch:TorchBackend",
}


def backend_of(backend: str) -> Backend:
    """The backend of a Keras backend.

    Raises:
        ScopeError: There is none.
    """
    if backend not in _PORTS:
        raise ScopeError(
            f"Keras runs on {backend}, where layout maps do not work yet",
            why=f"the supported backends are {', '.join(_PORTS)}",
            fix="set KERAS_BACKEND to one of them before Keras is imported",
        )
    module, _, name = _PORTS[backend].partition(":")
    return getattr(importlib.import_module(module), name)()


def backend_name() -> str:
    """The backend that Keras runs on."""
    return keras.backend.backend()
