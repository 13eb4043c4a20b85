"""Calls of functions and methods of tensors that are drawn, with the parameters and buffers that they use."""

from __future__ import annotations

import math
from collections.abc import Collection

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.torch.modules import Drawing, Maker
from layoutmap.testing.models.values import WIDTHS

_AXES = "lmno"
_BUFFER = ("", ", persistent=False")


def _line(*lines: str) -> Maker:
    """One of some lines that keep the shape; in them `{n}` is the number of features."""
    return lambda choices, shape: ("", choices.one_of(*lines).replace("{n}", str(shape[-1])), shape)


def _parameter(choices: Choices, *shape: int) -> str:
    """A matrix, or several, with first values of a size that keeps that of what they are multiplied with."""
    scale = round(shape[-2] ** -0.5, 2)
    drawn = choices.one_of(
        f"torch.randn{shape} * {scale}",
        f"torch.rand{shape} * {scale}",
        f"nn.init.xavier_uniform_(torch.empty{shape})",
        f"nn.init.kaiming_normal_(torch.empty{shape})",
        f"nn.init.trunc_normal_(torch.empty{shape}, std={scale})",
        f"torch.empty{shape}.uniform_(-{scale}, {scale})",
        f"nn.init.orthogonal_(torch.empty{shape})",
    )
    return f"nn.Parameter({drawn})"


# -- with parameters and buffers


def _product(choices: Choices, shape: Shape) -> Drawing:
    width = choices.weighted(WIDTHS)
    made = _parameter(choices, shape[-1], width)
    line = choices.one_of(
        "{x} @ {m}",
        "torch.matmul({x}, {m})",
        "F.linear({x}, {m}.T)",
        "({x}.double() @ {m}.double()).float()",
        "torch.tensordot({x}, {m}, 1)",
    )
    return made, line, (*shape[:-1], width)


def _einsum(choices: Choices, shape: Shape) -> Drawing:
    """Heads of features, or features of heads."""
    axes = _AXES[: len(shape)]
    if len(shape) > 1 and choices.one_in(2):
        width = choices.one_of(8, 4, 16)
        weight = _parameter(choices, *shape[-2:], width)
        return (
            weight,
            f"torch.einsum('b{axes},{axes[-2:]}z->b{axes[:-2]}z', {{x}}, {{m}})",
            (*shape[:-2], width),
        )
    heads, size = choices.one_of(4, 2, 8), choices.one_of(4, 8)
    after, moved = (*shape[:-1], heads, size), (heads, *shape[:-1], size)
    axes, free = axes[-1], axes[:-1]
    weight = _parameter(choices, heads, shape[-1], size)
    if choices.one_in(2):
        return weight, f"torch.einsum('b{free}{axes},y{axes}z->by{free}z', {{x}}, {{m}})", moved
    return weight, f"torch.einsum('b{free}{axes},y{axes}z->b{free}yz', {{x}}, {{m}})", after


def _scale(choices: Choices, shape: Shape) -> Drawing:
    size = choices.one_of(shape[-1:], shape)
    return (
        f"nn.Parameter(torch.randn{size} * 0.2)",
        choices.one_of("{x} * (1 + {m})", "{x} + {m}", "torch.lerp({x}, {m}, 0.25)"),
        shape,
    )


def _parameter_list(choices: Choices, shape: Shape) -> Drawing:
    made = f"nn.ParameterList(torch.randn({shape[-1]}) * 0.3 for _ in range({choices.one_of(2, 3)}))"
    return made, "{x}\nfor weight in {m}:\n    {y} = {y} + torch.tanh({x} * weight)", shape


def _parameter_dict(choices: Choices, shape: Shape) -> Drawing:
    made = f"nn.ParameterDict({{'scale': torch.ones({shape[-1]}), 'shift': torch.zeros({shape[-1]})}})"
    return made, "{x} * {m}['scale'] + {m}['shift']", shape


def _module_list(choices: Choices, shape: Shape) -> Drawing:
    made = f"nn.ModuleList(nn.Linear({shape[-1]}, {shape[-1]}) for _ in range({choices.one_of(2, 3)}))"
    step = choices.one_of("torch.tanh(layer({y}))", "{y} + 0.5 * layer({y}).relu()")
    return made, f"{{x}}\nfor layer in {{m}}:\n    {{y}} = {step}", shape


def _module_dict(choices: Choices, shape: Shape) -> Drawing:
    width = shape[-1]
    made = f"nn.ModuleDict({{'in': nn.Linear({width}, 16), 'out': nn.Linear(16, {width}, bias=False)}})"
    return made, "{m}['out']({m}['in']({x}).sigmoid())", shape


