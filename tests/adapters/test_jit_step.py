"""Compiled steps leave everything in its layout, and compute what one device computes."""

import contextlib
import functools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import few
from hypothesis import given
from hypothesis import strategies as st
from optax_optimizers import MESH, OPTIMIZERS, laid_out, misplaced, plain_params

import layoutmap as lm


@pytest.fixture(scope="module")
def layout_map():
    return lm.LayoutMap(lm.create_mesh(MESH))


def loss_of(params, x):
    """A number that all parameters have a part in; of a batch of 40 features."""
    for block in params["blocks"]:
        up = jax.nn.gelu(x @ params["embed"]["table"][:, :8] @ block["kernel"] + block["bias"])
        x = x + up @ jnp.ones((64, 40)) / 64
    rest = (params["head"]["kernel"] ** 2).sum() + (params["scale"] ** 2).sum()
    return (x**2).mean() + rest


def make_step(tx):
    def step(params, state, x):
        loss, gradients = jax.value_and_grad(loss_of)(params, x)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, {"loss": loss}

    return step


def batch(seed=0, rows=4):
    return np.random.default_rng(seed).normal(size=(rows, 40)).astype("float32")


def layouts(tree):
    return [str(lm.dtensor.fetch_layout(leaf)) for leaf in jax.tree.leaves(tree)]


def test_plain_jit_drifts_and_a_step_does_not(layout_map):
    """A step under plain `jax.jit` moves replicated biases and their slots, and under `jit_step` none."""
    tx = optax.adamw(1e-2)
    params = laid_out(plain_params(), layout_map.mesh)
    for block in params["blocks"]:
        block["bias"] = lm.dtensor.relayout(block["bias"], lm.Layout([None], layout_map.mesh))
    state = layout_map.build_optimizer(tx, params)
    x = lm.dtensor.relayout(batch(), lm.Layout(["batch", None], layout_map.mesh))
    before = layouts((params, state))
    drifted = jax.jit(make_step(tx))(params, state, x)
    kept = lm.jit_step(make_step(tx), batch_dim="batch")(params, state, batch())
    moved = [
        sum(a != b for a, b in zip(before, layouts(after[:2]), strict=True)) for after in (drifted, kept)
    ]
    assert [6, 0] == moved


@pytest.mark.parametrize(
    ("name", "zero_dim"),
    few(
        [(name, dim) for name in OPTIMIZERS for dim in (None, "batch")],
        ("adamw", None),
        ("adafactor", "batch"),
    ),
)
def test_three_steps_are_those_of_one_device(layout_map, name, zero_dim):
    """Parameters and state after three steps equal those of one device, and are where they were."""
    tx = OPTIMIZERS[name]()
    expected = plain_params(), tx.init(plain_params())
    params = laid_out(plain_params(), layout_map.mesh)
    actual = params, layout_map.build_optimizer(tx, params, zero_dim=zero_dim)
    before = layouts(actual)
    plain, step = jax.jit(make_step(tx)), lm.jit_step(make_step(tx), donate_argnums=(0, 1), batch_dim="batch")
    for number in range(3):
        *expected, of_plain = plain(*expected, batch(number))
        *actual, metrics = step(*actual, batch(number))
        np.testing.assert_allclose(of_plain["loss"], metrics["loss"], rtol=1e-5)
    for one, other in zip(jax.tree.leaves(expected[0]), jax.tree.leaves(actual[0]), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)
    assert before == layouts(tuple(actual))


def test_a_step_is_traced_once_for_each_signature(layout_map):
    """Later calls trace nothing; a batch of another size, or other layouts, is traced once more."""
    traces = []

    @functools.partial(lm.jit_step, batch_dim="batch")
    def step(params, scale, x):
        traces.append(x.shape)
        return jax.tree.map(lambda p: p * scale, params), x.sum(1)

    params = laid_out(plain_params(), layout_map.mesh)
    found = []
    for rows in (4, 8, 8, 4):
        params, sums = step(params, 0.5, batch(0, rows))
        found += layouts(sums)
    replicated = jax.tree.map(
        lambda p: lm.dtensor.relayout(p, lm.Layout.replicated(layout_map.mesh, p.ndim)), params
    )
    for _ in range(2):
        replicated, sums = step(replicated, 0.25, batch(0, 4))
        found += layouts(sums)
    assert [(4, 40), (8, 40), (4, 40)] == traces
    assert ["(batch,)"] * 6 == found
    assert all(p.sharding.is_fully_replicated for p in jax.tree.leaves(replicated))


