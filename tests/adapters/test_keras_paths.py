"""What the variables of Keras models are called, and that every one of them gets its value and its layout."""

import re

import keras
import numpy as np
import pytest
from cases import few
from keras_models import ON_JAX
from quiet import OF_ARRAYS, OF_MAPS

import layoutmap as lm
from layoutmap.adapters.keras.paths import find_variables
from layoutmap.adapters.keras.pending import is_pending

PROCESSES = ("jax", "tensorflow", "torch")
L = keras.layers
pytestmark = [OF_MAPS, OF_ARRAYS]


class Holder(keras.Model):
    """A model of any attributes; its call runs all layers found in `order` one after the other."""

    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)

    def call(self, x):
        for layer in self._flatten_layers(include_self=False, recursive=False):
            x = layer(x)
        return x


class OddWeights(L.Layer):
    """Weights under another attribute, under none, in a list, and one given as an array."""

    def __init__(self):
        super().__init__()
        self.constant = keras.Variable(np.arange(4, dtype="float32"), trainable=False)

    def build(self, input_shape):
        self.w = self.add_weight(shape=(4, 4), name="other_name", initializer="glorot_uniform")
        self.add_weight(shape=(4,), name="noattr", initializer="ones")
        self.many = [self.add_weight(shape=(4,), name=f"m{i}", initializer="random_normal") for i in range(2)]

    def call(self, x):
        return x @ self.w + self.many[0] + self.constant


class MadeInBuild(L.Layer):
    """A layer that makes its own layers in `build`."""

    def build(self, input_shape):
        self.inner = L.Dense(4)
        self.inner.build(input_shape)

    def call(self, x):
        return self.inner(x)


class Tied(keras.Model):
    """One embedding that is used at both ends, under two attributes."""

    def __init__(self):
        super().__init__()
        self.embedding = L.Embedding(8, 4)
        self.output_embedding = self.embedding

    def call(self, x):
        return self.embedding(x) @ keras.ops.transpose(self.output_embedding.embeddings)


class FunctionalSubclass(keras.Model):
    """A Functional model by inheritance, with a layer more than its graph has."""

    def __init__(self):
        x = keras.Input((4,))
        super().__init__(x, L.Dense(4, name="inside")(x))
        self.extra = L.Dense(2, name="named")
        self.extra.build((None, 4))


def functional(layer, shape=(4,)):
    x = keras.Input(shape)
    return keras.Model(x, layer(x), name="outer")


def d(units=4, **options):
    return L.Dense(units, **options)


CASES = {
    "attributes": (lambda: Holder(d1=d(), d2=d(2)), "d1.kernel d1.bias d2.kernel d2.bias"),
    "private attributes": (
        lambda: Holder(_first=d(name="a"), _self_attention=d(2, name="b")),
        "first.kernel first.bias self_attention.kernel self_attention.bias",
    ),
    "list": (
        lambda: Holder(blocks=[d(), d(2)]),
        "blocks.0.kernel blocks.0.bias blocks.1.kernel blocks.1.bias",
    ),
    "dict": (
        lambda: Holder(heads={"a": d(use_bias=False), "b": d(use_bias=False)}),
        "heads.a.kernel heads.b.kernel",
    ),
    "nested": (
        lambda: Holder(nest={"k": [d(use_bias=False), (d(use_bias=False),)]}),
        "nest.k.0.kernel nest.k.1.0.kernel",
    ),
    "layers before containers": (
        lambda: Holder(z=[d(use_bias=False)], a=d(use_bias=False)),
        "a.kernel z.0.kernel",
    ),
    "odd weights": (lambda: Holder(o=OddWeights()), "o.constant o.w o.many.0 o.many.1 o.noattr"),
    "made in build": (lambda: Holder(m=MadeInBuild()), "m.inner.kernel m.inner.bias"),
    "norms and dropout": (
        lambda: Holder(bn=L.BatchNormalization(), drop=L.Dropout(0.5)),
        "bn.gamma bn.beta bn.moving_mean bn.moving_variance drop.seed_generator.state",
    ),
    "sequential in subclass": (
        lambda: Holder(seq=keras.Sequential([d(name="s1")])),
        "seq.s1.kernel seq.s1.bias",
    ),
    "functional in subclass": (lambda: Holder(enc=functional(d(name="f1"))), "enc.f1.kernel enc.f1.bias"),
    "subclass in functional": (lambda: functional(Holder(x1=d())), "holder*.x1.kernel holder*.x1.bias"),
    "sequential in functional": (
        lambda: functional(keras.Sequential([d(name="in1")], name="inner")),
        "inner.in1.kernel inner.in1.bias",
    ),
    "functional subclass": (FunctionalSubclass, "inside.kernel inside.bias extra.kernel extra.bias"),
    "sequential": (lambda: keras.Sequential([keras.Input((4,)), d(name="a"), d(name="b")]), "a.* b.*"),
    "lazy sequential": (lambda: keras.Sequential([d(name="a"), d(name="b", use_bias=False)]), "a.* b.kernel"),
    "shared": (lambda: functional(_twice(d(name="once"))), "once.kernel once.bias"),
}


