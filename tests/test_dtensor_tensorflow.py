"""Tensors in layouts, by hand: what only TensorFlow can be asked, and what its own DTensor cannot do."""

import contextlib
import functools

import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from tensorflow.python.framework import error_interpolation

import layoutmap as lm
from layoutmap.core.errors import EngineError, LayoutError, LayoutMapError
from layoutmap.core.layout import Layout, convert_layout
from layoutmap.core.mesh import Mesh
from layoutmap.dtensor import call_with_layout, copy_to_mesh, fetch_layout, pack, relayout, run_on, unpack
from layoutmap.engines.tensorflow.engine import engine
from layoutmap.testing.engine_contract import assert_same_bits, generate_values

dtensor = tf.experimental.dtensor

GRID = Mesh(None, [("x", 3), ("y", 2)])
X_Y = Layout(["x", "y"], GRID)


def assert_like(layout, tensor):
    """A tensor that TensorFlow has computed is on the first mesh that the process has used for its devices."""
    actual = fetch_layout(tensor)
    assert (layout.sharding_specs, layout.mesh.mesh_dims) == (actual.sharding_specs, actual.mesh.mesh_dims)


def own_mesh():
    return dtensor.create_mesh([("x", 3), ("y", 2)], devices=[f"CPU:{i}" for i in range(6)])


# -- layouts of either kind


def test_layouts_and_meshes_may_be_tensorflows_own():
    """Every function takes TensorFlow's own layout or mesh for ours, and its tensors are TensorFlow's own."""
    own = dtensor.Layout(["x", "y"], own_mesh())
    values = np.arange(24, dtype=np.float32).reshape(6, 4)
    made = [
        relayout(values, own, engine="tensorflow"),
        copy_to_mesh(tf.constant(values), own),
        call_with_layout(lambda: tf.reshape(tf.range(24.0), (6, 4)), own, engine="tensorflow"),
        pack([values[X_Y.shard_slices((6, 4), i)] for i in range(6)], own, engine="tensorflow"),
    ]
    for tensor in made:
        assert own == dtensor.fetch_layout(tensor)
        assert convert_layout(own) == fetch_layout(tensor)
        assert_same_bits(values, engine().to_numpy(tensor))
    with run_on(own_mesh(), engine="tensorflow"):
        assert_like(Layout.replicated(convert_layout(own).mesh, 1), tf.ones(3) + 1)


def test_components_are_those_of_tensorflow():
    """`unpack` gives what TensorFlow's gives, and `pack` makes the tensor that TensorFlow's makes."""
    values = generate_values((6, 4), "float32", seed=3)
    tensor = relayout(values, X_Y, engine="tensorflow")
    parts = [part.numpy() for part in dtensor.unpack(tensor)]
    packed = dtensor.pack(parts, engine().make_native_layout(X_Y, 2))

    assert len(parts) == len(unpack(tensor))
    for theirs, ours in zip(parts, unpack(tensor), strict=True):
        assert_same_bits(theirs, ours)
    assert_like(X_Y, packed)
    assert_same_bits(engine().to_numpy(packed), engine().to_numpy(pack(parts, X_Y, engine="tensorflow")))


def test_variables_have_layouts_and_components():
    """A variable in a layout is taken where a tensor is."""
    variable = lm.DVariable(tf.ones((6, 4)), layout=X_Y)
    moved = relayout(variable, Layout([None, "y"], GRID))

    assert X_Y == fetch_layout(variable)
    assert [(2, 2)] * 6 == [part.shape for part in unpack(variable)]
    assert Layout([None, "y"], GRID) == fetch_layout(moved)
    assert_same_bits(variable.numpy(), engine().to_numpy(moved))
    with pytest.raises(LayoutError, match="on a mesh already"):
        copy_to_mesh(variable, X_Y)
    with pytest.raises(LayoutError, match="has no layout"):
        fetch_layout(tf.Variable(3.0))


