"""Compile a training step so that DTensor may combine its all-reduces (decisions/0301).

DTensor's pass that combines all-reduces moves writes of variables behind reads that come after them. Here a step has no
such reads: it collects the new values of its variables, reads these values, and writes each variable once, at its end.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from layoutmap.engines.patches import set_attribute_temporarily
from layoutmap.engines.tensorflow.arrays import default_mesh_lock
from layoutmap.engines.tensorflow.selfcheck import GROUP_SIZE_SETTING
from layoutmap.engines.tested import ImportErrorConverter, check_names_exist

with ImportErrorConverter("tensorflow"):
    from tensorflow.python.eager import record

check_names_exist("tensorflow", (record, "could_possibly_record"))

_current = threading.local()


class WriteOrderError(Exception):
    """Raised while a step is traced if a write of a variable cannot be moved to the end of the step."""

    ag_pass_through = True


class _CollectedWrites:
    """Collect the values that a traced step writes to its variables, to write them at its end."""

    def __init__(self) -> None:
        self.graph = tf.compat.v1.get_default_graph()
        self.values: dict[int, tuple[Callable[[tf.Tensor], object], tf.Tensor]] = {}

    def write_collected_values(self) -> None:
        """Write the collected values, or raise a `WriteOrderError` if other operations could access a variable."""
        for write, value in self.values.values():
            write(value)
        written = 0
        for operation in self.graph.get_operations():
            is_variable = any(each.dtype == tf.resource for each in operation.inputs)
            if is_variable and operation.type not in ("ReadVariableOp", "AssignVariableOp"):
                raise WriteOrderError(f"{operation.name} may use a variable, so the order of writes matters")
            written += operation.type == "AssignVariableOp"
        if written != len(self.values):
            raise WriteOrderError("a variable is written without DVariable.assign")


def collect_write_if_traced(
    variable: tf.Variable, compute: Callable[[], tf.Tensor], write: Callable[[tf.Tensor], object]
) -> bool:
    """Collect a write of the traced step for the end of the step, and return True. Without a step, return False.

    Args:
        variable: The variable.
        compute: Function that returns the value.
        write: Function that writes the value at the end of the step.
    """
    writes: _CollectedWrites | None = getattr(_current, "writes", None)
    if writes is None or tf.executing_eagerly():
        return False
    if tf.compat.v1.get_default_graph() is not writes.graph:
        raise WriteOrderError(f"{variable.name} is written in an inner function of the step")
    writes.values[id(variable)] = write, compute()
    return True


def read_collected_value(variable: tf.Variable) -> tf.Tensor | None:
    """Return the collected value of a variable, or None if the step has not written it or no step is traced."""
    writes: _CollectedWrites | None = getattr(_current, "writes", None)
    found = writes.values.get(id(variable)) if writes and not tf.executing_eagerly() else None
    if found is None:
        return None
    if not record.could_possibly_record():
        return found[1]
    # A gradient would reach the inputs of the collected value, but not the variable, so compile the step unchanged.
    if variable.trainable:
        raise WriteOrderError(f"{variable.name} is read again after a write, and needs a gradient")
    return tf.stop_gradient(found[1])


class StepWithWritesAtEnd:
    """Compile a training step so that it writes variables at its end, unless the order of its writes matters."""

    def __init__(self, step: Callable[..., object], **options: Any):
        @functools.wraps(step)
        def call_step_and_write(*args: object) -> object:
            with set_attribute_temporarily(_current, "writes", _CollectedWrites()):
                result = step(*args)
                _current.writes.write_collected_values()
            return result

        self._plain = tf.function(step, **options)
        self._writing_at_end: Any = tf.function(call_step_and_write, **options)
        self._compiled: set[Hashable] = set()

    @property
    def writes_at_end(self) -> bool:
        """Whether the step still writes its variables at its end. It stops after a `WriteOrderError`."""
        return self._writing_at_end is not None

    def get_concrete_function(self, *args: object) -> Any:
        """Return the concrete function that is traced for these arguments."""
        return self._call_step_method("get_concrete_function", *args)

    def __call__(self, *args: object) -> object:
        """Run the step."""
        leaves = tf.nest.flatten(args)
        signature = tuple((tuple(each.shape), each.dtype) for each in leaves if isinstance(each, tf.Tensor))
        if signature in self._compiled:
            try:
                return (self._writing_at_end or self._plain)(*args)
            # A constant argument has a new value, so the step was traced again, and its writes may have a different
            # order. Compile the step unchanged below.
            except WriteOrderError:
                pass
        result = self._call_step_method("__call__", *args)
        self._compiled.add(signature)
        return result

    def _call_step_method(self, method_name: str, *args: object) -> Any:
        with default_mesh_lock:
            if self._writing_at_end is not None:
                try:
                    with _combine_all_reduces_temporarily():
                        return getattr(self._writing_at_end, method_name)(*args)
                except WriteOrderError:
                    self._writing_at_end = None
            return getattr(self._plain, method_name)(*args)


@contextmanager
def _combine_all_reduces_temporarily() -> Generator[None]:
    """Until the block ends, let DTensor combine the all-reduces of each function that it compiles."""
    before = os.environ.pop(GROUP_SIZE_SETTING, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[GROUP_SIZE_SETTING] = before
