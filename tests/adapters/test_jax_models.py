"""What is laid out of a model of JAX, under which paths, and what is refused."""

import dataclasses
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax_models import MODELS, RULES, WIDTH, Language

import layoutmap as lm
from layoutmap.adapters import get_adapter
from layoutmap.engines.jax.engine import engine

pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
MESH = "batch=2,model=4"


def layout_map(rules=None):
    return lm.LayoutMap(lm.create_mesh(MESH), rules or {})


def kinds(make):
    return {
        a.variable.path: str(a.variable.kind) for a in lm.plan(make, layout_map(), library="jax").assignments
    }


def test_a_block_is_refused():
    """`with layout_map.scope()` is refused, with `build` as the way, before anything in the block runs."""
    refused = pytest.raises(
        lm.ScopeError, match=r"(?s)a JAX model cannot be built in the block.*fix .*layout_map\.build"
    )
    with refused, layout_map().scope(library="jax"):
        pytest.fail("the block ran")


def test_what_a_module_consists_of():
    """Each variable has its path in the module's state and its kind; a shared one has aliases."""
    plan = lm.plan(lambda: Language(nnx.Rngs(0)), layout_map(), library="jax")
    found = {a.variable.path: a.variable for a in plan.assignments}

    assert ("table.embedding",) == found["head.embedding"].aliases
    expected = {
        "head.embedding": "weight",
        "position": "weight",
        "scale": "state",
        "blocks.0.attention.query.kernel": "weight",
        "blocks.1.batch_norm.mean": "state",
        "blocks.1.drop.rngs.count": "rng",
        "blocks.1.drop.rngs.key": "rng",
    }
    assert expected == {path: str(found[path].kind) for path in expected}
    assert "table.embedding" not in found


def test_a_shared_variable_stays_shared():
    """A module that two attributes share is one module after `build`, and `apply` keeps it so."""
    built = layout_map(RULES["language"]).build(lambda: Language(nnx.Rngs(0)), library="jax")
    applied = layout_map(RULES["language"]).apply(Language(nnx.Rngs(0)))

    assert built.head is built.table
    assert applied.head is applied.table
    assert isinstance(built.blocks[1].drop.rngs.key[...], jax.Array)


