"""Products, convolutions, gathers and scatters, in layouts that nobody chose, are those of one device.

As a program it counts which of many drawn ones are wrong in XLA, and with this package's correction:

    python tests/engines/test_jax_products.py --count 3000 --kind convolutions
"""

import argparse
import functools
import itertools
import math
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a program, it finds what tests share

import jax
import numpy as np
import pytest
from cases import EVERYTHING, few
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import layoutmap as lm
from layoutmap.core.errors import EngineError
from layoutmap.engines.jax import shardy
from layoutmap.engines.jax.far_products import correct_products_in_module

PROCESSES = ("jax",)
XLA = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
MESHES = ((2, 4), (4, 2), (2, 2, 2))


def mesh_of(sizes):
    return Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), ("x", "y", "z")[: len(sizes)])


def correct():
    """Have the package correct what XLA lowers, as it does from the first array on that it places."""
    mesh = lm.create_mesh("batch=2,model=4", device_type="cpu")
    lm.dtensor.relayout(np.zeros(()), lm.Layout.replicated(mesh, 0))


def compiled(function, operands, mesh, specs, result_spec):
    return (
        jax.jit(
            lambda *each: function(*each),
            in_shardings=tuple(NamedSharding(mesh, spec) for spec in specs),
            out_shardings=None if result_spec is None else NamedSharding(mesh, result_spec),
        )
        .lower(*operands)
        .compile()
    )


def is_right(function, operands, mesh, specs, result_spec, one=None):
    """Whether a function in layouts is that of one device, `one`; of whole numbers, which no order of sums rounds."""
    placed = [
        jax.device_put(each, NamedSharding(mesh, spec)) for each, spec in zip(operands, specs, strict=True)
    ]
    made = compiled(function, operands, mesh, specs, result_spec)(*placed)
    return np.array_equal(made, jax.jit(one or function)(*operands))


def einsum(equation):
    return lambda *operands: jax.numpy.einsum(equation, *operands)


def read(table, indices):
    return jax.numpy.take(table, indices, axis=0)


def whole_numbers(rng, *shapes):
    return [rng.integers(-3, 4, shape).astype("float32") for shape in shapes]


def test_three_summed_axes():
    """Also where the operands are sharded along different ones: XLA leaves out the mesh dim that they share."""
    correct()
    mesh = mesh_of((2, 4))
    operands = whole_numbers(np.random.default_rng(0), (4, 4, 4, 2), (4, 4, 4, 3))
    specs = [PartitionSpec(*order) for order in itertools.permutations(("x", "y", None))]
    pairs = list(itertools.product(specs, specs))[:: 1 if EVERYTHING else 5]

    assert [] == [pair for pair in pairs if not is_right(einsum("abci,abcj->ij"), operands, mesh, pair, None)]


P = PartitionSpec
WANTED = {
    "a kernel's gradient": ((2, 2, 2), "ki,ku->iu", [P("z", "x"), P("z", ("y", "x"))], P("z")),
    "with a replicated operand": ((2, 2, 2), "ki,uk->iu", [P("x", "y"), P(None, "x")], P("x", ("z", "y"))),
    "of a batch over others": (
        (2, 2, 2),
        "ak,uavk->auv",
        [P("x", "y"), P("x", "z", None, "y")],
        P("x", "z", "y"),
    ),
    "of a batch over the sum's": ((4, 2), "kia,ka->ai", [P("x", None, "y"), P("x", "y")], P("x", "y")),
    "over two of the sum's": (
        (2, 2, 2),
        "aki,ka->ai",
        [P("y", ("z", "x")), P(("z", "x"), "y")],
        P(("y", "x"), "z"),
    ),
    "with operands over others": ((2, 2, 2), "kai,kau->aiu", [P("y"), P("z", "x")], P(("y", "x"), "z")),
}
"""A mesh, a product, the layouts of its operands, and a layout that is wanted of its result over dims of the sum."""


