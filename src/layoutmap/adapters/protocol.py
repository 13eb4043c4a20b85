"""Define the protocols of adapters, and of the scope that an adapter works in.

An adapter knows one model library: how to build a model without its values, the names of its variables, how each gets
its value, and how the library trains. It does not know rules and devices, but calls its `ScopeContext`, which has the
engine and the layout policy. `layoutmap.testing.adapter_contract` tests adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from layoutmap.adapters.options import ScopeOptions, check_option_names
from layoutmap.core.errors import CheckpointError, ScopeError, shorten_repr
from layoutmap.core.initializers import Initializer
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.policy import LayoutPolicy
from layoutmap.core.unsupported import UnsupportedFeature
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines.protocol import Engine

if TYPE_CHECKING:
    from layoutmap.core.blocks import NumpyArray


@dataclass(frozen=True, slots=True)
class StoredVariable:
    """A variable of a model with its array.

    Args:
        variable: The variable.
        array: Its value as an array of the engine. In a checkpoint, a random key is the array of its numbers.
    """

    variable: VariableSpec
    array: Any


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """The state of an optimizer in a checkpoint.

    Args:
        slots: The saved slots.
        settings: The saved result of `CheckpointAdapter.read_state_outside_variables`.
    """

    slots: Sequence[VariableSpec]
    settings: Mapping[str, Any]


class RuleLookup(Protocol):
    """The part of a layout map that adapters use. They cannot import its class, which is in a higher package."""

    @property
    def mesh(self) -> Mesh | None:
        """Mesh of the map."""
        ...

    def matching_rules(self, path: str) -> Sequence[object]:
        """Return all rules that match a path."""
        ...


# `Scope` is in a higher package, so adapters use this protocol (decisions/0171).
class ScopeContext(Protocol):
    """The part of a scope that adapters use: the engine, the layout policy, and functions that need the plan."""

    plan_only: bool
    """Whether this is a dry run, in which there is no engine and no variable may get a value."""

    spans_processes: bool
    """Whether the mesh has devices of other processes, which then all make the same calls."""

    options: ScopeOptions
    """The options that the user passed. `options.own` has those that only this library has."""

    policy: LayoutPolicy
    """The policy that derives layouts of batches, of weights while a layer computes, and of outputs of layers."""

    @property
    def layout_map(self) -> RuleLookup:
        """The layout map. Its rules apply to arrays that appear after the model."""
        ...

    @property
    def engine(self) -> Engine:
        """Engine of the scope's arrays. A plan has no engine."""
        ...

    def assign_layouts(
        self,
        variables: Sequence[VariableSpec],
        global_init: Mapping[tuple[str, str], str],
        unsupported: Sequence[UnsupportedFeature],
        is_complete: bool,
        layers: Sequence[str] | Mapping[str, int | None] | None = None,
        free_activations: bool = False,
    ) -> Sequence[Assignment]:
        """Return a layout for each variable, in order, or raise one error with all problems of the plan.

        Args:
            variables: The variables, in the order of the model. Their keys are unique.
            global_init: For each variable whose global value must be computed on one device, the reason, by its key.
            unsupported: Features of the model that the library's backend does not support.
            is_complete: Whether no variables will be added later.
            layers: The paths of all layers, so that a rule for activations that matches none of them is reported. A
                mapping also has the rank of each layer's output, or None. `None`: activations have no paths.
            free_activations: Whether a compiler chooses the layouts of activations without a rule.
        """
        ...

    def add_note(self, subject: str, message: str) -> None:
        """Add a note to the plan about a fact that is known only after variables are materialized."""
        ...

    def assign_single_layout(self, variable: VariableSpec) -> Assignment:
        """Return the layout of a variable that needs its value before all variables are known."""
        ...

    def create_arrays(
        self, assignments: Mapping[str, Assignment], initializers: Mapping[str, Initializer]
    ) -> Mapping[str, Any]:
        """Compute initial values in their layouts. Return a dict from key to array. All processes must call this."""
        ...

    def warn_of_idle_dims(self, step: str, sharded: Collection[str] = ()) -> None:
        """Warn about mesh dims that shard no weight, layer output, or batch, once, in the first training step.

        Args:
            step: The name of the step in the message.
            sharded: The mesh dims over which the program itself has sharded the batch of the step.
        """
        ...

    def gather_from_processes(self, values: NumpyArray) -> NumpyArray:
        """Return the values of all processes, stacked along a new first axis. All must call it with equal shapes."""
        ...


