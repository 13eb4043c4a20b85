"""Find variables that Keras derives from others: LoRA factors, quantized kernels, scales, and reduced slots.

Such a variable has its parent's layout, axis by axis. This module knows the meaning of each axis for Keras's layers:

    lora_kernel_a, _b           the kernel's axes but the last, then the rank; the rank, then the last
    kernel of int4, gptq, awq   the axes that are summed over as one, and the others as one, two values in a byte
    kernel_scale, kernel_zero   the axes that are not summed over; in groups, also the others
    g_idx, awq_scales           the axes that are summed over
    those of float8             none: they are single numbers and histories of them
    embeddings                  the same, with the rows of the table in the place of the axes that are not summed over

Variables that custom layers derive are unknown here, so they need rules like any weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from layoutmap.core.uneven import Axes

_FLOAT8 = (
    "inputs_scale",
    "inputs_amax_history",
    "kernel_scale",
    "kernel_amax_history",
    "outputs_grad_scale",
    "outputs_grad_amax_history",
)


@dataclass(frozen=True, slots=True)
class WeightDerivation:
    """The parent weight of a derived variable, and how its axes correspond to the parent's."""

    parent: str  # name of the parent in the same layer; a variable that replaced its parent has the same name
    shape: tuple[int, ...]  # shape of the parent
    axes: Axes  # for each axis, the parent axes that are joined in it


# Rules rarely match derived variables, so these inherit from their parent axis by axis (decisions/0020).
def find_derivations_by_variable_id(layers: Iterable[Any]) -> dict[int, WeightDerivation]:
    """Return a dict from the id of each derived variable that is known in some layers to its derivation."""
    found: dict[int, WeightDerivation] = {}
    for layer in layers:
        if not layer.built:
            continue
        for kind, derived in _DERIVE_FUNCTIONS:
            if isinstance(layer, kind):
                for variable, derivation in derived(layer):
                    if variable is not None:
                        found.setdefault(id(variable), derivation)
    return found


@dataclass(frozen=True, slots=True)
class ReducedSlot:
    """An optimizer slot with fewer axes than its weight."""

    slot: keras.Variable
    weight: keras.Variable
    kind: str  # name of the slot in the optimizer, because its Keras name is that of the weight
    axes: Axes  # for each axis, the weight axes that are joined in it


def find_reduced_slots(optimizer: object) -> Iterator[ReducedSlot]:
    """Yield the slots of an optimizer that have fewer axes than their weight."""
    inner = getattr(optimizer, "inner_optimizer", None) or optimizer
    if not isinstance(inner, keras.optimizers.Adafactor) or not inner.built:
        return
    for weight, rows, columns in zip(inner._trainable_variables, inner._r, inner._c, strict=True):
        rank = len(weight.shape)
        if rank < 2 or rows is None:
            continue
        kept = tuple((axis,) for axis in range(rank - 2))
        yield ReducedSlot(rows, weight, "r", (*kept, (rank - 2,)))
        yield ReducedSlot(columns, weight, "c", (*kept, (rank - 1,)))


# Pairs of a variable, which is None if missing, and its derivation.
_Derived = Iterator[tuple[keras.Variable | None, WeightDerivation]]


def _get_own_variable(layer: object, name: str) -> Any:
    """Return the variable in a layer's attribute, or None if it is missing, a property, or another value."""
    value = vars(layer).get(name)
    return value if isinstance(value, keras.Variable) else None


def _iterate_lora_factors(layer: object, name: str, shape: tuple[int, ...]) -> _Derived:
    """Yield the LoRA factors of a weight with their derivations."""
    last = len(shape) - 1
    rest = tuple((axis,) for axis in range(last))
    yield _get_own_variable(layer, f"lora_{name}_a"), WeightDerivation(name, shape, (*rest, ()))
    yield _get_own_variable(layer, f"lora_{name}_b"), WeightDerivation(name, shape, ((), (last,)))


def _iterate_quantized_variables(
    layer: keras.Layer, name: str, shape: tuple[int, ...], table_axes: Axes, kept_axes: tuple[int, ...]
) -> _Derived:
    """Yield pairs of a variable and its derivation, for the quantized form of a weight and the form's scales."""
    mode = getattr(layer, "quantization_mode", None)
    if mode is None:
        return
    if mode == "int4":
        for attribute in (f"_{name}", name):  # try both, because Keras versions differ
            yield _get_own_variable(layer, attribute), WeightDerivation(name, shape, table_axes)
    yield _get_own_variable(layer, f"quantized_{name}"), WeightDerivation(name, shape, table_axes)
    for scale in (f"{name}_scale", f"{name}_zero"):
        variable = _get_own_variable(layer, scale)
        rank = 0 if variable is None else len(variable.shape)
        yield variable, WeightDerivation(name, shape, table_axes if rank == 2 else (kept_axes,) * rank)
    (summed,) = (of for of in table_axes if of != kept_axes)
    for row in ("g_idx", "awq_scales"):
        yield _get_own_variable(layer, row), WeightDerivation(name, shape, (summed,))


