"""Build random models layer by layer, by steps that the models of all libraries share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.values import WIDTHS, ModelValue

T = TypeVar("T")
_NUM_SPATIAL_AXES_BY_KIND = {"vector": 0, "sequence": 1, "image": 2, "volume": 3, "tokens": 1}
_SPATIAL_SIZES = (8, 8, 4, 6, 16)


class ModelBuilder(ABC):
    """Build a random model layer by layer.

    A method `add_...` takes the variable of a value in the program and returns the variable of its result. Axes between
    the batch and features are called spatial, also those of sequences. `favorites` are kinds of layers that this model
    draws more often, since one model would otherwise rarely contain two rare kinds.
    """

    favorite_frequency = 20
    """Added to how often favorite kinds are drawn."""

    def __init__(self, choices: Choices, favorites: Collection[str], *, is_chain: bool = False):
        self.choices, self.favorites, self.is_chain = choices, favorites, is_chain
        self.inputs: list[ModelValue] = []
        self.outputs: list[ModelValue] = []
        self.shapes: dict[str, Shape] = {}

    @abstractmethod
    def add_input(self) -> str:
        """Add an input, and an embedding if the input has tokens."""

    @abstractmethod
    def add_output(self, value: str) -> None:
        """Add an output that keeps the spatial axes of a value, or merges them."""

    @abstractmethod
    def add_layer(self, value: str) -> str:
        """Add a layer that accepts the shape of the value."""

    @abstractmethod
    def add_linear(self, value: str, width: int) -> str:
        """Add a linear layer without an activation."""

    @abstractmethod
    def add_sum(self, value: str, other: str) -> str:
        """Add the sum of two values of one shape."""

    @abstractmethod
    def add_gate(self, value: str) -> str:
        """Add a gate that scales the value elementwise."""

    @abstractmethod
    def add_shared_layer(self, value: str) -> str:
        """Add a layer, and call it twice."""

    @abstractmethod
    def combine_with_other_input(self, value: str, other: str) -> str:
        """Combine a value with a value that was computed from a different input."""

    def build_model(self, max_parts: int) -> None:
        """Add an input, at least one and at most `max_parts` parts, and an output."""
        value = self.add_input()
        for _ in range(1 + self.choices.draw_below(max_parts)):
            value = self.add_random_part(value)
        self.add_output(value)

    def create_program_variable(self, shape: Shape) -> str:
        """Return a new name for a variable of the program, and record the shape of the variable's value."""
        name = f"x{len(self.shapes)}"
        self.shapes[name] = shape
        return name

    def add_random_input(
        self, kind_frequencies: Mapping[str, int], spatial_sizes: Mapping[str, tuple[int, ...]]
    ) -> tuple[str, Shape, int | None]:
        """Add an input. Return its variable, its shape with features, and its vocabulary size (None for floats).

        `spatial_sizes` has the possible sizes of spatial axes, by kind of input.
        """
        choices, kind = self.choices, self.choices.pick_weighted(kind_frequencies)
        spatial = tuple(
            choices.pick(*spatial_sizes.get(kind, _SPATIAL_SIZES))
            for _ in range(_NUM_SPATIAL_AXES_BY_KIND[kind])
        )
        shape = (*spatial, choices.pick_weighted(WIDTHS))
        vocabulary = choices.pick(32, 64, 30) if kind == "tokens" else None
        value = self.create_program_variable(spatial if vocabulary else shape)
        self.inputs.append(ModelValue(value, self.shapes[value], vocabulary))
        return value, shape, vocabulary

    def draw_kind_and_layer(
        self, kind_frequencies: Mapping[str, int], draw_layer: Callable[[str], T | None]
    ) -> tuple[str, T]:
        """Return a random kind and a layer of it. Kinds for which `draw_layer` returns None are not drawn again."""
        left = {
            kind: weight + self.favorite_frequency * (kind in self.favorites)
            for kind, weight in kind_frequencies.items()
        }
        while True:
            kind = self.choices.pick_weighted(left)
            if layer := draw_layer(kind):
                return kind, layer
            del left[kind]

    def get_part_frequencies(self) -> dict[Callable[[str], str], int]:
        """Return a dict from each method that adds a part of the model to how often it is drawn."""
        return {
            self.add_layer: 9,
            self.add_residual_block: 3,
            self.add_gate: 1,
            self.add_shared_layer: 2,
            self.add_input_and_combine_with_value: 3,
            self.add_second_output: 1,
        }

    def add_random_part(self, value: str) -> str:
        """Add a random part, which is one layer or several layers that belong together."""
        add = self.add_layer if self.is_chain else self.choices.pick_weighted(self.get_part_frequencies())
        return add(value)

    def add_residual_block(self, value: str) -> str:
        """Add one or two layers and a skip connection."""
        inner, shape = self.add_layer(value), self.shapes[value]
        if self.choices.draw_true_once_in(2):
            inner = self.add_layer(inner)
        if shape[:-1] != self.shapes[inner][:-1]:
            return inner
        if shape != self.shapes[inner]:
            inner = self.add_linear(inner, shape[-1])
        return self.add_sum(value, inner)

    def add_input_and_combine_with_value(self, value: str) -> str:
        """Add an input, and combine a value with it. If the model has three inputs, add a layer instead."""
        if len(self.inputs) > 2:
            return self.add_layer(value)
        other = self.add_input()
        for _ in range(self.choices.draw_below(3)):
            other = self.add_layer(other)
        return self.combine_with_other_input(value, other)

    def add_second_output(self, value: str) -> str:
        """Add a layer. If the model has fewer than two outputs, first make the value an output."""
        if len(self.outputs) < 2:
            self.add_output(value)
        return self.add_layer(value)
