"""Tensors in layouts, by hand, with each framework; the examples are those of TensorFlow's documents."""

import importlib
import math
import os

import hypothesis.strategies as st
import numpy as np
import pytest
from cases import examples
from hypothesis import given, settings

from layoutmap import dtensor
from layoutmap.core.errors import EngineError, LayoutError, LayoutMapError, MeshError
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.dtensor import call_with_layout, copy_to_mesh, fetch_layout, pack, relayout, run_on, unpack
from layoutmap.engines import get_engine
from layoutmap.testing.engine_contract import assert_same_bits, generate_values, list_all_specs

PROCESSES = ("jax", "tensorflow", "torch")
pytestmark = pytest.mark.every_case

RUNNING = os.environ.get("LAYOUTMAP_TEST_PROCESS", "")
ENGINE = RUNNING if RUNNING in PROCESSES else "jax"
xp = importlib.import_module({"jax": "jax.numpy", "tensorflow": "tensorflow", "torch": "torch"}[ENGINE])
array = getattr(xp, {"jax": "asarray", "tensorflow": "constant", "torch": "from_numpy"}[ENGINE])
GRID = Mesh(None, [("x", 3), ("y", 2)])


def whole(tensor):
    return get_engine(ENGINE).to_numpy(tensor)


def held_specs(mesh, rank):
    """The specs of all layouts that the engine can hold: TensorFlow shards an axis over one dim only."""
    return [
        specs
        for specs in list_all_specs(mesh, rank)
        if ENGINE != "tensorflow" or not any(isinstance(spec, tuple) for spec in specs)
    ]


def test_the_documents_example_of_unpack():
    """Six numbers in a row, sharded over a grid of 3 x 2, are three pairs, each of them twice."""
    tensor = relayout(np.arange(6), Layout(["x"], GRID), engine=ENGINE)

    assert [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]] == [part.tolist() for part in unpack(tensor)]


def test_the_documents_example_of_pack():
    """Six numbers, one on each device of a grid of 3 x 2, are a table of 3 x 2."""
    parts = [np.array([[i]], np.float32) for i in range(6)]
    tensor = pack(parts, Layout(["x", "y"], GRID), engine=ENGINE)

    assert [[0, 1], [2, 3], [4, 5]] == whole(tensor).tolist()


@settings(deadline=None, max_examples=examples(40))
@given(data=st.data())
def test_pack_undoes_unpack(data):
    """A tensor taken apart has one component for each device, and assembled again is the same tensor."""
    mesh = data.draw(
        st.sampled_from([GRID, Mesh(None, "x=2,y=4"), Mesh(None, "x=1"), Mesh(None, "x=2,y=2,z=2")])
    )
    rank = data.draw(st.integers(0, 3))
    layout = Layout(data.draw(st.sampled_from(held_specs(mesh, rank))), mesh)
    times = data.draw(st.tuples(*[st.integers(0, 2)] * rank))
    shape = tuple(n * count for n, count in zip(times, layout.shard_counts, strict=True))
    values = generate_values(shape, data.draw(st.sampled_from(["float32", "bfloat16", "bool"])), seed=1)
    tensor = relayout(values, layout, engine=ENGINE)
    parts = unpack(tensor)
    again = pack(parts, layout)

    assert mesh.size == len(parts)
    assert {layout.shard_shape(shape)} == {part.shape for part in parts}
    assert layout == fetch_layout(tensor) == fetch_layout(again)
    assert_same_bits(values, whole(again))
    for i, part in enumerate(parts):
        assert_same_bits(values[layout.shard_slices(shape, i)], part)


@pytest.mark.parametrize("kind", [np.float32, lambda value: array(np.full((), value, np.float32)), float])
def test_components_may_be_arrays_of_numpy_or_the_framework_or_numbers(kind):
    """Components of numpy, of the framework, and plain numbers make the same tensor."""
    tensor = pack([kind(3)] * 6, Layout([], GRID), engine=ENGINE)

    assert 3.0 == float(whole(tensor))