def test_what_is_donated_is_gone(layout_map):
    """The arrays of arguments in `donate_argnums` are deleted, and those of others stay."""
    params = laid_out(plain_params(), layout_map.mesh)
    other = laid_out(plain_params(1), layout_map.mesh)
    step = lm.jit_step(lambda p, q: jax.tree.map(jnp.add, p, q), donate_argnums=0)
    step(params, other)
    assert ({True}, {False}) == (
        {p.is_deleted() for p in jax.tree.leaves(params)},
        {p.is_deleted() for p in jax.tree.leaves(other)},
    )


def test_where_results_go(layout_map):
    """A result that replaces an argument has its layout; all others are where `jax.jit` leaves them."""
    params = laid_out(plain_params(), layout_map.mesh)
    key = jax.random.key(0)

    def step(state, x, key):
        gradients = jax.grad(loss_of)(state["params"], x)
        state = {"params": state["params"], "step": state["step"] + 1}
        return state, {
            "gradients": gradients,
            "rows": x.sum(1),
            "norms": jnp.ones(3),
            "key": jax.random.split(key)[0],
        }

    start = {"params": params, "step": jnp.int32(3)}
    state, rest = lm.jit_step(step, batch_dim="batch")(start, batch(), key)
    x = lm.dtensor.relayout(batch(), lm.Layout(["batch", None], layout_map.mesh))
    _, left = jax.jit(step)(start, x, jax.device_put(key, rest["key"].sharding))
    assert [] == misplaced(state)
    assert layouts(left) == layouts(rest)
    assert ["()", "(unsharded,)", "(batch,)"] == layouts([rest["key"], rest["norms"], rest["rows"]])
    assert 4 == int(state["step"])


def test_batches_are_placed(layout_map):
    """Numpy arrays are sharded over the batch's dim, and with `batch_argnums` arrays of JAX as well."""
    kernel = lm.dtensor.relayout(np.ones((40, 8), np.float32), lm.Layout([None, "model"], layout_map.mesh))

    def step(kernel, x):
        return jax.debug.inspect_array_sharding(
            x, callback=lambda s: seen.append(s.shard_shape((4, 40)))
        ), x @ kernel

    seen = []
    lm.jit_step(step, batch_dim="batch")(kernel, batch())
    lm.jit_step(step, batch_dim="batch", batch_argnums=1)(kernel, jnp.asarray(batch()))
    with pytest.warns(lm.LayoutMapWarning, match="step: mesh dim 'batch' is idle"):
        lm.jit_step(step)(kernel, batch())
    assert [(2, 40), (2, 40), (4, 40)] == seen
    for rows in (4, 64):  # a small array may be a mask, unless no argument is a batch
        with pytest.warns(lm.LayoutMapWarning, match=r"step: args\[1\] is on one device"):
            lm.jit_step(step, batch_dim="batch")(kernel, jnp.ones((rows, 40)))
    for x in (batch(), lm.dtensor.relayout(batch(), lm.Layout(["batch", None], layout_map.mesh))):
        lm.jit_step(lambda kernel, x, mask: x @ kernel + mask, batch_dim="batch")(kernel, x, jnp.ones((4, 8)))


def accumulated(params, x):
    """Gradients summed over two halves of a batch by `lax.scan`, each block computed again on the way back."""

    def one(total, part):
        gradients = jax.grad(jax.checkpoint(loss_of))(params, part)
        return jax.tree.map(jnp.add, total, gradients), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    total, _ = jax.lax.scan(one, zeros, x.reshape(2, -1, *x.shape[1:]))
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, total)


def stacked(params, x):
    """A step of blocks whose weights are stacked along a first axis, gone through by `lax.scan`."""

    def loss(params):
        def block(x, weights):
            return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None

        return (jax.lax.scan(jax.checkpoint(block), x, params)[0] ** 2).mean()

    return jax.tree.map(lambda p, g: p - 0.01 * g, params, jax.grad(loss)(params))


