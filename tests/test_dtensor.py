"""Tensors in layouts, by hand; the examples are those of TensorFlow's documents."""

import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from layoutmap.dtensor import call_with_layout, copy_to_mesh, fetch_layout, pack, relayout, unpack
from layoutmap.errors import EngineError, LayoutError, MeshError
from layoutmap.layout import Layout
from layoutmap.mesh import Mesh
from layoutmap.testing.engine_contract import all_specs, assert_same_bits, random_values

GRID = Mesh(None, [("x", 3), ("y", 2)])


def whole(tensor):
    return np.asarray(tensor)


def test_the_documents_example_of_unpack():
    """Six numbers in a row, cut over a grid of 3 x 2, are three pairs, each of them twice."""
    tensor = relayout(np.arange(6), Layout(["x"], GRID), engine="jax")

    assert [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]] == [part.tolist() for part in unpack(tensor)]


def test_the_documents_example_of_pack():
    """Six numbers, one on each device of a grid of 3 x 2, are a table of 3 x 2."""
    parts = [np.array([[i]], np.float32) for i in range(6)]
    tensor = pack(parts, Layout(["x", "y"], GRID), engine="jax")

    assert [[0, 1], [2, 3], [4, 5]] == whole(tensor).tolist()


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_pack_undoes_unpack(data):
    """A tensor taken apart has one component for each device, and put together again is the same tensor."""
    mesh = data.draw(
        st.sampled_from([GRID, Mesh(None, "x=2,y=4"), Mesh(None, "x=1"), Mesh(None, "x=2,y=2,z=2")])
    )
    rank = data.draw(st.integers(0, 3))
    layout = Layout(data.draw(st.sampled_from(all_specs(mesh, rank))), mesh)
    times = data.draw(st.tuples(*[st.integers(0, 2)] * rank))
    shape = tuple(n * count for n, count in zip(times, layout.shard_counts, strict=True))
    values = random_values(shape, data.draw(st.sampled_from(["float32", "bfloat16", "bool"])), seed=1)
    tensor = relayout(values, layout, engine="jax")
    parts = unpack(tensor)
    again = pack(parts, layout)

    assert mesh.size == len(parts)
    assert {layout.shard_shape(shape)} == {part.shape for part in parts}
    assert layout == fetch_layout(tensor) == fetch_layout(again)
    assert_same_bits(values, whole(again))
    for i, part in enumerate(parts):
        assert_same_bits(values[layout.shard_slices(shape, i)], part)


@pytest.mark.parametrize("kind", [np.float32, jnp.float32, float])
def test_components_may_be_arrays_of_numpy_or_the_framework_or_numbers(kind):
    """Components of numpy, of the framework, and plain numbers make the same tensor."""
    tensor = pack([kind(3)] * 6, Layout([], GRID), engine="jax")

    assert 3.0 == float(tensor)
    assert jnp.float32 == tensor.dtype


@pytest.mark.parametrize(
    ("words", "parts", "specs"),
    [
        ("5 components for 6 devices", [np.zeros(2)] * 5, ["x"]),
        ("0 components for 6 devices", [], ["x"]),
        ("component 1 differs", [np.zeros(2)] + [np.zeros(3)] * 5, ["x"]),
        ("component 5 differs", [np.zeros(2)] * 5 + [np.zeros((2, 1))], ["x"]),
        ("component 2 differs", [np.zeros(2)] * 2 + [np.zeros(2, np.int8)] * 4, ["x"]),
        ("rank 1 for a tensor of rank 2", [np.zeros((2, 2))] * 6, ["x"]),
        ("components 0 and 1 differ", [np.full(2, i) for i in range(6)], ["x"]),
        ("components 0 and 5 differ", [np.zeros(())] * 5 + [np.ones(())], []),
    ],
)
def test_components_that_do_not_fit_are_refused(words, parts, specs):
    """A wrong number of components, or components that differ in what they may not, are refused, saying which."""
    with pytest.raises(LayoutError, match=words):
        pack(parts, Layout(specs, GRID), engine="jax")


