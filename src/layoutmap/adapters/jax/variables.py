"""Read and write the array of a JAX model at a path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.core

from layoutmap.adapters.jax.tracing import is_random_key
from layoutmap.core.blocks import NumpyArray
from layoutmap.core.errors import PlanError
from layoutmap.core.layout import Layout
from layoutmap.engines import get_engine


@dataclass(slots=True)
class Variable:
    """Read and write an array of a model or of its optimizer's state.

    Args:
        path: Path of the array.
        array: The array.
        replace: Replaces the array in the model.
    """

    path: str
    array: Any
    replace: Callable[[jax.Array], None]

    @property
    def layout(self) -> Layout:
        """The layout of the array.

        Raises:
            AttributeError: The array is unsharded.
        """
        layout = get_engine("jax").get_layout(self.array)
        if layout is None:
            raise AttributeError(f"{self.path} is unsharded and has no layout: write a rule that shards it")
        return layout

    def read(self) -> NumpyArray:
        """Return the global value as a numpy array. For random keys, return their numbers.

        Raises:
            PlanError: The array is only planned, and has no value.
        """
        self._check_has_value()
        return get_engine("jax").to_numpy(self.array)

    def write(self, value: object) -> None:
        """Assign a value of JAX or numpy without changing the layout.

        Raises:
            PlanError: The array is only planned.
        """
        self._check_has_value()
        if is_random_key(self.array) and not is_random_key(value):
            value = jax.random.wrap_key_data(jax.numpy.asarray(value), impl=jax.random.key_impl(self.array))
        layout = get_engine("jax").get_layout(self.array)
        self.array = (
            jax.numpy.asarray(value)
            if layout is None
            else get_engine("jax").relayout(value, layout, pad=True)
        )
        self.replace(self.array)

    def _check_has_value(self) -> None:
        if isinstance(self.array, (jax.core.Tracer, jax.ShapeDtypeStruct)):
            raise PlanError(
                f"{self.path}: this array is only planned and has no values",
                why="the function that created the model was traced, so its arrays have shapes and no values",
                fix="use the result of layout_map.build",
            )