@pytest.mark.parametrize("name", few(WANTED, "of a batch over the sum's"))
def test_wanted_over_the_dims_of_the_sum(name):
    """A result is right in a layout that XLA would read in another order than the operands had it computed in."""
    correct()
    sizes, equation, specs, result_spec = WANTED[name]
    terms = equation.split("->")[0].split(",")
    operands = whole_numbers(np.random.default_rng(0), *([8] * len(term) for term in terms))

    assert is_right(einsum(equation), operands, mesh_of(sizes), specs, result_spec)


def test_a_convolution_wanted_over_the_dims_of_the_sum():
    """So is that of a convolution, whose sum is over features."""
    correct()
    numbers = ("NHC", "HIO", "NHC")
    convolve = functools.partial(
        jax.lax.conv_general_dilated, window_strides=(1,), padding="SAME", dimension_numbers=numbers
    )
    operands = whole_numbers(np.random.default_rng(0), (8, 4, 8), (3, 8, 8))
    specs = [P("y", None, "x"), P(None, "x", "z")]

    assert is_right(convolve, operands, mesh_of((2, 2, 2)), specs, P(("z", "y"), None, "x"))


GATHERED = {
    "rows of a sharded table": ((30, 12), (4, 6), [P("y"), P("x")], P("x", "y", "z")),
    "columns of a sharded table": ((64, 4, 16), (2, 2), [P(None, None, "x"), P()], P("y", None, ("x", "z"))),
}
"""A table, the shape of indices into its first axis, the layouts of both, and one that is wanted of what they read."""


@pytest.mark.parametrize("name", few(GATHERED, "rows of a sharded table"))
def test_gathered_over_other_dims(name):
    """An embedding's output is right in a layout over a dim that shards neither its table nor its tokens."""
    correct()
    shape, number, specs, result_spec = GATHERED[name]
    rng = np.random.default_rng(0)
    operands = whole_numbers(rng, shape)[0], rng.integers(0, shape[0], number)

    assert is_right(read, operands, mesh_of((2, 2, 2)), specs, result_spec)


@pytest.mark.parametrize("seed", few((1146, 1168), 1146))
def test_scattered_to_a_batch_of_tables(seed):
    """The gradient of what is read from a batch of tables is right over a dim that does not shard what was read."""
    correct()
    _, *case = drawn_gather(seed)  # XLA alone ends the process

    assert is_right(*case)


@pytest.mark.parametrize("seed", few(range(12), 0))
def test_scatters_of_uneven_shards(seed):
    """A scatter adds nothing but its updates, also where the shards of those do not divide them."""
    correct()
    _, *case = drawn_scatter(seed)

    assert is_right(*case)


def test_an_update_under_vmap_of_a_part_of_an_axis():
    """It changes that part alone. XLA writes it into each shard of an axis that the result has in shards."""
    correct()
    mesh = mesh_of((2, 4))

    def update(sharding, operand, updates, index):
        set_index = jax.vmap(lambda x, u, i: jax.lax.dynamic_update_index_in_dim(x, u, i, 2), (2, 2, None), 1)
        result = set_index(operand, updates, index)
        return result if sharding is None else jax.lax.with_sharding_constraint(result, sharding)

    operands = [*whole_numbers(np.random.default_rng(0), (16, 4, 8, 16), (16, 4, 8)), np.int32(8)]
    spec = P(None, None, None, "y")
    one, function = (functools.partial(update, each) for each in (None, NamedSharding(mesh, spec)))

    assert is_right(function, operands, mesh, [P(), P(), P()], spec, one)


@pytest.mark.parametrize("seed", few((31024, 31052, 31207, 31498, 31565), 31024))
def test_updates_of_a_part_of_an_axis(seed):
    """An update changes its part alone, in layouts where XLA writes it into each shard of the axis."""
    correct()
    _, *case = drawn_update(seed)

    assert is_right(*case)


@pytest.mark.parametrize("seed", few((11, 14, 17, 25, 39, 68, 91), 11))
def test_slices_that_begin_outside(seed):
    """Slices and updates are moved inside of the array, as on one device, and not in each shard."""
    correct()
    _, *case = drawn_slice(seed)

    assert is_right(*case)


