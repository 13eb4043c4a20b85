"""Draws models of JAX: layer after layer, each one that fits what the last one has put out."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.jax.describing import Container, Line
from layoutmap.testing.models.jax.functions import FUNCTIONS, Held, Kinds, Made
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.values import WIDTHS, Value

_INPUTS = {"vector": 4, "sequence": 5, "image": 3, "volume": 2, "tokens": 4}
_CLASSES = "optax.softmax_cross_entropy_with_integer_labels(y, t).mean()"
_LOSSES = {
    "((y - t) ** 2).mean()": 4,
    _CLASSES: 3,
    "optax.huber_loss(y, t).mean()": 1,
    "optax.log_cosh(y, t).mean()": 1,
    "jnp.sqrt(((y - t) ** 2).sum(-1) + 0.1).mean()": 1,
}
WRAPPERS = {"": 16, "remat": 2, "scan": 3, "experts": 2, "each": 2}
"""The wrapping of a layer, and how often it is drawn: `scan` and `experts` hold several layers as one, `each` calls the
layer for each element of an axis."""
_EACH_OF_NOTHING = "jax.vmap(lambda x: {call}, {axis}, 1)({x})"
_MOST_ELEMENTS = 2048


@dataclass(frozen=True)
class Library:
    """How models are written for a library.

    In expressions, `{h}` stands for what a layer holds, `{x}` for what it takes, and `{key}` for a random key.

    Args:
        layers: Its own layers.
        containers: What may hold several things, and how often each does.
        weight: The expression of a weight, a `scale` times random numbers of a `shape`, and how it is read: `{}`.
        frozen: Those of a weight that is not trained.
        constants: The expressions of a constant, `{}`, and how often each is drawn.
        linear: A linear layer without an activation, from so many `features` to a `width`, and how it is called.
        tables: Tables of embeddings: what they hold, how they are called, and how in reverse, if they can be.
        stacked: The expression of several modules as one: a `number` of what is `made`.
        wrapped: The expressions of a `call` in something, by wrapper.
        unfit: Its layers that a wrapper cannot be around, by wrapper.
    """

    layers: Kinds
    containers: Mapping[str, int]
    weight: tuple[str, str]
    frozen: tuple[str, str]
    constants: Mapping[str, int]
    linear: tuple[Held, str]
    tables: Sequence[tuple[Held, str, str]]
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
        self._choices, self._library = choices, library
        self._kinds = {**library.layers, **FUNCTIONS}
        # Each model has favourites of its own: else two rare kinds would hardly ever meet.
        self._favourites = choices.taken(self._kinds, 3)
        self._held: dict[str, str | Container] = {}
        self._shapes: dict[str, Shape] = {}
        self._tables: list[tuple[str, int, int]] = []  # calls of tables in reverse, and the tables' shapes
        self._num_keys = 0
        self.inputs: list[Value] = []
        self.parts: list[Line] = []
        self.outputs: list[Value] = []
        value = self._add_input()
        for _ in range(1 + choices.below(5)):
            value = self._add_part(value)
        self._add_output(value)

    def held(self, kind: str) -> Container:
        """The values that the layers hold, some of them in containers, and in containers in these.

        Args:
            kind: The kind of the outermost container.
        """
        items = dict(self._held)
        for number in range(self._choices.below(4)):
            inside = self._choices.taken(items, 1 + self._choices.below(3))
            inner = {key: items.pop(key) for key in list(items) if key in inside}
            items[f"g{number}"] = self._container(f"G{number}", inner)
        return Container(kind, "Held", tuple(items.items()))

    # -- layers

    def _add_layer(self, value: str) -> str:
        """Add a layer that fits, with something around it or not."""
        shape, wrapper = self._shapes[value], self._choices.weighted(WRAPPERS)
        axis = 1 + self._choices.below(len(shape) - 1) if wrapper == "each" and len(shape) > 1 else 0
        kind, (call, held, after) = self._drawn_for((*shape[: axis - 1], *shape[axis:]) if axis else shape)
        fits = {
            "remat": bool(held),
            "scan": bool(held) and after == shape,
            "experts": bool(held) and after[:-1] == shape[:-1],
            "each": axis > 0 and _is_small((shape[axis - 1], *after)),
        }
        if not fits.get(wrapper) or kind in self._library.unfit.get(wrapper, ()):
            kind, (call, held, after) = (kind, (call, held, after)) if not axis else self._drawn_for(shape)
            return self._put(kind, "", (call, held, after), value)
        if wrapper != "experts":
            number = self._choices.one_of(2, 3) if wrapper == "scan" else 0
            after = (shape[axis - 1], *after) if axis else after
            return self._put(kind, wrapper, (call, held, after), value, number=number, axis=axis)
        number = self._choices.one_of(4, 2, 3)
        gate = self._linear(value, number)
        experts = self._put(kind, wrapper, (call, held, after), value, number=number)
        return self._join(f'jnp.einsum("e...w,...e->...w", {experts}, jax.nn.softmax({gate}))', after)

    def _drawn_for(self, shape: Shape) -> tuple[str, Made]:
        """A kind of layer that fits a shape, and what is made of it."""
        fits = {
            kind: weight + 20 * (kind in self._favourites)
            for kind, (ranks, weight, _) in self._kinds.items()
            if len(shape) in ranks
        }
        while True:
            kind = self._choices.weighted(fits)
            made = self._kinds[kind][2](self._choices, shape)
            if _is_small(made[2]):
                return kind, made
            del fits[kind]

    def _put(self, kind: str, wrapper: str, made: Made, value: str, *, number: int = 0, axis: int = 0) -> str:
        """Add a layer and its call.

        Args:
            kind: Its kind.
            wrapper: What is around it.
            made: What is made of it.
            value: What it is called with.
            number: How many layers are held as one; 0: one alone.
            axis: The axis of which each element is called with.
        """
        call, held, shape = made
        read = self._hold(held, number)
        if wrapper:
            inner = {name: text.replace(read["h"], "p") for name, text in read.items()}
            around = self._library.wrapped[wrapper] if held else _EACH_OF_NOTHING
            call = _filled(around, {"call": _filled(call, {**inner, "x": "x"}), "axis": str(axis)})
        is_module = kind in self._library.layers and wrapper in ("", "remat", "scan")
        module = read["h"].strip("{}") if held and is_module else ""
        return self._join(_filled(call, {**read, "x": value}), shape, (kind, wrapper), module)

    def _hold(self, held: Held, number: int = 0) -> dict[str, str]:
        """The expressions that read what a layer holds, by the names that its call has for it.

        Args:
            held: What the layer holds.
            number: How many layers are held as one; 0: one alone.
        """
        name = f"l{len(self._held)}"
        read = {"h": f"{{{name}}}"}
        if not held:
            return {}
        if isinstance(held, str):
            made = _filled(held, {"key": "k"}) if number else held
            self._held[name] = self._made(self._library.stacked if number else made, made=made, number=number)
            return read
        items, is_frozen = dict[str, str | Container](), self._choices.one_in(10)
        for key, each in held.items():
            weight, read[key] = self._library.frozen if is_frozen else self._library.weight
            if isinstance(each, str):
                constant = f"jnp.stack({number} * [{each}])" if number else each
                items[key] = self._choices.weighted(self._library.constants).replace("{}", constant)
                continue
            scale = f"{math.prod(each[:-1]) ** -0.5 if len(each) > 1 else 0.3:.2g}"
            items[key] = self._made(weight, scale=scale, shape=(number, *each) if number else each)
            is_frozen = False  # of several weights, the first
        places = dict.fromkeys(items, read["h"])
        self._held[name], *others = items.values()
        if others or self._choices.one_in(2):
            self._held[name] = container = self._container(f"L{name[1:]}", items)
            places = container.read(read["h"])
        return read | {key: read[key].replace("{}", place) for key, place in places.items()}

    def _made(self, expression: str, **values: object) -> str:
        """An expression with these values, and a random key of its own."""
        self._num_keys += 1
        return _filled(
            _filled(expression, {name: str(value) for name, value in values.items()}),
            {"key": str(self._num_keys)},
        )

    def _container(self, name: str, items: Mapping[str, str | Container]) -> Container:
        return Container(self._choices.weighted(self._library.containers), name, tuple(items.items()))

    def _join(self, call: str, shape: Shape, kinds: tuple[str, ...] = (), module: str = "") -> str:
        """Add a line of the forward pass."""
        value = f"x{len(self._shapes)}"
        self.parts.append(Line(tuple(filter(None, kinds)), call, value, shape, module))
        self._shapes[value] = shape
        return value

    # -- what belongs together

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
        return self._choices.weighted(parts)(value)

    def _add_input(self) -> str:
        """Add an input; tokens are embedded at once."""
        choices = self._choices
        kind = choices.weighted(_INPUTS)
        num_axes = {"vector": 0, "sequence": 1, "image": 2, "volume": 3, "tokens": 1}[kind]
        sides = {"volume": (4, 2), "image": (4, 8)}.get(kind, (8, 8, 4, 6, 16))
        places = tuple(choices.one_of(*sides) for _ in range(num_axes))
        width = choices.weighted(WIDTHS)
        vocabulary = choices.one_of(32, 64, 30) if kind == "tokens" else None
        value, shape = f"x{len(self._shapes)}", (*places, width)
        self.inputs.append(Value(value, places if vocabulary else shape, vocabulary))
        self._shapes[value] = self.inputs[-1].shape
        if not vocabulary:
            return value
        held, call, reverse = choices.one_of(*self._library.tables)
        read = self._hold(_sized(held, vocabulary, width))
        if reverse:
            self._tables.append((_filled(reverse, read), vocabulary, width))
        return self._join(_filled(call, {**read, "x": value, "rows": str(vocabulary)}), shape, ("table",))

    def _add_output(self, value: str) -> None:
        """Add an output: for each place or for all, or by a table of embeddings."""
        *places, width = self._shapes[value]
        if self._tables and len(places) == 1 and not self._choices.one_in(3):
            call, vocabulary, needed = self._tables[0]
            value = value if width == needed else self._linear(value, needed)
            value = self._join(_filled(call, {"x": value}), (*places, vocabulary))
            self.outputs.append(Value(value, tuple(places), vocabulary, _CLASSES))
            return
        if places and not self._choices.one_in(3):
            value = self._vector(value)
        loss, width = self._choices.weighted(_LOSSES), self._choices.weighted(WIDTHS)
        value = self._linear(value, width)
        *places, _ = shape = self._shapes[value]
        output = (
            Value(value, tuple(places), width, loss) if loss == _CLASSES else Value(value, shape, loss=loss)
        )
        self.outputs.append(output)

    def _output_beside(self, value: str) -> str:
        if len(self.outputs) < 2:
            self._add_output(value)
        return self._add_layer(value)

    def _linear(self, value: str, width: int) -> str:
        *places, features = self._shapes[value]
        held, call = self._library.linear
        return self._put("linear", "", (call, _sized(held, features, width), (*places, width)), value)

    def _vector(self, value: str) -> str:
        """One axis of features, of all places."""
        shape = self._shapes[value]
        if math.prod(shape) <= 256 and self._choices.one_in(2):
            return self._join(f"{value}.reshape(-1, {math.prod(shape)})", (math.prod(shape),))
        return self._join(
            f"{value}.{self._choices.one_of('mean', 'max')}({(*range(1, len(shape)),)})", shape[-1:]
        )

    def _residual(self, value: str) -> str:
        inner = self._add_layer(value)
        if self._choices.one_in(2):
            inner = self._add_layer(inner)
        shape = self._shapes[value]
        if shape[:-1] != self._shapes[inner][:-1]:
            return inner
        inner = inner if self._shapes[inner] == shape else self._linear(inner, shape[-1])
        return self._join(f"{value} + {inner}", shape)

    def _gate(self, value: str) -> str:
        shape = self._shapes[value]
        return self._join(f"{value} * jax.nn.sigmoid({self._linear(value, shape[-1])})", shape)

    def _shared(self, value: str) -> str:
        """A layer that is called twice."""
        shape = self._shapes[value]
        once = self._linear(value, shape[-1])
        return self._join(re.sub(rf"\b{value}\b", f"jnp.tanh({once})", self.parts[-1].call), shape)

    def _joined(self, value: str) -> str:
        """Another input, which is added, multiplied or concatenated."""
        if len(self.inputs) > 2:
            return self._add_layer(value)
        other, shape = self._add_input(), self._shapes[value]
        for _ in range(self._choices.below(3)):
            other = self._add_layer(other)
        if len(self._shapes[other]) > 1:
            other = self._vector(other)
        other = self._linear(other, shape[-1])
        if len(shape) == 1 and self._choices.one_in(2):
            return self._join(f"jnp.concatenate([{value}, {other}], -1)", (2 * shape[-1],))
        if len(shape) > 1:
            other += f"[:, {', '.join(['None'] * (len(shape) - 1))}]"
        return self._join(f"{value} {self._choices.one_of('+', '*')} {other}", shape)


def _is_small(shape: Shape) -> bool:
    return len(shape) < 5 and math.prod(shape) <= _MOST_ELEMENTS


def _filled(expression: str, names: Mapping[str, str]) -> str:
    """An expression in which names in braces, as far as they are given, are replaced."""
    return re.sub(r"{(\w+)}", lambda found: names.get(found[1], found[0]), expression)


def _sized(held: Held, features: int, width: int) -> Held:
    """The arrays of a linear layer or a table of these sizes."""
    if isinstance(held, str):
        return _filled(held, {"features": str(features), "width": str(width)})
    return dict.fromkeys(held, (features, width))
