"""Torch is changed as `docs/torch-changes.md` says, as long as it says, and is as it was found afterwards."""

import gc
import json
import weakref
from pathlib import Path

import forked
import pytest
import torch
from engines.several_processes import free_ports
from torch.distributed.tensor import DTensor

import layoutmap as lm
from layoutmap.engines.tested import is_older_than
from layoutmap.engines.torch import changes, simulation

PROCESSES = ("torch",)
WORKER = Path(__file__).with_name("changes_process.py")
PAGE = Path(__file__).parents[3] / "docs" / "torch-changes.md"
WHILE = {"scope": ("tensors", "scope"), "call": ("tensors", "model", "call"), "tensors": ("tensors", "model")}
"""What the page says of a change that is there at some time, by that time."""


def listed(num_processes):
    """While there is what a name is changed, by name, as the page says."""
    rows = [line.split("|")[1:3] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {
        name.strip(" `"): during.partition(",")[0].strip()
        for name, during in rows
        if (num_processes == 1 or "one process" not in during)
        and ("before torch 2.14" if not is_older_than("torch", "2.14") else "from torch 2.14 on")
        not in during
    }


@pytest.fixture(scope="module")
def alone():
    ended = forked.run(WORKER)
    assert 0 == ended.returncode, ended.stderr[-4000:]
    return [json.loads(ended.stdout.splitlines()[-1])]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    folder, port = tmp_path_factory.mktemp("told"), str(free_ports(1)[0])
    ended = forked.wait_for_all([forked.start(WORKER, [str(n), str(folder), port]) for n in range(4)])
    assert [0] * 4 == [each.returncode for each in ended], ended[0].stderr[-4000:]
    return [json.loads((folder / f"{n}.json").read_text()) for n in range(4)]


@pytest.fixture(params=["alone", "four"])
def told(request):
    return request.getfixturevalue(request.param)


def test_what_is_changed_is_listed(told):
    """In a scope, in a call and beside tensors on a mesh, what differs in torch is what the page says."""
    rows = listed(len(told))
    for each in told:
        for time, during in WHILE.items():
            is_simulating = time == "call" and len(told) == 1
            expected = {name for name, row in rows.items() if row in during} | (
                {"dispatch modes"} if is_simulating else set()
            )
            assert sorted(expected) == each[time], time


def test_torch_is_as_it_was_found(told):
    """After a plan, after a scope whose model is gone, and after the last tensor, nothing differs."""
    for each in told:
        times = ("after a plan", "after a scope", "after", "after others")
        assert [[]] * len(times) == [each[time] for time in times]


def test_a_tensor_that_was_computed_keeps_torch_changed(told):
    """It is computed with as before when its model is gone."""
    for each in told:
        assert each["tensors"] == [*each["derived"]]
        assert each["expected"] == pytest.approx(each["its sum"], rel=1e-5)


def test_models_that_come_later_compute_the_same(told):
    """After torch was put back, the next model begins anew."""
    assert [[True, True]] * len(told) == [each["equal"] for each in told]


def test_plain_code_has_the_same_results(told):
    """What a plain model computes and writes beside a model in layouts is what it does alone, bit for bit."""
    for each in told:
        assert each["plain"] == each["plain beside it"]


def test_plain_code_meets_no_mode(told):
    """No function and no operator of a plain tensor is looked at beside a model in layouts."""
    assert [False] * len(told) == ["dispatch modes" in each["tensors"] for each in told]


def test_a_model_that_is_gone_frees_its_weights():
    """A module in layouts that was trained, and its weights, are gone with it."""
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=2"), {r"weight": ("model", None)})
    model = layout_map.build(lambda: torch.nn.Linear(4, 4), library="torch", batch_dim="batch")
    model(torch.ones(4, 4)).sum().backward()
    gone = weakref.ref(model)
    del model
    gc.collect()

    assert gone() is None
    assert [] == [each for each in gc.get_objects() if type(each) is DTensor and each.shape == (4, 4)]


def test_what_is_open_keeps_torch_changed():
    """A block that computes on a mesh finds it at its end as at its beginning, with no tensor in between."""
    mesh = lm.create_mesh("batch=2,model=2")
    with lm.dtensor.run_on(mesh, engine="torch"):
        gc.collect()
        found = torch.ones(4, 4).sum()

    assert 16 == float(found)
    assert changes.meshes


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


def test_one_process_of_torchrun_is_one_device():
    """A process that a launcher has started is real, also a single one."""
    text = "import layoutmap as lm; print(lm.create_mesh('model=-1', engine='torch').size)"
    ended = forked.run(text, environment={**TORCHRUN, "MASTER_PORT": str(free_ports(1)[0])})

    assert ("1\n", "") == (ended.stdout, ended.stderr if ended.returncode else "")


def test_the_default_process_group_is_the_programs():
    """Ranks are simulated beside a program's own process group, which may begin before or after."""
    simulation.ensure_process_group()

    assert not torch.distributed.is_initialized()


FIRST_RANK_IS_NOT_ON_IT = """
import gc, torch, layoutmap as lm
from torch.distributed.tensor import DTensor

def total(devices):
    mesh = lm.create_mesh("x=4", devices=[f"CPU:{n}" for n in devices], engine="torch")
    placed = lm.dtensor.relayout(torch.ones(8), lm.Layout(["x"], mesh))
    return float(lm.dtensor.relayout(placed, lm.Layout([None], mesh)).to_local().sum())

lm.simulate_devices(8)
own = DTensor.__deepcopy__
first = total(range(4, 8))
gc.collect()
print(own is DTensor.__deepcopy__, torch.distributed.is_initialized(), first, total(range(4)))
"""


def test_torch_is_put_back_after_a_mesh_without_the_first_rank():
    """Torch has no process groups of such a mesh; one that is made later computes."""
    ended = forked.run(FIRST_RANK_IS_NOT_ON_IT)

    assert ("True False 8.0 8.0\n", 0) == (ended.stdout, ended.returncode), ended.stderr


REGISTERED = """
import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import register_sharding

import layoutmap as lm
from layoutmap.engines.torch.changes import restore_torch

op = torch.ops.aten.softplus_backward.default
rules = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
build = lm.LayoutMap("x=2", rest="replicated").build
model = build(lambda: torch.nn.Linear(2, 2), library="torch")
assert op in rules
register_sharding(op)(lambda *_: [([Replicate()], [Replicate(), Replicate(), None, None])])
own = rules[op]
restore_torch()
assert rules[op] is own
del rules[op]
build(lambda: torch.nn.Linear(2, 2), library="torch")
restore_torch()
assert op not in rules
print("right")
"""


def test_a_rule_that_a_program_registers_stays():
    """Only the rules of layoutmap end with its tensors."""
    ended = forked.run(REGISTERED)
    assert ended.stdout.endswith("right\n"), ended.stderr[-2000:]