@pytest.mark.parametrize("seed", few(range(8), 0))
def test_windows_padding_strides_and_sorts(seed):
    """They are those of one device where shards are uneven, or begin between padded elements."""
    correct()
    _, *case = drawn_window(seed)

    assert is_right(*case)


def test_a_scatter_on_some_of_the_devices():
    """What divides them is what divides the devices of the program, which can be fewer than there are."""
    correct()
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(3, 2), ("x", "y"))
    rng = np.random.default_rng(0)
    operands = [*whole_numbers(rng, (8, 4)), rng.integers(0, 16, 8)]
    one, function = (functools.partial(put, "add", 16, each) for each in (None, NamedSharding(mesh, P("x"))))

    assert is_right(function, operands, mesh, [P(), P()], P(), one)


def test_inside_of_a_loop():
    """So is that of a product in a function that a loop calls."""
    correct()
    mesh = mesh_of((2, 2, 2))
    wanted = NamedSharding(mesh, P("z"))

    @jax.jit
    def multiply(a, b):
        return jax.lax.with_sharding_constraint(a.T @ b, wanted)

    def loop(a, b):
        return jax.lax.scan(
            lambda total, _: (total + multiply(a, b), None), np.zeros((8, 8), "float32"), None, 2
        )[0]

    operands = whole_numbers(np.random.default_rng(0), (16, 8), (16, 8))

    assert is_right(loop, operands, mesh, [P("z", "x"), P("z", ("y", "x"))], P("z"))


@pytest.mark.parametrize("seed", few((79, 216, 248), 79))
def test_a_function_that_is_called_in_several_layouts(seed):
    """So are the results of each call of a function that JAX lowers once: each has layouts of its own."""
    correct()
    _, *case = drawn_calls(seed)  # the second one ended the process

    assert is_right(*case)


def test_layouts_that_xla_propagates_otherwise():
    """So is the gradient of a kernel in groups, of which XLA finds other layouts than Shardy's passes by themselves."""
    correct()
    rng = np.random.default_rng(0)
    kernel, wanted = rng.normal(size=(1, 6, 8)), P(None, None, ("x", "y"))
    operands = [kernel, rng.normal(size=(8, 16)), rng.normal(size=(24, 1, 24))]
    operands = [each.astype("float32") for each in operands]

    def loss(kernel, weight, images):
        numbers = ("NHC", "HIO", "NHC")
        features = jax.lax.conv_general_dilated(
            images, kernel, (1,), "VALID", dimension_numbers=numbers, feature_group_count=4
        )
        return ((features[:, 0] @ weight) ** 2).mean()

    made = compiled(jax.grad(loss), operands, mesh_of((2, 4)), [wanted, P("y"), P("y")], wanted)(*operands)

    np.testing.assert_allclose(jax.jit(jax.grad(loss))(*operands), made, rtol=1e-4)


