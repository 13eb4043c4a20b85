"""Define the protocols of a scope's session and of a Keras backend.

A backend knows how Keras's variables store a value, and how compiled steps keep layouts. An engine knows the arrays of
a framework, and a backend what Keras does differently with that framework.
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
from layoutmap.core.unsupported import UnsupportedFeature
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines import get_engine
from layoutmap.engines.patches import SelfClosingContext
from layoutmap.engines.protocol import Engine

WrappedMethods = Mapping[str, Callable[..., object]]  # wrappers that replace methods of an instance, by name


class ThreadState(threading.local):
    """Hold the state of a scope's models on one thread."""

    opening_depth: int = 0  # number of frames on the thread when the scope was opened (`count_user_frames`)
    call_depth: int = 0  # number of running calls of layers or steps
    # Whether initializers run. If not, a draw of a seed first draws the seeds of variables created earlier.
    is_running_initializers: bool = False
    is_exporting: bool = False  # whether a model is being exported, so that it computes on one device
    # Maps a weight's layout from `derive_compute_layout` to the one that the called layer reads. None: no change.
    to_reading_layout: Callable[[Layout], Layout] | None = None
    gathering_level: int = 0  # level of gathering of the running function, see `GatheringLevel`
    # Whether the inputs of the outermost call are replicated, so that its gradients are not partial sums.
    has_replicated_inputs: bool = False
    has_whole_batch: bool = False  # whether each process passes the whole batch to a step, not its own rows
    model_in_step: object = None  # model with a running step
    # Descriptions of shapes that differ, by path, while a file is compared with a model before loading.
    shape_mismatches: dict[str, str] | None = None


# The module of `Session` imports modules that take a session, so this protocol prevents circular imports.
class KerasSession(Protocol):
    """The part of a scope's `Session` that wrapped methods and backends use."""

    context: ScopeContext
    policy: LayoutPolicy
    backend: Backend
    thread_state: ThreadState
    registry: Registry  # layers, optimizers, and variables of the scope
    # Models that were created outside all scopes, contain layers of this scope, and have been checked already.
    checked_outer_models: weakref.WeakSet[object]
    load_warning_context: SelfClosingContext  # entered when a model of the scope is saved to a file
    gathering_level: int  # the gathering level that the backend needs so far, see `GatheringLevel`
    lock: threading.RLock  # held while weights are created, and by calls and steps on the mesh

    @property
    def engine(self) -> Engine:
        """Engine of the scope's arrays. A plan has no engine."""
        ...

    def defer_variables(self) -> AbstractContextManager[None]:
        """Create variables without values in the block. After the outermost block, they get layouts and values."""
        ...

    def materialize_variables(self) -> None:
        """Set the layout of every variable in the scope, and the value of every pending one."""
        ...

    def assign_layouts_before_loading(self) -> None:
        """Assign layouts to pending variables before their values are assigned one by one from a file."""
        ...

    def unwrap_optimizer_if_unused(self, optimizer: object) -> None:
        """Restore the methods of an optimizer, unless a model of the scope still uses it."""
        ...

    def raise_if_plan_only(self, subject: str) -> None:
        """Raise a `PlanError` that begins with `subject` if the scope is that of a plan."""
        ...

    def find_variable_path(self, variable: object) -> str:
        """Return the object path of a variable for messages."""
        ...

    def find_path_and_output_layout(self, layer: object) -> tuple[str, Layout | None]:
        """Return a layer's path and the layout of its outputs, which is None if no activation rule matches."""
        ...


