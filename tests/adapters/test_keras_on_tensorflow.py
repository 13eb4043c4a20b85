"""What only Keras on TensorFlow can do: `tf.data`, loops with a `GradientTape`, checkpoints, SavedModels."""

import contextlib
import math

import forked
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_models import assert_held, batch, compiled
from quiet import OF_ARRAYS, OF_MAPS
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import layoutmap as lm

PROCESSES = ("tensorflow",)
L = keras.layers
pytestmark = [OF_MAPS, OF_ARRAYS]
MESH = "batch=2,model=4"
RULES = {r"d1\.kernel": (None, "model"), r"d2\.kernel": ("model", "batch"), r"d1\.bias": ("model",)}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp():
    layers = [keras.Input((16,)), L.Dense(32, name="d1", activation="relu"), L.Dense(64, name="d2")]
    return keras.Sequential(layers)


def make_map():
    return lm.LayoutMap(lm.create_mesh(MESH), RULES)


def scoped(make=mlp, **options):
    keras.utils.set_random_seed(1)
    with make_map().scope(batch_dim="batch", **options):
        return make()


def plain(make=mlp):
    keras.utils.set_random_seed(1)
    return make()


def assert_same_weights(expected, actual, tolerance=0.0):
    for a, b in zip(expected.variables, actual.variables, strict=True):
        np.testing.assert_allclose(b.numpy(), a.numpy(), rtol=tolerance, atol=tolerance, err_msg=a.path)


def test_a_variable_is_a_dvariable():
    """A weight is a real `tf.Variable` in its layout, and can be read, printed and compared as any other."""
    kernel = scoped().layers[0].kernel

    assert isinstance(kernel.value, tf.Variable)
    assert isinstance(kernel.value, lm.DVariable)
    assert make_map()["d1.kernel"] == kernel.layout == kernel.value.layout
    assert ["unsharded", "model"] == tf.experimental.dtensor.fetch_layout(kernel.value).sharding_specs
    assert np.array_equal(plain().layers[0].kernel.numpy(), kernel.numpy())
    assert np.array_equal(kernel.numpy(), np.asarray(kernel))
    assert "d1/kernel" in repr(kernel)


@pytest.mark.parametrize("kind", ["numpy", "tensor", "list of rows"])
def test_a_model_may_be_called_with_what_one_has(kind):
    """Plain tensors in give plain tensors out, with the plain model's numbers, for any number of rows."""
    x = batch("sequential", 5)[0]
    given = {"numpy": x, "tensor": tf.constant(x), "list of rows": tf.constant(x.tolist())}[kind]
    expected, actual = plain()(given), scoped()(given)

    assert not tf.experimental.dtensor.is_dtensor(actual)
    np.testing.assert_allclose(actual.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)


def train_by_hand(model, optimizer, metric, x, y, function):
    """Three steps; their losses, the metric, and how many steps the optimizer has counted."""

    def step(x, y):
        with tf.GradientTape() as tape:
            out = model(x, training=True)
            loss = LOSS(y, out)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        metric.update_state(y, out)
        return loss

    step = function(step)
    losses = [float(step(x, y)) for _ in range(3)]
    return [*losses, float(metric.result()), int(optimizer.iterations.numpy())]


@pytest.mark.parametrize("how", ["eager", "tf.function"])
def test_a_loop_by_hand_with_a_tape(how):
    """A `GradientTape` loop trains like one device, and three steps count as three."""
    x, y = batch("sequential")

    def parts():
        model = mlp()
        optimizer, metric = keras.optimizers.Adam(1e-2), keras.metrics.SparseCategoricalAccuracy()
        optimizer.build(model.trainable_variables)
        return model, optimizer, metric

    function = tf.function if how == "tf.function" else lambda step: step
    expected_parts, actual_parts = plain(parts), scoped(parts)
    expected = train_by_hand(*expected_parts, x, y, function)
    if how == "tf.function":
        mesh = lm.create_mesh(MESH)
        x, y = (lm.dtensor.relayout(a, lm.Layout.batch_sharded(mesh, "batch", a.ndim)) for a in (x, y))
    actual = train_by_hand(*actual_parts, x, y, function)

    assert 3 == actual[-1]
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    assert_same_weights(expected_parts[0], actual_parts[0], 1e-5)
    for variable in actual_parts[0].variables:
        assert_held(variable)


