"""The kinds of layers in random torch models: accepted ranks, and lines of a program with rules of output shapes.

Shapes leave out the batch axis, which is the first one. Convolutions and pooling expect channels as the next axis.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.torch.layers import (
    CALL,
    draw_attention,
    draw_convolution,
    draw_pooling,
    draw_recurrent,
    draw_transposed_convolution,
)
from layoutmap.testing.models.values import WIDTHS, find_common_divisors

DrawnLayer = tuple[str, str, Shape]
"""Expression of a module or parameter, expression that uses it, and output shape.

`{m}` stands for the module, `{x}` for the input, and `{y}` for the result. The first line of the second expression
computes the result, and further lines change it.
"""
ShapeRule = Callable[[Shape, Mapping[str, Any]], Shape | None]
"""Function from an input shape and the values drawn for a line to the output shape, or None for a rejected shape."""
LayerKind = tuple[Collection[int], int, dict[ShapeRule, str] | Callable[[Choices, Shape], DrawnLayer]]
"""Accepted ranks, how often the kind is drawn, and either lines by the rule of their output shape, or a function.

A line is `module -> use`, or one of both. Names in braces are keys of `_PLACEHOLDERS`.
"""


def _draw_weight_matrix_code(choices: Choices, shape: Shape) -> str:
    """Return the expression of a weight matrix with a random initializer that keeps the scale of the values."""
    size, scale = "(W, Z)", round(shape[-1] ** -0.5, 2)
    values = choices.pick(
        f"torch.randn{size} * {scale}",
        f"torch.rand{size} * {scale}",
        f"nn.init.xavier_uniform_(torch.empty{size})",
        f"nn.init.kaiming_normal_(torch.empty{size})",
        f"nn.init.trunc_normal_(torch.empty{size}, std={scale})",
        f"torch.empty{size}.uniform_(-{scale}, {scale})",
        f"nn.init.orthogonal_(torch.empty{size})",
    )
    return f"nn.Parameter({values.replace('W', '{w}').replace('Z', '{z}')})"


_PLACEHOLDERS: dict[str, Callable[[Choices, Shape], Any]] = {
    "s": lambda choices, s: s,
    "f": lambda choices, s: s[0],  # size of the first axis
    "w": lambda choices, s: s[-1],  # size of the last axis, the width
    "h": lambda choices, s: s[-1] // 2,
    "r": lambda choices, s: s[-1] - s[-1] // 2,
    "d": lambda choices, s: math.gcd(4, s[-1]),
    "n": lambda choices, s: max(1, len(s) - 1),  # number of spatial axes
    "p": lambda choices, s: ", ".join(map(str, s[:-1])),
    "rest": lambda choices, s: ", ".join(map(str, s[1:])),
    "all": lambda choices, s: ", ".join("-1" for _ in s),
    "axes": lambda choices, s: tuple(range(len(s))),
    "z": lambda choices, s: choices.pick_weighted(WIDTHS),
    "k": lambda choices, s: choices.pick(*(n for n in (2, 4, 1, 8, 3, 7) if s[-1] % n == 0)),
    "g": lambda choices, s: choices.pick(*find_common_divisors(s[0])),
    "a": lambda choices, s: choices.pick(*range(1, len(s) + 1)),
    "i": lambda choices, s: str([choices.draw_below(s[0]) for _ in range(choices.pick(4, 3))]),
    "c": lambda choices, s: f"torch.ones({s[0]}, {s[0]}, dtype=torch.bool, device={{x}}.device).triu(1)",
    "matrix": _draw_weight_matrix_code,
    "size": lambda choices, s: choices.pick(s[-1:], s),
    "bias": lambda choices, s: choices.pick("", "", ", bias=False"),
    "saved": lambda choices, s: choices.pick("", ", persistent=False"),
    "linear": lambda choices, s: {2: "linear", 3: "bilinear", 4: "trilinear"}[len(s)],
}


# Rules of output shapes. `drawn` has the values that were drawn for names in a line.


def _keep_shape(shape: Shape, drawn: Mapping[str, Any]) -> Shape:
    return shape


def _replace_width(shape: Shape, drawn: Mapping[str, Any]) -> Shape:
    return (*shape[:-1], drawn["z"])


def _resize_first_axis_to_indices(shape: Shape, drawn: Mapping[str, Any]) -> Shape:
    """Return the shape with one element of the first axis for each drawn index."""
    return (drawn["i"].count(",") + 1, *shape[1:])


def _make_padding_rule(num_padded: int) -> ShapeRule:
    """Return a rule that pads both ends of each axis but the first, and rejects axes not larger than the padding."""
    return lambda shape, drawn: (
        (shape[0], *(n + 2 * num_padded for n in shape[1:])) if min(shape[1:]) > num_padded else None
    )


def _make_first_axis_rule(resize: Callable[[int], int]) -> ShapeRule:
    """Return a rule that resizes the first axis, and rejects a shape where it would have the size 0."""
    return lambda shape, drawn: (resize(shape[0]), *shape[1:]) if resize(shape[0]) else None


_ANY, _SPATIAL, _SEQUENCE = range(1, 5), range(2, 5), (2,)
# Layers are lines of source, not classes, so they are short, and a failing case prints them (decisions/0140).
KINDS: dict[str, LayerKind] = {
    "Linear": (_ANY, 12, {_replace_width: "nn.Linear({w}, {z}{bias})"}),
    "Bilinear": ((1, 2), 3, {_replace_width: "nn.Bilinear({w}, {w}, {z}) -> {m}({x}, {x}.sigmoid())"}),
    "Activation": (_ANY, 5, {_keep_shape: """
        nn.ReLU()
        nn.GELU()
        nn.Tanh()
        nn.SiLU()
        nn.Sigmoid()
        nn.ELU()
        nn.Softplus()
        nn.Mish()
        nn.LeakyReLU(0.1)
        nn.Hardtanh()
        nn.Softsign()
        nn.Hardswish()
        nn.LogSigmoid()
        nn.ReLU(inplace=True) -> {m}({x} + 0.1)"""}),
    "PReLU": (_ANY, 3, {_keep_shape: """
        nn.PReLU()
        nn.PReLU({f})"""}),
    "Softmax": (_ANY, 2, {_keep_shape: """
        nn.Softmax(-1)
        nn.LogSoftmax(dim=1)"""}),
    "GLU": (_ANY, 2, {lambda s, d: None if s[-1] % 2 else (*s[:-1], s[-1] // 2): "nn.GLU()"}),
    "LayerNorm": (_ANY, 5, {_keep_shape: """
        nn.LayerNorm({w}, eps=1e-3)
        nn.LayerNorm({s}, eps=1e-3)
        nn.LayerNorm({w}, eps=1e-3, bias=False)
        nn.LayerNorm({w}, eps=1e-3, elementwise_affine=False)
        F.layer_norm({x}, ({w},), eps=1e-3)"""}),
    "RMSNorm": (_ANY, 4, {_keep_shape: """
        nn.RMSNorm({w}, eps=1e-3)
        nn.RMSNorm({s}, eps=1e-3)
        F.rms_norm({x}, ({w},), eps=1e-3)"""}),
    "BatchNorm": (_ANY, 6, {_keep_shape: """
        nn.BatchNorm{n}d({f}, eps=1e-3)
        nn.BatchNorm{n}d({f}, eps=1e-3, momentum=0.3)
        nn.BatchNorm{n}d({f}, eps=1e-3, affine=False)
        nn.BatchNorm{n}d({f}, eps=1e-3, track_running_stats=False)"""}),
    "InstanceNorm": (_SPATIAL, 4, {lambda s, d: s if math.prod(s[1:]) > 1 else None: """
        nn.InstanceNorm{n}d({f}, eps=1e-3, affine=True)
        nn.InstanceNorm{n}d({f}, eps=1e-3)
        nn.InstanceNorm{n}d({f}, eps=1e-3, affine=True, track_running_stats=True)"""}),
    "GroupNorm": (_ANY, 5, {_keep_shape: "nn.GroupNorm({g}, {f}, eps=1e-3)"}),
    "Dropout": (_ANY, 5, {_keep_shape: """
        nn.Dropout(0.25)
        nn.AlphaDropout(0.25)
        F.dropout({x}, 0.25, self.training)""", lambda s, d: s if len(s) > 1 else None: "nn.Dropout{n}d(0.25)"}),
    "Conv": (_SPATIAL, 14, draw_convolution),
    "ConvTranspose": (_SPATIAL, 5, draw_transposed_convolution),
    "Pooling": (_SPATIAL, 5, draw_pooling),
    "AdaptivePooling": (_SPATIAL, 4, {lambda s, d: (s[0], *(1 for _ in s[1:])): """
        nn.AdaptiveAvgPool{n}d(1)
        nn.AdaptiveMaxPool{n}d(1)""", lambda s, d: (s[0], *(2 for _ in s[1:])): """
        nn.AdaptiveAvgPool{n}d(2)
        nn.AdaptiveMaxPool{n}d(2)"""}),
    "Upsample": (_SPATIAL, 3, {lambda s, d: (s[0], *(2 * n for n in s[1:])): """
        nn.Upsample(scale_factor=2)
        nn.Upsample(scale_factor=2, mode='{linear}')
        F.interpolate({x}, scale_factor=2, mode='{linear}', align_corners=True)"""}),
    "Padding": (_SPATIAL, 3, {_make_padding_rule(1): """
        nn.ZeroPad{n}d(1)
        nn.ReflectionPad{n}d(1)
        nn.ReplicationPad{n}d(1)
        nn.CircularPad{n}d(1)"""}),
    "PixelShuffle": ((3,), 16, {
        lambda s, d: None if s[0] % 4 else (s[0] // 4, 2 * s[1], 2 * s[2]): "nn.PixelShuffle(2)",
        lambda s, d: None if s[1] % 2 or s[2] % 2 else (4 * s[0], s[1] // 2, s[2] // 2): "nn.PixelUnshuffle(2)",
        _keep_shape: "nn.ChannelShuffle({g})"}),
    "Recurrent": (_SEQUENCE, 9, draw_recurrent),
    "Cell": (_SEQUENCE, 10, {lambda s, d: (d["z"],): """
        nn.GRUCell({w}, {z}) -> {x}.new_zeros({x}.shape[0], {z}); for t in range({f}): {y} = {m}({x}[:, t], {y})
        nn.RNNCell({w}, {z}) -> {x}.new_zeros({x}.shape[0], {z}); for t in range({f}): {y} = {m}({x}[:, t], {y})
        nn.LSTMCell({w}, {z}) -> c = {x}.new_zeros(len({x}), {z}); for t in {x}.unbind(1): {y}, c = {m}(t, ({y}, c))
        """}),
    "MultiheadAttention": (_SEQUENCE, 8, draw_attention),
    "TransformerEncoder": (_SEQUENCE, 6, {_keep_shape: """
        nn.TransformerEncoderLayer({w}, {k}, 16, dropout=0.0, batch_first=True)
        nn.TransformerEncoderLayer({w}, {k}, 16, activation='gelu', norm_first=True, batch_first=True)
        nn.TransformerEncoderLayer({w}, {k}, 16, batch_first=True) -> {m}({x}, src_mask={c}, is_causal=True)
        nn.TransformerEncoder(nn.TransformerEncoderLayer({w}, {k}, 16, batch_first=True), 2)"""}),
    "GroupedAttention": (_SEQUENCE, 8, {_keep_shape: """
        Attention({w}, heads=4, groups=2, size=4, causal=True)
        Attention({w}, heads=4, groups=4, size=8, causal=False)
        Attention({w}, heads=8, groups=2, size=4, causal=False)
        Attention({w}, heads=6, groups=3, size=4, causal=True)
        Attention({w}, heads=4, groups=1, size=8, causal=True)"""}),
    "GatedUnit": (_ANY, 3, {_keep_shape: "GatedUnit({w}, {z})"}),
    "Experts": (_ANY, 3, {_keep_shape: """
        Experts({w}, {z}, 4)
        Experts({w}, {z}, 4, 'full_tensor')
        Experts({w}, {z}, 4, 'redistribute')
        Experts({w}, {z}, 4, 'to_local')"""}),
    "Flatten": (_SPATIAL, 3, {
        lambda s, d: (math.prod(s),): "nn.Flatten()",
        lambda s, d: (s[0], math.prod(s[1:])): "nn.Flatten(2)"}),
    "Unflatten": (range(1, 4), 4, {lambda s, d: (*s[:-1], s[-1] // d["d"], d["d"]): "nn.Unflatten(-1, (-1, {d}))"}),
    # Layers with parameters or buffers of the model.
    "product": (_ANY, 6, {_replace_width: """
        {matrix} -> {x} @ {m}
        {matrix} -> torch.matmul({x}, {m})
        {matrix} -> F.linear({x}, {m}.T)
        {matrix} -> ({x}.double() @ {m}.double()).float()
        {matrix} -> torch.tensordot({x}, {m}, 1)"""}),
    "einsum": (range(1, 4), 7, {
        lambda s, d: (*s[:-1], 4, d["z"]): """
        nn.Parameter(torch.randn(4, {w}, {z}) * 0.3) -> torch.einsum('...d,hdk->...hk', {x}, {m})
        nn.Parameter(torch.randn({w}, 4, {z}) * 0.3) -> torch.einsum('b...d,dhk->b...hk', {x}, {m})""",
        lambda s, d: (4, s[0], d["z"]) if len(s) == 2 else None: """
        nn.Parameter(torch.randn(4, {w}, {z}) * 0.3) -> torch.einsum('bld,hdk->bhlk', {x}, {m})""",
        lambda s, d: (s[0], d["z"]) if len(s) == 3 else None: """
        nn.Parameter(torch.randn({z}, {rest}) * 0.3) -> torch.einsum('blhk,zhk->blz', {x}, {m})"""}),
    "scale": (_ANY, 4, {_keep_shape: """
        nn.Parameter(torch.randn({size}) * 0.2) -> {x} * (1 + {m})
        nn.Parameter(torch.randn({size}) * 0.2) -> {x} + {m}
        nn.Parameter(torch.randn({size}) * 0.2) -> torch.lerp({x}, {m}, 0.25)
        nn.Parameter(torch.tensor(0.5)) -> {x} * {m}"""}),
    "containers": (_ANY, 5, {_keep_shape: """
        nn.ParameterList(torch.randn({w}) * 0.3 for _ in range(2)) -> {x}; for w in {m}: {y} = {y} + torch.tanh({x} * w)
        nn.ParameterDict({'scale': torch.ones({w}), 'shift': torch.zeros({w})}) -> {x} * {m}['scale'] + {m}['shift']
        nn.ModuleDict({'in': nn.Linear({w}, 16), 'out': nn.Linear(16, {w})}) -> {m}['out']({m}['in']({x}).sigmoid())
        nn.ModuleList(nn.Linear({w}, {w}) for _ in range(2)) -> {x}; for layer in {m}: {y} = layer({y}).tanh()
        nn.ModuleList(nn.Linear({w}, {w}) for _ in range(3)) -> {x}; for layer in {m}: {y} = {y} + layer({y}).relu() / 2
        nn.Sequential(nn.Linear({w}, 4), nn.Linear(4, {w})) -> {x} + {m}[1]({m}[0]({x}))"""}),
    "buffer": (_ANY, 4, {_keep_shape: """
        nn.Buffer(torch.ones({size}){saved}) -> {x} * {m}
        nn.Buffer(torch.rand({size}){saved}) -> {x} - {m}
        nn.Buffer(torch.zeros({w}){saved}) -> {x} - {m}; {m}.mul_(0.9).add_({x}.detach().mean({axes}), alpha=0.1)
        nn.Buffer(torch.zeros({w}){saved}) -> {x} - {m}; {m}.copy_(0.5 * {m} + {x}.detach().mean({axes}))
        nn.Buffer(torch.zeros({w}){saved}) -> {x} - {m}; {m} = torch.lerp({m}, {x}.detach().mean({axes}), 0.1)
        nn.Buffer(torch.zeros({s}){saved}) -> {x} - {m}; with torch.no_grad(): {m}[:1] += {x}[0, :1]"""}),
    "flat_rows": (_SPATIAL, 8, {_replace_width: """
        nn.Linear({w}, {z}) -> {m}({x}.flatten(0, -2)).view({x}.shape[0], {p}, {z})
        nn.Linear({w}, {z}) -> {m}({x}.reshape(-1, {w})).unflatten(0, (-1, {p}))"""}),
    "conv1d": (_SEQUENCE, 8, {lambda s, d: (d["z"], s[1]): """
        nn.Parameter(torch.randn({z}, {f}, 3) * 0.2) -> F.conv1d({x}, {m}, padding=1)
        nn.Parameter(torch.randn({z}, {f}, 3) * 0.2) -> F.conv1d(F.pad({x}, (2, 0)), {m})"""}),
    # Layers that change axes.
    "slice": (_ANY, 4, {
        _make_first_axis_rule(lambda n: -(-n // 2)): "{x}[:, ::2]",
        _make_first_axis_rule(lambda n: n - 1): """
        {x}[:, 1:] - {x}[:, :-1]
        {x}.diff(dim=1)
        {x}.narrow(1, 1, {f} - 1)""",
        lambda s, d: s[1:] if len(s) > 1 else None: """
        {x}[:, 0]
        {x}[:, -1]
        {x}.unbind(1)[0] + {x}.select(1, 0)"""}),
    "halves": (_ANY, 4, {
        lambda s, d: s if s[-1] > 1 else None: """
        torch.cat([-{x}[..., {h}:], {x}[..., :{h}]], -1)
        torch.cat({x}.split([{h}, {r}], -1)[::-1], -1)
        torch.cat({x}.tensor_split(2, -1), -1)""",
        lambda s, d: None if s[-1] % 2 else (*s[:-1], s[-1] // 2): """
        {x}.chunk(2, -1)[0] * {x}.chunk(2, -1)[1].sigmoid()
        torch.maximum({x}[..., ::2], {x}[..., 1::2])
        sum({x}.unflatten(-1, (2, -1)).unbind(-2))"""}),
    "axes": (_SPATIAL, 4, {
        lambda s, d: (*s[:-2], s[-1], s[-2]): """
        {x}.transpose(-1, -2)
        {x}.mT.contiguous()""",
        lambda s, d: (*s[1:], s[0]): "{x}.movedim(1, -1)",
        lambda s, d: (s[2], s[0], s[1]) if len(s) == 3 else None: "{x}.permute(0, 3, 1, 2)"}),
    "reshape": (_ANY, 4, {
        lambda s, d: (math.prod(s),): """
        {x}.reshape({x}.shape[0], -1)
        {x}.flatten(1)""",
        lambda s, d: (*s[:-1], d["d"], s[-1] // d["d"]) if len(s) in range(4) else None: """
        {x}.contiguous().view(*{x}.shape[:-1], {d}, -1)
        {x}.unflatten(-1, ({d}, -1))""",
        lambda s, d: (d["d"], s[0], s[1] // d["d"]) if len(s) == 2 else None: """
        {x}.unflatten(-1, (-1, {d})).permute(0, 3, 1, 2)
        {x}.view({x}.shape[0], {f}, {d}, -1).transpose(1, 2)""",
        lambda s, d: (s[1], s[0] * s[2]) if len(s) == 3 else None: "{x}.transpose(1, 2).flatten(2)"}),
    "repeat": (range(1, 4), 3, {
        _make_first_axis_rule(lambda n: 2 * n): """
        {x}.repeat_interleave(2, dim=1)
        torch.cat([{x}, 0.5 * {x}.roll(1, 1)], 1)""",
        lambda s, d: (2, *s): """
        torch.stack([{x}, {x}.flip(1)], 1)
        {x}.unsqueeze(1).expand(-1, 2, {all})""",
        lambda s, d: (*s[:-1], s[-1] + 3): "F.pad({x}, (1, 2))"}),
    "reduction": (_SPATIAL, 3, {lambda s, d: s[1:]: """
        {x}.mean(1)
        {x}.sum(1) / {f}
        {x}.amax(1)
        {x}.logsumexp(1)
        {x}.var(1, unbiased=False)
        torch.linalg.vector_norm({x} + 2, dim=1)
        {x}.max(dim=1).values
        torch.einsum('bl...,bl...->b...', {x}, {x}.softmax(1))"""}),
    "lookup": (_ANY, 3, {
        _resize_first_axis_to_indices: """
        {x}[:, torch.tensor({i}, device={x}.device)]
        {x}.index_select(1, torch.tensor({i}, device={x}.device))""",
        _keep_shape: """
        {x}.gather(-1, torch.arange({w}, device={x}.device).flip(0).expand({x}.shape))
        torch.zeros_like({x}).scatter_add(1, torch.zeros_like({x}, dtype=torch.long), {x})
        torch.zeros_like({x}).index_add(1, torch.arange({f}, device={x}.device).flip(0), {x})"""}),
    "along": (_ANY, 4, {_keep_shape: """
        {x}.softmax({a})
        {x}.cumsum({a}) / 8
        F.log_softmax({x}, {a})
        {x}.roll(1, {a})
        {x}.flip({a})
        {x} / (1 + {x}.abs().sum({a}, keepdim=True))"""}),
    "scores": (_SEQUENCE, 5, {_keep_shape: """
        {x} @ {x}.transpose(1, 2) / {w}; {y} = {y}.softmax(-1) @ {x}
        torch.bmm({x}, {x}.mT) / {w}; {y} = {y}.masked_fill({c}, -1e9).softmax(-1) @ {x}
        torch.einsum('bld,bmd->blm', {x}, {x}) / {w}; {y} = ({y} - 9.0 * {c}).softmax(-1) @ {x}"""}),
    "rows": (_ANY, 2, {_keep_shape: """
        {x} - {x}.mean(0, keepdim=True)
        ({x} - {x}.mean(0)) / ({x}.var(0) + 1e-3).sqrt()
        {x} + 0.1 * {x}.roll(1, 0)
        {x} * {x}.softmax(0)
        {x} / (1 + {x}.abs().amax())
        {x} + {x}[:1]"""}),
    # Layers that change elements.
    "where": (_ANY, 3, {_keep_shape: """
        torch.where({x} > 0, {x}, 0.1 * {x})
        {x}.masked_fill(torch.arange({w}, device={x}.device) % 3 == 0, 0.0)
        {x} * ({x} > 0)
        {x}.clamp(-1, 1)
        torch.where(torch.arange({w}, device={x}.device) < 2, {x}, {x}.tanh())"""}),
    "in_place": (_ANY, 5, {_keep_shape: """
        {x} * 1; {y}.add_(1).mul_(0.5)
        {x}.clone(); {y}.relu_()
        {x} + 0; {y}[:, :1] = 0
        {x}.clone(); {y}[..., -1] += 1
        torch.zeros_like({x}); {y}[:, 1:] = {x}[:, :-1]
        {x}.new_zeros({x}.shape); {y}[..., ::2] = {x}[..., ::2]
        {x}.clone(); {y}[:, :2].mul_(2)
        {x}.clone(); {y}[{y} < -1] = -1.0
        {x} * 1; {y} -= {y}.mean(-1, keepdim=True)
        torch.empty_like({x}); {y}[:] = {x} * 0.5; {y}.sub_(0.1)
        {x}.clone(); {y}.masked_fill_({y} > 2, 2.0)"""}),
    "norm": (_ANY, 5, {_keep_shape: """
        {x} * ({x}.pow(2).mean(-1, keepdim=True) + 1e-3).rsqrt()
        ({x} - {x}.mean(-1, keepdim=True)) / ({x}.var(-1, keepdim=True, correction=0) + 1e-3).sqrt()
        F.normalize({x} + 2, dim=-1)"""}),
    "elementwise": (_ANY, 4, {_keep_shape: """
        {x} * {x}.sigmoid()
        {x} * {x}.detach().tanh()
        torch.sin({x}) + {x}
        torch.exp(-{x}.square())
        torch.addcmul({x}, {x}.tanh(), {x}.sigmoid(), value=0.5)
        torch.log1p({x}.abs())
        {x} + 0.1 * torch.randn_like({x}) * self.training
        torch.hypot({x}, {x}.new_ones(1))
        {x}.to(torch.float64).tanh().to({x}.dtype)"""}),
}  # fmt: skip


def draw_layer_of_kind(choices: Choices, kind: str, shape: Shape) -> DrawnLayer | None:
    """Draw a layer of a kind for an input shape. Return None if the drawn line does not accept the shape."""
    lines = KINDS[kind][2]
    if callable(lines):
        return lines(choices, shape)
    rule, line = choices.pick(
        *[(rule, line.strip()) for rule, text in lines.items() for line in text.strip().split("\n")]
    )
    drawn: dict[str, Any] = {}

    def draw_placeholder(match: re.Match[str]) -> str:
        name = match[1]
        if name in _PLACEHOLDERS and name not in drawn:
            drawn[name] = _PLACEHOLDERS[name](choices, shape)
        return str(drawn.get(name, match[0]))

    for _ in range(2):  # a drawn value may contain names, so replace twice
        line = re.sub(r"\{(\w+)\}", draw_placeholder, line)
    module, arrow, use = line.partition(" -> ")
    if not arrow:
        module, use = (line, CALL) if "{x}" not in line else ("", line)
    after = rule(shape, drawn)
    return None if after is None else (module, use.replace("; ", "\n"), after)
