"""`layoutmap selftest` says what holds on devices, finds faults that are put in by hand, and leaves nothing behind."""

import functools
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import time

import frameworks
import pytest
from testing.faulty import with_fault

from layoutmap.cost.machines import machine_named
from layoutmap.testing.selftest.report import Report
from layoutmap.testing.speeds import MEASURED_COLLECTIVES
from layoutmap.testing.subjects import SUBJECTS, get_subject

PROCESSES = ("jax", "tensorflow", "torch")
HERE = os.environ.get("LAYOUTMAP_TEST_PROCESS") or "jax"
# Each test starts frameworks anew: in `make test` one engine is enough.
pytestmark = [pytest.mark.long] if HERE != "jax" else []
SOURCE = frameworks.ROOT / "src"
A_LIBRARY = {"jax": "pytree", "tensorflow": "keras-tensorflow", "torch": "torch"}[HERE]
A_FAULT = {"torch": "33", "jax": "539", "tensorflow": "0"}[HERE]
"""The seed of a fault with a small program: of tensor.data on torch, and of the gradient of pooling on JAX."""
KEPT = ("--json", "found.json", "--report", "found.html")


def command(*options):
    start = [sys.executable, "-m", "layoutmap", "selftest", "--engine", HERE]
    return [*start, "--simulate", "8", "--seed", "7", *options]


def ran(folder, *options, source=SOURCE, kept=KEPT, **others):
    """Runs the command in a folder; returns the exit code, what it said, and the JSON that it wrote."""
    environment = os.environ | {"PYTHONPATH": str(source), "TMPDIR": str(folder), "XLA_FLAGS": ""}
    done = subprocess.run(
        command(*options, *kept), cwd=folder, env=environment, capture_output=True, text=True, **others
    )
    found = folder / "found.json"
    assert not list(folder.glob("layoutmap-selftest-*"))
    return (
        done.returncode,
        done.stdout + done.stderr,
        json.loads(found.read_text()) if found.exists() else {},
    )


@pytest.fixture
def run(tmp_path):
    """Runs the command in a folder of its own."""
    return functools.partial(ran, tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What one run of each kind comes to: its folder, the exit code, what it said, and its JSON."""
    folder = tmp_path_factory.mktemp("whole")
    kinds = [f"arrays-{HERE}", A_LIBRARY, f"faults-{HERE}"]
    options = ["--mesh", "x=2,model=4", "--count", "1", "--seed", A_FAULT]
    if HERE != "tensorflow":  # whose devices are not measured
        kinds.append(f"speeds-{HERE}")
        options += ["--write-machine", "mine.yaml"]
    return folder, *ran(folder, *options, *(word for kind in kinds for word in ("--only", kind)))


def test_all_is_well(whole):
    """Arrays and a model on simulated devices: exit code 0, and the table, the page and the JSON say the same."""
    folder, code, said, found = whole

    assert 0 == code, said
    assert found["says"] == said.splitlines()[0]
    assert found["says"].startswith("well: ")
    assert "8 simulated CPU" == found["ran on"][f"{HERE} devices"]
    assert {1.0} == {
        row["tried"] for row in found["laws"] if row["law"] == "a call returns its values in the layout"
    }
    assert SUBJECTS[A_LIBRARY].title in {row["tried on"] for row in found["laws"]}
    assert [] == found["failures"]
    assert found["says"] in (folder / "found.html").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--only", "nothing"), "with the installed packages, these can be tried: speeds-"),
        (("--mesh", "batch=3,model=3", "--only", f"arrays-{HERE}"), "the mesh batch=3,model=3 has 9"),
        (("--minutes", "0"), "nothing could be tried within 0 minutes"),
    ],
)
def test_what_cannot_be_tried(run, options, words):
    """A mesh that does not fit, an unknown kind of models, or no time: exit code 2, and the error says why."""
    code, said, found = run(*options)

    assert 2 == code
    assert words in said
    assert {} == found


@pytest.mark.long
def test_devices_of_the_machine(run):
    """Without `--simulate` it is tried on what there is: here one CPU, which torch would simulate eight of."""
    code, said, found = run("--simulate", "0", "--only", f"arrays-{HERE}", "--count", "2")

    assert (0, "1 CPU") == (code, found["ran on"][f"{HERE} devices"]), said
    assert found["ran on"][f"{HERE} topology"].endswith(
        "float32 products in float32, TF32 not on these devices"
    )


@pytest.mark.long
def test_a_mesh_is_that_of_all_cases(run):
    """With `--mesh` all cases are on that mesh, and the report says so."""
    code, said, found = run("--only", f"arrays-{HERE}", "--mesh", "data=4,model=2", "--count", "4")

    assert (0, "data=4,model=2") == (code, found["ran on"]["mesh"]), said


@pytest.mark.long
def test_each_kind_has_a_turn(run):
    """Within a minute arrays, saves that are killed, known faults and models are tried, however long one of them is."""
    kinds = [f"{kind}-{HERE}" for kind in ("saves", "faults", "arrays")] + [A_LIBRARY]
    code, said, found = run("--minutes", "1", *(word for kind in kinds for word in ("--only", kind)))

    assert 0 == code, said
    assert {get_subject(kind).title for kind in kinds} <= {row["tried on"] for row in found["laws"]}


@pytest.mark.skipif(HERE != "jax", reason="optax, which is hidden, is a package of JAX")
@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "with arrays"])
def test_a_missing_package_is_no_fault(run, tmp_path, is_alone):
    """Without optax models of pytrees are "not tried", by its name; if nothing else is tried: exit code 2."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util, sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.partition('.')[0] == 'optax':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'optax' else find(name, *rest)\n"
    )
    kinds = ["pytree"] if is_alone else ["pytree", "arrays-jax"]
    source = f"{tmp_path}{os.pathsep}{SOURCE}"
    code, said, found = run("--count", "1", *(w for k in kinds for w in ("--only", k)), source=source)

    if is_alone:
        assert (2, {}) == (code, found), said
        assert "nothing could be tried" in said
        assert "pip install optax" in said
    else:
        assert 0 == code, said
        assert "not tried without optax" in found["says"]
        assert found["says"].startswith("well: 4 laws on 1 cases")
        assert "optax: pip install optax" == found["ran on"]["not installed"]


