"""Draw Keras models layer by layer."""

from __future__ import annotations

import math
from typing import Any

from layoutmap.testing.models.builder import ModelBuilder
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.keras.layers import ATTENTION, KINDS, RECURRENT, WITH_LORA, Options
from layoutmap.testing.models.keras.model import DrawnCall, DrawnKerasModel, DrawnLayer
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.values import WIDTHS, ModelValue

_STYLES = {"functional": 5, "sequential": 2, "subclassed": 3, "listed": 2}
_INPUTS = {"vector": 3, "sequence": 4, "image": 4, "volume": 3, "tokens": 4}
_LOSSES = {"mse": 4, "classes": 3, "huber": 1, "mae": 1, "log_cosh": 1}
_MAX_OUTPUT_ELEMENTS = 4096
_MAX_SEQUENCE_LENGTH = 64
"""The longest sequence of a recurrent layer. PyTorch runs each step on every simulated device, which takes long."""


def draw_model(choices: Choices) -> DrawnKerasModel:
    """Return a random Keras model of a few layers."""
    style = choices.pick_weighted(_STYLES)
    builder = _KerasBuilder(choices, choices.sample(KINDS, 3), is_chain=style == "sequential")
    builder.build_model(max_parts=6)
    layers = tuple(builder.layers.values())
    named = style in ("subclassed", "listed") or not choices.draw_true_once_in(4)
    lora_layers = [
        layer.name
        for layer in layers
        if named and layer.kind in WITH_LORA and "kernel_constraint" not in dict(layer.options)
    ]
    lora = choices.pick(*lora_layers) if lora_layers and choices.draw_true_once_in(5) else ""
    inputs, calls, outputs = tuple(builder.inputs), tuple(builder.calls), tuple(builder.outputs)
    return DrawnKerasModel(style, inputs, layers, calls, outputs, named, lora)


