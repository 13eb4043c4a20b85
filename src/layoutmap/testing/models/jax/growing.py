"""Draws models of JAX: layer after layer, each one that fits what the last one has put out."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.jax.describing import Container, Part
from layoutmap.testing.models.jax.functions import FUNCTIONS, Held, Maker
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.values import WIDTHS, Value

_INPUTS = {"vector": 4, "sequence": 5, "image": 3, "volume": 2, "tokens": 4}
CLASSES = "optax.softmax_cross_entropy_with_integer_labels(y, t).mean()"
_LOSSES = {
    "((y - t) ** 2).mean()": 4,
    CLASSES: 3,
    "optax.huber_loss(y, t).mean()": 1,
    "optax.log_cosh(y, t).mean()": 1,
    "jnp.sqrt(((y - t) ** 2).sum(-1) + 0.1).mean()": 1,
}
_MOST_ELEMENTS = 2048
WRAPPERS = {"": 16, "remat": 2, "scan": 3, "experts": 2, "each": 2}
"""What is around a layer, and how often: `scan` and `experts` hold several layers as one, `each` calls the layer for
each element of an axis."""


@dataclass(frozen=True)
class Library:
    """How models are written for a library.

    In expressions, `{h}` stands for what a layer holds, `{x}` for what it takes, and `{key}` for a random key.

    Args:
        layers: Its own layers, as in `FUNCTIONS`.
        containers: What may hold several things, and how often each does.
        weight: The expression of a weight, a `scale` times random numbers of a `shape`, and how it is read: `{}`.
        frozen: Those of a weight that is not trained.
        constants: The expressions of a constant, `{}`, and how often each is drawn.
        linear: A linear layer without an activation, from so many features to others, and how it is called.
        tables: Tables of embeddings: what they hold, how they are called, and how in reverse, if they can be.
        stacked: The expression of several modules as one: a `number` of what is `made`.
        wrapped: The expressions of a `call` in something, by wrapper.
        unfit: Its layers that nothing of a kind can be around, by wrapper.
    """

    layers: Mapping[str, tuple[Collection[int], int, Maker]]
    containers: Mapping[str, int]
    weight: tuple[str, str]
    frozen: tuple[str, str]
    constants: Mapping[str, int]
    linear: tuple[Held, str]
    tables: tuple[tuple[Held, str, str], ...]
    stacked: str
    wrapped: Mapping[str, str]
    unfit: Mapping[str, Collection[str]]


class Growing:
    """A model so far; its methods take the name of a value, and return that of what they make of it.

    Args:
        choices: Decides.
        library: How it is written.
    """

    def __init__(self, choices: Choices, library: Library):
        self.choices, self.library = choices, library
        self.kinds = {**library.layers, **FUNCTIONS}
        # Each model has favourites of its own: else two rare kinds would hardly ever meet.
        self.favourites = choices.taken(self.kinds, 3)
        self.inputs: list[Value] = []
        self.parts: list[Part] = []
        self.outputs: list[Value] = []
        self.held: dict[str, str | Container] = {}
        self.shapes: dict[str, Shape] = {}
        self.tables: list[tuple[str, int, int]] = []  # calls of tables in reverse, and the tables' shapes
        self._num_keys = 0
        value = self._add_input()
        for _ in range(1 + choices.below(5)):
            value = self._add_part(value)
        self._add_output(value)

    def arranged(self) -> Container:
        """What the parts hold, some of it in containers, and in containers in these."""
        items = dict(self.held)
        for number in range(self.choices.below(4)):
            inside = self.choices.taken(items, 1 + self.choices.below(3))
            inner = tuple((key, items[key]) for key in items if key in inside)
            items = {key: item for key, item in items.items() if key not in inside}
            items[f"g{number}"] = self._container(f"G{number}", inner)
        return Container("attributes", "", tuple(items.items()))

    def _container(self, name: str, items: tuple[tuple[str, str | Container], ...]) -> Container:
        return Container(self.choices.weighted(self.library.containers), name, items)

    # -- parts

    def _add_input(self) -> str:
        """Add an input; tokens are embedded at once."""
        choices = self.choices
        kind = choices.weighted(_INPUTS)
        num_axes = {"vector": 0, "sequence": 1, "image": 2, "volume": 3, "tokens": 1}[kind]
        sides = {"volume": (4, 2), "image": (4, 8)}.get(kind, (8, 8, 4, 6, 16))
        places = tuple(choices.one_of(*sides) for _ in range(num_axes))
        width = choices.weighted(WIDTHS)
        vocabulary = choices.one_of(32, 64, 30) if kind == "tokens" else None
        value, shape = f"x{len(self.shapes)}", (*places, width)
        self.inputs.append(Value(value, places if vocabulary else shape, vocabulary))
        self.shapes[value] = self.inputs[-1].shape
        if not vocabulary:
            return value
        held, call, reverse = choices.one_of(*self.library.tables)
        held = _sized(held, vocabulary, width)
        held, calls = self._held(held, [call.replace("{rows}", str(vocabulary)), reverse])
        if reverse:
            self.tables.append((calls[1].replace("{h}", f"{{l{len(self.held)}}}"), vocabulary, width))
        return self._put(("table",), calls[0], held, shape, value)

    def _add_part(self, value: str) -> str:
        """Add a layer, or several that belong together."""
        parts = {
            self._add_layer: 9,
            self._residual: 3,
            self._gate: 1,
            self._shared: 2,
            self._joined: 3,
            self._output_beside: 1,
        }
        return self.choices.weighted(parts)(value)

    def _add_layer(self, value: str) -> str:
        """Add a layer that fits, with something around it or not."""
        shape, wrapper = self.shapes[value], self.choices.weighted(WRAPPERS)
        axis = 1 + self.choices.below(len(shape) - 1) if wrapper == "each" and len(shape) > 1 else 0
        kind, call, held, after = self._drawn_for((*shape[: axis - 1], *shape[axis:]) if axis else shape)
        fits = {
            "remat": bool(held),
            "scan": bool(held) and after == shape,
            "experts": bool(held) and after[:-1] == shape[:-1],
            "each": axis > 0 and _is_small((shape[axis - 1], *after)),
        }
        if not fits.get(wrapper) or kind in self.library.unfit.get(wrapper, ()):
            if axis:
                kind, call, held, after = self._drawn_for(shape)
            held, (call,) = self._held(held, [call])
            return self._put((kind,), call, held, after, value)
        number = self.choices.one_of(2, 4, 3) if wrapper in ("scan", "experts") else 0
        held, (call,) = self._held(held, [call], number)
        inner = re.sub("{([xh])}", lambda found: "p" if found[1] == "h" else "x", call)
        around = self.library.wrapped[wrapper] if held else "jax.vmap(lambda x: {call}, {axis}, 1)({x})"
        call = around.replace("{call}", inner).replace("{axis}", str(axis))
        if wrapper != "experts":
            after = (shape[axis - 1], *after) if axis else after
            return self._put((kind, wrapper), call, held, after, value)
        gate = self._linear(value, number)
        experts = self._put((kind, wrapper), call, held, (number, *after), value)
        return self._joined_by(f'jnp.einsum("e...w,...e->...w", {experts}, jax.nn.softmax({gate}))', after)

    def _drawn_for(self, shape: Shape) -> tuple[str, str, Held, Shape]:
        """A kind of layer that fits a shape, and what its maker says."""
        fits = {
            kind: weight + 20 * (kind in self.favourites)
            for kind, (ranks, weight, _) in self.kinds.items()
            if len(shape) in ranks
        }
        while True:
            kind = self.choices.weighted(fits)
            call, held, after = self.kinds[kind][2](self.choices, shape)
            if _is_small(after):
                return kind, call, held, after
            del fits[kind]

    def _held(self, held: Held, calls: list[str], number: int = 0) -> tuple[str | Container, list[str]]:
        """What a layer holds, and its calls, in which `{h}` stands for it.

        Args:
            held: What its maker says of it.
            calls: Its calls, in which `{w}` stands for the weight of that name.
            number: How many layers are held as one; 0: one alone.
        """
        if isinstance(held, str):
            if not number:
                return self._with_key(held), calls
            made = held.replace("{key}", "k")
            return self._with_key(
                self.library.stacked.replace("{made}", made).format(number=number, key="{key}")
            ), calls
        if not held:
            return "", calls
        items, reads = [], dict[str, str]()
        is_frozen = self.choices.one_in(10)
        for name, each in held.items():
            if isinstance(each, str):
                made, reads[name] = self.choices.weighted(self.library.constants), self.library.weight[1]
                each = f"jnp.stack([{each}] * {number})" if number else each
                items.append((name, made.replace("{}", each)))
                continue
            made, reads[name] = self.library.frozen if is_frozen else self.library.weight
            shape = (number, *each[0]) if number else each[0]
            made = made.replace("{scale}", f"{each[1] ** -0.5:.2g}").replace("{shape}", str(shape))
            items.append((name, self._with_key(made)))
            is_frozen = False
        if len(items) == 1 and self.choices.one_in(2):
            made, places = items[0][1], {items[0][0]: "{h}"}
        else:
            made = self._container(f"L{len(self.held)}", tuple(items))
            places = made.read("{h}")
        read = {name: reads[name].replace("{}", place) for name, place in places.items()}
        return made, [re.sub(r"{(\w+)}", lambda found: read.get(found[1], found[0]), call) for call in calls]

    def _with_key(self, made: str) -> str:
        self._num_keys += 1
        return made.replace("{key}", str(self._num_keys))

    def _put(self, kinds: tuple[str, ...], call: str, held: str | Container, shape: Shape, value: str) -> str:
        """Add a layer and its call."""
        name = f"l{len(self.held)}"
        if held:
            self.held[name] = held
        call = call.replace("{h}", f"{{{name}}}").replace("{x}", value)
        is_module = isinstance(held, str) and kinds[0] in self.library.layers
        is_module = is_module and not {"experts", "each"}.intersection(kinds)
        self.parts.append(Part(kinds, call, f"x{len(self.shapes)}", shape, name if is_module else ""))
        self.shapes[self.parts[-1].value] = shape
        return self.parts[-1].value

    def _joined_by(self, call: str, shape: Shape) -> str:
        """Add an expression of values that there are."""
        return self._put(("join",), call, "", shape, "")

    def _linear(self, value: str, width: int) -> str:
        *places, features = self.shapes[value]
        held, call = self.library.linear
        held, (call,) = self._held(_sized(held, features, width), [call])
        return self._put(("linear",), call, held, (*places, width), value)

    def _add_output(self, value: str) -> None:
        """Add an output: for each place or for all, or by a table of embeddings."""
        *places, width = self.shapes[value]
        if self.tables and len(places) == 1 and not self.choices.one_in(3):
            call, vocabulary, needed = self.tables[0]
            value = value if width == needed else self._linear(value, needed)
            value = self._joined_by(call.replace("{x}", value), (*places, vocabulary))
            self.outputs.append(Value(value, tuple(places), vocabulary, CLASSES))
            return
        if places and not self.choices.one_in(3):
            value = self._vector(value)
        loss = self.choices.weighted(_LOSSES)
        value = self._linear(value, self.choices.weighted(WIDTHS))
        *places, width = shape = self.shapes[value]
        is_class = loss == CLASSES
        self.outputs.append(
            Value(value, tuple(places) if is_class else shape, width if is_class else None, loss)
        )

    def _vector(self, value: str) -> str:
        """One axis of features, of all places."""
        shape = self.shapes[value]
        if math.prod(shape) <= 256 and self.choices.one_in(2):
            return self._joined_by(f"{value}.reshape(-1, {math.prod(shape)})", (math.prod(shape),))
        axes = tuple(range(1, len(shape)))
        return self._joined_by(f"{value}.{self.choices.one_of('mean', 'max')}({axes})", shape[-1:])

    def _residual(self, value: str) -> str:
        inner = self._add_layer(value)
        if self.choices.one_in(2):
            inner = self._add_layer(inner)
        *places, width = shape = self.shapes[value]
        if tuple(places) != self.shapes[inner][:-1]:
            return inner
        inner = inner if self.shapes[inner] == shape else self._linear(inner, width)
        return self._joined_by(f"{value} + {inner}", shape)

    def _gate(self, value: str) -> str:
        shape = self.shapes[value]
        return self._joined_by(f"{value} * jax.nn.sigmoid({self._linear(value, shape[-1])})", shape)

    def _shared(self, value: str) -> str:
        """A layer that is called twice."""
        shape = self.shapes[value]
        once = self._linear(value, shape[-1])
        again = re.sub(rf"\b{value}\b", f"jnp.tanh({once})", self.parts[-1].call)
        return self._joined_by(again, shape)

    def _joined(self, value: str) -> str:
        """Another input, which is added, multiplied or concatenated."""
        if len(self.inputs) > 2:
            return self._add_layer(value)
        other, shape = self._add_input(), self.shapes[value]
        for _ in range(self.choices.below(3)):
            other = self._add_layer(other)
        if len(self.shapes[other]) > 1:
            other = self._vector(other)
        other = self._linear(other, shape[-1])
        if len(shape) > 1:
            other = self._joined_by(f"{other}[{', '.join([':', *['None'] * (len(shape) - 1)])}]", shape)
        elif self.choices.one_in(2):
            return self._joined_by(f"jnp.concatenate([{value}, {other}], -1)", (2 * shape[-1],))
        return self._joined_by(f"{value} {self.choices.one_of('+', '*')} {other}", shape)

    def _output_beside(self, value: str) -> str:
        if len(self.outputs) < 2:
            self._add_output(value)
        return self._add_layer(value)


def _is_small(shape: Shape) -> bool:
    return len(shape) < 5 and math.prod(shape) <= _MOST_ELEMENTS


def _sized(held: Held, features: int, width: int) -> Held:
    """What a linear layer or a table holds, of these sizes."""
    if isinstance(held, str):
        return held.format(features=features, width=width, key="{key}")
    return {name: ((features, width), each[1] or features) for name, each in held.items()}
