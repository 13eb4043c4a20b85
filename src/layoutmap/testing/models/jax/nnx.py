"""Draws modules of flax.nnx; some of their layers are expressions over Params and other Variables of their own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.jax.describing import Container, Model, block
from layoutmap.testing.models.jax.functions import ANY, PLACES, Made, activated, convolution
from layoutmap.testing.models.jax.growing import Growing, Library
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.values import WIDTHS, divisors, heads_of

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
"""Definitions of a program's own, by name."""


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
        modules = {part.module: part.shape for part in self.parts if part.module}
        return {self.paths[name]: shape for name, shape in modules.items() if uses[name] == 1}

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
    grown = Growing(choices, _LIBRARY)
    held = grown.held("attributes")
    rngs = choices.one_of("nnx.Rngs(0)", "nnx.Rngs(0, dropout=1)", "nnx.Rngs(params=2, dropout=3)")
    inputs, parts, outputs = tuple(grown.inputs), tuple(grown.parts), tuple(grown.outputs)
    return Module(inputs, parts, held, outputs, choices.one_in(8), rngs)


def _linear(choices: Choices, shape: Shape) -> Made:
    width, bias = choices.weighted(WIDTHS), choices.one_of("", ", use_bias=False")
    return (
        activated(choices, "{h}({x})"),
        f"nnx.Linear({shape[-1]}, {width}{bias}, rngs=rngs)",
        (*shape[:-1], width),
    )


def _general(choices: Choices, shape: Shape) -> Made:
    equation, kernel, summed, after = heads_of(choices, shape)
    made = choices.one_of(
        f"nnx.LinearGeneral({kernel[:summed]}, {kernel[summed:]}, axis={(*range(-summed, 0),)}, rngs=rngs)",
        f'nnx.Einsum("{equation}", {kernel}, {kernel[summed:]}, rngs=rngs)',
        f'nnx.Einsum("{equation}", {kernel}, rngs=rngs)',
    )
    return "{h}({x})", made, after


def _convolution(choices: Choices, shape: Shape) -> Made:
    *space, width = shape
    settings, after = convolution(choices, tuple(space), width)
    if len(space) == 1 and settings["padding"] == "SAME" and choices.one_in(3):
        settings["padding"] = "CAUSAL"
    made = (
        "nnx.Conv({width}, {filters}, {sizes}, {strides}, padding={padding!r}, kernel_dilation={dilation}, "
        "feature_group_count={groups}, rngs=rngs)"
    )
    return activated(choices, "{h}({x})"), made.format(**settings, width=width), after


def _transposed(choices: Choices, shape: Shape) -> Made:
    *space, width = shape
    filters, size = choices.weighted(WIDTHS), choices.one_of(3, 2, 4)
    made = f"nnx.ConvTranspose({width}, {filters}, {(size,) * len(space)}, {(2,) * len(space)}, rngs=rngs)"
    return "{h}({x})", made, (*(2 * n for n in space), filters)


def _norm(choices: Choices, shape: Shape) -> Made:
    width = shape[-1]
    norms = f"LayerNorm({width}", f"RMSNorm({width}", f"GroupNorm({width}, {choices.one_of(*divisors(width))}"
    norm = choices.one_of(*norms, *[f"InstanceNorm({width}"] * (len(shape) > 1))
    return "{h}({x})", f"nnx.{norm}, rngs=rngs)", shape


def _attention(choices: Choices, shape: Shape) -> Made:
    heads, groups = choices.one_of((4, 4), (4, 2), (2, 2), (8, 2), (8, 4))
    width, mask = heads * choices.one_of(4, 8), choices.one_of("", ", mask=nnx.make_causal_mask({x}[..., 0])")
    made = (
        f"nnx.MultiHeadAttention({heads}, {shape[-1]}, {width}, num_kv_heads={groups}, decode=False, "
        f"normalize_qk={choices.one_in(4)}, rngs=rngs)"
    )
    return f"{{h}}({{x}}{mask})", made, shape


