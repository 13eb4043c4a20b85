"""One scope's work in JAX: trace the function that makes a model, and make its arrays in their layouts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.core

from layoutmap.adapters.jax.models import is_nnx
from layoutmap.adapters.jax.pytrees import Leaf
from layoutmap.adapters.jax.tracing import Traced, is_key, trace
from layoutmap.adapters.jax.training import TrainState, arrays_of, put_values
from layoutmap.adapters.protocol import ScopeContext
from layoutmap.core.checksums import checksum
from layoutmap.core.errors import ScopeError
from layoutmap.core.variables import Assignment, VariableSpec


class JaxSession:
    """One scope's work in JAX.

    Args:
        context: The scope.
    """

    library = "jax"

    def __init__(self, context: ScopeContext):
        self._context = context

    def defer(self) -> AbstractContextManager[None]:
        """Refuse: a function of JAX computes its arrays at once.

        Raises:
            ScopeError: Always.
        """
        raise ScopeError(
            "a scope defers no models of JAX",
            why="arrays of JAX are values, which a program computes where it stands and may use at once; nothing can "
            "take their place later",
            fix="make the model in a function: model = layout_map.build(lambda: Model(nnx.Rngs(0)))",
        )

    def build(self, make: Callable[[], Any]) -> Any:
        """Return the model that a function makes, its arrays in their layouts; a plan has shapes in their place."""
        parts: Any = None

        def run() -> tuple[Any, Sequence[Any]]:
            nonlocal parts
            model = make()
            parts = arrays_of(model)
            return model, [leaf.value for leaf in parts.leaves]

        model, arrays = trace(run)
        assignments = self._assign(model, parts.leaves, arrays)
        if self._context.plan_only:
            shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
            return self._with(model, parts.put_together(shapes))
        return self._with(model, parts.put_together(self._materialize(assignments, arrays)))

    def _with(self, made: Any, model: Any) -> Any:
        """Return a model, in the `TrainState` that it was made in."""
        if not isinstance(made, TrainState):
            return model
        made.model, made.policy = model, self._context.policy
        return made

    def take(self, model: Any) -> Any:
        """Lay out a model that exists. A module stays the same object, a pytree is replaced by another one."""
        leaves = arrays_of(model).leaves
        arrays = [leaf.value for leaf in leaves]
        for leaf in leaves:
            if isinstance(leaf.value, jax.core.Tracer):
                raise ScopeError(
                    f"{leaf.path}: the model is only traced",
                    why="arrays have shapes and no values inside of a function that JAX traces",
                    fix="lay it out before jax.jit, or make it with layout_map.build",
                )
        laid_out = put_values(model, self._materialize(self._assign(model, leaves, arrays), arrays))
        if isinstance(model, TrainState):
            model.policy = self._context.policy
        return laid_out

    def made(self, model: Any) -> bool:
        """Return whether a model was made here: not if its arrays of JAX have values."""
        if isinstance(model, TrainState):
            return self.made(model.model)
        tree = sys.modules["flax.nnx"].state(model) if is_nnx(model) else model
        values = [value for value in jax.tree.leaves(tree) if isinstance(value, jax.Array)]
        return not values or any(isinstance(value, jax.core.Tracer) for value in values)

    def unbuilt(self) -> Sequence[str]:
        """Return nothing: a model of JAX has its arrays when it is made."""
        return ()

    def complete(self, model: Any, inputs: Any) -> None:
        """Nothing: a model of JAX has its arrays when it is made."""

    def _assign(self, model: Any, leaves: Sequence[Leaf], arrays: Sequence[Any]) -> Sequence[Assignment]:
        specs = [
            VariableSpec(leaf.path, tuple(leaf.value.shape), str(leaf.value.dtype), leaf.kind, leaf.aliases)
            for leaf in leaves
        ]
        whys = {
            spec.key: why
            for spec, array in zip(specs, arrays, strict=True)
            if isinstance(array, Traced) and (why := array.why_global())
        }
        return self._context.assign(specs, whys, (), True, (), free_activations=True)

    def _materialize(self, assignments: Sequence[Assignment], arrays: Sequence[Any]) -> list[Any]:
        """Return arrays in their layouts: traced ones computed there, and those that exist moved."""
        context = self._context
        todo = {
            str(number): (assignment, array)
            for number, (assignment, array) in enumerate(zip(assignments, arrays, strict=True))
            if isinstance(array, Traced) and not array.is_seed
        }
        if context.across:
            # The others exist in each process: they are moved from there, and must be the same.
            context.check_values(
                (a.variable.path, checksum(context.engine.to_numpy(_data(array))))
                for number, (a, array) in enumerate(zip(assignments, arrays, strict=True))
                if str(number) not in todo
            )
        made = context.create(
            {key: assignment for key, (assignment, _) in todo.items()},
            {key: array.initializer() for key, (_, array) in todo.items()},
        )
        return [
            made[key]
            if (key := str(number)) in made
            else context.engine.relayout(_value(array), assignment.layout)
            for number, (assignment, array) in enumerate(zip(assignments, arrays, strict=True))
        ]


def _value(array: Any) -> Any:
    return array.seed() if isinstance(array, Traced) else array


def _data(array: Any) -> Any:
    value = _value(array)
    return jax.random.key_data(value) if is_key(value) else value