# Each backend stores variables differently, so other code accesses them only through this class (decisions/0171).
class Backend(ABC):
    """Adapt layoutmap to one backend of Keras. Methods with a body here are the defaults."""

    engine_name: ClassVar[str]
    # Maps the class name of an initializer to the reason why it must compute the global value on one device.
    global_init_reasons: ClassVar[Mapping[str, str]]
    # Keras methods that do nothing while the thread is in a scope.
    methods_disabled_in_scope: ClassVar[Sequence[tuple[object, str]]] = ()
    # Whether a compiler chooses the layouts of activations that no rule matches.
    compiler_chooses_layouts: ClassVar[bool] = False
    # Names of steps that raise for a model that was created outside the scope of some of its layers. The value is true
    # if they raise only when both sharded and unsharded layers are trained.
    single_scope_steps: ClassVar[Mapping[str, bool]] = MappingProxyType({})
    # Returns the value of a variable in its Keras element type.
    read_value: Callable[[keras.Variable], object] = staticmethod(operator.attrgetter("value"))
    # Returns the array that a variable stores.
    read_stored_array: Callable[[keras.Variable], object] = staticmethod(operator.attrgetter("value"))
    # Makes an unsharded tensor for Keras's quantizers, if these cannot read sharded weights.
    make_unsharded_tensor: Callable[[Any], object] | None = None
    # TensorBoard options that compute with sharded weights, which fails.
    unsupported_board_options: ClassVar[Sequence[str]] = ()

    # Types of stored arrays that Keras cannot convert, so they are assigned as they are.
    stored_types: tuple[type, ...] = ()

    def explain_why_padding_is_impossible(self, variable: VariableSpec, layout: Layout) -> str:
        """Return why a variable cannot be stored with padding in a layout, or an empty text if it can."""
        return f"Keras on {self.engine_name} stores no padding"

    def list_required_private_names(self) -> Sequence[tuple[object, Sequence[str]]]:
        """Return pairs of a class or module of Keras and the private names in it that this backend uses."""
        return ()

    def set_default_device_type(self, mesh: Mesh) -> None:
        """Make Keras create its tensors, and those of unsharded models, on the mesh's device type from now on."""
        return

    @abstractmethod
    def suspend_tracing(self) -> AbstractContextManager[object]:
        """Return a context manager that runs its block outside any trace, and without a default mesh."""

    @abstractmethod
    def is_tracing(self) -> bool:
        """Return whether the code runs in a compiled function's trace."""

    @abstractmethod
    def store_value(
        self, variable: object, value: object, assignment: Assignment, session: KerasSession
    ) -> object:
        """Store a value so that later ones get its layout. Return the new `_layout`, which identifies a variable."""

    def relayout_output(self, array: object, layout: Layout, session: KerasSession) -> object:
        """Return a layer's output in a layout. Gradients flow through the conversion."""
        return session.engine.relayout(array, layout)

    def update_value_references(self, optimizers: Sequence[object], layers: Sequence[object]) -> None:
        """Make optimizers and layers use the new values of variables: update the keys and parameters for them."""
        return

    def make_layer_method_wrappers(self, layer: object, session: KerasSession) -> WrappedMethods:
        """Return wrappers of a layer's methods, by name. They make the layer compute in its layouts."""
        return {}

    @staticmethod
    @abstractmethod
    def make_training_method_wrappers(model: object, session: KerasSession) -> WrappedMethods:
        """Return wrappers of a model's methods, by name. They make its steps keep the layouts of variables."""

    def make_optimizer_method_wrappers(self, optimizer: object, session: KerasSession) -> WrappedMethods:
        """Return wrappers of an optimizer's methods, by name. They make updates keep the layouts of variables."""
        return {}

    @staticmethod
    def find_unsupported_features(
        layer: object, path: str, weights: list[str]
    ) -> Iterable[UnsupportedFeature]:
        """Yield the features of a layer that the backend lacks, with the paths of the layer and its weights."""
        return ()

    @abstractmethod
    def compute_losses_and_gradients(
        self, model: object, x: object, y: object, sample_weight: object
    ) -> tuple[dict[str, object], list[object]]:
        """Return a dict of the training losses, and the gradients of trainable variables, as numpy arrays.

        The gradients of a model with a `train_step` of its own are those that it passes to its optimizers, or `None`.
        """

    def match_draws_and_rows_temporarily(self, model: object) -> AbstractContextManager[object]:
        """Make models that are compared use the same random numbers and rows until the block ends.

        Draws from the process's own generator, which is no variable of the model, depend here only on how often the
        model was run before. Each process passes the whole batch.
        """
        return nullcontext()

    def read_random_states(self) -> dict[str, object]:
        """Return a dict from name to state, of the random generators of the process that layers draw from."""
        return {}

    def restore_random_states(self, states: Mapping[str, object]) -> None:
        """Restore the states that `read_random_states` returned, as far as they are present."""
        return


_BACKENDS = {
    "jax": "layoutmap.adapters.keras.backends.jax:JaxBackend",
    "tensorflow": "layoutmap.adapters.keras.backends.tensorflow:TensorFlowBackend",
    "torch": "layoutmap.adapters.keras.backends.torch:TorchBackend",
}


def get_backend(name: str) -> Backend:
    """Return layoutmap's object for a backend of Keras.

    Raises:
        ScopeError: No backend has this name.
    """
    if name not in _BACKENDS:
        raise ScopeError(
            f"Keras runs on {name}, where layout maps do not work yet",
            why=f"the supported backends are {', '.join(_BACKENDS)}",
            fix="set KERAS_BACKEND to one of them before Keras is imported",
        )
    module, _, kind = _BACKENDS[name].partition(":")
    return getattr(importlib.import_module(module), kind)()


def read_global_value(variable: keras.Variable) -> Any:
    """Return the global value of a variable, as a numpy array."""
    return get_engine(get_backend(get_keras_backend_name()).engine_name).to_numpy(variable.value)


def get_keras_backend_name() -> str:
    """Return the name of the backend that Keras uses."""
    return keras.backend.backend()