@pytest.mark.parametrize(
    ("words", "parts", "specs"),
    [
        ("there are 5 components for 6 devices", [np.zeros(2)] * 5, ["x"]),
        ("there are 0 components for 6 devices", [], ["x"]),
        ("component 1 differs", [np.zeros(2)] + [np.zeros(3)] * 5, ["x"]),
        ("component 5 differs", [np.zeros(2)] * 5 + [np.zeros((2, 1))], ["x"]),
        ("component 2 differs", [np.zeros(2)] * 2 + [np.zeros(2, np.int8)] * 4, ["x"]),
        ("rank 1 does not fit a tensor of rank 2", [np.zeros((2, 2))] * 6, ["x"]),
        ("components 0 and 1 differ", [np.full(2, i) for i in range(6)], ["x"]),
        ("components 0 and 5 differ", [np.zeros(())] * 5 + [np.ones(())], []),
    ],
)
def test_components_that_do_not_fit_are_refused(words, parts, specs):
    """A wrong number of components, or components that differ in what they may not, are refused, saying which."""
    with pytest.raises(LayoutError, match=words):
        pack(parts, Layout(specs, GRID), engine=ENGINE)


def test_replicas_are_compared_by_their_bits():
    """Equal replicas may hold NaN; zeros of either sign are not equal."""
    layout = Layout([], GRID)

    assert math.isnan(whole(pack([np.float32("nan")] * 6, layout, engine=ENGINE)))
    with pytest.raises(LayoutError, match="components 0 and 1 differ"):
        pack([np.float32(0)] + [np.float32(-0.0)] * 5, layout, engine=ENGINE)


def test_what_has_no_layout_is_refused():
    """A plain array has no layout to fetch, and no components to unpack."""
    for tensor in (np.zeros(3), xp.zeros(3), None, 3):
        with pytest.raises(LayoutError, match="has no layout"):
            fetch_layout(tensor)
        with pytest.raises(LayoutError, match="has no layout"):
            unpack(tensor)


def test_copy_to_mesh_takes_plain_tensors_only():
    """A plain tensor comes to be on the mesh; one that is on a mesh is refused."""
    layout = Layout(["x"], GRID)
    tensor = copy_to_mesh(array(np.arange(6.0)), layout)

    assert layout == fetch_layout(tensor)
    assert layout == fetch_layout(copy_to_mesh(np.arange(6.0), layout, engine=ENGINE))
    with pytest.raises(LayoutError, match="on a mesh already"):
        copy_to_mesh(tensor, layout)


def test_a_function_is_called_with_a_layout():
    """A function makes its result in the layout, with the values of the plain call, from arrays and other arguments."""
    layout = Layout(["x", "y"], GRID)
    arguments = ({"a": array(np.ones((6, 4), np.float32))}, 0.7)
    calls = [
        (xp.zeros, ((6, 4),), {}),
        (xp.ones, (), {"size" if ENGINE == "torch" else "shape": (6, 4)}),
        (lambda a, b: a["a"] * 0.3 + b, arguments, {}),
    ]
    for function, args, kwargs in calls:
        tensor = call_with_layout(function, layout, *args, engine=ENGINE, **kwargs)

        assert layout == fetch_layout(tensor)
        assert_same_bits(whole(function(*args, **kwargs)), whole(tensor))


def test_without_a_layout_a_function_is_just_called():
    """With `None` for a layout, the function's own result comes back."""
    assert [1, 2, 3] == call_with_layout(lambda x: [*x, 3], None, [1, 2])


# -- computing on a mesh


def test_the_documents_example_of_run_on():
    """A product of plain arrays, computed on a mesh, lies there whole on each device."""
    with run_on(GRID, engine=ENGINE):
        product = xp.matmul(xp.ones((2, 3)), xp.ones((3, 4)))

    assert Layout.replicated(GRID, 2) == fetch_layout(product)
    assert [np.full((2, 4), 3.0).tolist()] * 6 == [part.tolist() for part in unpack(product)]