def test_elements_of_64_bits_stay():
    """TensorFlow holds elements of 64 bits, so they are not made smaller."""
    tensor = pack([np.float64(3.0)] * 6, Layout([], GRID), engine="tensorflow")

    assert tf.float64 == tensor.dtype
    assert 3.0 == engine().to_numpy(tensor)


# -- functions with a layout


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (tf.zeros, ((6, 4),), {}),
        (tf.fill, ([6, 4], 2.5), {}),
        (tf.random.stateless_uniform, ((6, 4), (1, 2)), {}),
        (tf.random.stateless_uniform, (), {"shape": (6, 4), "seed": (3, 4), "minval": -0.1, "maxval": 0.3}),
        (tf.random.stateless_normal, ((6, 4), (1, 2)), {"dtype": tf.bfloat16}),
        (tf.random.stateless_uniform, ((6, 4), (1, 2), 0, 9, tf.int32), {}),
        (tf.eye, (6, 4), {}),
        (lambda x: x * 0.3, (tf.reshape(tf.range(24.0), (6, 4)),), {}),
    ],
)
def test_a_function_called_with_a_layout_gives_its_plain_result(function, args, kwargs):
    """Fills and random numbers in a layout, of any rank, have the bits of the plain call."""
    tensor = call_with_layout(function, X_Y, *args, engine="tensorflow", **kwargs)

    assert_like(X_Y, tensor)
    assert_same_bits(function(*args, **kwargs).numpy(), engine().to_numpy(tensor))


def test_a_function_with_a_state_draws_once():
    """`tf.random.normal`, which has a state, gives what the plain call would, and moves the state on once."""
    tf.random.set_seed(7)
    plain = [tf.random.normal((6, 4)).numpy() for _ in range(2)]
    tf.random.set_seed(7)
    first = call_with_layout(tf.random.normal, X_Y, (6, 4), engine="tensorflow")

    assert X_Y == fetch_layout(first)
    assert_same_bits(plain[0], engine().to_numpy(first))
    assert_same_bits(plain[1], tf.random.normal((6, 4)).numpy())


def test_a_product_of_tensors_in_layouts_is_called_with_a_layout():
    """A function of tensors in layouts is computed by DTensor, and its result is put in the layout."""
    a = generate_values((6, 6), "int8", 3).astype(np.float32)
    b = generate_values((6, 4), "int8", 4).astype(np.float32)
    left = relayout(a, Layout(["x", "y"], GRID), engine="tensorflow")
    right = relayout(b, Layout(["y", None], GRID), engine="tensorflow")
    tensor = call_with_layout(tf.matmul, X_Y, left, right)

    assert_like(X_Y, tensor)
    assert_same_bits(a @ b, engine().to_numpy(tensor))


# -- inside a compiled function, and gradients


@pytest.mark.parametrize("autograph", [False, True])
def test_a_tensor_is_relaid_out_inside_a_compiled_function(autograph):
    """Inside a `tf.function`, relayout puts the result in the layout."""

    @tf.function(autograph=autograph)
    def step(x):
        return relayout(x * 2, Layout(["y", None], GRID))

    values = generate_values((6, 4), "int8", 5).astype(np.float32)
    tensor = step(relayout(values, X_Y, engine="tensorflow"))

    assert_like(Layout(["y", None], GRID), tensor)
    assert_same_bits(values * 2, engine().to_numpy(tensor))


@pytest.mark.parametrize("start", [None, Layout(["x", None], GRID)])
def test_gradients_pass_through_relayout(start):
    """The gradient of a tensor that is watched and then relaid out is the plain one, and lies as the tensor does."""
    values = tf.reshape(tf.range(24.0), (6, 4))
    watched = values if start is None else relayout(values, start)
    with tf.GradientTape() as tape:
        tape.watch(watched)
        moved = relayout(watched, X_Y)
        loss = tf.reduce_sum(moved * moved * 3)
    with run_on(GRID, engine="tensorflow"):  # the tape starts from a plain 1
        gradient = tape.gradient(loss, watched)

    assert_same_bits(values.numpy() * 6, engine().to_numpy(gradient))
    assert start == engine().get_layout(gradient)


