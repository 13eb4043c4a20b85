"""Compute a random array piece by piece. The values equal those of the global array bit for bit.

TensorFlow's stateless random numbers come from a counter: number `i` of an array depends only on the key and on the
counter plus a multiple of `i`. So any span (consecutive elements in row-major order) can be drawn alone, by advancing
the counter. An initializer's program is traced once. Usual initializers have such a source, followed by operations on
single elements. They are evaluated for a span, one operation after the other, as the unsharded program evaluates them.
Only operations with results that IEEE 754 defines are supported: TensorFlow computes `Exp` and similar operations
differently for the last few elements of an array, so a span would differ in its last bits.

The increments of the counter are not documented. They were found by comparing spans with global arrays, for TensorFlow
2.21 on CPU, and the tests compare them again.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from layoutmap.core.blocks import Ends, Index, NumpyArray, compute_block_shape, get_starts_and_stops

_PIECE_BYTES = 16 << 20
_RNG_GROUP = 4  # TensorFlow draws groups of up to four numbers, so spans start at multiples of four

# By how much each random operation increases its counter per element: for elements of up to 4 bytes, and of 8 bytes.
_COUNTS = {
    "StatelessRandomUniformV2": (1 / 4, 1 / 2),
    "StatelessRandomNormalV2": (1 / 4, 1 / 2),
    "StatelessTruncatedNormalV2": (64, 64),
}
_SINGLE = "Abs AddV2 Cast Div DivNoNan Identity Maximum Minimum Mul Neg RealDiv Sqrt Square Sub"
_ON_ELEMENTS = frozenset(_SINGLE.split())
# Intermediate values with more elements are not computed in full, to save memory. Seeds and counters have fewer.
_MAX_FULL_ELEMENTS = 1024
# The reason why a tensor cannot be computed in pieces, or "", and pairs of an operand that the computation needs and
# whether the operand is computed in spans.
ReasonAndOperands = tuple[str, list[tuple[tf.Tensor, bool]]]
TensorCache = dict[Hashable, tf.Tensor]


# No device may store a full weight, so compute random numbers in spans of at most 16 MiB (decisions/0006).
class PiecewiseInitializer:
    """Compute the result of a traced initializer in pieces, unless `why_global` gives a reason against it."""

    def __init__(self, function: Callable[[Any], object], seed: object):
        def call_with_leaves(*leaves: tf.Tensor) -> object:
            return function(tf.nest.pack_sequence_as(seed, list(leaves)))

        specs = [tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in _convert_seed_to_tensors(seed)]
        traced = tf.function(call_with_leaves, autograph=False).get_concrete_function(*specs)
        self._graph = traced.graph  # keep the graph alive, because operations do not
        self._inputs = [tensor.ref() for tensor in traced.inputs]
        self._num_seeds = len(specs)
        self.outputs: list[tf.Tensor] = tf.nest.flatten(traced.structured_outputs)
        self.why_global = self._explain_why_not_piecewise()

    def compute_blocks(self, seed: object, indices: Iterable[Index]) -> dict[Ends, NumpyArray]:
        """Compute values piece by piece. Return a dict with the block at each of `indices`.

        The keys are the starts and stops of the slices of an index.
        """
        (output,) = self.outputs
        shape: tuple[Any, ...] = tuple(output.shape)
        evaluation = _SeedEvaluation(self, seed)
        row = math.prod(shape[1:])
        rows_at_once = max(1, _PIECE_BYTES // max(1, row * output.dtype.size))
        by_rows: dict[tuple[int, int], dict[Ends, Index]] = {}
        for index in indices:
            rows = (index[0].start, index[0].stop) if index else (0, 1)
            by_rows.setdefault(rows, {})[get_starts_and_stops(index)] = index
        made: dict[Ends, NumpyArray] = {}
        for (first, last), wanted in by_rows.items():
            for ends, index in wanted.items():
                made[ends] = np.empty(compute_block_shape(index), output.dtype.as_numpy_dtype)
            for start in range(first, last, rows_at_once):
                stop = min(last, start + rows_at_once)
                piece = evaluation.compute_elements(start * row, (stop - start) * row).reshape(
                    stop - start, *shape[1:]
                )
                for ends, index in wanted.items():
                    if index:
                        made[ends][start - first : stop - first] = piece[(slice(None), *index[1:])]
                    else:
                        made[ends][()] = piece[0]
        return made

    # -- reading the graph

    def find_seed_leaf_index(self, tensor: tf.Tensor) -> int | None:
        """Return the index of the seed's leaf that a graph input receives, or None if a tensor is no such input."""
        inputs = self._inputs[: self._num_seeds]
        return inputs.index(tensor.ref()) if tensor.ref() in inputs else None

    def is_computed_in_spans(self, tensor: tf.Tensor) -> bool:
        """Return whether a tensor has the output's shape and several elements, so that spans of it are computed."""
        return tensor.shape == self.outputs[0].shape and tensor.shape.num_elements() != 1

    def _explain_why_not_piecewise(self) -> str:
        """Return why the output cannot be computed in pieces, or an empty text if it can."""
        if len(self.outputs) != 1:
            return f"its program returns {len(self.outputs)} values"
        (output,) = self.outputs
        waiting, seen = [(output, self.is_computed_in_spans(output))], set()
        while waiting:
            tensor, in_spans = waiting.pop()
            if (tensor.ref(), in_spans) in seen:
                continue
            seen.add((tensor.ref(), in_spans))
            why, more = self._find_span_operands(tensor) if in_spans else self._find_full_operands(tensor)
            if why:
                return why
            waiting += more
        return ""

    def _find_span_operands(self, tensor: tf.Tensor) -> ReasonAndOperands:
        """Return a pair: why a tensor cannot be computed in spans, or "", and the operands of its computation."""
        op = tensor.op
        if op.type in _COUNTS:
            return "", [(operand, False) for operand in op.inputs[1:]]
        if op.type == "Fill":
            return "", [(op.inputs[1], False)]
        if op.type == "Const":
            values = tf.make_ndarray(op.get_attr("value"))
            same = not values.size or (values == values.flat[0]).all()
            return "" if same else "its constant is an array, which is in memory in full", []
        if op.type == "Placeholder":
            return "its values are an array, which is in memory in full", []
        if op.type not in _ON_ELEMENTS:
            return f"TensorFlow's {op.type} needs the whole tensor", []
        for operand in op.inputs:
            if not self.is_computed_in_spans(operand) and operand.shape.num_elements() != 1:
                return f"it repeats an array of shape {operand.shape}", []
        return "", [(operand, self.is_computed_in_spans(operand)) for operand in op.inputs]

    def _find_full_operands(self, tensor: tf.Tensor) -> ReasonAndOperands:
        """Return a pair: why a tensor cannot be computed in full, or "", and the operands of its computation."""
        op, size = tensor.op, tensor.shape.num_elements()
        if self.find_seed_leaf_index(tensor) is not None:
            return "", []
        if op.type == "Placeholder":
            return "its program uses an array that is not part of its seed", []
        if size is None or size > _MAX_FULL_ELEMENTS:
            return f"its program computes an intermediate array of shape {tensor.shape} in full", []
        if op.type != "Const" and _map_argument_names(op) is None:
            return f"TensorFlow's {op.type} cannot be executed alone", []
        return "", [(operand, False) for operand in op.inputs]