def stacked_params(mesh=None):
    random = np.random.default_rng(0)
    shapes = {"up": (3, 40, 16), "down": (3, 16, 40)}
    specs = {"up": (None, "batch", "model"), "down": (None, "model", "batch")}
    made = {name: random.normal(size=shape).astype("float32") / 8 for name, shape in shapes.items()}
    if mesh is None:
        return made
    return {name: lm.dtensor.relayout(made[name], lm.Layout(specs[name], mesh)) for name in made}


def test_a_mesh_of_one_device_takes_arrays_that_are_on_no_mesh():
    """Batches of numpy and of JAX, of its device and of another, before weights and behind them; nothing warns."""
    for device in ("CPU:0", "CPU:1"):
        layout = lm.Layout([None, "model"], lm.create_mesh("batch=1,model=1", devices=[device]))
        kernel = lm.dtensor.relayout(np.ones((40, 8), np.float32), layout)
        step = lm.jit_step(lambda a, b: a @ b, batch_dim="batch")
        for x in (batch(rows=64), jnp.asarray(batch(rows=64))):
            np.testing.assert_allclose(
                step(x, kernel), np.asarray(x) @ np.ones((40, 8)), rtol=1e-5, atol=1e-5
            )
            assert (8, 64) == lm.jit_step(lambda a, b: a @ b)(kernel.T, x.T).shape


@pytest.mark.parametrize("kind", ["accumulated", "stacked"])
def test_accumulation_remat_and_scan(layout_map, kind):
    """Gradient accumulation, rematerialization and a scan over stacked blocks keep numbers and layouts."""
    if kind == "accumulated":
        function, plain = accumulated, plain_params()
        params = laid_out(plain, layout_map.mesh)
    else:
        function, plain, params = stacked, stacked_params(), stacked_params(layout_map.mesh)
    before, step = layouts(params), lm.jit_step(function, donate_argnums=0, batch_dim="batch")
    few_rows = pytest.warns(lm.LayoutMapWarning, match="goes over 2 microbatches")
    for number in range(2):
        plain = jax.jit(function)(plain, batch(number))
        with few_rows if kind == "accumulated" and number == 0 else contextlib.nullcontext():
            params = step(params, batch(number))
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert before == layouts(params)


def test_what_is_refused(layout_map):
    """Arguments without a layout or on two meshes, rows under explicit axes, another shape: each says why and a fix."""
    params = laid_out(plain_params(), layout_map.mesh)
    explicit = laid_out(
        plain_params(), lm.create_mesh(str(layout_map.mesh), axis_types={"batch": "explicit"})
    )
    elsewhere = lm.dtensor.relayout(np.ones(8, np.float32), lm.Layout(["data"], lm.create_mesh("data=8")))

    def step(params, *rest):
        return params

    def grown(params):
        return params | {"scale": jnp.ones(25)}

    told = []
    for compiled, arguments in (
        (lm.jit_step(step), (plain_params(),)),
        (lm.jit_step(step), (params, elsewhere)),
        (lm.jit_step(step, batch_dim="batch"), (explicit, batch(0, 5))),
        (lm.jit_step(step, batch_dim="data"), (params,)),
        (lm.jit_step(step, donate_argnums=1), (params,)),
        (lm.jit_step(step), (params, jax.nn.relu)),
        (lm.jit_step(grown, donate_argnums=0), (params,)),
        (jax.jit(lm.jit_step(step)), (params,)),
    ):
        with pytest.raises(lm.LayoutMapError) as error:
            compiled(*arguments)
        assert error.value.why
        assert error.value.fix
        told.append((type(error.value).__name__, error.value.what))
    assert [
        ("LayoutError", "step: no argument has a layout"),
        ("MeshError", "step: args[0]['blocks'][0]['bias'] and args[1] are on different meshes"),
        ("LayoutError", "step: args[1]: axis 0 cannot be split evenly"),
        ("ScopeError", "step: batch_dim 'data' is not a dim of the mesh"),
        ("ScopeError", "step: there is no positional argument 1"),
        ("LayoutError", "step: args[1] is not an array"),
        ("LayoutError", "args[0]['scale']: the step changes the shape of this donated argument"),
        ("ScopeError", "step: the step is called inside another traced function"),
    ] == told


def add(p, q):
    return jax.tree.map(jnp.add, p, q)