@pytest.mark.parametrize("kind", ["a variable", "a tensor", "a product"])
def test_gradients_pass_through_relayout_in_a_compiled_function(kind):
    """In a `tf.function` the gradient of relayout is the plain one, in the layout of the input, as TensorFlow's is."""
    values = np.float32(np.arange(24)).reshape(6, 4)
    source = relayout(values, X_Y, engine="tensorflow")
    source = lm.DVariable(source) if kind == "a variable" else source

    def differentiate(source, move):
        with tf.GradientTape() as tape:
            tape.watch(source)
            moved = move(source * 2 if kind == "a product" else source)
            loss = tf.reduce_sum(moved * moved * 3)
        return tape.gradient(loss, source)

    layout = Layout([None, "y"], GRID)
    for move in (
        lambda source: relayout(source, layout),
        lambda source: dtensor.relayout(source, engine().make_native_layout(layout, 2)),
    ):
        gradient = compiled(lambda source, move=move: differentiate(source, move), source)

        assert_like(X_Y, gradient)
        assert_same_bits(values * (24 if kind == "a product" else 6), engine().to_numpy(gradient))


def compiled(function, *args, **settings):
    """What a function gives when it is compiled."""
    return tf.function(function, **{"autograph": False, **settings})(*args)


@pytest.mark.parametrize("autograph", [False, True])
def test_what_is_made_while_a_function_is_traced_is_a_constant_of_it(autograph):
    """Inside a `tf.function`, numpy values and drawn numbers are put in the layout, as outside."""
    values = generate_values((6, 4), "int8", 6).astype(np.float32)

    def of_numpy():
        return relayout(values, X_Y, engine="tensorflow") * 1.0

    def drawn():
        return call_with_layout(tf.random.stateless_normal, X_Y, (6, 4), (1, 2), engine="tensorflow") * 1.0

    for function, expected in (
        (of_numpy, values),
        (drawn, tf.random.stateless_normal((6, 4), (1, 2)).numpy()),
    ):
        made = compiled(function, autograph=autograph)

        assert_like(X_Y, made)
        assert_same_bits(expected, engine().to_numpy(made))


@pytest.mark.parametrize("shape", [(None, 4), (6, None), None])
def test_sizes_may_be_unknown_inside_a_compiled_function(shape):
    """Inside a `tf.function` a tensor whose shape is not known yet is relaid out."""
    values = generate_values((6, 4), "int8", 7).astype(np.float32)
    made = compiled(
        lambda x: relayout(x * 1.0, Layout(["y", None], GRID)),
        relayout(values, X_Y, engine="tensorflow"),
        input_signature=[tf.TensorSpec(shape, tf.float32)],
    )

    assert_like(Layout(["y", None], GRID), made)
    assert_same_bits(values, engine().to_numpy(made))


def test_what_needs_values_is_refused_inside_a_compiled_function():
    """Taking apart and putting together tensors that are not computed yet is refused, saying so."""
    tensor = relayout(np.zeros((6, 4), np.float32), X_Y, engine="tensorflow")
    with pytest.raises(LayoutError, match="has yet to compute it"):
        compiled(unpack, tensor)
    with pytest.raises(LayoutError, match="has yet to compute it"):
        compiled(fetch_layout, tensor)
    with pytest.raises(EngineError, match="has no values yet"):
        compiled(lambda x: pack([x] * 6, X_Y), tf.zeros((2, 2)))
    with pytest.raises(EngineError, match="has no values yet"):
        compiled(lambda x: engine().to_numpy(x), tensor)


# -- operands of all kinds in one operation

