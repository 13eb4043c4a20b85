"""Replace errors of DTensor by errors with a reason and a fix (decisions/0300)."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import tensorflow as tf

from layoutmap.core.errors import EngineError
from layoutmap.engines.patches import AttributePatch
from layoutmap.engines.tested import ImportErrorConverter, check_names_exist

with ImportErrorConverter("tensorflow"):
    from tensorflow.python.eager import core, execute
    from tensorflow.python.eager.polymorphic_function.atomic_function import InterpolateRuntimeError

check_names_exist("tensorflow", (core, "_status_to_exception"), (execute, "execute"))

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


class _RefusalError(EngineError, tf.errors.OpError):  # type: ignore[misc]
    """An `EngineError` for a refusal of DTensor. It is also a TensorFlow error, so that `except tf.errors...` works."""

    def __init__(self, error: tf.errors.OpError, what: str, **parts: Any):
        tf.errors.OpError.__init__(self, error.node_def, error.op, error.message, error.error_code)
        EngineError.__init__(self, what, **parts)

    __str__ = EngineError.__str__


_CLASSES = {kind: type("EngineError", (_RefusalError, kind), {}) for kind in _KINDS}


def is_dtensor_refusal(error: tf.errors.OpError) -> bool:
    """Return whether an error says that DTensor refuses to compute an operation or a function."""
    # DTensor's own functions raise this class for invalid arguments, too, so recognize a refusal by its text.
    if isinstance(error, tf.errors.InvalidArgumentError):
        return bool(_UNPLACED.search(error.message))
    return isinstance(error, _KINDS) and bool(_REFUSAL.search(error.message))


def is_refusal_before_run(message: str) -> bool:
    """Return whether a message says that DTensor refused an operation or a function before any part of it ran."""
    return bool(_BEFORE_RUN.search(message))


def find_refusal_line(message: str) -> str:
    """Return the line of a message of DTensor that states the problem."""
    lines = (line.strip() for line in message.splitlines() if "rror:" in line or "got a" in line)
    first = next(lines, "") or message.partition(" Input tensor is")[0]
    return (first.partition("error: ")[2] or first)[:200]


def shorten_function_name(name: str) -> str:
    """Remove TensorFlow's additions from the name of a traced function. Return names of operations unchanged."""
    return name.removeprefix("__inference_").rpartition("_")[0] if name.startswith("__inference_") else name


def convert_refusal_to_engine_error(error: tf.errors.OpError) -> tf.errors.OpError:
    """Convert a refusal of DTensor to an error of both layoutmap and TensorFlow. Return other errors unchanged."""
    if isinstance(error, _RefusalError) or not is_dtensor_refusal(error):
        return error
    if found := _UNPLACED.search(error.message):
        return _CLASSES[type(error)](
            error,
            f"{found[1]} cannot run in a tf.function that gets no tensor on a mesh",
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
        facts={"TensorFlow": find_refusal_line(error.message)},
        why="DTensor has no rule for the operation, or for the layouts of its operands",
        fix="compute it eagerly in a block of layoutmap.dtensor.run_on(mesh); in a tf.function, relayout its operands "
        "to Layout.replicated before",
    )


def _wrap_status_conversion(
    convert: Callable[[object], tf.errors.OpError],
) -> Callable[[object], tf.errors.OpError]:
    """Wrap TensorFlow's conversion of a status to an error so that it converts refusals."""
    return lambda status: convert_refusal_to_engine_error(convert(status))


def _wrap_operation_execution(original: Callable[P, T]) -> Callable[P, T]:
    """Wrap TensorFlow's execution of an operation so that it raises refusals as errors of layoutmap."""

    @functools.wraps(original)
    def execute_and_translate_refusals(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return original(*args, **kwargs)
        except _KINDS as error:
            raise convert_refusal_to_engine_error(error) from None

    return execute_and_translate_refusals


def _wrap_error_interpolation_exit(original: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap the `__exit__` of TensorFlow's error interpolation so that it skips refusals.

    The interpolation searches for tags from each character of the message. For the 400 kB that DTensor's compiler
    writes about a large step, this takes a quarter of an hour.
    """

    @functools.wraps(original)
    def exit_and_skip_refusals(self: object, kind: object, error: object, traceback: object) -> bool:
        return not isinstance(error, _RefusalError) and original(self, kind, error, traceback)

    return exit_and_skip_refusals


_PATCHES = (
    AttributePatch(core, "_status_to_exception", _wrap_status_conversion),
    AttributePatch(execute, "execute", _wrap_operation_execution),
    AttributePatch(InterpolateRuntimeError, "__exit__", _wrap_error_interpolation_exit),
)


# Programs may use tensors on a mesh after all scopes, so the patches stay until the process ends (decisions/0300).
def install_refusal_patches() -> None:
    """Install patches that convert refusals of DTensor. The first mesh of the process calls this."""
    for patch in _PATCHES:
        patch.install()
