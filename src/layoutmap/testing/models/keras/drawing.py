"""Draws Keras models: layer after layer, each one that fits what the last one has put out."""

from __future__ import annotations

import math
from typing import Any

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.keras.describing import Call, Layer, Model
from layoutmap.testing.models.keras.layers import ATTENTION, KINDS, WITH_LORA, Options, layer_for
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.values import WIDTHS, Value

_STYLES = {"functional": 5, "sequential": 2, "subclassed": 3, "listed": 2}
_INPUTS = {"vector": 3, "sequence": 4, "image": 4, "volume": 3, "tokens": 4}
_LOSSES = {"mse": 4, "classes": 3, "huber": 1, "mae": 1, "log_cosh": 1}


def draw_model(choices: Choices) -> Model:
    """A model of a few layers."""
    style = choices.weighted(_STYLES)
    growing = _Growing(choices, is_chain=style == "sequential")
    value = growing.add_input()
    for _ in range(1 + choices.below(6)):
        value = growing.add_part(value)
    growing.add_output(value)
    layers = tuple(growing.layers.values())
    named = style in ("subclassed", "listed") or not choices.one_in(4)
    can_lora = [
        layer.name
        for layer in layers
        if named and layer.kind in WITH_LORA and "kernel_constraint" not in dict(layer.options)
    ]
    lora = choices.one_of(*can_lora) if can_lora and choices.one_in(5) else ""
    return Model(
        style, tuple(growing.inputs), layers, tuple(growing.calls), tuple(growing.outputs), named, lora
    )


