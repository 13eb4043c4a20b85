"""Draw modules of flax.nnx. Some layers are expressions over `nnx.Param` and other variables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.jax.drawing import JaxBuilder, LibrarySyntax
from layoutmap.testing.models.jax.functions import (
    ANY,
    SPATIAL,
    LayerCode,
    draw_conv_options,
    wrap_in_random_activation,
)
from layoutmap.testing.models.jax.model import Container, JaxModel, make_indented_block
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.values import WIDTHS, draw_heads_einsum, find_common_divisors

_SOURCES = {
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
"""Source of classes and functions that a program may define, by name."""


_AUTO_AXES = """\
Body = Net


class Net(Body):
    def __call__(self, *inputs, **named):
        graph, state = nnx.split(self)

        def call(state, inputs, named):
            net = nnx.merge(graph, state)
            return Body.__call__(net, *inputs, **named), nnx.state(net, nnx.Not(nnx.Param))

        outputs, changed = jax.sharding.auto_axes(call, out_sharding=jax.P())(state, inputs, named)
        nnx.update(self, changed)
        return outputs


def loss(outputs, targets, loss=loss):
    return jax.sharding.auto_axes(loss, out_sharding=jax.P())(outputs, targets)
"""


@dataclass(frozen=True)
class NnxModel(JaxModel):
    """A random model that is a module of flax.nnx."""

    imports: ClassVar[str] = """\
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from layoutmap.adapters.jax import train_with
"""
    auto_axes_lines: ClassVar[str] = _AUTO_AXES
    rngs: str = "nnx.Rngs(0)"

    @property
    def layer_output_shapes(self) -> Mapping[str, Shape]:
        """A dict from the path of each module that is called once to its output shape."""
        num_uses = Counter(name for line in self.lines for name in re.findall(r"{(l\d+)}", line.call))
        modules = {line.module: line.shape for line in self.lines if line.module}
        return {self.layer_paths[name]: shape for name, shape in modules.items() if num_uses[name] == 1}

    def make_code(self, optimizer: str) -> str:
        """Return the program that defines `make_model`."""
        items = [
            (key, item.make_code() if isinstance(item, Container) else item)
            for key, item in self.parameters.items
        ]
        inputs = ", ".join(each.name for each in self.inputs)
        methods = [
            make_indented_block(
                "def __init__(self, rngs):", [f"self.{key} = {item}" for key, item in items] or ["pass"]
            ),
            "",
            make_indented_block(f"def __call__(self, {inputs}):", self.make_forward_lines("self")),
        ]
        net = make_indented_block("class Net(nnx.Module):", methods)
        sources = [source for name, source in _SOURCES.items() if re.search(rf"\b{name}\(", net)]
        return self.make_program("".join(sources) + net, [], f"Net({self.rngs})", optimizer)


def draw_model(choices: Choices) -> NnxModel:
    """Return a random model that is a module of flax.nnx."""
    builder = JaxBuilder(choices, _LIBRARY)
    parameters = builder.draw_model_container("attributes")
    rngs = choices.pick("nnx.Rngs(0)", "nnx.Rngs(0, dropout=1)", "nnx.Rngs(params=2, dropout=3)")
    inputs, lines, outputs = tuple(builder.inputs), tuple(builder.lines), tuple(builder.outputs)
    return NnxModel(inputs, lines, parameters, outputs, choices.draw_true_once_in(8), rngs)


def _draw_linear_layer(choices: Choices, shape: Shape) -> LayerCode:
    width, bias = choices.pick_weighted(WIDTHS), choices.pick("", ", use_bias=False")
    return (
        wrap_in_random_activation(choices, "{h}({x})"),
        f"nnx.Linear({shape[-1]}, {width}{bias}, rngs=rngs)",
        (*shape[:-1], width),
    )


def _draw_general_linear_layer(choices: Choices, shape: Shape) -> LayerCode:
    equation, kernel, contracted, after = draw_heads_einsum(choices, shape)
    module = choices.pick(
        f"nnx.LinearGeneral({kernel[:contracted]}, {kernel[contracted:]}, axis={(*range(-contracted, 0),)}, rngs=rngs)",
        f'nnx.Einsum("{equation}", {kernel}, {kernel[contracted:]}, rngs=rngs)',
        f'nnx.Einsum("{equation}", {kernel}, rngs=rngs)',
    )
    return "{h}({x})", module, after


def _draw_convolution_layer(choices: Choices, shape: Shape) -> LayerCode:
    *space, width = shape
    options, after = draw_conv_options(choices, tuple(space), width)
    if len(space) == 1 and options["padding"] == "SAME" and choices.draw_true_once_in(3):
        options["padding"] = "CAUSAL"
    module = (
        "nnx.Conv({width}, {filters}, {sizes}, {strides}, padding={padding!r}, kernel_dilation={dilation}, "
        "feature_group_count={groups}, rngs=rngs)"
    )
    return wrap_in_random_activation(choices, "{h}({x})"), module.format(**options, width=width), after


def _draw_transposed_convolution_layer(choices: Choices, shape: Shape) -> LayerCode:
    *space, width = shape
    filters, size = choices.pick_weighted(WIDTHS), choices.pick(3, 2, 4)
    module = f"nnx.ConvTranspose({width}, {filters}, {(size,) * len(space)}, {(2,) * len(space)}, rngs=rngs)"
    return "{h}({x})", module, (*(2 * n for n in space), filters)


def _draw_norm_layer(choices: Choices, shape: Shape) -> LayerCode:
    width = shape[-1]
    norms = (
        f"LayerNorm({width}",
        f"RMSNorm({width}",
        f"GroupNorm({width}, {choices.pick(*find_common_divisors(width))}",
    )
    norm = choices.pick(*norms, *[f"InstanceNorm({width}"] * (len(shape) > 1))
    # The variance of two features can be so small that the default epsilon would magnify rounding errors by 1000.
    return "{h}({x})", f"nnx.{norm}, epsilon=1e-3, rngs=rngs)", shape


def _draw_attention_layer(choices: Choices, shape: Shape) -> LayerCode:
    heads, groups = choices.pick((4, 4), (4, 2), (2, 2), (8, 2), (8, 4))
    width, mask = heads * choices.pick(4, 8), choices.pick("", ", mask=nnx.make_causal_mask({x}[..., 0])")
    module = (
        f"nnx.MultiHeadAttention({heads}, {shape[-1]}, {width}, num_kv_heads={groups}, decode=False, "
        f"normalize_qk={choices.draw_true_once_in(4)}, rngs=rngs)"
    )
    return f"{{h}}({{x}}{mask})", module, shape


def _draw_recurrent_layer(choices: Choices, shape: Shape) -> LayerCode:
    units, cell = (
        choices.pick_weighted(WIDTHS),
        choices.pick("LSTMCell", "GRUCell", "SimpleCell", "OptimizedLSTMCell"),
    )
    one = f"nnx.{cell}({shape[-1]}, {units}, rngs=rngs)"
    module, width = choices.pick(
        (f"nnx.RNN({one})", units),
        (f"nnx.RNN({one}, reverse=True, keep_order=True)", units),
        (f"nnx.Bidirectional(nnx.RNN({one}), nnx.RNN({one}))", 2 * units),
    )
    return "{h}({x})", module, (shape[0], width)


def _draw_composite_module(choices: Choices, shape: Shape) -> LayerCode:
    """Draw a module that contains other modules."""
    *spatial, width = shape
    inner, after, linear = (
        choices.pick_weighted(WIDTHS),
        choices.pick_weighted(WIDTHS),
        "nnx.Linear({}, {}, rngs=rngs)".format,
    )
    module, after = choices.pick(
        (f"Blocks({width}, {inner}, {choices.pick(1, 2)}, rngs)", width),
        (f"nnx.Sequential({linear(width, inner)}, nnx.tanh, {linear(inner, after)})", after),
        (f"nnx.Sequential({linear(width, inner)}, nnx.LayerNorm({inner}, rngs=rngs))", inner),
        (f"nnx.LoRALinear({width}, {after}, lora_rank=2, rngs=rngs)", after),
        (f"nnx.LoRA({width}, 4, {after}, base_module={linear(width, after)}, rngs=rngs)", after),
    )
    return "{h}({x})", module, (*spatial, after)


def _make_draw_function(module: str) -> Callable[[Choices, Shape], LayerCode]:
    """Return a function that draws the layer `module`, which keeps the shape of its input."""
    return lambda _, shape: ("{h}({x})", module.replace("{width}", str(shape[-1])), shape)


_LIBRARY = LibrarySyntax(
    layers={
        "Linear": (ANY, 8, _draw_linear_layer),
        "LinearGeneral": (range(1, 4), 5, _draw_general_linear_layer),
        "norm": (ANY, 6, _draw_norm_layer),
        "BatchNorm": (ANY, 5, _make_draw_function("nnx.BatchNorm({width}, momentum=0.9, rngs=rngs)")),
        "Conv": (SPATIAL, 10, _draw_convolution_layer),
        "ConvTranspose": (SPATIAL, 3, _draw_transposed_convolution_layer),
        "MultiHeadAttention": ((2,), 7, _draw_attention_layer),
        "RNN": ((2,), 7, _draw_recurrent_layer),
        "Dropout": (ANY, 4, _make_draw_function("nnx.Dropout(0.25, rngs=rngs)")),
        "several": (ANY, 6, _draw_composite_module),
        "PReLU": (ANY, 1, _make_draw_function("nnx.PReLU()")),
        "Centered": (ANY, 2, _make_draw_function("Centered({width})")),
    },
    containers={"nnx.Dict": 4, "nnx.List": 2, "nnx.data": 1},
    weight=("nnx.Param({scale} * rngs.params.normal({shape}))", "{}[...]"),
    frozen=("Fixed({scale} * rngs.params.normal({shape}))", "{}[...]"),
    constants={"Fixed({})": 2, "{}": 1},
    linear=("nnx.Linear({features}, {width}, rngs=rngs)", "{h}({x})"),
    embeddings=[
        ("nnx.Embed({features}, {width}, rngs=rngs)", "{h}({x})", "{h}.attend({x})"),
        ("nnx.Embed({features}, {width}, rngs=rngs)", "{h}({x})", ""),
        ({"table": ()}, "{table}[{x}]", "{x} @ {table}.T"),
    ],
    stacked="stacked({number}, lambda rngs: {made}, rngs)",
    wrappers={
        "remat": "nnx.remat(lambda p, x: {call})({h}, {x})",
        "scan": "nnx.scan(lambda x, p: {call}, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)({x}, {h})",
        "experts": "nnx.vmap(lambda p, x: {call}, in_axes=(0, None))({h}, {x})",
        "each": "nnx.vmap(lambda p, x: {call}, in_axes=(None, {axis}), out_axes=1)({h}, {x})",
    },
    unsupported={"each": ("BatchNorm", "Centered", "Dropout")},
)
