"""Describe how a model is trained: its forward function, loss, and optimizer.

JAX programs use these in their own step. `check_parity` runs a step itself, so it must be told about them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from layoutmap.adapters.jax import models
from layoutmap.adapters.jax.models import split_model
from layoutmap.adapters.jax.nnx_types import is_nnx_module
from layoutmap.adapters.jax.optimizers import create_sharded_optimizer_state, describe_optimizer_variables
from layoutmap.adapters.jax.pytrees import SplitModel, format_pytree_key
from layoutmap.adapters.jax.steps import JitStep, jit_step
from layoutmap.adapters.jax.variables import Variable
from layoutmap.core.errors import ScopeError, shorten_repr
from layoutmap.core.layout import Layout
from layoutmap.core.old_names import DeprecatedAlias
from layoutmap.core.policy import LayoutPolicy
from layoutmap.core.variables import Kind
from layoutmap.engines import get_engine
from layoutmap.engines.jax.padded import PaddedArray

Arrays = dict[str, jax.Array]


class TrainState:
    """Store a model with its forward function, loss, and optimizer state. `train_with` creates it.

    Attributes:
        model: The model: a module of flax.nnx, or any pytree. Each step replaces a pytree by a new one.
        opt_state: State of the optimizer; `None` before the first step.
    """

    def __init__(
        self,
        model: Any,
        forward: Callable[..., object] | None,
        loss: Callable[[Any, Any], object] | None,
        optimizer: Any,
    ):
        self.model = model
        self.forward = forward
        self.loss = loss
        self.optimizer = optimizer
        self.opt_state: Any = None
        self.policy: LayoutPolicy | None = None
        self.mesh: jax.sharding.Mesh | None = None
        self._steps: CompiledTrainStateFunctions | None = None

    @property
    def steps(self) -> CompiledTrainStateFunctions:
        """The compiled functions of the model: forward, gradients, and training step."""
        self._steps = self._steps or CompiledTrainStateFunctions(self)
        return self._steps

    weights = DeprecatedAlias("list_weights")
    slots = DeprecatedAlias("list_slots")

    def list_weights(self) -> dict[str, jax.Array]:
        """Return a dict from paths to the trained arrays."""
        values = {leaf.path: leaf.value for leaf in split_model(self.model).leaves}
        return {path: values[path] for path in self.steps.trained}

    def list_slots(self) -> dict[str, Variable]:
        """Return a dict from paths, with the weight's path and the slot's name, to the optimizer's arrays."""
        if self.opt_state is None:
            return {}
        found, tree_def = jax.tree_util.tree_flatten_with_path(self.opt_state)
        slots: dict[str, Variable] = {}
        weights = {*self.steps.trained}
        for number, (keys, value) in enumerate(found):
            names = sorted(
                map(format_pytree_key, keys), key=lambda name: name not in weights
            )  # weight's path first
            path = ".".join(("optimizer", *names))

            def replace_slot(new: object, number: int = number) -> None:
                leaves = jax.tree.leaves(self.opt_state)
                leaves[number] = new
                self.opt_state = jax.tree.unflatten(tree_def, leaves)

            slots[path] = Variable(path, value, replace_slot)
        return slots

    def __repr__(self) -> str:
        return f"<TrainState: {type(self.model).__name__}>"


def train_with(
    model: object,
    *,
    loss: Callable[[Any, Any], object] | None = None,
    optimizer: object = None,
    forward: Callable[..., object] | None = None,
) -> TrainState:
    """Describe how a model is trained, for `layoutmap.check_parity`. Your own training step does not need this.

    Args:
        model: Module of flax.nnx, or any pytree of arrays.
        loss: Function from the model's output and the targets of a batch to a number.
        optimizer: Optimizer of optax; `None`: take no steps.
        forward: Function from the model and its inputs to its output; `None`: call the model.

    Returns:
        The training state, which `make_model` of `check_parity` can return.

    Example:
        >>> from flax import nnx
        >>> train_with(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), loss=lambda y, target: ((y - target) ** 2).mean())
        <TrainState: Linear>
    """
    return TrainState(model, forward, loss, optimizer)


