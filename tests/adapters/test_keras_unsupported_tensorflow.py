"""What DTensor cannot compute: known before the first step, gathered where that helps, and explained."""

import re

import hub_models
import keras
import numpy as np
import pytest
import tensorflow as tf

import layoutmap as lm
from layoutmap.testing import models

PROCESSES = ("tensorflow",)
L = keras.layers
dtensor = tf.experimental.dtensor
MESH = "batch=2,model=4"
IMAGE, SERIES = (6, 6, 4), (4, 8)
pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")


def model_of(layers, shape, dtype="float32", rate=0.1):
    """A function that makes a model of layers, with four outputs for each row of another rank than 1."""

    def make_model():
        out = [L.Flatten()] if len(shape) > 1 else []
        model = keras.Sequential([keras.Input(shape, dtype=dtype), *layers(), *out, L.Dense(4, name="out")])
        model.compile(keras.optimizers.SGD(rate), "mse")
        return model

    return make_model


def trains(make_model, layout_map, rows, steps=2):
    """Whether it does so as on one device."""
    return lm.check_parity(make_model, layout_map, rows, steps=steps, batch_dim="batch").agrees


def rows_of(shape, dtype="float32"):
    random = np.random.default_rng(0)
    x = random.normal(size=(8, *shape)) if dtype == "float32" else random.integers(0, 16, (8, *shape))
    return x.astype(dtype), random.normal(size=(8, 4)).astype("float32")


def make_map(rules):
    return lm.LayoutMap(lm.create_mesh(MESH), rules)


WANTED = {
    "Conv2D": (lambda: L.Conv2D(8, 3, name="c"), IMAGE, {r"c\.kernel": (None, None, "batch", "model")}),
    "Conv1D": (
        lambda: L.Conv1D(8, 3, name="c"),
        SERIES,
        {r"c\.kernel": (None, None, "model"), r"c\.bias": ("model",)},
    ),
    "Conv2DTranspose": (
        lambda: L.Conv2DTranspose(8, 3, name="c"),
        IMAGE,
        {r"c\.kernel": (None, None, "model", None)},
    ),
    "unrolled LSTM": (
        lambda: L.LSTM(8, unroll=True, name="r"),
        SERIES,
        {r"r\.cell\..*kernel": (None, "model")},
    ),
    "unrolled GRU": (
        lambda: L.GRU(8, unroll=True, name="r"),
        SERIES,
        {r"r\.cell\.kernel": ("model", None)},
    ),
    "BatchNormalization": (lambda: L.BatchNormalization(name="b"), (8,), {r"b\..*": ("model",)}),
    "Embedding": (lambda: L.Embedding(16, 8, name="e"), (6,), {r"e\..*": ("batch", "model")}),
}


@pytest.mark.parametrize(("layer", "shape", "rules"), WANTED.values(), ids=WANTED)
def test_what_is_wanted_replicated_is_gathered(layer, shape, rules):
    """A weight that an operation wants replicated stays sharded and trains, and the plan names the price."""
    dtype = "int32" if "e" in str(next(iter(rules)))[:1] else "float32"
    make_model = model_of(lambda: [layer(), L.Flatten()], shape, dtype)
    plan = lm.plan(make_model, make_map(rules))

    assert trains(make_model, make_map(rules), rows_of(shape, dtype))
    notes = [problem for problem in plan.problems if problem.kind == "unsupported"]
    assert {"note"} == {note.severity for note in notes}
    assert {note.subject for note in notes} <= {
        a.variable.path for a in plan.assignments if not a.layout.is_fully_replicated()
    }
    assert not plan.errors


@pytest.mark.parametrize(
    ("layers", "shape", "rules"),
    [
        (lambda: [L.MaxPooling1D(2), L.Dense(32, name="d")], SERIES, {r"d\.kernel": ("model", "batch")}),
        (
            lambda: [L.EinsumDense("abc,cd->abd", (4, 8), bias_axes="d", name="d")],
            SERIES,
            {r"d\.kernel": ("model", None), r"d\.bias": ("model",)},
        ),
        (lambda: [L.Conv2D(8, 3), L.Dense(8, name="d")], IMAGE, {r"d\.kernel": ("model", None)}),
    ],
    ids=["pooling before a shard", "kernel and bias", "convolution before a shard"],
)
def test_a_step_that_is_refused_is_computed_with_more_gathered(layers, shape, rules):
    """Where DTensor refuses a step, more of it is gathered, with a warning, and its numbers are those of one device."""
    with pytest.warns(lm.LayoutMapWarning, match="along the batch only") as caught:
        assert trains(model_of(layers, shape), make_map(rules), rows_of(shape))

    assert all(word in str(caught[-1].message) for word in ("  operation ", "  in ", "  why ", "  fix "))
    assert re.search(r"in +\S+, near .*d\.kernel \(.*model", str(caught[-1].message))


