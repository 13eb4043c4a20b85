"""What an adapter must do, and what it is given to do it with.

An adapter knows one model library: how to build a model without its values, what its variables are called, how each
gets its value, and how the library trains. It knows no rule, no mesh and no device: the scope's `Home` answers those.
Its laws are in `layoutmap.testing.adapter_contract`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from layoutmap.core.initializers import Initializer
from layoutmap.core.layout import Layout
from layoutmap.core.unsupported import Unsupported
from layoutmap.core.variables import Assignment, VariableSpec

__all__ = ["Adapter", "Home", "Session"]


class Home(Protocol):
    """What a scope offers to its adapter."""

    plan_only: bool
    """Whether this is a dry run: nothing may get a value."""

    across: bool
    """Whether the mesh has devices of other processes: then all of them do the same, each with its own data."""

    check_batches: bool
    """Whether processes compare the data that they bring, where it must be the same in all of them."""

    draws: str
    """How first values are drawn: `"exact"`, or one of the adapter's `other_inits`."""

    def assign(
        self,
        variables: Sequence[VariableSpec],
        global_init: Mapping[tuple[str, str], str],
        limits: Sequence[Unsupported],
        complete: bool,
        layers: Sequence[str] | None = None,
        free_activations: bool = False,
    ) -> Sequence[Assignment]:
        """A layout for each variable, in order; raises with all problems, before anything is made.

        Args:
            variables: The variables, in the order of the model; no two with one `key`.
            global_init: For each variable, by its `key`, whose first value must be drawn whole: why.
            limits: What the library's backend cannot do.
            complete: Whether these are all variables there will be.
            layers: The paths of all layers, so that rules for activations of none of them are found.
            free_activations: Whether a compiler chooses how activations lie where no rule says it.
        """
        ...

    @property
    def lays_out_activations(self) -> bool:
        """Whether there are rules for what layers put out."""
        ...

    def activation_layout(self, path: str) -> Layout | None:
        """The layout of what the layer at a path puts out; `None`: as it comes."""
        ...

    def output_layouts(
        self, layout: Layout, shapes: Sequence[tuple[int, ...]], path: str
    ) -> Sequence[Layout | None]:
        """The layout of each array that a layer puts out; `None`: as it comes.

        Args:
            layout: The layout of the layer's rule.
            shapes: The arrays' shapes. Those of another rank than the layout's stay as they come.
            path: The layer's path.

        Raises:
            LayoutError: No array has the layout's rank, or an axis of one does not divide, and it is not the batch's.
        """
        ...

    def assign_one(self, variable: VariableSpec) -> Assignment:
        """A layout for a variable that is needed before all are known: its rule's where that fits, else replicated."""
        ...

    def create(
        self, assignments: Mapping[str, Assignment], draws: Mapping[str, Initializer]
    ) -> Mapping[str, Any]:
        """First values, each in its layout, by the keys given."""
        ...

    def place(self, array: Any, layout: Layout) -> Any:
        """An array, of the framework or of numpy, in a layout."""
        ...

    def variable(self, array: Any, *, name: str, trainable: bool) -> Any:
        """What a variable of the framework holds an array in."""
        ...

    def whole(self, array: Any) -> Any:
        """All values of an array, as a numpy array."""
        ...

    def gather(self, values: Any) -> Any:
        """The numpy values of each process of the mesh, one row each; they must all ask."""
        ...

    def check_alike(self, text: str, checksum: int = 0) -> tuple[Sequence[str], Sequence[int]]:
        """What the processes of the mesh say if they do not all say the same, else nothing; and all their checksums.

        They must all ask.
        """
        ...

    def check_values(self, checksums: Iterable[tuple[str, int]]) -> None:
        """Raise if values that each process of the mesh has for itself are not the same in all of them.

        They must all ask, each with the paths and checksums of its values.
        """
        ...

    def check_batch(self, arrays: Sequence[Any]) -> None:
        """Raise if the processes of the mesh bring different batches, where each of them brings all of it.

        They must all ask, each with its arrays of numpy.
        """
        ...

    def run_on_mesh(self) -> AbstractContextManager[Any]:
        """While open, what is computed here and now is computed on the mesh."""
        ...

    def native(self, layout: Layout, rank: int) -> Any:
        """The framework's own form of a layout."""
        ...

    def replicated(self, rank: int) -> Layout:
        """The layout of a small thing that every device holds whole."""
        ...

    def computing_layout(self, layout: Layout) -> Layout:
        """The layout in which a weight takes part in a computation: not cut over the dim that cuts the batch."""
        ...

    def batch_layout(self, shape: Sequence[int]) -> Layout:
        """The layout of a batch: cut along its first axis where it divides, else whole."""
        ...


class Session(Protocol):
    """One scope's work in one model library."""

    library: str
    """The name of the library's adapter."""

    def defer(self) -> AbstractContextManager[None]:
        """While open, variables are born without values; leaving the outermost one settles what is pending."""
        ...

    def take(self, model: Any) -> None:
        """Lay out a model that exists, and look after it as if it had been built here."""
        ...

    def unbuilt(self) -> Sequence[str]:
        """The names of layers that will make weights when they are first called."""
        ...

    def complete(self, model: Any, inputs: Any) -> None:
        """Have a model make what it would make at its first call and training step; computes nothing."""
        ...


class Adapter(Protocol):
    """Knows one model library."""

    name: str

    other_inits: Sequence[str]
    """Ways to draw first values that do not give those of the plain model, by name."""

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

    def refused(self, library: str) -> AbstractContextManager[None]:
        """While open, models of this library that are built here are refused, where they would pass unseen.

        Args:
            library: The library that the scope was opened for.
        """
        ...

    def begin(self, home: Home) -> Session:
        """A session for one scope."""
        ...

    def undisturbed(self) -> AbstractContextManager[None]:
        """Put everything that the library draws from back afterwards, as if what happens in here had not."""
        ...

    def set_seed(self, seed: int) -> None:
        """Seed everything the library draws from."""
        ...

    def complete(self, model: Any, batch: Any) -> None:
        """Have a model make what it would make at its first call and training step; computes nothing."""
        ...

    def variables(self, model: Any) -> dict[str, Any]:
        """A model's variables by path, in a fixed order: weights, states, and slots of its optimizer."""
        ...

    def read(self, variable: Any) -> Any:
        """The whole value of a variable, as a numpy array."""
        ...

    def write(self, variable: Any, value: Any) -> None:
        """Give a variable a value, of the engine or of numpy; it keeps its layout."""
        ...

    def forward(self, model: Any, batch: Any) -> Any:
        """What a model puts out for a batch, in inference; numpy arrays, nested as the model nests them."""
        ...

    def gradients(self, model: Any, batch: Any) -> tuple[float, dict[str, Any]]:
        """The loss of a batch, and its gradient for each trainable variable by path, as numpy arrays."""
        ...

    def train_step(self, model: Any, batch: Any) -> float:
        """One optimizer step of a compiled model on a batch; gives the loss before it."""
        ...