@pytest.mark.parametrize("kind", ["batches", "generator", "with weights"])
def test_fit_takes_a_dataset(kind):
    """`tf.data` pipelines, with an odd last batch, give the losses and metrics of one device."""
    x, y = batch("sequential", 14)
    data = {
        "batches": lambda: tf.data.Dataset.from_tensor_slices((x, y)).batch(4).prefetch(1),
        "generator": lambda: (
            tf.data.Dataset.from_generator(
                lambda: iter(zip(x, y, strict=True)),
                output_signature=(tf.TensorSpec((16,)), tf.TensorSpec((), tf.int32)),
            )
            .batch(5)
            .apply(tf.data.experimental.assert_cardinality(3))
        ),
        "with weights": lambda: tf.data.Dataset.from_tensor_slices(
            (x, y, np.linspace(0, 1, 14, dtype="float32"))
        ).batch(6),
    }[kind]

    def train(model):
        model.compile("adam", LOSS, metrics=["accuracy"])
        history = model.fit(data(), epochs=2, verbose=0, shuffle=False).history
        return [*history["loss"], *history["accuracy"], *model.evaluate(data(), verbose=0)]

    np.testing.assert_allclose(train(scoped()), train(plain()), rtol=1e-5)


def test_compiling_with_xla_gives_the_same():
    """`jit_compile=True` changes no number; `False` is a case of test_keras_training.py."""

    def train(model):
        model.compile("sgd", LOSS, jit_compile=True)
        return [model.train_on_batch(*batch("sequential")) for _ in range(3)]

    np.testing.assert_allclose(train(scoped()), train(plain()), rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*outputs of layers are sharded:layoutmap.core.errors.LayoutMapWarning")
def test_rows_of_an_embedding_that_is_gathered_step_one_by_one():
    """Adam squares each occurrence of an index apart, as in plain Keras, also where weights are gathered."""

    class Backwards(L.Layer):
        def call(self, x):
            return x[:, ::-1]  # a slice that DTensor computes wrongly in shards

    def make_model():
        layers = [keras.Input((6,), dtype="int32"), L.Embedding(32, 8, name="e"), Backwards(), L.Flatten()]
        model = keras.Sequential([*layers, L.Dense(8, name="d1")])
        model.compile(keras.optimizers.Adam(0.01), LOSS)
        return model

    random = np.random.default_rng(0)
    x, y = random.integers(0, 4, (8, 6), "int32"), random.integers(0, 8, (8,), "int32")
    expected = plain(make_model)
    keras.utils.set_random_seed(1)
    layout_map = lm.LayoutMap(lm.create_mesh(MESH), {r"e\.embeddings": ("batch", None)})
    actual = layout_map.build(make_model, batch_dim="batch")
    for _ in range(2):
        np.testing.assert_allclose(actual.train_on_batch(x, y), expected.train_on_batch(x, y), rtol=1e-5)

    assert_same_weights(expected, actual, 1e-5)


def test_a_step_that_writes_to_a_variable_off_the_mesh_is_refused():
    """Every device would write to it: a counter would count eight for one."""

    class Counting(keras.Model):
        def __init__(self):
            super().__init__()
            self.d1 = L.Dense(64)
            self.counter = tf.Variable(0.0, name="calls")

        def call(self, x):
            self.counter.assign_add(1.0)
            return self.d1(x)

    model = scoped(lambda: compiled(Counting()))
    with pytest.raises(
        lm.ScopeError, match="calls:0: the train step writes to a variable that is not on the mesh"
    ):
        model.fit(*batch("sequential"), verbose=0)

    assert 0.0 == model.counter.numpy()


def trained(model):
    model = compiled(model)
    model.train_on_batch(*batch("sequential"))
    return model


@pytest.mark.parametrize(("source", "target"), [(scoped, plain), (plain, scoped), (scoped, scoped)])
def test_a_checkpoint_of_tensorflow_goes_both_ways(source, target, tmp_path):
    """`tf.train.Checkpoint` saves and restores weights and slots, exactly, from layouts and into them."""
    expected, actual = trained(source()), trained(target())
    layouts = [getattr(v, "layout", None) for v in actual.variables]
    actual.layers[0].kernel.assign(np.zeros((16, 32)))
    path = tf.train.Checkpoint(model=expected, optimizer=expected.optimizer).write(str(tmp_path / "c"))
    restored = tf.train.Checkpoint(model=actual, optimizer=actual.optimizer).read(path)
    restored.assert_consumed()

    assert_same_weights(expected, actual)
    assert_same_weights(expected.optimizer, actual.optimizer)
    assert layouts == [getattr(v, "layout", None) for v in actual.variables]
    if target is scoped:
        for variable in actual.variables:
            assert_held(variable)
    rows = batch("sequential")
    np.testing.assert_allclose(actual.train_on_batch(*rows), expected.train_on_batch(*rows), rtol=1e-5)


@pytest.mark.parametrize(("source", "target"), [(scoped, plain), (plain, scoped)])
@pytest.mark.parametrize("form", ["weights.h5", "keras"])
def test_files_of_keras_go_both_ways(source, target, form, tmp_path):
    """What is saved from layouts is an ordinary file, and an ordinary file is loaded into layouts."""
    expected = trained(source())
    path = tmp_path / f"model.{form}"
    if form == "keras":
        expected.save(path)
        loses = pytest.warns(lm.LayoutMapWarning, match="is loaded outside of a scope")
        with loses if target is plain else contextlib.nullcontext():
            actual = target(lambda: keras.models.load_model(path))
        assert_same_weights(expected.optimizer, actual.optimizer)
    else:
        expected.save_weights(path)
        actual = target()
        actual.load_weights(path)

    assert_same_weights(expected, actual)
    if target is scoped:
        assert make_map()["d1.kernel"] == actual.layers[0].kernel.layout
        assert_held(actual.layers[0].kernel)


def test_an_exported_model_knows_nothing_of_layouts(tmp_path):
    """`export` writes a SavedModel that a process with one device and without this library loads and runs."""
    model = trained(scoped())
    x = batch("sequential")[0]
    model.export(tmp_path / "exported", verbose=False)
    np.save(tmp_path / "x.npy", x)
    code = (
        "import sys, numpy as np, tensorflow as tf\n"
        "loaded = tf.saved_model.load(sys.argv[1] + '/exported')\n"
        "np.save(sys.argv[1] + '/y.npy', loaded.serve(np.load(sys.argv[1] + '/x.npy')).numpy())\n"
    )
    (ended,) = forked.wait_for_all([forked.start(code, [str(tmp_path)])])
    assert 0 == ended.returncode, ended.stderr

    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
    assert_held(model.layers[0].kernel)


LABEL_OUT_OF_RANGE = """
import keras
import numpy as np

import layoutmap as lm

with lm.LayoutMap(lm.create_mesh("batch=2,model=4"), {r"d\\.kernel": (None, "model")}).scope(batch_dim="batch"):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, name="d")])
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
x, y = np.ones((12, 8), "float32"), np.arange(12) % 8
wrong = np.where(np.arange(12) == 5, 99, y)
options = {"batch_size": 4, "shuffle": False, "verbose": 0}
try:
    model.fit(x, wrong, **options)
except Exception as error:
    assert "99 which is outside the valid range" in str(error), error
else:
    raise AssertionError("a label that is out of range was taken")
model.set_weights([np.zeros_like(each) for each in model.get_weights()])
model.fit(x[:4], y[:4], **options)
assert all(np.isfinite(each).all() and each.any() for each in model.get_weights())
"""


@pytest.mark.long
def test_a_step_that_fails_on_a_device_leaves_a_model_that_goes_on():
    """An error of a device in the middle of `fit` is raised; weights can be read and set, and training goes on."""
    code = forked.EIGHT_DEVICES.partition("mesh =")[0] + LABEL_OUT_OF_RANGE
    (ended,) = forked.wait_for_all([forked.start(code)])

    assert 0 == ended.returncode, ended.stderr


def test_a_weight_without_a_gradient():
    """A weight that the loss does not depend on stays as it is, and everything else trains like one device."""

    class Unused(keras.Model):
        def __init__(self):
            super().__init__()
            self.d1, self.d2 = L.Dense(64), L.Dense(64)

        def build(self, shape):
            self.d1.build(shape)
            self.d2.build(shape)
            self.built = True

        def call(self, x):
            return self.d1(x)

    with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
        report = lm.check_parity(
            lambda: compiled(Unused()), make_map(), batch("sequential"), steps=1, batch_dim="batch"
        )

    assert report.agrees


def num_collectives(model, x, y, folder):
    """How many collectives each device takes part in, in a step."""
    model.train_on_batch(x, y)
    with tf.profiler.experimental.Profile(str(folder)):
        model.train_on_batch(x, y)
    (written,) = folder.rglob("*.xplane.pb")
    planes = xplane_pb2.XSpace.FromString(written.read_bytes()).planes
    names = [p.event_metadata[e.metadata_id].name for p in planes for line in p.lines for e in line.events]
    # On a busy machine the profiler misses an event of a device.
    return math.ceil(sum(name.rpartition(":")[2] == "CollectiveReduceV2" for name in names) / 8)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "specs", [("batch", None), (None, "model")], ids=["a kernel in parts", "logits in parts"]
)
def test_a_step_gathers_what_a_layer_needs_once(specs, tmp_path):
    """One collective sums the loss and a gradient, one is beside it, and an update by slots and decay has none."""

    def make_model():
        model = keras.Sequential([keras.Input((16,)), L.Dense(8, use_bias=False, name="d1")])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1), LOSS)
        return model

    layout_map = lm.LayoutMap(lm.create_mesh(MESH), {r"d1\.kernel": specs})
    model = layout_map.build(make_model, batch_dim="batch")
    x, y = np.ones((8, 16), "float32"), np.zeros(8, "int32")

    assert 2 == num_collectives(model, x, y, tmp_path)


