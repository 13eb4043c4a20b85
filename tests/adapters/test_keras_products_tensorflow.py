"""Products of `einsum` on TensorFlow, in layouts that nobody chose, are those of one device, with their gradients."""

import random

import numpy as np
import pytest
import tensorflow as tf

from layoutmap import Layout, Mesh, dtensor
from layoutmap.adapters.keras.backends.tensorflow_functions import replace_unsupported_functions_temporarily

PROCESSES = ("tensorflow",)
MESH = Mesh(None, "x=2,y=4")
LETTERS = "abcdef"
PARTS, OF_PART = 4, 30


def product_of(equation, values, layouts):
    """What a compiled product and the gradients of its squares are on the mesh; `None` where DTensor refuses it."""

    @tf.function
    def computed(*operands):
        with tf.GradientTape() as tape:
            tape.watch(operands)
            made = tf.einsum(equation, *operands)
            total = tf.reduce_sum(made * made)
        return made, *tape.gradient(total, operands)

    expected = [each.numpy() for each in computed(*map(tf.constant, values))]
    placed = [dtensor.relayout(value, layout) for value, layout in zip(values, layouts, strict=True)]
    everywhere = lambda value: dtensor.relayout(value, Layout.replicated(MESH, value.shape.rank))  # noqa: E731
    with dtensor.run_on(MESH, engine="tensorflow"), replace_unsupported_functions_temporarily(everywhere):
        try:
            found = tf.function(computed.python_function)(*placed)
        except tf.errors.UnknownError:  # a step of Keras is compiled again then, with more gathered
            return None
    return [
        (np.asarray(dtensor.relayout(each, Layout.replicated(MESH, each.shape.rank)).numpy()), one)
        for each, one in zip(found, expected, strict=True)
    ]


def is_right(found):
    """Whether numbers are those of one device; they are whole, so that no order of sums rounds them."""
    return all(np.array_equal(each, one) for each, one in found)


def drawn(seed):
    """An equation, operands, and a layout for each."""
    choose = random.Random(seed)
    sizes = {label: choose.choice([2, 4, 8]) for label in LETTERS}
    terms = [
        "".join(choose.sample(LETTERS, choose.choice([1, 2, 3, 3, 4])))
        for _ in range(choose.choice([2, 2, 2, 3]))
    ]
    out = [label for label in LETTERS if label in "".join(terms) and choose.random() < 0.5]
    rows = [choose.choice([2, 4]) for _ in range(choose.choice([0, 0, 1, 2]))]
    has_rows = [bool(rows) and (not number or choose.random() < 0.4) for number in range(len(terms))]
    equation = ",".join("..." * has + term for has, term in zip(has_rows, terms, strict=True))
    # TensorFlow does not know the axes of the result by itself with an ellipsis
    if rows or choose.random() < 0.75:
        equation += f"->{'...' * bool(rows)}{''.join(choose.sample(out, len(out)))}"
    shapes = [
        rows * has + [sizes[label] for label in term] for has, term in zip(has_rows, terms, strict=True)
    ]
    values = [np.random.default_rng(seed).integers(-1, 2, shape).astype("float32") for shape in shapes]
    layouts = []
    for shape in shapes:
        dims = choose.sample(["x", "y"], 2)
        layouts.append(
            Layout(
                [dims.pop() if dims and size % 4 == 0 and choose.random() < 0.6 else None for size in shape],
                MESH,
            )
        )
    return equation, values, layouts


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("equation", "specs"),
    [
        ("ab,abc->c", [("x", None), (None, "x", None)]),
        ("...ab,abc->...c", [(None, "x", None), (None, "x", None)]),
        ("abc,abd", [(None, "x", None), ("x", None, None)]),
        ("abc,bc,cd->ad", [(None, "x", None), (None, "x"), ("x", None)]),
        ("ced,cfbe->e", [(None, None, "x"), (None, "x", "y", None)]),
    ],
    ids=["two axes of the sum", "and rows", "no result named", "of three", "axes of one operand"],
)
def test_products_that_dtensor_computes_wrongly(equation, specs):
    """Where operands shard other axes of the sum over one dim, the product is right, however it is written."""
    terms = equation.replace("...", "r").partition("->")[0].split(",")
    random_numbers = np.random.default_rng(0)
    values = [random_numbers.integers(-1, 2, (8,) * len(term)).astype("float32") for term in terms]
    found = product_of(equation, values, [Layout(each, MESH) for each in specs])

    assert found is not None
    assert is_right(found)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_drawn_products(part):
    """Each product is right, or DTensor refuses it, which it does to less than half of them."""
    seeds = range(part * OF_PART, (part + 1) * OF_PART)
    found = {seed: product_of(*drawn(seed)) for seed in seeds}
    computed = {seed: each for seed, each in found.items() if each is not None}

    assert [] == [(seed, drawn(seed)[0]) for seed, each in computed.items() if not is_right(each)]
    assert len(computed) > OF_PART / 2
