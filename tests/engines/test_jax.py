"""The JAX engine keeps the contract, and what only JAX can be asked."""

import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some
from hypothesis import given, settings

from layoutmap.core.errors import EngineError
from layoutmap.core.initializers import Initializer, InitializerProgram
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines.jax.engine import engine
from layoutmap.engines.jax.programs import ShardedProgram, explain_why_sharding_changes_values, trace_program
from layoutmap.testing.engine_contract import EngineContract, assert_same_bits


def normal(seed, shape, dtype):
    """A program that rounds at each operation: compiled as one it would round less often."""
    return jax.random.normal(seed, shape, dtype) * np.asarray(0.05, dtype) + np.asarray(0.013, dtype)


def random_draw(shape, dtype, seed):
    key = jnp.array([seed, 0], jnp.uint32)

    def function(seed):
        return normal(seed, shape, dtype)

    return Initializer(
        global_value=lambda: function(key),
        program=InitializerProgram(("normal", shape, dtype), key, function),
    )


class TestJaxEngine(EngineContract):
    engine_name = "jax"
    # XLA compiles the programs of each mesh anew.
    meshes = some(EngineContract.meshes, "x=2,y=2,z=2", "x=1")

    def make_array(self, values):
        return jnp.asarray(values)

    def get_device_values(self, array):
        return {
            f"{shard.device.platform.upper()}:{shard.device.id}": np.asarray(shard.data)
            for shard in array.addressable_shards
        }

    def make_random_initializer(self, shape, dtype, seed):
        return random_draw(shape, dtype, seed)

    def num_live_arrays(self):
        return len(jax.live_arrays())


def layout_on(dims, *specs):
    return Layout(specs, Mesh(None, dims))


def created(draws, layout, shape, dtype="float32"):
    assignments = {key: Assignment(VariableSpec(key, shape, dtype), layout) for key in draws}
    return engine().create_initial_values(assignments, draws)


def counted(shape, traced):
    """Draws whose programs note each time they are traced."""

    def draw(seed):
        def function(seed):
            traced.append(shape)
            return normal(seed, shape, "float32")

        program = InitializerProgram(("counted", shape), key_of(seed), function)
        return Initializer(global_value=lambda: normal(key_of(seed), shape, "float32"), program=program)

    return draw


def reason(draw):
    """Why an initializer's program cannot be computed in shards."""
    return explain_why_sharding_changes_values(trace_program(draw.program.function, draw.program.seed))


def key_of(seed):
    return jnp.array([seed, 0], jnp.uint32)