def test_only_a_package_that_is_not_there_is_missing():
    """A module that an installed package lacks is a fault; so is any other error."""
    from layoutmap.testing.laws import find_missing_package, run_law

    def wrapped():
        try:
            import no_such_package  # noqa: F401
        except ImportError as error:
            raise ValueError from error

    def of_an_installed_one():
        import layoutmap.no_such_module  # noqa: F401

    assert ("not tried", "no_such_package") == ((outcome := run_law("a law", wrapped)).what, outcome.missing)
    assert ("failed", "") == ((outcome := run_law("a law", of_an_installed_one)).what, outcome.missing)
    assert "" == find_missing_package(ValueError())


SWAPPED = {
    "jax": (
        "engines/jax/devices.py",
        "for spec in layout.sharding_specs]",
        "for spec in layout.sharding_specs[::-1]]",
    ),
    "torch": (
        "engines/torch/devices.py",
        "placements[number] = Shard(axis)",
        "placements[number] = Shard(layout.rank - 1 - axis)",
    ),
    "tensorflow": None,
}


def test_a_fault_of_layouts_is_found(run, tmp_path):
    """A spec that is swapped in an engine is found, and the program that is told shows it, too."""
    if SWAPPED[HERE] is None:
        pytest.skip("TensorFlow's layouts are text, which other tests compare")
    source = with_fault(tmp_path, *SWAPPED[HERE])
    code, said, found = run("--only", f"arrays-{HERE}", "--count", "1", source=source)
    first = found["failures"][0]

    assert 1 == code
    assert "WRONG: " in said
    assert "a relayout keeps every bit, and each device has its shard" in {
        each["law"] for each in found["failures"]
    }
    program = [sys.executable, "-c", first["program"]]
    for path, is_right in ((source, False), (SOURCE, True)):
        environment = os.environ | {"PYTHONPATH": str(path)}
        done = subprocess.run(program, env=environment, capture_output=True, text=True)
        assert is_right == (done.returncode == 0), done.stderr


@pytest.mark.skipif(HERE == "tensorflow", reason="TensorFlow's devices are not measured")
def test_what_was_measured_is_a_machine(whole):
    """Each collective over each mesh dim is measured, and the file that is written is that of a machine."""
    folder, _, _, found = whole

    measured = {(each["kind"], each["dim"]) for each in found["measured"][HERE] if "kind" in each}
    assert set(itertools.product(MEASURED_COLLECTIVES, ("x", "model"))) == measured
    on = machine_named(f"{folder}/mine.yaml").device
    assert on.about.startswith(f"measured by layoutmap selftest: 8 simulated CPU on {HERE} (")
    assert "float32 products in float32" in on.about
    assert "there are more devices than cores" in found["ran on"][f"{HERE} speeds"]
    assert 8 == on.node_size


