"""Dynamo, the part of `torch.compile` that reads Python: stopped and resumed, and asked how it compiles."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from layoutmap.engines.tested import Needed
from layoutmap.engines.torch.deferred_init import UNFORESEEN
from layoutmap.engines.torch.operators import Function

with Needed("torch"):
    from torch._C._dynamo.eval_frame import set_eval_frame
    from torch._dynamo import config as dynamo_config
    from torch._dynamo import nonstrict_trace as nonstrict_trace
    from torch._dynamo.convert_frame import ConvertFrameAssert
    from torch._dynamo.eval_frame import make_set_enable_dynamic, skip_code

R = TypeVar("R")

_make_static = make_set_enable_dynamic(False)  # as torch.compile(dynamic=False) does around each call


def not_compiled(function: Function) -> None:
    """Have Dynamo leave a function as it is where it would begin with it."""
    skip_code(inspect.unwrap(function).__code__)  # a decorator has one code object for all that it wraps


def stop_compiling() -> object:
    """Have Dynamo compile nothing on this thread; returns what compiled what is called so far, or `None`."""
    return set_eval_frame(None)


def go_on_compiling(compiler: Any) -> None:
    """Have Dynamo compile again by what `stop_compiling` has returned."""
    set_eval_frame(compiler)


def call_compiled(compiler: Any, function: Callable[[Any], R], argument: object) -> R:
    """Call a function, compiled by what `stop_compiling` has returned, for the shapes of its argument."""
    make_as_before = _make_static()
    set_eval_frame(compiler)
    try:
        return function(argument)
    finally:
        set_eval_frame(None)
        make_as_before()


def makes_one_graph(compiler: object) -> bool:
    """Whether what `stop_compiling` has returned is to make one graph (`fullgraph=True`), or fail."""
    while compiler and not isinstance(compiler, ConvertFrameAssert):
        compiler = getattr(compiler, "_torchdynamo_orig_backend", None)  # its callbacks wrap each other
    return bool(compiler)


def has_dynamic_shapes() -> bool:
    """Whether what is compiled now is compiled for all shapes (`dynamic=True`)."""
    return not dynamo_config.assume_static_by_default


def unforeseen(error: Exception) -> str:
    """The operator that a backend could not record a gradient for, without values; empty: it failed otherwise."""
    inner = getattr(error, "inner_exception", None)
    return str(inner) if isinstance(inner, UNFORESEEN) else ""
