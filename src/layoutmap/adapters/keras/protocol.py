"""Define the protocols of a scope's session and of a Keras backend.

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
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines import get_engine
from layoutmap.engines.patches import Closing
from layoutmap.engines.protocol import Engine

WrappedMethods = Mapping[str, Callable[..., object]]  # methods to wrap on an instance, by name


class ThreadState(threading.local):
    """The state of a scope's models on the current thread."""

    opened_at: int = 0  # the number of frames on the thread when the scope was opened (`count_user_frames`)
    call_depth: int = 0  # number of open calls of layers or steps
    is_initializing: bool = False  # initializers run, so that their draws do not advance earlier ones
    is_exporting: bool = False  # a model is being exported for one device
    # Maps a weight's layout to the one in which the called layer reads it. None: the usual layout.
    reading: Callable[[Layout], Layout] | None = None
    gathering: int = 0  # level of gathering of the running function, see `Gathering`
    sums_up: bool = False  # the outermost call's batch is replicated, so gradients are not partial
    has_all_rows: bool = False  # each process passes the whole batch to a step, not its own rows
    model_in_step: object = None  # model with a running step
    # Shapes that differ, by path, while a file is compared with a model before loading.
    mismatches: dict[str, str] | None = None


class KerasSession(Protocol):  # a protocol, since the module of `Session` imports those that are given one
    """Build the Keras models of one scope, as seen by wrapped methods and backends."""

    context: ScopeContext
    policy: LayoutPolicy
    backend: Backend
    on_thread: ThreadState
    registry: Registry  # layers, optimizers, and variables of the scope
    # Models outside all scopes that contain layers of this one, and were checked.
    outer_models: weakref.WeakSet[object]
    load_watch: Closing  # entered when a model of the scope is saved to a file; see `copies.watch_loads`
    gathering: int  # the gathering level that the backend needs so far, see `Gathering`
    lock: threading.RLock  # held while weights are created, and by calls and steps on the mesh

    @property
    def engine(self) -> Engine:
        """Engine of the scope's arrays. A plan has no engine."""
        ...

    def defer(self) -> AbstractContextManager[None]:
        """Create variables without values in the block. The end of the outermost block materializes them."""
        ...

    def materialize(self) -> None:
        """Set the layout of every variable in the scope, and the value of every pending one."""
        ...

    def plan_ahead(self) -> None:
        """Plan pending variables before their values are assigned one by one from a file."""
        ...

    def release_optimizer(self, optimizer: object) -> None:
        """Stop wrapping an optimizer that a model no longer uses."""
        ...

    def refuse_in_a_plan(self, name: str) -> None:
        """Raise if this is a dry run, in which no variable gets a value."""
        ...

    def find_path(self, variable: object) -> str:
        """Return the object path of a variable for messages."""
        ...

    def find_output_layout(self, layer: object) -> tuple[str, Layout | None]:
        """Return a layer's path, and the layout of its outputs or None to keep theirs."""
        ...