def test_what_is_donated_cannot_be_passed_again(layout_map):
    """An array that was donated, or is donated and passed twice, is refused by name; XLA would end the process."""
    params, other = (laid_out(plain_params(seed), layout_map.mesh) for seed in range(2))
    step = lm.jit_step(add, donate_argnums=0)
    by_name = lm.jit_step(add, donate_argnums=1)
    with pytest.raises(
        lm.LayoutError, match=r"add: args\[0\]\['blocks'\]\[0\]\['bias'\] and args\[1\].* are the same array"
    ):
        step(params, params)
    by_name(params, q=other)
    assert {True} == {q.is_deleted() for q in jax.tree.leaves(other)}

    result = step(params, laid_out(plain_params(1), layout_map.mesh))
    for again in ((params, result), (result, params)):
        with pytest.raises(
            lm.LayoutError, match=r"(?s)was donated, and has no values.*fix .*pass the result of the step"
        ):
            step(*again)
    assert [] == misplaced(step(result, jax.tree.map(jnp.copy, result)))  # both fixes


def test_static_arguments(layout_map):
    """They are compiled into the step, by position and by name, once for each value; others trace nothing again."""
    traces = []

    def scaled(params, scale, times=1, *, how="add"):
        traces.append((scale, times, how))
        for _ in range(times):
            params = jax.tree.map(lambda p: p + scale if how == "add" else p * scale, params)
        return params

    step = lm.jit_step(scaled, static_argnums=(1, 2), static_argnames="how")
    params = {"w": laid_out(plain_params(), layout_map.mesh)["scale"]}
    start = np.asarray(params["w"])
    calls = [
        ((2.0,), {}),
        ((2.0, 3), {}),
        ((), {"scale": 2.0, "times": 3}),
        ((2.0,), {"how": "mul"}),
        ((2.0, 3), {}),
    ]
    for args, kwargs in calls:
        result = step(params, *args, **kwargs)
        assert np.array_equal(jax.jit(lambda p: scaled(p, *args, **kwargs))({"w": start})["w"], result["w"])  # noqa: B023
        assert [] == misplaced({"scale": result["w"]})
    of_step = traces[::2]
    assert [(2.0, 1, "add"), (2.0, 3, "add"), (2.0, 3, "add"), (2.0, 1, "mul")] == of_step[:4]
    assert 9 == len(traces)  # the last call traced jax.jit's only

    with pytest.raises(lm.ScopeError, match=r"(?s)static argument how cannot be hashed.*fix .*tuple"):
        step(params, 1.0, how=["add"])


def test_lower_returns_what_jit_does(layout_map):
    """A lowered step has the step's arguments and results, and what is compiled from it computes the same."""
    params, x = laid_out(plain_params(), layout_map.mesh), batch()
    step = lm.jit_step(
        lambda params, x, scale: (jax.tree.map(lambda p: p * scale, params), x.sum()),
        donate_argnums=0,
        static_argnums=2,
        batch_dim="batch",
    )
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding), params)
    for lowered in (step.lower(params, x, 3), step.lower(shapes, jax.ShapeDtypeStruct(x.shape, x.dtype), 3)):
        compiled = lowered.compile()
        assert isinstance(lowered, jax.stages.Lowered)
        assert jax.tree.structure((((params, x)), {})) == lowered.in_tree
        assert compiled.memory_analysis().argument_size_in_bytes > 0
        assert "sharding" in lowered.as_text()
    x = lm.dtensor.relayout(x, lm.Layout(["batch", None], layout_map.mesh))
    expected = jax.tree.map(lambda p: np.asarray(p) * 3, params)
    result, _ = compiled(params, x)
    assert all(map(np.array_equal, jax.tree.leaves(expected), jax.tree.leaves(result)))
    with pytest.raises(lm.LayoutError, match="is not an array"):
        step(shapes, x, 3)


class Net(eqx.Module):
    """A module with what is not an array in it: a function, and numbers that Python reads."""

    mlp: eqx.nn.MLP
    drop: eqx.nn.Dropout

    def __call__(self, x, key):
        return self.drop(self.mlp(x), key=key)


