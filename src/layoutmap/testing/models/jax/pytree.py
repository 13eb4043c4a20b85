"""Draws pytrees of weights, each with a function that computes with them; parts are of Equinox and flax.linen, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.jax.describing import Model, block
from layoutmap.testing.models.jax.functions import ANY, PLACES, Held, windows
from layoutmap.testing.models.jax.growing import Growing, Library
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.values import WIDTHS, divisors


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
    growing = Growing(choices, _LIBRARY)
    held = replace(growing.arranged(), kind=choices.weighted(_LIBRARY.containers), name="Params")
    return Pytree(
        tuple(growing.inputs), tuple(growing.parts), held, tuple(growing.outputs), choices.one_in(8)
    )


def _rows(call: str, axes: int) -> str:
    """A call of a module of Equinox, which takes one row and one place, for all."""
    for _ in range(axes):
        call = f"jax.vmap({call})"
    return f"{call}({{x}})"


def _eqx_linear(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    width = choices.weighted(WIDTHS)
    return (
        _rows("{h}", len(shape)),
        f"eqx.nn.Linear({shape[-1]}, {width}, key=key({{key}}))",
        (*shape[:-1], width),
    )


def _eqx_mlp(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    width = choices.weighted(WIDTHS)
    made = f"eqx.nn.MLP({shape[-1]}, {width}, {choices.weighted(WIDTHS)}, {choices.one_of(1, 2)}, key=key({{key}}))"
    return _rows("{h}", len(shape)), made, (*shape[:-1], width)


def _eqx_norm(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    norm = choices.one_of(
        (f"eqx.nn.LayerNorm({shape[-1]})", len(shape)),
        (f"eqx.nn.RMSNorm({shape[-1]})", len(shape)),
        (f"eqx.nn.LayerNorm({shape})", 1),
    )
    return _rows("{h}", norm[1]), norm[0], shape


def _eqx_convolution(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    """Features come before places."""
    width, *space = shape
    sizes, strides, dilation, padding, places = windows(choices, tuple(space))
    filters = choices.weighted(WIDTHS)
    groups = choices.one_of(*divisors(width, filters)) if choices.one_in(2) else 1
    made = (
        f"eqx.nn.Conv({len(space)}, {width}, {filters}, {sizes}, {strides}, {padding!r}, dilation={dilation}, "
        f"groups={groups}, key=key({{key}}))"
    )
    return _rows("{h}", 1), made, (filters, *places)


def _eqx_attention(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    heads = choices.one_of(*divisors(shape[-1]))
    made = f"eqx.nn.MultiheadAttention({heads}, {shape[-1]}, key=key({{key}}))"
    mask = f", jnp.tril(jnp.ones(({shape[0]}, {shape[0]}), bool))" if choices.one_in(2) else ""
    return f"jax.vmap(lambda y: {{h}}(y, y, y{mask}))({{x}})", made, shape


def _eqx_cell(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    units = choices.weighted(WIDTHS)
    made = f"eqx.nn.GRUCell({shape[-1]}, {units}, key=key({{key}}))"
    step = "lambda h, y: 2 * ({h}(y, h),)"
    return (
        f"jax.vmap(lambda y: jax.lax.scan({step}, jnp.zeros({units}), y)[1])({{x}})",
        made,
        (shape[0], units),
    )


def _linen(module: str, shape: Shape, after: Shape) -> tuple[str, Held, Shape]:
    zeros = f"jnp.zeros({(1, *shape)})"
    return f"nn.{module}.apply({{h}}, {{x}})", f"nn.{module}.init(key({{key}}), {zeros})", after


def _linen_dense(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    width = choices.weighted(WIDTHS)
    heads = choices.one_of((width,), (4, 8), (2, 4))
    features = width if len(heads) == 1 else heads
    return _linen(f"DenseGeneral({features})", shape, (*shape[:-1], *heads))


def _linen_norm(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    groups = f"GroupNorm({choices.one_of(*divisors(shape[-1]))})"
    return _linen(choices.one_of("LayerNorm()", "RMSNorm()", groups), shape, shape)


def _linen_convolution(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    sizes, strides, dilation, padding, places = windows(choices, shape[:-1])
    filters = choices.weighted(WIDTHS)
    groups = choices.one_of(*divisors(shape[-1], filters)) if choices.one_in(2) else 1
    made = f"Conv({filters}, {sizes}, {strides}, {padding!r}, kernel_dilation={dilation}, feature_group_count={groups})"
    return _linen(made, shape, (*places, filters))


def _linen_attention(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    heads = choices.one_of(*divisors(shape[-1]))
    return _linen(f"MultiHeadDotProductAttention({heads})", shape, shape)


def _linen_recurrent(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    units = choices.weighted(WIDTHS)
    cell = choices.one_of("OptimizedLSTMCell", "GRUCell", "SimpleCell")
    return _linen(f"RNN(nn.{cell}({units}))", shape, (shape[0], units))


_AROUND = {
    "remat": "jax.checkpoint(lambda p, x: {call})({h}, {x})",
    "scan": "jax.lax.scan(lambda x, p: ({call}, None), {x}, {h})[0]",
    "experts": "jax.vmap(lambda p, x: {call}, (0, None))({h}, {x})",
    "each": "jax.vmap(lambda p, x: {call}, (None, {axis}), 1)({h}, {x})",
}
_TABLE = {"table": ((), 1)}
_LIBRARY = Library(
    layers={
        "eqx.Linear": (ANY, 4, _eqx_linear),
        "eqx.MLP": (ANY, 3, _eqx_mlp),
        "eqx norm": (ANY, 3, _eqx_norm),
        "eqx.Conv": (PLACES, 6, _eqx_convolution),
        "eqx.MultiheadAttention": ((2,), 4, _eqx_attention),
        "eqx.GRUCell": ((2,), 3, _eqx_cell),
        "linen.DenseGeneral": (range(1, 4), 4, _linen_dense),
        "linen norm": (ANY, 3, _linen_norm),
        "linen.Conv": (PLACES, 6, _linen_convolution),
        "linen.MultiHeadDotProductAttention": ((2,), 4, _linen_attention),
        "linen.RNN": ((2,), 3, _linen_recurrent),
    },
    containers={"dict": 4, "list": 2, "tuple": 1, "namedtuple": 1, "dataclass": 2},
    weight=("{scale} * normal(key({key}), {shape})", "{}"),
    frozen=("{scale} * normal(key({key}), {shape})", "jax.lax.stop_gradient({})"),
    constants={"{}": 1},
    linear=({"w": ((), 0)}, "{x} @ {w}"),
    tables=(
        (_TABLE, "{table}[{x}]", "{x} @ {table}.T"),
        (_TABLE, "jnp.take({table}, {x}, axis=0)", "{x} @ {table}.T"),
        (_TABLE, "jax.nn.one_hot({x}, {rows}) @ {table}", 'jnp.einsum("...w,vw->...v", {x}, {table})'),
        (
            "eqx.nn.Embedding({features}, {width}, key=key({key}))",
            "jax.vmap(jax.vmap({h}))({x})",
            "{x} @ {h}.weight.T",
        ),
    ),
    stacked="jax.vmap(lambda k: {made})({key}0 + jnp.arange({number}))",
    wrapped=_AROUND,
    unfit={"scan": ("eqx.MLP", "eqx.MultiheadAttention"), "experts": ("eqx.MLP", "eqx.MultiheadAttention")},
)
