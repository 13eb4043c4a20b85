"""The TensorFlow engine keeps the contract, and what only TensorFlow can be asked."""

import gc
import itertools
import re
from typing import ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf
from cases import examples, few
from hypothesis import given, settings

from layoutmap.core.errors import EngineError
from layoutmap.core.initializers import Initializer, InitializerProgram
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines.tensorflow import pieces
from layoutmap.engines.tensorflow.engine import engine
from layoutmap.testing.engine_contract import EngineContract, assert_same_bits

dtensor = tf.experimental.dtensor
DEVICE = "/job:localhost/replica:0/task:0/device:"


def key_of(seed):
    return tf.constant([seed, 0], tf.int32)


def drawn_by(name, function, seed=1):
    """A draw by a program; its whole value is made by the plain function, operation by operation."""
    key = key_of(seed)
    return Initializer(global_value=lambda: function(key), program=InitializerProgram(name, key, function))


def random_draw(shape, dtype, seed):
    def function(seed):
        drawn = tf.random.stateless_normal(shape, seed, dtype=dtype)
        return drawn * tf.cast(0.05, dtype) + tf.cast(0.013, dtype)

    return drawn_by(("normal", shape, dtype), function, seed)


def reason(draw):
    """Why an initializer's program cannot be computed in pieces."""
    return pieces.PiecewiseInitializer(draw.program.function, draw.program.seed).why_global


class TestTensorFlowEngine(EngineContract):
    engine_name = "tensorflow"
    cannot_hold: ClassVar = {(("x", "y"), "unsharded"): "one axis over several mesh dims"}

    def make_array(self, values):
        return tf.constant(values)

    def get_device_values(self, array):
        return {
            device.removeprefix(DEVICE): component.numpy()
            for device, component in zip(
                dtensor.fetch_layout(array).mesh.local_devices(), dtensor.unpack(array), strict=True
            )
        }

    def make_random_initializer(self, shape, dtype, seed):
        return random_draw(shape, dtype, seed)

    def num_live_arrays(self):
        return sum(isinstance(thing, tf.Tensor) for thing in gc.get_objects())


def layout_on(dims, *specs):
    return Layout(specs, Mesh(None, dims))


def created(draw, layout, shape, dtype="float32"):
    return engine().create_initial_values(
        {"w": Assignment(VariableSpec("w", shape, dtype), layout)}, {"w": draw}
    )["w"]


# -- draws in pieces

SOURCES = {
    "uniform": tf.random.stateless_uniform,
    "normal": tf.random.stateless_normal,
    "truncated_normal": tf.random.stateless_truncated_normal,
}
SHAPES_AND_LAYOUTS = [
    ((), "x=2,y=4", ()),
    ((1,), "x=1", ("x",)),
    ((2,), "x=2", ("x",)),
    ((0, 6), "x=2,y=2", ("x", "y")),
    ((6, 0), "x=2,y=2", ("x", "y")),
    ((37,), "x=8", (None,)),
    ((1, 64), "x=8", (None, "x")),
    ((14, 3), "x=2,y=3", ("x", "y")),
    ((6, 10), "x=2,y=2", ("y", "x")),
    ((8, 8), "x=8", (None, "x")),
    ((6, 4, 5), "x=2,y=4", ("x", "y", None)),
    ((5, 4, 6), "x=2,y=3", (None, "x", "y")),
]


@pytest.mark.parametrize("dtype", few(["float32", "float64", "float16", "bfloat16"], "float32", "bfloat16"))
@pytest.mark.parametrize("source", SOURCES)
def test_a_draw_in_pieces_has_the_bits_of_one_draw(source, dtype, monkeypatch):
    """In pieces of any size, on any layout, a random draw has the bits of the same operations on the whole."""
    for shape, dims, specs in SHAPES_AND_LAYOUTS:

        def function(seed, shape=shape):
            drawn = SOURCES[source](shape, seed, dtype=dtype)
            return tf.sqrt(tf.cast(0.3, dtype)) * drawn / tf.cast(1.7, dtype) - tf.cast(0.013, dtype)

        draw = drawn_by(("scaled", source, shape, dtype), function, seed=len(shape))
        expected = draw.global_value().numpy()
        for piece_bytes in (16 << 20, 1, 100):
            monkeypatch.setattr(pieces, "_PIECE_BYTES", piece_bytes)
            made = created(draw, layout_on(dims, *specs), shape, dtype)

            assert "" == reason(draw) or shape == (2,)
            assert_same_bits(expected, engine().to_numpy(made))


