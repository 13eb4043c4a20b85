"""Tensors in layouts, by hand: what only JAX can do."""

import jax
import numpy as np
from flax import nnx

from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.dtensor import call_with_layout, fetch_layout, relayout
from layoutmap.testing.engine_contract import assert_same_bits

GRID = Mesh(None, [("x", 3), ("y", 2)])


def test_random_numbers_are_drawn_with_a_layout():
    """A random function of JAX makes its result in the layout, with the numbers of the plain call."""
    layout = Layout(["x", "y"], GRID)
    key = jax.random.key(1)
    tensor = call_with_layout(jax.random.normal, layout, key, (6, 4))

    assert layout == fetch_layout(tensor)
    assert_same_bits(np.asarray(jax.random.normal(key, (6, 4))), np.asarray(tensor))


def test_a_variable_of_flax_has_the_layout_of_its_array():
    """`fetch_layout` takes the variable itself."""
    layout = Layout(["x", "y"], GRID)

    assert layout == fetch_layout(nnx.Param(relayout(np.zeros((6, 4)), layout)))