def test_replicas_are_compared_by_their_bits():
    """Equal replicas may hold NaN; zeros of either sign are not equal."""
    layout = Layout([], GRID)

    assert math.isnan(float(pack([np.float32("nan")] * 6, layout, engine="jax")))
    with pytest.raises(LayoutError, match="components 0 and 1 differ"):
        pack([np.float32(0)] + [np.float32(-0.0)] * 5, layout, engine="jax")


def test_a_mesh_that_is_too_large_is_refused():
    """A layout on more devices than there are is refused."""
    with pytest.raises(MeshError, match="16 devices"):
        pack([np.zeros(1)] * 16, Layout(["x"], Mesh(None, "x=16")), engine="jax")


def test_what_has_no_layout_is_refused():
    """A plain array has no layout to fetch, and no components to unpack."""
    for tensor in (np.zeros(3), jnp.zeros(3), None, 3):
        with pytest.raises(LayoutError, match="has no layout"):
            fetch_layout(tensor)
        with pytest.raises(LayoutError, match="has no layout"):
            unpack(tensor)


def test_relayout_has_the_layout_asked_for():
    """A tensor relaid out has the layout asked for and its old values, on another mesh too."""
    values = random_values((6, 8), "float32", seed=2)
    tensor = relayout(values, Layout(["x", "y"], GRID), engine="jax")
    for layout in (Layout([("y", "x"), None], GRID), Layout(["b", "a"], Mesh(None, "a=4,b=2"))):
        moved = relayout(tensor, layout)

        assert layout == fetch_layout(moved)
        assert_same_bits(values, whole(moved))


def test_copy_to_mesh_takes_plain_tensors_only():
    """A plain tensor comes to lie on the mesh; one that lies on a mesh is refused."""
    layout = Layout(["x"], GRID)
    tensor = copy_to_mesh(jnp.arange(6.0), layout)

    assert layout == fetch_layout(tensor)
    assert layout == fetch_layout(copy_to_mesh(np.arange(6.0), layout, engine="jax"))
    with pytest.raises(LayoutError, match="on a mesh already"):
        copy_to_mesh(tensor, layout)


def test_a_function_is_called_with_a_layout():
    """A function makes its result in the layout, with the values of the plain call, from arrays and other arguments."""
    layout = Layout(["x", "y"], GRID)
    key = jax.random.key(1)
    given_arrays = [(jnp.zeros, ((6, 4),), {}), (jnp.full, (), {"shape": (6, 4), "fill_value": 2.5})]
    given_arrays.append((jax.random.normal, (key, (6, 4)), {}))
    given_arrays.append((lambda a, b: a["a"] * 0.3 + b, ({"a": jnp.ones((6, 4))}, 0.7), {}))
    for function, args, kwargs in given_arrays:
        tensor = call_with_layout(function, layout, *args, engine="jax", **kwargs)

        assert layout == fetch_layout(tensor)
        assert_same_bits(whole(function(*args, **kwargs)), whole(tensor))


def test_a_product_is_called_with_a_layout():
    """A function that adds up elements gives the plain result, up to the order of the sums."""
    a = relayout(random_values((6, 5), "int8", 3).astype(np.float32), Layout(["x", None], GRID), engine="jax")
    b = relayout(random_values((5, 4), "int8", 4).astype(np.float32), Layout([None, "y"], GRID), engine="jax")
    layout = Layout(["x", "y"], GRID)
    tensor = call_with_layout(jnp.matmul, layout, a, b)

    assert layout == fetch_layout(tensor)
    assert_same_bits(whole(a) @ whole(b), whole(tensor))


def test_without_a_layout_a_function_is_just_called():
    """With `None` for a layout, the function's own result comes back."""
    assert [1, 2, 3] == call_with_layout(lambda x: [*x, 3], None, [1, 2])


def test_a_result_that_does_not_fit_is_refused():
    """A result that does not divide, has another rank, or is several arrays, is refused."""
    layout = Layout(["x", "y"], GRID)
    with pytest.raises(LayoutError, match="5 is not a multiple of 3"):
        call_with_layout(jnp.zeros, layout, (5, 4), engine="jax")
    with pytest.raises(LayoutError, match="rank"):
        call_with_layout(jnp.zeros, layout, 5, engine="jax")
    with pytest.raises(EngineError, match="2 arrays"):
        call_with_layout(lambda: (jnp.zeros(2), jnp.zeros(2)), layout, engine="jax")
