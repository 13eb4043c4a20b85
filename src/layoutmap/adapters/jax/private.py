"""What is not public in JAX and used here all the same, found in jax 0.10.

`jax._src.interpreters.partial_eval.DynamicJaxprTracer._origin_msg`: the part of an error message that says from which
operations a traced array comes. Flax asks each array for its sharding; a traced one has none, and JAX walks all
operations so far for a message that nobody reads, so the time of a trace grows with the square of their number: 90 s
rather than 3 for a Llama of 70B. While models are traced here, the message is without that part. If the name is gone,
traces are slow again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from layoutmap.core.patches import Attribute, Patches

_NAME = "_origin_msg"


def _short(plain: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda tracer: ""


def _patches() -> Patches | None:
    try:
        from jax._src.interpreters.partial_eval import DynamicJaxprTracer
    except ImportError:
        return None
    return (
        Patches([Attribute(DynamicJaxprTracer, _NAME, _short)]) if _NAME in vars(DynamicJaxprTracer) else None
    )


_PATCHES = _patches()


def short_messages() -> AbstractContextManager[None]:
    """While open, errors of JAX do not say from which operations a traced array comes."""
    return _PATCHES.used() if _PATCHES is not None else nullcontext()