def unwrap_train_state(model: object) -> Any:
    """Return the model in a `TrainState`, and any other model unchanged."""
    return model.model if isinstance(model, TrainState) else model


def unwrap_and_split_model(model: object) -> SplitModel:
    """Split a model, or the model in a `TrainState`, into its arrays and a function that rebuilds it."""
    return split_model(unwrap_train_state(model))


def replace_arrays(model: object, values: Sequence[object]) -> Any:
    """Replace the arrays of a model, and return it. A module changes in place, and a pytree is a new object."""
    if isinstance(model, TrainState):
        model.model = replace_arrays(model.model, values)
        return model
    return models.replace_arrays(model, values)


class CompiledTrainStateFunctions:
    """Compile and run the forward function, the gradients, and the training step of a `TrainState`.

    Args:
        state: The state. The structure of its model must not change.
    """

    def __init__(self, state: TrainState):
        self._state = state
        self._parts = split_model(state.model)
        self.trained = [
            leaf.path
            for leaf in self._parts.leaves
            if leaf.kind is Kind.WEIGHT and jnp.issubdtype(leaf.value.dtype, jnp.inexact)
        ]
        compiled = self._compile_for_one_device if state.policy is None else jit_step
        self._gradients = compiled(jax.value_and_grad(self._compute_loss, has_aux=True))
        self._update = compiled(self._compute_update)
        self._forward = compiled(self._compute_outputs)

    def _compile_for_one_device(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function for one device. It runs under a mesh of this device, with the dims of the layout map."""
        compiled = jax.jit(function)

        def run_on_one_device(*args: object) -> Any:
            with jax.set_mesh(self._state.mesh):  # type: ignore[arg-type]
                return compiled(*args)

        return run_on_one_device

    @property
    def num_step_programs(self) -> int:
        """Number of programs that were compiled for the training step."""
        return self._update.num_programs if isinstance(self._update, JitStep) else 1

    def compute_outputs(self, batch: object) -> object:
        """Return the model's inference outputs for a batch."""
        return self._forward(self._read_arrays(), self._place_batch(get_batch_inputs(batch)))

    def compute_gradients(self, batch: object) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the loss of a batch, and a dict from weights' paths to gradients. The model does not change."""
        weights, others = self._separate_trained_weights(self._read_arrays())
        batch = self._place_batch(split_into_inputs_and_targets(batch, self._state))
        (loss, _), gradients = self._gradients(weights, others, batch)
        if self._state.policy is not None:
            engine = get_engine("jax")
            gradients = {
                path: each
                if (layout := engine.get_layout(weights[path])) is None
                else engine.relayout(each, layout, pad=True)
                for path, each in gradients.items()
            }
        return loss, gradients

    def run_training_step(self, batch: object) -> jax.Array:
        """Run one training step, and return the loss before it."""
        state = self._state
        if state.optimizer is None:
            raise ScopeError(
                f"{type(state.model).__name__}: no optimizer was passed for this model",
                why="a JAX model does not contain its optimizer",
                fix="pass an optimizer: train_with(model, loss=.., optimizer=optax.adamw(1e-3)), "
                "or pass steps=0 to check_parity",
            )
        weights, others = self._separate_trained_weights(self._read_arrays())
        if state.opt_state is None:
            state.opt_state = _create_first_optimizer_state(state.optimizer, weights)
        batch = self._place_batch(split_into_inputs_and_targets(batch, state))
        weights, others, state.opt_state, loss = self._update(weights, others, state.opt_state, batch)
        new = weights | others
        replace_arrays(state, [new[leaf.path] for leaf in self._parts.leaves])
        return loss

    def _read_arrays(self) -> Arrays:
        return {leaf.path: leaf.value for leaf in split_model(self._state.model).leaves}

    def _separate_trained_weights(self, values: Arrays) -> tuple[Arrays, Arrays]:
        """Return two dicts from paths to arrays: the trained weights, and all other arrays."""
        weights = {path: values[path] for path in self.trained}
        return weights, {path: value for path, value in values.items() if path not in weights}

    def _rebuild_model(self, values: Arrays) -> Any:
        return self._parts.rebuild_model([values[leaf.path] for leaf in self._parts.leaves])

    def _compute_outputs(self, values: Arrays, inputs: object) -> object:
        model = self._rebuild_model(values)
        if is_nnx_module(model):
            model.eval()
        return call_model(model, self._state.forward, inputs)

    def _compute_loss(
        self, weights: Arrays, others: Arrays, batch: tuple[object, object]
    ) -> tuple[object, Arrays]:
        inputs, targets = batch
        model = self._rebuild_model({**weights, **others})
        output = call_model(model, self._state.forward, inputs)
        loss = self._state.loss
        value = output if loss is None else loss(output, targets)
        after = {leaf.path: leaf.value for leaf in split_model(model).leaves}
        return value, {path: after[path] for path in others}

    def _compute_update(
        self, weights: Arrays, others: Arrays, opt_state: object, batch: object
    ) -> tuple[Any, ...]:
        (loss, others), gradients = jax.value_and_grad(self._compute_loss, has_aux=True)(
            weights, others, batch
        )
        updates, opt_state = self._state.optimizer.update(gradients, opt_state, weights)
        weights = jax.tree.map(lambda w, u: (w + u).astype(w.dtype), weights, updates)
        return weights, others, opt_state, loss

    def _place_batch(self, batch: object) -> object:
        policy, engine = self._state.policy, get_engine("jax")
        if policy is None:
            return jax.tree.map(jnp.asarray, batch)
        return jax.tree.map(
            lambda x: engine.relayout(np.asarray(x), policy.derive_batch_layout(np.shape(x))), batch
        )


def _create_first_optimizer_state(optimizer: Any, weights: Arrays) -> Any:
    """Create the first state of an optimizer. If weights are padded, create it in their layouts."""
    if not any(isinstance(each, PaddedArray) for each in weights.values()):
        return optimizer.init(weights)
    found = describe_optimizer_variables(optimizer.init, weights)
    mesh = next(iter(found.layouts.values())).mesh
    layouts = [
        found.layouts["", slot.parent]
        if slot.parent and slot.axes is None
        else Layout.replicated(mesh, len(slot.shape))
        for slot in found.slots
    ]
    return create_sharded_optimizer_state(optimizer.init, weights, layouts)


def call_model(model: Any, forward: Callable[..., object] | None, inputs: Any) -> object:
    """Return a model's outputs for its inputs, by `forward` if there is one, else by calling the model."""
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    return model(*args, **kwargs) if forward is None else forward(model, *args, **kwargs)


def get_batch_inputs(batch: object) -> Any:
    """Return the inputs of a batch, as positional arguments or as a mapping of named ones."""
    inputs = batch[0] if isinstance(batch, tuple | list) else batch  # any other batch has no targets
    return inputs if isinstance(inputs, (Mapping, tuple, list)) else (inputs,)


def split_into_inputs_and_targets(batch: object, state: TrainState) -> tuple[object, object]:
    """Split a batch into inputs and targets.

    Raises:
        ScopeError: The loss needs targets, and there are none.
    """
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        if state.loss is not None:
            raise ScopeError(
                "the batch has no targets for the loss",
                facts={"batch": shorten_repr(batch)},
                why="the loss is called with outputs and targets",
                fix="pass (inputs, targets), the inputs as a mapping if they have names",
            )
        return get_batch_inputs(batch), ()
    return get_batch_inputs(batch), batch[1]
