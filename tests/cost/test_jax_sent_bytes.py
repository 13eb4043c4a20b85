"""The bytes that a compiled module sends: as on paper, and as a second reader finds them in XLA's protobuf."""

import random
from itertools import pairwise

import hlo_proto
import jax
import numpy as np
import pytest
from cases import compiled_for_gpus, few
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from layoutmap.core.mesh import Mesh
from layoutmap.cost.jax import hlo
from layoutmap.cost.jax.compiled import compile_modules
from layoutmap.cost.jax.counting import count_collectives
from layoutmap.cost.jax.partitioned import parse_partitioned_step
from layoutmap.engines.jax import shardy

MESH = Mesh(None, "a=2,b=4")
ROWS, COLUMNS = 16, 32
ONE = ROWS * COLUMNS * 4  # bytes of what a device has of the programs' input
BOTH = P(("a", "b"))
RING = [(number, (number + 1) % 4) for number in range(4)]
HALVES = [[0, 2], [1, 3]]


def repeat(times, function):
    """A loop of which each turn needs the one before."""
    return lambda x: lax.fori_loop(0, times, lambda _, x: function(x) * 2, x)


def exchange(x):
    return lax.all_to_all(x, "b", 0, 0, tiled=True)


# A program of one device, and the bytes that it sends on rings, worked out on paper.
PROGRAMS = {
    "all-gather": (lambda x: lax.all_gather(x, "b", tiled=True), {"all_gather": 3 * ONE}),
    "all-gather over a": (lambda x: lax.all_gather(x, "a", tiled=True), {"all_gather": ONE}),
    "all-gather in parts": (
        lambda x: lax.all_gather(x, "b", axis_index_groups=HALVES, tiled=True),
        {"all_gather": ONE},
    ),
    "reduce-scatter": (lambda x: lax.psum_scatter(x, "b", tiled=True), {"reduce_scatter": ONE * 3 // 4}),
    "all-reduce": (lambda x: lax.psum(x, "b"), {"all_reduce": 2 * ONE * 3 // 4}),
    "all-reduce over all": (lambda x: lax.psum(x, ("a", "b")), {"all_reduce": 2 * ONE * 7 // 8}),
    "all-reduce in parts": (lambda x: lax.psum(x, "b", axis_index_groups=HALVES), {"all_reduce": ONE}),
    "all-reduces, combined": (
        lambda x: [lax.psum(each, "b") for each in (x, x.T * 3, x[:8].ravel() + 1)],
        {"all_reduce": 2 * (2 * ONE + ONE // 2) * 3 // 4},
    ),
    "all-gathers, combined": (
        lambda x: [lax.all_gather(each, "b", tiled=True) for each in (x, x.T * 3)],
        {"all_gather": 2 * 3 * ONE},
    ),
    "all-to-all": (exchange, {"all_to_all": ONE * 3 // 4}),
    "all-to-all over a": (
        lambda x: lax.all_to_all(x, "a", 0, 1, tiled=True),
        {"all_to_all": ONE // 2},
    ),
    "all-to-all in parts": (
        lambda x: lax.all_to_all(x, "b", 0, 0, axis_index_groups=HALVES, tiled=True),
        {"all_to_all": ONE // 2},
    ),
    "all-to-alls": (
        lambda x: [exchange(each) for each in (x, x.T * 3)],
        {"all_to_all": 2 * ONE * 3 // 4},
    ),
    "permute": (lambda x: lax.ppermute(x, "b", RING), {"permute": ONE}),
    "permute of some": (lambda x: lax.ppermute(x, "b", [(0, 1)]), {"permute": ONE}),
    "loop of all-to-alls": (repeat(7, exchange), {"all_to_all": 7 * ONE * 3 // 4}),
    "loop in a loop": (repeat(5, repeat(3, exchange)), {"all_to_all": 15 * ONE * 3 // 4}),
    "loop of permutes": (repeat(6, lambda x: lax.ppermute(x, "b", RING)), {"permute": 6 * ONE}),
}


def placed(spec):
    devices = np.array(jax.devices("cpu")[:8]).reshape(2, 4)
    return NamedSharding(jax.sharding.Mesh(devices, ("a", "b")), spec)


def lowered(function):
    """A program of each device, which sends what it says and no more."""
    sharding = placed(BOTH)
    mapped = jax.shard_map(function, mesh=sharding.mesh, in_specs=BOTH, out_specs=BOTH, check_vma=False)
    return jax.jit(mapped).lower(jax.ShapeDtypeStruct((8 * ROWS, COLUMNS), "float32", sharding=sharding))


def compiled(program, target):
    return compile_modules([shardy.serialize_module(program.compiler_ir("stablehlo"))], 8, target)[0]


def sums(found):
    """Return bytes by kind, without kinds that send nothing."""
    kinds = {}
    for kind, num_bytes in found:
        kinds[kind] = kinds.get(kind, 0) + num_bytes
    return {kind: num_bytes for kind, num_bytes in kinds.items() if num_bytes}


def read_all(text):
    """What the library's two readers of texts say, and the second reader."""
    block = parse_partitioned_step(text, MESH)
    graph = count_collectives(block, [""] * len(block.arguments), 0)
    return (
        sums(
            (each.kind, each.sent_bytes * number)
            for each, number in hlo.count_compiled_collectives(text).items()
        ),
        sums((each.kind, each.count_sent_bytes(MESH) * number) for each, number in graph.items()),
        hlo_proto.sent_by_text(text, 8),
    )


TARGETS = ["cpu", compiled_for_gpus("h100")]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", few(PROGRAMS, "all-to-all", "all-reduces, combined", "loop in a loop"))
def test_a_program_sends_what_it_does_on_paper(name, target):
    """Each kind of collective: alone, combined, in loops and on a part of a dim, in what XLA makes of it."""
    function, expected = PROGRAMS[name]
    assert (expected, expected, expected) == read_all(compiled(lowered(function), target).text)


def test_the_programs_of_one_process_are_read_from_xlas_own_protobuf():
    """XLA itself stores what it compiled, so no text is in between."""
    for name, (function, expected) in PROGRAMS.items():
        (module,) = lowered(function).compile().runtime_executable().hlo_modules()
        found = hlo_proto.sent_by_proto(module.as_serialized_hlo_module_proto(), 8)
        assert (name, expected, expected, expected) == (name, found, *read_all(module.to_string())[:2])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("given", "wanted", "expected"),
    [
        (P("b"), P(None, "b"), {"all_to_all": ONE * 2 * 3 // 4}),  # each device has a fourth
        (P("a"), P(None, "a"), {"all_to_all": ONE * 4 // 2}),
        (BOTH, P("a", "b"), {"all_to_all": ONE * 3 // 4}),
        (P("b"), P(), {"all_gather": ONE * 2 * 3}),
    ],
)
def test_a_relayout_sends_what_it_does_on_paper(given, wanted, expected, target):
    """The collectives that the partitioner chooses, of which a device has a piece."""
    shape = jax.ShapeDtypeStruct((8 * ROWS, COLUMNS), "float32", sharding=placed(given))
    program = jax.jit(lambda x: x * 2, out_shardings=placed(wanted)).lower(shape)
    assert (expected, expected, expected) == read_all(compiled(program, target).text)


# -- drawn texts, which XLA parses

DTYPES = ("f32", "bf16", "s8", "f8e4m3fn", "c64", "u32", "pred", "f64")
SIZES = (2, 4, 8)


def draw_groups(draw):
    """The groups of a collective in one of XLA's notations."""
    size = draw.choice(SIZES)
    notation = draw.choice(
        ("list", "iota", "reordered", "mesh", "mesh in order", "mesh of ids", "part", "all")
    )
    shape = draw.choice(([2, 4], [4, 2], [2, 2, 2]))
    order = draw.sample(range(len(shape)), len(shape))
    turned = f"[{','.join(map(str, shape))}]T({','.join(map(str, order))})"
    if turned in ("[2,4]T(0,1)", "[4,2]T(0,1)", "[2,2,2]T(0,1,2)"):
        turned = "[8]"
    devices = draw.sample(range(8), 8)
    axes = ",".join(f"'n{number}'={each}" for number, each in enumerate(shape))
    some = sorted(draw.sample(range(len(shape)), draw.randint(1, len(shape))))
    taken = ", ".join(f"'n{number}'" for number in some)
    return {
        "list": "{" + ",".join("{" + ",".join(map(str, each)) + "}" for each in split(devices, size)) + "}",
        "iota": f"[{8 // size},{size}]<=[8]",
        "reordered": f"[{8 // size},{size}]<={turned}",
        "mesh": f"mesh[{axes}] {{{taken}}}",
        "mesh in order": f"mesh[{axes}], device_ids=({turned}) {{{taken}}}",
        "mesh of ids": f"mesh[{axes}], device_ids=({','.join(map(str, devices))}) {{{taken}}}",
        "part": draw.choice(("mesh['m'=8] {'m':(2)2}", "mesh['m'=8] {'m':(1)4}", "mesh['m'=8] {'m':(4)2}")),
        "all": "{}",
    }[notation]


def split(devices, size):
    return [devices[start : start + size] for start in range(0, len(devices), size)]


def size_of_groups(notation):
    """XLA says how many devices a group has."""
    text = module([f"y = f32[8] all-reduce(%x), channel_id=1, replica_groups={notation}, {SUM}"], "f32[8]")
    return round(1 / (1 - hlo_proto.sent_by_text(text, 8)["all_reduce"] / 64))


SUM = "use_global_device_ids=true, to_apply=add"
MORE = {
    "all-gather": ", use_global_device_ids=true, dimensions={0}",
    "all-reduce": f", {SUM}",
    "all-to-all": ", dimensions={0}",
    "collective-broadcast": "",
    "collective-permute": "",
    "reduce-scatter": f", {SUM}, dimensions={{0}}",
}
ADD = "add {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT c = f32[] add(a, b)\n}\n"


def module(lines, shape):
    body = "\n".join(f"  %{each}" for each in [f"x = {shape} parameter(0)", *lines])
    end = f"ROOT %last = {shape} copy(%x)"
    return f"HloModule m, num_partitions=8\n\n{ADD}\nENTRY %main {{\n{body}\n  {end}\n}}\n"


def draw_text(draw):
    """A module with one collective, which may be combined, start and end apart, or run in a loop; and its kind."""
    notation = draw_groups(draw)
    size = size_of_groups(notation)
    dtypes = [draw.choice(DTYPES) for _ in range(draw.choice((1, 1, 2, 3)))]
    shapes = [(size * draw.randint(1, 3), draw.choice((1, 8))) for _ in dtypes]
    kind = draw.choice([*MORE])
    if kind in ("all-to-all", "collective-broadcast", "collective-permute"):
        shapes = shapes[:1]
    dtypes = (["f32"] if kind == "all-reduce" else dtypes[:1]) * len(shapes)
    given = [f"{dtype}[{rows},{more}]" for dtype, (rows, more) in zip(dtypes, shapes, strict=True)]
    by = {"all-gather": size, "reduce-scatter": 1 / size}.get(kind, 1)
    made = [f"{dtype}[{round(r * by)},{more}]" for dtype, (r, more) in zip(dtypes, shapes, strict=True)]
    lines = [f"p{number} = {each} parameter({number + 1})" for number, each in enumerate(given)]
    names = [f"%p{number}" for number in range(len(given))]
    attributes = f"channel_id=1, replica_groups={notation}"
    attributes += MORE[kind]
    if kind == "collective-permute":
        ring = draw.sample(range(8), draw.choice((0, *range(2, 9))))  # XLA also writes permutes without pairs
        pairs = ",".join(f"{{{one},{two}}}" for one, two in pairwise(ring))
        attributes = f"channel_id=1, source_target_pairs={{{pairs}}}"
    if kind == "all-to-all" and draw.random() < 0.5:  # as XLA for CPUs has it, a piece for each device
        rows, more = shapes[0]
        piece = f"{dtypes[0]}[{rows // size},{more}]"
        lines = [f"p{number} = {piece} parameter({number + 1})" for number in range(size)]
        names, given, made = [f"%p{number}" for number in range(size)], [piece] * size, [piece] * size
        attributes = attributes.replace(", dimensions={0}", "")
    result = one_or_tuple(made)
    if draw.random() < 0.5 or kind == "collective-broadcast":
        lines.append(f"y = {result} {kind}({', '.join(names)}), {attributes}")
        return module(lines, "f32[8]")
    started = {
        "all-gather": f"({one_or_tuple(given)}, {result})",
        "all-reduce": result,
        "collective-permute": f"({one_or_tuple(given)}, {result})",
    }.get(kind, f"(({', '.join(given)}), {result})")
    lines.append(f"s = {started} {kind}-start({', '.join(names)}), {attributes}")
    return module([*lines, f"y = {result} {kind}-done(%s)"], "f32[8]")


def one_or_tuple(shapes):
    return shapes[0] if len(shapes) == 1 else f"({', '.join(shapes)})"


@pytest.mark.parametrize("first", few(range(0, 2000, 100), 0))
def test_drawn_texts_are_read_as_xla_reads_them(first):
    """In each notation of groups and each form of a collective, to the rounding of each array."""
    for seed in range(20261128000 + first, 20261128100 + first):
        text = draw_text(random.Random(seed))
        *readers, xla = read_all(text)
        for found in readers:
            assert {*found} == {*xla}, text
            assert all(abs(found[kind] - xla[kind]) < 8 for kind in xla), (found, xla, text)
