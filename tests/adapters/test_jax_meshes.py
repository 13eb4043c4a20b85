"""Models whose code names mesh dims: under `jax.set_mesh` or without it, on auto and on explicit axes."""

import contextlib
import warnings

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import layoutmap as lm
from layoutmap.adapters.jax import train_with
from layoutmap.engines import get_engine

P = PartitionSpec
MESH = "batch=2,model=4"
X = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
TARGET = np.random.default_rng(1).normal(size=(8, 16)).astype("float32")
SGD, ADAM = optax.sgd(0.1), optax.adamw(0.01)


def mean_square(y, target):
    return ((y - target) ** 2).mean()


class Plain(nnx.Module):
    """Names no mesh dim."""

    def __init__(self, rngs):
        # Kernels of more elements than what is computed on one device
        self.up = nnx.Linear(16, 256, rngs=rngs)
        self.down = nnx.Linear(256, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


class Constrained(Plain):
    """Constrains an activation by a spec without a mesh."""

    def __call__(self, x):
        return self.down(jax.lax.with_sharding_constraint(nnx.relu(self.up(x)), P("batch", "model")))


class Mapped(Plain):
    """Computes a layer by `jax.shard_map` without a mesh."""

    def __call__(self, x):
        def double(h):
            assert h.shape[1] * jax.sharding.get_abstract_mesh().shape["model"] == 256
            return 2 * h

        return self.down(
            jax.shard_map(double, in_specs=P("batch", "model"), out_specs=P("batch", "model"))(self.up(x))
        )


class Explicit(Plain):
    """Names the sharding of each product, as code for explicit axes does."""

    def __call__(self, x):
        # Part of the type, once the kernel is in its layout
        spec = jax.typeof(self.up.kernel[...]).sharding.spec
        assert not is_traced(x) or 1 == jax.sharding.get_abstract_mesh().size or P(None, "model") == spec
        return self.down(
            nnx.relu(self.up(x, out_sharding=P("batch", "model"))), out_sharding=P("batch", None)
        )


class Resharded(Plain):
    """Moves the activation so that the product needs no sharding."""

    def __call__(self, x):
        h = jax.sharding.reshard(nnx.relu(self.up(x)), P("batch", None))
        return h @ jax.sharding.reshard(self.down.kernel[...], P(None, None)) + self.down.bias[...]


def is_traced(x):
    return isinstance(x, jax.core.Tracer)


AUTO, EXPLICIT = (Constrained, Plain, Mapped), (Explicit, Resharded)
CASES = [(cls, kind) for kind, classes in (("auto", AUTO), ("explicit", EXPLICIT)) for cls in classes]


def make_map(axis_types):
    layout_map = lm.LayoutMap(lm.create_mesh(MESH, axis_types=axis_types))
    layout_map[r".*up\.kernel"] = P(None, "model")
    layout_map[r".*up\.bias"] = ("model",)
    layout_map[r".*down\.kernel"] = P("model", None)
    return layout_map


@contextlib.contextmanager
def ambient(name):
    """Set a mesh of the same devices with axes of this type, or none, and ignore the warning about other types."""
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.filterwarnings(
            "ignore", "the mesh of jax.set_mesh and the layout map's mesh", lm.LayoutMapWarning
        )
        if name is not None:
            types = (getattr(AxisType, name.title()),) * 2
            stack.enter_context(jax.set_mesh(jax.make_mesh((2, 4), ("batch", "model"), axis_types=types)))
        yield


def train(net, optimizer, num=3):
    @lm.jit_step(batch_dim="batch")
    def step(net, optimizer, x, target):
        loss, gradients = nnx.value_and_grad(lambda n: mean_square(n(x), target))(net)
        optimizer.update(net, gradients)
        return loss

    losses = [float(step(net, optimizer, X, TARGET)) for _ in range(num)]
    assert 1 == len(step._programs.by_signature), "a step is compiled once"
    return losses


def train_unsharded(cls, tx):
    """Return the losses of three steps on one device, under a mesh of it that has the dims, each of size 1."""
    types = (AxisType.Explicit if cls in EXPLICIT else AxisType.Auto,) * 2
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("batch", "model"), axis_types=types)
    with jax.set_mesh(mesh):
        net = cls(nnx.Rngs(3))
        optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
        losses = []
        for _ in range(3):
            loss, gradients = jax.jit(
                lambda graph, state: jax.value_and_grad(
                    lambda s: mean_square(nnx.merge(graph, s)(X), TARGET)
                )(state),
                static_argnums=0,
            )(*nnx.split(net))
            optimizer.update(net, gradients)
            losses.append(float(loss))
    return losses, jax.tree.map(np.asarray, nnx.state(net))


