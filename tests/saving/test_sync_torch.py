"""A sync on torch moves weights bit for bit between meshes of simulated devices and of processes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from cases import EVERYTHING, few
from engines import several_processes

import layoutmap as lm
from layoutmap.core.mesh import Mesh
from layoutmap.engines import get_engine
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import draw_sharding_specs

PROCESSES = ("torch",)
WORKER = Path(__file__).with_name("sync_torch_process.py")
HALVES = (Mesh([f"CPU:{n}" for n in range(4)], "x=2,y=2"), Mesh([f"CPU:{n}" for n in range(4, 8)], "m=4"))


def draw_module(choices, shapes, mesh, seed):
    module, engine = torch.nn.Module(), get_engine("torch")
    for number, shape in enumerate(shapes):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed + number))
        layout = lm.Layout(draw_sharding_specs(choices, mesh, shape, "error"), mesh)
        tensor = engine.relayout(values.to(choices.pick(torch.float32, torch.bfloat16)), layout)
        module.register_parameter(f"w{number}", torch.nn.Parameter(tensor))
    return module


@pytest.mark.parametrize("part", range(4))
def test_drawn_pairs_of_simulated_devices_sync_bit_for_bit(part):
    """All values of a hundred pairs arrive, on meshes of the same and of other devices."""
    for seed in range(part * 25, part * 25 + (25 if EVERYTHING or part else 10)):
        choices = Choices.from_seed(seed)
        meshes = [Mesh(None, choices.pick("x=2,y=4", "x=8", "a=2,b=2,c=2")) for _ in range(2)]
        meshes = choices.pick(meshes, meshes, HALVES)
        shapes = [tuple(choices.pick(8, 16) for _ in range(choices.pick(2, 1, 3, 0))) for _ in range(4)]
        trainer, sampler = (
            draw_module(choices, shapes, mesh, 100 * seed + n) for n, mesh in enumerate(meshes)
        )
        layouts = {name: get_engine("torch").get_layout(each) for name, each in sampler.named_parameters()}
        lm.plan_sync(trainer, sampler)(verify=True)
        for name, each in sampler.named_parameters():
            expected = get_engine("torch").to_numpy(trainer.get_parameter(name))
            actual = get_engine("torch").to_numpy(each)
            assert np.array_equal(expected.astype(actual.dtype), actual), (seed, name)
            assert layouts[name] == get_engine("torch").get_layout(each)


@pytest.mark.parametrize("number", few([2, 4], 2))
def test_processes_sync_bit_for_bit_with_the_planned_bytes(tmp_path, number):
    """Processes send what the plan says, in all; where one fails, all raise, and no sampler changes."""
    count = 50 if EVERYTHING else 6
    (port,) = several_processes.free_ports(1)
    results = several_processes.run(WORKER, tmp_path, [{}] * number, str(port), str(number), "0", str(count))
    told = [each for each, _ in results]

    for seed, pairs in enumerate(zip(*(each["pairs"] for each in told), strict=True)):
        assert [[]] * number == [pair["wrong"] for pair in pairs], seed
        assert pairs[0]["planned"] == sum(pair["sent"] for pair in pairs), seed
    assert [True] * number == [each["one fails"][1] for each in told]
    assert [0] * number == [each["one fails"][2] for each in told]
    assert {"no memory", "process 1 cannot sync"} == {each["one fails"][0] for each in told}


def make_attention(names):
    return torch.nn.ModuleDict({name: torch.nn.Linear(8, 4 * len(name), bias=False) for name in names})


def test_fused_weights_are_joined():
    """A sampler has as one weight what are three weights of the trainer."""
    rows, columns = (
        lm.LayoutMap(lm.create_mesh("model=4"), {r".*": specs})
        for specs in (("model", None), (None, "model"))
    )
    trainer = columns.build(lambda: make_attention("qkv"), library="torch", progress=False)
    sampler = rows.build(lambda: make_attention(["qkv"]), library="torch", progress=False)
    names = {"qkv.weight": {"from": ["q.weight", "k.weight", "v.weight"], "axes": "out in -> (part out) in"}}
    lm.plan_sync(trainer, sampler, names=names)(verify=True)

    read = get_engine("torch").to_numpy
    expected = np.concatenate([read(trainer[name].weight) for name in "qkv"])
    assert np.array_equal(expected, read(sampler["qkv"].weight))


def test_a_tied_weight_moves_once():
    """Two names of one parameter are one variable of the plan."""

    def make_model():
        model = torch.nn.ModuleDict(
            {"embed": torch.nn.Embedding(16, 8), "head": torch.nn.Linear(8, 16, bias=False)}
        )
        model["head"].weight = model["embed"].weight
        return model

    maps = [
        lm.LayoutMap(lm.create_mesh("model=4"), {r".*": specs})
        for specs in (("model", None), (None, "model"))
    ]
    trainer, sampler = (each.build(make_model, library="torch", progress=False) for each in maps)
    sync = lm.plan_sync(trainer, sampler)
    sync()

    assert ["embed.weight"] == [row.variable.path for row in sync.plan.rows]
    assert sampler["head"].weight is sampler["embed"].weight
    read = get_engine("torch").to_numpy
    assert np.array_equal(read(trainer["embed"].weight), read(sampler["head"].weight))
