"""Functions that are to give on DTensors what they give on plain tensors: each with arguments, named for their role.

Those of one operator are in `test_op_database`, and what follows one another in `test_random_programs`.

Arguments are given in order, and are float64, so that rounding hides nothing. The first letter of a name says what it
is:
x  along the batch with its first axis, with a gradient
t  the same without a gradient: labels, masks
w  a weight, with a gradient
c  whole everywhere, without a gradient
s  a running statistic, changed in place
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["CASES"]

Case = tuple[Callable[..., Any], dict[str, torch.Tensor]]

CASES: dict[str, Case] = {}
_generator = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def uniform(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_generator, dtype=torch.float64) * 0.98 + 0.01


def labels(number: int, *shape: int) -> torch.Tensor:
    return torch.randint(number, shape, generator=_generator)


def some_ignored(*shape: int) -> torch.Tensor:
    found = labels(6, *shape)
    found[:3] = -100
    found[5] = -100
    return found


def add(name: str, function: Callable[..., Any], **tensors: torch.Tensor) -> None:
    CASES[name] = (function, tensors)


def add_unary(name: str, function: Callable[..., Any], *shape: int, **tensors: torch.Tensor) -> None:
    add(name, function, x=normal(*shape), **tensors)


# -- functions that DTensor computes wrongly by itself

add("mse_loss mean", F.mse_loss, x=normal(8, 6), x2=normal(8, 6))
add("l1_loss mean", F.l1_loss, x=normal(8, 6), x2=normal(8, 6))
add("cross_entropy, labels ignored mean", F.cross_entropy, x=normal(8, 6), t=some_ignored(8))
_channels = {"w": normal(4), "w2": normal(4)}
_statistics = {"s": normal(4), "s2": uniform(4)}


def _tracked(norm, **more):
    def function(x, s, s2, w=None, w2=None):
        return norm(x, s, s2, w, w2, **more), s, s2

    return function


add("batch_norm of rank 2", _tracked(F.batch_norm, training=True), x=normal(8, 4), **_statistics, **_channels)
add("instance_norm, tracked", _tracked(F.instance_norm), x=normal(8, 4, 6), **_statistics)
add("group_norm", lambda x, w, w2: F.group_norm(x, 2, w, w2), x=normal(8, 4, 6), **_channels)
add_unary("vector_norm inf", lambda x: torch.linalg.vector_norm(x, float("inf")), 8, 6)
add_unary("hardtanh", F.hardtanh, 8, 4, 6)
add_unary("avg_pool2d", lambda x: F.avg_pool2d(x, 2), 8, 4, 6, 6)
add_unary("unfold", lambda x: F.unfold(x, 2), 8, 4, 6, 6)
add_unary("pad reflect", lambda x: F.pad(x, (1, 2, 1, 1), mode="reflect"), 8, 4, 6, 6)
_sequence_conv = {"x": normal(8, 4, 6), "w": normal(6, 4, 3), "w2": normal(6)}
add("conv1d", lambda x, w, w2: F.conv1d(x, w, w2, padding=1), **_sequence_conv)
_tokens = {"t": labels(12, 8, 4), "w": normal(12, 6)}
add("embedding, scaled gradient", lambda t, w: F.embedding(t, w, scale_grad_by_freq=True), **_tokens)


def _embedding_twice(t, w):
    embedded = F.embedding(t, w)
    return embedded * 2 + torch.relu(embedded), embedded


add("embedding, used twice", _embedding_twice, **_tokens)


def _lstm(x, w, w2, w3, w4):
    state = torch.zeros(1, 8, 4, dtype=x.dtype)
    return torch.lstm(x, (state, state), [w, w2, w3, w4], True, 1, 0.0, True, False, True)


_gates = {"w": normal(16, 4), "w2": normal(16, 4), "w3": normal(16), "w4": normal(16)}
add("lstm", _lstm, x=normal(8, 6, 4), **_gates)
_attend = F.scaled_dot_product_attention
_heads = {"x": normal(8, 4, 6, 2), "x2": normal(8, 4, 6, 2), "x3": normal(8, 4, 6, 2)}
_grouped = {"x": normal(8, 4, 6, 2), "x2": normal(8, 2, 6, 2), "x3": normal(8, 2, 6, 2)}
add("attention", lambda x, x2, x3: _attend(x, x2, x3), **_heads)


def _multi_head(need_weights, dropout_p=0.0):
    def function(x, w, w2, w3, w4):
        return F.multi_head_attention_forward(
            *(x, x, x, 8, 2, w, w2, None, None, False, dropout_p, w3, w4), need_weights=need_weights
        )

    return function


_projections = {"w": normal(24, 8), "w2": normal(24), "w3": normal(8, 8), "w4": normal(8)}
add("multi_head_attention", _multi_head(False), x=normal(8, 8, 8), **_projections)
add_unary("dropout", lambda x: F.dropout(x, 0.4), 8, 4, 6)
_rows = {"x": normal(8, 6), "t": labels(8, 4, 6), "x2": normal(4, 6)}
add("index_add_", lambda x, t, x2: (x * 1).index_add_(0, t[:, 0], x2), **_rows)
add_unary("quantile", lambda x: torch.quantile(x, 0.3, 0), 8, 6)
add_unary("reshaped twice", lambda x: x.view(-1).view(4, 16) @ x.view(16, 4), 8, 8)
add_unary("lerp by itself", lambda x: torch.lerp(x, torch.ones_like(x), x), 8, 6)
add_unary(
    "any, times a number",
    lambda x: ((x > -1).any(1) * 2.5, (x > -1).any(0) * x, (x < 1).all(1) * 1.5),
    *(8, 6),
)


# -- masks and options in which torch's database of operators has no sample

add("attention, a mask of scores", lambda x, x2, x3, c: _attend(x, x2, x3, c), **_heads, c=normal(6, 6))
add(
    "attention, a mask of the batch",
    lambda x, x2, x3, t: _attend(x, x2, x3, attn_mask=t),
    **_heads,
    t=uniform(8, 1, 6, 6) > 0.3,
)
_of_one_head = {"x": normal(8, 4, 6, 2), "x2": normal(8, 1, 6, 2), "x3": normal(8, 1, 6, 2)}
add("attention, one key for all heads", lambda x, x2, x3: _attend(x, x2, x3, enable_gqa=True), **_of_one_head)
add("attention, dropout", lambda x, x2, x3: _attend(x, x2, x3, dropout_p=0.3, is_causal=True), **_heads)
add(
    "attention, dropout, grouped, some rows masked",
    lambda x, x2, x3, t: _attend(x, x2, x3, t, dropout_p=0.3, enable_gqa=True),
    **_grouped,
    t=torch.arange(6).expand(8, 1, 6, 6).lt(torch.arange(6)[:, None]),
)
add("multi_head_attention, dropout, with weights", _multi_head(True, 0.3), x=normal(8, 8, 8), **_projections)
add("multi_head_attention, dropout", _multi_head(False, 0.3), x=normal(8, 8, 8), **_projections)
add("dropout, in place, other strides", lambda x: F.dropout((x * 1).mT, 0.4, inplace=True), x=normal(8, 4, 6))
add_unary("dropout, transposed", lambda x: F.dropout(x.mT, 0.4), 8, 6)


def _channels_last(x):
    return (x * 1).to(memory_format=torch.channels_last)


add_unary("dropout of images, channels last", lambda x: F.dropout(_channels_last(x), 0.4), 8, 4, 2, 2)
add("gumbel_softmax", lambda x: F.gumbel_softmax(x, hard=True, dim=2), x=normal(8, 4, 6, 2))
add("rand_like and its like", lambda x: x * torch.rand_like(x) + torch.randn_like(x), x=normal(8, 4, 6))
add(
    "initializers",
    lambda x: nn.init.trunc_normal_(nn.init.xavier_uniform_(torch.empty_like(x))),
    x=normal(8, 6),
)
add(
    "initializers of kaiming",
    lambda x: nn.init.kaiming_normal_(nn.init.kaiming_uniform_(torch.empty_like(x), a=1), mode="fan_out"),
    x=normal(8, 6),
)
add(
    "of a list of values",
    lambda x: (
        torch.tensor([x.detach().sum(), 1]),
        torch.as_tensor([[x.detach()[0, 0]], [2.0]]),
        x.new_tensor([x.detach().mean()]),
    ),
    x=normal(8, 6),
)
