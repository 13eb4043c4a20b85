"""Keras models as values: their layers, how these are called, and the program that makes the model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Shape = tuple[int, ...]

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

MERGING = ("Add", "Multiply", "Concatenate")
"""Layers that are called with a list."""


@dataclass(frozen=True)
class Layer:
    """A layer.

    Args:
        kind: Its class in `keras.layers`, a key of `CUSTOM`, or `"Sequential"`.
        options: What it is made with, by name; layers inside of it are descriptions, too.
        name: Its name; empty inside of another layer.

    Example:
        >>> print(Layer("Bidirectional", (("layer", Layer("LSTM", (("units", 8),))),), "both"))
        L.Bidirectional(layer=L.LSTM(units=8), name='both')
    """

    kind: str
    options: tuple[tuple[str, Any], ...] = ()
    name: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Its kind and those of the layers inside of it."""
        inner = [value for _, value in self.options if isinstance(value, Layer)]
        inner += dict(self.options).get("layers", ())
        return (self.kind, *(kind for layer in inner for kind in layer.kinds))

    def source(self, *, named: bool = True) -> str:
        """The expression that makes it."""
        options = [f"{key}={_text(value)}" for key, value in self.options]
        options += [f"name={self.name!r}"] if named and self.name else []
        module = "" if self.kind in CUSTOM else "keras." if self.kind == "Sequential" else "L."
        return f"{module}{self.kind}({', '.join(options)})"

    __str__ = source


def _text(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], Layer):
        return f"[{', '.join(map(str, value))}]"
    return str(value) if isinstance(value, Layer) else repr(value)


@dataclass(frozen=True)
class Input:
    """An input of a model, without the axis of rows.

    Args:
        name: What the program calls it.
        shape: Its shape.
        vocabulary: For tokens how many there are; `None`: numbers.
    """

    name: str
    shape: Shape
    vocabulary: int | None = None

    def source(self) -> str:
        """The expression that makes it."""
        return f"keras.Input({self.shape}{', dtype=' + repr('int32') if self.vocabulary else ''})"

    def data(self, rows: int) -> str:
        """The expression that draws a batch of it from `rng`."""
        return data((rows, *self.shape), self.vocabulary)


def data(shape: Shape, classes: int | None) -> str:
    """The expression that draws an array from `rng`: numbers, or one of so many classes."""
    return (
        f"rng.integers(0, {classes}, {shape})" if classes else f"rng.normal(size={shape}).astype('float32')"
    )


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
class Output:
    """An output of a model.

    Args:
        value: What the program calls it.
        shape: Its shape.
        loss: The name of a loss, or `"classes"`: the cross entropy of logits along the last axis.
    """

    value: str
    shape: Shape
    loss: str

    def data(self, rows: int) -> str:
        """The expression that draws targets for it from `rng`."""
        if self.loss == "classes":
            return data((rows, *self.shape[:-1]), self.shape[-1])
        return data((rows, *self.shape), None)

    @property
    def loss_source(self) -> str:
        """The expression that makes its loss."""
        of_classes = "keras.losses.SparseCategoricalCrossentropy(from_logits=True)"
        return of_classes if self.loss == "classes" else repr(self.loss)


