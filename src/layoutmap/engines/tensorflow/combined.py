"""Compile a step so that DTensor may send its sums over the mesh together (decisions/0301).

DTensor's pass that combines all-reduces moves writes of variables behind reads that come after them. Here a step has no
such reads: it collects the new values of its variables, reads those, and writes each variable once, at its end.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from layoutmap.engines.patches import set_temporarily
from layoutmap.engines.tensorflow.arrays import default_mesh_lock
from layoutmap.engines.tensorflow.selfcheck import GROUP_SIZE_SETTING
from layoutmap.engines.tested import Needed, check_names

with Needed("tensorflow"):
    from tensorflow.python.eager import record

check_names("tensorflow", (record, "could_possibly_record"))

_current = threading.local()


class WriteOrderError(Exception):
    """Raised in the trace of a step with a write that cannot wait for its end."""

    ag_pass_through = True


class _Writes:
    """Values that a step will write to its variables at its end."""

    def __init__(self) -> None:
        self.graph = tf.compat.v1.get_default_graph()
        self.values: dict[int, tuple[Callable[[tf.Tensor], object], tf.Tensor]] = {}

    def write_all(self) -> None:
        """Write the variables, and raise if another operation of the step could read or write one of them."""
        for write, value in self.values.values():
            write(value)
        written = 0
        for operation in self.graph.get_operations():
            is_variable = any(each.dtype == tf.resource for each in operation.inputs)
            if is_variable and operation.type not in ("ReadVariableOp", "AssignVariableOp"):
                raise WriteOrderError(operation.name)
            written += operation.type == "AssignVariableOp"
        if written != len(self.values):
            raise WriteOrderError("a variable is written without DVariable.assign")


def collect_write(
    variable: tf.Variable, compute: Callable[[], tf.Tensor], write: Callable[[tf.Tensor], object]
) -> bool:
    """Collect the value of a variable that the step being traced writes, and return whether it is collected.

    Args:
        variable: The variable.
        compute: Function that returns the value.
        write: Function that writes the value at the end of the step.
    """
    writes: _Writes | None = getattr(_current, "writes", None)
    if writes is None or tf.executing_eagerly():
        return False
    if tf.compat.v1.get_default_graph() is not writes.graph:
        raise WriteOrderError(variable.name)
    writes.values[id(variable)] = write, compute()
    return True


def read_collected(variable: tf.Variable) -> tf.Tensor | None:
    """Return the value of a variable that is collected, or None."""
    writes: _Writes | None = getattr(_current, "writes", None)
    found = writes.values.get(id(variable)) if writes and not tf.executing_eagerly() else None
    if found is None:
        return None
    if not record.could_possibly_record():
        return found[1]
    if variable.trainable:  # its gradient is that of the read value, not of the computation of it
        raise WriteOrderError(variable.name)
    return tf.stop_gradient(found[1])


class CombinedFunction:
    """`tf.function` of a step that writes its variables at its end, or of the plain step where that could differ."""

    def __init__(self, step: Callable[..., object], **options: Any):
        @functools.wraps(step)
        def write_at_end(*args: object) -> object:
            with set_temporarily(_current, "writes", _Writes()):
                result = step(*args)
                _current.writes.write_all()
            return result

        self._plain = tf.function(step, **options)
        self._combined: Any = tf.function(write_at_end, **options)
        self._compiled: set[Hashable] = set()

    @property
    def is_combined(self) -> bool:
        """Whether the step writes its variables at its end."""
        return self._combined is not None

    def get_concrete_function(self, *args: object) -> Any:
        """Return the function traced for some arguments."""
        return self._call("get_concrete_function", *args)

    def __call__(self, *args: object) -> object:
        """Run the step."""
        leaves = tf.nest.flatten(args)
        signature = tuple((tuple(each.shape), each.dtype) for each in leaves if isinstance(each, tf.Tensor))
        if signature in self._compiled:
            try:
                return (self._combined or self._plain)(*args)
            except WriteOrderError:  # traced again, for another constant among the arguments
                pass
        result = self._call("__call__", *args)
        self._compiled.add(signature)
        return result

    def _call(self, name: str, *args: object) -> Any:
        with default_mesh_lock:
            if self._combined is not None:
                try:
                    with _combine_all_reduces():
                        return getattr(self._combined, name)(*args)
                except WriteOrderError:
                    self._combined = None
            return getattr(self._plain, name)(*args)


@contextmanager
def _combine_all_reduces() -> Generator[None]:
    """Let DTensor combine all-reduces of functions that it compiles until the block ends."""
    before = os.environ.pop(GROUP_SIZE_SETTING, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[GROUP_SIZE_SETTING] = before
