"""Draw layers that are expressions of jax.numpy and jax.lax. Both pytrees and modules of flax.nnx contain them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.values import WIDTHS, draw_heads_einsum, draw_padding, find_common_divisors

Parameters = str | Mapping[str, Shape | str]
"""Parameters of a layer: the expression of a module, or a mapping from names to weights and constants.

In the mapping, a shape stands for a weight of this shape, and an expression for a constant.
"""
LayerCode = tuple[str, Parameters, Shape]
"""Expression of a layer's call, its parameters, and its output shape without the batch axis.

In the expression, `{x}` stands for the input batch, `{h}` for the parameters, and `{w}` for the weight `w`.
"""
LayerKinds = Mapping[str, tuple[Collection[int], int, Callable[[Choices, Shape], LayerCode]]]
"""Kinds of layers: the accepted ranks, how often one is drawn, and the function that draws one for an input shape."""

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
    "constrain": """\
def constrain(x):
    specs, sizes = [None] * x.ndim, dict(jax.sharding.get_abstract_mesh().shape)
    for axis, length in enumerate(x.shape):
        specs[axis] = next((dim for dim, size in sizes.items() if size > 1 and length % size == 0), None)
        sizes.pop(specs[axis], None)
    return jax.lax.with_sharding_constraint(x, jax.P(*specs)) if any(specs) else x


""",
    "halved": """\
@jax.custom_vjp
def halved(x):
    return x


halved.defvjp(lambda x: (x, None), lambda _, g: (g / 2,))


