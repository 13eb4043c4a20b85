"""Name the attention calls of a traced step, so that each can be counted as one fused operation.

A fused kernel (flash attention) stores no scores, and recomputes them in the backward pass. So of the operations in the
scope `FUSED_SCOPE`, `BlockMemory` counts only the results that operations outside of it use.

Private names of JAX, tested on 0.10.2. If they are missing, no call is found:

    jax._src.nn.functions._dot_product_attention_xla     called by jax.nn.dot_product_attention, stores scores
    jax._src.nn.functions.cudnn_dot_product_attention    the fused kernel, which can be traced only with a GPU
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

from layoutmap.cost.jax.graph import FUSED_SCOPE
from layoutmap.cost.table import FUSED_ATTENTION, SCORED_ATTENTION
from layoutmap.engines.patches import AttributePatch, PatchGroup

try:
    from jax._src.nn import functions as _functions
except ImportError:
    _functions: object = None

_Bias = Array | None
_XLA, _KERNEL = "_dot_product_attention_xla", "cudnn_dot_product_attention"


@dataclass
# A fused kernel needs less memory, so count a call as fused only if the model or the user says so (decisions/0165).
class AttentionCallCounts:
    """Numbers of the attention calls in a step, by kind, counted while it is traced."""

    fuses_all_calls: bool  # whether each call counts as fused, even if the model calls no fused kernel
    num_scored: int = 0  # number of calls that store the attention scores
    num_fused: int = 0  # number of fused calls, which store no attention scores

    @property
    def notes(self) -> list[str]:
        """Notes on how attention was counted, in sentences."""
        fused = f"{FUSED_ATTENTION}{', whatever the model calls (fuse_attention)' * self.fuses_all_calls}"
        return [fused] * bool(self.num_fused) + [SCORED_ATTENTION] * bool(self.num_scored)


_calls: ContextVar[AttentionCallCounts | None] = ContextVar("layoutmap_traces_attention", default=None)


@contextmanager
def label_and_count_attention_calls(fuses_all_calls: bool) -> Generator[AttentionCallCounts]:
    """Put this thread's attention calls into a named scope until the block ends, and yield their counts."""
    calls = AttentionCallCounts(fuses_all_calls)
    token = _calls.set(calls)
    try:
        with _PATCHES.activate():
            yield calls
    finally:
        _calls.reset(token)


def _wrap_xla_attention(original: Callable[..., object]) -> Callable[..., object]:
    def call_or_fuse_attention(
        query: Array, key: Array, value: Array, bias: _Bias, mask: _Bias, *more: object, **options: Any
    ) -> object:
        calls = _calls.get()
        if calls is None or not calls.fuses_all_calls:
            if calls is not None:
                calls.num_scored += 1
            return original(query, key, value, bias, mask, *more, **options)
        calls.num_fused += 1
        return _compute_fused_attention(
            lambda *given: original(*given, None, *more, **options), query, key, value, bias, mask
        )

    return call_or_fuse_attention


def _wrap_fused_kernel(original: Callable[..., object]) -> Callable[..., object]:
    def call_or_replace_kernel(
        query: Array, key: Array, value: Array, bias: _Bias, mask: _Bias, *more: object, **options: Any
    ) -> object:
        calls = _calls.get()
        if calls is None:
            return original(query, key, value, bias, mask, *more, **options)
        calls.num_fused += 1
        scale, residual = options["scale"], options.get("return_residual", False)
        return _compute_fused_attention(
            # Pass no causal mask and no sequence lengths to the kernel, because the cost does not depend on them.
            lambda *given: _ORIGINAL_ATTENTION(*given, None, False, scale, None, None, None, residual),
            query,
            key,
            value,
            bias,
            mask,
        )

    return call_or_replace_kernel


def _compute_fused_attention(
    compute_attention: Callable[..., object], query: Array, key: Array, value: Array, bias: _Bias, mask: _Bias
) -> object:
    """Return the result of attention, computed in the scope of fused operations and recomputed in the backward pass."""
    if mask is not None:
        bias = jnp.where(mask, 0 if bias is None else bias, -jnp.inf).astype(query.dtype)
    with jax.named_scope(FUSED_SCOPE):
        # `jax.checkpoint` adds a barrier, so that XLA does not replace the recomputation by values of the forward pass.
        return jax.checkpoint(compute_attention)(query, key, value, bias)


_HAS_FUNCTIONS = hasattr(_functions, _XLA) and hasattr(_functions, _KERNEL)
_ORIGINAL_ATTENTION: Any = getattr(_functions, _XLA, None)
_PATCHES = PatchGroup(
    [
        AttributePatch(_functions, _XLA, _wrap_xla_attention),
        AttributePatch(_functions, _KERNEL, _wrap_fused_kernel),
    ]
    if _HAS_FUNCTIONS
    else []
)