@pytest.mark.skipif(HERE == "tensorflow", reason="TensorFlow's steps are not counted")
def test_a_step_is_measured_beside_what_was_counted(whole):
    """Seconds and memory of a step are beside those that a plan counts; a CPU does not report its memory, said."""
    _, _, said, found = whole
    measured = next(each for each in found["measured"][HERE] if "step" in each)
    counted = found["counted"][HERE]

    assert {"created_bytes": None, "step_bytes": None} == {
        name: number for name, number in measured.items() if "bytes" in name
    }
    # Four layers, sharded by x
    assert 4 * 128 * 128 * 4 // 2 == counted["created_bytes"] < counted["step_bytes"]
    assert 0 < counted["step"] < measured["step"]
    assert 2 == said.count("not reported")


@pytest.mark.skipif(HERE == "tensorflow", reason="TensorFlow's steps are not counted")
def test_a_step_is_counted_as_it_is_taken_on_one_device():
    """Eleven products of the whole batch: of four layers, and of the gradients of weights and of inputs, but one."""
    command = [sys.executable, "-m", "layoutmap.testing.stack", HERE, "batch=1,model=1", "1024", "h100"]
    done = subprocess.run(command, capture_output=True, text=True)

    assert 0 == done.returncode, done.stderr[-2000:]
    counted = json.loads(done.stdout)
    products = 11 * 2 * 1024**3 / machine_named("h100").device.get_flops_rate("float32")
    assert products <= counted["step"] < 4 * products  # torch fuses nothing: its memory takes longer
    assert 4 * 4 * 1024**2 == counted["created_bytes"]


TAKEN_AWAY = {
    "torch": (
        "engines/torch/dtensor_ops/outside.py",
        "    if has_corrected_operators(tensor.device_mesh):\n        if value.shape",
        "    if False:\n        if value.shape",
    ),
    "jax": (
        "engines/jax/corrections.py",
        "    def install(self) -> None:\n",
        "    def install(self) -> None:\n        return\n",
    ),
    "tensorflow": (
        "engines/tensorflow/selfcheck.py",
        'setdefault(_fault.setting, "0")',
        'setdefault(_fault.setting, "1")',
    ),
}


def test_known_faults_of_engines_are_said(whole):
    """A known fault is corrected, and the report names it."""
    _, _, said, found = whole
    (fault,) = found["faults"]

    assert "corrected" == fault["state"], said
    assert fault["known fault"] in said.replace("\n", " ")


@pytest.mark.long
def test_known_faults_are_present_where_nothing_corrects_them(run, tmp_path):
    """Where its correction is taken away, a fault is present, which fails."""
    code, said, found = run(
        "--only",
        f"faults-{HERE}",
        "--count",
        "1",
        "--seed",
        A_FAULT,
        source=with_fault(tmp_path, *TAKEN_AWAY[HERE]),
    )

    assert 1 == code, said
    assert ["present"] == [fault["state"] for fault in found["faults"]]
    assert "a known fault of the engine is corrected" == found["failures"][0]["law"]


@pytest.mark.long
def test_a_save_that_is_killed_is_found_where_it_counts(run, tmp_path):
    """Killed runs leave whole steps for any mesh; written under its own name, a step is left broken."""
    options = ("--only", f"saves-{HERE}", "--count", "4", "--folder", str(tmp_path))
    code, said, _ = run(*options)
    assert 0 == code, said

    hidden = 'return f".step-{step}.{token}"'
    source = with_fault(tmp_path, "checkpoint/storage.py", hidden, 'return f"step-{step}"')
    code, said, found = run(*options, source=source)

    assert 1 == code, said
    assert {"a save that is killed leaves the steps before it, for any mesh"} == {
        each["law"] for each in found["failures"]
    }


@pytest.mark.long
def test_a_full_disk_is_named(run):
    """Where a checkpoint cannot be written, the law that saves one fails, and says so."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))

    code, said, _ = run("--only", A_LIBRARY, "--count", "1", kept=(), preexec_fn=limit)

    assert 1 == code, said
    assert f"{A_LIBRARY}: a checkpoint loads on another mesh" in said
    assert "File too large" in said


@pytest.mark.long
def test_an_interrupt_keeps_what_is_known(tmp_path):
    """After Ctrl-C what was tried is printed and written, and neither processes nor files are left."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command("--only", f"arrays-{HERE}", "--minutes", "4", *KEPT),
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        until = time.monotonic() + 120
        while not (folder := list(tmp_path.glob("layoutmap-selftest-*"))) and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(20)  # a framework starts, and some cases are tried
        children = _children(process.pid)
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=240)

    assert 130 == process.returncode, errors
    assert "interrupted; what is known so far is above" in errors
    assert not json.loads((tmp_path / "found.json").read_text())["complete"]
    assert said.startswith("well: ")
    assert folder
    assert not folder[0].exists()
    assert children
    assert 0 != subprocess.run(["ps", "-p", ",".join(children)], capture_output=True).returncode