def test_products_inside_of_shard_map():
    """A product that is computed on the mesh, and inside of `shard_map` over one of its dims, has no layout there."""
    correct()
    mesh, rng = mesh_of((2, 4)), np.random.default_rng(0)
    x, kernel = (rng.normal(size=shape).astype("float32") for shape in ((8, 16), (16, 16)))
    multiply = jax.jit(jax.numpy.matmul)
    inside = jax.shard_map(multiply, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"})

    made = compiled(
        lambda x, kernel: inside(multiply(x, kernel), kernel),
        [x, kernel],
        mesh,
        [P("x"), P(None, "y")],
        P("x"),
    )(x, kernel)

    np.testing.assert_allclose(x @ kernel @ kernel, made, rtol=1e-4)


def lowered(equation, sizes, specs, result_spec):
    """What JAX makes of a product of axes with eight elements."""
    shapes = [jax.ShapeDtypeStruct([8] * len(term), "float32") for term in equation.split("->")[0].split(",")]
    shardings = [NamedSharding(mesh_of(sizes), spec) for spec in (*specs, result_spec)]
    made = jax.jit(einsum(equation), in_shardings=tuple(shardings[:2]), out_shardings=shardings[2])
    return made.lower(*shapes).as_text()


@pytest.mark.parametrize(
    ("equation", "sizes", "specs", "result_spec"),
    [
        ("bsd,df->bsf", (2, 4), [P("x"), P("x", "y")], P("x", None, "y")),
        ("bsd,bsf->df", (2, 4), [P("x"), P("x", None, "y")], P("x", "y")),
        ("bsf,df->bsd", (2, 4), [P("x", None, "y"), P("x", "y")], P("x", None, "y")),
        ("bsd,bsf->df", (2, 2, 2), [P(("x", "y")), P(("x", "y"), None, "z")], P("y", "z")),
        ("bsd,bsf->df", (2, 2, 2), [P("y", "x"), P("y", "x", "z")], P("y", "z")),
        ("bsd,df->bsf", (2, 2, 2), [P(("x", "y"), None, "z"), P("y", "z")], P(("x", "y"), None, "z")),
    ],
    ids=[
        "forward",
        "kernel",
        "input",
        "kernel in replicas",
        "kernel of sequences",
        "2-D weights",
    ],
)
def test_usual_layouts(equation, sizes, specs, result_spec):
    """The products of data, weights and tensors that are sharded as usual are lowered as JAX lowers them."""
    correct()

    assert "propagation_barrier" not in lowered(equation, sizes, specs, result_spec)


def test_gspmd_is_refused():
    """GSPMD does not say which layouts it will choose: with it a product on a mesh of several dims is refused."""
    correct()
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        lowered("ki,ku->iu", (8,), [P("x"), P("x")], P("x"))
        with pytest.raises(EngineError) as refused:
            lowered("ki,ku->iu", (4, 2), [P("x"), P("x", "y")], P("x"))
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)

    assert "jax.config.update('jax_use_shardy_partitioner', True)" in refused.value.fix
    assert "XLA could compute wrong numbers" in str(refused.value)


FIXED = """
sdy.mesh @mesh = <["x"=4, "y"=2]>
func.func @main(%a: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
                %b: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) -> tensor<8x8xf32> {
  %0 = stablehlo.dot_general %a, %b, contracting_dims = [0] x [0]
    {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x", "y"}, {}]>]>}
    : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  return %0 : tensor<8x8xf32>
}
"""


def test_what_cannot_be_kept_apart_is_refused():
    """A product whose own layout is fixed is refused by name: a barrier behind it changes nothing."""
    with shardy.make_mlir_context():
        module = shardy.parse_module(FIXED)
        with pytest.raises(EngineError) as refused:
            correct_products_in_module(module, "step")

    assert "step: XLA could compute wrong numbers" == str(refused.value).splitlines()[0]


# -- drawn ones


def drawn_product(seed):
    """A name, a function, its operands, a mesh, the layouts of the operands and that of the result; `None`: any."""
    rng = random.Random(seed)
    mesh = mesh_of(rng.choice(MESHES))
    axes = {
        letter: rng.choice([2, 4, 8])
        for letters, most in (
            ("ab", [0, 0, 0, 1, 2]),
            ("klmn", [1, 1, 2, 3, 4]),
            ("ij", [0, 1, 2]),
            ("uv", [0, 1, 2]),
        )
        for letter in letters[: rng.choice(most)]
    }
    batch, summed, *free = (
        [each for each in axes if each in letters] for letters in ("ab", "klmn", "ij", "uv")
    )
    terms = [batch + summed + each for each in free]
    for term in terms:
        rng.shuffle(term)
    terms.append(batch + free[0] + free[1])
    specs = drawn_specs(rng, terms, axes, summed[0], mesh)
    equation = "{},{}->{}".format(*map("".join, terms))
    shapes = [[axes[letter] for letter in term] for term in terms[:2]]
    operands = whole_numbers(np.random.default_rng(seed), *shapes)
    return equation, einsum(equation), operands, mesh, specs[:2], specs[2]