# Each backend stores variables differently, so other code accesses them only through this class (decisions/0171).
class Backend(ABC):
    """One backend of Keras. Methods with a body here are the defaults."""

    engine_name: ClassVar[str]
    # Why the engine must run these initializers, by class name, on one device.
    global_init: ClassVar[Mapping[str, str]]
    # Keras methods that do nothing while the thread is in a scope.
    silenced_methods: ClassVar[Sequence[tuple[object, str]]] = ()
    # A compiler chooses layouts of activations without a rule.
    chooses_layouts: ClassVar[bool] = False
    # The steps that are refused for a model outside the scope with sharded layers. True: only while training.
    single_scope_steps: ClassVar[Mapping[str, bool]] = MappingProxyType({})
    # Value of a variable in its Keras element type.
    read_value: Callable[[keras.Variable], object] = staticmethod(operator.attrgetter("value"))
    # Array that a variable stores.
    read_stored: Callable[[keras.Variable], object] = staticmethod(operator.attrgetter("value"))
    # Makes an unsharded tensor for Keras's quantizers, if these cannot read sharded weights.
    make_unsharded_tensor: Callable[[Any], object] | None = None
    # TensorBoard options that compute with sharded weights, which fails.
    unsupported_board_options: ClassVar[Sequence[str]] = ()

    # Arrays that a variable stores and that Keras cannot convert.
    stored_types: tuple[type, ...] = ()

    def explain_no_padding(self, variable: VariableSpec, layout: Layout) -> str:
        """Return why a variable cannot be stored padded, or an empty text if it can."""
        return f"Keras on {self.engine_name} stores no padding"

    def list_private_names(self) -> Sequence[tuple[object, Sequence[str]]]:
        """Return the classes and modules of Keras with the private names that this backend uses."""
        return ()

    def compute_on(self, mesh: Mesh) -> None:
        """Make Keras create its tensors, and those of unsharded models, on the mesh's device type from now on."""
        return

    @abstractmethod
    def leave_tracing(self) -> AbstractContextManager[object]:
        """Run the block outside of any tracing and without the default mesh."""

    @abstractmethod
    def is_tracing(self) -> bool:
        """Return whether the code runs in a compiled function's trace."""

    @abstractmethod
    def store(self, variable: object, held: object, assignment: Assignment, session: KerasSession) -> object:
        """Store a variable's value so that later values keep its layout. Return the tag for its slots."""

    def relayout_output(self, array: object, layout: Layout, session: KerasSession) -> object:
        """Return a layer's output in a layout. Gradients flow through the conversion."""
        return session.engine.relayout(array, layout)

    def refresh_references(self, optimizers: Sequence[object], layers: Sequence[object]) -> None:
        """Update the references of optimizers and layers to variables with replaced values."""
        return

    def make_layer_wraps(self, layer: object, session: KerasSession) -> WrappedMethods:
        """Return the methods to wrap on a layer or model so that it computes in its layouts."""
        return {}

    @staticmethod
    @abstractmethod
    def make_training_wraps(model: object, session: KerasSession) -> WrappedMethods:
        """Return the methods to wrap on a model so that `fit`, `evaluate`, and `predict` keep its layouts."""

    def make_optimizer_wraps(self, optimizer: object, session: KerasSession) -> WrappedMethods:
        """Return the methods to wrap on an optimizer so that it updates variables in their layouts."""
        return {}

    @staticmethod
    def find_unsupported(layer: object, path: str, weights: list[str]) -> Iterable[Unsupported]:
        """Yield the operations of a layer that the backend cannot compute."""
        return ()

    @abstractmethod
    def gradients(
        self, model: object, x: object, y: object, sample_weight: object
    ) -> tuple[dict[str, object], list[object]]:
        """Return the training losses by name, and the gradients of trainable variables as numpy arrays.

        The gradients of a model with a `train_step` of its own are those that it passes to its optimizers, or `None`.
        """

    def match_runs(self, model: object) -> AbstractContextManager[object]:
        """Make compared models use the same random numbers and rows until the block ends.

        Keras draws from generators that are variables; what is drawn from one of the process depends in here on how
        often the model drew before. Each process passes the whole batch.
        """
        return nullcontext()

    def read_random_states(self) -> dict[str, object]:
        """Return the random states of the process that layers draw from, by name."""
        return {}

    def restore_random_states(self, found: Mapping[str, object]) -> None:
        """Restore the states that `read_random_states` returned, as far as they are present."""
        return


_BACKENDS = {
    "jax": "layoutmap.adapters.keras.backends.jax:JaxBackend",
    "tensorflow": "layoutmap.adapters.keras.backends.tensorflow:TensorFlowBackend",
    "torch": "layoutmap.adapters.keras.backends.torch:TorchBackend",
}


def get_backend(name: str) -> Backend:
    """Return the backend with this name.

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
    return get_engine(get_backend(get_backend_name()).engine_name).to_numpy(variable.value)


def get_backend_name() -> str:
    """Return the name of the backend that Keras uses."""
    return keras.backend.backend()
