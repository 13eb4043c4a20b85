"""In several processes torch's fully_shard gathers the weights that the batch's dim shards: the numbers stay right."""

from pathlib import Path

import pytest
import torch
from engines import several_processes

import layoutmap as lm

PROCESSES = ("torch",)

WORKER = Path(__file__).with_name("torch_fully_shard_process.py")
NEAR = 1e-5


FEW = (  # what makes all gathers late comes last
    *("replicated_groups", "steps", "unsharded_head"),
    "what_the_plan_says",
    *("as_many_collectives", "mixed_precision", "refused_options", "ahead"),
)
MANY = (
    *("gradients_of_all_strides", "other_optimizers"),
    *(
        "accumulated",
        "checkpoints",
        "checkpoints_gathered_by_layoutmap",
        "frozen",
        "losses_in_other_ways",
        "aside",
        "state_dicts",
    ),
    *("changes_between_the_passes", "after_a_failure", "what_fully_shard_cannot", "copies_and_conversions"),
    *("other_meshes", "mixed_precision_gathered_in_other_ways"),
    *("freed_or_kept", "off_loaded", "own_in_other_ways"),
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


def test_steps_are_those_of_one_device(few):
    """Weights, losses and norms of 2 steps, or 24, are near, also of 7 rows on 2 devices; layouts stay."""
    found = few["steps"]

    assert found["weights"] < NEAR, found
    assert found["losses"] < NEAR
    assert found["norms"] < NEAR
    assert found["layouts"]
    assert found["planned"]
    assert found["draws next"]
    assert 0 == found["saved"]


def test_a_batch_over_two_dims(few):
    """HSDP: losses, gradients, and a step of SGD are those of one device, also of weights that both dims shard."""
    assert is_near(few["replicated_groups"]), few["replicated_groups"]


def test_an_unsharded_head_trains_beside_a_sharded_model(few):
    """With foreach and fused optimizers, and one norm; values that differ between processes are refused."""
    found = few["unsharded_head"]

    assert "parameter 16 of the optimizer" in found.pop("said")
    assert is_near(found), found


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        *("accumulated", "checkpoints", "checkpoints_gathered_by_layoutmap", "frozen"),
        *("losses_in_other_ways", "aside", "other_meshes"),
        *("gradients_of_all_strides", "other_optimizers"),
    ],
)
def test_gradients_are_those_of_one_device(many, name):
    """So they are for every way in which a loss can depend on the weights, in all strides, for any optimizer."""
    assert is_near(many[name]), many[name]


@pytest.mark.long
def test_saved_and_loaded(many):
    """State dicts of a plain model and of DCP, also one that is assigned, give the same training."""
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
        what = "gradients of some weights were asked for (torch.autograd.grad, or backward(inputs=...))"
        assert what == found.pop(f"fully_shard: {way}")
    assert "" == found.pop("own: inputs=")
    assert is_near(found), found


@pytest.mark.long
def test_copies_and_conversions(many):
    """A copied model, one of another element type, one with hooks on weights and one off-loaded train right."""
    assert is_near(many["copies_and_conversions"]), many["copies_and_conversions"]