def drawn_convolution(seed):
    """The same, of a convolution: the axes that its windows go over are not sharded."""
    rng = random.Random(seed)
    mesh = mesh_of(rng.choice(MESHES))
    groups = rng.choice([1, 1, 1, 2, 4])
    places = rng.choice([1, 3, 4, 8])
    window = rng.choice([each for each in (1, 2, 3, 8) if each <= places])
    axes = {"N": rng.choice([4, 8, 16]), "I": rng.choice([4, 8]), "O": rng.choice([4, 8, 16])}
    axes["C"] = axes["I"] * groups
    orders = [list(letters) for letters in ("NCH", "IOH", "NOH")]
    for order in orders:
        rng.shuffle(order)
    summed = "C" if groups == 1 else None
    terms = [[each.replace("I", "C" if groups == 1 else "I") for each in order] for order in orders]
    specs = drawn_specs(rng, terms, axes, summed, mesh)
    lhs, rhs, result = map("".join, orders)
    options = {
        "window_strides": (rng.choice([1, 1, 2]),),
        "padding": rng.choice(["VALID", "SAME"]),
        "dimension_numbers": (lhs, rhs, result.replace("O", "C")),
        "feature_group_count": groups,
    }
    sizes = [axes | {"H": places}, axes | {"H": window}]
    shapes = [[size[each] for each in order] for size, order in zip(sizes, orders, strict=False)]
    operands = whole_numbers(np.random.default_rng(seed), *shapes)
    function = functools.partial(jax.lax.conv_general_dilated, **options)
    return f"{options} of {shapes}", function, operands, mesh, specs[:2], specs[2]


def drawn_gather(seed):
    """The same, of rows of a table, or of its gradient; half of them are of a batch of tables."""
    rng = random.Random(seed)
    mesh = mesh_of(rng.choice(MESHES))
    axes = {letter: rng.choice([2, 4]) for letter in "bij"} | {
        letter: rng.choice([4, 8, 16]) for letter in "uv"
    }
    axes["n"] = rng.choice([16, 32, 64])  # XLA chooses by the bytes of the table and of what is read
    batch = ["b"] * rng.choice([0, 0, 1])
    columns, rows = list("uv")[: rng.choice([0, 1, 2])], list("ij")[: rng.choice([1, 2])]
    terms = [[*batch, "n", *columns], batch + rows, batch + rows + columns]
    shapes = [[axes[letter] for letter in term] for term in terms]
    values = np.random.default_rng(seed)
    indices = values.integers(0, axes["n"], shapes[1])
    if rng.random() < 0.6:
        operands, name, function = [*whole_numbers(values, shapes[0]), indices], "rows", read
    else:
        operands, name = [*whole_numbers(values, shapes[2]), indices], "gradient"
        terms = [terms[2], terms[1], terms[0]]
        function = functools.partial(added, rows=axes["n"])
    function = jax.vmap(function) if batch else function
    specs = drawn_specs(rng, terms, axes, None, mesh)
    return f"{name} of {shapes}", function, operands, mesh, specs[:2], specs[2]


def drawn_scatter(seed):
    """The same, of updates that something is computed of in shards that mostly do not divide them."""
    rng = random.Random(seed)
    mesh = mesh_of(rng.choice(MESHES))
    number, rows = [rng.choice([1, 2, 3, 5, 9]) for _ in range(rng.choice([1, 2]))], rng.choice([4, 16, 40])
    values = np.random.default_rng(seed)
    operands = [*whole_numbers(values, (*number, 4)), values.integers(0, rows, number)]
    dims = rng.sample(mesh.axis_names, len(mesh.axis_names))
    spec = PartitionSpec(*(dims[: len(number)] if rng.random() < 0.7 else [dims[0]]))
    how = rng.choice(["add", "add", "add", "min", "max", "multiply"])
    one, function = (functools.partial(put, how, rows, each) for each in (None, NamedSharding(mesh, spec)))
    return f"{how} of {number} in {spec}", function, operands, mesh, [P(), P()], P(), one


