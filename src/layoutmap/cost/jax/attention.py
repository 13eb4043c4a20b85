"""Name the attention calls of a traced step, so that each can be counted as one fused operation.

A fused kernel (flash attention) takes queries, keys, values and a bias, and keeps no scores in memory, but computes
them again in the backward pass. `Memory` counts what is named `FUSED` so: of what is computed inside of it only what it
returns is held.

Private names of JAX, tested on 0.9.2 and 0.10.2; where they are missing, no call is known:

    jax._src.nn.functions._dot_product_attention_xla     what jax.nn.dot_product_attention calls: scores are in memory
    jax._src.nn.functions.cudnn_dot_product_attention    the fused kernel, which can be traced where there is a GPU
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from layoutmap.cost.jax.graph import FUSED
from layoutmap.cost.table import FUSED_ATTENTION, SCORED_ATTENTION
from layoutmap.engines.patches import Attribute, Patches

try:
    from jax._src.nn import functions as _functions
except ImportError:
    _functions: object = None

_Given = Array | None
_XLA, _KERNEL = "_dot_product_attention_xla", "cudnn_dot_product_attention"


@dataclass
# A fused kernel stores no scores, so a call counts as fused only if the model or you ask for one (decisions/0165).
class AttentionCalls:
    """Attention calls of a step while it is traced."""

    fuses: bool  # count each call as one fused operation, although the model calls no such kernel
    held: int = 0  # number of calls that keep their scores in memory
    fused: int = 0  # number of calls that do not

    @property
    def notes(self) -> list[str]:
        """Assumptions about fused kernels, in sentences."""
        fused = f"{FUSED_ATTENTION}{', whatever the model calls (fuse_attention)' * self.fuses}"
        return [fused] * bool(self.fused) + [SCORED_ATTENTION] * bool(self.held)


_calls: ContextVar[AttentionCalls | None] = ContextVar("layoutmap_traces_attention", default=None)


@contextmanager
def name_attention_calls(fuses: bool) -> Generator[AttentionCalls]:
    """Name the attention calls on this thread until the block ends, and yield their counts."""
    calls = AttentionCalls(fuses)
    token = _calls.set(calls)
    try:
        with _PATCHES.activate():
            yield calls
    finally:
        _calls.reset(token)


def _wrap_xla_attention(plain: Callable[..., object]) -> Callable[..., object]:
    def call_attention(
        query: Array, key: Array, value: Array, bias: _Given, mask: _Given, *more: object, **options: Any
    ) -> object:
        calls = _calls.get()
        if calls is None or not calls.fuses:
            if calls is not None:
                calls.held += 1
            return plain(query, key, value, bias, mask, *more, **options)
        calls.fused += 1
        return _name_fused_attention(
            lambda *given: plain(*given, None, *more, **options), query, key, value, bias, mask
        )

    return call_attention


def _wrap_fused_kernel(plain: Callable[..., object]) -> Callable[..., object]:
    def call_attention(
        query: Array, key: Array, value: Array, bias: _Given, mask: _Given, *more: object, **options: Any
    ) -> object:
        calls = _calls.get()
        if calls is None:
            return plain(query, key, value, bias, mask, *more, **options)
        calls.fused += 1
        scale, residual = options["scale"], options.get("return_residual", False)
        return _name_fused_attention(
            # The mask does not change the count.
            lambda *given: _PLAIN(*given, None, False, scale, None, None, None, residual),
            query,
            key,
            value,
            bias,
            mask,
        )

    return call_attention


def _name_fused_attention(
    function: Callable[..., object], query: Array, key: Array, value: Array, bias: _Given, mask: _Given
) -> object:
    """Return the result of attention, recomputed in the backward pass. The mask becomes a bias."""
    if mask is not None:
        bias = jnp.where(mask, 0 if bias is None else bias, -jnp.inf).astype(query.dtype)
    with jax.named_scope(FUSED):
        # The barrier keeps XLA from merging the recomputation with the original.
        return jax.checkpoint(function)(query, key, value, bias)


_THERE = hasattr(_functions, _XLA) and hasattr(_functions, _KERNEL)
_PLAIN: Any = getattr(_functions, _XLA, None)
_PATCHES = Patches(
    [Attribute(_functions, _XLA, _wrap_xla_attention), Attribute(_functions, _KERNEL, _wrap_fused_kernel)]
    if _THERE
    else []
)
