"""Functions that are to give on DTensors what they give on plain tensors: each with arguments, named for their role.

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

__all__ = ["CASES", "WRONG_ONCE", "Case"]

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


def signs(*shape: int) -> torch.Tensor:
    return torch.sign(normal(*shape))


def add(name: str, function: Callable[..., Any], **tensors: torch.Tensor) -> None:
    CASES[name] = (function, tensors)


# -- losses

_ALL = ("mean", "sum", "none")


def add_loss(
    name: str,
    function: Callable[..., Any],
    *,
    reductions: tuple[str, ...] = ("mean",),
    **tensors: torch.Tensor,
) -> None:
    for reduction in reductions:

        def reduced(*given, reduction=reduction):
            return function(*given, reduction=reduction)

        add(f"{name} {reduction}", reduced, **tensors)


def _weighted(**more):
    return lambda x, t, c, reduction: F.cross_entropy(x, t, c, reduction=reduction, **more)


for _name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
    add_loss(
        _name,
        getattr(F, _name),
        reductions=_ALL if _name == "mse_loss" else ("mean",),
        x=normal(8, 6),
        x2=normal(8, 6),
    )
_mixed_signs = {"x": normal(8, 6), "t": signs(8, 6)}
_fractions = {"x": uniform(8, 6), "t": uniform(8, 6)}
add_loss("soft_margin_loss", F.soft_margin_loss, **_mixed_signs)
add_loss("hinge_embedding_loss", F.hinge_embedding_loss, **_mixed_signs)
add_loss("binary_cross_entropy", F.binary_cross_entropy, reductions=_ALL, **_fractions)
add_loss("binary_cross_entropy_with_logits", F.binary_cross_entropy_with_logits, **_fractions)
add_loss("kl_div", F.kl_div, reductions=("sum",), x=normal(8, 6), t=uniform(8, 6))
add_loss(
    "poisson_nll_loss", lambda x, t, reduction: F.poisson_nll_loss(x, t, reduction=reduction), **_fractions
)
add_loss(
    "gaussian_nll_loss",
    lambda x, x2, x3, reduction: F.gaussian_nll_loss(x, x2, x3, reduction=reduction),
    x=normal(8, 6),
    x2=normal(8, 6),
    x3=uniform(8, 6),
)
add_loss("margin_ranking_loss", F.margin_ranking_loss, x=normal(8), x2=normal(8), t=signs(8))
add_loss("cosine_embedding_loss", F.cosine_embedding_loss, x=normal(8, 6), x2=normal(8, 6), t=signs(8))
add_loss("triplet_margin_loss", F.triplet_margin_loss, x=normal(8, 6), x2=normal(8, 6), x3=normal(8, 6))
add_loss("multi_margin_loss", F.multi_margin_loss, x=normal(8, 6), t=labels(6, 8))
add_loss("multilabel_soft_margin_loss", F.multilabel_soft_margin_loss, **_fractions)
add_loss("cross_entropy", F.cross_entropy, x=normal(8, 6), t=labels(6, 8))
add_loss("cross_entropy, labels ignored", F.cross_entropy, reductions=_ALL, x=normal(8, 6), t=some_ignored(8))
add_loss("cross_entropy, several axes", F.cross_entropy, x=normal(8, 6, 4), t=some_ignored(8, 4))
add_loss("cross_entropy, probabilities", F.cross_entropy, x=normal(8, 6), t=torch.softmax(normal(8, 6), -1))
add_loss("cross_entropy, weights", _weighted(), x=normal(8, 6), t=some_ignored(8), c=uniform(6))
add_loss(
    "cross_entropy, smoothing",
    _weighted(label_smoothing=0.1),
    x=normal(8, 6),
    t=some_ignored(8),
    c=uniform(6),
)
add_loss("nll_loss, labels ignored", F.nll_loss, x=normal(8, 6), t=some_ignored(8))
add_loss("nll_loss, several axes", F.nll_loss, x=normal(8, 6, 4, 2), t=labels(6, 8, 4, 2))
add("kl_div batchmean", lambda x, t: F.kl_div(x, t, reduction="batchmean"), x=normal(8, 6), t=uniform(8, 6))
add(
    "mse_loss, said in the old way",
    lambda x, x2: F.mse_loss(x, x2, None, None),
    x=normal(8, 6),
    x2=normal(8, 6),
)
add(
    "mse_loss, weighted",
    lambda x, x2, c: F.mse_loss(x, x2, weight=c),
    x=normal(8, 6),
    x2=normal(8, 6),
    c=uniform(8, 6),
)

# -- activations

for _name in (
    *(
        "relu",
        "leaky_relu",
        "elu",
        "selu",
        "gelu",
        "silu",
        "mish",
        "softplus",
        "hardtanh",
        "relu6",
        "hardswish",
    ),
    *("hardsigmoid", "logsigmoid", "hardshrink", "softshrink", "glu"),
):
    add(_name, lambda x, name=_name: getattr(F, name)(x), x=normal(8, 4, 6))
add("prelu", F.prelu, x=normal(8, 4, 6), w=uniform(4))
add("softmax", lambda x: F.softmax(x, -1), x=normal(8, 4, 6))
add("softmax of the batch", lambda x: F.log_softmax(x, 0), x=normal(8, 4, 6))

# -- norms

_channels = {"w": normal(4), "w2": normal(4)}
add("layer_norm", lambda x, w, w2: F.layer_norm(x, (6,), w, w2), x=normal(8, 4, 6), w=normal(6), w2=normal(6))
add("rms_norm", lambda x, w: F.rms_norm(x, (6,), w), x=normal(8, 4, 6), w=normal(6))
add("group_norm", lambda x, w, w2: F.group_norm(x, 2, w, w2), x=normal(8, 4, 6), **_channels)
add("instance_norm", lambda x: F.instance_norm(x), x=normal(8, 4, 6))


def _tracked(norm, **more):
    def function(x, s, s2, w=None, w2=None):
        return norm(x, s, s2, w, w2, **more), s, s2

    return function


for _shape in ((8, 4), (8, 4, 6), (8, 4, 3, 2), (8, 4, 2, 2, 3)):
    add(
        f"batch_norm of rank {len(_shape)}",
        _tracked(F.batch_norm, training=True),
        x=normal(*_shape),
        s=normal(4),
        s2=uniform(4),
        **_channels,
    )
add(
    "batch_norm in inference",
    _tracked(F.batch_norm),
    x=normal(8, 4, 6),
    s=normal(4),
    s2=uniform(4),
    **_channels,
)
add("instance_norm, tracked", _tracked(F.instance_norm), x=normal(8, 4, 6), s=normal(4), s2=uniform(4))
add("normalize", lambda x: F.normalize(x, dim=-1), x=normal(8, 4, 6))
add("normalize of the batch", lambda x: F.normalize(x, dim=0), x=normal(8, 4, 6))
add("local_response_norm", lambda x: F.local_response_norm(x, 2), x=normal(8, 4, 6))
add("cosine_similarity", F.cosine_similarity, x=normal(8, 6), x2=normal(8, 6))
add("pairwise_distance", F.pairwise_distance, x=normal(8, 6), x2=normal(8, 6))
add("cdist", torch.cdist, x=normal(8, 6), x2=normal(8, 6))
for _order in (1, 2, 3, float("inf")):
    add(f"vector_norm {_order}", lambda x, order=_order: torch.linalg.vector_norm(x, order), x=normal(8, 6))


def _native(x, w, w2, s, s2):
    return torch.native_batch_norm(x, w, w2, s, s2, True, 0.1, 1e-5)[0], s, s2


def _channels_last(x):
    return (x * 1).to(memory_format=torch.channels_last)


# -- images and sequences

for _name in ("avg_pool2d", "max_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "unfold"):
    add(_name, lambda x, name=_name: getattr(F, name)(x, 2), x=normal(8, 4, 6, 6))
for _name in ("avg_pool1d", "max_pool1d"):
    add(_name, lambda x, name=_name: getattr(F, name)(x, 2), x=normal(8, 4, 6))
for _name in ("avg_pool3d", "max_pool3d"):
    add(_name, lambda x, name=_name: getattr(F, name)(x, 2), x=normal(8, 2, 4, 4, 4))
add("lp_pool2d", lambda x: F.lp_pool2d(x.abs() + 0.1, 2, 2), x=normal(8, 4, 6, 6))
add("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), x=normal(8, 4, 6, 6))
for _name in ("nearest", "bilinear", "bicubic", "area"):
    add(
        f"interpolate {_name}",
        lambda x, name=_name: F.interpolate(x, scale_factor=2, mode=name),
        x=normal(8, 4, 6, 6),
    )
for _name in ("constant", "reflect", "replicate", "circular"):
    add(f"pad {_name}", lambda x, name=_name: F.pad(x, (1, 2, 1, 1), mode=name), x=normal(8, 4, 6, 6))
add(
    "grid_sample",
    lambda x, x2: F.grid_sample(x, x2.clamp(-0.9, 0.9), align_corners=False),
    x=normal(8, 4, 6, 6),
    x2=normal(8, 6, 5, 2),
)
add(
    "conv1d",
    lambda x, w, w2: F.conv1d(x, w, w2, padding=1),
    x=normal(8, 4, 6),
    w=normal(6, 4, 3),
    w2=normal(6),
)
_image_conv = {"x": normal(8, 4, 6, 6), "w": normal(6, 4, 3, 3), "w2": normal(6)}
add("conv2d", lambda x, w, w2: F.conv2d(x, w, w2, stride=2), **_image_conv)
add("conv2d, same", lambda x, w, w2: F.conv2d(x, w, bias=w2, padding="same"), **_image_conv)
add(
    "conv2d, depthwise",
    lambda x, w, w2: F.conv2d(x, w, w2, groups=4),
    x=normal(8, 4, 6, 6),
    w=normal(4, 1, 3, 3),
    w2=normal(4),
)
add("conv_transpose2d", F.conv_transpose2d, x=normal(8, 4, 6, 6), w=normal(4, 6, 3, 3), w2=normal(6))

# -- layers

add("linear", F.linear, x=normal(8, 4, 6), w=normal(8, 6), w2=normal(8))
add("bilinear", F.bilinear, x=normal(8, 6), x2=normal(8, 4), w=normal(4, 6, 4))
_tokens = {"t": labels(12, 8, 4), "w": normal(12, 6)}
add("embedding", F.embedding, **_tokens)
add("embedding, padded", lambda t, w: F.embedding(t, w, padding_idx=3), **_tokens)
add("embedding, scaled gradient", lambda t, w: F.embedding(t, w, scale_grad_by_freq=True), **_tokens)
add("embedding_bag", F.embedding_bag, **_tokens)


def _embedding_twice(t, w):
    embedded = F.embedding(t, w)
    return embedded * 2 + torch.relu(embedded), embedded


add("embedding, used twice", _embedding_twice, **_tokens)
_gates = {"lstm": 4, "gru": 3, "rnn_tanh": 1}


def _recurrent(name, batch_first=True):
    def function(x, w, w2, w3, w4):
        state = torch.zeros(1, 8, 4, dtype=x.dtype)
        states = (state, state) if name == "lstm" else state
        layers = [w, w2, w3, w4]
        return getattr(torch, name)(x, states, layers, True, 1, 0.0, True, False, batch_first)

    return function


for _name, _number in _gates.items():
    add(
        _name,
        _recurrent(_name),
        x=normal(8, 6, 4),
        w=normal(4 * _number, 4),
        w2=normal(4 * _number, 4),
        w3=normal(4 * _number),
        w4=normal(4 * _number),
    )

# -- attention

_heads = {"x": normal(8, 4, 6, 2), "x2": normal(8, 4, 6, 2), "x3": normal(8, 4, 6, 2)}
_grouped = {"x": normal(8, 4, 6, 2), "x2": normal(8, 2, 6, 2), "x3": normal(8, 2, 6, 2)}
_of_one_head = {"x": normal(8, 4, 6, 2), "x2": normal(8, 1, 6, 2), "x3": normal(8, 1, 6, 2)}
_attend = F.scaled_dot_product_attention
add("attention", lambda x, x2, x3: _attend(x, x2, x3), **_heads)
add("attention, causal", lambda x, x2, x3: _attend(x, x2, x3, is_causal=True, scale=0.3), **_heads)
add("attention, a mask of scores", lambda x, x2, x3, c: _attend(x, x2, x3, c), **_heads, c=normal(6, 6))
add(
    "attention, a mask of the batch",
    lambda x, x2, x3, t: _attend(x, x2, x3, attn_mask=t),
    **_heads,
    t=uniform(8, 1, 6, 6) > 0.3,
)
add("attention, grouped", lambda x, x2, x3: _attend(x, x2, x3, enable_gqa=True), **_grouped)


add("attention, one key for all heads", lambda x, x2, x3: _attend(x, x2, x3, enable_gqa=True), **_of_one_head)
add("attention, dropout", lambda x, x2, x3: _attend(x, x2, x3, dropout_p=0.3, is_causal=True), **_heads)
add(
    "attention, dropout, grouped, some rows masked",
    lambda x, x2, x3, t: _attend(x, x2, x3, t, dropout_p=0.3, enable_gqa=True),
    **_grouped,
    t=torch.arange(6).expand(8, 1, 6, 6).lt(torch.arange(6)[:, None]),
)


def _multi_head(need_weights, dropout_p=0.0):
    def function(x, w, w2, w3, w4):
        return F.multi_head_attention_forward(
            *(x, x, x, 8, 2, w, w2, None, None, False, dropout_p, w3, w4), need_weights=need_weights
        )

    return function


_projections = {"w": normal(24, 8), "w2": normal(24), "w3": normal(8, 8), "w4": normal(8)}
add("multi_head_attention, with weights", _multi_head(True), x=normal(8, 8, 8), **_projections)
add("multi_head_attention", _multi_head(False), x=normal(8, 8, 8), **_projections)

add("multi_head_attention, dropout, with weights", _multi_head(True, 0.3), x=normal(8, 8, 8), **_projections)
add("multi_head_attention, dropout", _multi_head(False, 0.3), x=normal(8, 8, 8), **_projections)

# -- what draws

for _name in ("dropout", "dropout1d", "alpha_dropout", "feature_alpha_dropout"):
    add(_name, lambda x, name=_name: getattr(F, name)(x, 0.4, training=True), x=normal(8, 4, 6))
add("dropout, in inference", lambda x: F.dropout(x, 0.4, training=False), x=normal(8, 4, 6))
add("dropout, in place, other strides", lambda x: F.dropout((x * 1).mT, 0.4, inplace=True), x=normal(8, 4, 6))
add("rrelu", lambda x: F.rrelu(x, training=True), x=normal(8, 4, 6))
add("gumbel_softmax", lambda x: F.gumbel_softmax(x, hard=True, dim=2), x=normal(8, 4, 6, 2))
add("rand_like and its like", lambda x: x * torch.rand_like(x) + torch.randn_like(x), x=normal(8, 4, 6))
add("multinomial", lambda x: torch.multinomial(torch.softmax(x, -1), 2), x=normal(8, 6))
add(
    "initializers",
    lambda x: nn.init.trunc_normal_(nn.init.xavier_uniform_(torch.empty_like(x))),
    x=normal(8, 6),
)

# -- reductions, and what picks or puts parts

for _name in ("sum", "mean", "prod", "std", "var", "amax", "amin", "max", "logsumexp", "cumsum", "cumprod"):
    add(f"{_name} of the batch", lambda x, name=_name: getattr(torch, name)(x, 0), x=normal(8, 6))
for _name in ("amax", "prod", "cumprod", "cummax"):
    add(f"{_name} of the last axis", lambda x, name=_name: getattr(x, name)(dim=-1), x=normal(8, 4, 6))
add("quantile", lambda x: torch.quantile(x, 0.3, 0), x=normal(8, 6))
for _name in ("mean", "std", "var", "amax", "min", "norm", "median", "argmax"):
    add(_name, lambda x, name=_name: getattr(torch, name)(x), x=normal(8, 6))
add("sort", lambda x: torch.sort(x, 0)[0], x=normal(8, 6))
add("topk", lambda x: torch.topk(x, 3, 1)[0], x=normal(8, 6))
add("gather", lambda x, t: torch.gather(x, 1, t), x=normal(8, 6), t=labels(6, 8, 2))
add(
    "scatter_add",
    lambda x, t, x2: torch.scatter_add(x, 0, t, x2),
    x=normal(8, 6),
    t=labels(8, 8, 6),
    x2=normal(8, 6),
)
_rows = {"x": normal(8, 6), "t": labels(8, 4, 6), "x2": normal(4, 6)}
add("scatter_add of fewer rows", lambda x, t, x2: torch.scatter_add(x, 0, t, x2), **_rows)
add("scatter_add_", lambda x, t, x2: (x * 1).scatter_add_(0, t, x2), **_rows)
add("index_add", lambda x, t, x2: torch.index_add(x, 0, t[:, 0], x2), **_rows)
add("index_add_", lambda x, t, x2: (x * 1).index_add_(0, t[:, 0], x2), **_rows)
add("index_select", lambda x, t, x2: torch.index_select(x, 0, t[:, 0]) * x2, **_rows)
add("take_along_dim", lambda x, t, x2: torch.take_along_dim(x, t, 0) * x2, **_rows)
add("index", lambda x, c: x[c], x=normal(8, 6), c=labels(8, 5))
add("masked_select", lambda x, t: torch.masked_select(x, t), x=normal(8, 6), t=normal(8, 6) > 0)
add("nonzero", torch.nonzero, t=normal(8, 6) > 0)
add("einsum", lambda x, w: torch.einsum("bij,jk->bik", x, w), x=normal(8, 4, 6), w=normal(6, 4))
add("trace", torch.trace, x=normal(8, 8))
add("select_scatter", lambda x, x2: torch.select_scatter(x, x2, 1, 2), x=normal(8, 6), x2=normal(8))


add("reshaped twice", lambda x: x.view(-1).view(4, 16) @ x.view(16, 4), x=normal(8, 8))
add("a sum that is filled", lambda x: (x.sum(0) * 1).fill_(2) + x.sum(0), x=normal(8, 6))


def _assign(x, x2):
    changed = x * 1
    changed[2:4] = x2[:2]
    changed[:, 1:3] = x2[:, :2]
    changed[:, 3] = 0
    changed[x2[:, :1].squeeze(1) > 0] = 1
    changed.add_(x2).clamp_(min=-1)
    return changed


def _mix(x):
    plain = torch.arange(6.0, dtype=x.dtype)
    mask = torch.eye(8, 6).bool()
    changed = torch.zeros(8, 6, dtype=x.dtype)
    changed.copy_(x)
    changed[:2] = x[2:4]
    return (x * plain + torch.ones(8, 1, dtype=x.dtype)).masked_fill(mask, 0.0) * changed


add("assignments", _assign, x=normal(8, 6), x2=normal(8, 6))
add("plain tensors among them", _mix, x=normal(8, 6))


# -- what was wrong without an error until it was found in use, or with torch's database of operators

_before = len(CASES)


def add_unary(name: str, function: Callable[..., Any], *shape: int, **tensors: torch.Tensor) -> None:
    add(name, function, x=normal(*shape), **tensors)


_logits = {"x": normal(8, 6), "t": uniform(8, 6), "c": uniform(6)}
_of_logits = F.binary_cross_entropy_with_logits
add("logits, weighted", lambda x, t, c: _of_logits(x, t, pos_weight=c), **_logits)
add("logits, weighted by class", lambda x, t, c: _of_logits(x, t, c), **_logits)
add_unary("new_ones", lambda x: x * x.new_ones(x.shape), 8, 6)
add_unary("new_full", lambda x: x * x.new_full(x.shape, 2.0), 8, 6)
add_unary("ones_like", lambda x: x * torch.ones_like(x) + torch.full_like(x, 3), 8, 6)
add_unary("a number over it", lambda x: 2.0 / x, 8, 6)
add_unary("a number and it", lambda x: (x + 1.5) * 2 - 0.5, 8, 6)
add("a tensor over it", lambda x, x2: x2 / x, x=normal(8, 6), x2=normal(8, 6))
add("a product", lambda x, x2: x * x2 * x, x=normal(8, 6), x2=normal(8, 6))
add("lerp", torch.lerp, x=normal(8, 6), x2=normal(8, 6), x3=normal(8, 6))
add("lerp by itself", lambda x: torch.lerp(x, torch.ones_like(x), x), x=normal(8, 6))
add(
    "linear of a vector", lambda x, w, w2: F.linear(x[0], w, w2), x=normal(8, 6), w=normal(4, 6), w2=normal(4)
)
add_unary("dropout, transposed", lambda x: F.dropout(x.mT, 0.4), 8, 6)
add_unary("dropout of images, channels last", lambda x: F.dropout(_channels_last(x), 0.4), 8, 4, 2, 2)
add("addcdiv", lambda x, x2, x3: torch.addcdiv(x, x2, x3), x=normal(8, 6), x2=normal(8, 6), x3=normal(8, 6))
add("addcmul", lambda x, x2, x3: torch.addcmul(x, x2, x3), x=normal(8, 6), x2=normal(8, 6), x3=normal(8, 6))
add(
    "batch_norm of waiting statistics",
    _tracked(F.batch_norm, training=True),
    x=normal(8, 4),
    s=normal(4),
    s2=uniform(4),
)
add("native_batch_norm", _native, x=normal(8, 4), w=normal(4), w2=normal(4), s=normal(4), s2=uniform(4))
add("mvlgamma", lambda t: torch.mvlgamma(t, 2), t=uniform(8, 6) + 4)
add("ormqr", torch.ormqr, x=normal(6, 4), w=normal(4), x2=normal(6, 4))
add("householder_product", torch.linalg.householder_product, x=normal(6, 4), w=normal(4))
add_unary("as_strided", lambda x: torch.as_strided(x, (3, 2), (6, 2), 1), 8, 6)
add_unary("as_strided_copy", lambda x: torch.as_strided_copy(x.mT.contiguous(), (3, 2), (4, 2), 1), 8, 6)
add_unary("squeeze_copy", torch.squeeze_copy, 8, 1, 6)
add(
    "masked.logsumexp", lambda x, t: torch.masked.logsumexp(x, 1, mask=t), x=normal(8, 6), t=normal(8, 6) > -1
)
add_unary("cov", torch.cov, 4, 6)
add_unary("rand_like, transposed", lambda x: torch.rand_like(x.mT) * x.mT, 8, 6)
add_unary("half", lambda x: x.half(), 8, 6)
add_unary("half, channels last", lambda x: x.to(torch.half, memory_format=torch.channels_last), 8, 2, 2, 2)
add("copysign", torch.copysign, x=normal(8, 6), x2=normal(8, 6))
add_unary("copysign of a number", lambda x: torch.copysign(x, -1.0), 8, 6)
add_unary("chunk", lambda x: [each * (i + 1) for i, each in enumerate(torch.chunk(x, 3, 0))], 8, 6)
add_unary("slices", lambda x: x[1:7:2, 1:4] * x[:3, 2:5], 8, 6)
add_unary("an index in a list", lambda x: x[[2, 0, 1]], 8, 6)
add("quantiles", lambda x, c: torch.quantile(x, c, 1, keepdim=True), x=normal(8, 6), c=uniform(3))
add_unary("quantiles of all", lambda x: torch.quantile(x, 0.4), 8, 6)
add_unary("extremes", lambda x: (x.amax(0), x.amin((0, 1)), x.max(1)[0], x.min()), 8, 6)
WRONG_ONCE = list(CASES)[_before:]

# Last, since each case draws its tensors after the one before it.
for _name in ("relu", "hardtanh", "relu6", "hardswish", "hardsigmoid"):
    add(f"{_name}, in place", lambda x, name=_name: getattr(F, name)(x * 1, inplace=True), x=normal(8, 4, 6))

# What random programs found.
for _name in ("argmax", "argmin", "cumsum", "cumprod", "logcumsumexp", "softmax", "diff"):
    add(f"{_name} from the end", lambda x, name=_name: getattr(x.view(8, 2, 3), name)(dim=-2), x=normal(8, 6))
add("argmax of few", lambda x: (x[:, :2].argmax(-1), x.view(4, 2, 6).argmin(-2)), x=normal(8, 6))
add(
    "select from the end",
    lambda x: (x.mT.select(-2, -1) * x.select(-2, 1).sum(), x.narrow(-1, 1, 2)),
    x=normal(8, 6),
)
add(
    "linear with a bias of two axes",
    lambda x, w, w2: F.linear(x, w, w2),
    x=normal(8, 6),
    w=normal(4, 6),
    w2=normal(8, 4),
)
add(
    "linear of one vector",
    lambda x, w: F.linear(x.sum(0), w) + x.mean(0) @ w.t(),
    x=normal(8, 6),
    w=normal(4, 6),
)
add(
    "linear of one sum", lambda x, w: F.linear(x, w, w[:, 0]) + x @ w.t() + w @ x, x=normal(6), w=normal(4, 6)
)
add("det", lambda x: torch.linalg.det(x), x=normal(8, 8))
add("a maximum that is filled", lambda t: (t * 1).amax(0, keepdim=True).fill_(2), t=normal(8, 6))
add("a count that is filled", lambda t: (t > 0).sum(0).fill_(3).add_(1), t=normal(8, 6))
add(
    "a sum less rows",
    lambda x, t: (x * 1).sum(0).sub_(t.view(8, 6).mean(0), alpha=2),
    x=normal(8, 6),
    t=normal(8, 6),
)
add(
    "any, times a number",
    lambda x: ((x > -1).any(1) * 2.5, (x > -1).any(0) * x, (x < 1).all(1) * 1.5),
    x=normal(8, 6),
)
add(
    "initializers of kaiming",
    lambda x: nn.init.kaiming_normal_(nn.init.kaiming_uniform_(torch.empty_like(x), a=1), mode="fan_out"),
    x=normal(8, 6),
)
add("split at places", lambda x: torch.tensor_split(x, torch.tensor([1, 5])), x=normal(8, 6))
add("group_norm of single values", lambda x: F.group_norm(x, 6), x=normal(8, 6))
add(
    "kron, changed",
    lambda x, w: torch.kron(x, w).squeeze().mul_(2),
    x=normal(2, 4),
    w=normal(4, 2),
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
add(
    "as_strided of what is transposed", lambda x: x.transpose(0, 1).as_strided((4, 3), (5, 2)), x=normal(8, 6)
)
