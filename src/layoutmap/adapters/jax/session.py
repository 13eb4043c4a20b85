"""Trace a function that builds a JAX model, and create its arrays in their layouts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import jax
import jax.core

from layoutmap.adapters.jax.contexts import note_context
from layoutmap.adapters.jax.models import constrain_outputs, is_nnx, make_unsharded
from layoutmap.adapters.jax.mutable_arrays import check_immutable
from layoutmap.adapters.jax.pytrees import Leaf, Parts
from layoutmap.adapters.jax.tracing import Traced, is_key, trace
from layoutmap.adapters.jax.training import TrainState, put_values, split_model, unwrap_model
from layoutmap.adapters.protocol import ScopeContext
from layoutmap.core.checksums import compute_checksum
from layoutmap.core.errors import ScopeError
from layoutmap.core.layout import Layout
from layoutmap.core.paths import format_path_pattern
from layoutmap.core.unsupported import Unsupported
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines.agreement import check_values
from layoutmap.engines.jax.ambient import make_abstract_mesh
from layoutmap.engines.jax.padded import PaddedArray


class JaxSession:
    """Build or shard the JAX models of one scope.

    Args:
        context: The scope.
    """

    library = "jax"

    def __init__(self, context: ScopeContext):
        self._context = context
        self.specs: Sequence[VariableSpec] = ()

    def defer(self) -> AbstractContextManager[None]:
        """Raise, because JAX computes arrays immediately.

        Raises:
            ScopeError: Always.
        """
        raise ScopeError(
            "a scope cannot defer JAX models",
            why="JAX computes arrays immediately, so their creation cannot be deferred",
            fix="make the model in a function: model = layout_map.build(lambda: Model(nnx.Rngs(0)))",
        )

    def build(self, make: Callable[[], object]) -> Any:
        """Build a model with its arrays in their layouts. In a plan, return shapes."""
        parts: Any = None

        def make_and_take_apart() -> tuple[object, Sequence[object]]:
            nonlocal parts
            model = make_unsharded(make, unwrap_model)
            check_immutable(unwrap_model(model))
            parts = split_model(model)
            return model, [leaf.value for leaf in parts.leaves]

        model, arrays = trace(make_and_take_apart, make_abstract_mesh(self._context.policy.mesh))
        assignments = self._assign(model, parts, arrays)
        if self._context.plan_only:
            shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
            return self._finish(model, parts.put_together(shapes))
        return self._finish(model, parts.put_together(self._materialize(assignments, arrays)))

    def _finish(self, made: object, model: object) -> object:
        """Make a model apply activation rules, and return it in its `TrainState`."""
        if not self._context.plan_only:
            constrain_outputs(model, self._context.policy)
        if isinstance(made, TrainState):
            made.model, made.policy = model, self._context.policy
            model = made
        self._note(model)
        return model

    def take(self, model: object) -> object:
        """Shard an existing model. A module stays the same object, and a pytree is replaced by a new one."""
        check_immutable(unwrap_model(model))
        parts = split_model(model)
        arrays = [leaf.value for leaf in parts.leaves]
        for leaf in parts.leaves:
            if isinstance(leaf.value, jax.core.Tracer):
                raise ScopeError(
                    f"{leaf.path}: the model is only traced",
                    why="arrays have shapes and no values inside of a function that JAX traces",
                    fix="shard it before jax.jit, or create it with layout_map.build",
                )
        laid_out = put_values(model, self._materialize(self._assign(model, parts, arrays), arrays))
        constrain_outputs(unwrap_model(laid_out), self._context.policy)
        self._note(laid_out)
        if isinstance(model, TrainState):
            model.policy = self._context.policy
        return laid_out

    def _note(self, model: object) -> None:
        for each in (model, unwrap_model(model)):
            note_context(each, self._context)

    def made(self, model: object) -> bool:
        """Return whether this session built a model, and did not get one with values."""
        if isinstance(model, TrainState):
            return self.made(model.model)
        if not is_nnx(model):
            return _is_made(jax.tree.leaves(model))
        nnx = sys.modules["flax.nnx"]
        # The first array is enough to detect tracing.
        nodes = (node for _, node in nnx.iter_graph(model))
        is_made = (any(map(_is_tracer, jax.tree.leaves(n))) for n in nodes if isinstance(n, nnx.Variable))
        return any(is_made) or _is_made(jax.tree.leaves(nnx.state(model)))

    def list_unbuilt_layers(self) -> Sequence[str]:
        """Return an empty sequence, because a JAX model has all arrays once it is built."""
        return ()

    def complete(self, model: object, inputs: object) -> None:
        """Do nothing, because a JAX model has all arrays once it is built."""

    def _assign(self, model: object, parts: Parts, arrays: Sequence[object]) -> Sequence[Assignment]:
        specs = parts.specs
        order = parts.order or range(len(specs))
        self.specs = specs
        whys = {
            spec.key: why
            for spec, array in zip(specs, arrays, strict=True)
            if isinstance(array, Traced) and (why := array.explain_global())
        }
        unused = [_make_annotation_note(leaf) for leaf in parts.leaves if leaf.annotation]
        if parts.layers is None and self._context.policy.activations is not None:
            unused.append(_make_pytree_warning(unwrap_model(model)))
        assigned = self._context.assign(
            [specs[number] for number in order], whys, unused, True, parts.layers, free_activations=True
        )
        return [
            self._keep_axis_types(assignment)
            for _, assignment in sorted(zip(order, assigned, strict=True), key=lambda pair: pair[0])
        ]

    def _keep_axis_types(self, assignment: Assignment) -> Assignment:
        """Return an assignment on the scope's mesh, because an equal layout may have other axis types."""
        layout, mesh = assignment.layout, self._context.policy.mesh
        if layout.mesh.axis_types == mesh.axis_types:
            return assignment
        return replace(assignment, layout=Layout.from_valid_specs(layout.sharding_specs, mesh, layout.memory))

    def _materialize(self, assignments: Sequence[Assignment], arrays: Sequence[object]) -> list[object]:
        """Compute traced arrays in their layouts, and redistribute existing ones."""
        context = self._context
        todo = {
            str(number): (assignment, array)
            for number, (assignment, array) in enumerate(zip(assignments, arrays, strict=True))
            if isinstance(array, Traced) and not array.is_seed
        }
        if context.across:
            # Each process has its own copy of existing arrays, so compare the copies before they are placed.
            sums = (
                (a.variable.path, compute_checksum(context.engine.to_numpy(_get_data(array))))
                for number, (a, array) in enumerate(zip(assignments, arrays, strict=True))
                if str(number) not in todo
            )
            check_values(sums, context.gather)
        made = context.create(
            {key: assignment for key, (assignment, _) in todo.items()},
            {key: array.make_initializer() for key, (_, array) in todo.items()},
        )
        return [
            made[key]
            if (key := str(number)) in made
            else context.engine.relayout(_get_value(array), assignment.layout, pad=assignment.is_padded)
            for number, (assignment, array) in enumerate(zip(assignments, arrays, strict=True))
        ]


