"""`layoutmap inspect` and `layoutmap guard`: a model of any program, looked at from the command line."""

import json
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from cases import xla_settings
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import layoutmap as lm
from layoutmap.cli.main import main

PROCESSES = ("jax",)
MESH = jax.make_mesh((2, 4), ("data", "model"))


def make(*specs, **more):
    """Parameters that JAX has laid out."""
    kernel = jax.device_put(jnp.ones((8, 16)), NamedSharding(MESH, P(*specs)))
    return {"up": {"kernel": kernel}, "scale": jax.device_put(jnp.ones(16), NamedSharding(MESH, P())), **more}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a command on what a function makes: the exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(function, *arguments):
        module = types.ModuleType("their_program")
        vars(module)["make_model"] = function
        monkeypatch.setitem(sys.modules, "their_program", module)
        code = main([*arguments, "their_program:make_model"])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_model_is_inspected(run, tmp_path):
    """The plan that `lm.inspect` has, as text, and in the files that are asked for."""
    code, out, err = run(
        lambda: make(None, "model"), "inspect", "--json", "golden.json", "--html", "plan.html"
    )
    plan = lm.inspect(make(None, "model"))

    assert (0, "layoutmap: making their_program:make_model") == (code, err.splitlines()[0])
    assert "up.kernel" in out
    assert "(unsharded, model)" in out
    assert plan.to_json() == (tmp_path / "golden.json").read_text()
    assert "up.kernel" in (tmp_path / "plan.html").read_text()
    assert "Verdict: no problems" in out.splitlines()[0]
    assert "pass --batch-dim data if batches are sharded over it" in out


def test_a_guard_passes_only_what_is_as_it_was(run, tmp_path):
    """Exit code 1 with the diff if a layout or a variable is another, or what has no layout is held otherwise."""
    (tmp_path / "golden.json").write_text(lm.inspect(make(None, "model")).to_json())
    changed = {
        "up.kernel  layout  (unsharded, model) -> (data, unsharded)": lambda: make("data"),
        "new  added  float32[4] (unsharded,)": lambda: make(None, "model", new=jnp.ones(4)),
        "pinned  held  on CPU:3 alone": lambda: make(
            None, "model", pinned=jax.device_put(jnp.ones(4), jax.devices()[3])
        ),
    }

    code, out, _ = run(lambda: make(None, "model"), "guard", "golden.json")
    assert (0, "no change\n") == (code, out)
    for line, function in changed.items():
        code, out, _ = run(function, "guard", "golden.json")
        assert 1 == code
        assert line in out


def test_drifted_replicas_are_an_error_of_the_command(run):
    """With `--across`: exit code 1, and the variable is named."""

    def drifted():
        sharding = NamedSharding(MESH, P())
        pieces = [jax.device_put(jnp.ones(4) + (d.id == 6), d) for d in sharding.device_set]
        return make(None, "model", w=jax.make_array_from_single_device_arrays((4,), sharding, pieces))

    assert 0 == run(drifted, "inspect")[0]
    code, out, _ = run(drifted, "inspect", "--across")
    assert 1 == code
    assert "w: its replicas have drifted apart" in out


def test_there_is_no_answer_about_nothing(run, tmp_path):
    """A model without weights, a file that has no plan, and a function that fails end with 2."""
    (tmp_path / "golden.json").write_text(json.dumps({"format": "another"}))

    code, _, err = run(lambda: make(None, "model"), "guard", "golden.json")
    assert 2 == code
    assert "golden.json" in err
    code, _, err = run(lambda: jnp.ones(4, int), "inspect")
    assert 0 == code
    code, _, err = run(lambda: 1 / 0, "inspect")
    assert 2 == code
    assert "ZeroDivisionError" in err
    code, _, err = run(lambda: {"key": jax.random.key(0)}, "inspect")
    assert 2 == code
    assert "it has no weights" in err


PROGRAM = """
import jax

def make_state():
    return jax.make_mesh((2, 4), ("data", "model"))

def fail():
    jax.devices()
    return 1 / 0
"""


@pytest.mark.parametrize(
    ("function", "devices", "is_hinted"),
    [("make_state", 1, True), ("make_state", 2, False), ("fail", 1, False)],
)
def test_a_mesh_that_is_larger_than_one_device_says_how_to_simulate_devices(
    function, devices, is_hinted, tmp_path
):
    """The error is of the user's function, and a hint is only for a process that simulates no devices."""
    (tmp_path / "mine.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "layoutmap", "inspect", f"mine:{function}"]
    environment = {**os.environ, **xla_settings(devices)}
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)

    assert 2 == run.returncode
    assert f"mine:{function} raised" in run.stderr
    assert is_hinted == ("set XLA_FLAGS=--xla_force_host_platform_device_count=8" in run.stderr)
    assert is_hinted == ("lm.simulate_devices(8)" in run.stderr)
