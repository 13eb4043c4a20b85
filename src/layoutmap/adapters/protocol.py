"""The protocols of adapters, and of the scope that an adapter works in.

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
from layoutmap.core.initializers import Initializer
from layoutmap.core.policy import LayoutPolicy
from layoutmap.core.unsupported import Unsupported
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines.protocol import Engine

if TYPE_CHECKING:
    from layoutmap.core.blocks import NumpyArray


@dataclass(frozen=True, slots=True)
class Stored:
    """A variable of a model, with its array.

    Args:
        variable: The variable.
        array: Its value, as an array of the engine; in a checkpoint, of what the engine holds as another thing the
            numbers in it.
    """

    variable: VariableSpec
    array: Any


@dataclass(frozen=True, slots=True)
class Saved:
    """The slots and settings that a checkpoint has for an optimizer.

    Args:
        slots: Its slots.
        settings: What `Keeping.settings` returned.
    """

    slots: Sequence[VariableSpec]
    settings: Mapping[str, Any]


# A protocol, since adapters lie below `layoutmap.scope`, whose `Scope` implements it; why: decisions/0171
class ScopeContext(Protocol):
    """A scope as its adapter sees it: the engine, a policy for layouts, and the checks that need the plan."""

    plan_only: bool
    """Whether this is a dry run: no variable may get a value, and there is no engine."""

    across: bool
    """Whether the mesh has devices of other processes: then all of them do the same, each with its own data."""

    options: ScopeOptions
    """The options that the user gave; those of the adapter's own are in `options.own`."""

    policy: LayoutPolicy
    """The layouts of batches, of weights in a computation and of what layers return."""

    @property
    def engine(self) -> Engine:
        """The engine that holds the arrays; a plan has none."""
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
        """Return a layout for each variable, in order; raises with all problems, before anything is materialized.

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
        """Add a note to the plan, of what was found when the variables were materialized."""
        ...

    def assign_one(self, variable: VariableSpec) -> Assignment:
        """Return a layout for a variable that is needed before all are known: its rule's if that fits."""
        ...

    def create(
        self, assignments: Mapping[str, Assignment], initializers: Mapping[str, Initializer]
    ) -> Mapping[str, Any]:
        """Return initial values, each in its layout, by the keys given; all processes of the mesh must ask."""
        ...

    def warn_of_idle_dims(self, step: str, sharded: Collection[str] = ()) -> None:
        """Warn about mesh dims that shard no weight, no layer output and no batch; once, at the first training step.

        Args:
            step: The name of the step, for the message.
            sharded: The mesh dims over which the program itself has sharded the step's batch.
        """
        ...

    def gather(self, values: NumpyArray) -> NumpyArray:
        """Return the values of each process of the mesh, one row each; they must all ask, with values of one shape."""
        ...


class Session(Protocol):
    """One scope's work in one model library."""

    library: str
    """The name of the library's adapter."""

    def defer(self) -> AbstractContextManager[None]:
        """While open, variables are made without values; the outermost one materializes them at its end.

        Raises:
            ScopeError: The library cannot defer what is made in a block; `build` is the way then.
        """
        ...

    def build(self, make: Callable[[], Any]) -> Any:
        """Return the model that a function makes, materialized; it may be another object than the function returns."""
        ...

    def take(self, model: Any) -> Any:
        """Lay out a model that exists, as if it had been built here; returns it, or what takes its place."""
        ...

    def made(self, model: Any) -> bool:
        """Return whether a model was made here, and did not exist before."""
        ...

    def unbuilt(self) -> Sequence[str]:
        """Return the names of layers that will make weights when they are first called."""
        ...

    def complete(self, model: Any, inputs: Any) -> None:
        """Have a model make what it would make at its first call and training step; computes nothing."""
        ...


