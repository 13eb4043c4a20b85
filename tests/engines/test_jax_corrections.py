"""Operators that XLA partitions wrongly: right in each layout, and JAX as it was found once the mesh is gone."""

import functools
import math

import forked
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import EVERYTHING, xla_settings
from hypothesis import given, settings
from jax import lax
from jax.sharding import PartitionSpec

import layoutmap as lm
from layoutmap.core.errors import EngineError
from layoutmap.cost.jax.compiled import compile_modules
from layoutmap.cost.jax.targets import find_target
from layoutmap.engines.jax.devices import make_named_sharding

PROCESSES = ("jax",)
MESHES = ("batch=2,model=4", "batch=4,model=2", "a=2,b=2,c=2", "batch=1,model=8", "model=4")
LETTERS = "DHW"


@st.composite
def drawn_layouts(draw, mesh, shape):
    """A layout of an array in which each axis that is sharded is split evenly."""
    specs = [() for _ in shape]
    for name in draw(st.permutations(mesh.dim_names)):
        divided = [
            axis
            for axis, n in enumerate(shape)
            if n and n % (mesh.dim_size(name) * math.prod(map(mesh.dim_size, specs[axis]))) == 0
        ]
        axis = draw(st.sampled_from([None, *divided]))
        if axis is not None:
            specs[axis] = (*specs[axis], name)
    return lm.Layout([spec or None for spec in specs], mesh)


@st.composite
def drawn_convolutions(draw):
    """A convolution, its operands' shapes, and their layouts."""
    mesh = lm.create_mesh(draw(st.sampled_from(MESHES)))
    rank = draw(st.integers(1, 3))
    by_batch = draw(st.booleans()) and draw(st.booleans())
    groups = draw(st.sampled_from([1, 2, 4, 8]))
    of_group, out_of_group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))
    rows = groups * draw(st.sampled_from([1, 2])) if by_batch else draw(st.sampled_from([2, 4, 8]))
    sizes = [draw(st.sampled_from([4, 5, 8])) for _ in range(rank)]
    windows = [draw(st.integers(1, 4)) for _ in range(rank)]
    dilation = [draw(st.sampled_from([1, 1, 2])) for _ in range(rank)]
    space = LETTERS[-rank:]
    numbers = draw(
        st.sampled_from(
            [(f"N{space}C", f"{space}IO", f"N{space}C"), (f"NC{space}", f"OI{space}", f"NC{space}")]
        )
    )
    features = of_group if by_batch else groups * of_group
    x = {"N": rows, "C": features} | dict(zip(space, sizes, strict=True))
    kernel = {"I": of_group, "O": groups * out_of_group} | dict(zip(space, windows, strict=True))
    shapes = [tuple(x[c] for c in numbers[0]), tuple(kernel[c] for c in numbers[1])]
    padding = [
        (max(0, (window - 1) * each + 1 - size) + draw(st.integers(0, 1)), draw(st.integers(0, 2)))
        for window, each, size in zip(windows, dilation, sizes, strict=True)
    ]
    options = {
        "window_strides": [draw(st.sampled_from([1, 1, 2])) for _ in range(rank)],
        "padding": padding,
        "lhs_dilation": [draw(st.sampled_from([1, 1, 1, 2])) for _ in range(rank)],
        "rhs_dilation": dilation,
        "dimension_numbers": numbers,
        "feature_group_count": 1 if by_batch else groups,
        "batch_group_count": groups if by_batch else 1,
    }
    return mesh, options, shapes, [draw(drawn_layouts(mesh, shape)) for shape in shapes]


def values_and_gradients(function, arrays):
    """What a function returns, and the gradients of a sum of it with weights of its own for each element."""

    def loss(*arrays):
        value = function(*arrays)
        return (value * jnp.linspace(-1, 2, value.size).reshape(value.shape)).sum(), value

    (_, value), gradients = jax.value_and_grad(loss, tuple(range(len(arrays))), has_aux=True)(*arrays)
    return value, *gradients