class _KerasBuilder(ModelBuilder):
    """Build a random Keras model layer by layer."""

    def __init__(self, choices: Choices, favorites: list[str], *, is_chain: bool):
        super().__init__(choices, favorites, is_chain=is_chain)
        self.layers: dict[str, DrawnLayer] = {}
        self.calls: list[DrawnCall] = []
        # The name, vocabulary size, and width of an embedding that can also compute logits.
        self._reversible: tuple[str, int, int] | None = None

    def add_input(self) -> str:
        value, shape, vocabulary = self.add_random_input(_INPUTS, {"volume": (4, 2)})
        if not vocabulary:
            return value
        options = {"input_dim": vocabulary, "output_dim": shape[-1]}
        if self.is_chain or self.choices.draw_true_once_in(2):
            return self._add_layer_and_call("Embedding", options, shape, value)
        value = self._add_layer_and_call("ReversibleEmbedding", options, shape, value)
        self._reversible = self._reversible or (self.calls[-1].layer, vocabulary, shape[-1])
        return value

    def add_layer(self, value: str) -> str:
        shape = self.shapes[value]
        if self.choices.draw_true_once_in(12):
            inner: list[DrawnLayer] = []
            for _ in range(2):
                kind, options, shape = self._draw_kind_and_options(shape, allow_attention=False)
                inner.append(DrawnLayer(kind, tuple(options.items())))
            return self._add_layer_and_call("Sequential", {"layers": tuple(inner)}, shape, value)
        kind, options, shape = self._draw_kind_and_options(shape, allow_attention=not self.is_chain)
        if kind not in ATTENTION:
            return self._add_layer_and_call(kind, options, shape, value)
        return self._add_layer_and_call(
            kind, options, shape, value, value, use_causal_mask=self.choices.draw_true_once_in(2)
        )

    def _draw_kind_and_options(self, shape: Shape, *, allow_attention: bool) -> tuple[str, Options, Shape]:
        """Draw a layer that accepts a shape. Return its kind, its options, and the shape of its output."""
        weights = {
            kind: weight
            for kind, (ranks, weight, _) in KINDS.items()
            if len(shape) in ranks
            and (allow_attention or kind not in ATTENTION)
            and (kind not in RECURRENT or shape[0] <= _MAX_SEQUENCE_LENGTH)
        }

        def draw_options_if_small(kind: str) -> tuple[Options, Shape] | None:
            options, after = KINDS[kind][2](self.choices, shape)
            return (options, after) if math.prod(after) <= _MAX_OUTPUT_ELEMENTS else None

        kind, (options, after) = self.draw_kind_and_layer(weights, draw_options_if_small)
        return kind.replace("*", str(len(shape) - 1)), options, after

    def _add_layer_and_call(
        self, kind: str, options: Options, shape: Shape, *inputs: str, **call_options: Any
    ) -> str:
        """Add a layer, which is sometimes frozen, and a call of it. Return the variable of the result."""
        name = f"l{len(self.layers)}"
        if self.choices.draw_true_once_in(16):
            options = {**options, "trainable": False}
        self.layers[name] = DrawnLayer(kind, tuple(options.items()), name)
        return self._add_call(name, shape, *inputs, **call_options)

    def _add_call(self, layer: str, shape: Shape, *inputs: str, **options: Any) -> str:
        """Add a call of an added layer, and return the variable of its result."""
        value = self.create_program_variable(shape)
        self.calls.append(DrawnCall(value, layer, inputs, shape, tuple(options.items())))
        return value

    def add_output(self, value: str) -> None:
        choices, shape = self.choices, self.shapes[value]
        if self._reversible and len(shape) == 2 and not choices.draw_true_once_in(3):
            embedding, vocabulary, width = self._reversible
            value = value if shape[-1] == width else self.add_linear(value, width)
            value = self._add_call(embedding, (shape[0], vocabulary), value, reverse=True)
            self.outputs.append(ModelValue(value, shape[:1], vocabulary))
            return
        if len(shape) > 1 and not choices.draw_true_once_in(3):
            value = self._add_flatten_or_global_pooling(value)
        *spatial, width = shape = (*self.shapes[value][:-1], choices.pick_weighted(WIDTHS))
        name = f"l{len(self.layers)}"
        # This layer is never frozen, so that the model has a gradient.
        self.layers[name] = DrawnLayer("Dense", (("units", width),), name)
        value, loss = self._add_call(name, shape, value), choices.pick_weighted(_LOSSES)
        has_classes = loss == "classes"
        self.outputs.append(
            ModelValue(value, tuple(spatial), width) if has_classes else ModelValue(value, shape, loss=loss)
        )

    def _add_flatten_or_global_pooling(self, value: str) -> str:
        """Flatten or pool all axes of a value to one axis of features. Return the variable of the result."""
        shape = self.shapes[value]
        if math.prod(shape) <= 512 and self.choices.draw_true_once_in(2):
            return self._add_layer_and_call("Flatten", {}, (math.prod(shape),), value)
        kind = self.choices.pick("Average", "Max")
        return self._add_layer_and_call(f"Global{kind}Pooling{len(shape) - 1}D", {}, shape[-1:], value)

    def add_linear(self, value: str, width: int, **options: Any) -> str:
        return self._add_layer_and_call(
            "Dense", {"units": width, **options}, (*self.shapes[value][:-1], width), value
        )

    def add_sum(self, value: str, other: str) -> str:
        return self._add_layer_and_call("Add", {}, self.shapes[value], value, other)

    def add_gate(self, value: str) -> str:
        gate = self.add_linear(value, self.shapes[value][-1], activation="sigmoid")
        return self._add_layer_and_call("Multiply", {}, self.shapes[value], value, gate)

    def add_shared_layer(self, value: str) -> str:
        value = self.add_linear(value, self.shapes[value][-1], activation="tanh")
        layer, shape = self.calls[-1].layer, self.shapes[value]
        return self._add_call(layer, shape, self._add_layer_and_call("LayerNormalization", {}, shape, value))

    def combine_with_other_input(self, value: str, other: str) -> str:
        shape = self.shapes[value]
        if len(shape) == len(self.shapes[other]) == 2 and self.choices.draw_true_once_in(2):
            kind = self.choices.pick(*ATTENTION)
            if shape[-1] != self.shapes[other][-1]:  # GroupQueryAttention requires equal widths
                other = self.add_linear(other, shape[-1])
            return self._add_layer_and_call(kind, KINDS[kind][2](self.choices, shape)[0], shape, value, other)
        if len(self.shapes[other]) > 1:
            other = self._add_flatten_or_global_pooling(other)
        other = self.add_linear(other, shape[-1])
        if len(shape) == 1 and self.choices.draw_true_once_in(2):
            return self._add_layer_and_call("Concatenate", {}, (2 * shape[-1],), value, other)
        if len(shape) > 1:
            broadcast = (*(1 for _ in shape[:-1]), shape[-1])
            other = self._add_layer_and_call("Reshape", {"target_shape": broadcast}, broadcast, other)
        return self._add_layer_and_call(self.choices.pick("Add", "Multiply"), {}, shape, value, other)
