"""The cost of a step of torch modules: what is counted without devices is what torch's debug mode sees with them."""

import functools
import json
from pathlib import Path

import forked
import pytest
import torch

import layoutmap as lm
from layoutmap.core.errors import LayoutMapError
from layoutmap.cost.table import FUSED_ATTENTION
from layoutmap.engines.torch import simulation

PROCESS = Path(__file__).with_name("torch_cost_process.py")


@functools.cache
def run(*names):
    """What a process of its own counts and sees: this one simulates devices already."""
    done = forked.run(PROCESS, names)
    assert 0 == done.returncode, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(found):
    assert found["taken"] == {name: calls for name, (calls, _) in found["counted"].items()}
    assert not found["left"]
    assert [] == found["patched"]  # DTensor has its own methods again


def test_a_step_in_two_dims_is_counted_as_it_runs():
    """Calls by kind; gradients are named for weights; no process group is left, and a simulation begins after it."""
    found = run("both")

    check(found)
    _, facts = found["counted"]["both"]
    assert ["blocks.*.down.weight"] == facts["causes"]
    assert not [note for note in facts["notes"] if "is known" in note]  # loss and optimizer were given
    # Weights and two slots of each, a step count of each, and this device's rows of the batch.
    sharded, replicated, rows = 2 * 2 * 64 * 256 // 8, 2 * 2 * 64 + 64 * 32 + 32, 8 * 8 * 64
    assert 4 * (3 * (sharded + replicated) + 10 + rows) == facts["arguments"]
    # Three products of 64 rows for each matrix, on a quarter of it, and those of the head.
    assert {"float32": 3 * 2 * 64 * (2 * 2 * 64 * 256 // 4 + 64 * 32)} == facts["flops"]

    what, fits, fits_again, needed, needed_again = found["advised"]
    assert ("shard weights over data as well (FSDP)", False, True) == (what, fits, fits_again)
    assert needed == needed_again
    assert [FUSED_ATTENTION] == found["attention"]
    assert "" not in found["of the loss"]
    assert "head" in found["of the loss"]
    # Each row kernel computes partial sums of its outputs, and each column kernel those of the gradient of its inputs.
    assert {f"all_reduce {each}": 2 for each in ("forward blocks.*.down", "backward blocks.*.up")} == found[
        "sums"
    ]
    # Four products on a quarter of a kernel, and the gradient of the second's inputs on all of it.
    assert {"float32": 2 * 64 * 64 * 128 * (4 // 4 + 1)} == found["products"]
    assert [] == found["warnings"]  # a mesh that advice only tries splits heads


@pytest.mark.long
def test_steps_are_counted_as_they_run():
    """Replicated, sharded over one dim or the other, over both; one after the other in a process."""
    check(run("data", "model", "fsdp", "both"))


def test_equal_blocks_cost_what_each_of_them_costs():
    """Six equal blocks cost the same extrapolated from two and three as run one by one; unequal ones are all run."""
    found = run("blocks", "both")

    for how, (extrapolated, whole, ran) in found["blocks"].items():
        assert extrapolated == whole, how
        runs = {" both": [2, 3], "by name both": [2, 3]}.get(how, [2, 6])
        assert runs == ran, how


@pytest.mark.long
def test_equal_blocks_cost_what_each_of_them_costs_in_other_layouts():
    for how, (extrapolated, whole, _) in run("blocks", "data", "model", "fsdp")["blocks"].items():
        assert extrapolated == whole, how


def test_operators_that_fake_tensors_refuse_are_counted():
    """Strided shards, whose offsets torch reads as values, and products of experts in float32."""
    kinds, flops = run("blocks", "both")["operators"]
    assert ["all_gather", "all_reduce"] == kinds
    assert {"float32": 2 * 2 * 16 * 8 * 64 * 128} == flops


def test_a_device_computes_its_tokens_and_experts():
    """Of 128 tokens with two experts each, half are on a device. Sharded by expert, it computes a quarter of them.

    If all experts are sharded, DTensor computes some of the products with gathered operands.
    """
    (replicated, by_expert, in_expert), notes = run("blocks", "both")["experts"]
    assert [[], ["all experts get equally many tokens"], []] == notes
    products = 3 * 2 * (128 // 2 * 2) * (32 * 2 * 64 + 64 * 32)
    assert products * 3 // 4 == replicated - by_expert
    assert by_expert <= in_expert < replicated


class Given:
    shape, dtype = (8, 4), "float32"


def make():
    return torch.nn.Linear(4, 4)


def test_a_process_with_a_process_group_is_refused():
    """With why, and what to do; it keeps its group."""
    layout_map = lm.LayoutMap(lm.create_mesh("data=8", engine="torch"))
    layout_map.rest = "replicated"
    lm.build(make, layout_map, library="torch")
    with pytest.raises(
        LayoutMapError, match="the cost of a step cannot be computed in this process"
    ) as caught:
        lm.plan(make, layout_map, inputs=Given(), on="h100", library="torch")

    assert "plan in a process without a scope" in caught.value.fix
    assert simulation.has_process_group()


def test_a_step_that_reads_values_is_refused_with_the_line_that_reads_them():
    line, fix = run("blocks", "both")["error"]
    assert line.startswith("torch_cost_process.py:")
    assert line.endswith("return self.inner(x) * 2 if x.sum() > 0 else x")
    assert "attention_mask" in fix


def test_an_optimizer_that_torch_does_not_have_is_refused():
    """With those that it has."""
    with pytest.raises(LayoutMapError, match="optimizer 'adamx': torch has no such optimizer") as caught:
        lm.plan(make, lm.LayoutMap("data=8"), inputs=Given(), on="h100", library="torch", optimizer="adamx")
    assert "adamw" in str(caught.value)