def drawn_update(seed):
    """The same, of an update of a part of one axis of an array, of which each row may be a row of a batch."""
    rng = random.Random(seed)
    mesh = mesh_of(rng.choice(MESHES))
    shape = [rng.choice([4, 8, 16]) for _ in range(rng.choice([2, 3, 4]))]
    axis, other = rng.sample(range(len(shape)), 2)
    length = rng.choice([1, 1, 1, 2, shape[axis] - 1])
    values = np.random.default_rng(seed)
    how = rng.choice(["slice", "slice of each row", "slices of each row", "add"])
    first = None if how in ("slice", "add") else other
    starts = values.integers(0, shape[axis] - length + 1, shape[other])
    operands = whole_numbers(values, shape, [*shape[:axis], length, *shape[axis + 1 :]])
    operands = [*operands, starts if how == "slices of each row" else starts[0]]
    out = rng.randrange(len(shape))
    result = [size for each, size in enumerate(shape) if each != first]
    if first is not None:
        result.insert(out, shape[first])
    terms = [*((each.ndim, each.shape) for each in operands), (len(shape), result)]
    specs = [
        PartitionSpec() if rng.random() < 0.4 else spec_of(rng, range(ndim), sizes, mesh, {})
        for ndim, sizes in terms
    ]
    function = functools.partial(updated, how, axis, first, out)
    result_spec = specs[3] if rng.random() < 0.7 else None
    name = f"{how} {length} of axis {axis} of {shape}, batch {first} to {out}"
    return name, function, operands, mesh, specs[:3], result_spec


def drawn_slice(seed):
    """The same, of a slice or an update that may begin outside of the array, along an axis in shards of any size."""
    rng = random.Random(seed)
    mesh = mesh_of(rng.choice(MESHES))
    shape = [rng.choice([3, 5, 8, 12]) for _ in range(rng.choice([1, 2, 3]))]
    sizes = [rng.choice([1, 1, 2, size - 1, size]) for size in shape]
    values = np.random.default_rng(seed)
    starts = np.array([rng.choice([0, 1, size - 1, size, size + 9]) for size in shape], "int32")
    specs = [uneven_spec_of(rng, each, mesh) for each in (shape, sizes, shape)]
    how = rng.choice(["slice", "update", "gradient of a slice", "gradient of an update"])
    operands = [*whole_numbers(values, shape, sizes), starts]
    one, function = (functools.partial(sliced, how, sizes, each, mesh) for each in (None, specs))
    return f"{how} {sizes} at {starts} of {shape} in {specs}", function, operands, mesh, [P()] * 3, None, one


def drawn_window(seed):
    """The same, of padding, windows, strides, and sorts along an axis in shards of any size, or its gradient."""
    rng = random.Random(seed)
    mesh = mesh_of(rng.choice([(2,), (3,), (4,), (2, 4)]))
    length, window = rng.choice([2, 3, 4, 5, 7, 8, 12]), rng.choice([2, 3, 4, 8])
    low, high, gap = rng.choice([0, 1, 2, 7]), rng.choice([0, 1, 3, 7]), rng.choice([0, 1, 2])
    low, gap = (-1, gap + 1) if rng.random() < 0.2 else (low, gap)
    how = rng.choice(["pad", "sum", "sum", "max", "stride", "sort"])
    options = {"window": window, "stride": rng.choice([1, 2, 3]), "padding": (low, high, gap)}
    is_gradient = rng.random() < 0.4
    specs = [P("x") if rng.random() < 0.7 else None for _ in range(2)]
    pair = (
        functools.partial(windowed, how, options, is_gradient, each, mesh) for each in ([None] * 2, specs)
    )
    one, function = pair
    operands = [np.random.default_rng(seed).permutation(length).astype("float32")]
    name = f"{'gradient of ' * is_gradient}{how} of {length}, {options}, in {specs}"
    return name, function, operands, mesh, [P()], None, one