def _is_made(values: Sequence[object]) -> bool:
    arrays = [value for value in values if isinstance(value, (jax.Array, PaddedArray))]
    return not arrays or any(map(_is_tracer, arrays))


def _is_tracer(value: object) -> bool:
    return isinstance(value, jax.core.Tracer)


def _get_value(array: object) -> Any:
    return array.seed() if isinstance(array, Traced) else array


def _get_data(array: object) -> Any:
    value = _get_value(array)
    return jax.random.key_data(value) if is_key(value) else value


def _make_annotation_note(leaf: Leaf) -> Unsupported:
    return Unsupported(
        leaf.path,
        f"its annotation {leaf.annotation} has no effect",
        f"the model's code annotates it with {leaf.annotation}, and here only rules of the layout map shard; without "
        "a rule it is replicated",
        f"write a rule in the dims of the mesh: layout_map[{format_path_pattern([leaf.path])}] = {leaf.annotation}",
        "note",
    )


def _make_pytree_warning(model: object) -> Unsupported:
    return Unsupported(
        type(model).__name__,
        "the rules of layout_map.activations lay out nothing",
        "the model is a pytree, whose parts are called by functions that know no paths",
        "constrain them in the function that computes them: x = lm.dtensor.relayout(x, layout)",
        "warning",
    )