@runtime_checkable
class Building(Protocol):  # why: decisions/0171
    """Models of one library are planned, built and laid out.

    Nine methods are to be written; two have a default, which is for a library whose models cannot be built unseen and
    that has no options of its own. `Training`, `Keeping` and `Inspecting` are more that an adapter may know.
    """

    name: str
    places_batches: bool = False
    """Whether the library's own training steps shard batches, by the scope's batch dim alone."""

    @property
    def engine_name(self) -> str:
        """The engine whose arrays the library works with now."""
        ...

    def check(self) -> None:
        """Refuse, by name, what this adapter cannot work with.

        Raises:
            ScopeError: The library's version, mode or backend is not supported, or a scope cannot be opened here.
        """
        ...

    def owns(self, model: Any) -> bool:
        """Whether a model is of this library."""
        ...

    def begin(self, context: ScopeContext) -> Session:
        """Return a session for one scope."""
        ...

    def undisturbed(self) -> AbstractContextManager[None]:
        """Restore the random states that the library draws from afterwards."""
        ...

    def set_seed(self, seed: int) -> None:
        """Seed everything the library draws from."""
        ...

    def complete(self, model: Any, batch: Any) -> None:
        """Have a model make what it would make at its first call and training step; computes nothing."""
        ...

    def variables(self, model: Any) -> dict[str, Any]:
        """Return a model's variables by path, in a fixed order: weights, states, and slots of its optimizer."""
        ...

    def read(self, variable: Any) -> Any:
        """Return the global value of a variable, as a numpy array."""
        ...

    def write(self, variable: Any, value: Any) -> None:
        """Give a variable a value, of the engine or of numpy; it keeps its layout."""
        ...

    def refused(self, library: str) -> AbstractContextManager[None]:
        """While open, models of this library that are built here are refused, where they would pass unseen.

        Args:
            library: The library that the scope was opened for.
        """
        return nullcontext()

    def own_options(self, given: Mapping[str, Any], options: ScopeOptions, *, across: bool) -> Any:
        """Return the library's own options of a scope, as one value for `ScopeOptions.own`.

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
    """Models are trained and compared: `check_parity`, and plans with an optimizer."""

    def with_optimizer(self, model: Any, optimizer: Any) -> Any:
        """Return a model with an optimizer in place of its own, where models of the library carry one.

        Raises:
            ScopeError: The library has no optimizer of that name.
        """
        ...

    def on_one_device(self, model: Any, device_type: str) -> Any:
        """Return a plain model, and have its variables on one device of a type, such as `"GPU"`, where they are not."""
        return model

    def forward(self, model: Any, batch: Any) -> Any:
        """Return what a model returns for a batch, in inference; numpy arrays, nested as the model nests them."""
        ...

    def gradients(self, model: Any, batch: Any) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the losses of a batch by name, and gradients for trainable variables by path, as numpy arrays.

        A gradient that a model's own step passes to no optimizer of the model is `None`.
        """
        ...

    def train_step(self, model: Any, batch: Any) -> dict[str, float]:
        """One optimizer step of a compiled model on a batch; returns the numbers that it logs, the loss before it."""
        ...


@runtime_checkable
class Keeping(Building, Protocol):
    """Models are saved, loaded and exported."""

    def stored(self, model: Any, optimizer: Any = None, saved: Saved | None = None) -> Sequence[Stored]:
        """Return what a checkpoint keeps of a model: weights, states and random states, and slots of its optimizer.

        Args:
            model: The model.
            optimizer: Its optimizer, where the model does not have it.
            saved: What is about to be restored: slots that the optimizer makes in its first step are among those
                returned if they are in it, each with an array that has its layout and no values.

        Raises:
            CheckpointError: The optimizer is none that the library knows, not of this model, or another than was saved.
        """
        ...

    def restored(self, model: Any, optimizer: Any, arrays: Iterable[tuple[str, Any]]) -> tuple[Any, Any]:
        """Return a model and its optimizer with other values; the same objects, unless they cannot be changed.

        Args:
            model: The model.
            optimizer: Its optimizer, or `None`.
            arrays: Paths of `stored`, and the new values: of the engine, in the layout of the variable, or of numpy
                for one without a layout. Each is taken before the next is asked for.
        """
        ...

    def settings(self, model: Any, optimizer: Any = None) -> dict[str, Any]:
        """Return what else there is to keep, as numbers, texts, lists and mappings.

        `"random"` has the random states of this process by name, `"optimizer"` what an optimizer has beside slots.
        """
        ...

    def restore_settings(self, model: Any, optimizer: Any, settings: Mapping[str, Any]) -> None:
        """Put back what `settings` returned, here or of another library; `"random"` has those of this process."""
        ...

    def restore_with_optimizer(self, model: Any, restore: Callable[[], None]) -> bool:
        """Call a function once, when a model without an optimizer is given one; return whether the library can."""
        return False


@runtime_checkable
class Inspecting(Building, Protocol):
    """A plan is read off a model that exists: `inspect`."""

    def described(self, model: Any, optimizer: Any = None) -> Sequence[Stored]:
        """Return the variables of a model that any program has made, as a plan would have them, and their arrays.

        Args:
            model: The model; its arrays may be shapes without values.
            optimizer: Its optimizer, whose slots are returned too, where the model does not have it.
        """
        ...

    def context_of(self, model: Any) -> ScopeContext | None:
        """Return the scope that a model was laid out in; `None`: in none, or the library cannot tell."""
        ...

    def gathered_dims(self, model: Any) -> tuple[str, ...]:
        """Return the mesh dims over which weights are gathered before their layers compute, as far as it is known."""
        return ()


@runtime_checkable
class Adapter(Training, Keeping, Inspecting, Protocol):
    """All that this library can do with models."""