class _SeedEvaluation:
    """Evaluate a graph for one seed, in spans of consecutive elements. Tensors needed in full are computed once."""

    def __init__(self, program: PiecewiseInitializer, seed: object):
        self._program = program
        self._seed = _convert_seed_to_tensors(seed)
        self._full_tensors: TensorCache = {}

    def compute_elements(self, start: int, count: int) -> NumpyArray:
        """Return `count` consecutive elements of the output from `start` on, in row-major order."""
        (output,) = self._program.outputs
        if not self._program.is_computed_in_spans(output):
            return self._compute_full_tensor(output).numpy().reshape(-1)
        aligned = start - start % _RNG_GROUP
        span = self._compute_cached_span(output, {}, aligned, start - aligned + count)
        return span.numpy()[start - aligned :]

    def _compute_full_tensor(self, tensor: tf.Tensor) -> tf.Tensor:
        if tensor.ref() not in self._full_tensors:
            op, number = tensor.op, self._program.find_seed_leaf_index(tensor)
            if number is not None:
                value = self._seed[number]
            elif op.type == "Const":
                value = tf.constant(tf.make_ndarray(op.get_attr("value")))
            else:
                value = tf.nest.flatten(_execute_operation(op, map(self._compute_full_tensor, op.inputs)))[
                    tensor.value_index
                ]
            self._full_tensors[tensor.ref()] = value
        return self._full_tensors[tensor.ref()]

    def _compute_cached_span(
        self, tensor: tf.Tensor, cache: TensorCache, start: int, count: int
    ) -> tf.Tensor:
        if tensor.ref() not in cache:
            cache[tensor.ref()] = self._compute_span(tensor, cache, start, count)
        return cache[tensor.ref()]

    def _compute_span(self, tensor: tf.Tensor, cache: TensorCache, start: int, count: int) -> tf.Tensor:
        op = tensor.op
        if op.type == "Const":
            value = tf.make_ndarray(op.get_attr("value"))
            return tf.fill([count], tf.constant(value.flat[0])) if value.size else tf.zeros([0], tensor.dtype)
        if op.type == "Fill":
            return tf.fill([count], self._compute_full_tensor(op.inputs[1]))
        if op.type in _COUNTS:
            key, counter, algorithm = map(self._compute_full_tensor, op.inputs[1:])
            per_element = _COUNTS[op.type][tensor.dtype.size > 4]
            moved = _advance_counter(counter, int(start * per_element))
            source = getattr(tf.raw_ops, op.type)
            return source(shape=[count], key=key, counter=moved, alg=algorithm, dtype=tensor.dtype)
        operands = [
            self._compute_cached_span(operand, cache, start, count)
            if self._program.is_computed_in_spans(operand)
            else tf.reshape(self._compute_full_tensor(operand), [])
            for operand in op.inputs
        ]
        return _execute_operation(op, operands)