@pytest.mark.parametrize(
    ("layer", "shape", "path"),
    [
        (lambda: L.LSTM(8, name="r"), SERIES, "r.cell"),
        (lambda: L.Bidirectional(L.GRU(8), name="r"), SERIES, "r.forward_layer.cell"),
        (
            lambda: L.RNN([L.SimpleRNNCell(8), L.LSTMCell(8)], go_backwards=True, name="r"),
            SERIES,
            "r.cell.cells.0",
        ),
        (lambda: L.ConvLSTM1D(4, 3, return_sequences=True, name="r"), (3, 8, 4), "r.cell"),
    ],
    ids=["LSTM", "Bidirectional GRU", "RNN of two cells", "ConvLSTM1D"],
)
def test_a_loop_over_time_is_unrolled(layer, shape, path):
    """A recurrent layer trains like one device, with its kernels in shards, and the plan says that it is unrolled."""
    make_model = model_of(lambda: [layer()], shape)
    layout_map = make_map({r"r\..*kernel$": (*[None] * (len(shape) - 1), "model")})
    notes = {p.subject: p for p in lm.plan(make_model, layout_map).problems if p.kind == "unsupported"}

    assert trains(make_model, layout_map, rows_of(shape))
    assert "note" == notes[path].severity
    assert "each time step" in notes[path].why


def test_a_long_loop_over_time_is_warned_of():
    """Hundreds of steps take minutes to compile: the plan says how many there are."""
    make_model = model_of(lambda: [L.LSTM(8, name="r")], (512, 4))
    plan = lm.plan(make_model, make_map({r"r\.cell\.kernel": (None, "model")}))
    first = next(problem for problem in plan.problems if problem.subject == "r.cell")

    assert ("warning", True) == (first.severity, "(512 steps)" in first.what)


def summed(total, row):
    return total + row, total * row


def listed(x):
    rows = tf.TensorArray("float32", size=4)
    for number in range(4):
        rows = rows.write(number, x[:, number] * (number + 1))
    return tf.transpose(rows.stack(), (1, 0, 2))


class Calling(L.Layer):
    """Returns what a function makes of its inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


WITHOUT_A_GRADIENT = {
    "DepthwiseConv2D": (
        lambda: L.DepthwiseConv2D((2, 3), depth_multiplier=2, strides=2, padding="same"),
        IMAGE,
    ),
    "dilated DepthwiseConv2D": (lambda: L.DepthwiseConv2D(2, dilation_rate=2), IMAGE),
    "DepthwiseConv1D": (lambda: L.DepthwiseConv1D(3), SERIES),
    "SeparableConv2D": (lambda: L.SeparableConv2D(8, 3, padding="same"), IMAGE),
    "grouped Conv2D": (lambda: L.Conv2D(8, 3, groups=2, dilation_rate=2), IMAGE),
    "Conv2D of a group for each channel": (
        lambda: L.Conv2D(16, 3, groups=8, strides=2, padding="same"),
        IMAGE,
    ),
    "dilated Conv1D": (lambda: L.Conv1D(8, 2, dilation_rate=2, padding="same"), SERIES),
    "AveragePooling2D": (lambda: L.AveragePooling2D((2, 3), strides=2, padding="same"), IMAGE),
    "AdaptiveAveragePooling2D": (lambda: L.AdaptiveAveragePooling2D((2, 4)), IMAGE),
    "flip": (lambda: Calling(lambda x: keras.ops.flip(x, axis=(1, -1))), IMAGE),
    "roll": (lambda: Calling(lambda x: keras.ops.roll(x, (1, -3), axis=(1, 2))), IMAGE),
    "concatenate": (lambda: Calling(lambda x: keras.ops.concatenate([x, 2 * x], axis=-1)), SERIES),
    "map": (
        lambda: Calling(
            lambda x: keras.ops.map(lambda row: row[0] * keras.ops.cumsum(row[1], 0), (x, 2 * x))
        ),
        SERIES,
    ),
    "scan": (lambda: Calling(lambda x: keras.ops.scan(summed, x[0], x, reverse=True)[1]), SERIES),
    "TensorArray": (lambda: Calling(listed), SERIES),
    "eye": (lambda: Calling(lambda x: x @ (keras.ops.eye(64) + keras.ops.eye(64, k=1))[:8]), SERIES),
    "diagonals": (lambda: Calling(lambda x: tf.linalg.diag(tf.linalg.diag_part(x))), SERIES),
    "new axes": (
        lambda: Calling(lambda x: x[:, None, 1:] * x[..., None, :1, :][:, 0, None, None, 0]),
        SERIES,
    ),
    "a new first axis": (lambda: Calling(lambda x: x[None, :, ..., 0, None][0] + x[None][0]), SERIES),
}


@pytest.mark.parametrize(("layer", "shape"), WITHOUT_A_GRADIENT.values(), ids=WITHOUT_A_GRADIENT)
def test_what_dtensor_has_no_gradient_of_trains(layer, shape):
    """Operations without a rule of DTensor's train like one device, between sharded layers, and the plan is silent."""
    make_model = model_of(lambda: [L.Dense(8, name="d"), layer(), L.Dense(8, name="e")], shape)
    layout_map = make_map({r"d\.kernel": (None, "model"), r"e\.kernel": ("model", None)})
    assert not [p for p in lm.plan(make_model, layout_map).problems if p.kind == "unsupported"]

    assert trains(make_model, layout_map, rows_of(shape), steps=1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, ::-1],
        lambda x: tf.raw_ops.ConcatV2(values=[x, 2 * x], axis=-1),
        lambda x: tf.scatter_nd(np.arange(8, dtype="int32")[::-1, None], x, (8, 16)),
    ],
    ids=["slice", "join", "rows"],
)
def test_what_would_be_wrong_in_shards_is_gathered(function):
    """TensorFlow's slices from the end, joins by a negative axis and scattered rows have the numbers of one device."""
    make_model = model_of(lambda: [L.Dense(16, name="d"), Calling(function), L.Dense(8, name="e")], (8,))
    layout_map = make_map({r"d\.kernel": (None, "model"), r"e\.kernel": ("model", None)})

    with pytest.warns(lm.LayoutMapWarning, match="gathers"):
        assert trains(make_model, layout_map, rows_of((8,)), steps=1)


