"""Modules of flax.nnx that hold Variables and arrays in lists, tuples and dicts: laid out, trained, saved, relaid."""

import dataclasses
import functools
import random
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import few
from flax import nnx

import layoutmap as lm
from layoutmap.adapters import get_adapter

pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
WIDTH = 8
BATCH = tuple(np.random.default_rng(0).normal(size=(2, 16, WIDTH)).astype("float32"))


class Pair(NamedTuple):
    first: object
    second: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Node:
    up: object
    down: object


def normal(rngs, *shape):
    return jax.random.normal(rngs.params(), shape) / 4


def called(part: Any, x: Any) -> Any:
    """What the parts of a container make of an input, one after the other."""
    if isinstance(part, (nnx.List, list, tuple)):
        return functools.reduce(lambda x, each: called(each, x), part, x)
    if isinstance(part, (nnx.Dict, dict)):
        return functools.reduce(lambda x, name: called(part[name], x), sorted(part), x)
    if isinstance(part, Node):
        return called([part.up, part.down], x)
    if isinstance(part, nnx.Module) or part is nnx.relu:
        return x + jnp.tanh(part(x)) / 2
    part = part[...]
    return x @ part if part.ndim == 2 else x * (1 + part)


class Held(nnx.Module):
    """A module that holds what a function makes, in one attribute."""

    def __init__(self, make, seed=0):
        self.parts = make(nnx.Rngs(seed))

    def __call__(self, x):
        return called(self.parts, x)


class NoPytree(nnx.Module, pytree=False):
    """A module that is no pytree, whose containers flax looks into without a mark."""

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.parts = [nnx.Param(normal(rngs, WIDTH)), {"table": normal(rngs, WIDTH, WIDTH)}]

    def __call__(self, x):
        return called(self.parts, x)


class Counting(nnx.Module):
    """A module whose call changes arrays that are in no Variable, beside settings in a list."""

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.calls = jnp.zeros(())
        self.means = nnx.data((jnp.zeros(WIDTH), [normal(rngs, WIDTH)]))
        self.sizes = [WIDTH, WIDTH]
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        mean, scale = self.means
        self.calls = self.calls + 1
        self.means = nnx.data((mean + x.mean(0), scale))
        return called(self.layer, x) * scale[0]


def shared(rngs):
    layer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
    return nnx.data({"a": [layer, nnx.LayerNorm(WIDTH, rngs=rngs)], "b": {"again": layer}})


CONTAINERS = {
    "dict": lambda rngs: nnx.data(
        {"a": nnx.Param(normal(rngs, WIDTH)), "b": nnx.Param(normal(rngs, WIDTH, WIDTH))}
    ),
    "list": lambda rngs: nnx.data([nnx.Param(normal(rngs, WIDTH)) for _ in range(11)]),
    "tuples": lambda rngs: nnx.data((nnx.Param(normal(rngs, WIDTH)), ({"x": normal(rngs, WIDTH, WIDTH)},))),
    "arrays": lambda rngs: nnx.data(
        {"a": normal(rngs, WIDTH), "b": [normal(rngs, WIDTH, WIDTH), np.ones(WIDTH, "f")]}
    ),
    "List": lambda rngs: nnx.List([normal(rngs, WIDTH), nnx.Dict({"x": normal(rngs, WIDTH), "y": nnx.relu})]),
    "List of data": lambda rngs: nnx.List(
        [nnx.data([normal(rngs, WIDTH)]), nnx.data({"x": normal(rngs, WIDTH)})]
    ),
    "registered": lambda rngs: nnx.data(Pair(Node(normal(rngs, WIDTH), nnx.Param(normal(rngs, WIDTH))), [])),
    "numbered": lambda rngs: nnx.data({1: nnx.Param(normal(rngs, WIDTH)), 0: normal(rngs, WIDTH)}),
    "shared": shared,
    "SpectralNorm": lambda rngs: nnx.SpectralNorm(nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs),
    "WeightNorm": lambda rngs: nnx.WeightNorm(nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs),
}
MODELS = {name: functools.partial(Held, make) for name, make in CONTAINERS.items()}
MODELS |= {"no pytree": NoPytree, "counting": Counting}
PATHS = {
    "dict": ["parts.a", "parts.b"],
    "list": [f"parts.{n}" for n in range(11)],
    "tuples": ["parts.0", "parts.1.0.x"],
    "arrays": ["parts.a", "parts.b.0", "parts.b.1"],
    "List": ["parts.0", "parts.1.x"],
    "List of data": ["parts.0.0", "parts.1.x"],
    "registered": ["parts.first.up", "parts.first.down"],
    "numbered": ["parts.0", "parts.1"],
    "shared": ["parts.a.0.kernel", "parts.a.0.bias", "parts.a.1.scale", "parts.a.1.bias"],
    "SpectralNorm": [
        *("parts.layer_instance.kernel", "parts.layer_instance.bias"),
        *("parts.batch_stats.kernel.sigma", "parts.batch_stats.kernel.u"),
    ],
    "WeightNorm": ["parts.layer_instance.kernel", "parts.layer_instance.bias", "parts.scales.kernel"],
    "no pytree": ["parts.0", "parts.1.table"],
    "counting": ["calls", "means.0", "means.1.0", "layer.kernel", "layer.bias"],
}