def _twice(layer):
    return lambda x: layer(layer(x))


def expand(text, actual):
    """The expected paths, with `layer.*` for kernel and bias, and `name*` for a numbered name."""
    paths = text.replace("a.*", "a.kernel a.bias").replace("b.*", "b.kernel b.bias").split()
    return [
        path
        if "*" not in path
        else next(
            p for p in actual if p.startswith(path.partition("*")[0]) and p.endswith(path.partition("*")[2])
        )
        for path in paths
    ]


def values(model):
    return {f.path: f.variable.numpy() for f in find_variables(model)}


@pytest.mark.parametrize("when", ["called inside", "called after", "called with symbols after"])
@pytest.mark.parametrize("name", CASES if ON_JAX else few(CASES, "attributes", "lazy sequential"))
def test_every_variable_has_its_path_its_layout_and_the_plain_value(name, when):
    """Whenever the weights are made, paths, layouts and values are right, and nothing is left pending."""
    make_model, text = CASES[name]
    x = np.ones((2, 4), "float32")
    keras.utils.set_random_seed(3)
    plain = make_model()
    plain(x)
    layout_map = lm.LayoutMap(
        lm.create_mesh("model=2"), {r".*kernel$": (None, "model"), r".*w$": ("model", None)}
    )
    keras.utils.set_random_seed(3)
    with layout_map.scope() as scope:
        model = make_model()
        if when == "called inside":
            model(x)
    if when != "called inside":
        model(keras.Input((4,)) if "symbols" in when else x)

    found = find_variables(model)
    actual = [f.path for f in found]
    assert expand(text, actual) == actual
    assert not [f.path for f in found if is_pending(f.variable)]
    assert [f.path for f in found] == [a.variable.path for a in scope.plan.assignments]
    for f in found:
        assert (
            layout_map[f.path] or lm.Layout.replicated(layout_map.mesh, f.variable.ndim)
        ) == f.variable.layout
    expected, got = values(plain), values(model)
    assert all(np.array_equal(a, b) for a, b in zip(expected.values(), got.values(), strict=True))


def test_a_tied_weight_has_one_path_and_an_alias_and_rules_match_either():
    """A weight under two attributes is one variable: the first path counts, and a rule may name the other."""
    layout_map = lm.LayoutMap(lm.create_mesh("model=2"), {r"output_embedding\.embeddings": ("model", None)})
    with layout_map.scope() as scope:
        model = Tied()
    model(np.zeros((1, 2), "int32"))
    (assignment,) = scope.plan.assignments

    assert "embedding.embeddings" == assignment.variable.path
    assert ("output_embedding.embeddings",) == assignment.variable.aliases
    assert ("model", "unsharded") == model.embedding.embeddings.layout.sharding_specs


def test_the_weight_of_a_wrapped_layer_has_the_same_path_on_each_backend():
    """So the optimizer's slots that one backend has saved are found by another one."""
    model = keras.Sequential([keras.Input((4,)), L.SpectralNormalization(L.Dense(3), name="wrapped")])
    kernel = find_variables(model)[0]

    assert ("wrapped.layer.kernel", ["wrapped.kernel"]) == (kernel.path, kernel.aliases)


