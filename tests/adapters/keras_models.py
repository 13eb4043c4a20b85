"""Small Keras models of every style, for the tests of the adapter."""

import gc
import inspect
import os

import keras
import numpy as np
from keras.src.backend import compute_output_spec

from layoutmap.adapters.keras.private import CommonVariable
from layoutmap.engines import get_engine

L = keras.layers


class Block(L.Layer):
    """What real models have: attention, normalization with state, dropout, a regularized dense layer."""

    def __init__(self):
        super().__init__()
        self.norm = L.LayerNormalization()
        self.attention = L.MultiHeadAttention(8, 2)
        self.up = L.Dense(32, activation="gelu", kernel_regularizer="l2")
        self.state = L.BatchNormalization()
        self.drop = L.Dropout(0.1, seed=5)
        self.down = L.Dense(16)

    def call(self, x, training=None):
        y = self.norm(x)
        x = x + self.attention(y, y)
        return x + self.down(self.drop(self.state(self.up(x), training=training), training=training))


class Subclassed(keras.Model):
    """Layers in attributes, a list and a dict."""

    def __init__(self):
        super().__init__()
        self.tokens = L.Embedding(64, 16)
        self.blocks = [Block(), Block()]
        self.heads = {"main": L.Dense(64)}

    def call(self, x, training=None):
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x, training=training)
        return self.heads["main"](x)


def compiled(model):
    """The model, ready to train."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9), loss=loss)
    return model


def subclassed():
    model = compiled(Subclassed())
    model(keras.Input((8,), dtype="int32"))
    return model


def functional():
    x = keras.Input((16,), name="x")
    shared = L.Dense(16, name="shared", activation="relu")
    inner = keras.Sequential(
        [L.Dense(32, name="in1", activation="relu"), L.Dense(16, name="in2")], name="inner"
    )
    y = shared(shared(x))
    y = L.Add(name="add")([y, inner(y)])
    return compiled(keras.Model(x, L.Dense(64, name="out")(y), name="functional"))


def sequential():
    layers = [
        keras.Input((16,)),
        L.Dense(32, name="d1"),
        L.BatchNormalization(name="bn"),
        L.Dense(64, name="d2"),
    ]
    return compiled(keras.Sequential(layers))


MODELS = {"subclassed": subclassed, "functional": functional, "sequential": sequential}


def one_model():
    """What laws about one model look at, and its name: on JAX, and in `make test-all`, the one with most layers."""
    name = "subclassed" if ON_JAX or os.environ.get("LAYOUTMAP_TEST_ALL") else "sequential"
    return name, MODELS[name]


RULES = {
    "subclassed": {
        r"tokens\.embeddings": ("model", None),
        r".*\.attention\.(query|key|value)_dense\.kernel": (None, "model", None),
        r".*\.attention\.output_dense\.kernel": ("model", None, None),
        r".*\.up\.(kernel)$": (None, "model"),
        r".*\.down\.kernel$": ("model", "batch"),
        r".*\.state\.(gamma|beta|moving_mean|moving_variance)": ("model",),
        r"heads\.main\.kernel": ("batch", "model"),
    },
    "functional": {
        r"(shared|out|inner\.in1)\.kernel": (None, "model"),
        r"inner\.in2\.kernel": ("model", None),
        r"out\.bias": ("model",),
    },
    "sequential": {r"d\d\.kernel": ("batch", "model"), r"bn\..*": ("model",), r"d1\.bias": ("model",)},
}


def batch(name, rows=8):
    """Inputs and targets."""
    random = np.random.default_rng(0)
    if name == "subclassed":
        return random.integers(0, 64, (rows, 8), "int32"), random.integers(0, 64, (rows, 8), "int32")
    return random.normal(size=(rows, 16)).astype("float32"), random.integers(0, 64, (rows,), "int32")


def hooked():
    """Every attribute of Keras's classes that a scope could replace, as it is now."""
    kinds = (keras.Variable, keras.layers.Dense, keras.Sequential, keras.Model, keras.optimizers.Adam)
    classes = {base for kind in kinds for base in kind.__mro__ if base is not object}
    names = {f"{c.__module__}.{c.__qualname__}.{n}": value for c in classes for n, value in vars(c).items()}
    module = inspect.getmodule(CommonVariable)
    return names | {f"module.{name}": value for name, value in vars(module).items()}


def assert_held(variable):
    """The devices hold the shards of the variable's layout and nothing else."""
    shape, layout = tuple(variable.shape), variable.layout
    shards = get_engine(keras.backend.backend()).iterate_shards(variable.value)

    assert {str(layout.shard_slices(shape, i)) for i in range(layout.mesh.size)} == {
        str(i) for i, _ in shards
    }


def symbolic_function(function):
    """A function that Keras calls with symbols, as it does to find out shapes."""
    return lambda: compute_output_spec(function)


ON_JAX = keras.backend.backend() == "jax"
ON_TORCH = keras.backend.backend() == "torch"
if ON_JAX:
    import jax

    def num_arrays():
        """How many arrays are alive."""
        jax.numpy.add(0, 0)  # whatever JAX makes on its first use
        return len(jax.live_arrays())

    compiled_function = jax.jit

    def is_traced(value):
        """Whether it is made in a compiled function's trace."""
        return isinstance(value, jax.core.Tracer)

elif ON_TORCH:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from layoutmap.engines.torch.modes import list_dispatch_modes

    def num_arrays():
        """How many tensors are alive, but for those in which torch keeps the ranks of a mesh once it has made it."""
        things = gc.get_objects()
        of_meshes = [
            t
            for m in things
            if type(m) is DeviceMesh
            for t in vars(m).values()
            if isinstance(t, torch.Tensor)
        ]
        kept = {id(t) for ranks in of_meshes for t in (ranks, ranks._base)}
        return sum(issubclass(type(thing), torch.Tensor) and id(thing) not in kept for thing in things)

    def compiled_function(function):
        """A function whose tensors cannot be trained: what is made in it for later is not to be one of them."""
        return torch.inference_mode()(function)

    def is_traced(value):
        """Whether it is made while a tape records, or has no values."""
        return value.is_meta or any("interception" in type(mode).__module__ for mode in list_dispatch_modes())

else:
    import tensorflow as tf

    def num_arrays():
        """How many tensors and variables are alive."""
        return sum(isinstance(thing, (tf.Tensor, tf.Variable)) for thing in gc.get_objects())

    def compiled_function(function):
        """As `jax.jit`."""
        return tf.function(function, autograph=False)

    def is_traced(value):
        """Whether it is made in a compiled function's trace."""
        return tf.is_symbolic_tensor(value)
