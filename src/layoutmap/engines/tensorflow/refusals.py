"""Errors of DTensor with a reason and a fix, in place of TensorFlow's text (decisions/0300)."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import tensorflow as tf

from layoutmap.core.errors import EngineError
from layoutmap.engines.patches import Attribute
from layoutmap.engines.tested import Needed, check_names

with Needed("tensorflow"):
    from tensorflow.python.eager import core, execute
    from tensorflow.python.eager.polymorphic_function.atomic_function import InterpolateRuntimeError

check_names("tensorflow", (core, "_status_to_exception"), (execute, "execute"))

P = ParamSpec("P")
T = TypeVar("T")
_KINDS = (
    *(tf.errors.UnknownError, tf.errors.UnimplementedError, tf.errors.InternalError),
    tf.errors.InvalidArgumentError,
)
_UNPLACED = re.compile(r"No OpKernel was registered to support Op '((?:Relayout|CopyToMesh)\w*)'")
_REFUSAL = re.compile("dtensor|SPMD|got a regular tensor", re.IGNORECASE)
_BEFORE_RUN = re.compile(
    "dtensor_graph_to_mlir_pass|got a regular tensor|eager_operation|non-replicated DTensor is not supported|"
    "to be divisible by sharding"
)
_REGULAR = re.compile(r"op/function (\S+) got a regular tensor for input (\d+) (\(shape \S*\))")
_NAMED = re.compile(r"\[Op:(\w+)\]|'?tf\.(\w+)'?|fused\[\"(\w+)")


class _Refusal(EngineError, tf.errors.OpError):  # type: ignore[misc]
    """An `EngineError` that code which expects TensorFlow's error catches, too."""

    def __init__(self, error: tf.errors.OpError, what: str, **parts: Any):
        tf.errors.OpError.__init__(self, error.node_def, error.op, error.message, error.error_code)
        EngineError.__init__(self, what, **parts)

    __str__ = EngineError.__str__


_CLASSES = {kind: type("EngineError", (_Refusal, kind), {}) for kind in _KINDS}


def is_refusal(error: tf.errors.OpError) -> bool:
    """Return whether an error says that DTensor does not compute an operation or a function."""
    # DTensor's own functions raise this class for invalid arguments, which are no refusals.
    if isinstance(error, tf.errors.InvalidArgumentError):
        return bool(_UNPLACED.search(error.message))
    return isinstance(error, _KINDS) and bool(_REFUSAL.search(error.message))


def is_refusal_before_run(message: str) -> bool:
    """Return whether DTensor refused an operation or a function before any part of it ran."""
    return bool(_BEFORE_RUN.search(message))


def find_first_line(message: str) -> str:
    """Return the line of a message of DTensor that states the problem."""
    lines = (line.strip() for line in message.splitlines() if "rror:" in line or "got a" in line)
    first = next(lines, "") or message.partition(" Input tensor is")[0]
    return (first.partition("error: ")[2] or first)[:200]


def shorten_function_name(name: str) -> str:
    """Return the name of a traced function without TensorFlow's additions, and that of an operation unchanged."""
    return name.removeprefix("__inference_").rpartition("_")[0] if name.startswith("__inference_") else name


def explain_refusal(error: tf.errors.OpError) -> tf.errors.OpError:
    """Return a refusal of DTensor as an `EngineError` of TensorFlow's class, too, and any other error unchanged."""
    if isinstance(error, _Refusal) or not is_refusal(error):
        return error
    if found := _UNPLACED.search(error.message):
        return _CLASSES[type(error)](
            error,
            f"{found[1]} in a tf.function without a tensor on a mesh",
            why="TensorFlow runs a function on one device if none of its inputs is on a mesh",
            fix="call the function in a block of layoutmap.dtensor.run_on(mesh), or pass it a tensor on the mesh",
        )
    if found := _REGULAR.search(error.message):
        name, number, shape = found.groups()
        return _CLASSES[type(error)](
            error,
            f"{shorten_function_name(name)} mixes a tensor on a mesh with an unsharded one",
            facts={"unsharded": f"input {number} {shape}"},
            why="outside of run_on, DTensor takes only tensors on a mesh, and a gradient starts from an unsharded 1",
            fix="compute in a block of layoutmap.dtensor.run_on(mesh), or pass the unsharded tensor to "
            "layoutmap.dtensor.copy_to_mesh first",
        )
    named = _NAMED.search(error.message)
    return _CLASSES[type(error)](
        error,
        f"TensorFlow's DTensor cannot compute {next(filter(None, named.groups())) if named else 'an operation'}",
        facts={"TensorFlow": find_first_line(error.message)},
        why="DTensor has no rule for the operation, or for the layouts of its operands",
        fix="compute it eagerly in a block of layoutmap.dtensor.run_on(mesh); in a tf.function, relayout its operands "
        "to Layout.replicated before",
    )


def _explain_conversion(
    convert: Callable[[object], tf.errors.OpError],
) -> Callable[[object], tf.errors.OpError]:
    return lambda status: explain_refusal(convert(status))


def _explain_execution(plain: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(plain)
    def execute_explained(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return plain(*args, **kwargs)
        except _KINDS as error:
            raise explain_refusal(error) from None

    return execute_explained


def _leave_refusals(plain: Callable[..., bool]) -> Callable[..., bool]:
    """Return the end of the block in which TensorFlow calls a function.

    TensorFlow looks there for tags from each character of a message on, which takes a quarter of an hour for the 400 kB
    that DTensor's compiler says of a large step.
    """

    @functools.wraps(plain)
    def exit_block(self: object, kind: object, error: object, traceback: object) -> bool:
        return not isinstance(error, _Refusal) and plain(self, kind, error, traceback)

    return exit_block


_PATCHES = (
    Attribute(core, "_status_to_exception", _explain_conversion),
    Attribute(execute, "execute", _explain_execution),
    Attribute(InterpolateRuntimeError, "__exit__", _leave_refusals),
)


# They stay until the process ends, because tensors on a mesh outlive every scope (decisions/0300).
def explain_refusals() -> None:
    """Raise refusals of DTensor as errors of this library from now on. The first mesh of the process calls this."""
    for patch in _PATCHES:
        patch.install()