def on_mesh_and_not(function, arrays, layouts):
    """What a function and its gradients are on one device, and with their arguments in layouts, in the same shapes."""
    compiled = functools.partial(values_and_gradients, function)
    placed = [lm.dtensor.relayout(each, layout) for each, layout in zip(arrays, layouts, strict=True)]
    return jax.jit(lambda *a: compiled(a))(*arrays), jax.jit(lambda *a: compiled(a))(*placed)


def assert_close(expected, actual):
    for one, other in zip(expected, actual, strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert one.shape == other.shape
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5 * max(1.0, np.abs(one).max(initial=0)))


@settings(max_examples=settings().max_examples * (4 if EVERYTHING else 1))
@given(drawn_convolutions(), st.integers(0, 2**32 - 1))
def test_convolutions(drawn, seed):
    """Convolutions of all kinds and their gradients are in any layout what they are on one device."""
    _, options, shapes, layouts = drawn
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=shape).astype("float32") for shape in shapes]

    assert_close(*on_mesh_and_not(lambda x, k: lax.conv_general_dilated(x, k, **options), arrays, layouts))


@st.composite
def drawn_pools(draw):
    """A pooling operator, the shape of its operand and a layout of it."""
    mesh = lm.create_mesh(draw(st.sampled_from(MESHES)))
    rank = draw(st.integers(1, 3))
    shape = tuple(draw(st.sampled_from([4, 8, 12])) for _ in range(rank))
    windows = tuple(draw(st.integers(1, 3)) for _ in range(rank))
    strides = tuple(draw(st.integers(1, 3)) for _ in range(rank))
    padding = draw(st.sampled_from(["VALID", "SAME"]))
    kind = draw(st.sampled_from([(lax.max, -np.inf), (lax.min, np.inf), (lax.add, 0.0)]))
    return kind, (windows, strides, padding), shape, draw(drawn_layouts(mesh, shape))


@given(drawn_pools(), st.integers(0, 2**32 - 1))
def test_pooling(drawn, seed):
    """Pooling and its gradient, and the gradient's own gradient, are in any layout what they are on one device."""
    (function, initial), arguments, shape, layout = drawn
    x = np.random.default_rng(seed).permutation(math.prod(shape)).reshape(shape).astype("float32")

    def pooled(x):
        return lax.reduce_window(x, np.float32(initial), function, *arguments)

    def sloped(x):
        return jax.jvp(pooled, (x,), (jnp.sin(x),))[1]

    assert_close(*on_mesh_and_not(pooled, [x], [layout]))
    assert_close(*on_mesh_and_not(sloped, [x], [layout]))


def depthwise(x, kernel):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=x.shape[-1]
    )


def gradient_of(kernel, x):
    return jax.grad(lambda k: (depthwise(x, k) ** 2).sum())(kernel)


ROWS, KERNEL = np.ones((8, 8, 8, 8), np.float32), np.ones((3, 3, 1, 8), np.float32)


def test_where_rules_go_by_shard_map():
    """Inside of shard_map each device convolves its own rows, by JAX's own rule."""
    mesh = lm.create_mesh("batch=2,model=4")
    native = make_named_sharding(lm.Layout.replicated(mesh, 0)).mesh
    specs = PartitionSpec(), PartitionSpec("batch")

    def local(kernel, x):
        return lax.psum(gradient_of(kernel, x), "batch")

    step = jax.jit(
        jax.shard_map(local, mesh=native, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    )

    assert 1 == step.lower(KERNEL, ROWS).as_text().count("batch_group_count = 8")
    np.testing.assert_allclose(step(KERNEL, ROWS), gradient_of(KERNEL, ROWS), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_low_precision(dtype):
    """Products of 16 bits are added up in 32 bits, as XLA's own convolutions add them up."""
    mesh = lm.create_mesh("batch=2,model=4")
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=each.shape), dtype) for each in (ROWS, KERNEL))
    exact = gradient_of(*(np.asarray(each, np.float32) for each in (kernel, x)))
    placed = (
        lm.dtensor.relayout(kernel, lm.Layout.replicated(mesh, 4)),
        lm.dtensor.relayout(x, lm.Layout.batch_sharded(mesh, "batch", 4)),
    )
    scale = np.abs(exact).max()

    def error(found):
        return np.abs(np.asarray(found, np.float64) - exact).max() / scale

    assert error(jax.jit(gradient_of)(*placed)) <= 2 * max(error(jax.jit(gradient_of)(kernel, x)), 1e-6)


