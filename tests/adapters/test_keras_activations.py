"""A rule of `layout_map.activations` says how a layer's output is placed, on every backend."""

import textwrap

import keras
import numpy as np
import pytest

import layoutmap as lm

PROCESSES = ("jax", "tensorflow", "torch")
# Keras's own way to make a numpy array of a tensor of torch.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

L = keras.layers


class Blocks(keras.Model):
    """Two blocks with a shared layer between them, and what they put out, seen from inside."""

    def __init__(self):
        super().__init__()
        self.blocks = [Feed(), Feed()]
        self.scale = L.Dense(8)
        self.head = L.Dense(4)

    def call(self, x):
        for block in self.blocks:
            x = self.scale(block(x))
        return self.head(x)


class Seen(L.Layer):
    """Puts out what it is given, and remembers how it lay, if it is to look."""

    looks = False

    def call(self, x):
        if self.looks:
            self.layout = lm.dtensor.fetch_layout(x)
        return x


class Feed(L.Layer):
    def __init__(self):
        super().__init__()
        self.up, self.seen, self.down = L.Dense(16, activation="relu"), Seen(), L.Dense(8)

    def call(self, x):
        return x + self.down(self.seen(self.up(x)))


def make_model():
    model = Blocks()
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    model(keras.Input((3, 8)))
    return model


def make_map(activations=None, mesh="batch=2,model=4"):
    layout_map = lm.LayoutMap(lm.create_mesh(mesh), activations=activations)
    layout_map[r"blocks\.\d+\.up\.kernel"] = (None, "model")
    layout_map[r"blocks\.\d+\.down\.kernel"] = ("model", None)
    layout_map[r"(scale|head)\.kernel"] = (None, None)
    layout_map[r".*\.bias"] = (None,)
    return layout_map


ACTIVATIONS = {
    r"blocks\.\d+\.up": ("batch", None, None),
    r"blocks\.\d+$": ("batch", None, None),
    "scale": ("batch", None, "model"),
}


def data(rows=4):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 3, 8)).astype("float32"), rng.normal(size=(rows, 3, 4)).astype("float32")


@pytest.mark.parametrize("activations", [ACTIVATIONS, {}], ids=["rules", "none"])
def test_a_layer_outputs_what_its_rule_says(activations):
    """Under any of its paths; without a rule it puts out what comes."""
    layout_map = make_map(activations)
    with layout_map.scope(batch_dim="batch", strict=True) as scope:
        model = make_model()
    model.blocks[1].seen.looks = True
    model(data()[0])
    wanted = lm.Layout(("batch", None, None), layout_map.mesh)

    assert bool(activations) == (model.blocks[1].seen.layout == wanted)
    assert {m.path: m.rule.number for m in scope.plan.activations} == (
        {"blocks.0": 2, "blocks.0.up": 1, "blocks.1": 2, "blocks.1.up": 1, "scale": 3} if activations else {}
    )


@pytest.mark.parametrize("rows", [4, 3], ids=["divides", "does not divide"])
def test_a_model_with_them_trains_like_one_device(rows):
    """Outputs, gradients and steps are the plain ones, also for a batch that its mesh dim does not divide."""
    lm.check_parity(make_model, make_map(ACTIVATIONS), data(rows), batch_dim="batch", steps=2)


def test_a_quantized_layer_outputs_what_its_rule_says():
    """Keras computes it in another method then."""
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), {"up": (None,)}, {"up": (None, "model")})
    layout_map["up.kernel"] = (None, None)
    with layout_map.scope():
        model = keras.Sequential([keras.Input((8,)), L.Dense(16, name="up"), Seen(name="seen")])
        model.layers[0].quantize("int4", config=keras.quantizers.Int4QuantizationConfig(block_size=-1))
    model.layers[1].looks = True
    model(np.ones((4, 8), "float32"))

    assert lm.Layout((None, "model"), layout_map.mesh) == model.layers[1].layout


ERRORS = {
    "rank": (
        ("batch", "model"),
        """
        the output of blocks.0.up: a layout of rank 2 does not fit a tensor of rank 3
          shape   (4, 3, 16)
          layout  (batch, model)
          mesh    batch=2, model=4
          why     a layout has one sharding spec for each axis
          fix     use (batch, model, unsharded), or change the rule so that it does not match this tensor: \
a pattern also matches the layers below, unless it ends in $
        """,
    ),
    "uneven": (
        ("batch", "model", None),
        """
        the output of blocks.0.up: axis 1 cannot be split evenly
          shape   (4, 3, 16)
          layout  (unsharded, model, unsharded)
          mesh    batch=2, model=4
          why     3 is not a multiple of 4
          fix     pad axis 1 to 4, or leave it unsharded: (unsharded, unsharded, unsharded)
        """,
    ),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_a_rule_that_does_not_fit_says_so_at_the_first_call(kind):
    """A layer's output is not known before; the error names its path."""
    specs, message = ERRORS[kind]
    with make_map({r"blocks\.\d+\.up": specs}).scope(batch_dim="batch"):
        model = make_model()
    with pytest.raises(lm.LayoutError) as caught:
        model(data()[0])

    assert textwrap.dedent(message).strip() in str(caught.value)


def test_a_rule_for_no_layer_is_reported():
    """With the layers that it may have meant, and before anything is made."""
    with pytest.warns(lm.LayoutMapWarning, match=r"activation rule 1  blokcs.*matches no layer"):
        make_map({r"blokcs\.\d+": ("batch", None, None)}).build(make_model)


def test_weights_sharded_along_two_axes_want_a_rule_for_activations():
    """Where a compiler chooses how activations lie, and it is not told, the plan warns; else it does not."""
    layout_map = make_map()
    del layout_map[r"(scale|head)\.kernel"]
    layout_map[r"(scale|head)\.kernel"] = ("batch", "model")
    told = [p for p in lm.plan(make_model, layout_map).problems if p.kind == "no activations"]
    layout_map.activations[r"blocks\.\d+$"] = ("batch", None, None)
    after = [p for p in lm.plan(make_model, layout_map).problems if p.kind == "no activations"]

    assert (keras.backend.backend() == "jax", False) == (bool(told), bool(after))
    for problem in told:
        assert "scale.kernel: sharded along two axes, and no rule is for activations" == problem.what
        assert (("layout", "(batch, model)"), ("such weights", "2")) == problem.facts
