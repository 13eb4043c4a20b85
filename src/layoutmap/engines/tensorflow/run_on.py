"""Run operations with any operands on a mesh, which DTensor's default mesh supports only in part (decisions/0220).

Variables on no mesh are written once, and not by each device (decisions/0273).
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from layoutmap.core.errors import EngineError
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.engines.patches import AttributePatch, PatchGroup, set_attribute_temporarily
from layoutmap.engines.tensorflow.arrays import (
    convert_to_native_layout,
    default_mesh_lock,
    get_layout,
    is_numeric_dtype,
    relayout_tensor,
    to_numpy,
)
from layoutmap.engines.tensorflow.refusals import is_refusal_before_run
from layoutmap.engines.tensorflow.traces import check_function_writes, is_read_operation, is_traced_function
from layoutmap.engines.tested import ImportErrorConverter

with ImportErrorConverter("tensorflow"):
    from tensorflow.python import pywrap_tfe

dtensor = tf.experimental.dtensor
_current = threading.local()


@contextmanager
def run_on(mesh: Mesh) -> Generator[None]:
    """Run operations on unsharded tensors on a mesh until the block ends.

    DTensor has one default mesh for all threads, so a thread waits here until no other thread is in such a block.
    """
    native_mesh = convert_to_native_layout(Layout.replicated(mesh, 0)).mesh
    with default_mesh_lock, _PATCHES.activate(), set_attribute_temporarily(_current, "mesh", mesh):
        default_mesh = dtensor.default_mesh(native_mesh)
        default_mesh.__enter__()
        try:
            yield
        finally:
            default_mesh.__exit__(None, None, None)


def _execute_with_fallbacks(name_position: int, execute: Callable[..., Any], *args: Any) -> object:
    """Execute an operation or a function, even if DTensor refuses it or would run it on each device.

    An operation that writes a variable on no mesh, or draws random numbers that DTensor cannot draw, runs on one
    device. Any other operation that DTensor refuses runs again with all operands replicated, because DTensor accepts
    no constants except scalars, and has no rule for some layouts.

    Args:
        name_position: Index of the operation's name among the arguments.
        execute: TensorFlow's function. If DTensor refuses, it fails before it has computed anything.
        *args: Its arguments.
    """
    mesh: Mesh | None = getattr(_current, "mesh", None)
    if mesh is None:
        return execute(*args)
    name = args[name_position]
    unplaced = [
        i
        for i, each in enumerate(tf.nest.flatten(list(args[name_position + 1 :])))
        if _is_handle_without_mesh(each)
    ]
    if unplaced and not is_read_operation(name):
        if not is_traced_function(name):
            return _execute_on_one_device(name_position, execute, args)
        check_function_writes(name, unplaced)
    try:
        return execute(*args)
    except Exception as error:
        message = getattr(error, "message", "")
        draw = _DRAW.search(message)
        if not draw and not is_refusal_before_run(message):
            raise
    if draw:
        if draw[1] != name or (dtensor.num_clients() > 1 and not name.startswith("Stateless")):
            raise _make_random_operation_error(draw[1])
        return _execute_on_one_device(name_position, execute, args)

    def replicate_if_array(value: Any) -> object:
        if not isinstance(value, (tf.Tensor, tf.Variable, np.ndarray)) or not is_numeric_dtype(value.dtype):
            return value
        return relayout_tensor(tf.convert_to_tensor(value), Layout.replicated(mesh, len(value.shape)))

    return execute(*tf.nest.map_structure(replicate_if_array, list(args)))


def _execute_on_one_device(name_position: int, execute: Callable[..., Any], args: Sequence[Any]) -> object:
    """Execute an operation on one device with gathered operands, and return its result on no mesh."""

    def gather_if_on_mesh(value: Any) -> object:
        is_placed = isinstance(value, tf.Tensor) and get_layout(value) is not None
        return tf.constant(to_numpy(value)) if is_placed else value

    with set_attribute_temporarily(_current, "mesh", None), tf.device(None):
        gathered = tf.nest.map_structure(gather_if_on_mesh, list(args))
        if name_position == _POSITIONS["TFE_Py_Execute"]:
            gathered[1] = None  # the device: use that of the enclosing tf.device
        return execute(*gathered)


def _is_handle_without_mesh(value: object) -> bool:
    return isinstance(value, tf.Tensor) and value.dtype == tf.resource and not dtensor.is_dtensor(value)


def _make_random_operation_error(operation: str) -> EngineError:
    return EngineError(
        f"a tf.function in run_on draws random numbers with {operation}, which DTensor cannot compute",
        why="its state would exist on each device, or DTensor has no rule for it",
        fix="draw with tf.random.stateless_uniform or stateless_normal, keras.random, or a "
        "tf.random.Generator that is created in run_on; or draw outside the function and pass the numbers",
    )


_DRAW = re.compile(
    r"'tf\.((?:Stateless|Parameterized)?(?:Random\w+|Multinomial|TruncatedNormal\w*|Shuffle))' op "
    r"(?:does not implement layout|ComputeLayoutForward error: Stateful random)"
)
_POSITIONS = {"TFE_Py_FastPathExecute": 1, "TFE_Py_Execute": 2}
_PATCHES = PatchGroup(
    AttributePatch(
        pywrap_tfe,
        name,
        lambda execute, position=position: functools.wraps(execute)(
            functools.partial(_execute_with_fallbacks, position, execute)
        ),
    )
    for name, position in _POSITIONS.items()
)
