"""JAX models as values: containers of weights and modules, and the lines of the forward pass."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from layoutmap.testing.models.jax.functions import HELPERS
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.values import (
    ModelValue,
    make_list_code,
    make_losses_code,
    make_whole_batch_code,
)

INDENT = "    "
CONTAINERS = {  # kind: (opening bracket, prefix of an item, closing bracket, access to an item)
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
    """A container of arrays, modules, and other containers."""

    kind: str  # key of the container's kind in `CONTAINERS`
    name: str  # name of the class of a namedtuple or dataclass
    items: tuple[tuple[str, str | Container], ...]  # pairs of a key and an expression or a container

    def make_code(self, *, is_long: bool = False) -> str:
        """Return the expression that creates the container."""
        opening, prefix, closing, _ = CONTAINERS[self.kind]
        items = [
            prefix.format(key=key) + (item.make_code() if isinstance(item, Container) else item)
            for key, item in self.items
        ]
        if self.kind == "nnx.data":  # the outer `nnx.data` also marks nested items, so omit theirs
            items = [item.removeprefix("nnx.data") for item in items]
        inner = "".join(f"\n{INDENT}{item}," for item in items) + "\n" if is_long else ", ".join(items)
        return opening.format(name=self.name) + inner + (closing.lstrip(",") if is_long else closing).format()

    def make_access_expressions(self, owner: str) -> dict[str, str]:
        """Return a dict from each key, also of nested items, to code that reads the item from the code `owner`."""
        accesses = dict[str, str]()
        for number, (key, item) in enumerate(self.items):
            accesses[key] = owner + CONTAINERS[self.kind][3].format(key=key, number=number)
            if isinstance(item, Container):
                accesses |= item.make_access_expressions(accesses[key])
        return accesses

    def iterate_class_code(self) -> Iterator[str]:
        """Yield the code that defines the classes of this container and of nested ones, if they need any."""
        if self.kind in _CLASSES:
            yield _CLASSES[self.kind].format(name=self.name, keys=[key for key, _ in self.items])
        for _, item in self.items:
            if isinstance(item, Container):
                yield from item.iterate_class_code()


@dataclass(frozen=True)
class ForwardLine:
    """Line of the forward pass: it calls a layer and assigns the result to a variable."""

    kinds: tuple[str, ...]  # kinds of the layer and its wrapper
    call: str  # expression of the result; `{l3}` stands for the parameters of the layer `l3`
    value: str  # name of the variable with the result
    shape: Shape  # shape of the result without the batch axis
    module: str = ""  # name of the module that returns the result; empty: none does


# Pytrees and modules of flax.nnx share this class, because only the syntax of parameters differs (decisions/0140).
@dataclass(frozen=True)
class JaxModel:
    """A random JAX model: its inputs, parameters, lines of the forward pass, and outputs."""

    library: ClassVar[str] = "jax"
    plan_inputs: ClassVar[str] = ""
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

    precision_lines: ClassVar[Mapping[str, str]] = {"bfloat16": _IN_BFLOAT16}
    # JAX can enable float64 only for the whole process, where it would change other models, so float64 is not
    # supported.
    float64_lines: ClassVar[str] = ""
    auto_axes_lines: ClassVar[str] = ""
    """Last lines of a program that compute the model with auto axes, where JAX would ask for `out_sharding`."""

    inputs: tuple[ModelValue, ...]
    lines: tuple[ForwardLine, ...]
    parameters: Container  # weights and modules of the model
    outputs: tuple[ModelValue, ...]
    keyword_inputs: bool = False  # whether inputs are passed as keyword arguments

    @cached_property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kinds of all layers, in order."""
        return tuple(kind for line in self.lines for kind in line.kinds)

    @property
    def layer_paths(self) -> Mapping[str, str]:
        """A dict from the name of each layer to the path of its parameters."""
        accesses = self.parameters.make_access_expressions("").items()
        return {name: re.sub(r"\['?(\w+)'?\]", r".\1", access).removeprefix(".") for name, access in accesses}

    def make_batch_code(self, rows: int) -> str:
        """Return the expression that draws a batch from `rng`."""
        if not self.keyword_inputs:
            return make_whole_batch_code(self.inputs, self.outputs, rows)
        inputs = ", ".join(f"{value.name}={value.make_batch_code(rows)}" for value in self.inputs)
        return f"dict({inputs}), {make_list_code([value.make_batch_code(rows) for value in self.outputs])}"

    def make_forward_lines(self, owner: str) -> list[str]:
        """Return the lines of the forward pass, which read layers from the variable `owner`."""
        accesses = self.parameters.make_access_expressions(owner)
        lines = [
            f"{line.value} = " + re.sub(r"{(l\d+)}", lambda match: accesses[match[1]], line.call)
            for line in self.lines
        ]
        return [*lines, f"return {make_list_code([value.name for value in self.outputs])}"]

    def make_program(self, forward: str, setup: Sequence[str], model: str, optimizer: str) -> str:
        """Return the program that defines `make_model`, which returns the model with its loss and optimizer."""
        result = f"return train_with({model}, loss=loss, optimizer={optimizer})"
        parts = [
            "".join(self.parameters.iterate_class_code()).rstrip(),
            *(source.rstrip() for name, source in HELPERS.items() if re.search(rf"\b{name}\(", forward)),
            forward,
            make_indented_block(
                "def loss(outputs, targets):", [f"return {make_losses_code(self.outputs, 'y')}"]
            ),
            make_indented_block("def make_model():", [*setup, result]),
        ]
        return "\n\n\n".join(part for part in parts if part) + "\n"


def make_indented_block(first: str, lines: Sequence[str]) -> str:
    """Return a text of the line `first` and the indented `lines` below it."""
    return "\n".join([first, *(INDENT + line if line else "" for text in lines for line in text.split("\n"))])
