"""Models of JAX: modules of flax.nnx, and every pytree of arrays (Equinox, haiku, dicts, dataclasses).

The layout of an array is `layoutmap.dtensor.fetch_layout(array)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax

from layoutmap.adapters import random_states
from layoutmap.adapters.jax.checkpoints import has_optimizer, restored, stored
from layoutmap.adapters.jax.inspecting import context_of, described
from layoutmap.adapters.jax.models import is_nnx
from layoutmap.adapters.jax.session import JaxSession
from layoutmap.adapters.jax.tracing import is_array
from layoutmap.adapters.jax.training import TrainState, arrays_of, put_values, train_with
from layoutmap.adapters.jax.variables import Variable
from layoutmap.adapters.protocol import Adapter, Saved, ScopeContext, Stored
from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import ScopeError, shorten_repr
from layoutmap.engines import get_engine

__all__ = ["JaxAdapter", "TrainState", "adapter", "train_with"]


class JaxAdapter(Adapter):
    """Knows flax.nnx and pytrees; see `layoutmap.adapters.protocol`."""

    name = "jax"

    @property
    def engine_name(self) -> str:
        """`"jax"`."""
        return "jax"

    def check(self) -> None:
        """Nothing: what is traced is made in functions, which work anywhere."""

    def owns(self, model: object) -> bool:
        """Return whether an object is a module of flax.nnx, or a pytree with an array in it."""
        if isinstance(model, TrainState) or is_nnx(model):
            return True
        return any(map(is_array, jax.tree.leaves(model)))

    def begin(self, context: ScopeContext) -> JaxSession:
        """Return a session for one scope."""
        return JaxSession(context)

    def undisturbed(self) -> AbstractContextManager[None]:
        """Put the random states of Python and numpy back afterwards; those of JAX are values of the program."""
        return random_states.put_back()

    def set_seed(self, seed: int) -> None:
        """Seed Python and numpy; a program of JAX has its seeds in its keys."""
        random_states.seed_both(seed)

    def complete(self, model: object, batch: object) -> None:
        """Nothing: a model of JAX has its arrays when it is made, and its optimizer's state begins with a step."""

    def with_optimizer(self, model: object, optimizer: object) -> object:
        """Return the model: it carries no optimizer.

        Raises:
            ScopeError: What was passed for the optimizer is none of optax.
        """
        if optimizer is not None and not callable(getattr(optimizer, "init", None)):
            raise ScopeError(
                f"optimizer={shorten_repr(optimizer)} is not an optimizer",
                why=f"it is {describe_type(optimizer)}, without init and update",
                fix="pass one of optax, as in optimizer=optax.adamw(1e-3); names are for models of Keras",
            )
        return model

    def variables(self, model: object) -> dict[str, Variable]:
        """Return the arrays of a model by path, and those of its optimizer's state, in a fixed order."""
        leaves = arrays_of(model).leaves
        values = [leaf.value for leaf in leaves]
        found: dict[str, Variable] = {}
        for number, leaf in enumerate(leaves):

            def replace(value: object, number: int = number) -> None:
                current = [leaf.value for leaf in arrays_of(model).leaves]
                put_values(model, [*current[:number], value, *current[number + 1 :]])

            found[leaf.path] = Variable(leaf.path, values[number], replace)
        if isinstance(model, TrainState):
            found |= model.slots()
        return found

    def described(self, model: object, optimizer: object = None) -> list[Stored]:
        """Return the arrays of a model that any program has made, and those of its optimizer's state."""
        return described(model, optimizer)

    def context_of(self, model: object) -> ScopeContext | None:
        """Return the scope that a model was laid out in."""
        return context_of(model)

    def read(self, variable: Variable) -> Any:
        """Return the global value of a variable, as a numpy array."""
        return variable.read()

    def write(self, variable: Variable, value: object) -> None:
        """Give a variable a value, of JAX or of numpy; it keeps its layout."""
        variable.write(value)

    def forward(self, model: object, batch: object) -> object:
        """Return what a model returns for a batch, in inference; nested as the model nests it."""
        return _as_numpy(_trained(model).steps.outputs(batch))

    def gradients(self, model: object, batch: object) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the loss of a batch, and its gradient for each weight by path."""
        loss, gradients = _trained(model).steps.gradients(batch)
        return {"loss": float(loss)}, _as_numpy(gradients)

    def train_step(self, model: object, batch: object) -> dict[str, float]:
        """Take one step of the optimizer that `train_with` was called with; returns the loss before it."""
        return {"loss": float(_trained(model).steps.step(batch))}

    def stored(self, model: object, optimizer: object = None, saved: Saved | None = None) -> list[Stored]:
        """Return what a checkpoint keeps of a model."""
        return stored(model, optimizer, saved)

    def restored(
        self, model: object, optimizer: object, arrays: Iterable[tuple[str, object]]
    ) -> tuple[object, object]:
        """Return a model and its optimizer's state with other arrays."""
        return restored(model, optimizer, arrays)

    def settings(self, model: object, optimizer: object = None) -> dict[str, object]:
        """Return the random states of Python and numpy; those of JAX are arrays of the model."""
        return {"random": random_states.states(), "optimizer": has_optimizer(model, optimizer)}

    def restore_settings(self, model: object, optimizer: object, settings: Mapping[str, Any]) -> None:
        """Put back what `settings` returned."""
        random_states.restore(settings["random"])


def _trained(model: object) -> TrainState:
    if isinstance(model, TrainState):
        return model
    raise ScopeError(
        f"{type(model).__name__}: how to call and train it is not known",
        why="JAX models have no loss and no optimizer",
        fix="return layoutmap.adapters.jax.train_with(model, loss=.., optimizer=..) from make_model()",
    )


def _as_numpy(output: object) -> Any:
    """Return arrays of numpy in dicts and lists, as a model nests its outputs."""
    if isinstance(output, Mapping):
        return {str(name): _as_numpy(value) for name, value in output.items()}
    leaves = [get_engine("jax").to_numpy(leaf) for leaf in jax.tree.leaves(output)]
    return leaves[0] if isinstance(output, jax.Array) else leaves


def adapter() -> JaxAdapter:
    """Return the adapter."""
    return JaxAdapter()
