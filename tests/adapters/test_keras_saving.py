"""Saving and loading Keras models in layouts: every value once, to its device only, and all or nothing."""

import collections
import contextlib
import gc
import os
import tracemalloc

import h5py
import keras
import ml_dtypes
import numpy as np
import pytest
from keras_models import ON_JAX, ON_TORCH, assert_held, is_traced
from quiet import OF_ARRAYS, OF_MAPS

import layoutmap as lm
from layoutmap.adapters.keras import session
from layoutmap.adapters.keras.paths import find_variables, iterate_public_attributes
from layoutmap.adapters.keras.wraps import get_session

PROCESSES = ("jax", "tensorflow", "torch")
L = keras.layers
pytestmark = [OF_MAPS, OF_ARRAYS]
RULES = {r"d1\.kernel": (None, "model"), r"d2\.kernel": ("model", "batch"), r"norm\..*": ("model",)}


@keras.saving.register_keras_serializable("layoutmap.tests")
class Doubling(L.Layer):
    """A layer that saves and loads in its own way, and remembers what it has loaded."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), name="scale", initializer="ones")

    def call(self, x):
        return x * self.scale

    def save_own_variables(self, store):
        store["half"] = keras.ops.convert_to_numpy(self.scale) / 2

    def load_own_variables(self, store):
        self.loaded = half = store["half"]
        self.scale.assign(2 * half)


def make_model(units=64, optimizer="adam"):
    layers = [
        keras.Input((16,)),
        L.Dense(32, name="d1"),
        L.BatchNormalization(name="norm"),
        Doubling(name="own"),
        L.Dense(units, name="d2"),
    ]
    model = keras.Sequential(layers)
    model.compile(optimizer, "mse")
    return model


def make_map():
    return lm.LayoutMap(lm.create_mesh("batch=2,model=4"), RULES)


def everything(model):
    return [*model.variables, *model.optimizer.variables]


def values(model):
    return [v.numpy() for v in everything(model)]


def assert_same(expected, actual):
    for number, (a, b) in enumerate(zip(expected, actual, strict=True)):
        assert np.array_equal(a, b), number


def built(**options):
    """A model with its slots, in layouts, each of its variables with values of its own."""
    with make_map().scope():
        model = make_model(**options)
        model.optimizer.build(model.trainable_variables)
    random = np.random.default_rng(1)
    for variable in everything(model):
        value = random.uniform(1, 9, variable.shape)
        variable.assign(value.astype(keras.backend.standardize_dtype(variable.dtype)))
    return model


def warned_of_loading():
    return pytest.warns(lm.LayoutMapWarning, match="is loaded outside of a scope")


def load_in_scope(path, **options):
    with make_map().scope():
        if path.endswith(".keras"):
            return keras.models.load_model(path)
        model = make_model(**options)
        model.optimizer.build(model.trainable_variables)
        model.load_weights(path)
    return model


def load_after_scope(path, **options):
    with make_map().scope():
        model = make_model(**options)
        model.optimizer.build(model.trainable_variables)
    model.load_weights(path)
    return model


SAVED = {
    "m.keras": lambda model, path: model.save(path),
    "m.weights.h5": lambda model, path: model.save_weights(path),
    "m.weights.json": lambda model, path: model.save_weights(path, max_shard_size=1e-5),
}


@pytest.fixture
def reads(monkeypatch):
    """How often each element of a dataset is read, and the largest piece that is read in one go."""
    counts, sizes = {}, collections.Counter()
    plain, plain_array = h5py.Dataset.__getitem__, h5py.Dataset.__array__

    def noted(dataset, index, result):
        name = f"{os.path.basename(str(dataset.file.filename))[-20:]}{dataset.name}"
        counts.setdefault(name, np.zeros(dataset.shape, int))[index] += 1
        sizes[name] = max(sizes[name], np.size(result))
        return result

    monkeypatch.setattr(h5py.Dataset, "__getitem__", lambda d, i: noted(d, i, plain(d, i)))
    monkeypatch.setattr(h5py.Dataset, "__array__", lambda d, *a, **k: noted(d, (), plain_array(d, *a, **k)))
    return counts, sizes


@pytest.fixture
def draws(monkeypatch):
    """How often an initializer runs."""
    drawn = []

    def noted(initializer, value):
        if not is_traced(value):  # as Keras does to find out shapes
            drawn.append(initializer)
        return value

    for kind in (keras.initializers.GlorotUniform, keras.initializers.Zeros, keras.initializers.Ones):
        plain = kind.__call__
        monkeypatch.setattr(
            kind, "__call__", lambda self, *a, plain=plain, **k: noted(self, plain(self, *a, **k))
        )
    return drawn


@pytest.mark.parametrize("name", SAVED)
def test_loading_in_a_scope_reads_each_value_once_and_draws_nothing(name, tmp_path, reads, draws):
    """Weights and slots come from the file, each element read once and in shards, and no initializer runs."""
    model, path = built(), str(tmp_path / name)
    SAVED[name](model, path)
    expected = values(model)
    layouts = [v.layout for v in everything(model)]
    counts, sizes = reads
    counts.clear()
    draws.clear()
    loaded = load_in_scope(path)

    assert [] == draws
    assert len(expected) <= len(counts)  # a dataset for each variable, and more files than one may have two
    assert {1} == {int(n) for each in counts.values() for n in each.flat}
    assert 16 * 32 // 4 == max(n for name, n in sizes.items() if name.endswith("layers/dense/vars/0"))
    assert_same(expected, values(loaded))
    assert layouts == [v.layout for v in everything(loaded)]
    for variable in everything(loaded):
        assert_held(variable)
    assert isinstance(np.asarray(loaded.layers[2].loaded).sum(), np.floating)  # what was kept is in memory


def test_loading_looks_through_a_model_as_often_whatever_its_layers(tmp_path, monkeypatch):
    """What is done once for a model is not done again for each layer whose weights are read."""
    looks = collections.Counter()
    plain = session.describe_variables

    def counted(registry):
        looks[depth] += 1
        return plain(registry)

    monkeypatch.setattr(session, "describe_variables", counted)
    for depth in (2, 8):
        path = str(tmp_path / f"{depth}.keras")
        keras.Sequential([keras.Input((4,)), *(L.Dense(4) for _ in range(depth))]).save(path)
        with make_map().scope():
            keras.models.load_model(path)
    assert looks[2] == looks[8]


def test_what_a_scope_keeps_of_a_layer_is_not_searched():
    """A look for variables does not go through the engine, with all that it remembers of other models."""
    layer = built().layers[0]
    assert get_session(layer) is not None
    assert [] == [name for name, value in iterate_public_attributes(layer) if value is get_session(layer)]


def with_lora(layer):
    layer.enable_lora(2)


def in_four_bits(layer):
    layer.quantize("int4", config=keras.quantizers.Int4QuantizationConfig(block_size=-1))


def in_eight_bits(layer):
    config = keras.quantizers.Int8QuantizationConfig(activation_quantizer=None)
    layer.quantize("int8", config=None if isinstance(layer, L.Embedding) else config)


def in_float8(layer):
    if not isinstance(layer, L.Embedding):
        layer.quantize("float8")


@pytest.mark.every_backend
# Torch, of the histories of float8
@pytest.mark.filterwarnings("ignore:Found a non-scalar tensor with numel=1")
@pytest.mark.parametrize("change", [with_lora, in_four_bits, in_eight_bits, in_float8])
@pytest.mark.parametrize("file", ["model.h5", "model.keras", "model.weights.h5"])
def test_a_kernel_that_is_computed_is_saved(file, change, tmp_path):
    """Keras saves a kernel together with its LoRA factors: a plain model has the values then, and so has this one."""
    if change is in_float8 and file == "model.h5":
        pytest.skip(
            "plain Keras does not load it either: it reads the weights in another order than it writes them"
        )

    def make_model():
        layers = [
            L.Embedding(8, 16, name="e"),
            L.EinsumDense("abc,cd->abd", (2, 8), name="s"),
            L.Dense(4, name="d"),
        ]
        model = keras.Sequential([keras.Input((2,), dtype="int32"), *layers])
        for layer in layers:
            change(layer)
        model.compile(keras.optimizers.SGD(0.5), keras.losses.MeanSquaredError())
        return model

    def load(path):
        if ".weights." not in file:
            return keras.models.load_model(path)
        model = make_model()
        model.load_weights(path)
        return model

    rules = {r".*\.(kernel|embeddings)$": (None, "model")}
    layout_map = lm.LayoutMap("batch=2,model=4", rules, rest="replicated")
    model = layout_map.build(make_model, batch_dim="batch")
    x, y = np.arange(16, dtype="int32").reshape(8, 2) % 8, np.ones((8, 2, 4), "float32")
    model.fit(x, y, epochs=2, verbose=0)
    expected, kernel = model.predict(x, verbose=0), model.get_layer("d").kernel
    for number in range(2):  # a plain model saves what it has loaded
        path = tmp_path / f"{number}{file}"
        (model.save_weights if ".weights." in file else model.save)(path)
        from_layouts = number == 0 and file == "model.keras"
        with warned_of_loading() if from_layouts else contextlib.nullcontext():
            plain = load(path)
        read = [plain, layout_map.build(lambda path=path: load(path), batch_dim="batch")]
        model.load_weights(path)
        for each in (*read, model):
            np.testing.assert_allclose(expected, each.predict(x, verbose=0), atol=1e-6)
        model = read[0]
    if keras.backend.backend() != "tensorflow":  # whose tensors on a mesh are no arrays for numpy
        kernels = map(keras.ops.convert_to_numpy, (model.get_layer("d").kernel, kernel))
        np.testing.assert_allclose(*kernels, atol=1e-6)


def test_a_loaded_model_trains_on(tmp_path):
    """A compiled model that is loaded in a scope takes the next steps of the plain one."""
    path = str(tmp_path / "m.keras")
    random = np.random.default_rng(0)
    x, y = random.normal(size=(8, 16)).astype("float32"), random.normal(size=(8, 64)).astype("float32")
    keras.utils.set_random_seed(1)
    plain = make_model()
    plain.train_on_batch(x, y)
    plain.save(path)
    with make_map().scope(batch_dim="batch"):
        loaded = keras.models.load_model(path)
    steps = [(plain.train_on_batch(x, y), loaded.train_on_batch(x, y)) for _ in range(2)]

    np.testing.assert_allclose(*np.transpose(steps), rtol=1e-5)
    assert make_map()["d1.kernel"] == loaded.layers[0].kernel.layout
    assert_held(loaded.layers[0].kernel)


def pieces_alive():
    """The number of elements of the largest piece that a device holds."""
    if ON_JAX:
        import jax

        return max((s.data.size for a in jax.live_arrays() for s in a.addressable_shards), default=0)
    if ON_TORCH:
        import torch

        kinds = (torch.Tensor, torch.nn.Parameter)
        return max((t.numel() for t in gc.get_objects() if type(t) in kinds), default=0)
    import tensorflow as tf

    dtensor = tf.experimental.dtensor
    things = gc.get_objects()
    tensors = [t for t in things if isinstance(t, tf.Tensor) and not tf.is_symbolic_tensor(t)]
    return max((t.shape.num_elements() for t in tensors if not dtensor.is_dtensor(t)), default=0)


@pytest.mark.parametrize("load", [load_in_scope, load_after_scope])
def test_no_device_holds_more_than_a_shard_while_weights_are_loaded(load, tmp_path, monkeypatch):
    """Also where a variable has its value already, what is loaded never lies whole on a device."""
    path = str(tmp_path / "m.weights.h5")
    built(optimizer="sgd").save_weights(path)
    keras.utils.clear_session()
    gc.collect()
    before, seen = pieces_alive(), []
    plain, plain_equal = h5py.Dataset.__getitem__, keras.src.backend.common.variables.shape_equal

    def look(shape):
        if len(shape) == 2:
            seen.append(pieces_alive())

    def read(dataset, index):
        look(dataset.shape)
        return plain(dataset, index)

    def equal(value, variable):  # Keras asks when the value is on its device
        look(value)
        return plain_equal(value, variable)

    monkeypatch.setattr(h5py.Dataset, "__getitem__", read)
    monkeypatch.setattr(keras.src.backend.common.variables, "shape_equal", equal)
    load(path, optimizer="sgd")

    assert 12 <= len(seen)
    assert max(16 * 32 // 4, 32 * 64 // 8, before) >= max(seen)


def test_setting_weights_from_numpy_puts_no_global_value_on_a_device(monkeypatch):
    """`set_weights` and `assign` shard a numpy array on the host, and each device gets its shard."""
    model = built(optimizer="sgd")
    seen = []
    plain_equal = keras.src.backend.common.variables.shape_equal
    monkeypatch.setattr(
        keras.src.backend.common.variables,
        "shape_equal",
        lambda *args: (seen.append(pieces_alive()), plain_equal(*args))[1],
    )
    new = [np.full(w.shape, 3, w.dtype) for w in model.get_weights()]
    gc.collect()
    before = pieces_alive()
    model.set_weights(new)

    assert_same(new, model.get_weights())
    assert len(new) <= len(seen)
    assert max(before, 32 * 64 // 8) >= max(seen)
    assert_held(model.layers[0].kernel)


def test_saving_holds_one_variable_at_a_time(tmp_path):
    """While a model is saved the host holds the values of one variable, and none of them afterwards."""
    rules = {r"d\d\.kernel": (None, "model")}
    layers = [keras.Input((256,)), *(L.Dense(256, name=f"d{i}") for i in range(8))]
    model = lm.LayoutMap(lm.create_mesh("model=4"), rules).build(lambda: keras.Sequential(layers))
    nbytes = model.layers[0].kernel.numpy().nbytes
    model.save_weights(tmp_path / "first.weights.h5")  # whatever is made on a first use
    for layer in model.layers:
        layer.kernel.assign(np.ones((256, 256), "float32"))
    gc.collect()
    tracemalloc.start()
    try:
        model.save_weights(tmp_path / "m.weights.h5")
        gc.collect()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert nbytes < peak < 4 * nbytes  # of the 8; numpy and HDF5 each make a copy of one
    assert after < nbytes


def test_a_file_of_another_model_changes_nothing(tmp_path):
    """All shapes are looked at first: the error names each variable that differs, and every value stays."""
    path = str(tmp_path / "m.weights.h5")
    built().save_weights(path)
    model = built(units=32)
    before = values(model)
    with pytest.raises(lm.LayoutError) as caught:
        model.load_weights(path)
    slots = [
        f"optimizer.d2.{weight}.{kind}" for weight in ("kernel", "bias") for kind in ("momentum", "velocity")
    ]

    assert f"{path}: 6 variables of the model have a different shape in the file" == caught.value.what
    assert {"d2.kernel", "d2.bias", *slots} == set(caught.value.facts)
    assert "(32, 32), in the file (32, 64)" == caught.value.facts["d2.kernel"]
    assert_same(before, values(model))
    assert "nothing was loaded" in str(caught.value)


def test_a_file_of_another_model_changes_no_layer_of_another_scope(tmp_path):
    """Layers of a model that another scope has made are looked at first, too."""
    path = str(tmp_path / "m.weights.h5")
    keras.Sequential([keras.Input((16,)), L.Dense(32, name="d1"), L.Dense(8, name="d2")]).save_weights(path)
    with make_map().scope():
        first = L.Dense(32, name="d1")
        first.build((None, 16))
    before = first.kernel.numpy()
    with make_map().scope():
        model = keras.Sequential([keras.Input((16,)), first, L.Dense(64, name="d2")])
    with pytest.raises(lm.LayoutError, match=r"d2\.kernel"):
        model.load_weights(path)

    assert np.array_equal(before, first.kernel.numpy())


def test_mismatches_can_be_skipped(tmp_path):
    """With `skip_mismatch` layers that fit are loaded, the others keep their values, and Keras warns."""
    path = str(tmp_path / "m.weights.h5")
    saved = built()
    saved.save_weights(path)
    model = built(units=32)
    kept = model.layers[3].kernel.numpy()
    with pytest.warns(UserWarning, match="the value has a different shape") as caught:
        model.load_weights(path, skip_mismatch=True)

    assert f"{path}:/layers/dense_1/vars/0" in "".join(str(w.message) for w in caught)
    assert np.array_equal(kept, model.layers[3].kernel.numpy())
    assert np.array_equal(saved.layers[0].kernel.numpy(), model.layers[0].kernel.numpy())


@pytest.mark.parametrize("name", SAVED)
def test_a_broken_file_changes_nothing(name, tmp_path):
    """A file that ends too early is an error, and the model keeps its values and works."""
    path = str(tmp_path / name)
    model = built()
    SAVED[name](model, path)
    broken = path if name != "m.weights.json" else str(tmp_path / "m_00000.weights.h5")
    with open(broken, "r+b") as file:
        file.truncate(os.path.getsize(broken) // 2)
    before = values(model)
    with pytest.raises(Exception, match=r"truncated|zip"):
        model.load_weights(path)

    assert_same(before, values(model))
    assert np.isfinite(model.predict(np.ones((2, 16), "float32"), verbose=0)).all()


@pytest.mark.parametrize("where", ["in the scope", "after it"])
def test_an_interrupt_while_weights_are_loaded(where, tmp_path, monkeypatch):
    """Control-C leaves each variable with its first value or that of the file, and a model that works."""
    path = str(tmp_path / "m.weights.h5")
    expected = built()
    expected.save_weights(path)
    keras.utils.set_random_seed(3)
    first = [v.numpy() for v in make_model().variables]
    plain = h5py.Dataset.__getitem__
    count = 0

    def interrupt(dataset, index):
        nonlocal count
        count += 1
        if count == 7:
            raise KeyboardInterrupt
        return plain(dataset, index)

    keras.utils.set_random_seed(3)
    if where == "in the scope":
        with pytest.raises(KeyboardInterrupt), make_map().scope():  # noqa: PT012
            model = make_model()
            monkeypatch.setattr(h5py.Dataset, "__getitem__", interrupt)
            model.load_weights(path)
    else:
        with make_map().scope():
            model = make_model()
        monkeypatch.setattr(h5py.Dataset, "__getitem__", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.load_weights(path)
    monkeypatch.undo()
    loaded = [
        np.array_equal(now.numpy(), new.numpy())
        for now, new in zip(model.variables, expected.variables, strict=True)
    ]
    kept = [np.array_equal(now.numpy(), old) for now, old in zip(model.variables, first, strict=True)]

    assert all(a or b for a, b in zip(loaded, kept, strict=True))
    assert any(loaded)
    assert not all(loaded)
    assert np.isfinite(model.predict(np.ones((2, 16), "float32"), verbose=0)).all()
    assert all(make_map()[f.path] in (None, f.variable.layout) for f in find_variables(model))


@pytest.mark.parametrize("policy", ["bfloat16", "float16", "mixed_bfloat16"])
def test_values_are_cast_as_keras_casts_them(policy, tmp_path):
    """A file of float32, and arrays of other types, become the bits of the plain model."""
    path = str(tmp_path / "m.weights.h5")

    def make(dtype="float32"):
        return keras.Sequential([keras.Input((16,)), L.Dense(32, name="d1", dtype=dtype)])

    make().save_weights(path)
    plain = make(policy)
    model = make_map().build(lambda: make(policy))
    random = np.random.default_rng(0)
    given = [
        random.normal(size=(16, 32)),
        random.integers(-9, 9, (16, 32)),
        random.integers(0, 2, (16, 32)) > 0,
    ]
    given.append(given[0].astype(ml_dtypes.bfloat16))
    for step in (
        lambda m: m.load_weights(path),
        *(lambda m, v=v: m.layers[0].kernel.assign(v) for v in given),
    ):
        step(plain)
        step(model)
        held = model.layers[0].kernel

        assert keras.ops.convert_to_numpy(plain.layers[0].kernel).tobytes() == held.numpy().tobytes()
        assert_held(held)
    again = make_map().build(lambda: make(policy))
    model.save_weights(path)
    again.load_weights(path)
    assert model.layers[0].kernel.numpy().tobytes() == again.layers[0].kernel.numpy().tobytes()


def test_files_of_keras_2s_kind_are_loaded(tmp_path):
    """A legacy `.h5` file of a whole model loads in a scope, values and layouts; Keras itself reads it."""
    plain = keras.Sequential([keras.Input((16,)), L.Dense(32, name="d1"), L.Dense(64, name="d2")])
    path = str(tmp_path / "m.h5")
    plain.save(path)
    with make_map().scope():
        model = keras.models.load_model(path, compile=False)
        other = keras.Sequential([keras.Input((16,)), L.Dense(32, name="d1"), L.Dense(64, name="d2")])
        other.load_weights(path)

    for each in (model, other):
        assert_same(plain.get_weights(), each.get_weights())
        assert make_map()["d2.kernel"] == each.layers[1].kernel.layout


def test_a_plan_that_does_not_fit_is_reported_before_a_file_is_read(tmp_path, reads):
    """Rules are checked before the first value comes out of a file."""
    path = str(tmp_path / "m.keras")
    built().save(path)
    reads[0].clear()
    rules = {r"d2\.kernel": (None, None, "model")}
    with (
        pytest.raises(ValueError, match="a layout of rank 3 does not fit a tensor of rank 2"),
        lm.LayoutMap(lm.create_mesh("model=4"), rules).scope(),
    ):
        keras.models.load_model(path)

    assert {} == reads[0]


def test_a_value_of_another_shape_is_refused():
    """`assign` says which variable, and both shapes, before anything is moved."""
    model = built()
    kernel = model.layers[0].kernel
    before = kernel.numpy()
    with pytest.raises(lm.LayoutError) as caught:
        kernel.assign(np.ones((16, 33)))

    assert "d1.kernel: the value has a different shape than the variable" == caught.value.what
    assert {"variable": (16, 32), "value": (16, 33), "from": ""} == caught.value.facts
    assert np.array_equal(before, kernel.numpy())


def test_a_dataset_can_be_assigned(tmp_path, reads):
    """A variable takes an `h5py.Dataset` as it is, and reads of it what its devices hold."""
    value = np.arange(16 * 32, dtype="float32").reshape(16, 32)
    kernel = built().layers[0].kernel
    with h5py.File(tmp_path / "a.h5", "w") as file:
        kernel.assign(file.create_dataset("a", data=value))

    assert np.array_equal(value, kernel.numpy())
    assert [16 * 8] == list(reads[1].values())