def test_a_module_of_equinox_as_an_argument(layout_map):
    """It is passed and returned entire, trains as under `eqx.filter_jit`, and another setting is compiled anew."""
    plain, other = (
        Net(eqx.nn.MLP(16, 4, 64, 1, key=jax.random.key(0)), eqx.nn.Dropout(0.5)) for _ in range(2)
    )
    arrays, rest = eqx.partition(other, eqx.is_array)
    arrays = laid_out(arrays, layout_map.mesh)
    model, tx, traces = eqx.combine(arrays, rest), optax.sgd(1e-1, momentum=0.9), []
    assert {"mlp.layers.0.weight", "mlp.layers.1.bias"} < set(layout_map.plan_optimizer(tx, arrays))
    state, plain_state = layout_map.build_optimizer(tx, arrays), tx.init(eqx.filter(plain, eqx.is_array))

    def step(model, state, x, key):
        traces.append(model.drop.inference)

        def loss_of(model):
            return (jax.vmap(lambda row: model(row, key))(x) ** 2).mean()

        loss, gradients = eqx.filter_value_and_grad(loss_of)(model)
        updates, state = tx.update(gradients, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, {"loss": loss, "of": "step"}

    ours, theirs = lm.jit_step(step, donate_argnums=(0, 1), batch_dim="batch"), eqx.filter_jit(step)
    for number in range(3):
        x, key = batch(number)[:, :16], jax.random.key(number)
        if number == 2:
            model, plain = (eqx.tree_at(lambda m: m.drop.inference, m, True) for m in (model, plain))
        model, state, metrics = ours(model, state, x, key)
        plain, plain_state, expected = theirs(plain, plain_state, x, key)
        np.testing.assert_allclose(expected["loss"], metrics["loss"], rtol=1e-5)
    assert [False, False, True, True] == traces
    assert jax.tree.structure(plain) == jax.tree.structure(model)
    assert ("step", 0.5, True) == (metrics["of"], model.drop.p, model.drop.inference)
    assert [] == misplaced((eqx.filter(model, eqx.is_array), state))


def test_a_mesh_of_explicit_axes_stays_one():
    """Parameters on a mesh as `jax.make_mesh` makes it, of type Explicit, have slots there, and stay there."""
    mesh = jax.make_mesh((2, 4), ("batch", "model"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
    params, tx = {"kernel": jax.device_put(np.ones((40, 64), np.float32), sharding)}, optax.adam(1e-2)
    state = lm.LayoutMap(MESH).build_optimizer(tx, params)

    @functools.partial(lm.jit_step, batch_dim="batch")
    def step(params, state, x):
        gradients = jax.grad(lambda p: ((x @ p["kernel"]) ** 2).mean())(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params, state = step(params, state, batch())
    found = [leaf.sharding for leaf in (params["kernel"], state[0].mu["kernel"])]
    assert [sharding] * 2 == found


SHAPES = {"up": (8, 16), "down": (16, 8), "bias": (8,)}
CHOICES = {
    "up": [(None, "model"), ("batch", "model"), ("model", None), (None, None), (("model", "batch"), None)],
    "down": [("model", None), ("model", "batch"), (None, "batch"), (None, None), (None, ("batch", "model"))],
    "bias": [("model",), ("batch",), (None,)],
}


def drawn_argument(data, mesh, number):
    """A drawn tree of arrays in drawn layouts: one array, or a dict of them."""
    random = np.random.default_rng(number)

    def array(name):
        values = random.normal(size=SHAPES[name]).astype("float32")
        return lm.dtensor.relayout(values, lm.Layout(data.draw(st.sampled_from(CHOICES[name])), mesh))

    kind = data.draw(st.sampled_from(["up", "bias", "tree", "tree"]))
    return array(kind) if kind in SHAPES else {name: array(name) for name in SHAPES}


@given(data=st.data())
def test_drawn_steps_have_the_values_and_layouts_of_jit(layout_map, data):
    """Whatever arguments a step returns, in any order and container, donated or not, is where `jax.jit` leaves it."""
    number = data.draw(st.integers(1, 3))
    arguments = [drawn_argument(data, layout_map.mesh, n) for n in range(number)]
    order = data.draw(st.lists(st.sampled_from(range(number)), min_size=1, max_size=number, unique=True))
    how = data.draw(st.sampled_from(["one", "tuple", "list", "dict", "nested", "with a loss"]))
    donated = data.draw(st.lists(st.sampled_from(order), unique=True))
    scale = data.draw(st.sampled_from([1.0, 2.0]))

    def step(*arguments):
        found = [jax.tree.map(lambda a: a * scale if scale != 1 else a, arguments[n]) for n in order]
        return {
            "one": lambda: found[0],
            "tuple": lambda: tuple(found),
            "list": lambda: found,
            "dict": lambda: {str(n): each for n, each in enumerate(found)},
            "nested": lambda: ({"all": tuple(found)}, jnp.ones(4)),
            "with a loss": lambda: (*found, sum(a.sum() for a in jax.tree.leaves(found))),
        }[how]()

    donated = [n for n in donated if how != "one" or n == order[0]]
    expected = jax.jit(step)(*arguments)
    step_of_ours = lm.jit_step(step, donate_argnums=donated)
    for _ in range(2):
        result = step_of_ours(*jax.tree.map(jnp.copy, arguments))
        assert jax.tree.structure(expected) == jax.tree.structure(result)
        for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(result), strict=True):
            assert np.array_equal(one, other)
            assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


def test_a_result_that_replaces_no_argument_stays_where_jit_leaves_it(layout_map):
    """One array, two trees in swapped order, and an array of an argument's shape that is no update of it."""
    mesh = layout_map.mesh
    rows, columns = (
        lm.dtensor.relayout(np.ones((8, 8), np.float32), lm.Layout(specs, mesh))
        for specs in (("model", None), (None, "model"))
    )
    trees = {"w": rows, "v": columns}, {"w": columns, "v": rows}
    for step, arguments in (
        (lambda w: w * 2, (rows,)),
        (lambda a, b: (b, a), trees),
        (lambda a, b: (jax.tree.map(jnp.exp, b), jax.tree.map(jnp.sin, a)), trees),
        (lambda a: a.T, (rows,)),
        (lambda a, b: b @ a, (rows, columns)),
    ):
        expected = jax.jit(step)(*arguments)
        assert layouts(expected) == layouts(lm.jit_step(step)(*arguments))


@pytest.mark.parametrize(
    ("specs", "place", "is_idle"),
    [
        ((None, "model"), "numpy", True),
        ((None, "model"), "batch_dim", False),
        ((None, "model"), "one device", True),
        ((None, "model"), "sharded", False),
        ((None, "model"), "constrained", False),
        ((None, "model"), "shard_map", False),
        (("batch", "model"), "numpy", False),
        ((None, ("batch", "model")), "numpy", False),
        ((None, "model"), "no batch", False),
    ],
)
def test_the_first_step_names_an_idle_dim_once(specs, place, is_idle):
    """A dim is idle that shards no argument, and that the function does not use; without a batch nothing is said."""
    mesh = lm.create_mesh("batch=2,model=4")
    kernel = lm.dtensor.relayout(np.ones((8, 16), np.float32), lm.Layout(specs, mesh))
    native, rows = kernel.sharding.mesh, np.ones((256, 8), np.float32)
    over_batch = jax.sharding.NamedSharding(native, jax.sharding.PartitionSpec("batch", None))
    given = {"one device": jnp.asarray(rows), "sharded": jax.device_put(rows, over_batch)}

    def step(params, x=None):
        if x is None:
            return {"kernel": params["kernel"] * 2}
        if place == "constrained":
            x = jax.lax.with_sharding_constraint(x, over_batch)
        if place == "shard_map":
            x = jax.shard_map(jnp.sin, mesh=native, in_specs=over_batch.spec, out_specs=over_batch.spec)(x)
        return {"kernel": params["kernel"] - (x @ params["kernel"]).mean(0)}

    compiled = lm.jit_step(step, batch_dim="batch" if place == "batch_dim" else None)
    arguments = () if place == "no batch" else (given.get(place, rows),)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        params = {"kernel": kernel}
        for _ in range(2):
            params = compiled(params, *arguments)
    ours = [each for each in caught if each.category is lm.LayoutMapWarning]

    assert ["step: mesh dim 'batch' is idle"] * is_idle == [str(w.message).splitlines()[0] for w in ours]
    assert all("pass batch_dim='batch' to jit_step" in str(w.message) for w in ours)
    assert all(w.filename == __file__ for w in ours)


def test_known_calls_are_not_checked_again(layout_map, monkeypatch):
    """A call like an earlier one runs at once, also in turns with others; one that differs in anything is checked."""
    rows, columns = (lm.Layout(spec, layout_map.mesh) for spec in (["batch", "model"], ["model", None]))
    weight = lambda layout=rows: lm.dtensor.relayout(np.ones((8, 8), np.float32), layout)  # noqa: E731
    x = np.ones((4, 8), np.float32)
    calls = [
        (weight(), x, 1),
        (weight(), x[:2], 1),
        (weight(columns), x, 1),
        (weight(), x.astype(np.float16), 1),
        (weight(), jnp.asarray(x), 1),
        (weight(), lm.dtensor.relayout(x, rows), 1),
        (weight(), x, 2),
    ]
    step = lm.jit_step(lambda w, x, n: (w * n, (x @ w).sum() * n), batch_dim="batch", static_argnums=2)
    find, found = type(step._programs).get_or_compile_program, []
    monkeypatch.setattr(
        type(step._programs), "get_or_compile_program", lambda *args: found.append(args) or find(*args)
    )
    expected = []
    for number, call in enumerate(calls, 1):
        expected.append(jax.device_get(step(*call)))
        assert len(found) == number
    for call, values in [*zip(calls, expected, strict=True)] * 2:
        results = step(*call)
        np.testing.assert_array_equal(results[0], values[0])
        assert results[1] == values[1]
        assert results[0].sharding == call[0].sharding
    for call, values in zip(
        calls, expected, strict=True
    ):  # `jax.jit` itself finds that each is not the one before
        for arguments in (calls[0], calls[0], call):
            results = step(*arguments)
        np.testing.assert_array_equal(results[0], values[0])
        assert results[0].sharding == call[0].sharding
    assert len(found) == len(calls)


def test_a_repeated_call_goes_straight_to_jax(layout_map, monkeypatch):
    """A call like the one before is not flattened, and each unsafe call after it is refused as a first one is."""
    layout = lm.Layout(["model", None], layout_map.mesh)

    def weight():
        return lm.dtensor.relayout(np.ones((8, 8), np.float32), layout)

    x, keys = np.ones((4, 8), np.float32), jax.random.split(jax.random.key(0), 4)
    keys = jax.device_put(keys, jax.sharding.NamedSharding(weight().sharding.mesh, jax.P("batch")))

    def step(params, x, scale=1.0):
        noise = jax.random.normal(params["keys"][0], ())
        params = {**params, "w": [each + 1 for each in params["w"]]}
        return params, (x @ params["w"][0]).sum() * scale + noise

    compiled = lm.jit_step(step, donate_argnums=0, batch_dim="batch")
    params = {"w": [weight(), weight()], "keys": keys}
    params, _ = compiled(params, x)
    read, flattened = type(compiled._reader.read_arguments((), {})), []
    flatten = read.flatten_arguments
    monkeypatch.setattr(read, "flatten_arguments", lambda self: flattened.append(self) or flatten(self))
    for _ in range(3):
        before, (params, loss) = params, compiled(params, x)
        assert params["w"][0].sharding == before["w"][0].sharding
    assert not flattened
    assert np.asarray(params["w"][1]).tolist() == np.full((8, 8), 5.0).tolist()

    with pytest.raises(lm.LayoutError, match=r"\['w'\]\[0\] was donated"):
        compiled({**params, "w": before["w"]}, x)
    with pytest.raises(lm.LayoutError, match="are the same array, which is donated"):
        compiled({**params, "w": [params["w"][0]] * 2}, x)
    for change in (jax.clear_caches, lambda: jax.config.update("jax_default_matmul_precision", "float32")):
        change()
        for _ in range(2):
            params, again = compiled(params, x)
    jax.config.update("jax_default_matmul_precision", None)
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("other",))):
        for _ in range(2):
            params, again = compiled(params, x)
    assert float(again) - float(loss) == pytest.approx(6 * 4 * 8 * 8)
    assert compiled.num_programs == 1


def test_equal_numbers_are_not_one_donated_array(layout_map):
    """Only arrays can be donated twice: equal numbers beside an array that is passed twice are not."""
    w = lm.dtensor.relayout(np.ones(8, np.float32), lm.Layout(["batch"], layout_map.mesh))
    step = lm.jit_step(lambda kept, given: (kept[0] + kept[1], given["a"] + given["b"]), donate_argnums=1)
    assert step((w, w), {"a": 1, "b": 1})[1] == 2
