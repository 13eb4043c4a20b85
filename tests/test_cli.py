"""The command line says what the library says, and its exit codes are ones that a CI can use."""

import json
import subprocess
import sys
import textwrap

import pytest

import layoutmap as lm
from layoutmap.cli import main
from layoutmap.completion import OPTIMIZERS

PROCESSES = ("jax",)
pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")

MODELS = """
import keras

def make():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="up"), keras.layers.Dense(8, name="down")])

def make_lazily():
    return keras.Sequential([keras.layers.Dense(16, name="up"), keras.layers.Dense(8, name="down")])

def make_wider():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(32, name="up"), keras.layers.Dense(8, name="down")])

not_a_function = 3
"""
RULES = r"""
version: 1
mesh:
  dims: {batch: 2, model: 4}
rules:
  up\.kernel: [null, model]
  up\.bias: [model]
  down\.kernel: [model, null]
  down\.bias: [null]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "cli_models.py").write_text(MODELS)
    (tmp_path / "rules.yaml").write_text(RULES)
    (tmp_path / "half.yaml").write_text(RULES.replace(r"down\.kernel", r"dwon\.kernel"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("cli_models", None)


def run(capsys, *arguments):
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_a_plan_is_printed_and_written(folder, capsys):
    """What is printed is the plan's own text, and what is written is read back equal."""
    code, out, _ = run(capsys, "plan", "cli_models:make", "--rules", "rules.yaml", "--json", "plan.json")
    kept = lm.Plan.from_json((folder / "plan.json").read_text())

    assert (0, f"{kept}\n\n{kept.memory}\n") == (code, out)
    assert ["up.kernel", "up.bias", "down.kernel", "down.bias"] == [a.variable.path for a in kept]


def test_problems_are_in_the_exit_code(capsys):
    """Warnings with `--strict`, errors always."""
    model = ("plan", "cli_models:make", "--rules")

    assert 0 == run(capsys, *model, "half.yaml")[0]
    assert 1 == run(capsys, *model, "half.yaml", "--strict")[0]
    assert 1 == run(capsys, *model, "rules.yaml", "--mesh", "batch=2,model=3")[0]


def test_what_a_model_makes_at_its_first_call(capsys):
    """With `--inputs` its weights are planned, and with `--optimizer` the slots of an optimizer."""
    _, out, _ = run(capsys, "plan", "cli_models:make_lazily", "--rules", "rules.yaml")
    assert "layers have no weights yet" in out

    code, out, _ = run(
        capsys,
        *("plan", "cli_models:make_lazily", "--rules", "rules.yaml", "--strict"),
        *("--inputs", "float32[4,8]", "--optimizer", "adamw"),
    )
    assert 0 == code
    assert "optimizer.*.velocity" in out


def test_explain(capsys):
    """One variable, or those that come near."""
    code, out, _ = run(capsys, "explain", "cli_models:make", "up.kernel", "--rules", "rules.yaml")
    assert 0 == code
    assert r"because     rule 1  up\.kernel" in out

    code, _, err = run(capsys, "explain", "cli_models:make", "up.kernal", "--rules", "rules.yaml")
    assert 2 == code
    assert "near misses: up.kernel" in err


def test_diff_fails_when_something_moves(capsys):
    """A committed plan against today's model: nothing, or what moved and exit code 1."""
    rules = ("--rules", "rules.yaml")
    run(capsys, "plan", "cli_models:make", *rules, "--json", "plan.json")

    assert 0 == run(capsys, "diff", "plan.json", "cli_models:make", *rules)[0]
    code, out, _ = run(capsys, "diff", "plan.json", "cli_models:make_wider", *rules)
    assert 1 == code
    assert "up.kernel    shape  (8, 16) -> (8, 32)" in out


CANNOT = {
    ("plan", "cli_models"): "'cli_models' names no function that makes a model",
    ("plan", "no_such_module:make"): "no_such_module cannot be imported",
    ("plan", "cli_models:mkae"): "cli_models has no function 'mkae'",
    ("plan", "cli_models:not_a_function"): "cli_models has no function 'not_a_function'",
    ("plan", "cli_models:make", "--rules", "none.yaml"): "none.yaml cannot be read",
    ("plan", "cli_models:make"): "the layout map has no mesh",
    ("plan", "cli_models:make", "--mesh", "batch"): "'batch'",
    ("plan", "cli_models:make", "--mesh", "x=2", "--inputs", "4,8"): "--inputs '4,8' is no shape with a type",
    ("plan", "cli_models:make", "--mesh", "x=2", "--optimizer", "adamm"): "--optimizer adamm",
    ("plan", "cli_models:make", "--mesh", "x=2", "--json", "no/folder/p.json"): "cannot be written",
    ("diff", "cli_models.json", "cli_models:make"): "cli_models.json cannot be read",
}


@pytest.mark.parametrize("arguments", CANNOT, ids=" ".join)
def test_what_cannot_be_done_is_told(arguments, capsys):
    """In this library's form, on stderr, with exit code 2."""
    code, _, err = run(capsys, *arguments)

    assert 2 == code
    assert CANNOT[arguments] in err.removeprefix("layoutmap: planning cli_models:make\n")


def test_a_plan_that_cannot_be_written_leaves_the_old_one(folder, capsys, monkeypatch):
    """What was there stays until the new file is whole."""
    (folder / "plan.json").write_text("old")

    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(folder), "write_text", full)
    code, _, err = run(capsys, "plan", "cli_models:make", "--rules", "rules.yaml", "--json", "plan.json")

    assert 2 == code
    assert "No space left on device" in err
    assert "old" == (folder / "plan.json").read_text()
    assert [] == list(folder.glob("*.part"))


@pytest.mark.parametrize("name", OPTIMIZERS.split())
def test_optimizers_that_a_shell_completes(name):
    """Each is one that `--optimizer` takes."""
    import keras

    assert name == type(keras.optimizers.get(name)).__name__.lower()


def test_the_command_itself(folder):
    """Installed, in a process of its own: help with examples, devices, and a refusal of what is no command."""

    def command(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "layoutmap.cli", *arguments], capture_output=True, text=True, timeout=120
        )

    told = command("plan", "--help")
    assert 0 == told.returncode
    assert (
        textwrap.dedent("""\
        examples:
          layoutmap plan my_models:make_llama --rules rules.yaml --mesh batch=2,model=4""")
        in told.stdout
    )
    there = command("devices", "--engine", "jax")
    assert (0, True) == (there.returncode, there.stdout.startswith("jax: 8 devices\n   CPU:0\n"))
    assert 2 == command("pan").returncode
    made = command(
        "plan", "cli_models:make", "--rules", "rules.yaml", "--json", "plan.json", "--backend", "jax"
    )
    assert 0 == made.returncode, made.stderr
    assert "layoutmap plan" == json.loads((folder / "plan.json").read_text())["format"]