@pytest.mark.parametrize("how", ["eager", "tf.function"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adafactor"])
def test_an_optimizer_of_a_scope_updates_a_dvariable(name, how):
    """`apply_gradients` takes a `DVariable` as Keras's takes a `tf.Variable`, with equal numbers."""
    start, layout = np.ones((8, 4), np.float32), lm.Layout(["model", None], lm.create_mesh(MESH))
    target = np.arange(32, dtype=np.float32).reshape(8, 4) / 10
    found = []
    for variable, scope, on_mesh in (
        (tf.Variable(start), contextlib.nullcontext, contextlib.nullcontext),
        (lm.DVariable(start, layout=layout), make_map().scope, lambda: lm.dtensor.run_on(layout.mesh)),
    ):
        with scope():
            optimizer = getattr(keras.optimizers, name)(0.1)
            optimizer.build([variable])

        def step(variable=variable, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((variable - target) ** 2)
            optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])

        run = tf.function(step) if how == "tf.function" else step
        for _ in range(3):
            with on_mesh():
                run()
        found.append((variable.numpy(), optimizer.iterations.numpy()))
    (expected, _), (actual, steps) = found

    assert 3 == steps
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    assert layout == variable.layout


@pytest.mark.parametrize("kind", ["a DVariable", "a weight"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adafactor"])
def test_an_optimizer_of_no_scope_updates_eagerly_only(name, kind):
    """Each device would count the steps of a compiled function, which is refused before anything changes."""
    start, layout = np.ones((8, 4), np.float32), lm.Layout(["model", None], lm.create_mesh(MESH))
    gradient = np.arange(32, dtype=np.float32).reshape(8, 4) / 10

    def make(variable, optimizer):
        return lambda gradient: optimizer.apply_gradients([(gradient, variable)])

    def make_target():
        if kind == "a DVariable":
            return lm.DVariable(start, layout=layout)
        model = lm.LayoutMap(layout.mesh, {".*kernel": layout}).build(lambda: L.Dense(4), inputs=start.T)
        model.kernel.assign(start)
        return model.kernel

    expected, actual, refused = tf.Variable(start), make_target(), make_target()
    optimizers = [getattr(keras.optimizers, name)(0.1) for _ in range(3)]
    optimizers[2].build([refused])
    with lm.dtensor.run_on(layout.mesh):
        for _ in range(2):
            make(actual, optimizers[1])(lm.dtensor.relayout(gradient, layout))
    for _ in range(2):
        make(expected, optimizers[0])(tf.constant(gradient))
    with pytest.raises(lm.ScopeError, match=r"a tf\.function writes to a variable that is not on the mesh"):
        tf.function(make(refused, optimizers[2]))(lm.dtensor.relayout(gradient, layout))

    np.testing.assert_allclose(np.asarray(actual), expected.numpy(), rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(refused), start)


def test_a_dvariable_has_the_path_of_its_variable_as_a_name():
    """TensorFlow's name of a weight or a slot is Keras's path, however its model is made and wherever it is built."""

    def functional():
        x = keras.Input((16,))
        return keras.Model(x, L.Dense(4, name="d1")(x))

    class Subclass(keras.Model):
        def __init__(self):
            super().__init__(name="net")
            self.up = L.Dense(4, name="up")

        def call(self, x):
            return self.up(x)

    names = []
    for make in (mlp, functional, Subclass):
        model = scoped(make)
        model.compile("adam", "mse")
        model.train_on_batch(np.ones((4, 16)), np.ones((4, *model(np.ones((4, 16))).shape[1:])))
        variables = [*model.variables, *model.optimizer.variables]
        assert [f"{variable.path}:0" for variable in variables] == [v.value.name for v in variables]
        names.append(model.layers[-1].kernel.value.name)
    assert names[1:] == ["d1/kernel:0", "net/up/kernel:0"]