class Session(Protocol):
    """Build or shard the models of one scope in one library."""

    library: str
    """The name of the library's adapter."""

    def defer_variables(self) -> AbstractContextManager[None]:
        """Return a context that creates variables without values. When the outermost one ends, they get values.

        Raises:
            ScopeError: The library cannot defer variables in a block, but only in `build_model`.
        """
        ...

    def build_model(self, make_model: Callable[[], Any]) -> Any:
        """Call a function that builds a model, and return the materialized model, which may be a different object."""
        ...

    def shard_model(self, model: Any) -> Any:
        """Shard an existing model as if it had been built in this session. Return it, or the model that replaces it."""
        ...

    def has_built(self, model: Any) -> bool:
        """Return whether a model was built in this session."""
        ...

    def list_unbuilt_layer_names(self) -> Sequence[str]:
        """Return the names of layers that have no weights yet, because they create them in their first call."""
        ...

    def create_lazy_variables(self, model: Any, inputs: Any) -> None:
        """Create, without computing, the variables that a first call and training step would create."""
        ...


# An adapter needs no knowledge of rules and devices, so few methods are enough for plan, build, scope,
# and apply (decisions/0171).
@runtime_checkable
class ModelAdapter(Protocol):
    """Plan, build, and shard the models of one library.

    An adapter must write nine of the methods. The other four have defaults for a library that needs no refusal in a
    scope for another library, has no padding and no options of its own, and plans no arrays that are created later.
    `TrainingAdapter`, `CheckpointAdapter`, and `InspectionAdapter` are optional protocols.
    """

    name: str
    shards_batches: bool = False
    """Whether training steps of the library shard batches over the scope's batch dim, and never over others."""

    @property
    def engine_name(self) -> str:
        """Name of the engine of the library's arrays."""
        ...

    def check_scope_can_open(self) -> None:
        """Raise a ScopeError if the library's version, mode, or backend is unsupported, or no scope can open now."""
        ...

    def owns_model(self, model: Any) -> bool:
        """Return whether a model belongs to this library."""
        ...

    def make_session(self, context: ScopeContext) -> Session:
        """Return a session, which builds or shards the models of one scope."""
        ...

    def preserve_random_states(self) -> AbstractContextManager[None]:
        """Restore the library's random states when the block ends."""
        ...

    def set_seed(self, seed: int) -> None:
        """Seed all random generators that the library uses."""
        ...

    def create_lazy_variables(self, model: Any, batch: Any) -> None:
        """Create, without computing, the variables that a first call and training step would create."""
        ...

    def variables(self, model: Any) -> dict[str, Any]:
        """Return a dict from path to variable, in a fixed order: a model's weights, states, and optimizer slots."""
        ...

    def describe_arrays_created_after_build(
        self, later: Mapping[str, Callable[[], object]], mesh: Mesh
    ) -> Sequence[VariableSpec]:
        """Describe the arrays that functions will create after the model, such as KV caches, without computing them."""
        raise ScopeError(
            f"later={shorten_repr(dict(later))} works only with JAX models",
            why=f"shapes of arrays outside {self.name} models cannot be determined before they are created",
            fix="leave later= out",
        )

    def read(self, variable: Any) -> Any:
        """Return the global value of a variable as a numpy array."""
        ...

    def write(self, variable: Any, value: Any) -> None:
        """Assign an engine or numpy array to a variable without changing its layout."""
        ...

    def forbid_building_models(self, scope_library: str) -> AbstractContextManager[None]:
        """Return a context in which building a model of this library raises, because it would stay unsharded.

        Args:
            scope_library: The library that the scope was opened for.
        """
        return nullcontext()

    def explain_why_padding_is_impossible(self, variable: VariableSpec, layout: Layout) -> str:
        """Return why a variable cannot be stored with padding in a layout, or an empty text if it can."""
        return f"{self.name} models are not padded"

    def read_library_options(
        self, values: Mapping[str, Any], options: ScopeOptions, *, spans_processes: bool
    ) -> Any:
        """Check the scope options that only this library has, and return them as a value for `ScopeOptions.own`.

        Args:
            values: The values of these options by name.
            options: The options that every library has.
            spans_processes: Whether the mesh has devices of other processes.

        Raises:
            ScopeError: The library has no option of a name, or a value cannot be used.
        """
        check_option_names(values, self.name)


