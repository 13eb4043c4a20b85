"""Define the protocols of adapters, and of the scope that an adapter works in.

An adapter knows one model library: how to build a model without its values, what its variables are called, how each
gets its value, and how the library trains. It knows no rule, no mesh and no device: those are behind its
`ScopeContext`, with the engine and the layout policy. Its laws are in `layoutmap.testing.adapter_contract`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from layoutmap.adapters.options import ScopeOptions, check_names
from layoutmap.core.errors import CheckpointError, ScopeError, shorten_repr
from layoutmap.core.initializers import Initializer
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.policy import LayoutPolicy
from layoutmap.core.unsupported import Unsupported
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines.protocol import Engine

if TYPE_CHECKING:
    from layoutmap.core.blocks import NumpyArray


@dataclass(frozen=True, slots=True)
class Stored:
    """A variable of a model with its array.

    Args:
        variable: The variable.
        array: Its value, as an array of the engine; in a checkpoint, of what the engine holds as another thing the
            numbers in it.
    """

    variable: VariableSpec
    array: Any


@dataclass(frozen=True, slots=True)
class Saved:
    """Optimizer slots and settings that a checkpoint contains.

    Args:
        slots: Its slots.
        settings: What `Keeping.settings` returned.
    """

    slots: Sequence[VariableSpec]
    settings: Mapping[str, Any]


class RuleLookup(Protocol):
    """The layout map as an adapter uses it, because adapters are below `layoutmap.rules`."""

    @property
    def mesh(self) -> Mesh | None:
        """Mesh of the map."""
        ...

    def matching_rules(self, path: str) -> Sequence[object]:
        """Return all rules that match a path."""
        ...


# `Scope` is in a higher package, so adapters use this protocol (decisions/0171).
class ScopeContext(Protocol):
    """The scope as an adapter uses it: the engine, the layout policy, and the checks that need the plan."""

    plan_only: bool
    """Whether this is a dry run: no variable may get a value, and there is no engine."""

    across: bool
    """Whether the mesh has devices of other processes: then all of them do the same, each with its own data."""

    options: ScopeOptions
    """The options that the user gave; those of the adapter's own are in `options.own`."""

    policy: LayoutPolicy
    """The layouts of batches, of weights in a computation and of what layers return."""

    @property
    def layout_map(self) -> RuleLookup:
        """The rules, for arrays that appear later."""
        ...

    @property
    def engine(self) -> Engine:
        """Engine of the scope's arrays. A plan has no engine."""
        ...

    def assign(
        self,
        variables: Sequence[VariableSpec],
        global_init: Mapping[tuple[str, str], str],
        unsupported: Sequence[Unsupported],
        complete: bool,
        layers: Sequence[str] | None = None,
        free_activations: bool = False,
    ) -> Sequence[Assignment]:
        """Return a layout for each variable, in order, or raise all problems before any value is created.

        Args:
            variables: The variables, in the order of the model; no two with one `key`.
            global_init: Why the global value of a variable must be computed on one device, by its `key`, where it must.
            unsupported: What the library's backend cannot do.
            complete: Whether these are all variables there will be.
            layers: The paths of all layers, so that rules for activations of none of them are found.
            free_activations: Whether a compiler chooses the layouts of activations without a rule.
        """
        ...

    def note(self, subject: str, what: str) -> None:
        """Add a note to the plan about a fact found while variables were materialized."""
        ...

    def assign_one(self, variable: VariableSpec) -> Assignment:
        """Return the layout of a variable that is needed before all variables are known."""
        ...

    def create(
        self, assignments: Mapping[str, Assignment], initializers: Mapping[str, Initializer]
    ) -> Mapping[str, Any]:
        """Return initial values in their layouts, by key. All processes of the mesh must call this."""
        ...

    def warn_of_idle_dims(self, step: str, sharded: Collection[str] = ()) -> None:
        """Warn once, in the first training step, about mesh dims that shard no weight, layer output, or batch.

        Args:
            step: The name of the step, for the message.
            sharded: The mesh dims over which the program itself has sharded the step's batch.
        """
        ...

    def gather(self, values: NumpyArray) -> NumpyArray:
        """Return equally shaped values of all processes, one row each. All processes of the mesh must call this."""
        ...


