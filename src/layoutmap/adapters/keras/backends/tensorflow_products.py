"""Compute products for `compute_einsum` in two cases where DTensor's results are wrong without an error.

One operand shards one axis of the sum, and the other operand another one, over the same mesh dim: such axes are joined
to one, and so are all others that are in the same terms, since gradients are products over these. Or each operand
shards an axis that only it has, and that is summed up, over the same mesh dim: those are summed up before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import opt_einsum
import tensorflow as tf

Product = Callable[..., tf.Tensor]


def compute_einsum(plain: Product, equation: str, *values: tf.Tensor, **kwargs: Any) -> tf.Tensor:
    """Return the result of `tf.einsum`, computed by products of two operands at a time."""
    tensors = [tf.convert_to_tensor(value) for value in values]
    if not all(tensor.shape.is_fully_defined() for tensor in tensors):
        return plain(equation, *values, **kwargs)
    # opt_einsum's steps name every axis and the result, which the equation may omit.
    shapes, optimize = [tuple(tensor.shape) for tensor in tensors], kwargs.get("optimize", "greedy")
    _, path = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize=optimize)
    for places, _, step, *_ in path.contraction_list:
        inputs, _, out = step.partition("->")
        tensors.append(
            _multiply_pair(plain, inputs.split(","), out, [tensors.pop(place) for place in places])
        )
    return tensors[0]


def _multiply_pair(plain: Product, terms: Sequence[str], out: str, values: Sequence[Any]) -> tf.Tensor:
    axes = [
        pair
        for term, value in zip(terms, values, strict=True)
        for pair in zip(term, value.shape, strict=True)
    ]
    sizes = dict(axes)
    has_diagonal = any(len(set(term)) < len(term) for term in terms)
    is_broadcast = set(axes) != set(sizes.items())
    if len(terms) != 2 or has_diagonal or is_broadcast:
        return plain(f"{','.join(terms)}->{out}", *values)
    kept = [out + other for other in reversed(terms)]
    values = [_sum_unused_axes(*each) for each in zip(values, terms, kept, strict=True)]
    terms = ["".join(label for label in term if label in of) for term, of in zip(terms, kept, strict=True)]
    groups = _group_labels(terms, out)
    if all(len(group) == 1 for group in groups):
        return plain(f"{','.join(terms)}->{out}", *values)
    firsts = [group[0] for group in groups]
    joined: list[tf.Tensor] = []
    for term, value in zip(terms, values, strict=True):
        moved = tf.transpose(value, [term.index(label) for label in _order_labels(term, groups)])
        shape = [math.prod(sizes[label] for label in group) for group in groups if group[0] in term]
        joined.append(tf.reshape(moved, shape))
    made = plain(
        f"{','.join(_order_labels(term, firsts) for term in terms)}->{_order_labels(out, firsts)}", *joined
    )
    order = _order_labels(out, groups)
    return tf.transpose(
        tf.reshape(made, [sizes[label] for label in order]), [order.index(label) for label in out]
    )


def _sum_unused_axes(value: tf.Tensor, term: str, kept: str) -> tf.Tensor:
    """Return an operand summed over the axes that occur in no other term."""
    alone = [axis for axis, label in enumerate(term) if label not in kept]
    return tf.reduce_sum(value, alone) if alone else value


def _group_labels(terms: Sequence[str], out: str) -> list[str]:
    """Group labels that occur in the same terms. Batch labels, which occur in all, stay single."""
    kinds: dict[tuple[bool, ...], str] = {}
    for label in dict.fromkeys("".join(terms)):
        kind = tuple(label in term for term in (*terms, out))
        kinds[kind] = kinds.get(kind, "") + label
    return [group for kind, labels in kinds.items() for group in (labels if all(kind) else [labels])]


def _order_labels(term: str, groups: Sequence[str]) -> str:
    """Return the labels of a term in the order of the groups."""
    return "".join(group for group in groups if group[0] in term)
