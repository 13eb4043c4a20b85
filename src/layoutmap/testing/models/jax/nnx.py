"""Draws modules of flax.nnx; some of their layers are expressions over Params and other Variables of their own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.jax.describing import Container, Model, block
from layoutmap.testing.models.jax.functions import ANY, PLACES, Held, activated, heads_of, windows
from layoutmap.testing.models.jax.growing import Growing, Library
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.values import WIDTHS, divisors

_OWN = {
    "Fixed": """\
class Fixed(nnx.Variable):
    pass


""",
    "Centered": """\
class Centered(nnx.Module):
    def __init__(self, width):
        self.mean, self.count = nnx.BatchStat(jnp.zeros(width)), nnx.Variable(jnp.zeros((), "int32"))

    def __call__(self, x):
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.reshape(-1, x.shape[-1]).mean(0)
        self.count[...] += 1
        return x - self.mean[...]


""",
    "Blocks": """\
class Blocks(nnx.Module):
    def __init__(self, width, inner, number, rngs):
        make = lambda: nnx.Dict(up=nnx.Linear(width, inner, rngs=rngs), down=nnx.Linear(inner, width, rngs=rngs))
        self.blocks = nnx.List([make() for _ in range(number)])

    def __call__(self, x):
        for block in self.blocks:
            x = x + block.down(jax.nn.gelu(block.up(x)))
        return x


""",
    "stacked": """\
def stacked(number, make, rngs):
    return nnx.split_rngs(splits=number)(nnx.vmap(make))(rngs)


