"""Roles of the axes of weights in a layer's call, for Keras's own layers.

A plan is linted by it: to shard an axis that is summed over is another thing than to shard one of the output.

    Dense            kernel (in, out), bias (out)
    EinsumDense      what its equation says: `abc,cde->abde` has a kernel (in, out, out)
    Conv             kernel (.., in, out), bias (out)
    Embedding        embeddings (rows, out); the reverse of a reversible one (in, rows)

What a layer of one's own does with its weights is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import keras

from layoutmap.adapters.keras.paths import list_sublayers
from layoutmap.core.variables import Use

_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)

_HEAD_SIZES = ("head_dim", "key_value_dim")
"""Names that attention layers with all heads in one axis have for the size of a head."""


def find_uses(layers: Iterable[object]) -> dict[int, Use]:
    """Return the known roles of the axes of weights, by the id of the variable."""
    layers = list(layers)
    head_sizes = {
        id(child): size
        for layer in layers
        if (size := _find_head_size(layer))
        for child in list_sublayers(layer)
        if isinstance(child, keras.layers.Dense)  # an EinsumDense has an axis for heads
    }
    found: dict[int, Use] = {}
    for layer in layers:
        for attribute, roles in _list_roles(layer):
            variable = getattr(layer, attribute, None)
            if isinstance(variable, keras.Variable) and len(variable.shape) == len(roles):
                found.setdefault(id(variable), Use(roles, head_sizes.get(id(layer))))
    return found


def _find_head_size(layer: object) -> int | None:
    sizes = (getattr(layer, name, None) for name in _HEAD_SIZES)
    return next((size for size in sizes if isinstance(size, int)), None)


def _list_roles(layer: object) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the attributes of a layer's weights, and the roles of each weight's axes."""
    if isinstance(layer, keras.layers.Dense):
        yield "_kernel", ("in.0", "out.0")
        yield "bias", ("out.0",)
    elif isinstance(layer, keras.layers.EinsumDense):
        yield from _list_einsum_roles(layer.equation, layer.bias_axes or "")
    elif isinstance(layer, _CONVOLUTIONS):
        yield "_kernel", (*("",) * layer.rank, "in.0", "out.0")
        yield "bias", ("out.0",)
    elif isinstance(layer, keras.layers.Embedding):
        yield "_embeddings", ("rows", "out.0")
        yield "reverse_embeddings", ("in.0", "rows")


def _list_einsum_roles(equation: str, bias_axes: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    operands, _, result = equation.replace("...", "").replace(" ", "").partition("->")
    inputs, _, kernel = operands.partition(",")
    summed = [letter for letter in kernel if letter in inputs and letter not in result]
    put_out = [letter for letter in result if letter in kernel and letter not in inputs]
    names = {letter: f"in.{i}" for i, letter in enumerate(summed)}
    names |= {letter: f"out.{i}" for i, letter in enumerate(put_out)}
    yield "_kernel", tuple(names.get(letter, "") for letter in kernel)
    # A bias has all result axes from its first one on, with size 1 for missing letters.
    first = min((result.index(letter) for letter in bias_axes if letter in result), default=len(result))
    yield "bias", tuple(names.get(letter, "") if letter in bias_axes else "" for letter in result[first:])
