"""Find variables on no mesh that a traced function writes, because each device would write them (decisions/0273)."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection
from typing import Any

import tensorflow as tf

from layoutmap.core.errors import ScopeError
from layoutmap.engines.tensorflow.refusals import shorten_function_name
from layoutmap.engines.tested import ImportErrorConverter, check_names_exist

with ImportErrorConverter("tensorflow"):
    from tensorflow.python.eager.context import context
    from tensorflow.python.framework import auto_control_deps_utils as resource_uses
    from tensorflow.python.framework.func_graph import FuncGraph

check_names_exist("tensorflow", (FuncGraph, "_add_scope_exit_callback"))

_context: Callable[[], Any] = context
_CHECKED = "_layoutmap_is_checked"
_REPLACED = "_layoutmap_replaced"


def check_writes_at_trace_end(function_name: str = "a tf.function") -> None:
    """Let the current trace raise a `ScopeError` at its end if the traced function writes a variable on no mesh.

    Args:
        function_name: The function, for the message. Later calls in the same trace do not change it.
    """
    graph = _find_outermost_graph()
    if not isinstance(graph, FuncGraph) or hasattr(graph, _CHECKED):
        return
    setattr(graph, _CHECKED, True)
    # If the trace has raised an error, the user must see that one, so check only if none was raised.
    graph._add_scope_exit_callback(
        lambda: sys.exc_info()[0] or _check_written_variables(graph, function_name)
    )


def copy_captured_arrays_to_mesh(copy_to_mesh: Callable[[tf.Tensor], tf.Tensor]) -> None:
    """Replace captured arrays of the traced function by copies on the mesh, since DTensor refuses arrays on no mesh.

    Args:
        copy_to_mesh: Function that returns an array on the mesh.
    """
    graph = _find_outermost_graph()
    with tf.init_scope():
        captures = [
            (array, placeholder, tf.experimental.dtensor.is_dtensor(array))
            for array, placeholder in (graph.captures if isinstance(graph, FuncGraph) else ())
            if not tf.is_symbolic_tensor(array) and array.dtype not in (tf.variant, tf.string)
        ]
        # A function that captures nothing on the mesh may run on one device, as in a `tf.data` pipeline, so leave it
        # unchanged.
        if not any(is_placed for _, _, is_placed in captures):
            return
        for array, placeholder, is_placed in captures:
            if not is_placed and array.dtype != tf.resource:
                # Use the key of the array that is replaced, so that later uses of this array in the trace get the same
                # placeholder. Keep the array alive, because otherwise a new array could get its id.
                placed = copy_to_mesh(array)
                graph.function_captures.add_or_replace(key=id(array), external=placed, internal=placeholder)
                setattr(placed, _REPLACED, array)


def _find_outermost_graph() -> Any:
    """Return the graph of the outermost function being traced, which contains the captures of branches and loops."""
    graph: Any = tf.compat.v1.get_default_graph()
    while isinstance(getattr(graph, "outer_graph", None), FuncGraph):
        graph = graph.outer_graph
    return graph


def _check_written_variables(graph: FuncGraph, function_name: str) -> None:
    inner_handles = {outer.ref(): inner for outer, inner in graph.captures}
    unplaced = {
        inner_handles[variable.handle.ref()].ref(): variable
        for variable in graph.variables
        if variable.handle.ref() in inner_handles and not _is_on_mesh(variable)
    }
    for operation in graph.get_operations() if unplaced else ():
        for handle in resource_uses.get_read_write_resource_inputs(operation)[1]:
            if (variable := unplaced.get(handle.ref())) is not None:
                raise _make_unplaced_write_error(variable.name, function_name)


def _is_on_mesh(variable: tf.Variable) -> bool:
    with tf.init_scope():
        return tf.experimental.dtensor.is_dtensor(variable.handle)


def is_read_operation(name: str) -> bool:
    """Return whether an operation only reads the variables among its inputs."""
    return name in resource_uses.RESOURCE_READ_OPS


def is_traced_function(name: str) -> bool:
    """Return whether an operation is a call of a traced function."""
    return _context().has_function(name)


def check_function_writes(name: str, unplaced_positions: Collection[int]) -> None:
    """Raise a `ScopeError` if a traced function writes a variable on no mesh.

    Args:
        name: TensorFlow's name of the function.
        unplaced_positions: Positions of the inputs that are variables on no mesh.
    """
    if not _find_written_input_positions(name).isdisjoint(unplaced_positions):
        raise _make_unplaced_write_error(shorten_function_name(name), "a tf.function in run_on")


@functools.lru_cache(1024)
def _find_written_input_positions(name: str) -> frozenset[int]:
    """Return the positions of the inputs that a traced function writes. These inputs are variables."""
    definition = _context().get_function_def(name)
    numbers = {argument.name: i for i, argument in enumerate(definition.signature.input_arg)}
    written: set[int] = set()
    for node in definition.node_def:
        if not is_read_operation(node.op):
            read_only = node.attr[resource_uses.READ_ONLY_RESOURCE_INPUTS_ATTR].list.i
            written |= {
                numbers[each] for i, each in enumerate(node.input) if each in numbers and i not in read_only
            }
    return frozenset(written)


def _make_unplaced_write_error(variable_name: str, function_name: str) -> ScopeError:
    return ScopeError(
        f"{variable_name}: {function_name} writes to a variable that is not on the mesh",
        why="every device would write to it, so a counter would count each step several times",
        fix="create optimizers and metrics in the scope, tf.random.Generator in run_on, variables of "
        "layers with self.add_weight or keras.Variable in the scope, and other variables as "
        "layoutmap.DVariable",
    )
