"""A rule of `layout_map.activations` says how what a module of flax.nnx returns is laid out."""

import copy
import pickle
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import layoutmap as lm

ACTIVATIONS = {
    r"blocks\.\d+\.up": ("batch", None, None),
    r"blocks\.\d+$": ("batch", None, "model"),
    "scale": ("batch", None, None),
}


class Seen(nnx.Module):
    """Returns what it is given, and remembers how it was laid out."""

    layouts: ClassVar[list] = []

    def __call__(self, x):
        jax.debug.inspect_array_sharding(x, callback=Seen.layouts.append)
        return x


class Feed(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.seen = Seen()
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.seen(self.up(x))))


class Blocks(nnx.Module):
    """Two blocks with a shared layer between them."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Feed(rngs), Feed(rngs)])
        self.scale = nnx.Linear(8, 8, rngs=rngs)
        self.again = self.scale

    def __call__(self, x):
        for block in self.blocks:
            x = self.again(block(x))
        return x


def make_model():
    return Blocks(nnx.Rngs(0))


def make_map(activations=ACTIVATIONS):
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), activations=activations)
    layout_map[r".*\.up\.kernel"] = (None, "model")
    layout_map[r".*\.down\.kernel"] = ("model", None)
    layout_map.rest = "replicated"
    return layout_map


@pytest.fixture(scope="module")
def model():
    return make_map().build(make_model, batch_dim="batch", library="jax")


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(4, 3, 8)).astype("float32")


def specs(array):
    return lm.dtensor.fetch_layout(array).sharding_specs


@pytest.mark.parametrize(
    "call", [lambda f: f, jax.jit, nnx.jit, nnx.remat], ids=["eager", "jax", "nnx", "remat"]
)
def test_an_output_is_in_the_layout_of_its_rule(model, x, call):
    """Whatever the inputs' layout, called eagerly and compiled; a shared module has the rule of any of its paths."""
    graph, state = nnx.split(model.blocks[1])
    scale = model.again

    @call
    def block(state, x):
        return nnx.merge(graph, state)(x)

    assert ("batch", "unsharded", "model") == specs(block(state, x))
    assert ("batch", "unsharded", "unsharded") == specs(scale(x))


def test_inside_of_a_compiled_model_outputs_are_constrained(model, x):
    """Between two layers the compiler has what the rule says, and not what the weights would make of it."""
    Seen.layouts.clear()
    nnx.jit(lambda model, x: model(x))(model, x)

    assert [("batch",)] * 2 == [tuple(d for d in s.spec if d) for s in Seen.layouts]


@pytest.mark.parametrize(
    "copied",
    [
        nnx.clone,
        copy.copy,
        copy.deepcopy,
        lambda m: nnx.merge(*nnx.split(m)),
        lambda m: jax.tree.map(lambda a: a, m),
    ],
    ids=["clone", "copy", "deepcopy", "merge", "tree.map"],
)
def test_copies_keep_the_layouts_of_outputs(model, x, copied):
    """Copies of a module return arrays in the same layout."""
    assert ("batch", "unsharded", "model") == specs(copied(model.blocks[0])(x))


def test_a_module_looks_as_before(model):
    """Its type has the same name and is a subclass, its text is the same, and so are its parts."""
    plain = nnx.clone(make_model())
    ours, theirs = model.blocks[0].up, plain.blocks[0].up

    assert isinstance(ours, nnx.Linear)
    assert (nnx.Linear.__name__, nnx.Linear.__qualname__, nnx.Linear.__module__) == (
        type(ours).__name__,
        type(ours).__qualname__,
        type(ours).__module__,
    )
    assert str(theirs) == str(ours)
    assert type(ours) is type(model.blocks[1].up)


def test_equal_blocks_are_equal(model):
    """Blocks with one rule compile one program: their structures are equal, whatever their paths."""
    first, second = (nnx.split(block)[0] for block in model.blocks)

    assert first == second
    assert hash(first) == hash(second)


def test_a_class_is_left_as_it_was(model, x):
    """Modules that are made elsewhere, of the same classes, have no layout."""
    before = nnx.Linear.__call__
    other = make_model()
    anew = type(model.scale)(8, 8, rngs=nnx.Rngs(0))

    assert before is nnx.Linear.__call__
    for module in (other, anew):
        assert not hasattr(module(jnp.asarray(x)).sharding, "mesh")


def test_an_unpickled_module_is_plain(model, x):
    """Its arrays are on one device, and what it returns too."""
    again = pickle.loads(pickle.dumps(nnx.Linear(8, 8, rngs=nnx.Rngs(0))))
    unpickled = pickle.loads(pickle.dumps(model.scale))

    assert type(again) is type(unpickled)


def test_a_plan_lists_the_modules_of_rules():
    """Those with a rule, by path."""
    plan = lm.plan(make_model, make_map(), library="jax")

    assert ["blocks.0", "blocks.0.up", "blocks.1", "blocks.1.up", "scale"] == sorted(
        match.path for match in plan.activations
    )


def test_apply_gives_rules_and_takes_them_away(x):
    """A model that exists has the rules of the last map that laid it out."""
    model = make_map().apply(make_model())
    assert ("batch", "unsharded", "unsharded") == specs(model.scale(x))

    make_map({"scale": (None, None, "model")}).apply(model)
    assert ("unsharded", "unsharded", "model") == specs(model.scale(x))

    make_map(None).apply(model)
    assert nnx.Linear is type(model.scale)
    assert make_model().scale.__dict__.keys() == model.scale.__dict__.keys()


def test_an_output_that_does_not_fit_names_the_module():
    """A rank that no output has is an error of the call."""
    model = make_map({"scale": ("batch", None)}).build(make_model, library="jax")
    with pytest.raises(lm.LayoutError) as raised:
        model.scale(np.ones((4, 3, 8), "float32"))

    assert "the output of scale" in str(raised.value)


def test_a_batch_that_does_not_divide_is_replicated(model):
    """A last batch of three rows gives the numbers of one device."""
    x = np.ones((3, 3, 8), "float32")

    assert ("unsharded", "unsharded", "unsharded") == specs(model.scale(x))
    np.testing.assert_allclose(make_model()(x), model(x), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
def test_for_a_pytree_rules_are_reported_as_unsupported():
    """Its functions know no paths; the fix is a function that they can call."""
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), activations={"a": ("batch", None)})
    plan = lm.plan(lambda: {"a": jnp.ones((8, 8))}, layout_map, library="jax")
    (problem,) = [p for p in plan.problems if p.kind == "unsupported"]

    assert "warning" == problem.severity
    assert "the rules of layout_map.activations have no effect" in str(problem)
    assert "lm.dtensor.relayout" in problem.fix