class _Growing:
    """A model so far; its methods take the name of a value, and return that of what they make of it.

    Args:
        choices: Decides.
        is_chain: Whether each layer takes what the last one has put out, and nothing else.
    """

    def __init__(self, choices: Choices, *, is_chain: bool):
        self.choices, self.is_chain = choices, is_chain
        # Each model has favourites of its own: else two rare kinds would hardly ever meet.
        self.favourites = choices.taken(KINDS, 3)
        self.inputs: list[Value] = []
        self.layers: dict[str, Layer] = {}
        self.calls: list[Call] = []
        self.outputs: list[Value] = []
        self.shapes: dict[str, Shape] = {}
        self.tables: dict[str, tuple[int, int]] = {}  # shapes of embeddings that can be called in reverse

    def add_input(self) -> str:
        """Add an input; tokens are embedded at once."""
        choices = self.choices
        kind = choices.weighted(_INPUTS)
        num_axes = {"vector": 0, "sequence": 1, "image": 2, "volume": 3, "tokens": 1}[kind]
        sides = (4, 2) if kind == "volume" else (8, 8, 4, 6, 16)
        places = tuple(choices.one_of(*sides) for _ in range(num_axes))
        width = choices.weighted(WIDTHS)
        vocabulary = choices.one_of(32, 64, 30) if kind == "tokens" else None
        value, shape = f"x{len(self.shapes)}", (*places, width)
        self.inputs.append(Value(value, places if vocabulary else shape, vocabulary))
        self.shapes[value] = self.inputs[-1].shape
        if not vocabulary:
            return value
        options = {"input_dim": vocabulary, "output_dim": width}
        if self.is_chain or choices.one_in(2):
            return self.put("Embedding", options, shape, value)
        value = self.put("ReversibleEmbedding", options, shape, value)
        self.tables[self.calls[-1].layer] = vocabulary, width
        return value

    def add_part(self, value: str) -> str:
        """Add a layer, or several that belong together."""
        if self.is_chain:
            return self.add_layer(value)
        parts = {
            self.add_layer: 9,
            self._residual: 3,
            self._gate: 1,
            self._shared: 2,
            self._joined: 3,
            self._output_beside: 1,
        }
        return self.choices.weighted(parts)(value)

    def add_layer(self, value: str) -> str:
        """Add a layer that fits; a few are in a model of their own."""
        shape = self.shapes[value]
        if self.choices.one_in(12):
            inner: list[Layer] = []
            for _ in range(2):
                kind, options, shape = self._layer_for(shape, attention=False)
                inner.append(Layer(kind, tuple(options.items())))
            return self.put("Sequential", {"layers": tuple(inner)}, shape, value)
        kind, options, shape = self._layer_for(shape, attention=not self.is_chain)
        if kind not in ATTENTION:
            return self.put(kind, options, shape, value)
        return self.put(kind, options, shape, value, value, use_causal_mask=self.choices.one_in(2))

    def _layer_for(self, shape: Shape, *, attention: bool) -> tuple[str, Options, Shape]:
        return layer_for(self.choices, shape, attention=attention, favourites=self.favourites)

    def put(self, kind: str, options: Options, shape: Shape, *inputs: str, **called_with: Any) -> str:
        """Add a layer and a call of it; a few layers are frozen."""
        name = f"l{len(self.layers)}"
        if self.choices.one_in(16):
            options = {**options, "trainable": False}
        self.layers[name] = Layer(kind, tuple(options.items()), name)
        return self.call(name, shape, *inputs, **called_with)

    def call(self, layer: str, shape: Shape, *inputs: str, **options: Any) -> str:
        """Add a call of a layer."""
        value = f"x{len(self.shapes)}"
        self.calls.append(Call(value, layer, inputs, shape, tuple(options.items())))
        self.shapes[value] = shape
        return value

    def add_output(self, value: str) -> None:
        """Add an output: for each place or for all, or by a table of embeddings."""
        *places, width = shape = self.shapes[value]
        if self.tables and len(places) == 1 and not self.choices.one_in(3):
            table, (vocabulary, needed) = next(iter(self.tables.items()))
            value = value if width == needed else self._dense(value, needed)
            value = self.call(table, (*places, vocabulary), value, reverse=True)
            self.outputs.append(Value(value, tuple(places), vocabulary))
            return
        if places and not self.choices.one_in(3):
            value = self._vector(value)
        *places, width = shape = (*self.shapes[value][:-1], self.choices.weighted(WIDTHS))
        name = f"l{len(self.layers)}"
        self.layers[name] = Layer("Dense", (("units", width),), name)  # never frozen: something has to learn
        value, loss = self.call(name, shape, value), self.choices.weighted(_LOSSES)
        is_class = loss == "classes"
        self.outputs.append(
            Value(value, tuple(places), width) if is_class else Value(value, shape, loss=loss)
        )

    def _vector(self, value: str) -> str:
        """One axis of features, of all places."""
        shape = self.shapes[value]
        if math.prod(shape) <= 512 and self.choices.one_in(2):
            return self.put("Flatten", {}, (math.prod(shape),), value)
        kind = self.choices.one_of("Average", "Max")
        return self.put(f"Global{kind}Pooling{len(shape) - 1}D", {}, shape[-1:], value)

    def _dense(self, value: str, width: int, **options: Any) -> str:
        return self.put("Dense", {"units": width, **options}, (*self.shapes[value][:-1], width), value)

    def _residual(self, value: str) -> str:
        inner = self.add_layer(value)
        if self.choices.one_in(2):
            inner = self.add_layer(inner)
        *places, width = shape = self.shapes[value]
        if tuple(places) != self.shapes[inner][:-1]:
            return inner
        inner = inner if self.shapes[inner] == shape else self._dense(inner, width)
        return self.put("Add", {}, shape, value, inner)

    def _gate(self, value: str) -> str:
        gate = self._dense(value, self.shapes[value][-1], activation="sigmoid")
        return self.put("Multiply", {}, self.shapes[value], value, gate)

    def _shared(self, value: str) -> str:
        """A layer that is called twice, with another one between."""
        value = self._dense(value, self.shapes[value][-1], activation="tanh")
        layer, shape = self.calls[-1].layer, self.shapes[value]
        return self.call(layer, shape, self.put("LayerNormalization", {}, shape, value))

    def _joined(self, value: str) -> str:
        """Another input, which is attended to, added, multiplied or concatenated."""
        if len(self.inputs) > 2:
            return self.add_layer(value)
        other, shape = self.add_input(), self.shapes[value]
        for _ in range(self.choices.below(3)):
            other = self.add_layer(other)
        if len(shape) == len(self.shapes[other]) == 2 and self.choices.one_in(2):
            kind = self.choices.one_of(*ATTENTION)
            if shape[-1] != self.shapes[other][-1]:  # heads in groups want one width
                other = self._dense(other, shape[-1])
            return self.put(kind, KINDS[kind][2](self.choices, shape)[0], shape, value, other)
        if len(self.shapes[other]) > 1:
            other = self._vector(other)
        other = self._dense(other, shape[-1])
        if len(shape) == 1 and self.choices.one_in(2):
            return self.put("Concatenate", {}, (2 * shape[-1],), value, other)
        if len(shape) > 1:
            broadcast = (*(1 for _ in shape[:-1]), shape[-1])
            other = self.put("Reshape", {"target_shape": broadcast}, broadcast, other)
        return self.put(self.choices.one_of("Add", "Multiply"), {}, shape, value, other)

    def _output_beside(self, value: str) -> str:
        if len(self.outputs) < 2:
            self.add_output(value)
        return self.add_layer(value)
