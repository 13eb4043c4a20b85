"""Random programs give on DTensors what they give on plain tensors, on any layouts; see `random_programs`."""

import gc
from dataclasses import replace

import pytest
from engines.torch.random_programs import Program, shrunk, verdict

from layoutmap.engines.torch.dtensor_ops import memories

PROCESSES = ("torch",)
# Of plain tensors: sizes that broadcast, views whose names are to go.
pytestmark = pytest.mark.filterwarnings("ignore")

QUICK, PARTS, LONG = 10, 4, 160
IN_CALL = pytest.mark.parametrize("in_call", [True, False], ids=["in a call", "outside of calls"])


def assert_right(seeds, in_call, changed=lambda program: program):
    """Fail with the shortest program of the first seed that is wrong or fails; a refusal says why, and is none."""
    for seed in seeds:
        program = changed(Program.random(seed))
        if verdict(program, in_call=in_call).split(":")[0] in ("wrong", "failed"):
            program = shrunk(program, in_call=in_call)
            pytest.fail(f"{verdict(program, in_call=in_call)}\n{program}", pytrace=False)


@IN_CALL
def test_some_programs(in_call):
    """They give the same values, types, changes in place and gradients."""
    assert_right(range(QUICK), in_call)


@IN_CALL
def test_programs_keep_no_copy(in_call):
    """A program that has ended leaves no copy of a tensor in memory, also of a tensor that is outdated."""
    for seed in range(QUICK):
        program = Program.random(seed).unseen() if seed % 2 else Program.random(seed)
        before = set(memories.copied)
        verdict(program, in_call=in_call)
        gc.collect()

        assert set() == set(memories.copied) - before, program


def test_programs_that_failed_outside_of_calls():
    """Sums over the mesh of single values, changed in place; a lookup in a sharded table that is read twice."""
    assert_right((8278, 8321, 8382), in_call=False)


@IN_CALL
def test_values_that_autograd_does_not_see_change(in_call):
    """Gradients are those of plain tensors, or refused, where a value changes through `data` before they are taken."""
    assert_right(range(QUICK), in_call, Program.unseen)


def test_programs_that_failed_in_calls():
    """A view of a softmax whose shards have one element each, changed in place."""
    assert_right((730044,), in_call=True)


@IN_CALL
def test_an_expanded_tensor_is_filled(in_call):
    """What it is expanded of is filled, too, where that is sharded in another order than the mesh's."""
    assert_right((750029,), in_call, Program.unseen)


@pytest.mark.long
@pytest.mark.timeout(600)
@IN_CALL
@pytest.mark.parametrize("part", range(PARTS))
def test_more_programs(part, in_call):
    """They do, too."""
    assert_right(range(QUICK + part, QUICK + LONG, PARTS), in_call)
    assert_right(range(QUICK + part, QUICK + LONG, PARTS), in_call, Program.unseen)


def test_the_search_can_fail():
    """A program that gives something else on DTensors is found, and what does not matter is left out of it."""
    program = Program.random(0)
    lines = ("v8 = v0.sin()", "v9 = v0.cos() + hasattr(v0, 'placements')")
    inputs = tuple(replace(each, layout=(None,) * len(each.shape)) for each in program.inputs)
    program = replace(program, inputs=inputs, lines=(*lines, "v10 = v0 * 2"))

    assert "wrong: v9: another value" == verdict(program)
    assert lines[1:] == shrunk(program).lines
