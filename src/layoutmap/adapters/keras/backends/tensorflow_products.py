"""Compute products for `compute_einsum` in two cases where DTensor's results are wrong without an error.

First, the operands shard different axes of the sum over the same mesh dim. Such axes are joined to one axis, and so are
all other axes that occur in the same terms, because gradients are products over these. Second, each operand shards an
axis that occurs only in it, and is summed, over the same mesh dim. Such axes are summed before the product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import opt_einsum
import tensorflow as tf

Product = Callable[..., tf.Tensor]


def compute_einsum(einsum: Product, equation: str, *values: tf.Tensor, **kwargs: Any) -> tf.Tensor:
    """Return the result of `tf.einsum`, computed by products of two operands at a time."""
    tensors = [tf.convert_to_tensor(value) for value in values]
    if not all(tensor.shape.is_fully_defined() for tensor in tensors):
        return einsum(equation, *values, **kwargs)
    # The equation may omit axes and the result, so use opt_einsum's steps, which name all of them.
    shapes, optimize = [tuple(tensor.shape) for tensor in tensors], kwargs.get("optimize", "greedy")
    _, path = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize=optimize)
    for positions, _, step, *_ in path.contraction_list:
        inputs, _, result_term = step.partition("->")
        tensors.append(
            _compute_einsum_of_pair(
                einsum, inputs.split(","), result_term, [tensors.pop(position) for position in positions]
            )
        )
    return tensors[0]


def _compute_einsum_of_pair(
    einsum: Product, terms: Sequence[str], result_term: str, values: Sequence[Any]
) -> tf.Tensor:
    """Return the einsum of one or two operands. Axes that occur in the same terms are merged for the product."""
    axes = [
        pair
        for term, value in zip(terms, values, strict=True)
        for pair in zip(term, value.shape, strict=True)
    ]
    sizes = dict(axes)
    has_diagonal = any(len(set(term)) < len(term) for term in terms)
    is_broadcast = set(axes) != set(sizes.items())
    if len(terms) != 2 or has_diagonal or is_broadcast:
        return einsum(f"{','.join(terms)}->{result_term}", *values)
    kept = [result_term + other for other in reversed(terms)]
    values = [_sum_axes_of_one_term(*each) for each in zip(values, terms, kept, strict=True)]
    terms = ["".join(label for label in term if label in of) for term, of in zip(terms, kept, strict=True)]
    groups = _group_labels_by_terms(terms, result_term)
    if all(len(group) == 1 for group in groups):
        return einsum(f"{','.join(terms)}->{result_term}", *values)
    firsts = [group[0] for group in groups]
    joined: list[tf.Tensor] = []
    for term, value in zip(terms, values, strict=True):
        moved = tf.transpose(value, [term.index(label) for label in _sort_labels_by_group(term, groups)])
        shape = [math.prod(sizes[label] for label in group) for group in groups if group[0] in term]
        joined.append(tf.reshape(moved, shape))
    *operands, result = (_sort_labels_by_group(term, firsts) for term in (*terms, result_term))
    made = einsum(f"{','.join(operands)}->{result}", *joined)
    order = _sort_labels_by_group(result_term, groups)
    return tf.transpose(
        tf.reshape(made, [sizes[label] for label in order]), [order.index(label) for label in result_term]
    )


def _sum_axes_of_one_term(value: tf.Tensor, term: str, labels_in_other_terms: str) -> tf.Tensor:
    """Return an operand summed over the axes that occur neither in the other operand nor in the result."""
    alone = [axis for axis, label in enumerate(term) if label not in labels_in_other_terms]
    return tf.reduce_sum(value, alone) if alone else value


def _group_labels_by_terms(terms: Sequence[str], result_term: str) -> list[str]:
    """Return groups of the axis labels that occur in the same terms. Labels that occur in all terms stay single."""
    kinds: dict[tuple[bool, ...], str] = {}
    for label in dict.fromkeys("".join(terms)):
        kind = tuple(label in term for term in (*terms, result_term))
        kinds[kind] = kinds.get(kind, "") + label
    return [group for kind, labels in kinds.items() for group in (labels if all(kind) else [labels])]


def _sort_labels_by_group(term: str, groups: Sequence[str]) -> str:
    """Return the axis labels of a term in the order of the groups."""
    return "".join(group for group in groups if group[0] in term)