@pytest.mark.parametrize("equation", ["abc,bcz->az", "abc,bdz->adzc"])
def test_a_product_whose_operands_shard_two_axes_over_one_dim_is_right(equation):
    """DTensor multiplies the wrong shards, silently, where it sums over both axes; the model trains like one device."""
    shape = (8, 4, 12) if equation.endswith("c") else (12,)
    layers = lambda: [L.Dense(12, name="d"), L.EinsumDense(equation, shape, name="e")]  # noqa: E731
    layout_map = make_map({r"d\.bias": ("model",), r"e\.kernel": ("model", None, None)})

    assert trains(model_of(layers, (8, 12), rate=0.01), layout_map, rows_of((8, 12)))


@pytest.mark.long
def test_a_gradient_of_ten_axes_is_not_gathered():
    """A drawn model whose queries share keys trains; gradients of tiles have more axes than DTensor gathers."""
    case = models.draw(20261129073).to_sgd()
    assert "GroupQueryAttention" in case.program_lines
    options = {"steps": 1, "batch_dim": case.map.batch_dim}

    assert lm.check_parity(case.make_model, case.layout_map, case.batch, **options).agrees


def test_tensors_that_a_layer_keeps_are_placed():
    """A plain tensor that a compiled step reads, such as a mean to be subtracted, is replicated on the mesh."""

    class Centering(L.Layer):
        def build(self, shape):
            self.mean, self.scales = tf.range(8.0), tf.constant([[2.0], [0.5]])

        def call(self, x):
            return (x - self.mean) * self.scales[0]

    layout_map = make_map({r"d\.kernel": (None, "model")})

    assert trains(model_of(lambda: [L.Dense(8, name="d"), Centering()], (8,)), layout_map, rows_of((8,)))


def test_a_dim_of_one_device_shards_nothing():
    """A convolution computes whose kernel is over a mesh dim of size 1, in the layout that the rule says."""
    rules = {r"c\.kernel": (None, "batch", None, None)}
    with lm.LayoutMap("batch=1,model=8", rules, rest="replicated").scope(batch_dim="batch"):
        model = keras.Sequential([keras.Input(IMAGE), L.Conv2D(8, 3, name="c"), L.Dense(8)])
    plain = keras.models.clone_model(model)
    plain.set_weights(model.get_weights())
    x, _ = rows_of(IMAGE)

    np.testing.assert_allclose(plain.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-5)
    assert ("unsharded", "batch", "unsharded", "unsharded") == model.get_layer(
        "c"
    ).kernel.layout.sharding_specs


@pytest.mark.long
@pytest.mark.parametrize("name", ["mixtral", "vit"])
def test_a_family_of_keras_hub_that_needs_gathering_trains(name):
    """Under the preset of its family, a small one trains like one device."""
    config = hub_models.TINY[name] | {"num_layers": 1}
    report = lm.check_parity(
        lambda: hub_models.make(name, config),
        hub_models.rules(name),
        hub_models.batch(name),
        steps=1,
        batch_dim="batch",
    )

    assert report.agrees


