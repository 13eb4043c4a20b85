"""The protocols between the parts of this adapter: a scope's session, and a backend of Keras.

A backend knows how Keras's variables store a value there, and how compiled steps keep layouts. Engines know the arrays;
backends know the few places where Keras treats them each in its own way.
"""

from __future__ import annotations

import importlib
import operator
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import keras

from layoutmap.adapters.keras.registry import Registry
from layoutmap.adapters.protocol import ScopeContext
from layoutmap.core.errors import ScopeError
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.policy import LayoutPolicy
from layoutmap.core.unsupported import Unsupported
from layoutmap.core.variables import Assignment
from layoutmap.engines import get_engine
from layoutmap.engines.patches import Closing
from layoutmap.engines.protocol import Engine

Wraps = Mapping[str, Callable[..., object]]
"""Methods to wrap on an instance, by name."""


class OnThread(threading.local):
    """The state of one scope's models on the present thread."""

    opened_at: int = 0
    """How many frames the thread had where the scope was opened: see `reading.count_user_frames`."""

    call_depth: int = 0
    """In how many calls of layers, or steps, the thread is; 0: outside of any."""

    is_initializing: bool = False
    """Whether initializers run, which draw what they draw."""

    is_exporting: bool = False
    """Whether a model is exported, as a model of one device."""

    reading: Callable[[Layout], Layout] | None = None
    """From the layout of a weight to that in which the layer that is called reads it; `None`: the usual one."""

    gathering: int = 0
    """How much the function that runs gathers beyond its layouts, where the backend cannot compute in those."""

    sums_up: bool = False
    """Whether the batch of the outermost call is replicated, so that gradients are sums over all of it."""

    has_all_rows: bool = False
    """Whether each process passes the whole batch to a step, and not rows of its own."""

    model_in_step: object = None
    """The model whose step runs."""

    mismatches: dict[str, str] | None = None
    """Where a file is compared with a model before it is loaded: shapes that differ, by path."""


class KerasSession(Protocol):  # a protocol, since the module of `Session` imports those that are given one
    """One scope's work in Keras, as wrapped methods and backends see it."""

    context: ScopeContext
    policy: LayoutPolicy
    backend: Backend
    on_thread: OnThread

    registry: Registry
    """The layers, optimizers and variables of the scope."""

    outer_models: weakref.WeakSet[object]
    """Models outside of all scopes that have layers of this one, and were looked at."""

    load_watch: Closing
    """Entered once a model of the scope is saved to a file; see `copies.watch_loads`."""

    gathering: int
    """How much functions gather beyond their layouts, as far as is known that the backend needs it; 0: nothing."""

    lock: threading.RLock
    """Held while weights are made, and by calls and steps that run on the mesh."""

    @property
    def engine(self) -> Engine:
        """The engine that holds the arrays; a plan has none."""
        ...

    def defer(self) -> AbstractContextManager[None]:
        """While open, variables are made without values; the outermost one materializes them at its end."""
        ...

    def materialize(self) -> None:
        """Give every variable of the scope its layout, and every pending one its value."""
        ...

    def plan_ahead(self) -> None:
        """Find the layouts of what is pending, before values come one by one, as from a file."""
        ...

    def optimizer_replaced(self, optimizer: object) -> None:
        """A model was given another optimizer than this one."""
        ...

    def refuse_in_a_plan(self, name: str) -> None:
        """Raise if this is a dry run, in which nothing gets a value."""
        ...

    def path_of(self, variable: object) -> str:
        """Return the object path of a variable, for messages."""
        ...

    def output_layout(self, layer: object) -> tuple[str, Layout | None]:
        """Return a layer's path, and the layout of what it returns; `None`: it stays as it is."""
        ...


