"""Find the variables on no mesh that a compiled function writes: each device would write them (decisions/0009)."""

from __future__ import annotations

import sys

import tensorflow as tf

from layoutmap.core.errors import ScopeError
from layoutmap.engines.tested import Needed, check_names

with Needed("tensorflow"):
    from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs
    from tensorflow.python.framework.func_graph import FuncGraph

check_names("tensorflow", (FuncGraph, "_add_scope_exit_callback"))

_CHECKED = "_layoutmap_is_checked"


def check_trace_at_end(what: str = "a tf.function") -> None:
    """Raise a `ScopeError` when the current trace ends if the function writes a variable that is on no mesh.

    Args:
        what: Function in the words of the message. The first call of a trace names it.
    """
    graph = tf.compat.v1.get_default_graph()
    while isinstance(
        getattr(graph, "outer_graph", None), FuncGraph
    ):  # a branch or a loop writes what its function captures
        graph = graph.outer_graph
    if not isinstance(graph, FuncGraph) or hasattr(graph, _CHECKED):
        return
    setattr(graph, _CHECKED, True)
    # After another error, that one is raised.
    graph._add_scope_exit_callback(lambda: sys.exc_info()[0] or _check_written_variables(graph, what))


def _check_written_variables(graph: FuncGraph, what: str) -> None:
    inner_handles = {outer.ref(): inner for outer, inner in graph.captures}
    unplaced = {
        inner_handles[variable.handle.ref()].ref(): variable
        for variable in graph.variables
        if variable.handle.ref() in inner_handles and not _is_on_mesh(variable)
    }
    for operation in graph.get_operations() if unplaced else ():
        for handle in get_read_write_resource_inputs(operation)[1]:
            if (variable := unplaced.get(handle.ref())) is not None:
                raise ScopeError(
                    f"{variable.name}: {what} writes to a variable that is not on the mesh",
                    facts={"shape": str(tuple(variable.shape))},
                    why="every device would write to it, so a counter would count each step many times",
                    fix="make an optimizer or a metric in a scope; make a variable of a layer with self.add_weight or "
                    "keras.Variable in the scope, and any other as layoutmap.DVariable",
                )


def _is_on_mesh(variable: tf.Variable) -> bool:
    with tf.init_scope():
        return tf.experimental.dtensor.is_dtensor(variable.handle)