def drawn_calls(seed):
    """The same, of two calls of one function, each in layouts of its own."""
    name, function, operands, mesh, specs, result_spec = drawn_gather(seed)
    rng, function = random.Random(seed), jax.jit(function)
    of_other = [spec_of(rng, range(each.ndim), each.shape, mesh, {}) for each in operands]

    def called(*operands):
        return function(*operands[:2]), function(*operands[2:])

    return f"calls: {name}", called, 2 * list(operands), mesh, [*specs, *of_other], result_spec


def put(how, rows, layout, updates, indices):
    """A table at whose rows something is put that is computed in a layout."""
    if layout is not None:
        updates, indices = jax.lax.with_sharding_constraint((updates, indices), layout)
    updates = 5 - updates
    if layout is not None:
        updates = jax.lax.with_sharding_constraint(updates, layout)
    table = jax.numpy.ones((rows, updates.shape[-1]))
    return getattr(table.at[indices], how)(updates)


def updated(how, axis, first, out, operand, updates, start):
    """An array a part of which is set, or added to; under `vmap` either is a scatter."""
    if how == "add":
        part = [slice(None)] * operand.ndim
        part[axis] = start + jax.numpy.arange(updates.shape[axis])
        return operand.at[tuple(part)].add(updates)
    if how == "slice":
        return jax.lax.dynamic_update_slice_in_dim(operand, updates, start, axis)
    in_axes = (first, first, 0 if how == "slices of each row" else None)
    update = jax.lax.dynamic_update_slice_in_dim
    return jax.vmap(lambda x, u, i: update(x, u, i, axis - (first < axis)), in_axes, out)(
        operand, updates, start
    )


def sliced(how, sizes, specs, mesh, operand, updates, starts):
    """A slice or an update in layouts, or its gradients."""
    if how.startswith("gradient"):
        inner = functools.partial(sliced, how.rpartition(" ")[2], sizes, specs, mesh)

        def loss(operand, updates):
            return (inner(operand, updates, starts) ** 2).sum()

        gradients = jax.grad(loss, (0, 1))(operand, updates)
        return jax.numpy.concatenate([each.ravel() for each in gradients])

    def constrain(value, spec):
        return value if spec is None else jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec))

    specs = specs or [None] * 3
    operand, updates = constrain(operand, specs[0]) + 5, constrain(updates, specs[1])
    if how == "slice":
        return constrain(jax.lax.dynamic_slice(operand, starts, sizes), specs[1])
    return constrain(jax.lax.dynamic_update_slice(operand, updates, starts), specs[2])


def windowed(how, options, is_gradient, specs, mesh, operand):
    """An operator along the axis of a vector in layouts, or its gradient."""
    if is_gradient:
        inner = functools.partial(windowed, how, options, False, specs, mesh)
        return jax.grad(lambda x: (inner(x) ** 2).sum())(operand)

    def constrain(value, spec):
        return value if spec is None else jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec))

    x = constrain(operand + 1, specs[0])
    low, high, gap = options["padding"]
    window, stride = (options["window"],), (options["stride"],)
    if how == "pad":
        result = jax.lax.pad(x, np.float32(9), [(low, high, gap)])
    elif how == "stride":
        result = jax.lax.slice(x, (max(low, 0) % x.size,), x.shape, stride)
    elif how == "sort":
        result = jax.numpy.sort(x)
    else:
        start, reduce = (-np.inf, jax.lax.max) if how == "max" else (0.0, jax.lax.add)
        dilation = (gap + 1,) if how == "sum" else (1,)
        padding = [(max(low, window[0] - 1), high)]
        result = jax.lax.reduce_window(x, start, reduce, window, stride, padding, dilation)
        result = jax.numpy.maximum(result, -1)
    return constrain(result, specs[1])


def added(updates, indices, rows):
    """The gradient of a table whose rows were read."""
    table = jax.numpy.zeros((rows, *updates.shape[indices.ndim :]), updates.dtype)
    return table.at[indices].add(updates)


