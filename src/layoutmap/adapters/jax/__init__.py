"""Support JAX models: flax.nnx modules, and every pytree of arrays (Equinox, haiku, dicts, dataclasses).

The layout of an array is `layoutmap.dtensor.fetch_layout(array)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from layoutmap.adapters import random_states
from layoutmap.adapters.jax import later_arrays
from layoutmap.adapters.jax.checkpoints import has_optimizer, list_stored, restore_values
from layoutmap.adapters.jax.contexts import find_context
from layoutmap.adapters.jax.inspecting import describe_arrays
from layoutmap.adapters.jax.models import is_nnx
from layoutmap.adapters.jax.session import JaxSession
from layoutmap.adapters.jax.tracing import is_array
from layoutmap.adapters.jax.training import TrainState, put_values, split_model, train_with
from layoutmap.adapters.jax.variables import Variable
from layoutmap.adapters.protocol import Adapter, Saved, ScopeContext, Stored
from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import ScopeError, shorten_repr
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.variables import VariableSpec
from layoutmap.engines import get_engine
from layoutmap.engines.jax.ambient import leave_ambient_mesh, make_mesh_of_one
from layoutmap.engines.jax.padded import PaddedArray, explain_no_padding

__all__ = ["JaxAdapter", "TrainState", "adapter", "train_with"]


class JaxAdapter(Adapter):
    """Adapter for flax.nnx modules and pytrees (see `layoutmap.adapters.protocol`)."""

    name = "jax"

    @property
    def engine_name(self) -> str:
        """Return `"jax"`."""
        return "jax"

    def check(self) -> None:
        """Do nothing, because a model can be traced in every process."""

    def owns_model(self, model: object) -> bool:
        """Return whether an object is a flax.nnx module or a pytree that contains an array."""
        if isinstance(model, TrainState) or is_nnx(model):
            return True
        return any(map(is_array, jax.tree.leaves(model)))

    def explain_no_padding(self, variable: VariableSpec, layout: Layout) -> str:
        """Return why an array cannot be stored padded, or an empty text if it can."""
        return variable.no_padding or explain_no_padding(variable, layout)

    def begin(self, context: ScopeContext) -> JaxSession:
        """Return a session for one scope."""
        return JaxSession(context)

    def keep_random_states(self) -> AbstractContextManager[None]:
        """Restore the random states of Python and numpy at the end of the block. JAX stores its own in keys."""
        return random_states.keep_states()

    def set_seed(self, seed: int) -> None:
        """Seed Python and numpy. A JAX program gets its seeds from its keys."""
        random_states.seed_both(seed)

    def complete(self, model: object, batch: object) -> None:
        """Do nothing, because a JAX model has all arrays once it is built."""

    def make_on_one_device(self, make: Callable[[], Any], mesh: Mesh) -> Any:
        """Build an unsharded model, under a mesh of one device with the dims that its code may name."""
        alone = make_mesh_of_one(get_engine("jax").native(Layout.replicated(mesh, 0), 0).mesh)
        with jax.set_mesh(alone):
            model = make()
        if isinstance(model, TrainState):
            model.mesh = alone
        return model

    def set_optimizer(self, model: object, optimizer: object) -> object:
        """Return the model unchanged, because a JAX model has no optimizer.

        Raises:
            ScopeError: What was passed for the optimizer is none of optax.
        """
        if optimizer is not None and not callable(getattr(optimizer, "init", None)):
            raise ScopeError(
                f"optimizer={shorten_repr(optimizer)} is not an optimizer",
                why=f"it is {describe_type(optimizer)}, without init and update",
                fix="pass an optax optimizer, as in optimizer=optax.adamw(1e-3); names are for Keras models",
            )
        return model

    def variables(self, model: object) -> dict[str, Variable]:
        """Return the arrays of a model and its optimizer's state by path, in a fixed order."""
        leaves = split_model(model).leaves
        values = [leaf.value for leaf in leaves]
        found: dict[str, Variable] = {}
        for number, leaf in enumerate(leaves):

            def replace(value: object, number: int = number) -> None:
                current = [leaf.value for leaf in split_model(model).leaves]
                put_values(model, [*current[:number], value, *current[number + 1 :]])

            found[leaf.path] = Variable(leaf.path, values[number], replace)
        if isinstance(model, TrainState):
            found |= model.list_slots()
        return found

    def describe_variables(self, model: object, optimizer: object = None) -> list[Stored]:
        """Return the arrays of a model that was built without a scope, and of its optimizer's state."""
        return describe_arrays(model, optimizer)

    def find_context(self, model: object) -> ScopeContext | None:
        """Return the context of the scope that sharded a model, or None."""
        return find_context(model)

    def describe_later_variables(
        self, later: Mapping[str, Callable[[], object]], mesh: Mesh
    ) -> Sequence[VariableSpec]:
        """Describe arrays that functions create after the model, without computing anything."""
        return later_arrays.describe_later_variables(later, mesh)

    def read(self, variable: Variable) -> Any:
        """Return the global value of a variable, as a numpy array."""
        return variable.read()

    def write(self, variable: Variable, value: object) -> None:
        """Assign a JAX or numpy value to a variable without changing its layout."""
        variable.write(value)

    def forward(self, model: object, batch: object) -> object:
        """Return a model's inference outputs for a batch as numpy arrays, in the model's nesting."""
        with leave_ambient_mesh():
            return _as_numpy(_require_train_state(model).steps.compute_outputs(batch))

    def gradients(self, model: object, batch: object) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the loss of a batch, and its gradient for each weight by path."""
        with leave_ambient_mesh():
            loss, gradients = _require_train_state(model).steps.compute_gradients(batch)
        return {"loss": float(loss)}, _as_numpy(gradients)

    def train_step(self, model: object, batch: object) -> dict[str, float]:
        """Run one step of the optimizer of `train_with`, and return the loss before it."""
        with leave_ambient_mesh():
            return {"loss": float(_require_train_state(model).steps.run_step(batch))}

    def list_stored_variables(
        self, model: object, optimizer: object = None, saved: Saved | None = None
    ) -> list[Stored]:
        """Return the arrays that a checkpoint of a model contains."""
        return list_stored(model, optimizer, saved)

    def restore_variables(
        self, model: object, optimizer: object, arrays: Iterable[tuple[str, object]]
    ) -> tuple[object, object]:
        """Return a model and its optimizer's state with new arrays."""
        return restore_values(model, optimizer, arrays)

    def settings(self, model: object, optimizer: object = None) -> dict[str, object]:
        """Return the random states of Python and numpy. Random keys of JAX are arrays of the model."""
        return {"random": random_states.read_states(), "optimizer": has_optimizer(model, optimizer)}

    def restore_settings(self, model: object, optimizer: object, settings: Mapping[str, Any]) -> None:
        """Restore the random states from the result of `settings`."""
        random_states.restore_states(settings["random"])


def _require_train_state(model: object) -> TrainState:
    if isinstance(model, TrainState):
        return model
    raise ScopeError(
        f"{type(model).__name__}: no loss and optimizer are known for it",
        why="JAX models do not hold a loss or an optimizer",
        fix="return layoutmap.adapters.jax.train_with(model, loss=.., optimizer=..) from make_model()",
    )


def _as_numpy(output: object) -> Any:
    """Return arrays of numpy in dicts and lists, as a model nests its outputs."""
    if isinstance(output, Mapping):
        return {str(name): _as_numpy(value) for name, value in output.items()}
    leaves = [get_engine("jax").to_numpy(leaf) for leaf in jax.tree.leaves(output)]
    return leaves[0] if isinstance(output, (jax.Array, PaddedArray)) else leaves


def adapter() -> JaxAdapter:
    """Return the adapter for JAX models."""
    return JaxAdapter()