@settings(max_examples=examples(30))
@given(data=st.data())
def test_any_run_of_a_draw_has_the_bits_of_one_draw(data):
    """Wherever a run of random numbers starts and ends, it has the bits that stand there in the whole."""
    size = data.draw(st.integers(3, 5000))
    start = data.draw(st.integers(0, size - 1))
    count = data.draw(st.integers(1, size - start))
    dtype = data.draw(st.sampled_from(["float32", "float64", "float16", "bfloat16"]))
    source = SOURCES[data.draw(st.sampled_from(list(SOURCES)))]
    key = key_of(data.draw(st.integers(0, 1 << 30)))

    def function(seed):
        return source((size,), seed, dtype=dtype) * tf.cast(0.3, dtype) + tf.cast(0.1, dtype)

    index = (slice(start, start + count),)
    (block,) = pieces.PiecewiseInitializer(function, key).compute_blocks(key, [index]).values()

    assert_same_bits(function(key).numpy()[index], block)


def test_a_counter_runs_over_into_its_upper_half():
    """Numbers far out, where the lower 64 bits of the counter run over, are those of the plain draw."""
    key, counter = tf.constant([5], tf.uint64), tf.constant([2**64 - 2, 7], tf.uint64)

    def function(_):
        return tf.raw_ops.StatelessRandomUniformV2(
            shape=[64], key=key, counter=counter, alg=1, dtype=tf.float32
        )

    draw = drawn_by("far", function)

    assert "" == reason(draw)
    assert_same_bits(
        draw.global_value().numpy(), engine().to_numpy(created(draw, layout_on("x=8", "x"), (64,)))
    )


@pytest.mark.parametrize("specs", [("x", None), (None, "x"), ("x", "y"), (None, None)])
def test_no_piece_is_larger_than_was_asked_for(specs, monkeypatch):
    """While a variable is drawn in pieces, no run of it is larger than the size of a piece."""
    asked = []
    elements = pieces._SeedEvaluation.compute_elements

    def recorded(run, start, count):
        asked.append(count)
        return elements(run, start, count)

    monkeypatch.setattr(pieces._SeedEvaluation, "compute_elements", recorded)
    monkeypatch.setattr(pieces, "_PIECE_BYTES", 4 * 3 * 50)
    draw = random_draw((64, 50), "float32", seed=3)
    made = created(draw, layout_on("x=2,y=2", *specs), (64, 50))

    assert {50, 100, 150} >= set(asked)
    assert 64 * 50 == sum(asked)
    assert_same_bits(draw.global_value().numpy(), engine().to_numpy(made))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("zeros", lambda seed: tf.zeros((48, 48))),
        ("filled", lambda seed: tf.fill([48, 48], tf.random.stateless_normal((), seed))),
        ("constant", lambda seed: tf.constant(np.full((48, 48), 0.3, np.float32)) * 0.7),
        ("spread", lambda seed: tf.random.stateless_uniform((48, 48), seed, -0.1, 0.3)),
        ("one number", lambda seed: tf.random.stateless_normal((48, 48), seed) * tf.ones((1, 1)) * 0.3),
        (
            "sum of few",
            lambda seed: (
                tf.random.stateless_normal((48, 48), seed) * tf.norm(tf.random.stateless_normal((9,), seed))
            ),
        ),
        (
            "two sources",
            lambda seed: (
                tf.random.stateless_normal((48, 48), seed) - tf.random.stateless_uniform((48, 48), seed + 1)
            ),
        ),
    ],
)
def test_what_does_not_change_when_sharded_is_drawn_in_pieces(name, function):
    """Fills, sources and work on single elements are done in pieces, with the plain draw's bits."""
    draw = drawn_by(name, function)
    made = created(draw, layout_on("x=2,y=4", "y", "x"), (48, 48))

    assert "" == reason(draw)
    assert_same_bits(draw.global_value().numpy(), engine().to_numpy(made))