""",
}
"""Source of helper functions that a program may define, by name."""
_ACTIVATIONS = (
    "{}",
    "jax.nn.gelu({})",
    "jnp.tanh({})",
    "jax.nn.relu({})",
    "jax.nn.silu({})",
    "jax.nn.softmax({})",
)


def wrap_in_random_activation(choices: Choices, call: str) -> str:
    """Return the expression `call`, usually inside a random activation function."""
    return choices.pick(*_ACTIVATIONS).format(call)


def draw_conv_options(choices: Choices, space: Shape, width: int) -> tuple[dict[str, Any], Shape]:
    """Return a dict of random options of a convolution, and its output shape with features as the last axis."""
    sizes = tuple(choices.pick_weighted({3: 3, 2: 2, 1: 1, 4: 1}) for _ in space)
    strides, dilation = (tuple(choices.pick_weighted({1: 3, 2: 1}) for _ in space) for _ in range(2))
    is_valid, spatial = draw_padding(choices, space, sizes, strides, dilation)
    filters = choices.pick_weighted(WIDTHS)
    groups = choices.pick(*find_common_divisors(width, filters)) if choices.draw_true_once_in(2) else 1
    options = {"filters": filters, "sizes": sizes, "strides": strides, "dilation": dilation, "groups": groups}
    return {**options, "padding": "VALID" if is_valid else "SAME"}, (*spatial, filters)


# -- layers with weights


def _draw_dense_layer(choices: Choices, shape: Shape) -> LayerCode:
    width = choices.pick_weighted(WIDTHS)
    call, bias = choices.pick(("{x} @ {w}", {}), ("{x} @ {w} + {b}", {"b": (width,)}))
    return wrap_in_random_activation(choices, call), {"w": (shape[-1], width), **bias}, (*shape[:-1], width)


def _draw_matrix_product_layer(choices: Choices, shape: Shape) -> LayerCode:
    *spatial, width = shape
    inner, after = choices.pick_weighted(WIDTHS), choices.pick_weighted(WIDTHS)
    call, parameters = choices.pick(
        ("{x} @ {a} @ {b}", {"a": (width, 2), "b": (2, after)}),
        ('jnp.einsum("...a,abc,...b->...c", {x}, {w}, {x})', {"w": (width, width, after)}),
        (
            "(jax.nn.silu({x} @ {gate}) * ({x} @ {up})) @ {down}",
            {"gate": (width, inner), "up": (width, inner), "down": (inner, after)},
        ),
    )
    return call, parameters, (*spatial, after)


def _draw_einsum_layer(choices: Choices, shape: Shape) -> LayerCode:
    equation, kernel, _, after = draw_heads_einsum(choices, shape)
    return f'jnp.einsum("{equation}", {{x}}, {{w}})', {"w": kernel}, after


def _draw_convolution_layer(choices: Choices, shape: Shape) -> LayerCode:
    *space, width = shape
    options, after = draw_conv_options(choices, tuple(space), width)
    axes = "DHW"[-len(space) :]
    numbers = (f"N{axes}C", f"{axes}IO", f"N{axes}C")
    call = (
        "jax.lax.conv_general_dilated({{x}}, {{w}}, {strides}, {padding!r}, rhs_dilation={dilation}, "
        "dimension_numbers={numbers}, feature_group_count={groups})"
    )
    kernel = (*options["sizes"], width // options["groups"], after[-1])
    return call.format(**options, numbers=numbers), {"w": kernel}, after


def _draw_pooling_layer(choices: Choices, shape: Shape) -> LayerCode:
    sizes, strides = ((1, *(choices.pick(2, 1, 3) for _ in shape[1:]), 1) for _ in range(2))
    call = choices.pick(
        "jax.lax.reduce_window({x}, -jnp.inf, jax.lax.max, SIZES)",
        f"jax.lax.reduce_window({{x}}, 0.0, jax.lax.add, SIZES) / {math.prod(sizes)}",
    )
    after = tuple(-(-n // step) for n, step in zip(shape, strides[1:], strict=True))
    return call.replace("SIZES", f'{sizes}, {strides}, "SAME"'), {}, after


def _draw_attention_layer(choices: Choices, shape: Shape) -> LayerCode:
    width, size = shape[-1], choices.pick(4, 8)
    heads, groups = choices.pick((4, 4), (4, 2), (8, 4), (8, 2), (4, 1), (6, 3))
    parameters = {
        "q": (width, heads, size),
        "k": (width, groups, size),
        "v": (width, groups, size),
        "o": (heads, size, width),
    }
    causal = choices.pick("", ", is_causal=True")
    return f"attend({{x}}, {{q}}, {{k}}, {{v}}, {{o}}{causal})", parameters, shape


def _draw_recurrent_layer(choices: Choices, shape: Shape) -> LayerCode:
    units, reverse = choices.pick_weighted(WIDTHS), choices.pick("", ", reverse=True")
    parameters = {"w": (shape[-1], units), "u": (units, units)}
    return f"recur({{x}}, {{w}}, {{u}}{reverse})", parameters, (shape[0], units)


# -- layers with constants, or without parameters


def _draw_reduction_layer(choices: Choices, shape: Shape) -> LayerCode:
    axis = 1 + choices.draw_below(len(shape) - 1)
    call = choices.pick(f"{{x}}.mean({axis})", f"{{x}}.max({axis})", f"jax.nn.logsumexp({{x}}, {axis})")
    return call, {}, (*shape[: axis - 1], *shape[axis:])


def _draw_gather_layer(choices: Choices, shape: Shape) -> LayerCode:
    axis = _draw_axis(choices, shape)
    size = shape[axis - 1]
    indices = [choices.draw_below(size) for _ in range(choices.pick(size, 4, 8))]
    call = choices.pick(f"jnp.take({{x}}, {{i}}, axis={axis})", f"{{x}}[{_make_leading_colons(axis)}{{i}}]")
    return call, {"i": f"jnp.array({indices})"}, _resize_axis(shape, axis, len(indices))


def _draw_segment_sum_layer(choices: Choices, shape: Shape) -> LayerCode:
    number = choices.pick(4, 2, 8)
    ids = [choices.draw_below(number) for _ in range(shape[0])]
    call = choices.pick(
        f"jax.vmap(lambda y: jax.ops.segment_sum(y, {{i}}, {number}))({{x}})",
        f"jnp.zeros(({{x}}.shape[0], {number}, *{{x}}.shape[2:])).at[:, {{i}}].add({{x}})",
    )
    return call, {"i": f"jnp.array({ids})"}, (number, *shape[1:])


def _draw_slicing_layer(choices: Choices, shape: Shape) -> LayerCode:
    axis = _draw_axis(choices, shape)
    size, colons = shape[axis - 1], _make_leading_colons(axis)
    half = -(-size // 2)
    call, after = choices.pick(
        (f"{{x}}[{colons}::2]", half),
        (f"{{x}}[{colons}{size - half}:]", half),
        (f"jnp.concatenate([{{x}}[{colons}{half}:], -{{x}}[{colons}:{half}]], {axis})", size),
        (f"jnp.pad({{x}}, {[(1, 2) if n == axis else (0, 0) for n in range(1 + len(shape))]})", size + 3),
        (f"jax.lax.top_k({{x}}.swapaxes({axis}, -1), {half})[0].swapaxes({axis}, -1)", half),
        (f"jax.lax.dynamic_slice_in_dim({{x}}, {{i}}, {half}, {axis})", half),
        (f"jax.lax.dynamic_update_index_in_dim({{x}}, {{x}}.mean({axis}), {{i}}, {axis})", size),
    )
    start = choices.draw_below(size - half + 1)
    return call, {"i": f"jnp.array({start})"} if "{i}" in call else {}, _resize_axis(shape, axis, after)


def _draw_reshaping_layer(choices: Choices, shape: Shape) -> LayerCode:
    """Draw a layer that splits the last axis, flattens all axes or all but the last one, or swaps two axes."""
    *spatial, width = shape
    size, axis = math.gcd(4, width), _draw_axis(choices, shape)
    swapped = _resize_axis(_resize_axis(shape, axis, width), len(shape), shape[axis - 1])
    afters = [(*spatial, width // size, size), (math.prod(shape),), (math.prod(spatial), width)]
    calls = [(f"{{x}}.reshape(-1, {', '.join(map(str, after))})", after) for after in afters]
    call, after = choices.pick(*calls, (f"{{x}}.swapaxes({axis}, -1)", swapped))
    return call, {}, after


def _make_draw_function(*calls: str) -> Callable[[Choices, Shape], LayerCode]:
    """Return a function that draws a layer with one of these calls, all of which keep the shape.

    In a call, `{axis}` stands for one of the axes, and `{size}` for its size.
    """

    def draw_layer_with_call(choices: Choices, shape: Shape) -> LayerCode:
        axis, length, width = _draw_axis(choices, shape) if "{axis}" in str(calls) else 1, shape[0], shape[-1]
        weights = {"s": (width,), "w": (width, width), "m": (length, length), "p": (2 * length, width)}
        call = choices.pick(*calls).replace("{axis}", str(axis)).replace("{size}", str(shape[axis - 1]))
        parameters: Parameters = {**weights, "i": "jnp.array(True)"}
        return call, {name: item for name, item in parameters.items() if f"{{{name}}}" in call}, shape

    return draw_layer_with_call


def _draw_outer_product_layer(choices: Choices, shape: Shape) -> LayerCode:
    return 'jnp.einsum("...a,...b->...ab", {x}, {x})', {}, (*shape, shape[-1])


def _draw_axis(choices: Choices, shape: Shape) -> int:
    """Return a random axis other than the batch axis, which is axis 0. The last axis is the simplest choice."""
    return len(shape) - choices.draw_below(len(shape))


def _make_leading_colons(axis: int) -> str:
    """Return the text `:, ` for each axis before an axis, to precede the index of that axis."""
    return ":, " * axis


def _resize_axis(shape: Shape, axis: int, size: int) -> Shape:
    """Return a shape with a new size for one axis. Axis 0 is the batch axis, which `shape` does not contain."""
    return (*shape[: axis - 1], size, *shape[axis:])


ANY, SPATIAL = range(1, 5), range(2, 5)
FUNCTIONS: LayerKinds = {
    "dense": (ANY, 10, _draw_dense_layer),
    "einsum": (range(1, 4), 5, _draw_einsum_layer),
    "products": (ANY, 5, _draw_matrix_product_layer),
    "scaled": (
        SPATIAL,
        6,
        _make_draw_function(
            "{x} * (1 + {s})",
            "normalize({x}) * (1 + {s})",
            "jnp.where({x} > 0, {x}, {x} * {s})",
            "decay({x}, {s})",
            "{size} * jax.nn.softmax({x} * {s}, {axis})",
            "jax.nn.log_softmax({x} * {s}, {axis})",
        ),
    ),
    "convolution": (SPATIAL, 8, _draw_convolution_layer),
    "pooling": (SPATIAL, 3, _draw_pooling_layer),
    "attention": ((2,), 6, _draw_attention_layer),
    "recurrent": ((2,), 4, _draw_recurrent_layer),
    "square": (
        SPATIAL,
        3,
        _make_draw_function(
            "jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ {w}), {x})",
            'jnp.einsum("st,bt...->bs...", {m}, {x})',
            'jnp.einsum("st,bt...->bs...", jnp.tril({m}), {x})',
        ),
    ),
    "positions": ((2,), 3, _make_draw_function("{x} + {p}[:{size}]")),
    "of an axis": (
        ANY,
        4,
        _make_draw_function(
            "jnp.cumsum({x}, {axis}) / {size}",
            "jnp.roll({x}, 1, {axis})",
            "jnp.flip({x}, {axis})",
            "jnp.sort({x}, {axis})",
            "jax.lax.associative_scan(jnp.maximum, {x}, axis={axis})",
            "jnp.fft.fft({x}, axis={axis}).real / {size}",
        ),
    ),
    "reduced": (SPATIAL, 3, _draw_reduction_layer),
    "gathered": (ANY, 3, _draw_gather_layer),
    "segments": (SPATIAL, 3, _draw_segment_sum_layer),
    "sliced": (ANY, 5, _draw_slicing_layer),
    "reshaped": (ANY, 4, _draw_reshaping_layer),
    "outer": (range(1, 3), 1, _draw_outer_product_layer),
    "constrained": (ANY, 3, _make_draw_function("constrain({x})", "constrain(jnp.tanh({x}))")),
    "elementwise": (
        ANY,
        2,
        _make_draw_function("halved({x})", "jax.lax.cond({i}, jnp.tanh, lambda y: 2 * y, {x})"),
    ),
}