class Backend(ABC):  # why: decisions/0171
    """One backend of Keras. What has a body here does nothing, or the usual thing, on most of them."""

    engine_name: ClassVar[str]

    global_init: ClassVar[Mapping[str, str]]
    """Keras's own initializers, by class name, that this backend's engine draws on one device, and why."""

    quiet: ClassVar[Sequence[tuple[object, str]]] = ()
    """Classes of Keras, and methods of theirs that do nothing on a thread that is in a scope."""

    chooses_layouts: ClassVar[bool] = False
    """Whether a compiler chooses the layouts of activations where no rule gives them."""

    one_scope_in: ClassVar[Mapping[str, bool]] = MappingProxyType({})
    """Steps of Keras that a model made outside cannot take with layers in layouts; `True`: if it trains others, too."""

    value_of: Callable[[keras.Variable], object] = staticmethod(operator.attrgetter("value"))
    """Returns the value of a variable in the element type that Keras says it has."""

    as_plain: Callable[[Any], object] | None = None
    """Makes a plain tensor of a numpy array, where Keras's quantizers cannot read weights in layouts."""

    unreadable_boards: ClassVar[Sequence[str]] = ()
    """Options of Keras's TensorBoard with which it computes with weights themselves, which fails in layouts."""

    def private_names(self) -> Sequence[tuple[object, Sequence[str]]]:
        """Return classes or modules of Keras, and the private names of theirs that this backend uses."""
        return ()

    def compute_on(self, mesh: Mesh) -> None:
        """Have Keras make tensors on devices of the type of a mesh from now on, its own and those of plain models."""
        return

    @abstractmethod
    def outside(self) -> AbstractContextManager[object]:
        """Leave any tracing that goes on, so that what is made in here are real arrays."""

    @abstractmethod
    def is_tracing(self) -> bool:
        """Whether the code runs inside a compiled function's trace."""

    @abstractmethod
    def store(self, variable: object, held: object, assignment: Assignment, session: KerasSession) -> object:
        """Give a variable its value; later values keep the layout. Returns the tag that slots will carry."""

    def lay_out(self, array: object, layout: Layout, session: KerasSession) -> object:
        """Return what a layer returns in a layout; gradients find their way back."""
        return session.engine.relayout(array, layout)

    def values_changed(self, optimizers: Sequence[object], layers: Sequence[object]) -> None:
        """Fix what optimizers and layers remember of variables that have got new values."""
        return

    def layer_wraps(self, layer: object, session: KerasSession) -> Wraps:
        """Return what to wrap on a layer or model so that it computes in its layouts."""
        return {}

    @staticmethod
    @abstractmethod
    def training_wraps(model: object, session: KerasSession) -> Wraps:
        """Return what to wrap on a model so that `fit`, `evaluate` and `predict` work in its layouts."""

    def optimizer_wraps(self, optimizer: object, session: KerasSession) -> Wraps:
        """Return what to wrap on an optimizer so that it updates variables in their layouts."""
        return {}

    @staticmethod
    def unsupported_of(layer: object, path: str, weights: list[str]) -> Iterable[Unsupported]:
        """Yield what the backend cannot do with a layer, given its path and those of its own weights."""
        return ()

    @abstractmethod
    def gradients(
        self, model: object, x: object, y: object, sample_weight: object
    ) -> tuple[dict[str, object], list[object]]:
        """Return the losses in training by name, and the gradient for each trainable variable, as numpy arrays.

        The gradients of a model with a `train_step` of its own are those that it passes to its optimizers, or `None`.
        """

    def comparing(self, model: object) -> AbstractContextManager[object]:
        """While open, a model is compared with another one: it draws what that one draws, from the same rows.

        Keras draws from generators that are variables; what is drawn from one of the process depends in here on how
        often the model drew before. Each process passes the whole batch.
        """
        return nullcontext()

    def random_states(self) -> dict[str, object]:
        """Return the states of generators of the process from which layers draw, by name: numbers and arrays."""
        return {}

    def restore_random_states(self, found: Mapping[str, object]) -> None:
        """Put back what `random_states` returned, where it is in here."""
        return


_BACKENDS = {
    "jax": "layoutmap.adapters.keras.backends.jax:JaxBackend",
    "tensorflow": "layoutmap.adapters.keras.backends.tensorflow:TensorFlowBackend",
    "torch": "layoutmap.adapters.keras.backends.torch:TorchBackend",
}


def backend_of(name: str) -> Backend:
    """Return the backend of a name.

    Raises:
        ScopeError: There is none.
    """
    if name not in _BACKENDS:
        raise ScopeError(
            f"Keras runs on {name}, where layout maps do not work yet",
            why=f"the supported backends are {', '.join(_BACKENDS)}",
            fix="set KERAS_BACKEND to one of them before Keras is imported",
        )
    module, _, kind = _BACKENDS[name].partition(":")
    return getattr(importlib.import_module(module), kind)()


def read_variable(variable: keras.Variable) -> Any:
    """Return the global value of a variable, as a numpy array."""
    return get_engine(backend_of(backend_name()).engine_name).to_numpy(variable.value)


def backend_name() -> str:
    """Return the backend that Keras runs on."""
    return keras.backend.backend()