def _buffer(choices: Choices, shape: Shape) -> Drawing:
    size, value = choices.one_of(shape[-1:], shape), choices.one_of("torch.ones", "torch.rand")
    return (
        f"nn.Buffer({value}({size}){choices.one_of(*_BUFFER)})",
        choices.one_of("{x} * {m}", "{x} - {m}"),
        shape,
    )


def _running(choices: Choices, shape: Shape) -> Drawing:
    """A buffer that `forward` changes: a mean of what was seen."""
    axes = tuple(range(len(shape)))
    mean = f"{{x}}.detach().mean({axes})"
    made = f"nn.Buffer(torch.zeros({shape[-1]}){choices.one_of(*_BUFFER)})"
    change = choices.one_of(
        f"{{m}}.mul_(0.9).add_({mean}, alpha=0.1)",
        f"{{m}}.copy_(0.5 * {{m}} + {mean})",
        f"{{m}} = torch.lerp({{m}}, {mean}, 0.1)",
    )
    return made, f"{{x}} - {{m}}\nif self.training:\n    {change}", shape


def _flat_rows(choices: Choices, shape: Shape) -> Drawing:
    width = choices.weighted(WIDTHS)
    made, after = f"nn.Linear({shape[-1]}, {width})", (*shape[:-1], width)
    line = choices.one_of(
        f"{{m}}({{x}}.flatten(0, -2)).view({{x}}.shape[0], {', '.join(map(str, after))})",
        f"{{m}}({{x}}.reshape(-1, {shape[-1]})).unflatten(0, (-1, {', '.join(map(str, shape[:-1]))}{',' if len(shape) == 2 else ''}))",
    )
    return made, line, after


def _functional_conv(choices: Choices, shape: Shape) -> Drawing:
    channels, length = shape
    filters = choices.one_of(8, 4, 16)
    line = choices.one_of("F.conv1d({x}, {m}, padding=1)", "F.conv1d(F.pad({x}, (2, 0)), {m})")
    return _parameter(choices, filters, channels, 3), line, (filters, length)


def _low_rank(choices: Choices, shape: Shape) -> Drawing:
    width = shape[-1]
    made = f"nn.Sequential(nn.Linear({width}, 4, bias=False), nn.Linear(4, {width}, bias=False))"
    return made, choices.one_of("{x} + {m}({x})", "{x} + {m}[1]({m}[0]({x})) * 0.5"), shape


# -- of axes


