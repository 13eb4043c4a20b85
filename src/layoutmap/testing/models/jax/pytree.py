"""Draws pytrees of weights, each with a function that computes with them; parts are of Equinox and flax.linen, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.jax.describing import CAST, Model, block
from layoutmap.testing.models.jax.functions import ANY, PLACES, Made, convolution
from layoutmap.testing.models.jax.growing import WRAPPERS, Growing, Library
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.values import WIDTHS, divisors

_MIXED = f"""{CAST}def forward(p, *inputs, forward=forward, **named):
    return forward(cast(p), *cast(inputs), **cast(named))
"""


@dataclass(frozen=True)
class Pytree(Model):
    """A pytree, and its forward pass."""

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
    layer_outputs: ClassVar[Mapping[str, Shape]] = {}
    precisions: ClassVar[Mapping[str, str]] = {**Model.precisions, "mixed_bfloat16": _MIXED}

    def source(self, optimizer: str) -> str:
        """The program of `make_model`.

        Args:
            optimizer: The expression that makes the optimizer.
        """
        inputs = ", ".join(each.name for each in self.inputs)
        forward = block(f"def forward(p, {inputs}):", self.lines("p"))
        return self.program(
            forward, [f"params = {self.held.source(is_long=True)}"], "params, forward=forward", optimizer
        )


def draw_model(choices: Choices) -> Pytree:
    """A pytree, and its forward pass."""
    grown = Growing(choices, _LIBRARY)
    held = grown.held(choices.weighted(_LIBRARY.containers))
    inputs, parts, outputs = tuple(grown.inputs), tuple(grown.parts), tuple(grown.outputs)
    return Pytree(inputs, parts, held, outputs, choices.one_in(8))


# -- modules of Equinox, which take one row


def _rows(made: str, num_axes: int, after: Shape) -> Made:
    """A module that is called for each row, and for each place of as many axes."""
    return f"{'jax.vmap(' * num_axes}{{h}}{')' * num_axes}({{x}})", made, after


def _eqx_linear(choices: Choices, shape: Shape) -> Made:
    width = choices.weighted(WIDTHS)
    return _rows(f"eqx.nn.Linear({shape[-1]}, {width}, key=key({{key}}))", len(shape), (*shape[:-1], width))


def _eqx_mlp(choices: Choices, shape: Shape) -> Made:
    inner, width = choices.weighted(WIDTHS), choices.weighted(WIDTHS)
    made = f"eqx.nn.MLP({shape[-1]}, {width}, {inner}, {choices.one_of(1, 2)}, key=key({{key}}))"
    return _rows(made, len(shape), (*shape[:-1], width))


def _eqx_norm(choices: Choices, shape: Shape) -> Made:
    norm, axes = choices.one_of(
        (f"LayerNorm({shape[-1]})", len(shape)),
        (f"RMSNorm({shape[-1]})", len(shape)),
        (f"LayerNorm({shape})", 1),
    )
    return _rows(f"eqx.nn.{norm}", axes, shape)


def _eqx_convolution(choices: Choices, shape: Shape) -> Made:
    """Features come before places."""
    width, *space = shape
    settings, (*places, filters) = convolution(choices, tuple(space), width)
    made = "{filters}, {sizes}, {strides}, {padding!r}, {dilation}, {groups}, key=key".format(**settings)
    return _rows(f"eqx.nn.Conv({len(space)}, {width}, {made}({{key}}))", 1, (filters, *places))


def _eqx_attention(choices: Choices, shape: Shape) -> Made:
    length, width = shape
    made = f"eqx.nn.MultiheadAttention({choices.one_of(*divisors(width))}, {width}, key=key({{key}}))"
    mask = choices.one_of("", f", jnp.tril(jnp.ones(({length}, {length}), bool))")
    return f"jax.vmap(lambda y: {{h}}(y, y, y{mask}))({{x}})", made, shape


def _eqx_cell(choices: Choices, shape: Shape) -> Made:
    units = choices.weighted(WIDTHS)
    made = f"eqx.nn.GRUCell({shape[-1]}, {units}, key=key({{key}}))"
    step = f"jax.lax.scan(lambda h, z: 2 * ({{h}}(z, h),), jnp.zeros({units}), y)[1]"
    return f"jax.vmap(lambda y: {step})({{x}})", made, (shape[0], units)


# -- modules of flax.linen, whose weights are a dict


def _linen(module: str, shape: Shape, after: Shape) -> Made:
    return (
        f"nn.{module}.apply({{h}}, {{x}})",
        f"nn.{module}.init(key({{key}}), jnp.zeros({(1, *shape)}))",
        after,
    )


def _linen_dense(choices: Choices, shape: Shape) -> Made:
    features = choices.one_of((choices.weighted(WIDTHS),), (4, 8), (2, 4))
    return _linen(f"DenseGeneral({features})", shape, (*shape[:-1], *features))


def _linen_norm(choices: Choices, shape: Shape) -> Made:
    groups = f"GroupNorm({choices.one_of(*divisors(shape[-1]))})"
    return _linen(choices.one_of("LayerNorm()", "RMSNorm()", groups), shape, shape)


def _linen_convolution(choices: Choices, shape: Shape) -> Made:
    *space, width = shape
    settings, after = convolution(choices, tuple(space), width)
    made = "Conv({filters}, {sizes}, {strides}, {padding!r}, 1, {dilation}, {groups})"
    return _linen(made.format(**settings), shape, after)


def _linen_sequence(choices: Choices, shape: Shape) -> Made:
    units, heads = choices.weighted(WIDTHS), choices.one_of(*divisors(shape[-1]))
    made, width = choices.one_of(
        (f"MultiHeadDotProductAttention({heads})", shape[-1]),
        (f"RNN(nn.OptimizedLSTMCell({units}))", units),
        (f"RNN(nn.GRUCell({units}))", units),
    )
    return _linen(made, shape, (shape[0], width))


_LIBRARY = Library(
    layers={
        "eqx.Linear": (ANY, 4, _eqx_linear),
        "eqx.MLP": (ANY, 3, _eqx_mlp),
        "eqx norm": (ANY, 3, _eqx_norm),
        "eqx.Conv": (PLACES, 6, _eqx_convolution),
        "eqx.MultiheadAttention": ((2,), 4, _eqx_attention),
        "eqx.GRUCell": ((2,), 3, _eqx_cell),
        "linen.Dense": (range(1, 4), 4, _linen_dense),
        "linen norm": (ANY, 3, _linen_norm),
        "linen.Conv": (PLACES, 6, _linen_convolution),
        "linen of sequences": ((2,), 6, _linen_sequence),
    },
    containers={"dict": 4, "list": 2, "tuple": 1, "namedtuple": 1, "dataclass": 2},
    weight=("{scale} * normal(key({key}), {shape})", "{}"),
    frozen=("{scale} * normal(key({key}), {shape})", "jax.lax.stop_gradient({})"),
    constants={"{}": 1},
    linear=({"w": ()}, "{x} @ {w}"),
    tables=[
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
    wrapped={
        "remat": "jax.checkpoint(lambda p, x: {call})({h}, {x})",
        "scan": "jax.lax.scan(lambda x, p: ({call}, None), {x}, {h})[0]",
        "experts": "jax.vmap(lambda p, x: {call}, (0, None))({h}, {x})",
        "each": "jax.vmap(lambda p, x: {call}, (None, {axis}), 1)({h}, {x})",
    },
    unfit=dict.fromkeys(WRAPPERS, ("eqx.MLP", "eqx.MultiheadAttention")),  # they hold more than arrays
)
