"""Trace a function that builds a JAX model, and create its arrays in their layouts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import jax
import jax.core

from layoutmap.adapters.jax.contexts import record_scope_context
from layoutmap.adapters.jax.models import build_without_sharding_annotations, constrain_module_outputs
from layoutmap.adapters.jax.mutable_arrays import check_no_mutable_or_hidden_arrays
from layoutmap.adapters.jax.nnx_types import is_nnx_module
from layoutmap.adapters.jax.pytrees import ModelLeaf, SplitModel
from layoutmap.adapters.jax.tracing import TracedArray, is_random_key, trace_build_function
from layoutmap.adapters.jax.training import (
    TrainState,
    call_model,
    get_batch_inputs,
    replace_arrays,
    unwrap_and_split_model,
    unwrap_train_state,
)
from layoutmap.adapters.protocol import ScopeContext
from layoutmap.core.checksums import compute_checksum
from layoutmap.core.errors import ScopeError
from layoutmap.core.layout import Layout
from layoutmap.core.paths import format_path_regex_as_python
from layoutmap.core.unsupported import UnsupportedFeature, make_failed_call_note
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines.agreement import check_same_values
from layoutmap.engines.jax.ambient import make_abstract_mesh, use_mesh
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
        self._inputs: object = None  # of the model, for a plan
        self._failed_calls: Sequence[UnsupportedFeature] = ()  # with these inputs

    def defer_variables(self) -> AbstractContextManager[None]:
        """Raise, because JAX computes arrays immediately.

        Raises:
            ScopeError: Always.
        """
        raise ScopeError(
            "a JAX model cannot be built in the block of a scope",
            why="JAX computes arrays immediately, so their creation cannot be deferred",
            fix="create the model in a function: model = layout_map.build(lambda: Model(nnx.Rngs(0)))",
        )

    def build_model(self, make_model: Callable[[], object]) -> Any:
        """Build a model with its arrays in their layouts. For a plan, build it with shapes instead of arrays."""
        parts: Any = None

        def build_and_split_model() -> tuple[object, Sequence[object]]:
            nonlocal parts
            model = build_without_sharding_annotations(make_model, unwrap_train_state)
            check_no_mutable_or_hidden_arrays(unwrap_train_state(model))
            parts = unwrap_and_split_model(model)
            return model, [leaf.value for leaf in parts.leaves]

        model, arrays = trace_build_function(
            build_and_split_model, make_abstract_mesh(self._context.policy.mesh)
        )
        assignments = self._assign_layouts(model, parts, arrays)
        if self._context.plan_only:
            shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
            return self._constrain_outputs_and_record_context(model, parts.rebuild_model(shapes))
        return self._constrain_outputs_and_record_context(
            model, parts.rebuild_model(self._compute_or_relayout_arrays(assignments, arrays))
        )

    def _constrain_outputs_and_record_context(self, built: object, model: object) -> object:
        """Make a model apply activation rules, and record its scope. Return the model, or its `TrainState`."""
        if not self._context.plan_only:
            constrain_module_outputs(model, self._context.policy)
        if isinstance(built, TrainState):
            built.model, built.policy = model, self._context.policy
            model = built
        self._record_context(model)
        return model

    def shard_model(self, model: object) -> object:
        """Shard an existing model. A module stays the same object, and a pytree is replaced by a new one."""
        check_no_mutable_or_hidden_arrays(unwrap_train_state(model))
        parts = unwrap_and_split_model(model)
        arrays = [leaf.value for leaf in parts.leaves]
        for leaf in parts.leaves:
            if isinstance(leaf.value, jax.core.Tracer):
                raise ScopeError(
                    f"{leaf.path}: this array of the model is traced",
                    why="inside a function that JAX traces, arrays have shapes but no values",
                    fix="shard the model before jax.jit, or create it with layout_map.build",
                )
        assignments = self._assign_layouts(model, parts, arrays)
        laid_out = replace_arrays(model, self._compute_or_relayout_arrays(assignments, arrays))
        constrain_module_outputs(unwrap_train_state(laid_out), self._context.policy)
        self._record_context(laid_out)
        if isinstance(model, TrainState):
            model.policy = self._context.policy
        return laid_out

    def _record_context(self, model: object) -> None:
        for each in (model, unwrap_train_state(model)):
            record_scope_context(each, self._context)

    def has_built(self, model: object) -> bool:
        """Return whether this session built a model: then its arrays are traced, or it has no arrays."""
        if isinstance(model, TrainState):
            return self.has_built(model.model)
        if not is_nnx_module(model):
            return _is_traced_or_without_arrays(jax.tree.leaves(model))
        nnx = sys.modules["flax.nnx"]
        # Either all arrays of a model are traced or none, so stop at the first traced one.
        nodes = (node for _, node in nnx.iter_graph(model))
        is_made = (any(map(_is_tracer, jax.tree.leaves(n))) for n in nodes if isinstance(n, nnx.Variable))
        return any(is_made) or _is_traced_or_without_arrays(jax.tree.leaves(nnx.state(model)))

    def list_unbuilt_layer_names(self) -> Sequence[str]:
        """Return an empty sequence, because a JAX model has all arrays once it is built."""
        return ()

    def create_lazy_variables(self, model: object, inputs: object) -> None:
        """Record the inputs for a plan. A JAX model has all arrays once it is built."""
        self._inputs = inputs if self._context.plan_only else None

    def _describe_arrays(
        self, model: object, parts: SplitModel, arrays: Sequence[object]
    ) -> Sequence[VariableSpec]:
        """Return the arrays described as variables, in a plan with the numbers of the inputs that modules read."""
        module = unwrap_train_state(model)
        if self._inputs is None or not is_nnx_module(module):
            return parts.specs
        from layoutmap.adapters.jax import nnx

        forward = model.forward if isinstance(model, TrainState) else None
        try:
            with use_mesh(make_abstract_mesh(self._context.policy.mesh)):
                numbers = nnx.number_module_inputs(
                    parts,
                    arrays,
                    lambda rebuilt, inputs: call_model(rebuilt, forward, inputs),
                    get_batch_inputs((self._inputs,)),
                )
        except Exception as error:  # the user's code may raise any error
            self._failed_calls = [make_failed_call_note(module, error)]
            return parts.specs
        return [
            replace(spec, use=replace(spec.use, reads=numbers.get(spec.path.rpartition(".")[0])))
            if spec.use
            else spec
            for spec in parts.specs
        ]

    def _assign_layouts(
        self, model: object, parts: SplitModel, arrays: Sequence[object]
    ) -> Sequence[Assignment]:
        """Return the layout of each array, in the order of the arrays. Raise if the plan has errors."""
        specs = self._describe_arrays(model, parts, arrays)
        order = parts.order or range(len(specs))
        self.specs = specs
        whys = {
            spec.key: why
            for spec, array in zip(specs, arrays, strict=True)
            if isinstance(array, TracedArray) and (why := array.explain_why_initialized_unsharded())
        }
        unused = [_make_ignored_annotation_note(leaf) for leaf in parts.leaves if leaf.annotation]
        unused += self._failed_calls
        if parts.layers is None and self._context.policy.activations is not None:
            unused.append(_make_unused_activation_rules_warning(unwrap_train_state(model)))
        assigned = self._context.assign_layouts(
            [specs[number] for number in order], whys, unused, True, parts.layers, free_activations=True
        )
        return [
            self._replace_mesh_by_scope_mesh(assignment)
            for _, assignment in sorted(zip(order, assigned, strict=True), key=lambda pair: pair[0])
        ]

    def _replace_mesh_by_scope_mesh(self, assignment: Assignment) -> Assignment:
        """Return an assignment on the mesh object of the scope, because an equal mesh may have different axis types."""
        layout, mesh = assignment.layout, self._context.policy.mesh
        if layout.mesh.axis_types == mesh.axis_types:
            return assignment
        return replace(assignment, layout=Layout.from_valid_specs(layout.sharding_specs, mesh, layout.memory))

    def _compute_or_relayout_arrays(
        self, assignments: Sequence[Assignment], arrays: Sequence[object]
    ) -> list[object]:
        """Compute traced arrays in their layouts, and redistribute existing ones."""
        context = self._context
        todo = {
            str(number): (assignment, array)
            for number, (assignment, array) in enumerate(zip(assignments, arrays, strict=True))
            if isinstance(array, TracedArray) and not array.is_precomputed
        }
        if context.spans_processes:
            # Each process has its own copy of existing arrays, so compare checksums of the copies before placing them.
            sums = (
                (
                    a.variable.path,
                    compute_checksum(context.engine.to_numpy(_materialize_numeric_array(array))),
                )
                for number, (a, array) in enumerate(zip(assignments, arrays, strict=True))
                if str(number) not in todo
            )
            check_same_values(sums, context.gather_from_processes)
        made = context.create_arrays(
            {key: assignment for key, (assignment, _) in todo.items()},
            {key: array.make_initializer() for key, (_, array) in todo.items()},
        )
        return [
            made[key]
            if (key := str(number)) in made
            else context.engine.relayout(
                _materialize_array(array), assignment.layout, pad=assignment.is_padded
            )
            for number, (assignment, array) in enumerate(zip(assignments, arrays, strict=True))
        ]


def _is_traced_or_without_arrays(values: Sequence[object]) -> bool:
    """Return whether one of the arrays is traced, or there are no arrays."""
    arrays = [value for value in values if isinstance(value, (jax.Array, PaddedArray))]
    return not arrays or any(map(_is_tracer, arrays))


def _is_tracer(value: object) -> bool:
    return isinstance(value, jax.core.Tracer)


def _materialize_array(array: object) -> Any:
    return array.compute_precomputed_value() if isinstance(array, TracedArray) else array


def _materialize_numeric_array(array: object) -> Any:
    value = _materialize_array(array)
    return jax.random.key_data(value) if is_random_key(value) else value


def _make_ignored_annotation_note(leaf: ModelLeaf) -> UnsupportedFeature:
    return UnsupportedFeature(
        leaf.path,
        f"its annotation {leaf.annotation} has no effect",
        f"the model's code annotates it with {leaf.annotation}, and here only rules of the layout map shard; without "
        "a rule it is replicated",
        f"write a rule in dims of the mesh: layout_map[{format_path_regex_as_python([leaf.path])}] = {leaf.annotation}",
        "note",
    )


def _make_unused_activation_rules_warning(model: object) -> UnsupportedFeature:
    return UnsupportedFeature(
        type(model).__name__,
        "the rules of layout_map.activations have no effect",
        "the model is a pytree, and the functions that compute its activations have no paths",
        "constrain activations in the function that computes them: x = lm.dtensor.relayout(x, layout)",
        "warning",
    )
