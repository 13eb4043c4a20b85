"""JAX models as values: what they hold, in which containers, and the lines of their forward pass."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from layoutmap.testing.models.jax.functions import HELPERS
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.values import Value, batch_source, one_or_list

INDENT = "    "
CONTAINERS = {  # how each begins, how its items begin, how it ends, how one is read
    "dict": ("{{", "{key!r}: ", "}}", "[{key!r}]"),
    "list": ("[", "", "]", "[{number}]"),
    "tuple": ("(", "", ",)", "[{number}]"),
    "namedtuple": ("{name}(", "{key}=", ")", ".{key}"),
    "dataclass": ("{name}(", "{key}=", ")", ".{key}"),
    "attributes": ("", "{key}=", "", ".{key}"),
    "nnx.Dict": ("nnx.Dict(", "{key}=", ")", ".{key}"),
    "nnx.List": ("nnx.List([", "", "])", "[{number}]"),
    "nnx.data": ("nnx.data([", "", "])", "[{number}]"),
}
_CLASSES = {
    "namedtuple": "{name} = collections.namedtuple({name!r}, {keys})\n",
    "dataclass": "{name} = jax.tree_util.register_dataclass(dataclasses.make_dataclass({name!r}, {keys}))\n",
}
CAST = """

def cast(values):
    of_float32 = lambda x: getattr(x, "dtype", None) == jnp.float32
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if of_float32(x) else x, values)


"""
_IN_BFLOAT16 = f"""{CAST}def called(model, *inputs, **named):
    return model(*inputs, **named)


def train_with(model, forward=called, train_with=train_with, **options):
    of_bfloat16 = lambda model, *inputs, **named: forward(model, *cast(inputs), **cast(named))
    return train_with(cast(model), forward=of_bfloat16, **options)
