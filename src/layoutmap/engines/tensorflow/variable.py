"""Define `DVariable`, a TensorFlow variable in a layout, with features that TensorFlow's own `DVariable` lacks.

TensorFlow's `DVariable` cannot be read when it is sharded (`numpy()` raises), and accepts no unsharded value. This
subclass does both, so that code for a `tf.Variable` works: `get_weights`, saving to HDF5, callbacks, `repr`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from layoutmap.core.blocks import NumpyArray
from layoutmap.core.errors import EngineError, LayoutError
from layoutmap.core.layout import Layout, convert_layout
from layoutmap.engines.tensorflow.arrays import (
    canonicalize_values,
    check_and_convert_layout,
    default_mesh_lock,
    get_layout,
    record_layout,
    relayout_in_trace,
    relayout_tensor,
    to_numpy,
)
from layoutmap.engines.tensorflow.combined import collect_write_if_traced, read_collected_value
from layoutmap.engines.tensorflow.devices import make_native_layout
from layoutmap.engines.tensorflow.selfcheck import check_dtensor_results
from layoutmap.engines.tensorflow.traces import check_writes_at_trace_end

dtensor = tf.experimental.dtensor


class DVariable(dtensor.DVariable):  # type: ignore[misc]
    """Store the value of a `tf.Variable` in a layout.

    Copies and unpickled variables keep the layout.

    Args:
        initial_value: The first value: a sharded tensor, or with `layout` an unsharded tensor, a number, or a numpy
            array, or a function without arguments that returns one.
        *args: See `tf.Variable`.
        layout: The layout; may be left out if the first value has one.
        **kwargs: See `tf.Variable`.

    Attributes:
        layout: The `Layout` of the variable.
        read_layout: The layout in which a computation last read the variable, if it differs and was recorded.

    Raises:
        LayoutError: There is no layout, it does not fit, or the first value has a different layout.
        EngineError: TensorFlow does not support the layout or the value, or would compute training steps wrongly.

    Example:
        >>> import tensorflow as tf
        >>> layout = lm.Layout(["x", lm.UNSHARDED], lm.Mesh(None, "x=2"))
        >>> variable = lm.DVariable(tf.ones((4, 3)), layout=layout)
        >>> variable.layout == layout
        True
        >>> float(variable.assign_add(tf.ones((4, 3))).numpy().sum())
        24.0

    References:
        `tf.experimental.dtensor.DVariable`,
        https://www.tensorflow.org/api_docs/python/tf/experimental/dtensor/DVariable
    """

    read_layout: Layout | None = None

    def __init__(
        self, initial_value: Any, *args: Any, layout: Layout | None = None, dtype: Any = None, **kwargs: Any
    ):
        if callable(initial_value) and not isinstance(initial_value, (tf.Tensor, tf.Variable)):
            with tf.init_scope():
                initial_value = initial_value()
                # Inside run_on, the function's result is already on the mesh, so relayout it.
                if layout is not None and get_layout(initial_value) is not None:
                    initial_value = relayout_tensor(initial_value, convert_layout(layout))
        if tf.is_symbolic_tensor(initial_value):
            raise EngineError(
                "the initial value of a DVariable has no values yet",
                why="a tf.function is being traced, and computes its tensors later",
                fix="create the variable outside of the function, or pass a function without arguments that "
                "returns the value",
            )
        with tf.init_scope():
            self._create_variable(initial_value, layout, args, dtype, kwargs)

    def _create_variable(
        self, initial_value: Any, layout: Layout | None, args: Any, dtype: object, kwargs: dict[str, Any]
    ) -> None:
        wanted = convert_layout(layout) if layout is not None else None
        if dtype is not None or not isinstance(initial_value, (tf.Tensor, tf.Variable)):
            initial_value = _convert_to_unsharded_tensor(initial_value, dtype)
        present = get_layout(initial_value)
        if wanted is None and present is None:
            raise LayoutError(
                "a DVariable needs a layout",
                why="its initial value has no layout, and none is given",
                fix="pass layout=, or a sharded initial value",
            )
        if (
            wanted is not None
            and present is not None
            and make_native_layout(wanted) != make_native_layout(present)
        ):
            raise LayoutError(
                "the initial value of a DVariable is in a different layout than layout=",
                facts={"layout": str(wanted), "initial value": str(present)},
                why="values are not redistributed implicitly",
                fix="leave out layout=, or relayout the value first",
            )
        used = present if wanted is None else wanted
        assert used is not None
        self._layout: Layout = used
        shape: Any = initial_value.shape
        native = check_and_convert_layout(used, tuple(shape), kwargs.get("name") or "DVariable")
        check_dtensor_results(native.mesh)
        value = initial_value if present is not None else relayout_tensor(initial_value, used)
        with default_mesh_lock:
            super().__init__(value, *args, **kwargs)
        record_layout(self, used)

    @property
    def layout(self) -> Layout:
        """The layout of the value."""
        return self._layout

    @layout.setter
    def layout(self, native: object) -> None:
        # TensorFlow's constructor sets its own layout object of the same layout, so ignore it.
        pass

    def numpy(self) -> NumpyArray:
        """Return the global value as a numpy array."""
        return to_numpy(self) if tf.executing_eagerly() else super().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NumpyArray:
        values = self.numpy()
        return values if dtype is None else values.astype(dtype)

    def __deepcopy__(self, memo: dict[int, object]) -> DVariable:
        value = tf.identity(self.read_value())
        memo[id(self)] = copied = DVariable(value, layout=self._layout, **self._get_constructor_arguments())
        return copied

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.numpy(), self._layout, self._get_constructor_arguments())

    def _get_constructor_arguments(self) -> dict[str, Any]:
        return {
            "name": self.name.removesuffix(":0"),
            "trainable": self.trainable,
            "constraint": self.constraint,
            "synchronization": self.synchronization,
            "aggregation": self.aggregation,
        }

    def assign(self, value: object, *args: object, **kwargs: object) -> Any:
        """Assign a sharded or unsharded value. The variable keeps its layout.

        Returns:
            The variable; inside a `tf.function` what `tf.Variable.assign` returns.

        Raises:
            LayoutError: The value has a different shape.
        """
        if collect_write_if_traced(self, lambda: self._relayout_and_convert(value), super().assign):
            return self
        return self._return_self_if_eager(super().assign(self._relayout_value(value), *args, **kwargs))

    def assign_add(self, delta: object, *args: object, **kwargs: object) -> Any:
        """Add a sharded or unsharded value (see `assign`)."""
        if collect_write_if_traced(
            self, lambda: self.read_value() + self._relayout_and_convert(delta), super().assign
        ):
            return self
        return self._return_self_if_eager(super().assign_add(self._relayout_value(delta), *args, **kwargs))

    def assign_sub(self, delta: object, *args: object, **kwargs: object) -> Any:
        """Subtract a sharded or unsharded value (see `assign`)."""
        if collect_write_if_traced(
            self, lambda: self.read_value() - self._relayout_and_convert(delta), super().assign
        ):
            return self
        return self._return_self_if_eager(super().assign_sub(self._relayout_value(delta), *args, **kwargs))

    def _relayout_and_convert(self, value: object) -> tf.Tensor:
        placed: Any = self._relayout_value(value)
        return tf.convert_to_tensor(placed, dtype=self.dtype)

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        collected = read_collected_value(self)
        return super()._read_variable_op(no_copy) if collected is None else collected

    # DTensor gathers rows of a variable only if axis 0 is unsharded, but rows of a tensor in any layout. So read the
    # variable to a tensor first.
    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Return the rows of the value at `indices`."""
        return tf.gather(self.read_value(), indices, name=name)

    def gather_nd(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Return the elements or rows of the value at `indices` (see `tf.gather_nd`)."""
        return tf.gather_nd(self.read_value(), indices, name=name)

    def _return_self_if_eager(self, result: object) -> Any:
        """Return this variable after an eager write, since its result is unreadable. In a trace, return the result."""
        return self if result is not None and tf.executing_eagerly() else result

    def _relayout_value(self, value: Any) -> object:
        """Return a value in the variable's layout. It may stay replicated inside a `tf.function`."""
        if not tf.executing_eagerly():
            check_writes_at_trace_end()
            # DTensor cannot assign a replicated value to a sharded variable, so relayout first.
            if self._layout.is_fully_replicated():
                return value
            value = tf.convert_to_tensor(value, dtype=self.dtype)
            # DTensor would give the variable's layout to the layer's computation of the value, which may fail in this
            # layout. So relayout first to the layout in which the layer read the variable.
            for layout in filter(None, (self.read_layout, self._layout)):
                value = relayout_in_trace(value, layout)
            return value
        if not isinstance(value, (tf.Tensor, tf.Variable)):
            value = tf.convert_to_tensor(value, dtype=self.dtype)
        if value.shape != self.shape:
            raise LayoutError(
                f"{self.name}: the assigned value has a different shape than the variable",
                facts={"variable": tuple(self.shape), "value": tuple(value.shape)},
                why="a variable keeps its shape, and values are not broadcast",
                fix="assign a value of the variable's shape",
            )
        return relayout_tensor(value, self._layout)

    def __repr__(self) -> str:
        return f"<DVariable {self.name!r} shape={tuple(self.shape)} dtype={self.dtype.name} layout={self._layout}>"


def _rebuild(values: NumpyArray, layout: Layout, settings: dict[str, Any]) -> DVariable:
    return DVariable(values, layout=layout, **settings)


def _convert_to_unsharded_tensor(value: Any, dtype: Any) -> tf.Tensor:
    """Return a value as an unsharded tensor of numbers."""
    if not isinstance(value, (tf.Tensor, tf.Variable)):
        canonicalize_values(value)
    tensor = tf.convert_to_tensor(value)
    return tensor if dtype is None else tf.cast(tensor, dtype)
