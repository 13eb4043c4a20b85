"""Layers that are expressions of jax.numpy and jax.lax over weights, drawn in pytrees and in modules of flax.nnx."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.values import WIDTHS, divisors

Held = str | Mapping[str, tuple[Shape, int] | str]
"""What a layer holds: a module, as an expression; or by name weights, as shapes and how many products each sum of them
has, and constants, as expressions."""
Maker = Callable[[Choices, Shape], tuple[str, Held, Shape]]
"""Draws for a shape the expression of a layer, what it holds, and which shape it puts out. `{x}` stands for what the
layer takes, with an axis of rows, `{h}` for what it holds, and `{w}` for a weight of that name."""

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
_LETTERS = {1: "W", 2: "HW", 3: "DHW"}


def activated(choices: Choices, call: str) -> str:
    """An expression, or an activation of it."""
    return choices.one_of(*_ACTIVATIONS).format(call)


def windows(choices: Choices, space: Shape) -> tuple[Shape, Shape, Shape, str, Shape]:
    """The sizes of windows along some axes, their strides, dilation and padding, and the number of places after."""
    sizes = tuple(choices.weighted({3: 3, 2: 2, 1: 1, 4: 1}) for _ in space)
    strides, dilation = (tuple(choices.weighted({1: 3, 2: 1}) for _ in space) for _ in range(2))
    reach = [(size - 1) * step + 1 for size, step in zip(sizes, dilation, strict=True)]
    is_valid = all(n >= length for n, length in zip(space, reach, strict=True)) and choices.one_in(2)
    least = reach if is_valid else [1 for _ in space]
    places = tuple(-(-(n - length + 1) // s) for n, length, s in zip(space, least, strides, strict=True))
    return sizes, strides, dilation, "VALID" if is_valid else "SAME", places


def heads_of(choices: Choices, shape: Shape) -> tuple[str, Shape, int, Shape]:
    """An equation that makes heads of features, or features of heads.

    Returns:
        The equation, the kernel's shape, the number of its axes that the product adds up over, and the result's shape.
    """
    axes = "bcd"[: len(shape)]
    joins = len(shape) == 3 or (len(shape) == 2 and choices.one_in(3))
    summed, free = (axes[-2:], axes[:-2]) if joins else (axes[-1:], axes[:-1])
    sides = (choices.weighted(WIDTHS),) if joins else (choices.one_of(4, 2, 8), choices.one_of(4, 8))
    made = "z" if joins else "yz"
    kernel = (*shape[len(free) :], *sides)
    return (
        f"a{free}{summed},{summed}{made}->a{free}{made}",
        kernel,
        len(summed),
        (*shape[: len(free)], *sides),
    )


def _dense(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    width = choices.weighted(WIDTHS)
    held = {"w": ((shape[-1], width), shape[-1])}
    after = (*shape[:-1], width)
    if choices.one_in(2):
        return activated(choices, "{x} @ {w}"), held, after
    return activated(choices, "{x} @ {w} + {b}"), {**held, "b": ((width,), 100)}, after


def _einsum(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    equation, kernel, num_summed, after = heads_of(choices, shape)
    return f'jnp.einsum("{equation}", {{x}}, {{w}})', {"w": (kernel, math.prod(kernel[:num_summed]))}, after


def _bilinear(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    width, kept = shape[-1], choices.weighted(WIDTHS)
    call = 'jnp.einsum("...a,abc,...b->...c", {x}, {w}, {x})'
    return call, {"w": ((width, width, kept), width * width)}, (*shape[:-1], kept)


def _gated(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    width, inner = shape[-1], choices.weighted(WIDTHS)
    sizes = {"gate": ((width, inner), width), "up": ((width, inner), width), "down": ((inner, width), inner)}
    return "(jax.nn.silu({x} @ {gate}) * ({x} @ {up})) @ {down}", sizes, shape


def _low_rank(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    width, rank = choices.weighted(WIDTHS), choices.one_of(2, 4)
    held = {"a": ((shape[-1], rank), shape[-1]), "b": ((rank, width), rank)}
    return "{x} @ {a} @ {b}", held, (*shape[:-1], width)


def _convolution(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    *space, width = shape
    sizes, strides, dilation, padding, places = windows(choices, tuple(space))
    filters = choices.weighted(WIDTHS)
    groups = choices.one_of(*divisors(width, filters)) if choices.one_in(2) else 1
    letters = _LETTERS[len(space)]
    numbers = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    call = (
        f'jax.lax.conv_general_dilated({{x}}, {{w}}, {strides}, "{padding}", rhs_dilation={dilation}, '
        f"dimension_numbers={numbers}, feature_group_count={groups})"
    )
    kernel = (*sizes, width // groups, filters)
    return call, {"w": (kernel, math.prod(kernel[:-1]))}, (*places, filters)


def _pooling(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    sizes, strides, _, _, _ = windows(choices, shape[:-1])
    after = tuple(-(-n // step) for n, step in zip(shape, strides, strict=False))
    window = f'(1, {", ".join(map(str, sizes))}, 1), (1, {", ".join(map(str, strides))}, 1), "SAME"'
    if choices.one_in(2):
        return f"jax.lax.reduce_window({{x}}, -jnp.inf, jax.lax.max, {window})", {}, (*after, shape[-1])
    mean = f"jax.lax.reduce_window({{x}}, 0.0, jax.lax.add, {window}) / {math.prod(sizes)}"
    return mean, {}, (*after, shape[-1])


def _attention(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    width, size = shape[-1], choices.one_of(4, 8)
    heads, groups = choices.one_of((4, 4), (4, 2), (8, 4), (8, 2), (4, 1), (6, 3))
    held = {
        name: ((width, number, size), width)
        for name, number in zip("qkv", (heads, groups, groups), strict=True)
    }
    causal = ", is_causal=True" if choices.one_in(2) else ""
    return (
        f"attend({{x}}, {{q}}, {{k}}, {{v}}, {{o}}{causal})",
        {**held, "o": ((heads, size, width), heads * size)},
        shape,
    )


def _recurrent(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    units = choices.weighted(WIDTHS)
    reverse = ", reverse=True" if choices.one_in(3) else ""
    held = {"w": ((shape[-1], units), shape[-1]), "u": ((units, units), units)}
    return f"recur({{x}}, {{w}}, {{u}}{reverse})", held, (shape[0], units)


def _loop(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    width = shape[-1]
    call = "jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ {w}), {x})"
    return call, {"w": ((width, width), width)}, shape


def _mixed_places(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    places = shape[0]
    call = choices.one_of(
        'jnp.einsum("st,bt...->bs...", {w}, {x})', 'jnp.einsum("st,bt...->bs...", jnp.tril({w}), {x})'
    )
    return call, {"w": ((places, places), places)}, shape


def _scaled(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    width = shape[-1]
    call = choices.one_of(
        "{x} * (1 + {s})",
        "normalize({x}) * (1 + {s})",
        "jnp.where({x} > 0, {x}, {x} * {s})",
        "decay({x}, {s})",
    )
    return call, {"s": ((width,), 9)}, shape


def _positions(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    places, width = shape
    return f"{{x}} + {{p}}[:{places}]", {"p": ((2 * places, width), 9)}, shape


def _softmax(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    axis = _axis(choices, shape)
    call = choices.one_of(
        f"{shape[axis - 1]} * jax.nn.softmax({{x}} * {{s}}, {axis})",
        f"jax.nn.log_softmax({{x}} * {{s}}, {axis})",
    )
    return call, {"s": ((shape[-1],), 1)}, shape


def _of_axis(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    """What is computed along one axis, which stays."""
    axis = _axis(choices, shape)
    call = choices.one_of(
        f"jnp.cumsum({{x}}, {axis}) / {shape[axis - 1]}",
        f"jnp.roll({{x}}, 1, {axis})",
        f"jnp.flip({{x}}, {axis})",
        f"jnp.sort({{x}}, {axis})",
        f"jax.lax.associative_scan(jnp.maximum, {{x}}, axis={axis})",
        f"jnp.fft.fft({{x}}, axis={axis}).real / {shape[axis - 1]}",
    )
    return call, {}, shape


def _reduced(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    axis = 1 + choices.below(len(shape) - 1)
    call = (
        choices.one_of("{x}.mean(%d)", "{x}.max(%d)", "jax.nn.logsumexp({x}, %d)", "{x}.sum(%d) / 4") % axis
    )
    return call.replace("AXIS", str(axis)), {}, (*shape[: axis - 1], *shape[axis:])


def _gathered(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    axis = _axis(choices, shape)
    size = shape[axis - 1]
    indices = [choices.below(size) for _ in range(choices.one_of(size, 4, 8))]
    call = choices.one_of(f"jnp.take({{x}}, {{i}}, axis={axis})", f"{{x}}[{', '.join([':'] * axis)}, {{i}}]")
    return call, {"i": f"jnp.array({indices})"}, _with(shape, axis, len(indices))


def _segments(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    number = choices.one_of(4, 2, 8)
    ids = [choices.below(number) for _ in range(shape[0])]
    call = choices.one_of(
        f"jax.vmap(lambda y: jax.ops.segment_sum(y, {{i}}, {number}))({{x}})",
        f"jnp.zeros(({{x}}.shape[0], {number}, *{{x}}.shape[2:])).at[:, {{i}}].add({{x}})",
    )
    return call, {"i": f"jnp.array({ids})"}, (number, *shape[1:])


def _sliced(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    axis = _axis(choices, shape)
    size, colons = shape[axis - 1], ", ".join([":"] * axis)
    half = -(-size // 2)
    call, after = choices.one_of(
        (f"{{x}}[{colons}, ::2]", half),
        (f"{{x}}[{colons}, {size - half}:]", half),
        (f"jnp.concatenate([{{x}}[{colons}, {half}:], -{{x}}[{colons}, :{half}]], {axis})", size),
        (f"jnp.pad({{x}}, {[(1, 2) if n == axis else (0, 0) for n in range(1 + len(shape))]})", size + 3),
        (f"jax.lax.top_k({{x}}, {-(-shape[-1] // 2)})[0]", -1),
    )
    return call, {}, (*shape[:-1], -(-shape[-1] // 2)) if after < 0 else _with(shape, axis, after)


def _dynamically_sliced(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    axis = _axis(choices, shape)
    size = shape[axis - 1]
    half = -(-size // 2)
    call, after = choices.one_of(
        (f"jax.lax.dynamic_slice_in_dim({{x}}, {{i}}, {half}, {axis})", half),
        (f"jax.lax.dynamic_update_index_in_dim({{x}}, {{x}}.mean({axis}), {{i}}, {axis})", size),
    )
    return call, {"i": f"jnp.array({choices.below(size - half + 1)})"}, _with(shape, axis, after)


def _reshaped(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    """The places in one axis, all in one axis, or the features in two; or axes that are swapped."""
    *places, width = shape
    size = math.gcd(4, width)
    fits = [(*places, width // size, size)] if len(shape) < 4 else []
    fits += [(math.prod(shape),)] if len(shape) > 1 else []
    fits += [(math.prod(places), width)] if len(places) > 1 else []
    if len(shape) > 1 and choices.one_in(2):
        axis = 1 + choices.below(len(places))
        swapped = list(shape)
        swapped[axis - 1], swapped[-1] = swapped[-1], swapped[axis - 1]
        return f"{{x}}.swapaxes({axis}, -1)", {}, tuple(swapped)
    after = choices.one_of(*fits)
    return f"{{x}}.reshape(-1, {', '.join(map(str, after))})", {}, after


def _outer(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    return 'jnp.einsum("...a,...b->...ab", {x}, {x})', {}, (*shape, shape[-1])


def _branch(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    which = choices.one_of(True, False)
    return "jax.lax.cond({i}, jnp.tanh, lambda y: 2 * y, {x})", {"i": f"jnp.array({which})"}, shape


def _axis(choices: Choices, shape: Shape) -> int:
    """One of the axes, counted with that of rows; the last one first."""
    return len(shape) - choices.below(len(shape))


def _with(shape: Shape, axis: int, size: int) -> Shape:
    """A shape in which an axis has another size."""
    return (*shape[: axis - 1], size, *shape[axis:])


ANY, PLACES = range(1, 5), range(2, 5)
FUNCTIONS: dict[str, tuple[Collection[int], int, Maker]] = {
    # kind: the ranks that it takes, how often it is drawn, what makes it
    "dense": (ANY, 10, _dense),
    "einsum": (range(1, 4), 5, _einsum),
    "scaled": (PLACES, 4, _scaled),
    "bilinear": (ANY, 2, _bilinear),
    "gated": (ANY, 3, _gated),
    "low rank": (ANY, 2, _low_rank),
    "convolution": (PLACES, 8, _convolution),
    "pooling": (PLACES, 3, _pooling),
    "attention": ((2,), 6, _attention),
    "recurrent": ((2,), 4, _recurrent),
    "loop": (ANY, 2, _loop),
    "mixed places": (PLACES, 2, _mixed_places),
    "positions": ((2,), 3, _positions),
    "softmax": (ANY, 3, _softmax),
    "of an axis": (ANY, 4, _of_axis),
    "reduced": (PLACES, 3, _reduced),
    "gathered": (ANY, 3, _gathered),
    "segments": (PLACES, 3, _segments),
    "sliced": (ANY, 4, _sliced),
    "dynamically sliced": (ANY, 3, _dynamically_sliced),
    "reshaped": (ANY, 4, _reshaped),
    "outer": (range(1, 3), 1, _outer),
    "branch": (ANY, 1, _branch),
    "halved": (ANY, 1, lambda choices, shape: ("halved({x})", {}, shape)),
}