def _iterate_float8_scales(layer: keras.Layer, shape: tuple[int, ...]) -> _Derived:
    """Yield the float8 scales of a kernel with their derivations."""
    if getattr(layer, "quantization_mode", None) == "float8":
        for name in _FLOAT8:
            variable = _get_own_variable(layer, name)
            yield (
                variable,
                WeightDerivation("kernel", shape, ((),) * (0 if variable is None else len(variable.shape))),
            )


def _iterate_derived_variables_of_dense(layer: keras.Layer) -> _Derived:
    """Yield the variables that a `Dense` layer derives from its kernel, with their derivations."""
    table, kernel = _get_own_variable(layer, "quantized_kernel"), _get_own_variable(layer, "_kernel")
    if table is None and kernel is None:  # the layer is being quantized, so its kernel is missing
        return
    shape = (kernel.shape[0] if table is None else table.shape[1], layer.units)
    yield from _iterate_lora_factors(layer, "kernel", shape)
    yield from _iterate_float8_scales(layer, shape)
    as_table: Axes = ((1,), (0,)) if table is not None else ((0,), (1,))
    yield from _iterate_quantized_variables(layer, "kernel", shape, as_table, (1,))


def _iterate_derived_variables_of_einsum_dense(layer: keras.Layer) -> _Derived:
    """Yield the variables that an `EinsumDense` layer derives from its kernel, with their derivations."""
    kernel = _get_own_variable(layer, "_kernel")
    shape = getattr(layer, "original_kernel_shape", None) or (None if kernel is None else kernel.shape)
    if shape is None:
        return
    shape = tuple(shape)
    yield from _iterate_lora_factors(layer, "kernel", shape)
    yield from _iterate_float8_scales(layer, shape)
    mode = getattr(layer, "quantization_mode", None)
    if mode in ("gptq", "awq"):
        # Like Keras, take a kernel of rank 3 to have two output axes if its first axis is the largest, else one.
        split = 1 if len(shape) == 2 or shape.index(max(shape)) == 0 else 2
        rows, columns = tuple(range(split)), tuple(range(split, len(shape)))
        yield from _iterate_quantized_variables(layer, "kernel", shape, (columns, rows), columns)
    elif mode in ("int8", "int4"):
        # Give each kernel axis a different prime size, so that the sizes of the scale tell which axes it has.
        sizes = _PRIMES[: len(shape)]
        axes = tuple((sizes.index(n),) if n in sizes else () for n in layer._get_kernel_scale_shape(sizes))
        columns = tuple(sorted(axis for of in axes for axis in of))
        rows = tuple(axis for axis in range(len(shape)) if axis not in columns)
        if mode == "int8":
            yield _get_own_variable(layer, "kernel_scale"), WeightDerivation("kernel", shape, axes)
        else:
            yield from _iterate_quantized_variables(layer, "kernel", shape, (rows, columns), columns)


_PRIMES = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049)


def _iterate_derived_variables_of_convolution(layer: keras.Layer) -> _Derived:
    """Yield the LoRA factors of a convolution's kernel, with their derivations."""
    kernel = _get_own_variable(layer, "_kernel")
    if kernel is not None:
        yield from _iterate_lora_factors(layer, "kernel", tuple(kernel.shape))


def _iterate_derived_variables_of_embedding(layer: keras.Layer) -> _Derived:
    """Yield the variables that an `Embedding` derives from its tables, with their derivations."""
    shape = (layer.input_dim, layer.output_dim)
    yield from _iterate_lora_factors(layer, "embeddings", shape)
    yield from _iterate_quantized_variables(layer, "embeddings", shape, ((0,), (1,)), (0,))
    if isinstance(layer, keras.layers.ReversibleEmbedding) and not layer.tie_weights:
        yield from _iterate_quantized_variables(layer, "reverse_embeddings", shape[::-1], ((0,), (1,)), (1,))


_DERIVE_FUNCTIONS: Sequence[tuple[Any, Callable[..., _Derived]]] = (
    (keras.layers.Dense, _iterate_derived_variables_of_dense),
    (keras.layers.EinsumDense, _iterate_derived_variables_of_einsum_dense),
    (keras.layers.Embedding, _iterate_derived_variables_of_embedding),
    (
        (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D),
        _iterate_derived_variables_of_convolution,
    ),
)