# A mesh of its own: JAX cannot tell one from the same mesh bound, and arrays are on the first of both that was used.
def layout_map(make, seed=0, mesh="rows=2,model=4"):
    """A map with a rule for each variable of a model, which shards most of them."""
    draw = random.Random(seed)
    specs = {
        0: [()],
        1: [("model",), (None,)],
        2: [(None, "model"), ("model", None), ("model", "rows"), (None, None)],
    }
    found = lm.LayoutMap(lm.create_mesh(mesh))
    for assignment in lm.plan(make, found, library="jax").assignments:
        variable = assignment.variable
        spec = (
            draw.choice(specs[len(variable.shape)])
            if 1 not in variable.shape
            else (None,) * len(variable.shape)
        )
        found[re.escape(variable.path) + "$"] = spec
    return found


def contents(model):
    return {path: variable.read().tobytes() for path, variable in get_adapter("jax").variables(model).items()}


def check_built(make, on):
    """Hold a plan, the model that is built, and the plain model together; returns the built one."""
    plan, model = lm.plan(make, on, library="jax"), on.build(make, library="jax")
    variables = get_adapter("jax").variables(model)
    assert {a.variable.path: a.layout for a in plan.assignments} == {
        p: v.layout for p, v in variables.items()
    }
    assert contents(make()) == contents(model)
    assert jax.tree.structure(nnx.state(make())) == jax.tree.structure(nnx.state(model))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_plan_and_model_have_the_same_paths_and_first_values(name):
    """Each array has its path, and the built model the plain model's values, bit for bit, in the planned layouts."""
    on = layout_map(MODELS[name])
    model = check_built(MODELS[name], on)

    assert PATHS[name] == [a.variable.path for a in lm.plan(MODELS[name], on, library="jax").assignments]
    assert name != "shared" or model.parts["a"][0] is model.parts["b"]["again"]


@pytest.mark.parametrize("name", few(MODELS, "tuples", "WeightNorm", "counting"))
def test_saved_loaded_and_relaid(name, tmp_path):
    """A model is loaded on another mesh, in place, and laid out anew, with the values that were saved."""
    make = MODELS[name]
    on, other = layout_map(make), layout_map(make, 1, "rows=4,model=2")
    model = on.build(make, library="jax")
    lm.save(model, tmp_path)
    expected = contents(model)
    another = functools.partial(make, seed=1)
    loaded = lm.load(another, tmp_path, layout_map=other, library="jax")
    in_place = other.apply(another())

    assert in_place is lm.load(in_place, tmp_path)
    assert model is other.apply(model)
    layouts = {a.variable.path: a.layout for a in lm.plan(make, other, library="jax").assignments}
    for each in (model, loaded, in_place):
        assert expected == contents(each)
        assert layouts == {path: v.layout for path, v in get_adapter("jax").variables(each).items()}