def drawn_specs(rng, terms, axes, summed, mesh):
    """The layouts of two operands and of a result; half of the operands are sharded alike along an axis of the sum."""
    alike = {}
    if summed and rng.random() < 0.5:
        dims = rng.sample(mesh.axis_names, rng.choice([1, 1, 2]))
        if axes[summed] % math.prod(mesh.shape[dim] for dim in dims) == 0:
            alike = {summed: tuple(dims)}
    specs = [spec_of(rng, term, axes, mesh, alike) for term in terms]
    return [*specs[:2], specs[2] if rng.random() < 0.7 else None]


def spec_of(rng, term, sizes, mesh, given):
    """A spec with most dims of a mesh, in any order."""
    axes = {letter: given.get(letter, ()) for letter in term}
    free = [letter for letter in term if letter not in given and letter != "H"]
    dims = [dim for dim in mesh.axis_names if all(dim not in used for used in axes.values())]
    rng.shuffle(dims)
    for dim in dims if free else ():
        letter = rng.choice(free)
        shards = math.prod(mesh.shape[each] for each in (*axes[letter], dim))
        if rng.random() < 0.8 and sizes[letter] % shards == 0:
            axes[letter] += (dim,)
    return PartitionSpec(*(axes[letter] or None for letter in term))


def uneven_spec_of(rng, shape, mesh):
    """A spec with most dims of a mesh, which need not divide the axes."""
    axes = [() for _ in shape]
    for dim in rng.sample(mesh.axis_names, len(mesh.axis_names)):
        if rng.random() < 0.8:
            axes[rng.randrange(len(shape))] += (dim,)
    return PartitionSpec(*(dims or None for dims in axes))


KINDS = {
    "products": drawn_product,
    "convolutions": drawn_convolution,
    "gathers": drawn_gather,
    "scatters": drawn_scatter,
    "updates": drawn_update,
    "slices": drawn_slice,
    "windows": drawn_window,
    "calls": drawn_calls,
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--kind", choices=KINDS, default="products")
    parser.add_argument("--only", choices=("XLA", "here"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.only is None:
        print("layout of the result, outcome: number", flush=True)
        environment = os.environ | {"XLA_FLAGS": XLA, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
        for only in ("XLA", "here"):
            command = [sys.executable, __file__, *sys.argv[1:], "--only", only]
            ended = subprocess.run(command, env=environment, check=only == "here")
            if ended.returncode:  # by a check of XLA's, as of some gathers
                print(f"{only}: the process ended with {ended.returncode}", flush=True)
        return
    if asked.only == "here":
        correct()
    counts = Counter()
    for seed in range(asked.seed, asked.seed + asked.count):
        name, *case = KINDS[asked.kind](seed)
        _, _, mesh, specs, result_spec, *_ = case
        try:
            outcome = "right" if is_right(*case) else "wrong"
        except jax.errors.JaxRuntimeError:  # XLA finds that it has made an invalid program
            outcome = "error"
        counts["any" if result_spec is None else "given", outcome] += 1
        if outcome != "right":
            shape = dict(mesh.shape)
            print(f"  {asked.only}: {outcome}: seed {seed}: {name} in {specs} to {result_spec}, {shape}")
    for key, number in sorted(counts.items()):
        print(f"{asked.only}: {', '.join(key)}: {number}", flush=True)


if __name__ == "__main__":
    main()


def test_a_jaxlib_without_the_pass_says_which(monkeypatch):
    """A jaxlib that lacks the pass of Shardy's is refused by name, with the release that has it."""
    monkeypatch.setattr(shardy, "PASS", "builtin.module(sdy-renamed-pipeline)")
    shardy.check_shardy_passes.cache_clear()
    with pytest.raises(lm.EngineError, match="sdy-renamed-pipeline") as raised:
        shardy.check_shardy_passes()
    shardy.check_shardy_passes.cache_clear()
    assert f'pip install "jaxlib=={shardy.TESTED}.*"' == raised.value.fix
