"""Keras models as values: their layers, how these are called, and the program that makes the model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.values import Value, batch_source, one_or_list

SGD = "keras.optimizers.SGD(0.05, momentum=0.9)"

CUSTOM = {
    "Scale": """\
class Scale(L.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="random_normal", name="scale")

    def call(self, x):
        return x * (1 + self.scale)


"""
}
"""The layers that a program defines itself, by kind."""

_IN_POLICY = """

def make_model(make=make_model):
    keras.config.set_dtype_policy({policy!r})
    try:
        return make()
    finally:
        keras.config.set_dtype_policy("float32")
"""
_QUANTIZED = """

def make_model(make=make_model):
    model = make()
    {built}model.quantize({mode!r})
    return model
"""
_MERGING = ("Add", "Multiply", "Concatenate")  # called with a list
_INDENT = "    "


@dataclass(frozen=True)
class Layer:
    """A layer.

    Args:
        kind: Its class in `keras.layers`, a key of `CUSTOM`, or `"Sequential"`.
        options: What it is made with, by name; layers inside of it are descriptions, too.
        name: Its name; empty inside of another layer.

    Example:
        >>> print(Layer("Bidirectional", (("layer", Layer("LSTM", (("units", 8),))),)).source())
        L.Bidirectional(layer=L.LSTM(units=8))
    """

    kind: str
    options: tuple[tuple[str, Any], ...] = ()
    name: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of the layer and those of the layers inside of it."""
        values = [
            value for _, option in self.options for value in (option if type(option) is tuple else [option])
        ]
        return (self.kind, *(kind for each in values if isinstance(each, Layer) for kind in each.kinds))

    def source(self, name: str = "") -> str:
        """The expression that makes it; with a name, if one is given."""
        options = dict(self.options) | ({"name": name} if name else {})
        module = {"Sequential": "keras."}.get(self.kind, "" if self.kind in CUSTOM else "L.")
        return f"{module}{self.kind}({', '.join(f'{key}={value!r}' for key, value in options.items())})"

    __repr__ = source  # inside of the options of another one


