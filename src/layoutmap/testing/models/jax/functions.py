"""Layers that are expressions of jax.numpy and jax.lax over weights, drawn in pytrees and in modules of flax.nnx."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.values import WIDTHS, divisors, heads_of

Held = str | Mapping[str, Shape | str]
"""The values of a layer: a module, as an expression; or by name weights, as shapes, and constants, as expressions."""
Made = tuple[str, Held, Shape]
"""The expression of a layer, what it holds, and the shape that it puts out, without rows. `{x}` stands for what the
layer takes, with an axis of rows, `{h}` for what it holds, and `{w}` for a weight of that name."""
Kinds = Mapping[str, tuple[Collection[int], int, Callable[[Choices, Shape], Made]]]
"""Layers by kind: the ranks that each takes, how often it is drawn, and what makes it for a shape."""

HELPERS = {
    "normalize": """\
def normalize(x, axis=-1):
    x = x - x.mean(axis, keepdims=True)
    return x / jnp.sqrt((x**2).mean(axis, keepdims=True) + 0.01)


""",
    "attend": """\
def attend(x, q, k, v, o, **options):
    q, k, v = (jnp.einsum("bsw,whd->bshd", x, w) for w in (q, k, v))
    return jnp.einsum("bshd,hdw->bsw", jax.nn.dot_product_attention(q, k, v, **options), o)


""",
    "recur": """\
def recur(x, w, u, **options):
    step = lambda h, x: 2 * (jnp.tanh(x @ w + h @ u),)
    return jax.lax.scan(step, jnp.zeros((x.shape[0], len(u))), x.swapaxes(0, 1), **options)[1].swapaxes(0, 1)


""",
    "decay": """\
def decay(x, a):
    join = lambda one, two: (one[0] * two[0], one[1] * two[0] + two[1])
    return jax.lax.associative_scan(join, (jnp.broadcast_to(jax.nn.sigmoid(a), x.shape), x), axis=1)[1]


""",
    "halved": """\
@jax.custom_vjp
def halved(x):
    return x


halved.defvjp(lambda x: (x, None), lambda _, g: (g / 2,))