def step(model, optimizer, x, target):
    loss, gradients = nnx.value_and_grad(lambda model: ((model(x) - target) ** 2).mean())(model)
    optimizer.update(model, gradients)
    return loss


@pytest.mark.parametrize(
    ("name", "donated"),
    few([(name, donated) for name in MODELS for donated in ((), (0, 1))], ("counting", (0, 1))),
)
def test_a_step_changes_what_a_module_holds(name, donated):
    """Under `jit_step` a module's Variables and arrays are those that `nnx.jit` computes, in their layouts."""
    make, tx = MODELS[name], optax.sgd(0.05)
    on = layout_map(make)
    plain, model = make(), on.build(make, library="jax")
    layouts = {path: v.layout for path, v in get_adapter("jax").variables(model).items()}
    theirs, ours = nnx.Optimizer(plain, tx, wrt=nnx.Param), on.build_optimizer(tx, model)
    compiled = lm.jit_step(step, batch_dim="rows", donate_argnums=donated)
    for _ in range(3):
        np.testing.assert_allclose(
            nnx.jit(step)(plain, theirs, *BATCH), compiled(model, ours, *BATCH), rtol=1e-5
        )

    expected = get_adapter("jax").variables(plain)
    for path, variable in get_adapter("jax").variables(model).items():
        np.testing.assert_allclose(expected[path].read(), variable.read(), rtol=1e-4, atol=1e-6, err_msg=path)
        assert layouts[path] == variable.layout
    assert name != "counting" or 3 == int(model.calls)


# -- what is refused


class Static(nnx.Module):
    def __init__(self, wrap=lambda parts: parts):
        self.scale = nnx.Param(jnp.ones(WIDTH))
        self.tables = wrap([jnp.ones(WIDTH) * 2])


class Opaque:
    def __init__(self, table):
        self.table = table


class Hidden(nnx.Module):
    """Holds an array that only a function, or an object that is no pytree, has."""

    def __init__(self, hide):
        table = jnp.ones(WIDTH) * 2
        self.scale = hide(table)

    def __call__(self, x):
        return x * (self.scale.table if isinstance(self.scale, Opaque) else self.scale(1))


class Shown(nnx.Module):
    def __init__(self):
        self.table = jnp.ones(WIDTH) * 2

    def __call__(self, x):
        return x * self.table


def test_arrays_in_a_static_attribute():
    """They are refused by its name; with the mark that the error names, the model is built."""
    on = lm.LayoutMap(lm.create_mesh("model=4"), rest="replicated")
    with pytest.raises(
        lm.ScopeError, match=r"(?s)^tables: a static attribute contains arrays.*fix .*nnx\.data\(\.\.\)"
    ):
        on.build(Static, library="jax")

    model = on.build(lambda: Static(nnx.data), library="jax")
    assert [2.0] * WIDTH == model.tables[0].tolist()


@pytest.mark.parametrize(
    "hide",
    [
        Opaque,
        lambda table: lambda x: x * table,
        lambda table: functools.partial(jnp.multiply, table),
        lambda table: lambda x, table=table: x * table,
    ],
)
def test_an_array_that_flax_cannot_see(hide):
    """It is refused by the attribute; where the module has the array itself, as the error says, the model is built."""
    on = lm.LayoutMap(lm.create_mesh("model=4"), rest="replicated")
    with pytest.raises(
        lm.ScopeError, match=r"(?s)^scale: an array is hidden.*fix .*an attribute of the module"
    ):
        on.build(lambda: Hidden(hide), library="jax")

    assert [2.0] * WIDTH == on.build(Shown, library="jax")(jnp.ones(WIDTH)).tolist()
