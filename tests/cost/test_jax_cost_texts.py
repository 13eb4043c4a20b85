"""Texts of XLA's, read and rewritten as XLA for GPUs does after its partitioner: laws of a few lines of HLO each."""

import pytest

from layoutmap.core.mesh import Mesh
from layoutmap.cost.extrapolation import cancel_negative_counts
from layoutmap.cost.jax.counting import count_collectives
from layoutmap.cost.jax.partitioned import parse_partitioned_step
from layoutmap.cost.jax.rewrites import rewrite_collectives, split_combined_all_reduces
from layoutmap.cost.table import Collective

MESH = Mesh(None, "data=2,model=4")
OVER_DATA, OVER_MODEL = "replica_groups={{0,4},{1,5},{2,6},{3,7}}", "replica_groups={{0,1,2,3},{4,5,6,7}}"


def found(lines, change=rewrite_collectives):
    """Kind, dims and bytes of the collectives of a module of these lines, of which the last one is returned."""
    *lines, last = (f"  %{line.strip()}" for line in lines.strip().splitlines())
    block = parse_partitioned_step(
        "\n".join(["ENTRY %main (x: f32[8]) -> f32[8] {", *lines, last.replace("%", "ROOT %", 1), "}"]), MESH
    )
    change(block)
    return sorted((each.kind, each.dims, each.tensor_bytes) for each in count_collectives(block, ["x"], 0))


def test_an_all_reduce_of_an_all_reduce_is_one():
    lines = f"""
        x = f32[64] parameter(0)
        one = f32[64] all-reduce(%x), {OVER_DATA}, to_apply=%add
        two = f32[64] all-reduce(%one), {OVER_MODEL}, to_apply=%add
    """
    assert [("all_reduce", ("data", "model"), 256)] == found(lines)


@pytest.mark.parametrize(
    ("table", "size", "expected"),
    [
        ("{0,0,0,0,32,32,32,32}", 32, ("reduce_scatter", ("data",), 256)),
        ("{0,8,16,24,32,40,48,56}", 8, ("all_reduce", ("data",), 256)),  # model splits the part as well
    ],
)
def test_an_all_reduce_of_which_each_device_takes_its_part_is_a_reduce_scatter(table, size, expected):
    """Where the dims that it is over, and no others, split it."""
    lines = f"""
        x = f32[64] parameter(0)
        sum = f32[64] all-reduce(%x), {OVER_DATA}, to_apply=%add
        id = u32[] partition-id()
        table = s32[8] constant({table})
        at = s32[1] dynamic-slice(%table, %id), dynamic_slice_sizes={{1}}
        place = s32[] reshape(%at)
        part = f32[{size}] dynamic-slice(%sum, %place), dynamic_slice_sizes={{{size}}}
    """
    assert [expected] == found(lines)


def test_collectives_that_the_compiler_combines_are_counted_one_by_one():
    """As a tuple, or small ones as one array, of which slices are taken; a start and a done are one operation."""
    lines = f"""
        x = f32[64] parameter(0)
        y = f32[8] slice(%x), slice={{[0:8]}}
        all = f32[72] concatenate(%x, %y), dimensions={{0}}
        sum = f32[72] all-reduce-start(%all), {OVER_DATA}, to_apply=%add
        done = f32[72] all-reduce-done(%sum)
        a = f32[64] slice(%done), slice={{[0:64]}}
        b = f32[8] slice(%done), slice={{[64:72]}}
        pair = ((f32[64], f32[8]), (f32[256], f32[32])) all-gather-start(%a, %b), {OVER_MODEL}, dimensions={{0}}
        both = (f32[256], f32[32]) all-gather-done(%pair)
    """
    gathers = [("all_gather", ("model",), 128), ("all_gather", ("model",), 1024)]
    assert [*gathers, ("all_reduce", ("data",), 32), ("all_reduce", ("data",), 256)] == found(
        lines, split_combined_all_reduces
    )


def test_causes_that_differ_between_two_and_three_blocks_leave_the_sums_right():
    """A gather that has one cause in two blocks and another one in three is counted as often as both say in all."""
    gathers = {
        Collective("all_gather", ("data",), 1, 64, cause): n for cause, n in (("a", 9), ("", -3), ("b", 2))
    }
    others = {
        Collective("all_gather", ("data",), 1, 32, "c"): 4,
        Collective("all_reduce", ("data",), 1, 64, "d"): 0,
    }
    settled = {(each.cause, number) for each, number in cancel_negative_counts(gathers | others)}
    assert {("a", 8), ("c", 4)} == settled


def test_a_group_of_a_part_of_a_dim_is_that_part():
    lines = """
        x = f32[64] parameter(0)
        sum = f32[64] all-reduce(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
    """
    block = parse_partitioned_step(
        f"ENTRY %main (x: f32[64]) -> f32[64] {{\n  %{lines.strip()}\n}}".replace(
            "        sum", "  ROOT %sum"
        ),
        MESH,
    )
    (each,) = count_collectives(block, ["x"], 0)
    assert (("model",), 2, 256) == (each.dims, each.group, each.count_sent_bytes(MESH))