@dataclass(frozen=True)
class Call:
    """A layer that is called.

    Args:
        value: What the program calls the result.
        layer: The layer's name.
        inputs: The values that it is called with.
        shape: The shape of the result.
        options: Further arguments.
    """

    value: str
    layer: str
    inputs: tuple[str, ...]
    shape: Shape
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Model:
    """A Keras model.

    Args:
        style: `"functional"`, `"sequential"`, `"subclassed"`, with layers in attributes, or `"listed"`: in a list.
        inputs: Its inputs.
        layers: Its layers, in the order of their first call.
        calls: How they are called, in order.
        outputs: Its outputs.
        named: Whether its layers have names, or attributes, of their own.
        lora: The layer that gets LoRA factors once the model is built; empty: none.
    """

    library: ClassVar[str] = "keras"
    imports: ClassVar[str] = """\
import os

os.environ.setdefault("KERAS_BACKEND", "jax")
import keras
import numpy as np

L = keras.layers
"""
    optimizers: ClassVar[Mapping[str, int]] = {
        SGD: 6,
        "keras.optimizers.SGD(0.05)": 1,
        "keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, clipnorm=1.0)": 1,
        "keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True, weight_decay=0.01)": 1,
        "keras.optimizers.Adam(0.001)": 2,
        "keras.optimizers.AdamW(0.001, global_clipnorm=1.0)": 1,
        "keras.optimizers.RMSprop(0.001)": 1,
        "keras.optimizers.Adafactor(0.001)": 1,
        "keras.optimizers.Lion(0.001)": 1,
    }

    style: str
    inputs: tuple[Value, ...]
    layers: tuple[Layer, ...]
    calls: tuple[Call, ...]
    outputs: tuple[Value, ...]
    named: bool = True
    lora: str = ""

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of all its layers, in order."""
        return tuple(kind for layer in self.layers for kind in layer.kinds)

    @property
    def precisions(self) -> Mapping[str, str]:
        """Lines by which it has a dtype policy, or is quantized; backends make no orthogonal matrices of bfloat16."""
        own = [] if re.search("RNN|LSTM|GRU", str(self.kinds)) else ["bfloat16"]
        lines = {policy: _IN_POLICY.format(policy=policy) for policy in (*own, "mixed_bfloat16")}
        if re.search("Dense|Embedding|Attention", str(self.kinds)):
            built = f"model({self.planned_with})\n    " if self.is_subclassed else ""
            lines |= {mode: _QUANTIZED.format(built=built, mode=mode) for mode in ("int8", "int4")}
        return lines

    @property
    def in_float64(self) -> str:
        """Lines by which it has the dtype policy of float64."""
        return _IN_POLICY.format(policy="float64")

    @property
    def is_subclassed(self) -> bool:
        """Whether it is an instance of a class of its own, which has no weights before it is called."""
        return self.style in ("subclassed", "listed")

    @property
    def planned_with(self) -> str:
        """The expression of its inputs, where it makes weights at its first call."""
        return one_or_list([_input(each) for each in self.inputs]) if self.is_subclassed else ""

    @property
    def layer_outputs(self) -> Mapping[str, Shape]:
        """The shapes of outputs of layers that are called once and have names of their own, by the layers' paths."""
        called = Counter(call.layer for call in self.calls) if self.named else {}
        return {self.path(call.layer): call.shape for call in self.calls if called.get(call.layer) == 1}

    def data(self, rows: int) -> str:
        """The expression of a batch, drawn from `rng`."""
        return batch_source(self.inputs, self.outputs, rows)

    def path(self, layer: str) -> str:
        """The path of a layer of a model whose layers are named."""
        return f"parts.{list(self._of_name).index(layer)}" if self.style == "listed" else layer

    def source(self, optimizer: str) -> str:
        """The program of `make_model`, a function that returns the model, compiled.

        Args:
            optimizer: The expression that makes the optimizer.
        """
        custom = "".join(CUSTOM[kind] for kind in dict.fromkeys(self.kinds) if kind in CUSTOM)
        lines = ["model = Net()"] if self.is_subclassed else self._functional()
        if self.style == "sequential":
            parts = [_input(self.inputs[0]), *(self._made(layer) for layer in self.layers)]
            lines = ["model = keras.Sequential([", *(f"{_INDENT}{part}," for part in parts), "])"]
        if self.lora and self.is_subclassed:
            lines += [f"model({self.planned_with})", f"{self._attribute('model', self.lora)}.enable_lora(2)"]
        elif self.lora:
            lines.append(f"model.get_layer({self.lora!r}).enable_lora(2)")
        losses = one_or_list([_loss(output) for output in self.outputs])
        lines += [f"model.compile({optimizer}, {losses})", "return model"]
        own_class = "\n".join([*self._subclassed(), "\n\n"]) if self.is_subclassed else ""
        return "\n".join([f"{custom}{own_class}def make_model():", *(_INDENT + line for line in lines), ""])

    @cached_property
    def _of_name(self) -> Mapping[str, Layer]:
        return {layer.name: layer for layer in self.layers}

    def _made(self, layer: Layer) -> str:
        return layer.source(layer.name if self.named else "")

    def _attribute(self, owner: str, layer: str) -> str:
        number = list(self._of_name).index(layer)
        return f"{owner}.parts[{number}]" if self.style == "listed" else f"{owner}.{layer}"

    def _called(self, call: Call, layer: str) -> str:
        inputs = ", ".join(call.inputs)
        inputs = f"[{inputs}]" if self._of_name[call.layer].kind in _MERGING else inputs
        return (
            f"{call.value} = {layer}({inputs}{''.join(f', {key}={value!r}' for key, value in call.options)})"
        )

    def _functional(self) -> list[str]:
        lines = [f"{each.name} = {_input(each)}" for each in self.inputs]
        uses, made = Counter(call.layer for call in self.calls), set[str]()
        for call in self.calls:
            expression = self._made(self._of_name[call.layer])
            if uses[call.layer] > 1:  # a line of its own, before the first call
                lines += [] if call.layer in made else [f"{call.layer} = {expression}"]
                made.add(call.layer)
                expression = call.layer
            lines.append(self._called(call, expression))
        inputs = one_or_list([each.name for each in self.inputs])
        return [*lines, f"model = keras.Model({inputs}, {self._returned})"]

    def _subclassed(self) -> list[str]:
        made = [f"self.{layer.name} = {layer.source()}" for layer in self.layers]
        if self.style == "listed":
            made = ["self.parts = [", *(f"{_INDENT}{layer.source()}," for layer in self.layers), "]"]
        names = [each.name for each in self.inputs]
        lines = [] if len(names) == 1 else [f"{', '.join(names)} = inputs"]
        lines += [self._called(call, self._attribute("self", call.layer)) for call in self.calls]
        return [
            "class Net(keras.Model):",
            f"{_INDENT}def __init__(self):",
            *(2 * _INDENT + line for line in ["super().__init__()", *made]),
            "",
            f"{_INDENT}def call(self, {names[0] if len(names) == 1 else 'inputs'}):",
            *(2 * _INDENT + line for line in [*lines, f"return {self._returned}"]),
        ]

    @property
    def _returned(self) -> str:
        return one_or_list([each.name for each in self.outputs])


def _input(value: Value) -> str:
    """The expression of an input of Keras."""
    return f"keras.Input({value.shape}{', dtype=' + repr('int32') if value.classes else ''})"


def _loss(value: Value) -> str:
    of_classes = "keras.losses.SparseCategoricalCrossentropy(from_logits=True)"
    return of_classes if value.classes else repr(value.loss)