@settings(deadline=None, max_examples=8)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 5),
    dims=st.sampled_from(["x=2,y=4", "x=4,y=2", "x=8,y=1"]),
    specs=st.sampled_from([("x", "y"), ("y", "x"), (("x", "y"), None), (None, ("y", "x"))]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_programs_have_the_bits_of_the_plain_draw(rows, columns, dims, specs, dtype):
    """For any shape and layout, a program in shards has the bits of the same operations on one device."""
    shape = (8 * rows, 8 * columns)
    draw = random_draw(shape, dtype, seed=rows)
    expected = np.asarray(draw.global_value())
    made = created({"w": draw}, layout_on(dims, *specs), shape, dtype)["w"]

    assert_same_bits(expected, np.asarray(made))


def test_constants_of_a_program_are_computed_with_as_in_the_plain_draw():
    """What is divided by a constant is divided, and not multiplied by its reciprocal."""

    def function(seed):
        return normal(seed, (8, 8), "float32") * (jnp.sqrt(jnp.float32(0.125)) / jnp.float32(0.87962566))

    draw = Initializer(lambda: function(key_of(0)), InitializerProgram("divided", key_of(0), function))
    made = created({"w": draw}, layout_on("x=2,y=4", "x", "y"), (8, 8))["w"]

    assert_same_bits(np.asarray(function(key_of(0))), np.asarray(made))


def test_programs_make_only_shards():
    """No device of a program that draws in shards holds the whole value, or waits for another device."""
    layout = layout_on("x=2,y=4", "x", "y")
    draw = random_draw((64, 128), "float32", seed=1)
    assert draw.program is not None
    traced = trace_program(draw.program.function, draw.program.seed)
    program = ShardedProgram(traced, engine().make_native_layout(layout, 2))
    steps = program.lower_segments()
    for lowered in steps:
        compiled = lowered.compile()
        text = compiled.as_text()

        assert [] == re.findall(r"all-gather|all-reduce|all-to-all|collective-\w+|\[64,128\]", text)
        assert 4 * 32 * 32 == compiled.memory_analysis().output_size_in_bytes
        assert "f32[32,32]" in text
    assert 3 == len(steps)


def test_equal_variables_share_a_program():
    """Of many variables that are drawn alike, each with its seed, only the first is traced and compiled."""
    traced = []
    draw = counted((24, 8), traced)
    layout = layout_on("x=2,y=4", "x", "y")
    first = created({str(i): draw(i) for i in range(10)}, layout, (24, 8))
    second = created({str(i): draw(i) for i in range(10)}, layout, (24, 8))

    assert 1 == len(traced)
    assert 10 == len({np.asarray(array).tobytes() for array in first.values()})
    for key, array in first.items():
        assert_same_bits(np.asarray(array), np.asarray(second[key]))


def test_other_layouts_are_other_programs():
    """A program is not used for another layout or another type of seed than it was compiled for."""
    traced = []
    draw = counted((16, 8), traced)
    for specs in (("x", "y"), ("y", "x"), ("x", "y")):
        created({"w": draw(1)}, layout_on("x=2,y=4", *specs), (16, 8))

    assert 2 == len(traced)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("dot_general", lambda seed: normal(seed, (16, 16), "float32") @ normal(seed, (16, 16), "float32")),
        (
            "reduce_sum",
            lambda seed: normal(seed, (16, 16), "float32") - normal(seed, (16, 16), "float32").mean(),
        ),
        ("qr", lambda seed: jnp.linalg.qr(normal(seed, (16, 16), "float32"))[0]),
        ("cumsum", lambda seed: jnp.cumsum(normal(seed, (16, 16), "float32"), axis=0)),
        ("random_gamma", lambda seed: jax.random.gamma(jax.random.wrap_key_data(seed), 2.0, (16, 16))),
        (
            "constant array",
            lambda seed: jnp.asarray(np.ones((16, 16), np.float32)) + (np.arange(4096.0)[:16]),
        ),
    ],
)
def test_what_would_change_when_sharded_is_drawn_globally(name, function):
    """A program that adds elements up is initialized globally, says why, and has the plain draw's bits."""
    seed = key_of(3)
    draw = Initializer(
        global_value=lambda: function(seed), program=InitializerProgram((name, 16), seed, function)
    )
    made = created({"w": draw}, layout_on("x=2,y=4", ("y", "x"), None), (16, 16))["w"]

    if name != "constant array":
        assert name in reason(draw)
    assert_same_bits(np.asarray(draw.global_value()), np.asarray(made))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("zeros", lambda seed: jnp.zeros((16, 16))),
        ("identity", lambda seed: jnp.eye(16) * 0.7),
        ("flat", lambda seed: jax.random.normal(seed, (256,)).reshape(16, 16) * 0.3 + 0.1),
        ("transposed", lambda seed: jnp.exp(jax.random.normal(seed, (16, 16)).T) * 0.3 + 0.1),
        ("joined", lambda seed: jnp.concatenate([jax.random.normal(seed, (8, 16)), jnp.ones((8, 16))]) * 0.3),
        ("whole numbers", lambda seed: jax.random.randint(seed, (16, 16), 0, 9).cumsum(0).astype("float32")),
        ("its seed", lambda seed: jnp.broadcast_to(seed[0].astype("float32"), (16, 16))),
    ],
)
def test_what_does_not_change_when_sharded_is_drawn_in_shards(name, function):
    """Moves, whole numbers and work on single elements are done in shards, with the plain draw's bits."""
    seed = key_of(4)
    draw = Initializer(
        global_value=lambda: function(seed), program=InitializerProgram((name, 16), seed, function)
    )
    made = created({"w": draw}, layout_on("x=2,y=4", ("y", "x"), None), (16, 16))["w"]

    assert "" == reason(draw)
    assert_same_bits(np.asarray(draw.global_value()), np.asarray(made))


