"""Control Dynamo, the tracer of `torch.compile`: turn it off and on, and query its settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from layoutmap.engines.tested import ImportErrorConverter
from layoutmap.engines.torch.deferred_init import UNSUPPORTED_ERRORS
from layoutmap.engines.torch.operators import Function

with ImportErrorConverter("torch"):
    from torch._C._dynamo.eval_frame import set_eval_frame
    from torch._dynamo import config as dynamo_config
    from torch._dynamo import nonstrict_trace as nonstrict_trace
    from torch._dynamo.convert_frame import ConvertFrameAssert
    from torch._dynamo.eval_frame import make_set_enable_dynamic, skip_code

R = TypeVar("R")

# This makes shapes static, and returns a function that undoes it. torch.compile(dynamic=False) does so in each call.
_make_static = make_set_enable_dynamic(False)


def skip_compiling(function: Function) -> None:
    """Make Dynamo run a function without compiling it."""
    # All functions wrapped by one decorator share the wrapper's code object, so skip that of the inner function.
    skip_code(inspect.unwrap(function).__code__)


def disable_dynamo_in_thread() -> object:
    """Turn Dynamo off on this thread, and return its current compiler, or None if it was off already."""
    return set_eval_frame(None)


def restore_dynamo(compiler: Any) -> None:
    """Turn Dynamo on with the compiler that `disable_dynamo_in_thread` returned. `None`: leave it off."""
    set_eval_frame(compiler)


def call_with_dynamo_compiler(compiler: Any, function: Callable[[Any], R], argument: object) -> R:
    """Call a function, compiled for static shapes by a compiler that `disable_dynamo_in_thread` returned."""
    restore_dynamic_shapes = _make_static()
    set_eval_frame(compiler)
    try:
        return function(argument)
    finally:
        set_eval_frame(None)
        restore_dynamic_shapes()


def needs_full_graph(compiler: object) -> bool:
    """Return whether a compiler that `disable_dynamo_in_thread` returned was created with `fullgraph=True`."""
    while compiler and not isinstance(compiler, ConvertFrameAssert):
        # Dynamo's callbacks wrap each other. With `fullgraph=True`, one is a `ConvertFrameAssert`, so search for it.
        compiler = getattr(compiler, "_torchdynamo_orig_backend", None)
    return bool(compiler)


def is_compiling_dynamic_shapes() -> bool:
    """Return whether the current compilation is for all shapes (`dynamic=True`)."""
    return not dynamo_config.assume_static_by_default


def find_unsupported_operator_message(error: Exception) -> str:
    """Return the message of an error that says that an operator's gradient cannot be traced, else an empty text."""
    inner = getattr(error, "inner_exception", None)
    return str(inner) if isinstance(inner, UNSUPPORTED_ERRORS) else ""
