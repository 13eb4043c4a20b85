"""In several processes torch's fully_shard gathers the weights that the batch's dim shards: the numbers stay right."""

from pathlib import Path

import pytest
import torch
from engines import several_processes

import layoutmap as lm

PROCESSES = ("torch",)

WORKER = Path(__file__).with_name("torch_fully_shard_process.py")
NEAR = 1e-5


FEW = ("a_batch_that_does_not_divide", "steps", "what_the_plan_says", "ahead")
MANY = (
    *("accumulated", "checkpoints", "frozen", "losses_in_other_ways", "aside", "state_dicts"),
    *("changes_between_the_passes", "after_a_failure", "what_fully_shard_cannot", "copies_and_conversions"),
    "other_meshes",
)


def run(folder, names):
    """What one of four processes says of some scenarios."""
    (port,) = several_processes.free_ports(1)
    results = several_processes.run(WORKER, folder, [{}] * 4, str(port), "4", *names)
    assert all({*names} == {*each} for each, _ in results)
    return results[0][0]


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """What is said of what each `make test` looks at."""
    return run(tmp_path_factory.mktemp("few"), FEW)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """What is said of the rest."""
    return run(tmp_path_factory.mktemp("many"), MANY)


def is_near(found):
    """Whether all numbers in nested containers are near zero; a text is what went wrong."""
    if isinstance(found, dict):
        return all(map(is_near, found.values()))
    return (
        all(map(is_near, found)) if isinstance(found, list) else not isinstance(found, str) and found < NEAR
    )


def test_a_batch_that_does_not_divide(few):
    """Gradients of a batch of 7 rows on 2 devices are those of one device, and not twice as large."""
    assert is_near(few["a_batch_that_does_not_divide"]), few["a_batch_that_does_not_divide"]


def test_steps_are_those_of_one_device(few):
    """After 24 steps of AdamW weights, losses and norms are near; weights and gradients are in their layouts."""
    found = few["steps"]

    assert found["weights"] < NEAR, found
    assert found["losses"] < NEAR
    assert found["norms"] < 1e-4
    assert found["layouts"]
    assert found["planned"]


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["accumulated", "checkpoints", "frozen", "losses_in_other_ways", "aside", "other_meshes"]
)
def test_gradients_are_those_of_one_device(many, name):
    """So they are for every way in which a loss can depend on the weights."""
    assert is_near(many[name]), many[name]


@pytest.mark.long
def test_saved_and_loaded(many):
    """State dicts of torch.save, of a plain model and of DCP, also one that is assigned, give the same training."""
    assert is_near(many["state_dicts"]), many["state_dicts"]


@pytest.mark.long
def test_weights_that_change_between_the_passes(many):
    """A change before the backward pass is an error; one after it counts in the next call."""
    found = many["changes_between_the_passes"]

    assert "Linear.weight was changed in place before the backward pass" == found["said"]
    assert is_near(found["gradients"])


@pytest.mark.long
def test_a_pass_that_fails_leaves_nothing(many):
    """After an error in a forward or backward pass the next gradients are right."""
    found = many["after_a_failure"]

    assert ["ZeroDivisionError"] * 2 == [found.pop("forward"), found.pop("backward")]
    assert is_near(found), found


@pytest.mark.long
def test_what_fully_shard_cannot(many):
    """Gradients of gradients, and by chosen weights, are refused; by layoutmap's own way they are right."""
    found = many["what_fully_shard_cannot"]

    assert "gradients of gradients were asked for (create_graph=True)" == found.pop("fully_shard: second")
    assert "" == found.pop("own: second")
    assert "" == found.pop("own: by weights")
    for way in ("by weights", "inputs="):
        what = "gradients by some weights were asked for (torch.autograd.grad, or backward(inputs=...))"
        assert what == found.pop(f"fully_shard: {way}")
    assert "" == found.pop("own: inputs=")
    assert is_near(found), found


@pytest.mark.long
def test_copies_and_conversions(many):
    """A copied model, one of another element type, one with hooks on weights and one off-loaded train right."""
    assert is_near(many["copies_and_conversions"]), many["copies_and_conversions"]


def test_the_plan_says_which_weights(few):
    """It notes how many weights fully_shard gathers, and which it cannot, and why."""
    found = few["what_the_plan_says"]

    beside = "note: gathered by layoutmap, nothing ahead of time, as"
    assert [
        "note: 11 weights are gathered over 'batch' by torch's fully_shard",
        f"{beside} several blocks share it: blocks.0.up.weight, blocks.1.up.weight",
        f"{beside} the batch's dim is not the innermost on its axis: blocks.2.up.weight",
    ] == found["notes"]
    assert is_near(found["gradients"])


def test_the_next_block_is_gathered_while_one_computes(few):
    """On a link on which a gather takes 40 ms, it is asked for before the block ahead of it computes, both ways."""
    forward = [
        *("gather 1", "wait for gather 1", "gather 2", "compute first"),  # what is outside of the blocks
        *("wait for gather 2", "gather 3", "compute 0"),
        *("wait for gather 3", "gather 4", "compute 1"),
        *("wait for gather 4", "gather 5", "compute 2"),
        *("wait for gather 5", "compute 3"),
        "compute last",
    ]
    backward = [
        *("gather 6", "compute last backward"),
        *("wait for gather 6", "gather 7", "compute 3 backward"),
        *("wait for gather 7", "gather 8", "compute 2 backward"),
        *("wait for gather 8", "gather 9", "compute 1 backward"),
        *("wait for gather 9", "compute 0 backward"),
    ]

    assert [*forward, *backward] == few["ahead"]["events"]
    assert few["ahead"]["hidden"] > 0.8, (
        "of the time that gathers take, by a clock that counts 50 ms for a layer"
    )
    assert is_near(few["ahead"]["gradients"])


def test_another_way_to_gather():
    """It is refused, with those there are."""
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2"))

    with pytest.raises(lm.ScopeError) as caught:
        layout_map.build(lambda: torch.nn.Linear(2, 2), library="torch", gather="never")
    assert str(caught.value).splitlines() == [
        "gather='never': there is no such way to gather weights",
        "  ways  'fully_shard', 'own'",
        "  why   it says how weights that are sharded over batch_dim are gathered, on torch",
        '  fix   leave gather out, or gather="own"',
    ]