def test_typed_keys_are_seeds_too():
    """A seed may be a typed key of JAX, or a nest of seeds."""
    seed = {"key": jax.random.key(5), "scale": np.float32(0.3)}

    def function(seed):
        return jax.random.normal(seed["key"], (8, 8)) * seed["scale"]

    draw = Initializer(
        global_value=lambda: function(seed), program=InitializerProgram("typed", seed, function)
    )
    made = created({"w": draw}, layout_on("x=2", "x", None), (8, 8))["w"]

    assert_same_bits(np.asarray(draw.global_value()), np.asarray(made))


def test_arrays_are_made_while_jax_traces():
    """Inside a function that is being traced, creating gives arrays with values, not tracers."""
    made = {}

    @jax.jit
    def step(x):
        made.update(created({"w": random_draw((8, 8), "float32", 6)}, layout_on("x=2", "x", None), (8, 8)))
        return x + made["w"]

    step(np.zeros((8, 8), np.float32))

    assert_same_bits(np.asarray(random_draw((8, 8), "float32", 6).global_value()), np.asarray(made["w"]))


def test_a_tracer_is_relaid_out():
    """Inside a function that is being traced, relayout puts the result in the layout."""
    layout = layout_on("x=2,y=4", "x", "y")
    array = engine().relayout(np.ones((8, 8), np.float32), layout)
    result = jax.jit(lambda a: engine().relayout(a * 2, layout_on("x=2,y=4", "y", None)))(array)

    assert ("y", "unsharded") == engine().get_layout(result).sharding_specs


def test_independent_relayouts_do_not_wait_for_each_other():
    """Many independent programs with collectives, one after the other on virtual devices, come to an end."""
    arrays = [
        engine().relayout(np.full((64, 64), i, np.float32), layout_on("x=8", "x", None)) for i in range(64)
    ]
    moved = [engine().relayout(array, layout_on("x=8", None, "x")) for array in arrays]

    assert all(array.is_ready() for array in moved)
    assert list(range(64)) == [int(array[0, 0]) for array in moved]


def test_numbers_of_64_bits_are_refused_by_name():
    """A variable of 64 bits is refused by its path while JAX would make it one of 32."""
    with pytest.raises(EngineError, match=r"w: JAX would store float64 as float32"):
        created({"w": Initializer(global_value=lambda: np.zeros(4))}, layout_on("x=2", "x"), (4,), "float64")


def test_natives_are_made_once():
    """Equal layouts have the same sharding, and layouts on one mesh the same mesh of JAX."""
    native = engine().make_native_layout(layout_on("x=2,y=4", "x", "y"), 2)

    assert native is engine().make_native_layout(layout_on("x=2,y=4", "x", "y"), 2)
    assert native.mesh is engine().make_native_layout(layout_on("x=2,y=4", None), 1).mesh
    assert all(jax.sharding.AxisType.Auto == kind for kind in native.mesh.axis_types)


def test_arrays_that_jax_laid_out_have_a_layout():
    """The layout of an array that was laid out by JAX's own means is reported, also on a mesh with explicit axes."""
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    native = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("b", "a")))
    array = jax.device_put(np.arange(16.0, dtype=np.float32).reshape(8, 2), native)
    layout = engine().get_layout(array)
    moved = engine().relayout(array, Layout([None, "b"], layout.mesh))

    assert Layout([("b", "a"), None], Mesh(engine().list_device_names(), "a=4,b=2")) == layout
    assert_same_bits(np.asarray(array), np.asarray(moved))
    assert mesh.axis_types == moved.sharding.mesh.axis_types


def test_replicas_can_be_donated():
    """The shards of a replicated array are its own: giving its memory to a compiled step changes nothing else."""
    layout = layout_on("x=8", None)
    values = np.arange(1024, dtype=np.float32)
    first, second = (engine().relayout(values, layout) for _ in range(2))
    third = engine().relayout(second, layout)
    step = jax.jit(lambda a: a + 1, donate_argnums=0)
    for _ in range(3):
        first = step(first)

    assert_same_bits(values + 3, np.asarray(first))
    assert_same_bits(np.arange(1024, dtype=np.float32), np.asarray(second))
    assert_same_bits(np.arange(1024, dtype=np.float32), values)
    assert not third.is_deleted()