SQUARE = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)
PLACED = [Layout(specs, GRID) for specs in [(None, None), ("x", None), (None, "y"), ("x", "y"), ("y", "x")]]
OPERANDS = {
    "a plain tensor": lambda: tf.constant(SQUARE),
    "numpy": lambda: SQUARE,
    "a plain variable": lambda: tf.Variable(SQUARE),
    "a number": lambda: 2.0,
    **{f"a tensor in {of}": lambda of=of: relayout(SQUARE, of, engine="tensorflow") for of in PLACED},
    **{f"a variable in {of}": lambda of=of: lm.DVariable(SQUARE, layout=of) for of in PLACED},
}
OPERATIONS = {
    "add": tf.add,
    "a product": lambda a, b: tf.matmul(a, tf.ones((6, 6)) * b),
    "einsum": lambda a, b: tf.einsum("ij,kj->ik", a, tf.ones((6, 6)) * b),
    "concat": lambda a, b: tf.concat([a, a * b], 0),
    "stack": lambda a, b: tf.stack([a, a - b]),
    "where": lambda a, b: tf.where(a > b, a, -a),
    "a slice": lambda a, b: tf.convert_to_tensor(a)[1:3, ::2] * tf.reduce_sum(b),
    "rows": lambda a, b: tf.gather(a, [0, 3, 5]) * tf.reduce_mean(b),
    "roll": lambda a, b: tf.roll(a, 1, 0) + b,
    "tile": lambda a, b: tf.tile(a * b, [2, 1]),
    "a band": lambda a, b: tf.linalg.band_part(a, -1, 0) * b,
    "an inverse": lambda a, b: tf.linalg.inv(a + 9.0 * tf.eye(6)) + b,
    "scatter": lambda a, b: tf.tensor_scatter_nd_update(a, [[0]], tf.convert_to_tensor(a)[:1] * 2) - b,
    "a condition": lambda a, b: tf.cond(tf.reduce_sum(a) > 0.0, lambda: a + b, lambda: a * b),
    "a loss": lambda a, b: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(a), a * b),
    "an update": lambda a, b: (a.assign_add(a * b), a + 0)[1] if isinstance(a, tf.Variable) else a - b,
}


def differentiate_operation(operate, a, b):
    with tf.GradientTape() as tape:
        a = a if isinstance(a, tf.Variable) else tf.convert_to_tensor(a)
        tape.watch(a)
        loss = tf.reduce_sum(operate(a, b) ** 2)
    return tf.convert_to_tensor(tape.gradient(loss, a))


def read_result(value):
    return engine().to_numpy(value) if lm.dtensor.is_dtensor(value) else value.numpy()


@settings(deadline=None)
@given(data=st.data())
def test_an_operation_of_mixed_operands_is_computed_or_refused_in_our_words(data):
    """In `run_on` each eager operation has the numbers of plain TensorFlow. Elsewhere it has them, or our error."""
    operate = OPERATIONS[data.draw(st.sampled_from(sorted(OPERATIONS)), "operation")]
    kinds = [data.draw(st.sampled_from(sorted(OPERANDS)), "operand") for _ in range(2)]
    kinds[0] = "numpy" if kinds[0] == "a number" else kinds[0]
    if data.draw(st.booleans(), "gradient"):
        operate = functools.partial(differentiate_operation, operate)
    is_compiled, is_inside = (data.draw(st.booleans(), name) for name in ("tf.function", "run_on"))
    plain = [
        tf.Variable(SQUARE) if "variable" in k else 2.0 if k == "a number" else tf.constant(SQUARE)
        for k in kinds
    ]
    expected = operate(*plain).numpy()
    operands = [OPERANDS[kind]() for kind in kinds]

    try:
        with run_on(GRID, engine="tensorflow") if is_inside else contextlib.nullcontext():
            actual = read_result((tf.function(operate) if is_compiled else operate)(*operands))
    except LayoutMapError:
        assert is_compiled or not is_inside
        return
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)


