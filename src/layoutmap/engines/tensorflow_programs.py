"""Draw a random array piece by piece, with the bits of the whole draw.

TensorFlow's stateless random numbers come from a counter: number `i` of an array depends on the key and on the counter
plus a multiple of `i`, and on nothing else. So any run of them can be drawn alone, by moving the counter on. A draw's
program is traced once; if it is such a source with operations on single elements after it, as the usual initializers
are, then it is evaluated for a run of elements, one operation after the other, as the plain program evaluates them.

How far the counter moves is not documented; it was found out by comparing runs with the whole, for TensorFlow 2.21 on
CPU, and the tests compare them again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from layoutmap.blocks import Index, block_shape

__all__ = ["PieceProgram", "trace"]

NumpyArray = npt.NDArray[Any]

_PIECE_BYTES = 16 << 20
_GROUP = 4  # the sources make numbers in groups of up to four, so a run starts at a multiple of four

# For each source how many counts of its counter one element takes, for elements of up to 4 bytes and of 8.
_COUNTS = {
    "StatelessRandomUniformV2": (1 / 4, 1 / 2),
    "StatelessRandomNormalV2": (1 / 4, 1 / 2),
    "StatelessTruncatedNormalV2": (64, 64),
}
_ON_ELEMENTS = frozenset(
    "Abs AddV2 Cast Div DivNoNan Exp Identity Log Maximum Minimum Mul Neg Pow RealDiv Reciprocal Rsqrt Sigmoid Sqrt "
    "Square Sub Tanh".split()
)


class PieceProgram:
    """A traced draw.

    Args:
        function: Makes the whole value from the seed.
        seed: A seed, or tensors nested like it.

    Attributes:
        outputs: The tensors that the function gives, symbolic.
        why_whole: Why it cannot be drawn in pieces; empty if it can.
    """

    def __init__(self, function: Callable[[Any], Any], seed: Any):
        def of_leaves(*leaves: Any) -> Any:
            return function(tf.nest.pack_sequence_as(seed, list(leaves)))

        specs = [tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in _leaves(seed)]
        traced = tf.function(of_leaves, autograph=False).get_concrete_function(*specs)
        self._graph = traced.graph  # which its operations do not keep alive
        self._inputs = [tensor.ref() for tensor in traced.inputs]
        self._num_seeds = len(specs)
        self.outputs: list[Any] = tf.nest.flatten(traced.structured_outputs)
        self.why_whole = self._why_whole()

    def blocks(self, seed: Any, indices: Iterable[Index]) -> dict[tuple[tuple[int, int], ...], NumpyArray]:
        """The values at some indices, by the ends of their slices. Beside them there is one piece in memory."""
        (output,) = self.outputs
        shape = tuple(output.shape)
        run = _Run(self, seed)
        row = math.prod(shape[1:])
        rows_at_once = max(1, _PIECE_BYTES // max(1, row * output.dtype.size))
        by_rows: dict[tuple[int, int], dict[tuple[tuple[int, int], ...], Index]] = {}
        for index in indices:
            rows = (index[0].start, index[0].stop) if index else (0, 1)
            by_rows.setdefault(rows, {})[tuple((part.start, part.stop) for part in index)] = index
        made: dict[tuple[tuple[int, int], ...], NumpyArray] = {}
        for (first, last), wanted in by_rows.items():
            for ends, index in wanted.items():
                made[ends] = np.empty(block_shape(index), output.dtype.as_numpy_dtype)
            for start in range(first, last, rows_at_once):
                stop = min(last, start + rows_at_once)
                piece = run.elements(start * row, (stop - start) * row).reshape(stop - start, *shape[1:])
                for ends, index in wanted.items():
                    if index:
                        made[ends][start - first : stop - first] = piece[(slice(None), *index[1:])]
                    else:
                        made[ends][()] = piece[0]
        return made

    # -- reading the graph

    def is_seed(self, tensor: Any) -> bool:
        """Whether a tensor is an input that stands for the seed."""
        return tensor.ref() in self._inputs[: self._num_seeds]

    def seed_number(self, tensor: Any) -> int:
        """Which leaf of the seed a tensor stands for."""
        return self._inputs.index(tensor.ref())

    def varies(self, tensor: Any) -> bool:
        """Whether a tensor is as large as the output: a source, or made from one element by element."""
        return tensor.shape == self.outputs[0].shape and tensor.shape.num_elements() != 1

    def _why_whole(self) -> str:
        if len(self.outputs) != 1:
            return f"its program gives {len(self.outputs)} values"
        waiting, seen = [self.outputs[0]], set()
        while waiting:
            tensor = waiting.pop()
            if tensor.ref() in seen:
                continue
            seen.add(tensor.ref())
            op = tensor.op
            if self.is_seed(tensor):
                continue
            if op.type == "Placeholder":
                return "its program uses an array that it is not given"
            if not self.varies(tensor):
                if tensor.shape.num_elements() is None or tensor.shape.num_elements() > _PIECE_BYTES:
                    return f"its program uses an array of shape {tensor.shape} on the way"
                waiting += op.inputs
            elif op.type in _COUNTS:
                waiting += op.inputs[1:]
            elif op.type == "Fill":
                waiting.append(op.inputs[1])
            elif op.type == "Const":
                values = tf.make_ndarray(op.get_attr("value"))
                if values.size and not (values == values.flat[0]).all():
                    return "its constant is an array, which is whole already"
            elif op.type in _ON_ELEMENTS:
                waiting += op.inputs
            else:
                return f"TensorFlow's {op.type} needs all of it"
        return ""


class _Run:
    """One evaluation of a program: what does not depend on the position is evaluated once."""

    def __init__(self, program: PieceProgram, seed: Any):
        self._program = program
        self._seed = _leaves(seed)
        self._known: dict[Any, Any] = {}

    def elements(self, start: int, count: int) -> NumpyArray:
        """A run of elements, in row-major order."""
        aligned = start - start % _GROUP
        known: dict[Any, Any] = {}
        values = self._value(self._program.outputs[0], known, aligned, start - aligned + count)
        values = values.numpy()
        return values[start - aligned :] if values.ndim else values.reshape(1)

    def _value(self, tensor: Any, known: dict[Any, Any], start: int, count: int) -> Any:
        varies = self._program.varies(tensor)
        cache = known if varies else self._known
        if tensor.ref() not in cache:
            cache[tensor.ref()] = self._evaluate(tensor, varies, known, start, count)
        return cache[tensor.ref()]

    def _evaluate(self, tensor: Any, varies: bool, known: dict[Any, Any], start: int, count: int) -> Any:
        op = tensor.op
        if self._program.is_seed(tensor):
            return self._seed[self._program.seed_number(tensor)]
        if varies and op.type == "Const":
            value = tf.make_ndarray(op.get_attr("value"))
            return tf.fill([count], tf.constant(value.flat[0])) if value.size else tf.zeros([0], tensor.dtype)
        if op.type == "Const":
            return tf.constant(tf.make_ndarray(op.get_attr("value")))
        if varies and op.type == "Fill":
            return tf.fill([count], self._value(op.inputs[1], known, start, count))
        if varies and op.type in _COUNTS:
            key, counter, algorithm = (self._value(i, known, start, count) for i in op.inputs[1:])
            per_element = _COUNTS[op.type][tensor.dtype.size > 4]
            moved = _moved(counter, int(start * per_element))
            source = getattr(tf.raw_ops, op.type)
            return source(shape=[count], key=key, counter=moved, alg=algorithm, dtype=tensor.dtype)
        inputs = [self._value(i, known, start, count) for i in op.inputs]
        results = tf.nest.flatten(_run(op, inputs))
        return results[tensor.value_index]


def _moved(counter: Any, counts: int) -> Any:
    """A counter of 128 bits, low half first, moved on."""
    low, high = (int(half) for half in counter.numpy())
    total = (high << 64 | low) + counts
    return tf.constant(np.array([total % (1 << 64), (total >> 64) % (1 << 64)], np.uint64))


def _run(op: Any, inputs: Sequence[Any]) -> Any:
    """One operation of a graph, on values."""
    given = list(inputs)
    arguments: dict[str, Any] = {}
    inferred: set[str] = set()
    for argument in op.op_def.input_arg:
        inferred |= {argument.type_attr, argument.number_attr, argument.type_list_attr}
        if argument.number_attr:
            number = op.get_attr(argument.number_attr)
            arguments[argument.name], given = given[:number], given[number:]
        else:
            arguments[argument.name] = given.pop(0)
    for attribute in op.op_def.attr:
        if attribute.name not in inferred:
            arguments[attribute.name] = op.get_attr(attribute.name)
    return getattr(tf.raw_ops, op.type)(**arguments)


def trace(function: Callable[[Any], Any], seed: Any) -> PieceProgram:
    """Trace a draw; computes nothing.

    Args:
        function: Makes the whole value from the seed.
        seed: A seed, or tensors nested like it.
    """
    return PieceProgram(function, seed)


def _leaves(seed: Any) -> list[Any]:
    return [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(seed)]