"""


@dataclass(frozen=True)
class Container:
    """A container of arrays, modules, and other containers.

    Args:
        kind: One of `CONTAINERS`.
        name: The name of its class, if it has one of its own.
        items: What it holds, by key: expressions, or containers.
    """

    kind: str
    name: str
    items: tuple[tuple[str, str | Container], ...]

    def source(self, *, is_long: bool = False) -> str:
        """The expression that makes it.

        Args:
            is_long: Whether each item has a line of its own.
        """
        begin, before, end, _ = CONTAINERS[self.kind]
        items = [
            before.format(key=key) + (item.source() if isinstance(item, Container) else item)
            for key, item in self.items
        ]
        if self.kind == "nnx.data":  # it marks attributes, with all that is in them
            items = [item.removeprefix("nnx.data") for item in items]
        inner = "".join(f"\n{INDENT}{item}," for item in items) + "\n" if is_long else ", ".join(items)
        return begin.format(name=self.name) + inner + (end.lstrip(",") if is_long else end).format()

    def read(self, holder: str) -> dict[str, str]:
        """The expressions that read the items, and those of containers inside, by their keys.

        Args:
            holder: The expression of the container.
        """
        found = dict[str, str]()
        for number, (key, item) in enumerate(self.items):
            found[key] = holder + CONTAINERS[self.kind][3].format(key=key, number=number)
            if isinstance(item, Container):
                found |= item.read(found[key])
        return found

    def classes(self) -> Iterator[str]:
        """The lines that define its class, and those of containers inside."""
        if self.kind in _CLASSES:
            yield _CLASSES[self.kind].format(name=self.name, keys=[key for key, _ in self.items])
        for _, item in self.items:
            if isinstance(item, Container):
                yield from item.classes()


@dataclass(frozen=True)
class Line:
    """A line of the forward pass.

    Args:
        kinds: The kind of the layer that it calls, and what is around it.
        call: The expression of its result, in which `{l3}` stands for what the layer of that name holds.
        value: What the program calls the result.
        shape: The shape of the result, without rows.
        module: The name of the layer, if it is a module whose result is of this shape; else empty.
    """

    kinds: tuple[str, ...]
    call: str
    value: str
    shape: Shape
    module: str = ""


@dataclass(frozen=True)
class Model:  # why: decisions/0140
    """A model of JAX.

    Args:
        inputs: Its inputs.
        parts: Its parts, in order.
        held: What they hold, by their names or in containers of their own.
        outputs: Its outputs.
        named: Whether inputs are passed by name.
    """

    library: ClassVar[str] = "jax"
    planned_with: ClassVar[str] = ""
    optimizers: ClassVar[Mapping[str, int]] = {
        "optax.sgd(0.05, momentum=0.9)": 6,
        "optax.sgd(0.05)": 1,
        "optax.sgd(0.05, momentum=0.9, nesterov=True)": 1,
        "optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.05))": 1,
        "optax.adam(0.001)": 1,
        "optax.adamw(0.001, mask=lambda weights: jax.tree.map(lambda w: w.ndim > 1, weights))": 1,
        "optax.rmsprop(0.001, momentum=0.9)": 1,
        "optax.lion(0.001)": 1,
        "optax.masked(optax.sgd(0.05), lambda weights: jax.tree.map(lambda w: w.ndim > 1, weights))": 1,
        "optax.adafactor(0.001, min_dim_size_to_factor=4)": 1,
    }

    precisions: ClassVar[Mapping[str, str]] = {"bfloat16": _IN_BFLOAT16}
    in_float64: ClassVar[str] = ""  # JAX would compute other models so, too

    inputs: tuple[Value, ...]
    parts: tuple[Line, ...]
    held: Container
    outputs: tuple[Value, ...]
    named: bool = False

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of all its parts, in order."""
        return tuple(kind for part in self.parts for kind in part.kinds)

    @property
    def paths(self) -> Mapping[str, str]:
        """The paths of what its layers hold, by the layers' names."""
        read = self.held.read("").items()
        return {name: re.sub(r"\['?(\w+)'?\]", r".\1", place).removeprefix(".") for name, place in read}

    def data(self, rows: int) -> str:
        """The expression of a batch, drawn from `rng`."""
        if not self.named:
            return batch_source(self.inputs, self.outputs, rows)
        inputs = ", ".join(f"{each.name}={each.data(rows)}" for each in self.inputs)
        return f"dict({inputs}), {one_or_list([each.data(rows) for each in self.outputs])}"

    def lines(self, holder: str) -> list[str]:
        """The lines of the forward pass, where `holder` is the expression of what is held."""
        read = self.held.read(holder)
        lines = [
            f"{part.value} = " + re.sub(r"{(l\d+)}", lambda found: read[found[1]], part.call)
            for part in self.parts
        ]
        return [*lines, f"return {one_or_list([each.name for each in self.outputs])}"]

    def program(self, body: str, making: Sequence[str], trained: str, optimizer: str) -> str:
        """The program of `make_model`, a function that returns the model and says how it is trained.

        Args:
            body: What defines the forward pass.
            making: The lines that make the model.
            trained: What they make, and further arguments of `train_with`.
            optimizer: The expression of the optimizer.
        """
        names = [("outputs", "targets")]
        if len(self.outputs) > 1:
            names = [(f"outputs[{n}]", f"targets[{n}]") for n in range(len(self.outputs))]
        losses = [
            re.sub(r"\b[yt]\b", lambda found, named=named: named["yt".index(found[0])], each.loss)
            for each, named in zip(self.outputs, names, strict=True)
        ]
        returned = f"return train_with({trained}, loss=loss, optimizer={optimizer})"
        parts = [
            "".join(self.held.classes()).rstrip(),
            *(source.rstrip() for name, source in HELPERS.items() if re.search(rf"\b{name}\(", body)),
            body,
            block("def loss(outputs, targets):", [f"return {' + '.join(losses)}"]),
            block("def make_model():", [*making, returned]),
        ]
        return "\n\n\n".join(part for part in parts if part) + "\n"


def block(first: str, lines: Sequence[str]) -> str:
    """A line and those below it."""
    return "\n".join([first, *(INDENT + line if line else "" for text in lines for line in text.split("\n"))])