def _recurrent(choices: Choices, shape: Shape) -> Made:
    units, cell = (
        choices.weighted(WIDTHS),
        choices.one_of("LSTMCell", "GRUCell", "SimpleCell", "OptimizedLSTMCell"),
    )
    one = f"nnx.{cell}({shape[-1]}, {units}, rngs=rngs)"
    made, width = choices.one_of(
        (f"nnx.RNN({one})", units),
        (f"nnx.RNN({one}, reverse=True, keep_order=True)", units),
        (f"nnx.Bidirectional(nnx.RNN({one}), nnx.RNN({one}))", 2 * units),
    )
    return "{h}({x})", made, (shape[0], width)


def _several(choices: Choices, shape: Shape) -> Made:
    """Modules in modules."""
    *places, width = shape
    inner, after, linear = (
        choices.weighted(WIDTHS),
        choices.weighted(WIDTHS),
        "nnx.Linear({}, {}, rngs=rngs)".format,
    )
    made, after = choices.one_of(
        (f"Blocks({width}, {inner}, {choices.one_of(1, 2)}, rngs)", width),
        (f"nnx.Sequential({linear(width, inner)}, nnx.tanh, {linear(inner, after)})", after),
        (f"nnx.Sequential({linear(width, inner)}, nnx.LayerNorm({inner}, rngs=rngs))", inner),
        (f"nnx.LoRALinear({width}, {after}, lora_rank=2, rngs=rngs)", after),
        (f"nnx.LoRA({width}, 4, {after}, base_module={linear(width, after)}, rngs=rngs)", after),
    )
    return "{h}({x})", made, (*places, after)


def _keeping(made: str) -> Callable[[Choices, Shape], Made]:
    """Make a module that keeps the shape."""
    return lambda _, shape: ("{h}({x})", made.replace("{width}", str(shape[-1])), shape)


_LIBRARY = Library(
    layers={
        "Linear": (ANY, 8, _linear),
        "LinearGeneral": (range(1, 4), 5, _general),
        "norm": (ANY, 6, _norm),
        "BatchNorm": (ANY, 5, _keeping("nnx.BatchNorm({width}, momentum=0.9, rngs=rngs)")),
        "Conv": (PLACES, 10, _convolution),
        "ConvTranspose": (PLACES, 3, _transposed),
        "MultiHeadAttention": ((2,), 7, _attention),
        "RNN": ((2,), 7, _recurrent),
        "Dropout": (ANY, 4, _keeping("nnx.Dropout(0.25, rngs=rngs)")),
        "several": (ANY, 6, _several),
        "PReLU": (ANY, 1, _keeping("nnx.PReLU()")),
        "Centered": (ANY, 2, _keeping("Centered({width})")),
    },
    containers={"nnx.Dict": 4, "nnx.List": 2, "nnx.data": 1},
    weight=("nnx.Param({scale} * rngs.params.normal({shape}))", "{}[...]"),
    frozen=("Fixed({scale} * rngs.params.normal({shape}))", "{}[...]"),
    constants={"Fixed({})": 2, "{}": 1},
    linear=("nnx.Linear({features}, {width}, rngs=rngs)", "{h}({x})"),
    tables=[
        ("nnx.Embed({features}, {width}, rngs=rngs)", "{h}({x})", "{h}.attend({x})"),
        ("nnx.Embed({features}, {width}, rngs=rngs)", "{h}({x})", ""),
        ({"table": ()}, "{table}[{x}]", "{x} @ {table}.T"),
    ],
    stacked="stacked({number}, lambda rngs: {made}, rngs)",
    wrapped={
        "remat": "nnx.remat(lambda p, x: {call})({h}, {x})",
        "scan": "nnx.scan(lambda x, p: {call}, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)({x}, {h})",
        "experts": "nnx.vmap(lambda p, x: {call}, in_axes=(0, None))({h}, {x})",
        "each": "nnx.vmap(lambda p, x: {call}, in_axes=(None, {axis}), out_axes=1)({h}, {x})",
    },
    unfit={"each": ("BatchNorm", "Centered", "Dropout")},
)
