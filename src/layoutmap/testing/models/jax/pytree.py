"""Draw pytrees of weights with a forward function. Some layers are modules of Equinox or flax.linen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.jax.drawing import WRAPPERS, JaxBuilder, LibrarySyntax
from layoutmap.testing.models.jax.functions import ANY, SPATIAL, LayerCode, draw_conv_options
from layoutmap.testing.models.jax.model import CAST, JaxModel, make_indented_block
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.values import WIDTHS, find_common_divisors

_MIXED = f"""{CAST}def forward(p, *inputs, forward=forward, **named):
    return forward(cast(p), *cast(inputs), **cast(named))
"""


_AUTO_AXES = """\
def forward(p, *inputs, forward=forward, **named):
    leaves, tree = jax.tree.flatten(p)
    arrays = {n: leaf for n, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}

    def call(arrays, inputs, named):
        return forward(tree.unflatten([arrays.get(n, leaf) for n, leaf in enumerate(leaves)]), *inputs, **named)

    return jax.sharding.auto_axes(call, out_sharding=jax.P())(arrays, inputs, named)


def loss(outputs, targets, loss=loss):
    return jax.sharding.auto_axes(loss, out_sharding=jax.P())(outputs, targets)
"""


@dataclass(frozen=True)
class PytreeModel(JaxModel):
    """A random model that is a pytree of weights with a forward function."""

    imports: ClassVar[str] = """\
import collections
import dataclasses

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.random import key, normal

