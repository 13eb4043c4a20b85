"""`lm.inspect` of torch modules that torch itself has laid out, in four processes."""

import re
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import torch
from cases import few
from engines import several_processes

import layoutmap as lm

PROCESSES = ("torch",)

WORKER = Path(__file__).with_name("inspecting_torch_process.py")
LAYOUTS = {
    "up.weight": "((tp, dp), unsharded)",
    "up.bias": "((tp, dp),)",
    "gate.weight": "((tp, dp), unsharded)",
    "gate.bias": "((tp, dp),)",
    "down.weight": "(dp, tp)",
    "down.bias": "(dp,)",
    "norm.weight": "(dp,)",
    "norm.bias": "(dp,)",
    "scale": "(unsharded,)",
}
LAYOUTS = {f"blocks.{i}.{name}": layout for name, layout in LAYOUTS.items() for i in range(3)}


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    """What each of four processes tells."""
    (port,) = several_processes.free_ports(1)
    results = several_processes.run(WORKER, tmp_path_factory.mktemp("told"), [{}] * 4, str(port), "4")
    return [told for told, _ in results]


@pytest.fixture(scope="module")
def told(every):
    """What all processes tell alike."""
    first, *others = every
    assert [] == [
        name for name in first for each in others if name != "other models" and each[name] != first[name]
    ]
    return first


def errors(plan):
    return [(kind, subject) for kind, severity, subject, *_ in plan["problems"] if severity == "error"]


def test_layouts_of_parallelize_module_and_fully_shard_are_read(told):
    """An axis that is sharded by both is over two dims; a weight that only one knows is on a part of the mesh."""
    plan = told["parallel"]
    weights = {path: layout for path, layout in plan["layouts"].items() if not path.startswith("optimizer.")}
    slots = {
        path: layout for path, layout in plan["layouts"].items() if path.endswith((".exp_avg", ".exp_avg_sq"))
    }

    assert "dp=2, tp=2" == plan["mesh"]
    assert weights == LAYOUTS
    assert {
        re.sub(r"optimizer\.(.*)\.exp_avg(_sq)?", r"\1", path): layout for path, layout in slots.items()
    } == {path: layout for path, layout in LAYOUTS.items() if not path.endswith(".scale")}
    assert {"note"} == {severity for _, severity, *_ in plan["problems"]}
    assert {"another mesh", "plain"} == {kind for kind, *_ in plan["problems"]}
    parts = {subject for kind, _, subject, *_ in plan["problems"] if kind == "another mesh"}
    assert {path for path in LAYOUTS if ".norm." in path} == parts & {*LAYOUTS}


def test_the_bytes_are_those_that_a_process_holds(told):
    """Of parameters and buffers, as `to_local` has them; the memory has gradients and slots as well."""
    parameters, buffers, steps = told["local bytes"], 3 * 8 * 4, 24 * 4

    assert parameters + buffers == told["alone"]["device_bytes"]
    assert 4 * parameters + buffers + steps == told["memory"]


def test_rules_that_are_read_off_build_the_same_model(told):
    """Five rules for three blocks, and `build` with them has the layouts that torch gave; now by rules."""
    assert {
        r".*\.(up|gate)\.weight$": "((tp, dp), unsharded)",
        r".*\.(up|gate)\.bias$": "((tp, dp),)",
        r".*\.down\.weight$": "(dp, tp)",
        r".*\.down\.bias$": "(dp,)",
        r".*\.norm\.(weight|bias)$": "(dp,)",
    } == told["rules"]
    assert told["built"]["layouts"] == LAYOUTS
    assert told["of scope"]
    assert told["rebuilt"].startswith("no change")  # the model has its name, which fully_shard changes


def test_a_plan_as_torchs_own_calls_computes_what_the_plain_model_does(told):
    """Outputs and gradients, with styles that pass shards to each other and modules that have none."""
    assert told["handed back"] < 1e-4


def test_replicas_that_drift_apart_between_processes_are_named(told):
    """One value of a shard and one of a plain buffer, changed in one process of four; before that nothing differs."""
    assert [] == errors(told["across"]) == errors(told["alone"]) == errors(told["plain"])
    assert [("drifted", "blocks.1.down.bias"), ("drifted", "blocks.2.scale")] == errors(told["drifted"])
    shard, buffer = (list(facts.values()) for *_, facts in told["drifted"]["problems"][:2])
    assert ["dp=1", "CPU:2", "CPU:3"] == shard
    assert ["all of it", "CPU:0, CPU:1, CPU:2", "CPU:3"] == buffer
    assert [("drifted", "blocks.0.norm.weight")] == errors(told["plain, drifted"])