class Session(Protocol):
    """Build or shard the models of one scope in one library."""

    library: str
    """The name of the library's adapter."""

    def defer(self) -> AbstractContextManager[None]:
        """Create variables without values in the block. The end of the outermost block materializes them.

        Raises:
            ScopeError: The library cannot defer what is made in a block; `build` is the way then.
        """
        ...

    def build(self, make: Callable[[], Any]) -> Any:
        """Return the materialized model of a function, which may be another object than the function returns."""
        ...

    def take(self, model: Any) -> Any:
        """Shard an existing model as if it had been built here, and return it or its replacement."""
        ...

    def made(self, model: Any) -> bool:
        """Return whether a model was built in this session."""
        ...

    def list_unbuilt_layers(self) -> Sequence[str]:
        """Return the names of layers that create weights in their first call."""
        ...

    def complete(self, model: Any, inputs: Any) -> None:
        """Create, without computing, the variables that a first call and training step would create."""
        ...


@runtime_checkable
# An adapter needs no knowledge of rules and devices, so a small one supports plan, build, scope,
# and apply (decisions/0171).
class Building(Protocol):
    """Plan, build, and shard the models of one library.

    Nine methods are to be written; four have a default, which is for a library whose models cannot be built unseen,
    cannot be padded, that has no options of its own, and that plans no arrays beside a model. `Training`, `Keeping` and
    `Inspecting` are more that an adapter may know.
    """

    name: str
    places_batches: bool = False
    """Whether the library's own training steps shard batches, by the scope's batch dim alone."""

    @property
    def engine_name(self) -> str:
        """Name of the engine of the library's arrays."""
        ...

    def check(self) -> None:
        """Refuse versions, modes, and backends of the library that this adapter does not support.

        Raises:
            ScopeError: The library's version, mode or backend is not supported, or a scope cannot be opened here.
        """
        ...

    def owns_model(self, model: Any) -> bool:
        """Return whether a model belongs to this library."""
        ...

    def begin(self, context: ScopeContext) -> Session:
        """Return a session for one scope."""
        ...

    def keep_random_states(self) -> AbstractContextManager[None]:
        """Restore the library's random states when the block ends."""
        ...

    def set_seed(self, seed: int) -> None:
        """Seed all random generators that the library uses."""
        ...

    def complete(self, model: Any, batch: Any) -> None:
        """Create, without computing, the variables that a first call and training step would create."""
        ...

    def variables(self, model: Any) -> dict[str, Any]:
        """Return a model's variables by path, in a fixed order: weights, states, and optimizer slots."""
        ...

    def describe_later_variables(
        self, later: Mapping[str, Callable[[], object]], mesh: Mesh
    ) -> Sequence[VariableSpec]:
        """Describe the arrays of functions by name, which are made after a model. Computes nothing."""
        raise ScopeError(
            f"later={shorten_repr(dict(later))} is for models of JAX",
            why=f"shapes of arrays outside {self.name} models cannot be determined before they are created",
            fix="leave it out",
        )

    def read(self, variable: Any) -> Any:
        """Return the global value of a variable as a numpy array."""
        ...

    def write(self, variable: Any, value: Any) -> None:
        """Assign an engine or numpy array to a variable without changing its layout."""
        ...

    def refused(self, library: str) -> AbstractContextManager[None]:
        """Refuse models of this library that are built until the block ends, since they would stay unsharded.

        Args:
            library: The library that the scope was opened for.
        """
        return nullcontext()

    def explain_no_padding(self, variable: VariableSpec, layout: Layout) -> str:
        """Return why a variable cannot be stored in a layout with padding, or an empty text if it can."""
        return f"{self.name} models are not padded"

    def read_own_options(self, given: Mapping[str, Any], options: ScopeOptions, *, across: bool) -> Any:
        """Return the scope options that only this library has, as one value for `ScopeOptions.own`.

        Args:
            given: Values by name.
            options: The options of every scope.
            across: Whether the mesh has devices of other processes.

        Raises:
            ScopeError: The library has no such option, or a value cannot be used.
        """
        check_names(given, self.name)