def test_a_long_window():
    """A window of more places than a program can have products for is right, too."""
    mesh = lm.create_mesh("batch=2,model=4")
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(4, 512, 4)).astype("float32"), rng.normal(size=(400, 1, 4)).astype("float32")
    layouts = lm.Layout.batch_sharded(mesh, "batch", 3), lm.Layout.replicated(mesh, 3)
    numbers = ("NWC", "WIO", "NWC")

    def convolve(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, (1,), "VALID", dimension_numbers=numbers, feature_group_count=4
        )

    assert_close(*on_mesh_and_not(convolve, [x, kernel], layouts))


def test_windows_of_one_element_with_padding():
    """XLA ended the process: the gradient of the input has padding between its elements and a negative one before."""
    mesh = lm.create_mesh("a=2,b=4")
    rng = np.random.default_rng(0)
    x, kernel = (rng.normal(size=shape).astype("float32") for shape in ((8, 8, 16, 8), (1, 1, 4, 8)))
    layouts = lm.Layout([None, "a", "b", None], mesh), lm.Layout([None, None, None, "b"], mesh)

    def convolve(x, kernel):
        options = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": 2}
        return lax.conv_general_dilated(jnp.tanh(x), kernel, (2, 2), [(1, 1), (0, 1)], **options)

    assert_close(*on_mesh_and_not(convolve, [x, kernel], layouts))


def collectives(text):
    return {
        name: text.count(f" {name}(")
        for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    }


PROGRAM = """
import jax
import numpy as np
import optax
from jax import lax
from jax.interpreters import mlir
import layoutmap as lm

def rules():
    tables = [mlir._lowerings, *mlir._platform_specific_lowerings.values()]
    kinds = lax.conv_general_dilated_p, lax.select_and_scatter_p, lax.select_and_gather_add_p
    is_cached = kinds[0] not in jax._src.interpreters.mlir._uncacheable_primitives
    return [is_cached, *(table.get(kind) for table in tables for kind in kinds)]

def forward(params, x):
    y = lax.conv_general_dilated(
        x, params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=8
    )
    return lax.reduce_window(y, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID").sum()

def text():
    jax.clear_caches()
    return jax.jit(jax.grad(forward)).lower(params, x).as_text()

from layoutmap.adapters.jax import train_with
params, x = {"kernel": np.ones((3, 3, 1, 8), "float32")}, np.ones((8, 8, 8, 8), "float32")
layout_map = lm.LayoutMap("batch=2,model=4", rest="replicated")
before, plain = rules(), text()

def make():
    made = jax.tree.map(jax.numpy.asarray, params)
    return train_with(made, forward=forward, optimizer=optax.sgd(0.1))

lm.step_cost(make, layout_map, inputs=(x,), library="jax")
print("a plan", rules() == before)
layout_map.build(lambda: jax.tree.map(jax.numpy.asarray, params), library="jax")
print("a model", rules() == before, text() == plain)
"""


def test_programs_for_one_device():
    """They are lowered by JAX's own rules beside a model in layouts, and a counted step replaces none."""
    ended = forked.run(PROGRAM, environment=xla_settings(8))

    assert ["a plan True", "a model False True"] == ended.stdout.splitlines(), ended.stderr