STARTED = {
    "torch": ("torchrun", "--nproc-per-node", "2", "-m", "layoutmap"),
    # What SLURM gives to the tasks of a step, each with four devices.
    "jax": (
        "bash",
        "-c",
        (
            "export SLURM_JOB_NODELIST=127.0.0.1,127.0.0.2 SLURM_STEP_NODELIST=127.0.0.1,127.0.0.2 SLURM_NTASKS=2"
            " SLURM_LOCALID=0 XLA_FLAGS=--xla_force_host_platform_device_count=4 JAX_PLATFORMS=cpu\n"
            'for n in 0 1; do SLURM_NODEID=$n SLURM_PROCID=$n python -m layoutmap "$@" & tasks+=($!); done\n'
            'for task in "${tasks[@]}"; do wait "$task" || failed=1; done; exit ${failed:-0}'
        ),
        "srun",
    ),
}


@pytest.fixture
def run_together(tmp_path):
    """Starts the command in two processes; returns the exit code, what they said, and the JSON of the first one."""

    def run(*options, source=SOURCE):
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        environment = os.environ | {"PYTHONPATH": str(source), "TMPDIR": str(tmp_path), "PATH": path}
        environment["SLURM_JOB_ID"] = str(os.getpid())
        options = ("selftest", "--engine", HERE, "--seed", "5", "--json", "found.json", *options)
        started = [*STARTED[HERE], *options]
        if HERE == "torch":
            del environment["SLURM_JOB_ID"]
        done = subprocess.run(started, cwd=tmp_path, env=environment, capture_output=True, text=True)
        found = json.loads((tmp_path / "found.json").read_text())
        assert not list(tmp_path.glob("layoutmap-selftest-*"))
        return done.returncode, done.stdout + done.stderr, found

    return run


@pytest.mark.long
@pytest.mark.skipif(HERE not in STARTED, reason="TensorFlow's processes are started by hand")
def test_processes_try_one_model_together(run_together):
    """Two processes have what one has, and the same replicas; the first one reports, once."""
    code, said, found = run_together(
        "--only",
        A_LIBRARY,
        "--count",
        "1",
        "--mesh",
        {"torch": "x=1,batch=2", "jax": "batch=2,model=4"}[HERE],
    )

    assert 0 == code, said
    assert 2 == said.count("well: ")  # at the top and the end of one report
    assert f"{ {'torch': 2, 'jax': 8}[HERE] } CPU" == found["ran on"][f"{HERE} devices"]
    assert "process 0 of 2" in found["ran on"]["started"]
    assert 1.0 == next(row["held"] for row in found["laws"] if row["law"] == "replicas have equal bits")


@pytest.mark.long
@pytest.mark.skipif(HERE not in STARTED, reason="TensorFlow's processes are started by hand")
def test_the_first_process_starts_others_alone(run_together):
    """What runs beside a launcher's processes, saves that are killed and known faults, is none of them."""
    kinds = [f"saves-{HERE}", f"faults-{HERE}"]
    code, said, found = run_together("--count", "1", *(word for kind in kinds for word in ("--only", kind)))

    assert 0 == code, said
    assert ["corrected"] == [each["state"] for each in found["faults"]]


@pytest.mark.long
@pytest.mark.skipif(HERE != "torch", reason="where a replica is changed by hand, in the engine of torch")
def test_a_replica_that_one_process_has_changed_is_found(run_together, tmp_path):
    """One process adds 1 to weights after a step: the law names the variable and the device, in the first's report."""
    right = "            loss.backward()\n        optimizer.step()\n"
    change = "p.data.to_local().add_(torch.distributed.get_rank())"
    wrong = f"{right}        [{change} for p in model.parameters() if hasattr(p, 'to_local')]\n"
    source = with_fault(tmp_path, "adapters/torch/__init__.py", right, wrong)
    code, said, found = run_together("--only", "torch", "--count", "1", source=source)
    whys = [each["why"] for each in found["failures"] if each["law"] == "replicas have equal bits"]

    assert 1 == code, said
    assert any("checksum" in why and "CPU:1" in why for why in whys)


