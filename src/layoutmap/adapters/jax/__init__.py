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
from layoutmap.adapters.jax.checkpoints import has_optimizer_state, list_stored_arrays, restore_arrays
from layoutmap.adapters.jax.contexts import find_scope_context
from layoutmap.adapters.jax.inspecting import describe_arrays
from layoutmap.adapters.jax.nnx_types import is_nnx_module
from layoutmap.adapters.jax.optimizers import resolve_optax_optimizer
from layoutmap.adapters.jax.session import JaxSession
from layoutmap.adapters.jax.tracing import is_array
from layoutmap.adapters.jax.training import TrainState, replace_arrays, train_with, unwrap_and_split_model
from layoutmap.adapters.jax.variables import Variable
from layoutmap.adapters.protocol import Adapter, SavedOptimizer, ScopeContext, StoredVariable
from layoutmap.core.errors import ScopeError
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.variables import VariableSpec
from layoutmap.engines import get_engine
from layoutmap.engines.jax.ambient import make_one_device_mesh, suspend_ambient_mesh
from layoutmap.engines.jax.padded import PaddedArray, explain_why_padding_is_impossible

__all__ = ["JaxAdapter", "TrainState", "make_adapter", "train_with"]


class JaxAdapter(Adapter):
    """Adapter for flax.nnx modules and pytrees (see `layoutmap.adapters.protocol`)."""

    name = "jax"

    @property
    def engine_name(self) -> str:
        """Return `"jax"`."""
        return "jax"

    def check_scope_can_open(self) -> None:
        """Do nothing, because a model can be traced in every process."""

    def owns_model(self, model: object) -> bool:
        """Return whether an object is a flax.nnx module or a pytree that contains an array."""
        if isinstance(model, TrainState) or is_nnx_module(model):
            return True
        return any(map(is_array, jax.tree.leaves(model)))

    def explain_why_padding_is_impossible(self, variable: VariableSpec, layout: Layout) -> str:
        """Return why an array cannot be stored padded, or an empty text if it can."""
        return variable.no_padding or explain_why_padding_is_impossible(variable, layout)

    def make_session(self, context: ScopeContext) -> JaxSession:
        """Return a session, which builds or shards the models of one scope."""
        return JaxSession(context)

    def preserve_random_states(self) -> AbstractContextManager[None]:
        """Restore the random states of Python and numpy at the end of the block. JAX programs pass keys instead."""
        return random_states.preserve_python_and_numpy_states()

    def set_seed(self, seed: int) -> None:
        """Seed the random generators of Python and numpy. JAX programs pass keys instead."""
        random_states.seed_python_and_numpy(seed)

    def create_lazy_variables(self, model: object, batch: object) -> None:
        """Do nothing, because a JAX model has all arrays once it is built."""

    def build_model_on_one_device(self, make_model: Callable[[], Any], mesh: Mesh) -> Any:
        """Build a model unsharded, on a mesh of one device with all dims of `mesh`, because the code may name them."""
        alone = make_one_device_mesh(get_engine("jax").make_native_layout(Layout.replicated(mesh, 0), 0).mesh)
        with jax.set_mesh(alone):
            model = make_model()
        if isinstance(model, TrainState):
            model.mesh = alone
        return model

    def set_optimizer(self, model: object, optimizer: object) -> object:
        """Return the model in a `TrainState` with an optax optimizer, or unchanged if `optimizer` is `None`.

        Raises:
            ScopeError: `optimizer` is neither `None` nor an optimizer of optax, nor the name of one.
        """
        if optimizer is None:
            return model
        state = model if isinstance(model, TrainState) else TrainState(model, None, None, None)
        state.optimizer = resolve_optax_optimizer(optimizer)
        return state

    def variables(self, model: object) -> dict[str, Variable]:
        """Return a dict from paths to the arrays of a model and its optimizer's state, in a fixed order."""
        leaves = unwrap_and_split_model(model).leaves
        values = [leaf.value for leaf in leaves]
        found: dict[str, Variable] = {}
        for number, leaf in enumerate(leaves):

            def replace_array(value: object, number: int = number) -> None:
                current = [leaf.value for leaf in unwrap_and_split_model(model).leaves]
                replace_arrays(model, [*current[:number], value, *current[number + 1 :]])

            found[leaf.path] = Variable(leaf.path, values[number], replace_array)
        if isinstance(model, TrainState):
            found |= model.list_slots()
        return found

    def describe_variables(self, model: object, optimizer: object = None) -> list[StoredVariable]:
        """Return the arrays of an existing model and its optimizer's state, each described as a variable of a plan."""
        return describe_arrays(model, optimizer)

    def find_scope_context(self, model: object) -> ScopeContext | None:
        """Return the context of the scope that sharded a model, or None."""
        return find_scope_context(model)

    def describe_arrays_created_after_build(
        self, later: Mapping[str, Callable[[], object]], mesh: Mesh
    ) -> Sequence[VariableSpec]:
        """Describe arrays that functions create after the model, without computing anything."""
        return later_arrays.describe_arrays_created_after_build(later, mesh)

    def read(self, variable: Variable) -> Any:
        """Return the global value of a variable, as a numpy array."""
        return variable.read()

    def write(self, variable: Variable, value: object) -> None:
        """Assign a JAX or numpy value to a variable without changing its layout."""
        variable.write(value)

    def forward(self, model: object, batch: object) -> object:
        """Return a model's inference outputs for a batch, as numpy arrays that are nested like the outputs."""
        with suspend_ambient_mesh():
            return _convert_outputs_to_numpy(_require_train_state(model).steps.compute_outputs(batch))

    def gradients(self, model: object, batch: object) -> tuple[dict[str, float], dict[str, Any]]:
        """Return two dicts for a batch: one with its loss, and one from the path of each weight to its gradient."""
        with suspend_ambient_mesh():
            loss, gradients = _require_train_state(model).steps.compute_gradients(batch)
        return {"loss": float(loss)}, _convert_outputs_to_numpy(gradients)

    def train_step(self, model: object, batch: object) -> dict[str, float]:
        """Run one training step with the optimizer that was passed to `train_with`, and return the loss before it."""
        with suspend_ambient_mesh():
            return {"loss": float(_require_train_state(model).steps.run_training_step(batch))}

    def list_stored_variables(
        self, model: object, optimizer: object = None, saved: SavedOptimizer | None = None
    ) -> list[StoredVariable]:
        """Return the arrays that a checkpoint of a model contains."""
        return list_stored_arrays(model, optimizer, saved)

    def restore_variables(
        self, model: object, optimizer: object, arrays: Iterable[tuple[str, object]]
    ) -> tuple[object, object]:
        """Replace the arrays of a model and of its optimizer's state. Return the model and the optimizer."""
        return restore_arrays(model, optimizer, arrays)

    def read_state_outside_variables(self, model: object, optimizer: object = None) -> dict[str, object]:
        """Return the random states of Python and numpy, and whether the optimizer has state."""
        return {
            "random": random_states.read_python_and_numpy_states(),
            "optimizer": has_optimizer_state(model, optimizer),
        }

    def restore_state_outside_variables(
        self, model: object, optimizer: object, settings: Mapping[str, Any]
    ) -> None:
        """Restore the random states from the result of `read_state_outside_variables`."""
        random_states.restore_python_and_numpy_states(settings["random"])


def _require_train_state(model: object) -> TrainState:
    if isinstance(model, TrainState):
        return model
    raise ScopeError(
        f"{type(model).__name__}: the loss and the optimizer of this model are unknown",
        why="a JAX model does not contain a loss or an optimizer",
        fix="return layoutmap.adapters.jax.train_with(model, loss=.., optimizer=..) from make_model()",
    )


def _convert_outputs_to_numpy(output: object) -> Any:
    """Return outputs of a model as numpy arrays, in dicts and lists that are nested like the outputs."""
    if isinstance(output, Mapping):
        return {str(name): _convert_outputs_to_numpy(value) for name, value in output.items()}
    leaves = [get_engine("jax").to_numpy(leaf) for leaf in jax.tree.leaves(output)]
    return leaves[0] if isinstance(output, (jax.Array, PaddedArray)) else leaves


def make_adapter() -> JaxAdapter:
    """Return the adapter for JAX models."""
    return JaxAdapter()
