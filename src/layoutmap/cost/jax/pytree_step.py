"""Describe a training step of a flax.nnx module or of a pytree, to compute its cost."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp

from layoutmap.adapters.jax.nnx_types import is_nnx_module
from layoutmap.adapters.jax.pytrees import format_pytree_key
from layoutmap.adapters.jax.session import JaxSession
from layoutmap.adapters.jax.slots import OptimizerLeaf, describe_slots
from layoutmap.adapters.jax.training import (
    TrainState,
    call_model,
    split_into_inputs_and_targets,
    unwrap_and_split_model,
    unwrap_train_state,
)
from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import ScopeError, join_names, shorten_repr
from layoutmap.core.steps import BatchArraySpec, Key, StepTracer, TrainingStep
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.cost.equal_blocks import find_stacks_of_equal_blocks, make_comparable_attributes

_NO_LOSS = "no loss is known: the mean of the squared outputs stands for one"
_RECOMPUTE = "In flax.nnx: write @nnx.remat above the __call__ of their class."
_NO_OPTIMIZER = "no optimizer is known: gradients are subtracted from the weights, and there are no slots"


def describe_training_step(
    session: JaxSession, model: object, inputs: Any, optimizer: Any, loss: Callable[..., Any] | None
) -> TrainingStep:
    """Return the training step of a model, on which `optimizer` is set. `loss` replaces the loss of `train_with`.

    With the loss of `train_with`, `inputs` is a batch as for `check_parity`.
    """
    specs = session.specs
    state = model if isinstance(model, TrainState) else TrainState(model, None, None, None)
    step = _TraceableStep(state, specs, inputs, state.optimizer, loss)
    notes = [_NO_LOSS] * (loss is None and state.loss is None) + [_NO_OPTIMIZER] * (step.optimizer is None)
    module, blocks, how_to_recompute = unwrap_train_state(model), list[list[str]](), ""
    if is_nnx_module(module):
        from layoutmap.adapters.jax import nnx

        blocks = find_stacks_of_equal_blocks(specs, nnx.list_layers(module), make_comparable_attributes)
        how_to_recompute = _RECOMPUTE
    name, run = type(module).__name__, step.compute_step_results
    return TrainingStep(name, [*specs, *step.slots], step.batch, blocks, run, notes, how_to_recompute)


def _check_is_array(inputs: object, leaf: object) -> None:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise ScopeError(
            f"inputs={shorten_repr(inputs)}: {shorten_repr(leaf)} is not an array",
            why=f"it is {describe_type(leaf)}, without a shape or without an element type",
            fix='pass an example batch, or its shape and type: inputs=jax.ShapeDtypeStruct((8, 16), "float32")',
        )


def _check_arrays_are_variables(specs: Sequence[VariableSpec], paths: Set[str]) -> None:
    """Raise if an array in a list of a module is in no `nnx.Variable`, because flax treats its shape as a constant."""
    lost = [spec.path for spec in specs if spec.path not in paths]
    if lost:
        raise ScopeError(
            f"the cost of the step cannot be computed: {join_names(lost)} would be a constant in the step",
            why="the array is in a list or dict of the module and in no nnx.Variable; the step is traced with shapes "
            "instead of arrays, and flax treats a shape there as a constant",
            fix="store the array in an nnx.Variable, or in its own attribute: self.table = nnx.data(array)",
        )


class _TraceableStep:
    def __init__(
        self,
        state: TrainState,
        specs: Sequence[VariableSpec],
        inputs: object,
        optimizer: Any,
        loss: Callable[..., object] | None,
    ):
        self._state = state
        self._specs = specs
        self._parts = unwrap_and_split_model(state)
        self._loss = loss
        self.optimizer = optimizer
        has_targets = loss is None and state.loss is not None
        input_tree = inputs if isinstance(inputs, Mapping | tuple | list) else (inputs,)
        batch_trees = split_into_inputs_and_targets(inputs, state) if has_targets else (input_tree, ())
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(batch_trees)
        for _, leaf in leaves:
            _check_is_array(inputs, leaf)
        self.batch = [
            BatchArraySpec(
                jax.tree_util.keystr(path, simple=True, separator="."), tuple(x.shape), str(x.dtype)
            )
            for path, x in leaves
        ]
        _check_arrays_are_variables(specs, {leaf.path for leaf in self._parts.leaves})
        self._trained = [
            spec.key
            for spec, leaf in zip(specs, self._parts.leaves, strict=True)
            if spec.kind is Kind.WEIGHT and jnp.issubdtype(leaf.value.dtype, jnp.inexact)
        ]
        self.slots: list[VariableSpec] = []
        if optimizer is not None:
            self.slots, _ = self._make_slot_specs_and_state_tree(self._trained)

    def _make_slot_specs_and_state_tree(self, trained_keys: Sequence[Key]) -> tuple[list[VariableSpec], Any]:
        """Return the specs of the optimizer's slots for these weights, and the tree structure of its state."""
        weights = {s.path: s for s in self._specs if s.key in trained_keys}
        shapes = {path: jax.ShapeDtypeStruct(s.shape, s.dtype) for path, s in weights.items()}
        found, tree = jax.tree_util.tree_flatten_with_path(jax.eval_shape(self.optimizer.init, shapes))
        leaves = [
            OptimizerLeaf(tuple(map(format_pytree_key, p)), tuple(x.shape), str(x.dtype)) for p, x in found
        ]
        return describe_slots({(path,): s for path, s in weights.items()}, leaves), tree

    def compute_step_results(
        self, tracer: StepTracer, values: Mapping[Key, jax.Array], batch: Sequence[jax.Array]
    ) -> Mapping[Key, jax.Array]:
        """Return the values of the variables after a step, and the loss under the key `("", "loss")`."""
        inputs, targets = jax.tree.unflatten(self._tree, batch)
        trained = [key for key in self._trained if key in values]
        frozen = [s.key for s in self._specs if s.key in values and s.key not in self._trained]

        def compute_loss(weights: Mapping[str, jax.Array]) -> tuple[object, list[object]]:
            current_values = {**values, **tracer.unread} | {key: weights[key[1]] for key in trained}
            model = self._parts.rebuild_model([current_values[s.key] for s in self._specs])
            if is_nnx_module(model):
                from layoutmap.adapters.jax import nnx

                nnx.report_calls_to_tracer(model, tracer)
            output = call_model(model, self._state.forward, inputs)
            after = dict(
                zip(
                    (s.key for s in self._specs),
                    (x.value for x in unwrap_and_split_model(model).leaves),
                    strict=True,
                )
            )
            return self._compute_loss(output, targets), [after[key] for key in frozen]

        weights = {key[1]: values[key] for key in trained}
        (value, others), gradients = jax.value_and_grad(compute_loss, has_aux=True)(weights)
        after = dict(values) | dict(zip(frozen, others, strict=True)) | {("", "loss"): value}
        with tracer.mark_optimizer_update():
            if self.optimizer is None:
                return after | {key: weights[key[1]] - gradients[key[1]] for key in trained}
            slots, tree = self._make_slot_specs_and_state_tree(trained)
            state = jax.tree.unflatten(tree, [values[slot.key] for slot in slots])
            updates, state = self.optimizer.update(gradients, state, weights)
            new = jax.tree.map(lambda w, u: (w + u).astype(w.dtype), weights, updates)
        after |= {key: new[key[1]] for key in trained}
        return after | dict(zip((slot.key for slot in slots), jax.tree.leaves(state), strict=True))

    def _compute_loss(self, output: object, targets: object) -> object:
        if self._loss is not None:
            return self._loss(output)
        if self._state.loss is not None:
            return self._state.loss(output, targets)
        leaves = [x for x in jax.tree.leaves(output) if jnp.issubdtype(x.dtype, jnp.inexact)]
        return functools.reduce(jnp.add, [jnp.mean(jnp.square(x.astype("float32"))) for x in leaves])