@dataclass(frozen=True)
class Model:
    """A Keras model.

    Args:
        style: `"functional"`, `"sequential"`, `"subclassed"`, with layers in attributes, or `"listed"`: in a list.
        inputs: Its inputs.
        layers: Its layers, in the order of their first call.
        calls: How they are called, in order.
        outputs: Its outputs.
        named: Whether a functional or sequential model gives its layers names.
        lora: The layer that gets LoRA factors once the model is built; empty: none.
    """

    style: str
    inputs: tuple[Input, ...]
    layers: tuple[Layer, ...]
    calls: tuple[Call, ...]
    outputs: tuple[Output, ...]
    named: bool = True
    lora: str = ""

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of all its layers, in order."""
        return tuple(kind for layer in self.layers for kind in layer.kinds)

    def source(self, optimizer: str) -> str:
        """The program of `make_model`, a function that returns the model, compiled.

        Args:
            optimizer: The expression that makes the optimizer.
        """
        custom = "".join(CUSTOM[kind] + "\n" for kind in dict.fromkeys(self.kinds) if kind in CUSTOM)
        before, inside = {"sequential": self._sequential, "functional": self._functional}.get(
            self.style, self._subclassed
        )()
        if self.lora:
            layer = f"model.get_layer({self.lora!r})"
            if self.is_subclassed:
                inside.append(f"model({one_or_list([each.source() for each in self.inputs])})")
                layer = self._attribute("model", self.lora)
            inside.append(f"{layer}.enable_lora(2)")
        losses = one_or_list([output.loss_source for output in self.outputs])
        inside += [f"model.compile({optimizer}, {losses})", "return model"]
        return f"{custom}{before}def make_model():\n" + "".join(f"    {line}\n" for line in inside)

    @property
    def is_subclassed(self) -> bool:
        """Whether it is an instance of a class of its own, which has no weights before it is called."""
        return self.style in ("subclassed", "listed")

    def path(self, layer: str) -> str:
        """The path of a layer that has a name, or an attribute."""
        return f"parts.{list(self._of_name).index(layer)}" if self.style == "listed" else layer

    @cached_property
    def _of_name(self) -> dict[str, Layer]:
        return {layer.name: layer for layer in self.layers}

    def _attribute(self, owner: str, layer: str) -> str:
        """The expression of a layer that is an attribute, or in one."""
        number = list(self._of_name).index(layer)
        return f"{owner}.parts[{number}]" if self.style == "listed" else f"{owner}.{layer}"

    def _call(self, call: Call, expression: str) -> str:
        """The line that calls a layer."""
        inputs = ", ".join(call.inputs)
        if self._of_name[call.layer].kind in MERGING:
            inputs = f"[{inputs}]"
        options = "".join(f", {key}={value!r}" for key, value in call.options)
        return f"{call.value} = {expression}({inputs}{options})"

    def _sequential(self) -> tuple[str, list[str]]:
        parts = [self.inputs[0].source(), *(layer.source(named=self.named) for layer in self.layers)]
        return "", ["model = keras.Sequential([", *(f"    {part}," for part in parts), "])"]

    def _functional(self) -> tuple[str, list[str]]:
        lines = [f"{each.name} = {each.source()}" for each in self.inputs]
        shared = {name for name, uses in Counter(call.layer for call in self.calls).items() if uses > 1}
        made: set[str] = set()
        for call in self.calls:
            expression = self._of_name[call.layer].source(named=self.named)
            if call.layer in shared:
                if call.layer not in made:
                    lines.append(f"{call.layer} = {expression}")
                made.add(call.layer)
                expression = call.layer
            lines.append(self._call(call, expression))
        inputs = one_or_list([each.name for each in self.inputs])
        return "", [*lines, f"model = keras.Model({inputs}, {self._returned})"]

    def _subclassed(self) -> tuple[str, list[str]]:
        if self.style == "listed":
            parts = [f"    {layer.source(named=False)}," for layer in self.layers]
            made = ["self.parts = [", *parts, "]"]
        else:
            made = [f"self.{layer.name} = {layer.source(named=False)}" for layer in self.layers]
        names = [each.name for each in self.inputs]
        lines = [] if len(names) == 1 else [f"{', '.join(names)} = inputs"]
        lines += [self._call(call, self._attribute("self", call.layer)) for call in self.calls]
        program = [
            "class Net(keras.Model):",
            "    def __init__(self):",
            "        super().__init__()",
            *(f"        {line}" for line in made),
            "",
            f"    def call(self, {names[0] if len(names) == 1 else 'inputs'}):",
            *(f"        {line}" for line in [*lines, f"return {self._returned}"]),
        ]
        return "\n".join(program) + "\n\n", ["model = Net()"]

    @property
    def _returned(self) -> str:
        return one_or_list([each.value for each in self.outputs])


def one_or_list(parts: list[str]) -> str:
    """The expression of one part, or of a list of several."""
    return parts[0] if len(parts) == 1 else f"[{', '.join(parts)}]"
