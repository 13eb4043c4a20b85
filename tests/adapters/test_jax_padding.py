"""Arrays of JAX with axes that do not divide are stored padded, and train, save, and read as on one device."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import layoutmap as lm
from layoutmap.engines.jax.padded import PaddedArray

RULES = {"table": ("model", None), "up": (None, "model"), "down": ("model", None), "scale": ("model",)}
DATA = np.random.default_rng(0)
BATCHES = [(DATA.integers(0, 13, (8, 5)), DATA.integers(0, 13, (8, 5))) for _ in range(4)]
OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "muon": optax.contrib.muon(1e-2),
    "lamb": optax.lamb(1e-2),
}


def make_model():
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        "table": jax.random.normal(keys[0], (13, 8)),
        "up": jax.random.normal(keys[1], (8, 11)) / 3,
        "down": jax.random.uniform(keys[2], (11, 8)),
        "scale": jax.random.normal(keys[3], (3,)),  # of four shards the last is empty
    }


def compute_loss(params, tokens, targets):
    hidden = params["table"][tokens]
    hidden = hidden + jax.nn.gelu(hidden @ params["up"]) @ params["down"]
    logits = hidden @ params["table"].T
    loss = optax.softmax_cross_entropy(logits, jax.nn.one_hot(targets, logits.shape[-1])).mean()
    return loss + (params["scale"] ** 2).sum()


def make_step(tx):
    def step(params, state, tokens, targets):
        loss, gradients = jax.value_and_grad(compute_loss)(params, tokens, targets)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def make_map(mesh="data=2,model=4", uneven="pad"):
    return lm.LayoutMap(lm.create_mesh(mesh), RULES, uneven=uneven)


def train(tx, number=4):
    layout_map = make_map()
    params = layout_map.build(make_model)
    state = layout_map.build_optimizer(tx, params)
    step = lm.jit_step(make_step(tx), donate_argnums=(0, 1), batch_dim="data")
    losses = []
    for tokens, targets in BATCHES[:number]:
        params, state, loss = step(params, state, tokens, targets)
        losses.append(float(loss))
    return params, state, losses


def assert_equal_bits(expected, actual):
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        assert a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def assert_zero_padding(tree):
    padded = [each for each in jax.tree.leaves(tree) if isinstance(each, PaddedArray)]
    assert padded
    for each in padded:
        values = np.array(each.array)
        values[tuple(slice(0, size) for size in each.shape)] = 0
        assert not values.any()


def test_initial_values_are_those_of_one_device():
    """Bit for bit; each device stores a shard of the padded array."""
    params = make_map().build(make_model)

    assert_equal_bits(make_model(), params)
    assert {"table": (16, 8), "up": (8, 12), "down": (12, 8), "scale": (4,)} == {
        path: each.array.shape for path, each in params.items()
    }
    assert_zero_padding(params)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_agrees_with_one_device(name: str):
    """The optimizer gets arrays without padding, and padding stays zero."""
    tx = OPTIMIZERS[name]
    expected, step = make_model(), jax.jit(make_step(tx))
    expected_state, losses = tx.init(expected), []
    for tokens, targets in BATCHES:
        expected, expected_state, loss = step(expected, expected_state, tokens, targets)
        losses.append(float(loss))
    params, state, padded_losses = train(tx)

    np.testing.assert_allclose(padded_losses, losses, rtol=1e-5)
    for a, b in zip(
        jax.tree.leaves((expected, expected_state)), jax.tree.leaves((params, state)), strict=True
    ):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=2e-4, atol=2e-5)
    assert_zero_padding((params, state))
    layouts = {path: str(lm.dtensor.fetch_layout(each)) for path, each in params.items()}
    assert {path: str(a.layout) for path, a in lm.plan(make_model, make_map()).items()} == layouts


def test_a_checkpoint_has_no_padding(tmp_path):
    """It loads where the axes divide and back, bit for bit."""
    tx = OPTIMIZERS["adamw"]
    params, state, _ = train(tx, 2)
    lm.save(params, tmp_path / "padded", optimizer=state)
    whole = lm.LayoutMap(lm.create_mesh("data=8,model=1"), RULES)
    loaded, loaded_state = lm.load(
        built := whole.build(make_model), tmp_path / "padded", optimizer=whole.build_optimizer(tx, built)
    )
    assert not any(isinstance(each, PaddedArray) for each in jax.tree.leaves((loaded, loaded_state)))
    assert_equal_bits((params, state), (loaded, loaded_state))

    lm.save(loaded, tmp_path / "whole", optimizer=loaded_state)
    again = make_map("data=1,model=8")
    back, back_state = lm.load(
        built := again.build(make_model), tmp_path / "whole", optimizer=again.build_optimizer(tx, built)
    )
    assert_equal_bits((params, state), (back, back_state))
    assert_zero_padding((back, back_state))


def test_existing_arrays_are_padded():
    """`apply` and `apply_optimizer` keep values, and so does a change of the padding."""
    layout_map, tx = make_map(), optax.adam(1e-2)
    params = layout_map.apply(make_model())
    state = layout_map.apply_optimizer(tx.init(make_model()), params)

    assert_equal_bits((make_model(), tx.init(make_model())), (params, state))
    assert_zero_padding((params, state[0].mu))
    assert_equal_bits(params, make_map("data=1,model=8").apply(params))


def test_an_inspected_model_has_its_own_shapes():
    """Shapes are logical, padding is a note, and the model's rules read back pad again."""
    params = make_map().build(make_model)
    plan = lm.inspect(params)

    assert (13, 8) == plan["table"].variable.shape
    assert plan["table"].is_padded
    assert not plan.warnings
    assert "pad" == lm.LayoutMap.from_model(params).uneven