def test_a_plan_is_in_the_order_of_the_code():
    """Variables of a module are planned in the order in which it assigns them; flax sorts them by name."""
    plan = lm.plan(lambda: Language(nnx.Rngs(0)), layout_map(), library="jax")
    of_block = [a.variable.path for a in plan.assignments if a.variable.path.startswith("blocks.1.")]

    assert ["blocks.1.up.kernel", "blocks.1.batch_norm.mean"] == of_block[:2]
    assert "blocks.1.down.bias" == of_block[-1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    left: object
    right: object


def test_paths_of_a_pytree():
    """Attributes, keys and numbers are joined by dots; what is not an array stays as it is and has no path."""

    def make():
        return {
            "a": Pair(jnp.zeros(8), "text"),
            "b/c": [np.ones(4), 3, None],
            "d": (jax.random.key(1), jnp.arange(3)),
        }

    assert {"a.left": "weight", "b/c.0": "weight", "d.0": "rng", "d.1": "state"} == kinds(make)
    built = layout_map({r"a\.left": ("model",)}).build(make, library="jax")
    assert "text" == built["a"].right
    assert [3, None] == built["b/c"][1:]
    assert ("model",) == lm.dtensor.fetch_layout(built["a"].left).sharding_specs
    assert np.dtype("float32") == built["b/c"][0].dtype  # as JAX holds all numbers of 64 bits
    assert jax.random.key(1) == built["d"][0]


def test_two_arrays_of_one_path_are_refused():
    """Keys that give one path are refused by name: rules could not tell the arrays apart."""
    with pytest.raises(lm.ScopeError, match=r"(?s)^a\.b: two arrays.*fix "):
        lm.plan(lambda: {"a.b": jnp.ones(2), "a": {"b": jnp.ones(3)}}, layout_map(), library="jax")


def reads_a_value():
    scale = jnp.ones(()) * 2
    return {"w": jnp.ones(8) if scale > 1 else jnp.zeros(8)}


def calls_numpy():
    return {"w": jnp.asarray(np.asarray(jnp.ones(8)) * 2)}


@pytest.mark.parametrize("make", [reads_a_value, calls_numpy])
def test_a_function_that_reads_values(make):
    """A function that needs a value which it computes is refused, with `apply` as the way, and that works."""
    with pytest.raises(
        lm.ScopeError, match=r"(?s)reads the value of an array.*fix .*layout_map\.apply\(model\)"
    ):
        layout_map().build(make, library="jax")

    assert np.array_equal(make()["w"], layout_map().apply(make())["w"])


def test_random_states_from_outside_are_refused():
    """`nnx.Rngs` made outside of the function cannot be used in it; the error says where to make them."""
    rngs = nnx.Rngs(0)
    with pytest.raises(lm.ScopeError, match=r"(?s)nnx\.Rngs.*fix .*inside"):
        layout_map().build(lambda: nnx.Linear(8, 8, rngs=rngs), library="jax")

    assert 0 == rngs.default.count[...]


class Stack(nnx.Module):
    def __init__(self, length):
        rngs = nnx.Rngs(3)
        self.layers = nnx.List([nnx.Linear(24, 48, rngs=rngs) for _ in range(length)])


def num_programs(length):
    engine()._programs.clear()
    layout_map({r".*kernel": (None, "model")}).build(lambda: Stack(length), library="jax")
    return len(engine().list_programs())


def test_equal_layers_compile_once():
    """A model of ten equal layers compiles as many programs as one of two."""
    assert num_programs(2) == num_programs(10)


def scaled(scale):
    key = jax.random.key(5)
    table = jnp.asarray(np.linspace(0, 1, 4096, dtype="float32").reshape(64, 64))
    first, second = jnp.split(jax.random.normal(key, (64, 128)) * scale, 2, axis=1)
    orthogonal = jax.nn.initializers.orthogonal()(key, (64, 64))
    return {
        "table": table,
        "halves": [first, second],
        "orthogonal": orthogonal,
        "of another": first @ second + jnp.float32(scale),
        "scan": jax.lax.scan(lambda c, k: (c + jax.random.normal(k, (2048,)), None), jnp.zeros(2048),
                             jax.random.split(key, 3))[0],
        "stack": jax.vmap(lambda k: jax.random.truncated_normal(k, -2, 2, (16, 16)))(jax.random.split(key, 4)),
        "jitted": jax.jit(lambda k: jax.random.uniform(k, (64, 64)) * 3 + 1)(key),
        "bfloat16": (jax.random.normal(key, (64, 64)) * 0.02).astype(jnp.bfloat16),
    }  # fmt: skip


def test_values_however_they_are_computed():
    """First values are those of the function itself, bit for bit, also where one device must compute them."""
    expected = scaled(0.3)
    rules = {".*": ("model", None), "scan": ("model",), "stack": ("model", None, None)}
    on = layout_map()
    for pattern in sorted(rules, reverse=True):
        on[pattern] = rules[pattern]
    actual = on.build(lambda: scaled(0.3), library="jax")
    plan = lm.plan(lambda: scaled(0.3), on, library="jax")

    for (path, a), (_, b) in zip(*map(jax.tree_util.tree_leaves_with_path, (expected, actual)), strict=True):
        assert np.array_equal(a, b), path
        assert lm.dtensor.fetch_layout(b).sharding_specs[0] == "model"
    assert {"orthogonal", "of another", "scan"} <= {
        a.variable.path for a in plan.assignments if a.global_init
    }
    assert not plan["halves.0"].global_init


def test_nothing_of_jax_is_left_changed():
    """What a trace replaces in JAX is put back, also after a function that fails."""
    from jax._src.interpreters.partial_eval import DynamicJaxprTracer

    before = dict(vars(DynamicJaxprTracer))

    def fails():
        assert before != dict(vars(DynamicJaxprTracer))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        lm.plan(fails, layout_map(), library="jax")

    assert before == dict(vars(DynamicJaxprTracer))


def test_apply_keeps_the_module_and_replaces_the_tree():
    """`apply` returns the same module, and another pytree with the same values."""
    module, tree = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), eqx.nn.Linear(8, 8, key=jax.random.key(0))
    on = layout_map({"kernel": (None, "model"), "weight": ("model", None)})

    assert module is on.apply(module)
    assert (lm.UNSHARDED, "model") == lm.dtensor.fetch_layout(module.kernel[...]).sharding_specs
    laid_out = on.apply(tree)
    assert engine().get_layout(tree.weight) is None
    assert ("model", lm.UNSHARDED) == lm.dtensor.fetch_layout(laid_out.weight).sharding_specs
    assert np.array_equal(tree.weight, laid_out.weight)


def test_what_a_program_has_entered_makes_no_difference():
    """Under `jax.disable_jit` and `jax.set_mesh` a model is built with the first values that it has without."""
    on = layout_map({r".*kernel": (None, "model")})

    def make():
        return nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    expected, mesh = make().kernel[...], jax.make_mesh((8,), ("x",))
    for place in (jax.disable_jit, lambda: jax.set_mesh(mesh)):
        with place():
            model = on.build(make, library="jax")
        assert np.array_equal(expected, model.kernel[...])
        assert (lm.UNSHARDED, "model") == lm.dtensor.fetch_layout(model.kernel[...]).sharding_specs


def test_variables_are_those_of_the_model_now():
    """What the adapter lists after a change is what the model holds after it."""
    adapter = get_adapter("jax")
    model = layout_map().build(MODELS["dict"], library="jax")
    path, variable = next(iter(adapter.variables(model).items()))
    adapter.write(variable, np.full(adapter.read(variable).shape, 3, "float32"))

    assert 3 == adapter.read(adapter.variables(model)[path]).max()
    assert WIDTH == len(model.model["rest"][1]["scale"])
    assert list(adapter.variables(model)) == list(itertools.chain(adapter.variables(MODELS["dict"]())))