def test_the_plan_says_which_weights(few):
    """It notes which weights fully_shard gathers, and which the library does, and why."""
    found = few["what_the_plan_says"]
    names = (
        "blocks.{0..2}.up.bias, blocks.{0..2}.down.weight, blocks.{0..2}.down.bias, last.weight, last.bias"
    )
    beside = "note: 2 weights are gathered over 'batch' by layoutmap, as"

    assert [
        f"note: 11 weights are gathered over 'batch' by torch's fully_shard: {names}",
        f"{beside} several blocks share them: blocks.{{0..1}}.up.weight",
        f"{beside} the batch's dim is not the innermost on an axis: blocks.2.up.weight".replace(
            "2 weights are", "1 weight is"
        ),
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
    found = few["ahead"]["fully_shard"]

    assert [*forward, *backward] == found["events"]
    assert found["hidden"] > 0.8, "of the time that gathers take, by a clock that counts 50 ms for a layer"
    assert is_near(found["gradients"])


def test_the_librarys_own_gathering_gathers_each_block_once_in_each_pass(few):
    """Just before the block computes: by one collective for what is outside of blocks, and one for each block."""
    forward = [f"gather {n}\nwait for gather {n}\ncompute {n - 2}" for n in range(2, 6)]
    backward = [f"gather {n}\nwait for gather {n}\ncompute {9 - n} backward" for n in range(6, 10)]
    found = few["ahead"]["own"]

    assert "\n".join(
        [
            "gather 1\nwait for gather 1\ncompute first",
            *forward,
            "compute last\ncompute last backward",
            *backward,
        ]
    ) == "\n".join(found["events"])
    assert is_near(found["gradients"])


@pytest.mark.long
def test_the_librarys_own_gathering_has_the_values_of_each_call(many):
    """Checkpoints, other orders of blocks, values that change without autograd and calls that fail."""
    assert is_near(many["own_in_other_ways"]), many["own_in_other_ways"]


def test_a_step_has_no_more_collectives_than_torchs_own_ways(few):
    """Of each kind, forward, backward and optimizer, beside parallelize_module with fully_shard."""
    for found, of_torch in few["as_many_collectives"]:
        assert [*of_torch] == [kind for kind in of_torch if found.pop(kind, 0) <= of_torch[kind]], few
        assert {} == found


def test_steps_in_two_element_types(few):
    """With a MixedPrecisionPolicy gradients and weights of three steps are those of torch's own fully_shard."""
    assert is_near(few["mixed_precision"]), few["mixed_precision"]


@pytest.mark.long
def test_element_types_of_what_fully_shard_does_not_gather(many):
    """Copies of a model, and weights that fully_shard cannot gather, compute in the same types, as on one device."""
    for name, off in many["mixed_precision_gathered_in_other_ways"].items():
        assert off < 0.02, name  # of the largest gradient; bfloat16 tells numbers apart that differ by 0.008


@pytest.mark.long
def test_gathered_weights_are_freed_or_kept(many):
    """With reshard_after_forward=True the model's own weights are gathered twice, too; with False none are."""
    found = many["freed_or_kept"]
    gathers = {value: found.pop(f"{value}: gathers") for value in ("None", "True", "False")}
    once = 4 + 1  # three blocks and what is outside of them, and the output

    assert {"None": once + 3, "True": once + 4, "False": once} == gathers
    assert is_near(found), found


@pytest.mark.long
def test_weights_that_are_off_loaded(many):
    """With a CPUOffloadPolicy an optimizer of the scope trains the same weights; on CPUs they are where they were."""
    assert is_near(many["off_loaded"])


def test_options_that_cannot_be_passed_on(few):
    """Each is refused before anything is made, with what can be passed; so are those that differ between processes."""
    *said, different = few["refused_options"]
    names = "  options  'mp_policy', 'offload_policy', 'reshard_after_forward'"
    fix = (
        "leave offload_policy out, or pass CPUOffloadPolicy(pin_memory=False), which changes nothing on CPUs"
    )

    assert [
        [
            "fully_shard: 'mesh' is not an option that a scope passes on",
            names,
            "  why      rules and batch_dim decide which weights are sharded, and over which dim",
            "  fix      leave it out",
        ],
        [
            "fully_shard: 'shard' is not an option that a scope passes on",
            names,
            "  why      a scope passes on only these options",
            "  fix      use one of these",
        ],
        [
            "fully_shard: reshard_after_forward=2: a number of devices is not supported",
            "  why   torch's fully_shard reshards DTensors over all devices of the batch dim, or over none",
            "  fix   pass True or False",
        ],
        [
            "fully_shard: mp_policy=torch.bfloat16 has the wrong type",
            "  type  dtype",
            "  why   the value is passed on to torch's fully_shard",
            "  fix   pass a MixedPrecisionPolicy",
        ],
        [
            "fully_shard: weights cannot be moved to pinned memory",
            "  offload_policy  CPUOffloadPolicy(pin_memory=True)",
            "  why             pinned memory needs an accelerator, and torch finds none here",
            f"  fix             {fix}",
        ],
        [
            "fully_shard=['mp_policy'] has the wrong type",
            "  type  list",
            "  why   options of torch's fully_shard are passed on by their names",
            '  fix   pass a mapping, as in fully_shard={"reshard_after_forward": False}',
        ],
    ] == [each.splitlines() for each in said]
    assert "the processes open this scope with different options" == different


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"batch_dim": "batch", "gather": "own"}, 'with gather="own", layoutmap gathers the weights itself'),
        ({}, "without batch_dim no weight is gathered"),
        (
            {"batch_dim": "batch"},
            "all devices are of this process, and fully_shard gathers between processes",
        ),
    ],
)
def test_options_where_fully_shard_gathers_nothing(options, why):
    """They are refused, and not ignored."""
    fix = "leave fully_shard out; it is for torch modules in several processes (torchrun), in a scope with batch_dim"
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2"))

    with pytest.raises(lm.ScopeError) as caught:
        layout_map.build(
            lambda: torch.nn.Linear(2, 2),
            fully_shard={"reshard_after_forward": True},
            library="torch",
            **options,
        )
    assert [
        "the options of fully_shard would not be used",
        "  fully_shard  {'reshard_after_forward': True}",
        f"  why          {why}",
        f"  fix          {fix}",
    ] == str(caught.value).splitlines()


def test_the_plan_says_who_gathers_on_simulated_devices():
    """On simulated devices the library gathers all weights, and the plan notes which."""
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2"), {"weight": ("batch", None)})

    with layout_map.scope(batch_dim="batch", library="torch") as scope:
        model = torch.nn.Linear(2, 2, bias=False)
    assert model.weight.shape == (2, 2)
    assert ["1 weight is gathered over 'batch' by layoutmap, as all devices are of this process: weight"] == [
        problem.what for problem in scope.plan.problems if problem.kind == "gathering"
    ]


def test_another_way_to_gather():
    """It is refused, with those there are."""
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2"))

    with pytest.raises(lm.ScopeError) as caught:
        layout_map.build(lambda: torch.nn.Linear(2, 2), library="torch", gather="never")
    assert str(caught.value).splitlines() == [
        "gather='never': this value is not allowed",
        "  choices  'fully_shard', 'own'",
        "  why      this option decides how weights that are sharded over batch_dim are gathered",
        "  fix      leave gather out, or pass gather='own'",
    ]