from layoutmap.adapters.jax import train_with
"""
    auto_axes_lines: ClassVar[str] = _AUTO_AXES
    layer_output_shapes: ClassVar[Mapping[str, Shape]] = {}
    precision_lines: ClassVar[Mapping[str, str]] = {**JaxModel.precision_lines, "mixed_bfloat16": _MIXED}

    def make_code(self, optimizer: str) -> str:
        """Return the program that defines `make_model`."""
        inputs = ", ".join(each.name for each in self.inputs)
        forward = make_indented_block(f"def forward(p, {inputs}):", self.make_forward_lines("p"))
        return self.make_program(
            forward,
            [f"params = {self.parameters.make_code(is_long=True)}"],
            "params, forward=forward",
            optimizer,
        )


def draw_model(choices: Choices) -> PytreeModel:
    """Return a random model that is a pytree with a forward function."""
    builder = JaxBuilder(choices, _LIBRARY)
    parameters = builder.draw_model_container(choices.pick_weighted(_LIBRARY.containers))
    inputs, lines, outputs = tuple(builder.inputs), tuple(builder.lines), tuple(builder.outputs)
    return PytreeModel(inputs, lines, parameters, outputs, choices.draw_true_once_in(8))


# -- modules of Equinox, which take one element of a batch


def _make_equinox_code(module: str, num_axes: int, output_shape: Shape) -> LayerCode:
    """Return the code of an Equinox module, which `jax.vmap` maps over the first `num_axes` axes."""
    return f"{'jax.vmap(' * num_axes}{{h}}{')' * num_axes}({{x}})", module, output_shape


def _draw_equinox_linear(choices: Choices, shape: Shape) -> LayerCode:
    width = choices.pick_weighted(WIDTHS)
    return _make_equinox_code(
        f"eqx.nn.Linear({shape[-1]}, {width}, key=key({{key}}))", len(shape), (*shape[:-1], width)
    )


def _draw_equinox_mlp(choices: Choices, shape: Shape) -> LayerCode:
    inner, width = choices.pick_weighted(WIDTHS), choices.pick_weighted(WIDTHS)
    module = f"eqx.nn.MLP({shape[-1]}, {width}, {inner}, {choices.pick(1, 2)}, key=key({{key}}))"
    return _make_equinox_code(module, len(shape), (*shape[:-1], width))


def _draw_equinox_norm(choices: Choices, shape: Shape) -> LayerCode:
    norm, axes = choices.pick(
        (f"LayerNorm({shape[-1]})", len(shape)),
        (f"RMSNorm({shape[-1]})", len(shape)),
        (f"LayerNorm({shape})", 1),
    )
    return _make_equinox_code(f"eqx.nn.{norm}", axes, shape)


def _draw_equinox_convolution(choices: Choices, shape: Shape) -> LayerCode:
    width, *space = shape  # Equinox expects the features on the first axis
    options, (*spatial, filters) = draw_conv_options(choices, tuple(space), width)
    module = "{filters}, {sizes}, {strides}, {padding!r}, {dilation}, {groups}, key=key".format(**options)
    return _make_equinox_code(
        f"eqx.nn.Conv({len(space)}, {width}, {module}({{key}}))", 1, (filters, *spatial)
    )


def _draw_equinox_attention(choices: Choices, shape: Shape) -> LayerCode:
    length, width = shape
    module = (
        f"eqx.nn.MultiheadAttention({choices.pick(*find_common_divisors(width))}, {width}, key=key({{key}}))"
    )
    mask = choices.pick("", f", jnp.tril(jnp.ones(({length}, {length}), bool))")
    return f"jax.vmap(lambda y: {{h}}(y, y, y{mask}))({{x}})", module, shape


def _draw_equinox_gru(choices: Choices, shape: Shape) -> LayerCode:
    units = choices.pick_weighted(WIDTHS)
    module = f"eqx.nn.GRUCell({shape[-1]}, {units}, key=key({{key}}))"
    step = f"jax.lax.scan(lambda h, z: 2 * ({{h}}(z, h),), jnp.zeros({units}), y)[1]"
    return f"jax.vmap(lambda y: {step})({{x}})", module, (shape[0], units)


# -- modules of flax.linen, which store weights in a dict


def _make_linen_code(module: str, shape: Shape, output_shape: Shape) -> LayerCode:
    return (
        f"nn.{module}.apply({{h}}, {{x}})",
        f"nn.{module}.init(key({{key}}), jnp.zeros({(1, *shape)}))",
        output_shape,
    )


def _draw_linen_dense_layer(choices: Choices, shape: Shape) -> LayerCode:
    features = choices.pick((choices.pick_weighted(WIDTHS),), (4, 8), (2, 4))
    return _make_linen_code(f"DenseGeneral({features})", shape, (*shape[:-1], *features))


def _draw_linen_norm_layer(choices: Choices, shape: Shape) -> LayerCode:
    groups = f"GroupNorm({choices.pick(*find_common_divisors(shape[-1]))}, epsilon=1e-3)"
    norm = choices.pick("LayerNorm(epsilon=1e-3)", "RMSNorm(epsilon=1e-3)", groups)
    return _make_linen_code(norm, shape, shape)


def _draw_linen_convolution_layer(choices: Choices, shape: Shape) -> LayerCode:
    *space, width = shape
    options, after = draw_conv_options(choices, tuple(space), width)
    module = "Conv({filters}, {sizes}, {strides}, {padding!r}, 1, {dilation}, {groups})"
    return _make_linen_code(module.format(**options), shape, after)


def _draw_linen_sequence_layer(choices: Choices, shape: Shape) -> LayerCode:
    units, heads = choices.pick_weighted(WIDTHS), choices.pick(*find_common_divisors(shape[-1]))
    module, width = choices.pick(
        (f"MultiHeadDotProductAttention({heads})", shape[-1]),
        (f"RNN(nn.OptimizedLSTMCell({units}))", units),
        (f"RNN(nn.GRUCell({units}))", units),
    )
    return _make_linen_code(module, shape, (shape[0], width))


_LIBRARY = LibrarySyntax(
    layers={
        "eqx.Linear": (ANY, 4, _draw_equinox_linear),
        "eqx.MLP": (ANY, 3, _draw_equinox_mlp),
        "eqx norm": (ANY, 3, _draw_equinox_norm),
        "eqx.Conv": (SPATIAL, 6, _draw_equinox_convolution),
        "eqx.MultiheadAttention": ((2,), 4, _draw_equinox_attention),
        "eqx.GRUCell": ((2,), 3, _draw_equinox_gru),
        "linen.Dense": (range(1, 4), 4, _draw_linen_dense_layer),
        "linen norm": (ANY, 3, _draw_linen_norm_layer),
        "linen.Conv": (SPATIAL, 6, _draw_linen_convolution_layer),
        "linen of sequences": ((2,), 6, _draw_linen_sequence_layer),
    },
    containers={"dict": 4, "list": 2, "tuple": 1, "namedtuple": 1, "dataclass": 2},
    weight=("{scale} * normal(key({key}), {shape})", "{}"),
    frozen=("{scale} * normal(key({key}), {shape})", "jax.lax.stop_gradient({})"),
    constants={"{}": 1},
    linear=({"w": ()}, "{x} @ {w}"),
    embeddings=[
        ({"table": ()}, "{table}[{x}]", "{x} @ {table}.T"),
        ({"table": ()}, "jnp.take({table}, {x}, axis=0)", "{x} @ {table}.T"),
        ({"table": ()}, "jax.nn.one_hot({x}, {rows}) @ {table}", 'jnp.einsum("...w,vw->...v", {x}, {table})'),
        (
            "eqx.nn.Embedding({features}, {width}, key=key({key}))",
            "jax.vmap(jax.vmap({h}))({x})",
            "{x} @ {h}.weight.T",
        ),
    ],
    stacked="jax.vmap(lambda k: {made})({key}0 + jnp.arange({number}))",
    wrappers={
        "remat": "jax.checkpoint(lambda p, x: {call})({h}, {x})",
        "scan": "jax.lax.scan(lambda x, p: ({call}, None), {x}, {h})[0]",
        "experts": "jax.vmap(lambda p, x: {call}, (0, None))({h}, {x})",
        "each": "jax.vmap(lambda p, x: {call}, (None, {axis}), 1)({h}, {x})",
    },
    # These layers contain functions, and JAX cannot map over functions.
    unsupported=dict.fromkeys(WRAPPERS, ("eqx.MLP", "eqx.MultiheadAttention")),
)