def test_numpy_and_jax_read_padded_arrays():
    """Values, operators, and indices are those of the array without padding."""
    table, plain = make_map().build(make_model)["table"], make_model()["table"]

    assert_equal_bits(
        [
            plain,
            plain.T,
            plain[12],
            plain + 1,
            1 - plain,
            plain @ plain.T,
            plain.sum(0),
            jnp.zeros_like(plain),
        ],
        [
            table,
            table.T,
            table[12],
            table + 1,
            1 - table,
            table @ table.T,
            table.sum(0),
            jnp.zeros_like(table),
        ],
    )
    assert (13, 2, 104, 416) == (len(table), table.ndim, table.size, table.nbytes)
    assert_equal_bits(plain + plain, jax.jit(lambda x: x + table)(plain))


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, lambda f: lambda x: jax.eval_shape(f, x)])
def test_transformations_refuse_padded_arrays(transform):
    """JAX raises, since it would trace the padding."""
    with pytest.raises((TypeError, ValueError), match="__jax_array__"):
        transform(lambda x: x.sum())(make_map().build(make_model)["table"])


def test_what_cannot_be_padded_is_named_in_the_plan():
    """Random keys and explicit axes are refused, or get the next policy."""

    def make_keys():
        return {"keys": jax.random.split(jax.random.key(0), 3)}

    mesh = lm.create_mesh("model=4")
    explicit = lm.Mesh(None, "model=4", axis_types={"model": "explicit"})
    for make, where, why in (
        (make_keys, mesh, "random keys are not padded"),
        (make_model, explicit, "explicit axes of 'model'"),
    ):
        (path, *_) = make()
        rules = {path: ("model",) if make is make_keys else ("model", None)}
        plan = lm.plan(make, lm.LayoutMap(where, rules, uneven="pad", rest="replicated"))
        shrunk = lm.plan(make, lm.LayoutMap(where, rules, uneven=("pad", "shrink"), rest="replicated"))

        assert why in plan.errors[0].why
        assert not shrunk.errors
        assert any(why in problem.why for problem in shrunk.problems)
        assert shrunk[path].layout.is_fully_replicated()


def test_modules_of_equinox_are_not_padded():
    """Its filters drop what is no array of JAX, so that weights would not be trained."""
    layout_map = lm.LayoutMap(
        lm.create_mesh("model=4"), {".*weight": ("model", None)}, uneven=("pad", "shrink"), rest="replicated"
    )
    plan = lm.plan(lambda: eqx.nn.Linear(8, 13, key=jax.random.key(0)), layout_map)

    assert not plan["weight"].is_padded
    assert "filters of Equinox" in next(p.why for p in plan.problems if p.kind == "uneven")


def test_a_failing_step_changes_nothing():
    """Arrays that were not donated keep their values."""
    params = make_map().build(make_model)

    @lm.jit_step(batch_dim="data")
    def fail(params, tokens, targets):
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail(params, *BATCHES[0])

    assert_equal_bits(make_model(), params)


def test_rows_that_do_not_divide_are_shared_by_the_devices():
    """Batches of any number of rows train as on one device, and each device has its share of the padded rows."""
    step = make_step(OPTIMIZERS["sgd"])
    shapes = []

    def spy(params, state, tokens, targets):
        jax.debug.inspect_array_sharding(tokens, callback=lambda s: shapes.append((tokens.shape, s.spec)))
        return step(params, state, tokens, targets)

    sharded, one = lm.jit_step(spy, batch_dim="data"), jax.jit(step)
    params, plain = make_map().build(make_model), make_model()
    state, plain_state = (OPTIMIZERS["sgd"].init(jax.tree.map(jnp.asarray, tree)) for tree in (params, plain))
    for rows in (8, 5, 5, 1):
        tokens, targets = (each[:rows] for each in BATCHES[0])
        params, state, loss = sharded(params, state, tokens, targets)
        plain, plain_state, expected = one(plain, plain_state, tokens, targets)
        np.testing.assert_allclose(expected, loss, rtol=1e-6)
    for name, value in plain.items():
        np.testing.assert_allclose(value, np.asarray(params[name]), rtol=1e-5, atol=1e-6, err_msg=name)
    assert {((5, 5), jax.P("data"))} <= {*shapes}
    assert 3 == sharded.num_programs


def test_values_are_read_under_another_mesh_with_explicit_axes():
    """A mesh of `jax.set_mesh` does not matter for reads."""
    params = make_map().build(make_model)
    with jax.set_mesh(jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)):
        read = {name: np.asarray(jnp.asarray(array)) for name, array in params.items()}
    for name, array in make_model().items():
        np.testing.assert_array_equal(array, read[name])
