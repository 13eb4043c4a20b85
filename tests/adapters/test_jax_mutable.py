"""Mutable arrays, and traced ones that JAX does not find, are refused by name; `build` never returns a tracer."""

import jax
import jax.core
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import layoutmap as lm

pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")


class Opaque:
    """An object that is no pytree."""

    def __init__(self, held):
        self.held = held


def closing_over(value):
    return lambda: value


WELL = {"array": lambda: jnp.ones((8, 8)), "text": lambda: "text", "object": lambda: Opaque("text")}
ILL = {
    "ref": lambda: jax.new_ref(jnp.ones(8)),
    "array in an object": lambda: Opaque(jnp.ones(8)),
    "arrays in an object in an object": lambda: Opaque([Opaque({"x": jnp.ones(8)})]),
    "array in a function": lambda: closing_over(jnp.ones(8)),
}
TREES = st.recursive(
    st.sampled_from([*WELL, *WELL, *ILL]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


def names_in(tree):
    return jax.tree.leaves(tree)


def made(tree):
    return {"tree": jax.tree.map(lambda name: (WELL | ILL)[name](), tree), "kernel": jnp.ones((8, 8))}


def find_tracers(value, seen):
    """Every tracer that can be reached from a value, by pytrees, attributes and closures."""
    if id(value) in seen:
        return []
    seen[id(value)] = value
    if isinstance(value, jax.core.Tracer):
        return [value]
    inner = (
        list(value.values())
        if isinstance(value, dict)
        else list(value)
        if isinstance(value, (list, tuple))
        else []
    )
    if isinstance(value, (Opaque, nnx.Pytree, nnx.Variable)):
        inner += vars(value).values()
    if isinstance(value, nnx.Variable):
        inner.append(value.get_raw_value())
    inner += [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    return [tracer for each in inner for tracer in find_tracers(each, seen)]


@pytest.fixture(scope="module")
def layout_map():
    return lm.LayoutMap(lm.create_mesh("batch=2,model=4"), {".*kernel": (None, "model")})


@pytest.mark.every_case
@given(tree=TREES)
def test_build_of_a_drawn_tree_returns_no_tracer(layout_map, tree):
    """It refuses a tree with a mutable or hidden array, as `plan` does, and makes each other one."""
    makes_well = not set(names_in(tree)) & set(ILL)
    for run in (plan, build):
        if makes_well:
            assert [] == find_tracers(run(lambda: made(tree), layout_map), {})
        else:
            with pytest.raises(lm.ScopeError, match=r"mutable arrays|hidden in an object"):
                run(lambda: made(tree), layout_map)


def plan(make, layout_map):
    return lm.plan(make, layout_map, library="jax")


def build(make, layout_map):
    return layout_map.build(make, library="jax")


class Net(nnx.Module):
    def __init__(self, kind):
        self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.held = {
            "hijax": lambda: None,
            "ref": lambda: jax.new_ref(jnp.ones(8)),
            "ref in a list": lambda: nnx.data([jax.new_ref(jnp.ones(8))]),
            "object": lambda: Opaque(Opaque(jnp.ones(8))),
            "function": lambda: closing_over(jnp.ones(8)),
            "nothing": lambda: None,
        }[kind]()


def make_net(kind):
    if kind == "hijax":
        with nnx.var_defaults(hijax=True):
            return Net(kind)
    return Net(kind)


KINDS = {"hijax": "mutable arrays", "ref": "mutable arrays", "ref in a list": "mutable arrays"}
KINDS |= {"object": "hidden in a static attribute", "function": "hidden in a static attribute", "nothing": ""}


@pytest.mark.every_case
@pytest.mark.parametrize("kind", KINDS)
def test_build_of_a_module_returns_no_tracer(layout_map, kind):
    """Variables with hijax, Refs in attributes and lists, and what objects and functions hide, are refused by name."""
    if not KINDS[kind]:
        assert [] == find_tracers(build(lambda: make_net(kind), layout_map), {})
        return
    for run in (plan, build):
        with pytest.raises(lm.ScopeError, match=KINDS[kind]) as error:
            run(lambda: make_net(kind), layout_map)
        assert error.value.why
        assert error.value.fix


@pytest.mark.parametrize("make", [lambda: made("ref"), lambda: make_net("hijax"), lambda: make_net("ref")])
def test_a_model_that_exists_with_mutable_arrays_is_refused(layout_map, make, tmp_path):
    """So it is by `apply`, `inspect` and `save`."""
    for run in (layout_map.apply, lm.inspect, lambda model: lm.save(model, tmp_path)):
        with pytest.raises(lm.ScopeError, match="mutable arrays"):
            run(make())


def test_a_ref_that_the_function_uses_and_freezes_is_none(layout_map):
    """Then the model has an array."""

    def make():
        ref = jax.new_ref(jnp.zeros((8, 8)))
        ref[...] += 1
        return {"kernel": jax.freeze(ref)}

    assert float(build(make, layout_map)["kernel"].sum()) == 64


def test_a_class_of_variables_in_a_module_is_no_mutable_array():
    """`nnx.LoRA` keeps the type of its Variables in an attribute."""
    layout_map = lm.LayoutMap(lm.create_mesh("model=8"))
    plan = lm.plan(lambda: nnx.LoRA(8, 2, 8, rngs=nnx.Rngs(0)), layout_map, library="jax")
    assert ["lora_a", "lora_b"] == sorted(each.variable.path for each in plan.assignments)