def test_what_is_not_sharded_is_not_gathered():
    """Where no window goes over a sharded axis a step exchanges no more than without any of this."""
    mesh = lm.create_mesh("batch=2,model=4")
    layouts = lm.Layout([None, None, None, "model"], mesh), lm.Layout.batch_sharded(mesh, "batch", 4)
    shardings = tuple(map(make_named_sharding, layouts))
    kernel = np.ones((3, 3, 8, 16), np.float32)

    def step(kernel, x):
        y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return lax.reduce_window(y, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID").sum()

    compiled = (
        jax.jit(jax.grad(step), in_shardings=shardings, out_shardings=shardings[0])
        .lower(kernel, ROWS)
        .compile()
    )

    assert {"all-gather": 0, "all-reduce": 1, "all-to-all": 0, "collective-permute": 0} == collectives(
        compiled.as_text()
    )


def test_the_input_of_a_convolution_is_gathered_once_for_it_and_for_its_gradient():
    """Without corrections, XLA sends it once, too. A convolution with other windows reads the input, too."""
    mesh = lm.create_mesh("model=8")
    sharding = make_named_sharding(lm.Layout([None, None, None, "model"], mesh))
    kernels = [np.ones((size, size, 16, 16), np.float32) for size in (3, 3, 1)]

    def convolve(x, kernel):
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def step(kernels, x):
        first, second, other = kernels
        y = jnp.tanh(convolve(x, first))
        return (jnp.tanh(convolve(y, second)) + y * convolve(x, other)).sum()

    compiled = (
        jax.jit(jax.grad(step), in_shardings=([sharding] * 3, None), out_shardings=[sharding] * 3)
        .lower(kernels, np.ones((8, 8, 8, 16), np.float32))
        .compile()
    )

    assert 1 == collectives(compiled.as_text())["all-gather"]


@pytest.mark.parametrize("name", ["checkpoint", "scan", "cond", "jit", "second derivative"])
def test_a_gathered_copy_is_read_only_where_it_is_defined(name):
    """The bodies of loops, branches, and functions have copies of their own."""
    mesh = lm.create_mesh("batch=2,model=4")
    layouts = (
        lm.Layout([None, None, None, None, "model"], mesh),
        lm.Layout([None, "batch", None, "model"], mesh),
    )
    rng = np.random.default_rng(0)
    kernels, x = (rng.normal(size=shape).astype("float32") for shape in ((2, 3, 3, 8, 8), (4, 8, 8, 8)))

    def convolve(x, kernel):
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def layer(x, kernel):
        return jnp.tanh(convolve(x, kernel) + x)

    def compute(kernels, x):
        first, second = kernels
        match name:
            case "checkpoint":
                x = jax.checkpoint(layer)(convolve(x, second), first)
            case "scan":
                x, _ = lax.scan(lambda x, kernel: (layer(x, kernel), None), convolve(x, second), kernels)
            case "cond":
                x = lax.cond(x[0, 0, 0, 0] > 0, layer, convolve, x, first) + convolve(x, second)
            case "jit":
                x = jax.jit(layer)(x, first) + convolve(x, second)
            case _:
                x = jax.grad(lambda x: layer(x, first).sum())(x) + convolve(x, second)
        return x**2

    assert_close(*on_mesh_and_not(compute, [kernels, x], layouts))


@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_each_compiler_adds_up_over_the_batch_alone(target):
    """The gradient of a depthwise kernel is summed over the dim of the batch, also by the compiler for GPUs."""
    try:
        find_target(target)
    except EngineError as error:  # the extra xla-gpu
        pytest.skip(str(error).splitlines()[0])
    mesh = lm.create_mesh("batch=2,model=4")
    shardings = tuple(
        map(make_named_sharding, (lm.Layout.replicated(mesh, 4), lm.Layout.batch_sharded(mesh, "batch", 4)))
    )
    step = jax.jit(gradient_of, in_shardings=shardings, out_shardings=shardings[0])
    [compiled] = compile_modules([step.lower(KERNEL, ROWS).as_text().encode()], 8, target)

    assert {("all_reduce", 2)} == {(each.kind, each.group) for each in compiled.collectives}
    assert KERNEL.nbytes == sum(each.tensor_bytes * n for each, n in compiled.collectives.items())