""",
}
"""Functions that a program defines itself, by name."""
_ACTIVATIONS = (
    "{}",
    "jax.nn.gelu({})",
    "jnp.tanh({})",
    "jax.nn.relu({})",
    "jax.nn.silu({})",
    "jax.nn.softmax({})",
)


def activated(choices: Choices, call: str) -> str:
    """An expression, or an activation of it."""
    return choices.one_of(*_ACTIVATIONS).format(call)


def convolution(choices: Choices, space: Shape, width: int) -> tuple[dict[str, Any], Shape]:
    """The settings of a convolution or a pooling over some axes, as texts, and the shape after it, features last."""
    sizes = tuple(choices.weighted({3: 3, 2: 2, 1: 1, 4: 1}) for _ in space)
    strides, dilation = (tuple(choices.weighted({1: 3, 2: 1}) for _ in space) for _ in range(2))
    reach = [(size - 1) * step + 1 for size, step in zip(sizes, dilation, strict=True)]
    is_valid = all(n >= length for n, length in zip(space, reach, strict=True)) and choices.one_in(2)
    least = reach if is_valid else [1 for _ in space]
    places = tuple(-(-(n - length + 1) // s) for n, length, s in zip(space, least, strides, strict=True))
    filters = choices.weighted(WIDTHS)
    groups = choices.one_of(*divisors(width, filters)) if choices.one_in(2) else 1
    settings = {
        "filters": filters,
        "sizes": sizes,
        "strides": strides,
        "dilation": dilation,
        "groups": groups,
    }
    return {**settings, "padding": "VALID" if is_valid else "SAME"}, (*places, filters)


# -- with weights


def _dense(choices: Choices, shape: Shape) -> Made:
    width = choices.weighted(WIDTHS)
    call, bias = choices.one_of(("{x} @ {w}", {}), ("{x} @ {w} + {b}", {"b": (width,)}))
    return activated(choices, call), {"w": (shape[-1], width), **bias}, (*shape[:-1], width)


def _products(choices: Choices, shape: Shape) -> Made:
    *places, width = shape
    inner, after = choices.weighted(WIDTHS), choices.weighted(WIDTHS)
    call, held = choices.one_of(
        ("{x} @ {a} @ {b}", {"a": (width, 2), "b": (2, after)}),
        ('jnp.einsum("...a,abc,...b->...c", {x}, {w}, {x})', {"w": (width, width, after)}),
        (
            "(jax.nn.silu({x} @ {gate}) * ({x} @ {up})) @ {down}",
            {"gate": (width, inner), "up": (width, inner), "down": (inner, after)},
        ),
    )
    return call, held, (*places, after)


def _einsum(choices: Choices, shape: Shape) -> Made:
    equation, kernel, _, after = heads_of(choices, shape)
    return f'jnp.einsum("{equation}", {{x}}, {{w}})', {"w": kernel}, after


def _convolution(choices: Choices, shape: Shape) -> Made:
    *space, width = shape
    made, after = convolution(choices, tuple(space), width)
    axes = "DHW"[-len(space) :]
    numbers = (f"N{axes}C", f"{axes}IO", f"N{axes}C")
    call = (
        "jax.lax.conv_general_dilated({{x}}, {{w}}, {strides}, {padding!r}, rhs_dilation={dilation}, "
        "dimension_numbers={numbers}, feature_group_count={groups})"
    )
    kernel = (*made["sizes"], width // made["groups"], after[-1])
    return call.format(**made, numbers=numbers), {"w": kernel}, after


def _pooling(choices: Choices, shape: Shape) -> Made:
    sizes, strides = ((1, *(choices.one_of(2, 1, 3) for _ in shape[1:]), 1) for _ in range(2))
    call = choices.one_of(
        "jax.lax.reduce_window({x}, -jnp.inf, jax.lax.max, SIZES)",
        f"jax.lax.reduce_window({{x}}, 0.0, jax.lax.add, SIZES) / {math.prod(sizes)}",
    )
    after = tuple(-(-n // step) for n, step in zip(shape, strides[1:], strict=True))
    return call.replace("SIZES", f'{sizes}, {strides}, "SAME"'), {}, after


def _attention(choices: Choices, shape: Shape) -> Made:
    width, size = shape[-1], choices.one_of(4, 8)
    heads, groups = choices.one_of((4, 4), (4, 2), (8, 4), (8, 2), (4, 1), (6, 3))
    held = {
        "q": (width, heads, size),
        "k": (width, groups, size),
        "v": (width, groups, size),
        "o": (heads, size, width),
    }
    causal = choices.one_of("", ", is_causal=True")
    return f"attend({{x}}, {{q}}, {{k}}, {{v}}, {{o}}{causal})", held, shape


def _recurrent(choices: Choices, shape: Shape) -> Made:
    units, reverse = choices.weighted(WIDTHS), choices.one_of("", ", reverse=True")
    held = {"w": (shape[-1], units), "u": (units, units)}
    return f"recur({{x}}, {{w}}, {{u}}{reverse})", held, (shape[0], units)


# -- with constants, or nothing


def _reduced(choices: Choices, shape: Shape) -> Made:
    axis = 1 + choices.below(len(shape) - 1)
    call = choices.one_of(f"{{x}}.mean({axis})", f"{{x}}.max({axis})", f"jax.nn.logsumexp({{x}}, {axis})")
    return call, {}, (*shape[: axis - 1], *shape[axis:])


def _gathered(choices: Choices, shape: Shape) -> Made:
    axis = _axis(choices, shape)
    size = shape[axis - 1]
    indices = [choices.below(size) for _ in range(choices.one_of(size, 4, 8))]
    call = choices.one_of(f"jnp.take({{x}}, {{i}}, axis={axis})", f"{{x}}[{_colons(axis)}{{i}}]")
    return call, {"i": f"jnp.array({indices})"}, _with(shape, axis, len(indices))


def _segments(choices: Choices, shape: Shape) -> Made:
    number = choices.one_of(4, 2, 8)
    ids = [choices.below(number) for _ in range(shape[0])]
    call = choices.one_of(
        f"jax.vmap(lambda y: jax.ops.segment_sum(y, {{i}}, {number}))({{x}})",
        f"jnp.zeros(({{x}}.shape[0], {number}, *{{x}}.shape[2:])).at[:, {{i}}].add({{x}})",
    )
    return call, {"i": f"jnp.array({ids})"}, (number, *shape[1:])


def _sliced(choices: Choices, shape: Shape) -> Made:
    axis = _axis(choices, shape)
    size, of_axis = shape[axis - 1], _colons(axis)
    half = -(-size // 2)
    call, after = choices.one_of(
        (f"{{x}}[{of_axis}::2]", half),
        (f"{{x}}[{of_axis}{size - half}:]", half),
        (f"jnp.concatenate([{{x}}[{of_axis}{half}:], -{{x}}[{of_axis}:{half}]], {axis})", size),
        (f"jnp.pad({{x}}, {[(1, 2) if n == axis else (0, 0) for n in range(1 + len(shape))]})", size + 3),
        (f"jax.lax.top_k({{x}}.swapaxes({axis}, -1), {half})[0].swapaxes({axis}, -1)", half),
        (f"jax.lax.dynamic_slice_in_dim({{x}}, {{i}}, {half}, {axis})", half),
        (f"jax.lax.dynamic_update_index_in_dim({{x}}, {{x}}.mean({axis}), {{i}}, {axis})", size),
    )
    start = choices.below(size - half + 1)
    return call, {"i": f"jnp.array({start})"} if "{i}" in call else {}, _with(shape, axis, after)


def _reshaped(choices: Choices, shape: Shape) -> Made:
    """Features in two axes; axes that are swapped; all in one axis, or the places in one."""
    *places, width = shape
    size, axis = math.gcd(4, width), _axis(choices, shape)
    swapped = _with(_with(shape, axis, width), len(shape), shape[axis - 1])
    afters = [(*places, width // size, size), (math.prod(shape),), (math.prod(places), width)]
    calls = [(f"{{x}}.reshape(-1, {', '.join(map(str, after))})", after) for after in afters]
    call, after = choices.one_of(*calls, (f"{{x}}.swapaxes({axis}, -1)", swapped))
    return call, {}, after


def _keeping(*calls: str) -> Callable[[Choices, Shape], Made]:
    """Return what makes layers that keep the shape; `{axis}` is one of the axes, and `{size}` its size."""

    def make(choices: Choices, shape: Shape) -> Made:
        axis, length, width = _axis(choices, shape) if "{axis}" in str(calls) else 1, shape[0], shape[-1]
        weights = {"s": (width,), "w": (width, width), "m": (length, length), "p": (2 * length, width)}
        call = choices.one_of(*calls).replace("{axis}", str(axis)).replace("{size}", str(shape[axis - 1]))
        held: Held = {**weights, "i": "jnp.array(True)"}
        return call, {name: each for name, each in held.items() if f"{{{name}}}" in call}, shape

    return make


def _outer(choices: Choices, shape: Shape) -> Made:
    return 'jnp.einsum("...a,...b->...ab", {x}, {x})', {}, (*shape, shape[-1])


def _axis(choices: Choices, shape: Shape) -> int:
    """One of the axes, counted with that of rows; the last one first."""
    return len(shape) - choices.below(len(shape))


def _colons(axis: int) -> str:
    """The colons before an index of this axis."""
    return ":, " * axis


def _with(shape: Shape, axis: int, size: int) -> Shape:
    """A shape in which an axis has another size."""
    return (*shape[: axis - 1], size, *shape[axis:])


ANY, PLACES = range(1, 5), range(2, 5)
FUNCTIONS: Kinds = {
    "dense": (ANY, 10, _dense),
    "einsum": (range(1, 4), 5, _einsum),
    "products": (ANY, 5, _products),
    "scaled": (
        PLACES,
        6,
        _keeping(
            "{x} * (1 + {s})",
            "normalize({x}) * (1 + {s})",
            "jnp.where({x} > 0, {x}, {x} * {s})",
            "decay({x}, {s})",
            "{size} * jax.nn.softmax({x} * {s}, {axis})",
            "jax.nn.log_softmax({x} * {s}, {axis})",
        ),
    ),
    "convolution": (PLACES, 8, _convolution),
    "pooling": (PLACES, 3, _pooling),
    "attention": ((2,), 6, _attention),
    "recurrent": ((2,), 4, _recurrent),
    "square": (
        PLACES,
        3,
        _keeping(
            "jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ {w}), {x})",
            'jnp.einsum("st,bt...->bs...", {m}, {x})',
            'jnp.einsum("st,bt...->bs...", jnp.tril({m}), {x})',
        ),
    ),
    "positions": ((2,), 3, _keeping("{x} + {p}[:{size}]")),
    "of an axis": (
        ANY,
        4,
        _keeping(
            "jnp.cumsum({x}, {axis}) / {size}",
            "jnp.roll({x}, 1, {axis})",
            "jnp.flip({x}, {axis})",
            "jnp.sort({x}, {axis})",
            "jax.lax.associative_scan(jnp.maximum, {x}, axis={axis})",
            "jnp.fft.fft({x}, axis={axis}).real / {size}",
        ),
    ),
    "reduced": (PLACES, 3, _reduced),
    "gathered": (ANY, 3, _gathered),
    "segments": (PLACES, 3, _segments),
    "sliced": (ANY, 5, _sliced),
    "reshaped": (ANY, 4, _reshaped),
    "outer": (range(1, 3), 1, _outer),
    "elementwise": (ANY, 2, _keeping("halved({x})", "jax.lax.cond({i}, jnp.tanh, lambda y: 2 * y, {x})")),
}