""",
}
"""What a program defines itself, by name."""


@dataclass(frozen=True)
class Module(Model):
    """A module of flax.nnx.

    Args:
        rngs: The expression of its random streams.
    """

    imports: ClassVar[str] = """\
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from layoutmap.adapters.jax import train_with
"""
    rngs: str = "nnx.Rngs(0)"

    @property
    def layer_outputs(self) -> Mapping[str, Shape]:
        """The shapes of outputs of modules that are called once, by their paths."""
        uses = Counter(name for part in self.parts for name in re.findall(r"{(l\d+)}", part.call))
        read = self.held.read("")
        paths = {name: re.sub(r"\[(\d+)\]", r".\1", expression)[1:] for name, expression in read.items()}
        return {
            paths[part.module]: part.shape for part in self.parts if part.module and uses[part.module] == 1
        }

    def source(self, optimizer: str) -> str:
        """The program of `make_model`.

        Args:
            optimizer: The expression that makes the optimizer.
        """
        items = [
            (key, item.source() if isinstance(item, Container) else item) for key, item in self.held.items
        ]
        inputs = ", ".join(each.name for each in self.inputs)
        methods = [
            block("def __init__(self, rngs):", [f"self.{key} = {item}" for key, item in items] or ["pass"]),
            "",
            block(f"def __call__(self, {inputs}):", self.lines("self")),
        ]
        body = block("class Net(nnx.Module):", methods)
        own = [source for name, source in _OWN.items() if re.search(rf"\b{name}\(", body)]
        return self.program("".join(own) + body, [], f"Net({self.rngs})", optimizer)


def draw_model(choices: Choices) -> Module:
    """A module of flax.nnx."""
    growing = Growing(choices, _LIBRARY)
    rngs = choices.one_of("nnx.Rngs(0)", "nnx.Rngs(0, dropout=1)", "nnx.Rngs(params=2, dropout=3)")
    return Module(
        tuple(growing.inputs),
        tuple(growing.parts),
        growing.arranged(),
        tuple(growing.outputs),
        choices.one_in(8),
        rngs,
    )


def _linear(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    width = choices.weighted(WIDTHS)
    bias = choices.one_of("", ", use_bias=False")
    return (
        activated(choices, "{h}({x})"),
        f"nnx.Linear({shape[-1]}, {width}{bias}, rngs=rngs)",
        (*shape[:-1], width),
    )


def _linear_general(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    _, kernel, summed, after = heads_of(choices, shape)
    axis = tuple(range(-summed, 0))
    return (
        "{h}({x})",
        f"nnx.LinearGeneral({kernel[:summed]}, {kernel[summed:]}, axis={axis}, rngs=rngs)",
        after,
    )


def _einsum(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    equation, kernel, summed, after = heads_of(choices, shape)
    bias = choices.one_of(None, kernel[summed:])
    return "{h}({x})", f'nnx.Einsum("{equation}", {kernel}, {bias}, rngs=rngs)', after


def _convolution(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    sizes, strides, dilation, padding, places = windows(choices, shape[:-1])
    filters = choices.weighted(WIDTHS)
    groups = choices.one_of(*divisors(shape[-1], filters)) if choices.one_in(2) else 1
    if len(places) == 1 and padding == "SAME" and choices.one_in(3):
        padding = "CAUSAL"
    made = (
        f'nnx.Conv({shape[-1]}, {filters}, {sizes}, {strides}, padding="{padding}", kernel_dilation={dilation}, '
        f"feature_group_count={groups}, rngs=rngs)"
    )
    return activated(choices, "{h}({x})"), made, (*places, filters)


def _transposed(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    *space, width = shape
    filters, size = choices.weighted(WIDTHS), choices.one_of(3, 2, 4)
    made = f"nnx.ConvTranspose({width}, {filters}, {(size,) * len(space)}, {(2,) * len(space)}, rngs=rngs)"
    return "{h}({x})", made, (*(2 * n for n in space), filters)


def _norm(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    kinds = ("LayerNorm", "RMSNorm", "InstanceNorm")
    return "{h}({x})", f"nnx.{choices.one_of(*kinds[: 2 + (len(shape) > 1)])}({shape[-1]}, rngs=rngs)", shape


def _batch_norm(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    return "{h}({x})", f"nnx.BatchNorm({shape[-1]}, momentum={choices.one_of(0.99, 0.9)}, rngs=rngs)", shape


def _group_norm(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    return "{h}({x})", f"nnx.GroupNorm({shape[-1]}, {choices.one_of(*divisors(shape[-1]))}, rngs=rngs)", shape


def _attention(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    heads = choices.one_of(4, 2, 8)
    groups = choices.one_of(heads, heads // 2)
    width = heads * choices.one_of(4, 8)
    mask = ", mask=nnx.make_causal_mask({x}[..., 0])" if choices.one_in(2) else ""
    made = (
        f"nnx.MultiHeadAttention({heads}, {shape[-1]}, {width}, num_kv_heads={groups}, decode=False, "
        f"normalize_qk={choices.one_in(4)}, rngs=rngs)"
    )
    return f"{{h}}({{x}}{mask})", made, shape


def _recurrent(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    units, cell = (
        choices.weighted(WIDTHS),
        choices.one_of("LSTMCell", "GRUCell", "SimpleCell", "OptimizedLSTMCell"),
    )
    one = f"nnx.{cell}({shape[-1]}, {units}, rngs=rngs)"
    if choices.one_in(3):
        return "{h}({x})", f"nnx.Bidirectional(nnx.RNN({one}), nnx.RNN({one}))", (shape[0], 2 * units)
    reverse = ", reverse=True, keep_order=True" if choices.one_in(4) else ""
    return "{h}({x})", f"nnx.RNN({one}{reverse})", (shape[0], units)


def _lora(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    width, rank = choices.weighted(WIDTHS), choices.one_of(2, 4)
    made = choices.one_of(
        f"nnx.LoRALinear({shape[-1]}, {width}, lora_rank={rank}, rngs=rngs)",
        f"nnx.LoRA({shape[-1]}, {rank}, {width}, base_module=nnx.Linear({shape[-1]}, {width}, rngs=rngs), rngs=rngs)",
    )
    return "{h}({x})", made, (*shape[:-1], width)


def _pooling(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    sizes, strides, _, padding, _ = windows(choices, shape[:-1])
    fits = all(size <= n for size, n in zip(sizes, shape, strict=False)) and padding == "VALID"
    places = (
        -(-(n - fits * (size - 1)) // step) for n, size, step in zip(shape, sizes, strides, strict=False)
    )
    pool = choices.one_of("max_pool", "avg_pool")
    return f'nnx.{pool}({{x}}, {sizes}, {strides}, "{"VALID" if fits else "SAME"}")', {}, (*places, shape[-1])


def _sequential(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    inner, width = choices.weighted(WIDTHS), choices.weighted(WIDTHS)
    norm = choices.one_of("", f"nnx.LayerNorm({inner}, rngs=rngs), ")
    layers = f"nnx.Linear({shape[-1]}, {inner}, rngs=rngs), {norm}nnx.tanh, nnx.Linear({inner}, {width}, rngs=rngs)"
    return "{h}({x})", f"nnx.Sequential({layers})", (*shape[:-1], width)


def _blocks(choices: Choices, shape: Shape) -> tuple[str, Held, Shape]:
    return "{h}({x})", f"Blocks({shape[-1]}, {choices.weighted(WIDTHS)}, {choices.one_of(1, 2)}, rngs)", shape


_TABLE = {"table": ((), 1)}
_LIBRARY = Library(
    layers={
        "Linear": (ANY, 8, _linear),
        "LinearGeneral": (range(1, 4), 4, _linear_general),
        "Einsum": (range(1, 4), 4, _einsum),
        "norm": (ANY, 5, _norm),
        "BatchNorm": (ANY, 5, _batch_norm),
        "GroupNorm": (ANY, 3, _group_norm),
        "Conv": (PLACES, 10, _convolution),
        "ConvTranspose": (PLACES, 3, _transposed),
        "pool": (PLACES, 4, _pooling),
        "MultiHeadAttention": ((2,), 7, _attention),
        "RNN": ((2,), 7, _recurrent),
        "Dropout": (ANY, 4, lambda choices, shape: ("{h}({x})", "nnx.Dropout(0.25, rngs=rngs)", shape)),
        "LoRA": (ANY, 3, _lora),
        "PReLU": (ANY, 1, lambda choices, shape: ("{h}({x})", "nnx.PReLU()", shape)),
        "Sequential": (ANY, 3, _sequential),
        "Blocks": (ANY, 3, _blocks),
        "Centered": (ANY, 2, lambda choices, shape: ("{h}({x})", f"Centered({shape[-1]})", shape)),
    },
    containers={"nnx.Dict": 2, "nnx.List": 1},
    weight=("nnx.Param({scale} * rngs.params.normal({shape}))", "{}[...]"),
    frozen=("Fixed({scale} * rngs.params.normal({shape}))", "{}[...]"),
    constants={"Fixed({})": 2, "{}": 1},
    linear=("nnx.Linear({features}, {width}, rngs=rngs)", "{h}({x})"),
    tables=(
        ("nnx.Embed({features}, {width}, rngs=rngs)", "{h}({x})", "{h}.attend({x})"),
        ("nnx.Embed({features}, {width}, rngs=rngs)", "{h}({x})", ""),
        (_TABLE, "{table}[{x}]", "{x} @ {table}.T"),
    ),
    stacked="stacked({number}, lambda rngs: {made}, rngs)",
    wrapped={
        "remat": "nnx.remat(lambda p, x: {call})({h}, {x})",
        "scan": "nnx.scan(lambda x, p: {call}, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)({x}, {h})",
        "experts": "nnx.vmap(lambda p, x: {call}, in_axes=(0, None))({h}, {x})",
        "each": "nnx.vmap(lambda p, x: {call}, in_axes=(None, {axis}), out_axes=1)({h}, {x})",
    },
    unfit={"each": ("BatchNorm", "Centered", "Dropout")},
)
