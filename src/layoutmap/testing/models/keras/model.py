"""Describe Keras models by their layers and calls, and write the programs that create them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.values import ModelValue, make_list_code, make_whole_batch_code

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
"""Source of custom layers, by kind."""

_SET_POLICY = """

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
    {first_call}model.quantize({mode!r})
    return model
"""
_MERGE_LAYERS = ("Add", "Multiply", "Concatenate")  # layers that get their inputs in one list
_INDENT = "    "


@dataclass(frozen=True)
class DrawnLayer:
    """Describe a layer by its constructor's arguments, and make the expression that creates it."""

    kind: str  # name of a class in `keras.layers`, key of `CUSTOM`, or "Sequential"
    options: tuple[tuple[str, Any], ...] = ()  # names and values of the constructor's arguments
    name: str = ""  # name of the layer; empty for nested layers

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kinds of the layer and of the layers nested in its options."""
        values = [
            value for _, option in self.options for value in (option if type(option) is tuple else [option])
        ]
        return (
            self.kind,
            *(kind for value in values if isinstance(value, DrawnLayer) for kind in value.layer_kinds),
        )

    def make_code(self, name: str = "") -> str:
        """Return the expression that creates the layer."""
        options = dict(self.options) | ({"name": name} if name else {})
        module = {"Sequential": "keras."}.get(self.kind, "" if self.kind in CUSTOM else "L.")
        return f"{module}{self.kind}({', '.join(f'{key}={value!r}' for key, value in options.items())})"

    __repr__ = make_code  # an option may be a nested layer, and its `repr` must be its code


@dataclass(frozen=True)
class DrawnCall:
    """Describe a call of a layer in the program of a model."""

    value: str  # name of the variable with the result
    layer: str  # name of the called layer
    inputs: tuple[str, ...]  # names of the variables that are the arguments
    shape: Shape
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class DrawnKerasModel:
    """Describe a random Keras model, and make the source of a program that builds it."""

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

    style: str  # "functional", "sequential", "subclassed", or "listed", which is subclassed with a list of layers
    inputs: tuple[ModelValue, ...]
    layers: tuple[DrawnLayer, ...]  # layers in the order of their first call
    calls: tuple[DrawnCall, ...]
    outputs: tuple[ModelValue, ...]
    named: bool = True  # whether the program names its layers
    lora: str = ""  # name of the layer that gets LoRA factors after the build

    @cached_property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kinds of all layers, in order."""
        return tuple(kind for layer in self.layers for kind in layer.layer_kinds)

    @property
    def precision_lines(self) -> Mapping[str, str]:
        """A dict from each precision to the lines that set it by a dtype policy or by quantization."""
        # Recurrent layers have orthogonal initial values, which backends cannot create in bfloat16, so draw only mixed
        # precision.
        has_recurrent = re.search("RNN|LSTM|GRU", str(self.layer_kinds))
        policies = ["mixed_bfloat16"] if has_recurrent else ["bfloat16", "mixed_bfloat16"]
        lines = {policy: _SET_POLICY.format(policy=policy) for policy in policies}
        if re.search("Dense|Embedding|Attention", str(self.layer_kinds)):
            first_call = f"model({self.plan_inputs})\n    " if self.is_subclassed else ""
            lines |= {mode: _QUANTIZED.format(first_call=first_call, mode=mode) for mode in ("int8", "int4")}
        return lines

    @property
    def float64_lines(self) -> str:
        """Lines that set the dtype policy float64."""
        return _SET_POLICY.format(policy="float64")

    @property
    def is_subclassed(self) -> bool:
        """Whether the model is a subclass of `keras.Model`, which creates its weights in the first call."""
        return self.style in ("subclassed", "listed")

    @property
    def plan_inputs(self) -> str:
        """The expression of the inputs of a subclassed model. Empty for other models."""
        return (
            make_list_code([_make_input_code(value) for value in self.inputs]) if self.is_subclassed else ""
        )

    @property
    def layer_output_shapes(self) -> Mapping[str, Shape]:
        """A dict from the path of each named layer that is called once to its output shape."""
        num_calls = Counter(call.layer for call in self.calls) if self.named else {}
        return {
            self.get_layer_path(call.layer): call.shape
            for call in self.calls
            if num_calls.get(call.layer) == 1
        }

    def make_batch_code(self, rows: int) -> str:
        """Return the expression that draws a batch from `rng`."""
        return make_whole_batch_code(self.inputs, self.outputs, rows)

    def get_layer_path(self, layer_name: str) -> str:
        """Return the path of a layer in a model with named layers."""
        return (
            f"parts.{list(self._layers_by_name).index(layer_name)}" if self.style == "listed" else layer_name
        )

    def make_code(self, optimizer: str) -> str:
        """Return the program that defines `make_model`, which returns the compiled model."""
        custom = "".join(CUSTOM[kind] for kind in dict.fromkeys(self.layer_kinds) if kind in CUSTOM)
        lines = ["model = Net()"] if self.is_subclassed else self._make_functional_lines()
        if self.style == "sequential":
            parts = [
                _make_input_code(self.inputs[0]),
                *(self._make_layer_code(layer) for layer in self.layers),
            ]
            lines = ["model = keras.Sequential([", *(f"{_INDENT}{part}," for part in parts), "])"]
        if self.lora and self.is_subclassed:
            lora_layer = self._make_attribute_code("model", self.lora)
            lines += [f"model({self.plan_inputs})", f"{lora_layer}.enable_lora(2)"]
        elif self.lora:
            lines.append(f"model.get_layer({self.lora!r}).enable_lora(2)")
        losses = make_list_code([_make_loss_code(output) for output in self.outputs])
        lines += [f"model.compile({optimizer}, {losses})", "return model"]
        net = "\n".join([*self._make_model_class_lines(), "\n\n"]) if self.is_subclassed else ""
        return "\n".join([f"{custom}{net}def make_model():", *(_INDENT + line for line in lines), ""])

    @cached_property
    def _layers_by_name(self) -> Mapping[str, DrawnLayer]:
        return {layer.name: layer for layer in self.layers}

    def _make_layer_code(self, layer: DrawnLayer) -> str:
        """Return the expression that creates a layer, with its name if the model's layers are named."""
        return layer.make_code(layer.name if self.named else "")

    def _make_attribute_code(self, owner: str, layer_name: str) -> str:
        """Return the expression that reads a layer of a subclassed model from the model's variable `owner`."""
        index = list(self._layers_by_name).index(layer_name)
        return f"{owner}.parts[{index}]" if self.style == "listed" else f"{owner}.{layer_name}"

    def _make_call_line(self, call: DrawnCall, layer_expression: str) -> str:
        """Return the line that assigns the result of calling a layer to a variable."""
        inputs = ", ".join(call.inputs)
        if self._layers_by_name[call.layer].kind in _MERGE_LAYERS:
            inputs = f"[{inputs}]"
        options = "".join(f", {key}={value!r}" for key, value in call.options)
        return f"{call.value} = {layer_expression}({inputs}{options})"

    def _make_functional_lines(self) -> list[str]:
        """Return the lines that create a Functional model."""
        lines = [f"{value.name} = {_make_input_code(value)}" for value in self.inputs]
        num_calls, written = Counter(call.layer for call in self.calls), set[str]()
        for call in self.calls:
            layer = self._make_layer_code(self._layers_by_name[call.layer])
            # Create a layer that is called several times once, and assign it to a Python variable.
            if num_calls[call.layer] > 1:
                lines += [] if call.layer in written else [f"{call.layer} = {layer}"]
                written.add(call.layer)
                layer = call.layer
            lines.append(self._make_call_line(call, layer))
        inputs = make_list_code([value.name for value in self.inputs])
        return [*lines, f"model = keras.Model({inputs}, {self._result_expression})"]

    def _make_model_class_lines(self) -> list[str]:
        """Return the lines that define the class of a subclassed model."""
        layers = [f"self.{layer.name} = {layer.make_code()}" for layer in self.layers]
        if self.style == "listed":
            layers = ["self.parts = [", *(f"{_INDENT}{layer.make_code()}," for layer in self.layers), "]"]
        names = [value.name for value in self.inputs]
        lines = [] if len(names) == 1 else [f"{', '.join(names)} = inputs"]
        lines += [
            self._make_call_line(call, self._make_attribute_code("self", call.layer)) for call in self.calls
        ]
        return [
            "class Net(keras.Model):",
            f"{_INDENT}def __init__(self):",
            *(2 * _INDENT + line for line in ["super().__init__()", *layers]),
            "",
            f"{_INDENT}def call(self, {names[0] if len(names) == 1 else 'inputs'}):",
            *(2 * _INDENT + line for line in [*lines, f"return {self._result_expression}"]),
        ]

    @property
    def _result_expression(self) -> str:
        return make_list_code([value.name for value in self.outputs])


def _make_input_code(value: ModelValue) -> str:
    return f"keras.Input({value.shape}{', dtype=' + repr('int32') if value.classes else ''})"


def _make_loss_code(value: ModelValue) -> str:
    if value.classes:
        return "keras.losses.SparseCategoricalCrossentropy(from_logits=True)"
    return repr(value.loss)