@pytest.mark.long
@pytest.mark.skipif(HERE != "jax", reason="torch's are measured together in the test of a slow collective")
def test_processes_measure_together(run_together):
    """Two processes of four devices measure collectives among them and a step; the first one says how they lie."""
    code, said, found = run_together("--only", "speeds-jax", "--count", "1", "--mesh", "batch=2,model=4")

    assert 0 == code, said
    measured = {(each["kind"], each["dim"]) for each in found["measured"]["jax"] if "kind" in each}
    assert set(itertools.product(MEASURED_COLLECTIVES, ("batch", "model"))) == measured
    assert "processes 2, devices of each 4, hosts 1, kind cpu" in found["ran on"]["jax topology"]
    assert 0 < found["counted"]["jax"]["step"]


@pytest.mark.long
@pytest.mark.skipif(HERE != "torch", reason="where the collective is slowed, in the engine of torch")
def test_a_slow_collective_is_found(run_together, tmp_path):
    """A machine file is written of two processes; an all-gather that waits is then far below it, and named."""
    options = ("--only", "speeds-torch", "--count", "1", "--mesh", "model=2")
    code, said, found = run_together(*options, "--write-machine", "mine.yaml")

    assert 0 == code, said
    assert 1 == machine_named(f"{tmp_path}/mine.yaml").device.fast.name.count("in a host")
    right = "            return tensor"
    wait = "            __import__('time').sleep(kind == 'all_gather')\n"
    source = with_fault(tmp_path, "testing/torch_speeds.py", right, wait + right)
    code, said, found = run_together(*options, "--on", "mine.yaml", source=source)

    assert 1 == code, said
    assert "no collective is far slower than expected" == (found["failures"][0]["law"])
    assert "all-gather over model of model=2: " in found["failures"][0]["why"]
    assert "and here has " in found["failures"][0]["why"]


def test_names_are_left_out(tmp_path):
    """A page and a JSON have no name of the host, the user and folders, unless they shall."""
    import getpass
    import socket

    from layoutmap.testing.laws import Outcome
    from layoutmap.testing.schedule import LawResult

    why = f'File "{tmp_path}/net.py", line 3, of {getpass.getuser()} on {socket.gethostname()}'
    report = Report(
        {"host": socket.gethostname()}, [LawResult("torch", 1, Outcome("a law", "failed", why, 0.0), "x = 1")]
    )
    for text in (report.to_json(), report.to_html()):
        assert "net.py" in text
        assert not any(name in text for name in (str(tmp_path), f"of {getpass.getuser()} on"))
    report.with_names = True
    for text in (report.to_json(), report.to_html()):
        assert str(tmp_path) in text


@pytest.mark.skipif(HERE != "jax", reason="one process is enough: no framework is asked")
def test_devices_that_others_use_are_refused(tmp_path):
    """Where NVIDIA's tool names a process that computes, nothing starts: exit code 2, with what uses how much."""
    tool = tmp_path / "nvidia-smi"
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(SOURCE)}
    asked = [sys.executable, "-m", "layoutmap", "selftest", "--engine", HERE, "--minutes", "0"]
    tried, busy = "nothing could be tried within 0 minutes", "4711, 70000 MiB"
    wait = [sys.executable, "-c", "input()", "layoutmap.testing.worker"]
    with subprocess.Popen(wait, stdin=subprocess.PIPE) as ours:
        together = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
        for options, more, used, words in (
            ([], {}, busy, busy),
            ([], together, busy, busy),
            (["--busy"], {}, busy, tried),
            ([], {}, f"{ours.pid}, 300 MiB", tried),
        ):
            tool.write_text(f"#!/bin/sh\necho '{used}'\n")
            tool.chmod(0o755)
            done = subprocess.run([*asked, *options], env=environment | more, capture_output=True, text=True)

            assert 2 == done.returncode, done.stderr
            assert words in done.stderr
        ours.communicate(b"\n")


@pytest.mark.long
def test_a_self_test_that_is_killed_leaves_no_process(tmp_path):
    """A process that tries cases ends by itself where the one that started it is gone."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command("--only", f"arrays-{HERE}"), env=environment) as process:
        until = time.monotonic() + 60
        while not (children := _children(process.pid)) and time.monotonic() < until:
            time.sleep(0.1)
        process.kill()
    while (
        left := [each for each in children if os.path.exists(f"/proc/{each}")]
    ) and time.monotonic() < until:
        time.sleep(0.5)

    assert children
    assert [] == left


def _children(pid):
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
    return found.stdout.split()