def test_plain_tensors_are_those_of_each_process(told):
    """A model that nothing has laid out is there in each process, which a plan of all their devices says."""
    plan = told["plain"]

    assert "device=4" == plan["mesh"]
    assert {"plain", "unused dim"} == {kind for kind, *_ in plan["problems"]}
    assert [*plan["layouts"], "device"] == [subject for _, _, subject, *_ in plan["problems"]]
    assert "blocks.0.up.weight: a plain tensor: each process has its own" == plan["problems"][0][3]


def test_layouts_of_distribute_module_are_read(told):
    """As its function has given them; what it left out is replicated by torch."""
    plan = told["distribute_module"]
    rows = {path for path, layout in plan["layouts"].items() if layout == "(x, unsharded)"}

    assert {path for path in plan["layouts"] if re.search(r"(up|gate|down)\.weight", path)} == rows
    assert [] == plan["problems"]


def test_what_no_layout_says_is_named(told):
    """A pending sum, a mesh without names, and shards of unequal size, whose layout is known."""
    plan = told["odd"]
    by_path = {subject: (kind, severity, what) for kind, severity, subject, what, _ in plan["problems"]}

    assert {"uneven": "(x, unsharded)", "right": "(x,)"} == plan["layouts"]
    assert {
        "pending": "(P(sum)): each device has a summand of it, and the sum is pending",
        "nameless": "(S(0)) on a mesh of 4 devices, whose dims have no names",
        "uneven": "axis 0 is sharded unevenly",
    } == {path: what.removeprefix(f"{path}: ") for path, (_, _, what) in by_path.items()}
    assert {"no layout", "uneven"} == {kind for kind, _, _ in by_path.values()}
    assert {"warning"} == {severity for _, severity, _ in by_path.values()}


def test_processes_with_different_models_are_told(every):
    """What one of them does not have, or has in another shape, is an error in all of them."""
    found = [
        {subject for kind, subject in errors(each["other models"]) if kind == "differs"} for each in every
    ]

    assert {"0.weight", "0.bias", *LAYOUTS} == found[0]
    assert [found[0]] * 4 == found


def test_a_guard_is_a_hook_of_an_optimizer(told):
    """A process whose gradient was another one is told at the next comparison, in all processes."""
    assert [
        "the model differs from its plan at step 2",
        ["blocks.0.up.bias: its replicas have drifted apart"],
    ] == told["guarded"]


PROGRAM = """
import torch
import torch.distributed as dist

def make_model():
    dist.init_process_group("gloo")
    return torch.nn.Linear(4, 4 + dist.get_rank())
"""


COMMAND = """
import sys
from layoutmap.cli.main import main
sys.path.insert(0, sys.argv[1])
sys.exit(main(["inspect", "program:make_model"]))
"""


def run_processes(folder, port):
    """Return the exit codes and what is printed, of processes with what torchrun tells them."""
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        forked.start(COMMAND, [str(folder)], shared | {"RANK": str(n), "LOCAL_RANK": str(n)})
        for n in range(2)
    ]
    ended = forked.wait_for_all(started)
    return max(each.returncode for each in ended), "".join(each.stdout for each in ended)


def run_torchrun(folder, port):
    """Return the same of torchrun itself."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    command += ["-m", "layoutmap", "inspect", "program:make_model"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=240)
    return ended.returncode, ended.stdout


@pytest.mark.parametrize("run", few([run_processes, run_torchrun], run_processes))
def test_under_torchrun_one_process_prints_and_the_others_where_they_differ(run, tmp_path):
    """The plan once; then a line of the process whose model is another; and exit code 1."""
    (tmp_path / "program.py").write_text(PROGRAM)
    code, said = run(tmp_path, str(several_processes.free_ports(1)[0]))

    assert 1 == code
    assert 1 == said.count("Plan: 2 variables on device=2")
    assert "error: weight: its shape, dtype, or layout differs between processes" in said
    assert "process 1: 2 variables differ from those of process 0: weight, bias" in said


def test_a_mesh_whose_devices_are_named_elsewhere_is_the_same():
    """A program that has placed a tensor on a mesh with names lays a model out on the same mesh by its dims."""
    mesh = lm.create_mesh("x=8", engine="torch")
    placed = lm.dtensor.relayout(torch.zeros(8), lm.Layout(["x"], mesh))
    layout_map = lm.LayoutMap("x=8", {"weight": ("x", None)}, rest="replicated")
    model = layout_map.build(lambda: torch.nn.Linear(8, 8), library="torch")
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    plan = lm.inspect(model, optimizer)

    assert placed.device_mesh == model.weight.device_mesh
    assert (
        ("x", "unsharded")
        == plan["weight"].layout.sharding_specs
        == plan["optimizer.weight.exp_avg"].layout.sharding_specs
    )
    assert [] == [problem for problem in plan.problems if problem.kind in ("another mesh", "moved")]
    assert plan["weight"].match.rule is not None
