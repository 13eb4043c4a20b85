"""Compute a random array piece by piece, with the bits of the global array.

TensorFlow's stateless random numbers come from a counter: number `i` of an array depends on the key and on the counter
plus a multiple of `i`, and on nothing else. So any run of them can be drawn alone, by moving the counter on. An
initializer's program is traced once; if it is such a source with operations on single elements after it, as the usual
initializers are, then it is evaluated for a run of elements, one operation after the other, as the plain program
evaluates them. Only operations whose result IEEE 754 fixes are taken: TensorFlow computes `Exp` and its like in other
ways for the last few elements of a run than for the rest, so a run would differ in its last bits.

How far the counter moves is not documented; it was found out by comparing runs with global arrays, for TensorFlow 2.21
on CPU, and the tests compare them again.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from layoutmap.core.blocks import Ends, Index, NumpyArray, compute_block_shape, get_slice_ends

_PIECE_BYTES = 16 << 20
_RNG_GROUP = 4  # TensorFlow draws groups of up to four numbers, so runs start at multiples of four

# Counter increments of each random op, per element of up to 4 bytes and of 8 bytes.
_COUNTS = {
    "StatelessRandomUniformV2": (1 / 4, 1 / 2),
    "StatelessRandomNormalV2": (1 / 4, 1 / 2),
    "StatelessTruncatedNormalV2": (64, 64),
}
_SINGLE = "Abs AddV2 Cast Div DivNoNan Identity Maximum Minimum Mul Neg RealDiv Sqrt Square Sub"
_ON_ELEMENTS = frozenset(_SINGLE.split())
# Larger intermediate values are not computed in full. Seeds and counters are smaller.
_MAX_FULL_ELEMENTS = 1024
Needs = tuple[str, list[tuple[tf.Tensor, bool]]]
Known = dict[Hashable, tf.Tensor]


# No device may store a full weight, so compute random numbers in runs of at most 16 MiB (decisions/0006).
class PieceProgram:
    """Compute the result of a traced initializer in pieces, unless `why_global` gives a reason against it."""

    def __init__(self, function: Callable[[Any], object], seed: object):
        def call_with_leaves(*leaves: tf.Tensor) -> object:
            return function(tf.nest.pack_sequence_as(seed, list(leaves)))

        specs = [tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in _list_leaves(seed)]
        traced = tf.function(call_with_leaves, autograph=False).get_concrete_function(*specs)
        self._graph = traced.graph  # operations do not keep the graph alive, so store it
        self._inputs = [tensor.ref() for tensor in traced.inputs]
        self._num_seeds = len(specs)
        self.outputs: list[tf.Tensor] = tf.nest.flatten(traced.structured_outputs)
        self.why_global = self._find_global_reason()

    def compute_blocks(self, seed: object, indices: Iterable[Index]) -> dict[Ends, NumpyArray]:
        """Compute the values at some indices, by the ends of their slices. One more piece is in memory at most."""
        (output,) = self.outputs
        shape: tuple[Any, ...] = tuple(output.shape)
        run = _Evaluation(self, seed)
        row = math.prod(shape[1:])
        rows_at_once = max(1, _PIECE_BYTES // max(1, row * output.dtype.size))
        by_rows: dict[tuple[int, int], dict[Ends, Index]] = {}
        for index in indices:
            rows = (index[0].start, index[0].stop) if index else (0, 1)
            by_rows.setdefault(rows, {})[get_slice_ends(index)] = index
        made: dict[Ends, NumpyArray] = {}
        for (first, last), wanted in by_rows.items():
            for ends, index in wanted.items():
                made[ends] = np.empty(compute_block_shape(index), output.dtype.as_numpy_dtype)
            for start in range(first, last, rows_at_once):
                stop = min(last, start + rows_at_once)
                piece = run.compute_elements(start * row, (stop - start) * row).reshape(
                    stop - start, *shape[1:]
                )
                for ends, index in wanted.items():
                    if index:
                        made[ends][start - first : stop - first] = piece[(slice(None), *index[1:])]
                    else:
                        made[ends][()] = piece[0]
        return made

    # -- reading the graph

    def find_seed_number(self, tensor: tf.Tensor) -> int | None:
        """Return the number of the seed's leaf that is the source of a tensor, or None."""
        inputs = self._inputs[: self._num_seeds]
        return inputs.index(tensor.ref()) if tensor.ref() in inputs else None

    def is_made_in_runs(self, tensor: tf.Tensor) -> bool:
        """Return whether an operand is computed in runs of elements, and is not one number for all of them."""
        return tensor.shape == self.outputs[0].shape and tensor.shape.num_elements() != 1

    def _find_global_reason(self) -> str:
        if len(self.outputs) != 1:
            return f"its program returns {len(self.outputs)} values"
        (output,) = self.outputs
        waiting, seen = [(output, self.is_made_in_runs(output))], set()
        while waiting:
            tensor, in_runs = waiting.pop()
            if (tensor.ref(), in_runs) in seen:
                continue
            seen.add((tensor.ref(), in_runs))
            why, more = self._find_run_operands(tensor) if in_runs else self._find_global_operands(tensor)
            if why:
                return why
            waiting += more
        return ""

    def _find_run_operands(self, tensor: tf.Tensor) -> Needs:
        """Return the operands needed to compute a tensor in runs, or the reason why that is impossible."""
        op = tensor.op
        if op.type in _COUNTS:
            return "", [(operand, False) for operand in op.inputs[1:]]
        if op.type == "Fill":
            return "", [(op.inputs[1], False)]
        if op.type == "Const":
            values = tf.make_ndarray(op.get_attr("value"))
            same = not values.size or (values == values.flat[0]).all()
            return "" if same else "its constant is an array, which exists already", []
        if op.type == "Placeholder":
            return "its values are an array that exists already", []
        if op.type not in _ON_ELEMENTS:
            return f"TensorFlow's {op.type} needs all of it", []
        for operand in op.inputs:
            if not self.is_made_in_runs(operand) and operand.shape.num_elements() != 1:
                return f"it repeats an array of shape {operand.shape}", []
        return "", [(operand, self.is_made_in_runs(operand)) for operand in op.inputs]

    def _find_global_operands(self, tensor: tf.Tensor) -> Needs:
        """Return the operands needed to compute a tensor globally, or the reason why that is impossible."""
        op, size = tensor.op, tensor.shape.num_elements()
        if self.find_seed_number(tensor) is not None:
            return "", []
        if op.type == "Placeholder":
            return "its program uses an array that it is not given", []
        if size is None or size > _MAX_FULL_ELEMENTS:
            return f"its program needs all of an array of shape {tensor.shape} on the way", []
        if op.type != "Const" and _match_argument_names(op) is None:
            return f"TensorFlow's {op.type} cannot be run by itself", []
        return "", [(operand, False) for operand in op.inputs]