def test_joining_along_a_sharded_axis_is_right():
    """What is joined along the last axis, by its negative number, for a weight that shards it, is in its order."""

    def make_model():
        x = keras.Input((16,))
        model = keras.Model(x, L.Dense(8, name="d", use_bias=False)(L.Concatenate()([x, x])))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    random = np.random.default_rng(0)
    rows = random.normal(size=(24, 16)).astype("float32"), random.normal(size=(24, 8)).astype("float32")
    layout_map = lm.LayoutMap("model=8", {r"d\.kernel": ("model", None)})

    assert lm.check_parity(make_model, layout_map, rows, steps=1).agrees


@pytest.mark.parametrize("how", ["fit", "predict", "call"])
def test_what_nobody_knew_is_explained_in_words(how):
    """A layer of one's own that DTensor cannot run ends in one of our errors, and no compiler text stands above it."""

    class Running(L.Layer):
        def call(self, x):
            return tf.scan(lambda carry, row: carry + row, x)

    model = make_map({r"out\.kernel": ("model", None)}).build(model_of(lambda: [Running(name="own")], (8,)))
    x, y = rows_of((8,))
    use = {
        "fit": lambda: model.fit(x, y, verbose=0),
        "predict": lambda: model.predict(x),
        "call": lambda: model(x),
    }
    if how == "call":
        assert (8, 4) == use[how]().shape  # op by op there is no loop to compile
        return
    with pytest.raises(lm.EngineError) as caught:
        use[how]()

    first = str(caught.value).splitlines()[0]
    assert first.endswith("step cannot be run by TensorFlow's DTensor")
    assert all(word in str(caught.value) for word in ("  operation ", "  TensorFlow ", "  why ", "  fix "))
    assert re.search("in +own, near out.kernel", str(caught.value), re.MULTILINE)


def test_an_axis_over_two_dims_is_sharded_over_the_larger_one():
    """It trains like one device, in the layout of the plan, which warns of each such weight and layer's output."""

    def make_model():
        model = keras.Sequential([keras.Input((8,)), L.Dense(16, name="d1"), L.Dense(8, name="out")])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        return model

    layout_map = make_map({r".*kernel": (("batch", "model"), None), r".*bias": (("model", "batch"),)})
    layout_map.activations["d1$"] = (None, ("batch", "model"))
    random = np.random.default_rng(0)
    rows = random.normal(size=(8, 8)).astype("float32"), random.normal(size=(8, 8)).astype("float32")
    plan = lm.plan(make_model, layout_map)
    warned = [problem for problem in plan.problems if problem.kind == "unsupported layout"]

    assert {"warning"} == {problem.severity for problem in warned}
    assert sorted(p.subject for p in warned) == ["d1", "d1.bias", "d1.kernel", "out.bias", "out.kernel"]
    assert all("sharded over model only" in problem.what and problem.fix for problem in warned)
    assert lm.check_parity(make_model, layout_map, rows, steps=2, batch_dim="batch").agrees
    kernel = layout_map.build(make_model, batch_dim="batch").get_layer("d1").kernel
    assert kernel.layout == {a.variable.path: a.layout for a in plan.assignments}["d1.kernel"]
    assert ("model", "unsharded") == kernel.layout.sharding_specs
    with pytest.raises(lm.PlanError, match="sharded over model only"):
        layout_map.build(make_model, strict=True)


def test_dtensor_itself_still_cannot():
    """What is worked around fails in plain DTensor, or is wrong: when this test fails, TensorFlow has fixed it."""
    mesh = dtensor.create_mesh([("batch", 2), ("model", 4)], devices=[f"CPU:{i}" for i in range(8)])
    image = dtensor.relayout(tf.ones((8, 6, 6, 4)), dtensor.Layout.batch_sharded(mesh, "batch", 4))
    kernel = dtensor.relayout(tf.ones((3, 3, 4, 8)), dtensor.Layout.inner_sharded(mesh, "model", 4))
    rows = dtensor.relayout(tf.ones((4, 8)), dtensor.Layout.replicated(mesh, 2))
    with pytest.raises(tf.errors.UnknownError, match="fully replicated layout"):
        tf.function(lambda a, b: tf.nn.conv2d(a, b, 1, "SAME"))(image, kernel)
    with pytest.raises(tf.errors.UnknownError, match="does not implement layout propagation"):
        tf.function(lambda a: tf.scan(lambda carry, row: carry + row, a))(rows)
    both = tf.function(
        lambda a: dtensor.relayout(tf.concat([a, 2 * a], -1), dtensor.Layout.inner_sharded(mesh, "model", 2))
    )
    joined = dtensor.relayout(both(rows), dtensor.Layout.replicated(mesh, 2)).numpy()
    assert not np.array_equal(np.concatenate([np.ones((4, 8)), 2 * np.ones((4, 8))], -1), joined)