@runtime_checkable
class TrainingAdapter(ModelAdapter, Protocol):
    """Train and compare models, for `check_parity` and plans with an optimizer."""

    def set_optimizer(self, model: Any, optimizer: Any) -> Any:
        """Set the optimizer of a model, if models of the library contain one, and return the model.

        Raises:
            ScopeError: The library has no optimizer of that name.
        """
        ...

    def build_model_on_one_device(self, make_model: Callable[[], Any], mesh: Mesh) -> Any:
        """Build a model unsharded, on one device of the mesh's device type, such as `"GPU"`."""
        return make_model()

    def forward(self, model: Any, batch: Any) -> Any:
        """Return a model's inference outputs for a batch, as numpy arrays that are nested like the outputs."""
        ...

    def gradients(self, model: Any, batch: Any) -> tuple[dict[str, float], dict[str, Any]]:
        """Return two dicts for a batch: from name to loss, and from path to the gradient of a trainable variable.

        A gradient that a model's own step passes to no optimizer of the model is `None`.
        """
        ...

    def train_step(self, model: Any, batch: Any) -> dict[str, float]:
        """Run one training step of a compiled model on a batch, and return its logs."""
        ...


@runtime_checkable
class CheckpointAdapter(ModelAdapter, Protocol):
    """Save, load, and export models."""

    def list_stored_variables(
        self, model: Any, optimizer: Any = None, saved: SavedOptimizer | None = None
    ) -> Sequence[StoredVariable]:
        """Return the weights, states, random states, and optimizer slots that a checkpoint contains.

        Args:
            model: The model.
            optimizer: Its optimizer, where the model does not have it.
            saved: The state that is about to be restored. Slots that the optimizer creates only in its first step are
                returned if they are in this state, each with an array that has its layout and no values.

        Raises:
            CheckpointError: The library does not know the optimizer, or it belongs to another model, or another one was
                saved.
        """
        ...

    def list_checkpoint_names(self, model: Any) -> list[tuple[str, list[tuple[str, str]]]]:
        """Return the names and axes of each variable in the checkpoint format of the model's own library.

        Returns:
            Pairs of a path and its list of (name, axes), as in a name table. The list is empty for a variable that the
            format does not contain.

        Raises:
            CheckpointError: The library has no checkpoint format, or one that changes values.
        """
        raise CheckpointError(
            f'names="checkpoint": {type(model).__name__} has no checkpoint format',
            why="only models of transformers and peft provide the names in their checkpoints",
            fix='pass a table, such as names="llama", or leave names out',
        )

    def make_host_array(self, values: NumpyArray) -> Any:
        """Return an array of the library on the host that uses the memory of a numpy array."""
        return values

    def restore_variables(
        self, model: Any, optimizer: Any, arrays: Iterable[tuple[str, Any]]
    ) -> tuple[Any, Any]:
        """Assign new values, and return the model and its optimizer, or changed copies of immutable ones.

        Args:
            model: The model.
            optimizer: Its optimizer, or `None`.
            arrays: Pairs of a path of `list_stored_variables` and a value: an array of the engine in the layout of the
                variable, or a numpy array for a variable without a layout. Each is assigned before the next is read.
        """
        ...

    def read_state_outside_variables(self, model: Any, optimizer: Any = None) -> dict[str, Any]:
        """Return the state outside of variables, such as random states, as numbers, texts, lists, and mappings.

        `"random"` has the random states of this process by name, and `"optimizer"` the settings of the optimizer.
        """
        ...

    def restore_state_outside_variables(
        self, model: Any, optimizer: Any, settings: Mapping[str, Any]
    ) -> None:
        """Restore the state in `settings`, which the adapter of a different library may have saved."""
        ...

    def restore_when_optimizer_is_set(self, model: Any, restore: Callable[[], None]) -> bool:
        """Call `restore` once the model gets an optimizer. Return False if the library does not support this."""
        return False


@runtime_checkable
class InspectionAdapter(ModelAdapter, Protocol):
    """Describe existing models, for `inspect`."""

    def describe_variables(self, model: Any, optimizer: Any = None) -> Sequence[StoredVariable]:
        """Return the variables and arrays of an existing model as a plan would list them.

        Args:
            model: The model; its arrays may be shapes without values.
            optimizer: Its optimizer if the model does not contain it. Its slots are returned, too.
        """
        ...

    def find_scope_context(self, model: Any) -> ScopeContext | None:
        """Return the scope that sharded a model, or None if no scope did, or if the library does not store it."""
        ...

    def list_gathered_dims(self, model: Any) -> tuple[str, ...]:
        """Return the mesh dims over which the library is known to gather weights before their layers compute."""
        return ()


@runtime_checkable
class Adapter(TrainingAdapter, CheckpointAdapter, InspectionAdapter, Protocol):
    """Adapter with all optional capabilities."""