def _slice(choices: Choices, shape: Shape) -> Drawing:
    first, *others = shape
    if len(shape) > 1 and choices.one_in(3):
        return "", choices.one_of("{x}[:, 0]", "{x}[:, -1]", "{x}.select(1, 1)"), tuple(others)
    if choices.one_in(2) and first > 2:
        return (
            "",
            choices.one_of(
                "{x}[:, 1:] - {x}[:, :-1]",
                "{x}.diff(dim=1)",
                "{x}.narrow(1, 0, {n})".replace("{n}", str(first - 1)),
            ),
            (first - 1, *others),
        )
    return "", "{x}[:, ::2]", (-(-first // 2), *others)


def _halves(choices: Choices, shape: Shape) -> Drawing:
    """Parts of the features, put together in another way."""
    *places, width = shape
    half = width // 2
    kept = (
        "torch.cat([-{x}[..., H:], {x}[..., :H]], -1)",
        "torch.cat({x}.split([H, W], -1)[::-1], -1)",
        "torch.cat({x}.tensor_split(2, -1), -1)",
    )
    if width % 2 == 0 and choices.one_in(2):
        line = choices.one_of(
            "a, b = {x}.chunk(2, -1)\n{y} = a * b.sigmoid()",
            "torch.maximum({x}[..., ::2], {x}[..., 1::2])",
            "sum({x}.unflatten(-1, (2, -1)).unbind(-2))",
        )
        return "", line, (*places, half)
    return "", choices.one_of(*kept).replace("H", str(half)).replace("W", str(width - half)), shape


def _axes(choices: Choices, shape: Shape) -> Drawing:
    rank = len(shape)
    swapped = (*shape[:-2], shape[-1], shape[-2])
    lines = {"{x}.transpose(-1, -2)": swapped, "{x}.mT.contiguous()": swapped}
    if rank > 2:
        turned = ", ".join(map(str, (0, *range(2, rank + 1), 1)))
        lines |= {
            f"{{x}}.permute({turned})": (*shape[1:], shape[0]),
            "{x}.movedim(1, -1)": (*shape[1:], shape[0]),
        }
    return "", *choices.one_of(*lines.items())


def _reshape(choices: Choices, shape: Shape) -> Drawing:
    first, *others = shape
    size = math.gcd(4, shape[-1])
    merged = (first, math.prod(others)) if len(shape) > 2 else (math.prod(shape),)
    lines: dict[str, Shape] = {
        f"{{x}}.reshape({{x}}.shape[0], {', '.join(map(str, merged[:-1]))}{', ' if merged[:-1] else ''}-1)": merged
    }
    if len(shape) < 4:
        lines[f"{{x}}.contiguous().view(*{{x}}.shape[:-1], {size}, -1)"] = (
            *shape[:-1],
            size,
            shape[-1] // size,
        )
        lines[f"{{x}}.unflatten(-1, (-1, {size})).transpose(1, 2)"] = (
            (size, shape[-1] // size)
            if len(shape) == 1
            else (
                shape[1] if len(shape) > 2 else shape[1] // size,
                first,
                *shape[2:-1],
                *((shape[-1] // size, size) if len(shape) > 2 else (size,)),
            )
        )
    return "", *choices.one_of(*lines.items())


def _repeat(choices: Choices, shape: Shape) -> Drawing:
    first, *others = shape
    places, ones = ", ".join("-1" for _ in shape), ", ".join("1" for _ in shape)
    lines: dict[str, Shape] = {
        "{x}.repeat_interleave(2, dim=1)": (2 * first, *others),
        f"{{x}}.unsqueeze(1).expand(-1, 4, {places})": (4, *shape),
        f"{{x}}[:, None].repeat(1, 2, {ones})": (2, *shape),
        "torch.stack([{x}, {x}.flip(1)], 1)": (2, *shape),
        "torch.cat([{x}, 0.5 * {x}.roll(1, 1)], 1)": (2 * first, *others),
        f"F.pad({{x}}, (1, 2))": (*shape[:-1], shape[-1] + 3),
    }
    return "", *choices.one_of(*lines.items())


def _reduction(choices: Choices, shape: Shape) -> Drawing:
    first, *others = shape
    line = choices.one_of(
        "{x}.mean(1)",
        f"{{x}}.sum(1) / {first}",
        "{x}.amax(1)",
        f"{{x}}.logsumexp(1)",
        "{x}.var(1, unbiased=False)",
        "torch.linalg.vector_norm({x} + 2, dim=1)",
        "{x}.max(dim=1).values",
        "torch.einsum('bl...,bl...->b...', {x}, {x}.softmax(1))",
    )
    return "", line, tuple(others)


def _lookup(choices: Choices, shape: Shape) -> Drawing:
    """What indices take along an axis."""
    first, *others = shape
    index = f"torch.tensor([{', '.join(str(choices.below(first)) for _ in range(choices.one_of(4, 3)))}])"
    number = index.count(",") + 1
    taken = (number, *others)
    broadcast = ", ".join(["1", str(number), *("1" for _ in others)])
    lines: dict[str, Shape] = {
        f"{{x}}.index_select(1, {index})": taken,
        f"{{x}}[:, {index}]": taken,
        f"{{x}}.gather(1, {index}.view({broadcast}).expand({{x}}.shape[0], {', '.join(map(str, taken))}))": taken,
        f"torch.zeros_like({{x}}).index_add(1, {index}, {{x}}[:, :{number}])": shape,
        f"torch.take_along_dim({{x}}, {index}.view({broadcast}), 1)": taken,
    }
    if number > first:
        del lines[f"torch.zeros_like({{x}}).index_add(1, {index}, {{x}}[:, :{number}])"]
    return "", *choices.one_of(*lines.items())


def _softmax_axis(choices: Choices, shape: Shape) -> Drawing:
    axis = choices.one_of(*range(1, len(shape) + 1))
    return (
        "",
        choices.one_of(
            f"{{x}}.softmax({axis})",
            f"{{x}}.cumsum({axis}) / {shape[axis - 1]}",
            f"F.log_softmax({{x}}, {axis})",
            f"{{x}}.roll(1, {axis})",
            f"{{x}}.flip({axis})",
        ),
        shape,
    )


def _scores(choices: Choices, shape: Shape) -> Drawing:
    """Attention without weights."""
    length, width = shape
    mask = choices.one_of(
        "",
        f".masked_fill(torch.ones({length}, {length}, dtype=torch.bool).triu(1), -1e9)",
        f" + torch.full(({length}, {length}), -9.0).triu(1)",
    )
    scores = choices.one_of(
        "{x} @ {x}.transpose(1, 2)", "torch.bmm({x}, {x}.mT)", "torch.einsum('bld,bmd->blm', {x}, {x})"
    )
    return "", f"(({scores}) / {width}){mask}\n{{y}} = {{y}}.softmax(-1) @ {{x}}", shape


def _sum_of_rows(choices: Choices, shape: Shape) -> Drawing:
    """What mixes rows."""
    line = choices.one_of(
        "{x} - {x}.mean(0, keepdim=True)",
        "({x} - {x}.mean(0)) / ({x}.var(0) + 1e-3).sqrt()",
        "{x} + 0.1 * {x}.roll(1, 0)",
        "{x} * {x}.softmax(0)",
        "{x} / (1 + {x}.abs().amax())",
        "{x} + {x}[:1]",
    )
    return "", line, shape


_ANY, _PLACES = range(1, 5), range(2, 5)
FUNCTIONS: dict[str, tuple[Collection[int], int, Maker]] = {
    # kind: the ranks that it takes, how often it is drawn, what draws it
    "product": (_ANY, 6, _product),
    "einsum": (range(1, 4), 5, _einsum),
    "scale": (_ANY, 4, _scale),
    "ParameterList": (_ANY, 3, _parameter_list),
    "ParameterDict": (_ANY, 2, _parameter_dict),
    "ModuleList": (_ANY, 4, _module_list),
    "ModuleDict": (_ANY, 2, _module_dict),
    "buffer": (_ANY, 4, _buffer),
    "running": (_ANY, 4, _running),
    "flat_rows": (_PLACES, 4, _flat_rows),
    "conv1d": ((2,), 4, _functional_conv),
    "low_rank": (_ANY, 2, _low_rank),
    "slice": (_ANY, 4, _slice),
    "halves": (_ANY, 4, _halves),
    "axes": (_PLACES, 4, _axes),
    "reshape": (_ANY, 4, _reshape),
    "repeat": (range(1, 4), 3, _repeat),
    "reduction": (_PLACES, 3, _reduction),
    "lookup": (_ANY, 3, _lookup),
    "along": (_ANY, 4, _softmax_axis),
    "scores": ((2,), 5, _scores),
    "rows": (_ANY, 2, _sum_of_rows),
    "where": (
        _ANY,
        3,
        _line(
            "torch.where({x} > 0, {x}, 0.1 * {x})",
            "{x}.masked_fill(torch.arange({n}) % 3 == 0, 0.0)",
            "{x} * ({x} > 0)",
            "{x}.clamp(-1, 1)",
            "torch.where(torch.arange({n}) < 2, {x}, {x}.tanh())",
        ),
    ),
    "in_place": (
        _ANY,
        5,
        _line(
            "{x} * 1\n{y}.add_(1).mul_(0.5)",
            "{x}.clone()\n{y}.relu_()",
            "{x} + 0\n{y}[:, :1] = 0",
            "{x}.clone()\n{y}[..., -1] += 1",
            "torch.zeros_like({x})\n{y}[:, 1:] = {x}[:, :-1]",
            "{x}.new_zeros({x}.shape)\n{y}[..., ::2] = {x}[..., ::2]",
            "{x}.clone()\npart = {y}[:, :2]\npart.mul_(2)",
            "F.relu({x} + 0.1, inplace=True)",
            "{x}.clone()\n{y}[{y} < -1] = -1.0",
            "{x} * 1\n{y} -= {y}.mean(-1, keepdim=True)",
            "torch.empty_like({x})\n{y}[:] = {x} * 0.5\n{y}.sub_(0.1)",
            "{x}.clone()\n{y}.masked_fill_({y} > 2, 2.0)",
        ),
    ),
    "norm": (
        _ANY,
        5,
        _line(
            "({x} - {x}.mean(-1, keepdim=True)) / ({x}.var(-1, keepdim=True) + 1e-3).sqrt()",
            "{x} * ({x}.pow(2).mean(-1, keepdim=True) + 1e-3).rsqrt()",
            "F.normalize({x} + 2, dim=-1)",
            "F.layer_norm({x}, ({n},), eps=1e-3)",
            "{x} / (1 + {x}.abs().sum(1, keepdim=True))",
            "F.rms_norm({x}, ({n},), eps=1e-3)",
        ),
    ),
    "elementwise": (
        _ANY,
        4,
        _line(
            "{x} * {x}.sigmoid()",
            "F.dropout({x}, 0.25, self.training)",
            "{x} * {x}.detach().tanh()",
            "torch.sin({x}) + {x}",
            "torch.exp(-{x}.square())",
            "torch.addcmul({x}, {x}.tanh(), {x}.sigmoid(), value=0.5)",
            "F.silu({x}) + F.softplus({x})",
            "torch.log1p({x}.abs())",
            "{x} + 0.1 * torch.randn_like({x}) * self.training",
            "torch.hypot({x}, torch.ones(1))",
            "{x}.to(torch.float64).tanh().to({x}.dtype)",
        ),
    ),
}