def test_an_error_of_dtensor_is_also_of_tensorflows_class():
    """Code that expects TensorFlow's error catches ours, with TensorFlow's message in it, also from a `tf.function`."""
    tensor = relayout(SQUARE, PLACED[1], engine="tensorflow")
    for add in (tf.add, tf.function(lambda a, b: a + b)):
        with pytest.raises(
            tf.errors.UnimplementedError, match="mixes a tensor on a mesh with an unsharded one"
        ) as caught:
            add(tensor, tf.constant(SQUARE))
        assert isinstance(caught.value, EngineError)
        assert "got a regular tensor for input 1" in caught.value.message
        assert "run_on" in caught.value.fix
    with pytest.raises(
        EngineError, match=r"Relayout cannot run in a tf\.function that gets no tensor on a mesh"
    ):
        tf.function(lambda x: relayout(x, PLACED[1]))(tf.constant(SQUARE))


def test_a_message_of_the_compiler_is_not_searched_for_tags(monkeypatch):
    """TensorFlow looks for tags from each character of a message on, which takes minutes for 200 kB."""
    monkeypatch.setattr(error_interpolation, "parse_message", None)
    bands = tf.function(lambda x: tf.linalg.band_part(x, -1, 0))

    with pytest.raises(EngineError, match="cannot compute MatrixBandPart"):
        bands(relayout(SQUARE, PLACED[1], engine="tensorflow"))


def test_an_axis_over_several_dims_is_refused_by_name():
    """TensorFlow shards an axis over one dim; a layout with two is refused with the fix."""
    with pytest.raises(EngineError, match="axis 0 over x, y") as caught:
        relayout(np.zeros((6, 4)), Layout([("x", "y"), None], GRID), engine="tensorflow")

    assert "use a mesh with one dim of size 6" in caught.value.fix


def test_layouts_and_meshes_become_tensorflows_and_come_back():
    """The conversions are inverse, and functions take either kind."""
    mesh = lm.create_mesh("x=2,y=4", engine="tensorflow")
    layout = lm.Layout([None, "y"], mesh)
    native_mesh, native = map(lm.dtensor.convert_to_tensorflow, (mesh, layout))

    assert isinstance(native_mesh, tf.experimental.dtensor.Mesh)
    assert isinstance(native, tf.experimental.dtensor.Layout)
    assert native.to_string() == layout.to_string()
    assert (mesh, layout) == tuple(map(lm.dtensor.convert_from_tensorflow, (native_mesh, native)))
    with pytest.raises(lm.LayoutError):
        lm.dtensor.convert_from_tensorflow(1)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_mesh_dim_of_size_1_stays_in_a_layout(is_compiled):
    """A result that a function puts in a layout over a dim of size 1 is in that layout, as TensorFlow's is."""
    mesh = Mesh(None, [("x", 6), ("y", 1)])
    values = np.arange(24, dtype=np.float32).reshape(6, 4)
    for specs in [("y", None), ("x", "y"), (None, "y"), (("y", "x"), None)]:
        layout = Layout(specs, mesh)
        for function in (
            lambda of: relayout(tf.constant(values) * 1.0, of),
            lambda of: call_with_layout(lambda: tf.constant(values) * 1.0, of, engine="tensorflow"),
            lambda of: call_with_layout(tf.reshape, of, tf.range(24.0), (6, 4)),
            lambda of: call_with_layout(tf.cast, of, values, "float32", engine="tensorflow"),
        ):
            with run_on(mesh, engine="tensorflow"):
                made = (tf.function(function) if is_compiled else function)(layout)
            assert fetch_layout(made) == (
                Layout(["x", None], mesh) if is_compiled and len(specs[0] or "") > 1 else layout
            )
            assert_same_bits(values, engine().to_numpy(made))