def normal(seed):
    return tf.random.stateless_normal((48, 48), seed)


@pytest.mark.parametrize(
    ("why", "function"),
    [
        ("Qr needs the whole tensor", lambda seed: tf.linalg.qr(normal(seed))[0]),
        ("MatrixDiagV3 needs the whole tensor", lambda seed: tf.linalg.diag(tf.ones(48))),
        ("Cumsum needs the whole tensor", lambda seed: tf.cumsum(normal(seed))),
        ("Exp needs the whole tensor", lambda seed: tf.exp(normal(seed)) * 0.3),
        (r"intermediate array of shape \(48, 48\)", lambda seed: normal(seed) / tf.norm(normal(seed))),
        (r"repeats an array of shape \(48,\)", lambda seed: normal(seed) * tf.range(48.0)),
        (
            r"repeats an array of shape \(48, 1\)",
            lambda seed: normal(seed) + tf.random.stateless_normal((48, 1), seed),
        ),
        (
            "constant is an array",
            lambda seed: normal(seed) + tf.constant(np.arange(48.0**2, dtype=np.float32).reshape(48, 48)),
        ),
        ("RandomUniform", lambda seed: normal(seed) + tf.random.uniform(()) * 0),
    ],
)
def test_what_would_change_when_sharded_is_drawn_globally(why, function):
    """A program that needs more than single elements is initialized globally, says why, and has the plain bits."""

    def floats(seed):
        return tf.cast(function(seed), tf.float32)

    draw = drawn_by(why, floats)
    made = created(draw, layout_on("x=2,y=4", "y", "x"), (48, 48))

    assert re.search(why, reason(draw))
    assert_same_bits(draw.global_value().numpy(), engine().to_numpy(made))


@pytest.mark.parametrize(
    ("why", "scale"),
    [("ReadVariableOp", tf.Variable(0.3)), ("an array that is not part of its seed", tf.fill([500], 0.3))],
)
def test_an_array_that_a_program_is_not_given_is_noticed(why, scale):
    """A program that reads a tensor from outside is initialized globally: that is not part of the program."""
    draw = drawn_by(why, lambda seed: normal(seed) * tf.reduce_max(scale))
    made = created(draw, layout_on("x=2", "x", None), (48, 48))

    assert why in reason(draw)
    assert_same_bits(draw.global_value().numpy(), engine().to_numpy(made))


def test_a_seed_may_be_a_nest():
    """A seed may be tensors in a nest, of any type; the same program with other seeds is traced once."""
    traced = []

    def function(seed):
        traced.append(seed)
        return tf.random.stateless_normal((8, 8), seed["key"]) * seed["scale"]

    made, expected = [], []
    for number in (1, 2):
        seed = {"key": key_of(number), "scale": tf.constant(0.1 * number)}
        draw = Initializer(
            global_value=lambda: np.zeros(0), program=InitializerProgram("nest", seed, function)
        )
        made.append(created(draw, layout_on("x=2", "x", None), (8, 8)))
        expected.append(tf.random.stateless_normal((8, 8), seed["key"]) * seed["scale"])

    assert 1 == len(traced)
    for i in range(2):
        assert_same_bits(expected[i].numpy(), engine().to_numpy(made[i]))


def test_arrays_are_made_while_tensorflow_traces():
    """Inside a function that is being traced, creating gives tensors with values, not symbols."""
    made = {}
    draw = random_draw((8, 8), "float32", 6)

    @tf.function
    def step(x):
        made["w"] = created(draw, layout_on("x=2", "x", None), (8, 8))
        return x * 2

    step(tf.ones(()))

    assert_same_bits(draw.global_value().numpy(), engine().to_numpy(made["w"]))


# -- layouts and meshes


def test_natives_are_tensorflows_own():
    """The native form of a layout reads, as text, as TensorFlow's own layout on the same devices."""
    native = engine().make_native_layout(layout_on("x=2,y=4", "y", None), 2)
    own = dtensor.Layout(["y", "unsharded"], dtensor.create_mesh([("x", 2), ("y", 4)], device_type="CPU"))

    assert own.to_string() == native.to_string()
    assert own == native
    names = ",".join(f"{DEVICE}CPU:{i}" for i in range(8))
    assert f"sharding_specs:y,unsharded, mesh:|x=2,y=4|0,1,2,3,4,5,6,7|0,1,2,3,4,5,6,7|{names}" == (
        native.to_string()
    )


