"""Draw JAX models layer by layer."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from layoutmap.testing.models.builder import ModelBuilder
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.jax.functions import FUNCTIONS, LayerCode, LayerKinds, Parameters
from layoutmap.testing.models.jax.model import Container, ForwardLine
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.values import WIDTHS, ModelValue

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
"""Wrappers of a layer, with how often each is drawn.

`scan` and `experts` stack the weights of several layers. `each` calls the layer for each element of an axis.
"""
_EACH_WITHOUT_CONTENTS = "jax.vmap(lambda x: {call}, {axis}, 1)({x})"
_MAX_OUTPUT_ELEMENTS = 2048


@dataclass(frozen=True)
class LibrarySyntax:
    """The Python code that creates and calls layers in one kind of JAX models: modules of flax.nnx, or pytrees.

    In expressions, `{h}` stands for the parameters of a layer, `{x}` for its input, and `{key}` for a random key.
    """

    layers: LayerKinds
    containers: Mapping[str, int]  # how often each kind of container is drawn
    weight: tuple[
        str, str
    ]  # code that creates a weight of `shape`; code that reads a weight, for which `{}` stands
    frozen: tuple[str, str]  # the same two pieces of code for a weight that is not trained
    constants: Mapping[
        str, int
    ]  # from code that stores a constant, for which `{}` stands, to how often it is drawn
    linear: tuple[Parameters, str]  # parameters of a linear layer from `features` to `width`; its call
    embeddings: Sequence[tuple[Parameters, str, str]]  # parameters, call, and code of logits (empty: none)
    stacked: str  # code that stacks `number` modules, each of which the code `made` creates
    wrappers: Mapping[str, str]  # code that wraps a `call`, by name of the wrapper
    unsupported: Mapping[str, Collection[str]]  # kinds of layers that a wrapper does not support


class JaxBuilder(ModelBuilder):
    """Draw a random JAX model layer by layer. The constructor draws all layers."""

    def __init__(self, choices: Choices, library: LibrarySyntax):
        self._library, self._kinds = library, {**library.layers, **FUNCTIONS}
        super().__init__(choices, choices.sample(self._kinds, 3))
        self.lines: list[ForwardLine] = []
        self._parameters: dict[str, str | Container] = {}
        # Of the first embedding that can compute logits: the code of the logits, the vocabulary size, and the width.
        self._embedding: tuple[str, int, int] | None = None
        self._num_keys = 0
        self.build_model(max_parts=5)

    def draw_model_container(self, kind: str) -> Container:
        """Return a container with the parameters of all layers, some of which are in nested containers."""
        items = dict(self._parameters)
        for number in range(self.choices.draw_below(4)):
            grouped = self.choices.sample(items, 1 + self.choices.draw_below(3))
            inner = {key: items.pop(key) for key in list(items) if key in grouped}
            items[f"g{number}"] = self._draw_container(f"G{number}", inner)
        return Container(kind, "Held", tuple(items.items()))

    # -- layers

    def add_layer(self, value: str) -> str:
        """Add a layer that accepts the shape of the value, possibly in a wrapper."""
        shape, wrapper = self.shapes[value], self.choices.pick_weighted(WRAPPERS)
        axis = 1 + self.choices.draw_below(len(shape) - 1) if wrapper == "each" and len(shape) > 1 else 0
        kind, code = self._draw_kind_and_code((*shape[: axis - 1], *shape[axis:]) if axis else shape)
        call, parameters, after = code
        usable = {
            "remat": bool(parameters),
            "scan": bool(parameters) and after == shape,
            "experts": bool(parameters) and after[:-1] == shape[:-1],
            "each": axis > 0 and _is_small_shape((shape[axis - 1], *after)),
        }
        if not usable.get(wrapper) or kind in self._library.unsupported.get(wrapper, ()):
            kind, code = self._draw_kind_and_code(shape) if axis else (kind, code)
            return self._append_layer(kind, "", code, value)
        if wrapper != "experts":
            number = self.choices.pick(2, 3) if wrapper == "scan" else 0
            after = (shape[axis - 1], *after) if axis else after
            return self._append_layer(
                kind, wrapper, (call, parameters, after), value, number=number, axis=axis
            )
        number = self.choices.pick(4, 2, 3)
        gate = self.add_linear(value, number)
        experts = self._append_layer(kind, wrapper, code, value, number=number)
        return self._append_forward_line(
            f'jnp.einsum("e...w,...e->...w", {experts}, jax.nn.softmax({gate}))', after
        )

    def _draw_kind_and_code(self, shape: Shape) -> tuple[str, LayerCode]:
        """Return the kind and the code of a random layer that accepts an input shape."""
        weights = {kind: weight for kind, (ranks, weight, _) in self._kinds.items() if len(shape) in ranks}

        def draw_code_if_small(kind: str) -> LayerCode | None:
            code = self._kinds[kind][2](self.choices, shape)
            return code if _is_small_shape(code[2]) else None

        return self.draw_kind_and_layer(weights, draw_code_if_small)

    def _append_layer(
        self, kind: str, wrapper: str, code: LayerCode, value: str, *, number: int = 0, axis: int = 0
    ) -> str:
        """Add a layer, or a stack of layers if `number` is not 0. Return the variable of the result."""
        call, parameters, shape = code
        accesses = self._add_parameters(parameters, number)
        if wrapper:
            inner = {name: access.replace(accesses["h"], "p") for name, access in accesses.items()}
            around = self._library.wrappers[wrapper] if parameters else _EACH_WITHOUT_CONTENTS
            call = _fill_braces(around, {"call": _fill_braces(call, {**inner, "x": "x"}), "axis": str(axis)})
        is_module = kind in self._library.layers and wrapper in ("", "remat", "scan")
        module = accesses["h"].strip("{}") if parameters and is_module else ""
        return self._append_forward_line(
            _fill_braces(call, {**accesses, "x": value}), shape, (kind, wrapper), module
        )

    def _add_parameters(self, parameters: Parameters, num_stacked: int = 0) -> dict[str, str]:
        """Add a layer's parameters, stacked if `num_stacked` is not 0. Return a dict from names to expressions."""
        name = f"l{len(self._parameters)}"
        accesses = {"h": f"{{{name}}}"}
        if not parameters:
            return {}
        if isinstance(parameters, str):
            made = _fill_braces(parameters, {"key": "k"}) if num_stacked else parameters
            module = self._library.stacked if num_stacked else made
            self._parameters[name] = self._fill_braces_and_key(module, made=made, number=num_stacked)
            return accesses
        items, is_frozen = dict[str, str | Container](), self.choices.draw_true_once_in(10)
        for key, item in parameters.items():
            weight, accesses[key] = self._library.frozen if is_frozen else self._library.weight
            if isinstance(item, str):
                constant = f"jnp.stack({num_stacked} * [{item}])" if num_stacked else item
                items[key] = self.choices.pick_weighted(self._library.constants).replace("{}", constant)
                continue
            scale = f"{math.prod(item[:-1]) ** -0.5 if len(item) > 1 else 0.3:.2g}"
            items[key] = self._fill_braces_and_key(
                weight, scale=scale, shape=(num_stacked, *item) if num_stacked else item
            )
            is_frozen = False  # only the first weight of a layer may be frozen
        owners = dict.fromkeys(items, accesses["h"])
        self._parameters[name], *others = items.values()
        if others or self.choices.draw_true_once_in(2):
            self._parameters[name] = container = self._draw_container(f"L{name[1:]}", items)
            owners = container.make_access_expressions(accesses["h"])
        return accesses | {key: accesses[key].replace("{}", owner) for key, owner in owners.items()}

    def _fill_braces_and_key(self, expression: str, **values: object) -> str:
        """Return an expression with `values` in place of the names in braces, and a new random key for `{key}`."""
        self._num_keys += 1
        expression = _fill_braces(expression, {name: str(value) for name, value in values.items()})
        return _fill_braces(expression, {"key": str(self._num_keys)})

    def _draw_container(self, name: str, items: Mapping[str, str | Container]) -> Container:
        return Container(self.choices.pick_weighted(self._library.containers), name, tuple(items.items()))

    def _append_forward_line(
        self, call: str, shape: Shape, kinds: tuple[str, ...] = (), module: str = ""
    ) -> str:
        """Add a line of the forward pass, and return the variable of its result."""
        value = self.create_program_variable(shape)
        self.lines.append(ForwardLine(tuple(filter(None, kinds)), call, value, shape, module))
        return value

    # -- inputs, outputs, and parts of several layers

    def add_input(self) -> str:
        """Add an input, and an embedding if the input has tokens."""
        value, shape, vocabulary = self.add_random_input(_INPUTS, {"volume": (4, 2), "image": (4, 8)})
        if not vocabulary:
            return value
        parameters, call, logits = self.choices.pick(*self._library.embeddings)
        accesses = self._add_parameters(_set_parameter_sizes(parameters, vocabulary, shape[-1]))
        if logits:
            self._embedding = self._embedding or (_fill_braces(logits, accesses), vocabulary, shape[-1])
        call = _fill_braces(call, {**accesses, "x": value, "rows": str(vocabulary)})
        return self._append_forward_line(call, shape, ("table",))

    def add_output(self, value: str) -> None:
        """Add an output that keeps the spatial axes of a value, or merges them."""
        *spatial, width = self.shapes[value]
        if self._embedding and len(spatial) == 1 and not self.choices.draw_true_once_in(3):
            logits, vocabulary, needed = self._embedding
            value = value if width == needed else self.add_linear(value, needed)
            value = self._append_forward_line(_fill_braces(logits, {"x": value}), (*spatial, vocabulary))
            self.outputs.append(ModelValue(value, tuple(spatial), vocabulary, _CLASSES))
            return
        if spatial and not self.choices.draw_true_once_in(3):
            value = self._flatten_or_reduce_to_features(value)
        loss, width = self.choices.pick_weighted(_LOSSES), self.choices.pick_weighted(WIDTHS)
        value = self.add_linear(value, width)
        *spatial, _ = shape = self.shapes[value]
        has_classes = loss == _CLASSES
        self.outputs.append(
            ModelValue(value, tuple(spatial), width, loss)
            if has_classes
            else ModelValue(value, shape, loss=loss)
        )

    def add_linear(self, value: str, width: int) -> str:
        """Add a linear layer without an activation."""
        *spatial, features = self.shapes[value]
        parameters, call = self._library.linear
        code = call, _set_parameter_sizes(parameters, features, width), (*spatial, width)
        return self._append_layer("linear", "", code, value)

    def _flatten_or_reduce_to_features(self, value: str) -> str:
        """Flatten or reduce all axes of a value to one axis of features, and return the variable of the result."""
        shape = self.shapes[value]
        if math.prod(shape) <= 256 and self.choices.draw_true_once_in(2):
            return self._append_forward_line(f"{value}.reshape(-1, {math.prod(shape)})", (math.prod(shape),))
        call = f"{value}.{self.choices.pick('mean', 'max')}({(*range(1, len(shape)),)})"
        return self._append_forward_line(call, shape[-1:])

    def add_sum(self, value: str, other: str) -> str:
        """Add the sum of two values of one shape."""
        return self._append_forward_line(f"{value} + {other}", self.shapes[value])

    def add_gate(self, value: str) -> str:
        """Add a sigmoid gate."""
        shape = self.shapes[value]
        return self._append_forward_line(
            f"{value} * jax.nn.sigmoid({self.add_linear(value, shape[-1])})", shape
        )

    def add_shared_layer(self, value: str) -> str:
        """Add a linear layer that is called twice."""
        shape = self.shapes[value]
        first = self.add_linear(value, shape[-1])
        second = re.sub(rf"\b{value}\b", f"jnp.tanh({first})", self.lines[-1].call)
        return self._append_forward_line(second, shape)

    def combine_with_other_input(self, value: str, other: str) -> str:
        """Concatenate, add, or multiply a value with a value of another input. Return the result's variable."""
        shape = self.shapes[value]
        if len(self.shapes[other]) > 1:
            other = self._flatten_or_reduce_to_features(other)
        other = self.add_linear(other, shape[-1])
        if len(shape) == 1 and self.choices.draw_true_once_in(2):
            return self._append_forward_line(f"jnp.concatenate([{value}, {other}], -1)", (2 * shape[-1],))
        if len(shape) > 1:
            other += f"[:, {', '.join(['None'] * (len(shape) - 1))}]"
        return self._append_forward_line(f"{value} {self.choices.pick('+', '*')} {other}", shape)


def _is_small_shape(shape: Shape) -> bool:
    return len(shape) < 5 and math.prod(shape) <= _MAX_OUTPUT_ELEMENTS


def _fill_braces(expression: str, values: Mapping[str, str]) -> str:
    """Return an expression in which `values` replace the names in braces. Names without a value stay."""
    return re.sub(r"{(\w+)}", lambda match: values.get(match[1], match[0]), expression)


def _set_parameter_sizes(parameters: Parameters, features: int, width: int) -> Parameters:
    """Return the parameters of a linear layer or an embedding with these input and output sizes.

    The sizes are filled into the expression of the layer, or are the shape of each of its weights.
    """
    if isinstance(parameters, str):
        return _fill_braces(parameters, {"features": str(features), "width": str(width)})
    return dict.fromkeys(parameters, (features, width))