@pytest.mark.parametrize("tx", [SGD, ADAM], ids=["sgd", "adamw"])
@pytest.mark.parametrize("mesh", ["explicit", "auto", None])
@pytest.mark.parametrize(("cls", "axis_types"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_model_trains_as_on_one_device_whatever_mesh_is_set(cls, axis_types, mesh, tx):
    expected, weights = train_unsharded(cls, tx)
    with ambient(mesh):
        layout_map = make_map(axis_types)
        net = layout_map.build(lambda: cls(nnx.Rngs(3)))
        losses = train(net, layout_map.build_optimizer(tx, net))

    np.testing.assert_allclose(expected, losses, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(weights), jax.tree.leaves(nnx.state(net)), strict=True):
        np.testing.assert_allclose(one, np.asarray(other), rtol=1e-4, atol=1e-6)
    kernel = net.up.kernel[...]
    assert {getattr(AxisType, axis_types.title())} == {*kernel.sharding.mesh.axis_types}
    assert (
        lm.Layout([None, "model"], layout_map.mesh).sharding_specs
        == lm.dtensor.fetch_layout(kernel).sharding_specs
    )


@pytest.mark.parametrize("mesh", [None, "auto", "explicit"])
@pytest.mark.parametrize(
    ("cls", "axis_types"), CASES[::-1], ids=lambda value: getattr(value, "__name__", value)
)
def test_parity_plan_save_and_load_work_whatever_mesh_is_set(cls, axis_types, mesh, tmp_path):
    def make():
        return train_with(cls(nnx.Rngs(3)), loss=mean_square, optimizer=SGD)

    with ambient(mesh):
        layout_map = make_map(axis_types)
        assert lm.check_parity(make, layout_map, (X, TARGET), batch_dim="batch")
        plan = lm.plan(make, layout_map, on="h100:8", inputs=(X, TARGET), batch_dim="batch")
        assert not plan.errors
        assert plan.cost.step.collectives
        net = layout_map.build(lambda: cls(nnx.Rngs(3)))
        optimizer = layout_map.build_optimizer(ADAM, net)
        train(net, optimizer, num=1)
        lm.save(net, tmp_path, optimizer=optimizer)
        new = layout_map.build(lambda: cls(nnx.Rngs(4)))
        new, state = lm.load(new, tmp_path, optimizer=layout_map.build_optimizer(ADAM, new))
        assert not lm.inspect(net).diff(lm.inspect(new))
        assert train(net, optimizer, num=2) == train(new, state, num=2)


@pytest.mark.parametrize(
    ("cls", "axis_types"), CASES[::-1], ids=lambda value: getattr(value, "__name__", value)
)
def test_first_values_are_those_of_a_plain_model_bit_for_bit(cls, axis_types):
    net, plain = make_map(axis_types).build(lambda: cls(nnx.Rngs(5))), cls(nnx.Rngs(5))
    for one, other in zip(jax.tree.leaves(nnx.state(plain)), jax.tree.leaves(nnx.state(net)), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("mesh", ["auto", "explicit"])
def test_a_module_is_called_eagerly_under_another_mesh(mesh):
    """Its output is on the mesh that is set, so that the program can go on with it."""
    with ambient(mesh):
        net = make_map("auto").build(lambda: Plain(nnx.Rngs(3)))
        loss = net(X).sum() + jnp.ones(())
        assert {getattr(AxisType, mesh.title())} == {*loss.sharding.mesh.axis_types}
    np.testing.assert_allclose(Plain(nnx.Rngs(3))(X).sum() + 1, loss, rtol=1e-5)


def test_other_axis_types_are_told_with_the_way_out():
    mesh = jax.make_mesh((2, 4), ("batch", "model"))
    with jax.set_mesh(mesh), pytest.warns(lm.LayoutMapWarning, match="different axis types") as caught:
        make_map("auto").build(lambda: Plain(nnx.Rngs(3)))
    assert "LayoutMap(jax.sharding.get_mesh())" in str(caught[0].message)


def test_a_linen_model_with_constraints_is_built_and_stepped():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = jax.lax.with_sharding_constraint(linen.Dense(32, name="up")(x), P("batch", "model"))
            return linen.Dense(16, name="down")(x)

    net, layout_map = Net(), make_map("auto")
    params = layout_map.build(lambda: net.init(jax.random.key(0), jnp.zeros((8, 16))))

    @lm.jit_step(batch_dim="batch", donate_argnums=0)
    def step(params, x, target):
        loss, gradients = jax.value_and_grad(lambda p: mean_square(net.apply(p, x), target))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("batch", "model"))):
        plain = net.init(jax.random.key(0), jnp.zeros((8, 16)))
        expected = float(mean_square(net.apply(plain, X), TARGET))
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    params, loss = step(params, X, TARGET)
    np.testing.assert_allclose(expected, loss, rtol=1e-5)


def test_axis_types_are_taken_over_and_kept():
    native = jax.make_mesh((2, 4), ("batch", "model"))
    mesh = lm.LayoutMap(native).mesh
    assert ("explicit", "explicit") == mesh.axis_types
    assert mesh == lm.LayoutMap(native.abstract_mesh).mesh.with_devices(mesh.devices)
    assert eval(repr(mesh), {"Mesh": lm.Mesh}).axis_types == mesh.axis_types
    mixed = lm.create_mesh(MESH, axis_types={"model": "explicit"})
    assert ("auto", "explicit") == mixed.axis_types
    assert mixed == lm.Mesh(MESH)
    x = jax.device_put(X, NamedSharding(native, P("batch", "model")))
    moved = lm.dtensor.relayout(x, NamedSharding(native, P("model")))
    assert NamedSharding(native, P("model", None)) == moved.sharding
    assert NamedSharding(native, P(None, "batch")) == lm.dtensor.relayout(x, P(None, "batch")).sharding


def test_random_keys_made_under_explicit_axes_have_a_layout_of_their_rank():
    """JAX's spec of such keys has an entry for their numbers, too, which no reader may count as an axis."""
    with jax.set_mesh(jax.make_mesh((2, 4), ("batch", "model"), axis_types=(AxisType.Explicit,) * 2)):
        keys = jax.random.key(0), jax.random.split(jax.random.key(0), 2)
    for key in keys:
        assert key.ndim == lm.dtensor.fetch_layout(key).rank
        expected = np.asarray(jax.random.key_data(key))
        assert np.array_equal(expected, get_engine("jax").to_numpy(key))


def test_maps_of_both_axis_types_are_used_in_one_process():
    """Their layouts are equal, and each has arrays and slots of its own type."""
    for axis_types in ("auto", "explicit", "auto"):
        layout_map = make_map(axis_types)
        net = layout_map.build(lambda: Plain(nnx.Rngs(0)))
        slots = layout_map.build_optimizer(ADAM, net).opt_state[0].mu
        for leaf in (*jax.tree.leaves(nnx.state(net)), *jax.tree.leaves(slots)):
            assert {getattr(AxisType, axis_types.title())} == {*leaf.sharding.mesh.axis_types}


@pytest.mark.parametrize("axis_types", ["explicit", {"model": "explicit"}])
def test_axis_types_are_in_files(axis_types):
    layout_map = make_map(axis_types)
    again = lm.LayoutMap.from_yaml(layout_map.to_yaml())
    plan = lm.Plan.from_json(lm.plan(lambda: Plain(nnx.Rngs(0)), layout_map, library="jax").to_json())
    assert layout_map.mesh.axis_types == again.mesh.axis_types == plan.mesh.axis_types


@pytest.mark.parametrize("kind", ["batch", "model"])
def test_activations_are_laid_out_on_mixed_axis_types(kind):
    def build_and_call(axis_types):
        layout_map = lm.LayoutMap(lm.create_mesh(MESH, axis_types=axis_types))
        layout_map[r".*up\.kernel"] = (None, "model")
        layout_map[r".*down\.kernel"] = (None, None)
        layout_map.activations["up"] = ("batch", None)
        net = layout_map.build(lambda: Plain(nnx.Rngs(0)), batch_dim="batch", library="jax")
        return lm.jit_step(lambda net, x: net(x).sum(), batch_dim="batch")(net, X)

    np.testing.assert_allclose(build_and_call("auto"), build_and_call({kind: "explicit"}), rtol=1e-5)


def test_a_model_is_called_in_shard_map_while_another_mesh_is_set():
    with ambient("explicit"):
        net = lm.LayoutMap(lm.create_mesh(MESH), rest="replicated").build(
            lambda: Plain(nnx.Rngs(3)), library="jax"
        )

        @lm.jit_step(batch_dim="batch")
        def call(net, x):
            graph, state = nnx.split(net)
            run = jax.shard_map(
                lambda state, x: nnx.merge(graph, state)(x), in_specs=(P(), P("batch")), out_specs=P("batch")
            )
            return run(state, x).sum()

        np.testing.assert_allclose(Plain(nnx.Rngs(3))(X).sum(), call(net, X), rtol=1e-4)


def test_shardings_that_are_no_layouts_are_refused():
    """Pending sums are parts of JAX's shardings, and layouts have none of them. Host memory is a part of both."""
    mesh = jax.make_mesh((2, 4), ("batch", "model"))
    with pytest.raises(lm.LayoutError, match="sum over model is pending"):
        lm.dtensor.relayout(X, NamedSharding(mesh, P("batch", unreduced={"model"})))
    sharding = NamedSharding(mesh, P("batch", None), memory_kind="pinned_host")
    assert sharding == lm.dtensor.relayout(X, sharding).sharding


@pytest.mark.parametrize(
    ("axis_types", "why"),
    [("manual", "auto"), ({"data": "explicit"}, "no such dim"), (["explicit"], "1 of them for 2 dims")],
)
def test_wrong_axis_types_are_refused(axis_types, why):
    with pytest.raises(lm.MeshError, match=rf"(?s)axis type.*{why}.*axis_types="):
        lm.create_mesh(MESH, axis_types=axis_types)


def test_a_plan_tells_the_line_that_jax_refuses_and_what_to_write():
    def make():
        return train_with(Plain(nnx.Rngs(0)), loss=mean_square)

    plan = lm.plan(make, make_map("explicit"), on="h100:8", inputs=(X, TARGET), batch_dim="batch")
    (problem,) = plan.errors
    assert "out_sharding" == problem.kind
    assert "test_jax_meshes.py" in dict(problem.facts)["line"]
    assert "self.down(nnx.relu(self.up(x)))" in dict(problem.facts)["line"]
    assert "out_sharding=jax.P('batch', None)" in problem.fix
    assert "self.down(nnx.relu" in str(plan)


def scan_with_another_carry(params, x):
    return jax.lax.scan(lambda c, _: (jax.reshard(c, P("batch", "model")), None), x, None, length=2)[0]


def read_columns(params, x):
    return jnp.take_along_axis(jax.reshard(x @ params["up"], P()), jnp.argsort(x)[:, :1], -1)


def constrain_over_explicit_dims(params, x):
    return jax.lax.with_sharding_constraint(x @ params["up"], P("model", "batch"))


def map_over_other_dims(params, x):
    y = jax.reshard(x, P(None, "model"))
    return jax.vmap(lambda a, b: (a * b)[None], (1, 1), 1)(x, y) @ params["up"]


def scan_over_a_sharded_axis(params, x):
    weights = jax.reshard(jnp.broadcast_to(params["up"], (2, *params["up"].shape)), P("batch"))
    return jax.lax.scan(lambda c, w: (c, (c @ w).sum()), x, weights)[1]


def slice_a_sharded_axis(params, x):
    return jax.lax.map(lambda row: row[2:5], jax.reshard(x, P(None, "model")))


@pytest.mark.parametrize(
    ("axis_types", "forward", "line", "why", "fix"),
    [
        ("explicit", scan_with_another_carry, __file__, "@batch", "jax.sharding.reshard(x, jax.P(..))"),
        ("explicit", read_columns, "the gradient of take_along_axis", "@batch", "out_sharding="),
        (
            {"model": "explicit"},
            constrain_over_explicit_dims,
            __file__,
            "can only refer to Auto axes",
            "write jax.sharding.reshard(x, jax.P('model', None))",
        ),
        (
            "explicit",
            constrain_over_explicit_dims,
            __file__,
            "acts as an assert",
            "write jax.sharding.reshard(x, jax.P('model', 'batch'))",
        ),
        ("explicit", map_over_other_dims, __file__, "axis specs", "reshard(x, jax.P(..))"),
        ("explicit", slice_a_sharded_axis, __file__, "16@model", "reshard(x, jax.P(..))"),
        ("explicit", scan_over_a_sharded_axis, __file__, "xs should be replicated", "leave axis 0"),
    ],
)
def test_refusals_of_other_errors_are_problems(axis_types, forward, line, why, fix):
    """JAX raises no error of its own type for these."""
    layout_map = lm.LayoutMap(lm.create_mesh(MESH, axis_types=axis_types), rest="replicated")

    def make():
        return train_with(
            {"up": jnp.ones((X.shape[1], 8))}, forward=forward, loss=lambda y, target: (y**2).sum()
        )

    plan = lm.plan(make, layout_map, on="h100:8", inputs=(X, TARGET), batch_dim="batch", library="jax")
    (problem,) = plan.errors
    assert "out_sharding" == problem.kind
    assert why in problem.why
    assert line in dict(problem.facts)["line"]
    assert fix in problem.fix