def test_a_mesh_dim_of_size_1_in_a_tuple_shards_nothing():
    """Of several dims on one axis those of size 1 do not count, so such a layout is held, and is the tensor's."""
    layout = layout_on("x=1,y=4", ("x", "y"), None)
    tensor = engine().relayout(np.arange(8, dtype=np.float32).reshape(4, 2), layout)

    assert ["y", "unsharded"] == dtensor.fetch_layout(tensor).sharding_specs
    assert layout == engine().get_layout(tensor)


def test_a_mesh_may_name_devices_by_either_name():
    """Short and full device names make the same mesh of TensorFlow, in any order of the devices."""
    short = Mesh([f"CPU:{i}" for i in (3, 1, 0, 2)], "x=4")
    full = Mesh([f"{DEVICE}CPU:{i}" for i in (3, 1, 0, 2)], "x=4")
    natives = [engine().make_native_layout(Layout(["x"], mesh), 1) for mesh in (short, full)]
    tensor = engine().relayout(np.arange(4, dtype=np.float32), Layout(["x"], full))

    assert natives[0] == natives[1]
    assert [f"{DEVICE}CPU:{i}" for i in (3, 1, 0, 2)] == natives[0].mesh.local_devices()
    assert [0, 1, 2, 3] == [component.numpy().item() for component in dtensor.unpack(tensor)]
    assert [f"{DEVICE}CPU:{i}" for i in (3, 1, 0, 2)] == [c.device for c in dtensor.unpack(tensor)]


def test_tensorflow_reads_our_text_and_writes_the_same():
    """The text and the message of a layout are those of TensorFlow's own layout, byte for byte."""
    layout = Layout(["x", None], Mesh([f"CPU:{i}" for i in range(4)], "x=2,y=2", "grid"))
    native = dtensor.Layout.from_string(layout.to_string())

    assert native == engine().make_native_layout(layout, 2)
    assert native.to_string() == layout.to_string()
    assert native.as_proto().SerializeToString() == layout.as_proto().SerializeToString()


@pytest.mark.parametrize("rank", [4, 5, 3, 2])
def test_relayouts_in_a_compiled_function_keep_the_values(rank):
    """A tensor that goes from shards of one axis to shards of another has the same values, for each pair of axes."""
    values = np.arange(4**rank, dtype=np.float32).reshape([4] * rank)
    layouts = [
        layout_on("x=2,y=4", *("x" if each == axis else None for each in range(rank))) for axis in range(rank)
    ]
    tensors = [engine().relayout(values, each) for each in layouts]

    @tf.function(autograph=False)
    def relayouts(tensors):
        return [[engine().relayout(tensor, each) for each in layouts] for tensor in tensors]

    for tensor in itertools.chain(*relayouts(tensors)):
        assert_same_bits(values, engine().to_numpy(tensor))


def test_tensors_that_tensorflow_laid_out_have_a_layout():
    """The layout of a tensor that was laid out by TensorFlow's own means is reported, with short device names."""
    own_mesh = dtensor.create_mesh([("a", 2), ("b", 2)], devices=[f"CPU:{i}" for i in (4, 5, 6, 7)])
    tensor = dtensor.relayout(tf.ones((4, 4)), dtensor.Layout(["b", "unsharded"], own_mesh))
    mesh = Mesh([f"CPU:{i}" for i in (4, 5, 6, 7)], "a=2,b=2")

    assert Layout(["b", None], mesh) == engine().get_layout(tensor)
    assert_same_bits(np.ones((4, 4), np.float32), engine().to_numpy(tensor))


def test_a_variable_is_refused_text():
    """Element types that are no numbers are refused by the variable's path."""
    with pytest.raises(EngineError, match="w: TensorFlow cannot shard element type 'string'"):
        created(Initializer(global_value=lambda: np.zeros(4)), layout_on("x=2", "x"), (4,), "string")