PRIVATE = {
    "MultiHeadAttention": (
        lambda: L.MultiHeadAttention(2, 2),
        (1, 3, 4),
        {f"x.{part}_dense.{w}" for part in ("query", "key", "value", "output") for w in ("kernel", "bias")},
    ),
    "Bidirectional": (
        lambda: L.Bidirectional(L.LSTM(2, unroll=True)),
        (1, 3, 4),
        {
            f"x.{way}_layer.cell.{w}"
            for way in ("forward", "backward")
            for w in ("kernel", "recurrent_kernel", "bias")
        },
    ),
    "TimeDistributed": (lambda: L.TimeDistributed(d()), (1, 3, 4), {"x.layer.kernel", "x.layer.bias"}),
    "EinsumDense": (lambda: L.EinsumDense("ab,bc->ac", 4, bias_axes="c"), (1, 4), {"x.kernel", "x.bias"}),
    "Conv2D": (lambda: L.Conv2D(2, 3), (1, 4, 4, 3), {"x.kernel", "x.bias"}),
    "ReversibleEmbedding": (
        lambda: L.ReversibleEmbedding(8, 4, tie_weights=False),
        (1, 3),
        {"x.embeddings", "x.reverse_embeddings"},
    ),
}


@pytest.mark.parametrize(("make_layer", "shape", "paths"), PRIVATE.values(), ids=PRIVATE)
def test_private_storage_counts_under_its_public_name(make_layer, shape, paths):
    """Keras's own layers have the paths that their public attributes have."""

    class One(keras.Model):
        def __init__(self):
            super().__init__()
            self.x = make_layer()

        def call(self, x):
            return self.x(x, x) if isinstance(self.x, L.MultiHeadAttention) else self.x(x)

    layout_map = lm.LayoutMap(lm.create_mesh("model=2"))
    model = layout_map.build(
        One, inputs=np.zeros(shape, "int32" if len(shape) == 2 and shape[1] == 3 else "float32")
    )

    assert paths == {f.path for f in find_variables(model) if not f.is_seed}
    assert all(hasattr(f.variable, "layout") for f in find_variables(model))


def test_a_layer_alone_goes_by_its_name():
    """A layer that is in no model is the root of its own paths."""
    layout_map = lm.LayoutMap(lm.create_mesh("model=2"), {r"solo\.kernel": (None, "model")})
    with layout_map.scope():
        layer = L.Dense(4, name="solo")
    layer(np.ones((1, 4), "float32"))

    assert ("unsharded", "model") == layer.kernel.layout.sharding_specs


def unnamed():
    """A Functional model whose layers were given no names, but for one that looks numbered."""
    x = keras.Input((4,))
    y = L.Dense(4)(x)
    y = L.Dense(4, name="dense_1")(y)
    return keras.Model(x, keras.Sequential([L.Dense(4), L.Dense(4)])(L.Dense(4)(y)))


def test_layers_without_names_are_numbered_by_their_model():
    """Built three times, after other layers, the same model has the same paths; given names are kept."""
    layout_map = lm.LayoutMap(lm.create_mesh("model=2"), {r"dense\.kernel": (None, "model")})
    expected = [f"{name}.{w}" for name in ("dense", "dense_1", "dense_2") for w in ("kernel", "bias")]
    expected += [f"sequential.{name}.{w}" for name in ("dense", "dense_1") for w in ("kernel", "bias")]
    for _ in range(3):
        L.Dense(1), keras.Sequential([])
        model = layout_map.build(unnamed)

        assert expected == [f.path for f in find_variables(model)]
        assert ("unsharded", "model") == model.layers[1].kernel.layout.sharding_specs


def test_names_of_a_model_that_exists_are_as_they_are():
    """`apply` goes by the names that the model shows; nobody can tell which of them were given."""
    model = keras.Sequential([keras.Input((4,)), L.Dense(4), L.Dense(4)])
    names = [layer.name for layer in model.layers]
    lm.LayoutMap(lm.create_mesh("model=2")).apply(model)

    assert [f"{name}.{w}" for name in names for w in ("kernel", "bias")] == [
        f.path for f in find_variables(model)
    ]


@pytest.mark.parametrize("has_property", [True, False])
@pytest.mark.parametrize("path", ["d1._weight", "d1.weight"])
def test_a_private_attribute_of_a_layer_has_two_names(path, has_property):
    """A rule may name it with the underscore, as in `tf.keras`, or without, whether or not there is a property."""

    class Scaled(keras.layers.Layer):
        def build(self, shape):
            self._weight = self.add_weight(shape=(8,))

        def call(self, x):
            return x * self._weight

    if has_property:
        Scaled.weight = property(lambda self: self._weight)

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.d1 = Scaled()

        def call(self, x):
            return self.d1(x)

    layout_map = lm.LayoutMap(lm.Mesh(None, "x=2"), {re.escape(path): ("x",)})
    plan = lm.plan(Net, layout_map, inputs=keras.KerasTensor((2, 8)))

    assert ("x",) == plan[path].layout.sharding_specs