@runtime_checkable
class Training(Building, Protocol):
    """Train and compare models, for `check_parity` and plans with an optimizer."""

    def set_optimizer(self, model: Any, optimizer: Any) -> Any:
        """Set the optimizer of a model, if models of the library contain one, and return the model.

        Raises:
            ScopeError: The library has no optimizer of that name.
        """
        ...

    def make_on_one_device(self, make: Callable[[], Any], mesh: Mesh) -> Any:
        """Return an unsharded model on one device of a bound mesh's type, such as `"GPU"`."""
        return make()

    def forward(self, model: Any, batch: Any) -> Any:
        """Return a model's inference outputs for a batch as numpy arrays, in the model's nesting."""
        ...

    def gradients(self, model: Any, batch: Any) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the losses of a batch by name, and the gradients of trainable variables by path, in numpy.

        A gradient that a model's own step passes to no optimizer of the model is `None`.
        """
        ...

    def train_step(self, model: Any, batch: Any) -> dict[str, float]:
        """Run one optimizer step of a compiled model on a batch, and return its logs."""
        ...


@runtime_checkable
class Keeping(Building, Protocol):
    """Save, load, and export models."""

    def list_stored_variables(
        self, model: Any, optimizer: Any = None, saved: Saved | None = None
    ) -> Sequence[Stored]:
        """Return the weights, states, random states, and optimizer slots that a checkpoint contains.

        Args:
            model: The model.
            optimizer: Its optimizer, where the model does not have it.
            saved: What is about to be restored: slots that the optimizer makes in its first step are among those
                returned if they are in it, each with an array that has its layout and no values.

        Raises:
            CheckpointError: The optimizer is none that the library knows, not of this model, or another than was saved.
        """
        ...

    def list_checkpoint_names(self, model: Any) -> list[tuple[str, list[tuple[str, str]]]]:
        """Return the names and axes of each variable in the checkpoint format of the model's own library.

        Returns:
            Pairs of a path and of (name, axes) as in a name table. A variable that the format leaves out has none.

        Raises:
            CheckpointError: The library has no such format, or it computes values.
        """
        raise CheckpointError(
            f'names="checkpoint": {type(model).__name__} has no checkpoint format',
            why="only models of transformers and peft provide the names in their checkpoints",
            fix='pass a table, such as names="llama", or leave names out',
        )

    def make_host_array(self, values: NumpyArray) -> Any:
        """Convert a numpy array to the library's host array type, with the same memory."""
        return values

    def restore_variables(
        self, model: Any, optimizer: Any, arrays: Iterable[tuple[str, Any]]
    ) -> tuple[Any, Any]:
        """Assign new values, and return the model and its optimizer, or copies if they are immutable.

        Args:
            model: The model.
            optimizer: Its optimizer, or `None`.
            arrays: Paths of `stored`, and the new values: of the engine, in the layout of the variable, or of numpy
                for one without a layout. Each is taken before the next is asked for.
        """
        ...

    def settings(self, model: Any, optimizer: Any = None) -> dict[str, Any]:
        """Return all other state of a checkpoint as numbers, texts, lists, and mappings.

        `"random"` has the random states of this process by name, `"optimizer"` what an optimizer has beside slots.
        """
        ...

    def restore_settings(self, model: Any, optimizer: Any, settings: Mapping[str, Any]) -> None:
        """Restore the settings of a checkpoint, which a model of another library may have written."""
        ...

    def restore_with_optimizer(self, model: Any, restore: Callable[[], None]) -> bool:
        """Call a function once a model gets an optimizer, and return whether the library supports this."""
        return False


@runtime_checkable
class Inspecting(Building, Protocol):
    """Describe existing models, for `inspect`."""

    def describe_variables(self, model: Any, optimizer: Any = None) -> Sequence[Stored]:
        """Return the variables and arrays of an existing model as a plan would list them.

        Args:
            model: The model; its arrays may be shapes without values.
            optimizer: Its optimizer, whose slots are returned too, where the model does not have it.
        """
        ...

    def find_context(self, model: Any) -> ScopeContext | None:
        """Return the scope that sharded a model, or None without a scope or if the library cannot know it."""
        ...

    def gathered_dims(self, model: Any) -> tuple[str, ...]:
        """Return the known mesh dims over which weights are gathered before their layers compute."""
        return ()


@runtime_checkable
class Adapter(Training, Keeping, Inspecting, Protocol):
    """Adapter with all optional capabilities."""
