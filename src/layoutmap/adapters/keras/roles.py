"""Find the roles of the axes of weights in the calls of Keras's own layers.

Lint uses them, because sharding an axis that is summed over costs more than sharding one of the output.

    Dense            kernel (in, out), bias (out)
    EinsumDense      depends on its equation: `abc,cde->abde` has a kernel (in, out, out)
    Conv             kernel (.., in, out), bias (out)
    Embedding        embeddings (rows, out); the reverse of a reversible one (in, rows)

The roles of weights in custom layers are unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import keras

from layoutmap.adapters.keras.paths import iterate_sublayers
from layoutmap.core.variables import AxisRoles

_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)

_HEAD_SIZES = ("head_dim", "key_value_dim")
"""Attributes with the size of a head, in attention layers that have all heads in one axis."""


def find_weight_axis_roles(layers: Iterable[object], inputs: Mapping[int, int]) -> dict[int, AxisRoles]:
    """Return a dict from the id of a weight to the known roles of its axes in its layer's computation.

    `inputs` has the number of the input of each layer by the id of the layer.
    """
    layers = list(layers)
    head_sizes = {
        id(child): size
        for layer in layers
        if (size := _find_head_size(layer))
        for child in iterate_sublayers(layer)
        if isinstance(child, keras.layers.Dense)  # an EinsumDense has an axis for heads instead
    }
    found: dict[int, AxisRoles] = {}
    for layer in layers:
        for attribute, roles in _iterate_weight_roles(layer):
            variable = getattr(layer, attribute, None)
            if isinstance(variable, keras.Variable) and len(variable.shape) == len(roles):
                found.setdefault(
                    id(variable), AxisRoles(roles, head_sizes.get(id(layer)), inputs.get(id(layer)))
                )
    return found


def _find_head_size(layer: object) -> int | None:
    """Return the size of an attention head if the layer has an attribute for it, or None."""
    sizes = (getattr(layer, name, None) for name in _HEAD_SIZES)
    return next((size for size in sizes if isinstance(size, int)), None)


def _iterate_weight_roles(layer: object) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield pairs of a weight's attribute in a layer and the roles of the weight's axes."""
    if isinstance(layer, keras.layers.Dense):
        yield "_kernel", ("in.0", "out.0")
        yield "bias", ("out.0",)
    elif isinstance(layer, keras.layers.EinsumDense):
        yield from _iterate_einsum_roles(layer.equation, layer.bias_axes or "")
    elif isinstance(layer, _CONVOLUTIONS):
        yield "_kernel", (*("",) * layer.rank, "in.0", "out.0")
        yield "bias", ("out.0",)
    elif isinstance(layer, keras.layers.Embedding):
        yield "_embeddings", ("rows", "out.0")
        yield "reverse_embeddings", ("in.0", "rows")


def _iterate_einsum_roles(equation: str, bias_axes: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield pairs of a weight's attribute in an `EinsumDense` layer and the roles of the weight's axes."""
    operands, _, result = equation.replace("...", "").replace(" ", "").partition("->")
    inputs, _, kernel = operands.partition(",")
    summed = [letter for letter in kernel if letter in inputs and letter not in result]
    put_out = [letter for letter in result if letter in kernel and letter not in inputs]
    names = {letter: f"in.{i}" for i, letter in enumerate(summed)}
    names |= {letter: f"out.{i}" for i, letter in enumerate(put_out)}
    yield "_kernel", tuple(names.get(letter, "") for letter in kernel)
    # A bias has all axes of the result from its first letter on, and size 1 for letters that it lacks.
    first = min((result.index(letter) for letter in bias_axes if letter in result), default=len(result))
    yield "bias", tuple(names.get(letter, "") if letter in bias_axes else "" for letter in result[first:])