class _Evaluation:
    """Evaluate a graph for each position of the mesh. Tensors independent of it are computed once."""

    def __init__(self, program: PieceProgram, seed: object):
        self._program = program
        self._seed = _list_leaves(seed)
        self._globals: Known = {}

    def compute_elements(self, start: int, count: int) -> NumpyArray:
        """Compute a run of elements, in row-major order."""
        (output,) = self._program.outputs
        if not self._program.is_made_in_runs(output):
            return self._compute_global(output).numpy().reshape(-1)
        aligned = start - start % _RNG_GROUP
        return self._get_run(output, {}, aligned, start - aligned + count).numpy()[start - aligned :]

    def _compute_global(self, tensor: tf.Tensor) -> tf.Tensor:
        if tensor.ref() not in self._globals:
            op, number = tensor.op, self._program.find_seed_number(tensor)
            if number is not None:
                value = self._seed[number]
            elif op.type == "Const":
                value = tf.constant(tf.make_ndarray(op.get_attr("value")))
            else:
                value = tf.nest.flatten(_run_operation(op, map(self._compute_global, op.inputs)))[
                    tensor.value_index
                ]
            self._globals[tensor.ref()] = value
        return self._globals[tensor.ref()]

    def _get_run(self, tensor: tf.Tensor, known: Known, start: int, count: int) -> tf.Tensor:
        if tensor.ref() not in known:
            known[tensor.ref()] = self._compute_run(tensor, known, start, count)
        return known[tensor.ref()]

    def _compute_run(self, tensor: tf.Tensor, known: Known, start: int, count: int) -> tf.Tensor:
        op = tensor.op
        if op.type == "Const":
            value = tf.make_ndarray(op.get_attr("value"))
            return tf.fill([count], tf.constant(value.flat[0])) if value.size else tf.zeros([0], tensor.dtype)
        if op.type == "Fill":
            return tf.fill([count], self._compute_global(op.inputs[1]))
        if op.type in _COUNTS:
            key, counter, algorithm = map(self._compute_global, op.inputs[1:])
            per_element = _COUNTS[op.type][tensor.dtype.size > 4]
            moved = _advance_counter(counter, int(start * per_element))
            source = getattr(tf.raw_ops, op.type)
            return source(shape=[count], key=key, counter=moved, alg=algorithm, dtype=tensor.dtype)
        operands = [
            self._get_run(operand, known, start, count)
            if self._program.is_made_in_runs(operand)
            else tf.reshape(self._compute_global(operand), [])
            for operand in op.inputs
        ]
        return _run_operation(op, operands)


def _advance_counter(counter: tf.Tensor, counts: int) -> tf.Tensor:
    """Return a counter of 128 bits, low half first, advanced by `counts`."""
    low, high = (int(half) for half in counter.numpy())
    total = (high << 64 | low) + counts
    return tf.constant(np.array([total % (1 << 64), (total >> 64) % (1 << 64)], np.uint64))


def _run_operation(op: tf.Operation, operands: Iterable[tf.Tensor]) -> Any:
    """Run one operation of a graph on these operands."""
    given = list(operands)
    names = _match_argument_names(op)
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


def _match_argument_names(op: tf.Operation) -> dict[str, str] | None:
    """Map a raw operation's argument names to their names in the graph, or return None if it cannot run."""
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
    # The graph and the raw op name some arguments differently, such as `reduction_indices` and `axis`.
    renamed = iter([name for name in there if name not in names])
    return {name: name if name in there else next(renamed) for name in names}


def _list_leaves(seed: object) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(seed)]