def test_computing_on_meshes_nests():
    """The innermost mesh counts, and the one around it again when it is left, by an exception, too."""
    pair = Mesh(None, "a=2")
    with run_on(GRID, engine=ENGINE):
        with run_on(pair, engine=ENGINE):
            inner = xp.ones(3) + xp.ones(3)
        after = xp.ones(3) + xp.ones(3)
        with pytest.raises(ZeroDivisionError), run_on(pair, engine=ENGINE):
            raise ZeroDivisionError
        at_last = xp.ones(3) + xp.ones(3)
    outside = xp.ones(3) + xp.ones(3)

    assert pair == fetch_layout(inner).mesh
    assert GRID == fetch_layout(after).mesh == fetch_layout(at_last).mesh
    with pytest.raises(LayoutError, match="has no layout"):
        fetch_layout(outside)


def test_computing_on_a_mesh_that_is_not_there_is_refused():
    """A mesh of more devices than there are is refused, and what is not a mesh."""
    with pytest.raises(MeshError, match="16 devices"), run_on(Mesh(None, "x=16"), engine=ENGINE):
        pass
    with pytest.raises(LayoutError, match="needs a mesh"), run_on("x=2", engine=ENGINE):  # type: ignore[arg-type]
        pass
    with pytest.raises(EngineError, match="no engine 'numpy'"), run_on(GRID, engine="numpy"):
        pass


def test_what_is_no_layout_is_refused():
    """Specs without a mesh, and a text, are no layout."""
    for wrong in (["x"], "x", None):
        with pytest.raises(LayoutMapError):
            relayout(np.zeros(6), wrong, engine=ENGINE)
        with pytest.raises(LayoutMapError):
            pack([np.zeros(1)] * 6, wrong, engine=ENGINE)


@pytest.mark.parametrize("value", [1.5, [1.5, 2.5], [[1.5], [2.5]], 1, [1, 2], [True, False]], ids=repr)
def test_python_numbers_get_the_default_element_type(value):
    """Numbers and lists of them become arrays of the element type that the framework gives them."""
    layout = Layout.replicated(Mesh(None, [("x", 2)]), rank=np.ndim(value))
    expected = {"jax": "asarray", "tensorflow": "constant", "torch": "tensor"}[ENGINE]
    expected = getattr(xp, expected)(value).dtype

    assert expected == relayout(value, layout, engine=ENGINE).dtype
    assert expected == copy_to_mesh(value, layout, engine=ENGINE).dtype
    assert expected == pack([value, value], layout, engine=ENGINE).dtype
    assert np.float64 == get_engine(ENGINE).canonicalize_values(np.float64(value)).dtype or ENGINE == "jax"


def test_names_of_tensorflow_are_there():
    """Further functions of `tf.experimental.dtensor` do on every engine as their names say."""
    layout, other = Layout(["x"], GRID), Layout(["y"], GRID)
    tensor = relayout(np.float32(range(6)), layout, engine=ENGINE)

    assert dtensor.is_dtensor(tensor)
    assert not any(map(dtensor.is_dtensor, (np.zeros(3), 1.0, array(np.zeros(3)))))
    assert other == fetch_layout(dtensor.relayout_like(tensor, relayout(tensor, other)))
    dtensor.check_layout(tensor, layout)
    for wrong in (tensor, np.zeros(6)):
        with pytest.raises(LayoutError):
            dtensor.check_layout(wrong, other)
    thin = Layout(["x", "y"], Mesh(None, [("x", 6), ("y", 1)]))  # y shards nothing
    dtensor.check_layout(relayout(np.ones((6, 4)), thin, engine=ENGINE), Layout(["x", None], thin.mesh))
    dtensor.barrier(GRID, engine=ENGINE)
    assert "x=3,y=2" == str(dtensor.create_distributed_mesh("x=3,y=2", engine=ENGINE)).replace(" ", "")
    with dtensor.default_mesh(GRID, engine=ENGINE):
        assert xp.ones(3).shape == (3,)