def _advance_counter(counter: tf.Tensor, increment: int) -> tf.Tensor:
    """Return a counter of 128 bits, low half first, that is advanced by `increment`."""
    low, high = (int(half) for half in counter.numpy())
    total = (high << 64 | low) + increment
    return tf.constant(np.array([total % (1 << 64), (total >> 64) % (1 << 64)], np.uint64))


def _execute_operation(op: tf.Operation, operands: Iterable[tf.Tensor]) -> Any:
    """Run one operation of a graph on these operands."""
    given = list(operands)
    names = _map_argument_names(op)
    assert names is not None
    arguments: dict[str, Any] = {}
    for argument in op.op_def.input_arg:
        name = names.pop(argument.name)
        if argument.number_attr:
            number = op.get_attr(argument.number_attr)
            arguments[name], given = given[:number], given[number:]
        else:
            arguments[name] = given.pop(0)
    arguments |= {name: op.get_attr(attribute) for attribute, name in names.items()}
    return getattr(tf.raw_ops, op.type)(**arguments)


def _map_argument_names(op: tf.Operation) -> dict[str, str] | None:
    """Map argument names of an operation to those in `tf.raw_ops`. Return None if the operation cannot run alone."""
    raw, inferred = getattr(tf.raw_ops, op.type, None), set()
    for argument in op.op_def.input_arg:
        inferred |= {argument.type_attr, argument.number_attr, argument.type_list_attr}
    attributes = [attribute for attribute in op.op_def.attr if attribute.name not in inferred]
    has_list = any(argument.type_list_attr for argument in op.op_def.input_arg)
    calls_function = any("func" in attribute.type for attribute in attributes)
    if raw is None or op.op_def.is_stateful or has_list or calls_function:
        return None
    names = [each.name for each in (*op.op_def.input_arg, *attributes)]
    there = [name for name in inspect.signature(raw).parameters if name != "name"]
    # The raw operation and the graph name some arguments differently, such as `reduction_indices` and `axis`.
    renamed = iter([name for name in there if name not in names])
    return {name: name if name in there else next(renamed) for name in names}


def _convert_seed_to_tensors(seed: object) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(seed)]
