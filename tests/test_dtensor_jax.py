"""Tensors in layouts, by hand: what only JAX can do."""

import jax
import jax.numpy as jnp
import numpy as np

from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.dtensor import call_with_layout, fetch_layout, relayout
from layoutmap.testing.engine_contract import assert_same_bits, random_values

GRID = Mesh(None, [("x", 3), ("y", 2)])


def test_an_axis_may_be_sharded_over_several_dims():
    """A tensor moves to and from a layout that shards one axis over two dims with all its bits."""
    values = random_values((6, 8), "float32", seed=2)
    layout = Layout([("y", "x"), None], GRID)
    moved = relayout(relayout(values, Layout(["x", "y"], GRID), engine="jax"), layout)

    assert layout == fetch_layout(moved)
    assert_same_bits(values, np.asarray(moved))


def test_random_numbers_are_drawn_with_a_layout():
    """A random function of JAX makes its result in the layout, with the numbers of the plain call."""
    layout = Layout(["x", "y"], GRID)
    key = jax.random.key(1)
    tensor = call_with_layout(jax.random.normal, layout, key, (6, 4))

    assert layout == fetch_layout(tensor)
    assert_same_bits(np.asarray(jax.random.normal(key, (6, 4))), np.asarray(tensor))


def test_a_product_of_tensors_in_layouts_is_called_with_a_layout():
    """A function of tensors in layouts that adds up elements gives the plain result."""
    a = relayout(random_values((6, 5), "int8", 3).astype(np.float32), Layout(["x", None], GRID), engine="jax")
    b = relayout(random_values((5, 4), "int8", 4).astype(np.float32), Layout([None, "y"], GRID), engine="jax")
    layout = Layout(["x", "y"], GRID)
    tensor = call_with_layout(jnp.matmul, layout, a, b)

    assert layout == fetch_layout(tensor)
    assert_same_bits(np.asarray(a) @ np.asarray(b), np.asarray(tensor))
