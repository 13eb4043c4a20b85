"""The command line says what the library says, and its exit codes are ones that a CI can use."""

import json
import shlex
import subprocess
import sys
import textwrap
from importlib import metadata

import numpy as np
import pytest

import layoutmap as lm
from layoutmap.cli.completion import OPTIMIZERS
from layoutmap.cli.main import main
from layoutmap.core.text_table import format_bytes
from layoutmap.rules import presets, zoo
from layoutmap.rules.yaml_file import read_rules_file_schema

PROCESSES = ("jax",)
pytestmark = [pytest.mark.every_case, pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")]

MODELS = """
import keras

def make():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="up"), keras.layers.Dense(8, name="down")])

def make_lazily():
    return keras.Sequential([keras.layers.Dense(16, name="up"), keras.layers.Dense(8, name="down")])

def make_wider():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(32, name="up"), keras.layers.Dense(8, name="down")])

"""
MODELS_OF_JAX = """
import jax
from flax import nnx

class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(self.up(x))

def make():
    return Net(nnx.Rngs(0))

def make_tree():
    up, down = jax.random.split(jax.random.key(0))
    return {
        "up": {"kernel": jax.random.normal(up, (8, 16)), "bias": jax.numpy.zeros(16)},
        "down": {"kernel": jax.random.normal(down, (16, 8)), "bias": jax.numpy.zeros(8)},
    }
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
    (tmp_path / "cli_models_of_jax.py").write_text(MODELS_OF_JAX)
    (tmp_path / "rules.yaml").write_text(RULES)
    (tmp_path / "no_mesh.yaml").write_text(RULES[: RULES.index("mesh:")] + RULES[RULES.index("rules:") :])
    (tmp_path / "half.yaml").write_text(RULES.replace(r"down\.kernel", r"dwon\.kernel"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("cli_models", None)
    sys.modules.pop("cli_models_of_jax", None)


def run(capsys, *arguments):
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def printed(plan):
    """What `layoutmap plan` prints: the verdict is its first and its last line."""
    return f"{plan}\n\n{plan.memory}\n\nVerdict: {plan.verdict.headline}\n"


def test_a_plan_is_printed_and_written(folder, capsys):
    """What is printed is the plan's own text, and what is written is read back equal."""
    code, out, _ = run(capsys, "plan", "cli_models:make", "--rules", "rules.yaml", "--json", "plan.json")
    kept = lm.Plan.from_json((folder / "plan.json").read_text())

    assert (0, printed(kept)) == (code, out)
    assert ["up.kernel", "up.bias", "down.kernel", "down.bias"] == [a.variable.path for a in kept.assignments]


def test_models_of_jax(folder, capsys):
    """A module of flax.nnx and a pytree are planned by the rules of a Keras model with the same paths."""
    arguments = ("--rules", "rules.yaml", "--library")
    run(capsys, "plan", "cli_models:make", *arguments, "keras", "--json", "keras.json")
    keras = lm.Plan.from_json((folder / "keras.json").read_text())

    for maker in ("make", "make_tree"):
        model = f"cli_models_of_jax:{maker}"
        code, _, _ = run(capsys, "plan", model, *arguments, "jax", "--strict", "--json", "jax.json")
        plan = lm.Plan.from_json((folder / "jax.json").read_text())

        assert 0 == code
        assert {a.variable.path: a.layout for a in keras.assignments} == {
            a.variable.path: a.layout for a in plan.assignments
        }
        assert 0 == run(capsys, "lint", model, *arguments, "jax")[0]
        assert 0 == run(capsys, "explain", model, "up.kernel", *arguments, "jax")[0]


def test_a_plan_is_written_as_a_page(folder, capsys):
    """The page of a model's plan and that of the plan's file are one."""
    run(
        capsys,
        *("plan", "cli_models:make", "--rules", "rules.yaml"),
        *("--json", "plan.json", "--html", "model.html"),
    )
    code, out, err = run(capsys, "plan", "plan.json", "--html", "file.html")
    kept = lm.Plan.from_json((folder / "plan.json").read_text())

    assert (0, printed(kept), "written: file.html\n") == (code, out, err)
    assert kept.to_html() == (folder / "file.html").read_text() == (folder / "model.html").read_text()


def test_problems_are_in_the_exit_code(capsys):
    """Warnings with `--strict`, errors always."""
    model = ("plan", "cli_models:make", "--rules")

    assert 0 == run(capsys, *model, "half.yaml")[0]
    assert 1 == run(capsys, *model, "half.yaml", "--strict")[0]
    assert 1 == run(capsys, *model, "rules.yaml", "--mesh", "batch=2,model=3")[0]


def test_what_a_model_makes_at_its_first_call(capsys):
    """With `--inputs` its weights are planned, and with `--optimizer` the slots of an optimizer."""
    code, out, err = run(capsys, "plan", "cli_models:make_lazily", "--rules", "rules.yaml")
    assert (2, "") == (code, out)
    assert "layers have no weights yet" in err

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
    assert "  because     rule 1  up\\.kernel\n" in out

    code, _, err = run(capsys, "explain", "cli_models:make", "up.kernal", "--rules", "rules.yaml")
    assert 2 == code
    assert "near misses: up.kernel" in err


def test_a_plan_that_does_not_fit_its_devices_fails(capsys):
    """Of weights and gradients, a device of this mesh holds 76 floats each: 608 bytes."""
    arguments = ("plan", "cli_models:make", "--rules", "rules.yaml", "--device-memory")
    code, out, _ = run(capsys, *arguments, "0.608KB")
    assert (0, "Verdict: fits: 608 B of 608 B per device, and 0 B are left for activations") == (
        code,
        out.splitlines()[0],
    )
    code, out, _ = run(capsys, *arguments, "0.5 KiB")
    assert (1, "Verdict: does not fit: 608 B of 512 B per device, before activations") == (
        code,
        out.splitlines()[0],
    )
    assert (
        r"""
Verdict: does not fit: 608 B of 512 B per device, before activations
  because of  128 B  weights up.kernel float32[8, 4]
              128 B  gradients up.kernel float32[8, 4]
              128 B  weights down.kernel float32[4, 8]
              128 B  gradients down.kernel float32[4, 8]
               32 B  weights down.bias float32[8]
               32 B  gradients down.bias float32[8]
               16 B  weights up.bias float32[4]
               16 B  gradients up.bias float32[4]
  try         352 B, fits: shard weights over batch as well (FSDP)
                rules:
                  'up\.kernel': [batch, model]
                  'down\.kernel': [model, batch]
              336 B, fits: use 16 devices
                --mesh batch=2,model=8
              304 B, fits: make weights and slots in bfloat16
                in Python: dtype="bfloat16" where the model is made
""".lstrip()
        == out[: out.index("\n\n") + 1]
    )


def test_the_cost_of_a_step_is_printed_and_its_memory_is_in_the_exit_code(folder, capsys):
    """On a machine whose devices hold the peak, and on one of a file of one's own, whose do not."""
    (folder / "mine.yaml").write_text(
        "{version: 1, devices: {small: {memory: 1 KiB, memory_bandwidth: 1 GB/s, flops: {float32: 1 TFLOP/s}, "
        "fast: {name: bus, bandwidth: 1 GB/s, devices: 8}, slow: {name: net, bandwidth: 1 MB/s}}}}"
    )
    model = ("cli_models:make", "--rules", "rules.yaml", "--inputs", "float32[16,8]")
    code, out, _ = run(
        capsys, "plan", *model, "--on", "h100:8", "--optimizer", "adamw", "--json", "plan.json"
    )
    plan = lm.Plan.from_json((folder / "plan.json").read_text())

    assert 0 == code
    assert out.startswith(f"{plan}\n\n{plan.memory}\n")
    assert out.endswith(f"\n\n{plan.cost}\n\nVerdict: {plan.verdict.headline}\n")
    assert out == run(capsys, "plan", "plan.json")[1]
    code, out, _ = run(capsys, "plan", "plan.json", "--device-memory", "1KiB")
    assert 1 == code
    assert (
        f"does not fit: {format_bytes(plan.cost.step.peak_bytes)} of 1.0 KiB per device, at the peak of a step"
        in out
    )
    code, out, _ = run(capsys, "plan", *model, "--on", "mine.yaml:small:8")
    assert out.splitlines()[0] == run(capsys, "plan", *model, "--on", "mine.yaml")[1].splitlines()[0]
    assert 1 == code
    assert out.startswith("Verdict: does not fit: ")
    assert "of 1.0 KiB per device, at the peak of a step" in out
    assert "all-reduce" in run(capsys, "explain", model[0], "up.kernel", *model[1:], "--on", "h100")[1]


def test_lint_fails_when_it_finds_something(folder, capsys):
    """In a model or in a plan's file; what it tells is what the library tells, and `plan` says that there is some."""
    (folder / "odd.yaml").write_text(RULES.replace("model: 4}", "model: 4, spare: 3}"))
    files = ("--json", "odd.json", "--html", "odd.html")
    code, out, _ = run(capsys, "plan", "cli_models:make", "--rules", "odd.yaml", *files)
    plan = lm.Plan.from_json((folder / "odd.json").read_text())
    told = str(plan.lint())

    assert 0 == code
    assert (
        "Lint: 1 finding; batches are assumed to be sharded over batch; "
        "to see them: layoutmap lint cli_models:make --rules odd.yaml\n" in out
    )
    assert 2 == out.count("Verdict: no problems, 1 finding of lint; ")
    assert f"Verdict: {plan.verdict.headline}" == out.splitlines()[0]
    for file in ("odd.json", "odd.html"):
        assert f'"{plan.verdict.headline}"' in (folder / file).read_text(), file
    assert (1, f"{told}\n", "") == run(capsys, "lint", "odd.json")
    assert (1, f"{told}\n") == run(capsys, "lint", "cli_models:make", "--rules", "odd.yaml")[:2]
    assert (0, "Lint: nothing found; batches are assumed to be sharded over batch\n") == run(
        capsys, "lint", "cli_models:make", "--rules", "rules.yaml"
    )[:2]
    code, out, err = run(capsys, "lint", "odd.json", "--batch-dim", "data")
    assert (2, "") == (code, out)
    assert "lint: batch_dim 'data' is not a dim of the mesh" in err


def test_the_command_that_plan_names_shows_what_lint_found(folder, capsys):
    """It has the options of the plan: without `--on` it would not show what the cost of the step shows."""
    (folder / "rows.yaml").write_text(RULES.replace("[null, model]", "[model, null]"))
    options = ["--rules", "rows.yaml", "--inputs", "float32[8,8]", "--on", "h100:8", "--batch-dim", "batch"]
    _, out, _ = run(capsys, "plan", "cli_models:make", *options, "--no-verify")
    line = next(line for line in out.splitlines() if line.startswith("Lint: "))
    program, *command = shlex.split(line.partition("to see them: ")[2])
    code, shown, _ = run(capsys, *command)

    assert ("layoutmap", 1) == (program, code)
    assert {*options, "--no-verify"} <= {*command}
    assert line.startswith(shown.splitlines()[-1])


def test_the_file_of_a_plan_takes_no_options_of_models(folder, capsys):
    """It has its own mesh and rules: others would not be looked at. It is printed, explained and linted as it is."""
    run(capsys, "plan", "cli_models:make", "--rules", "rules.yaml", "--json", "plan.json")
    plan = lm.Plan.from_json((folder / "plan.json").read_text())

    assert (0, printed(plan), "") == run(capsys, "plan", "plan.json")
    assert (0, plan.explain("up.kernel") + "\n", "") == run(capsys, "explain", "plan.json", "up.kernel")
    for command in (["plan", "plan.json"], ["lint", "plan.json"], ["diff", "plan.json", "plan.json"]):
        code, out, err = run(capsys, *command, "--rules", "rules.yaml", "--mesh", "model=8")
        assert (2, "") == (code, out)
        assert "--rules needs a model, but plan.json is the file of a plan" in err
        assert "leave out --rules, --mesh" in err


def test_diff_fails_when_something_moves(capsys):
    """A committed plan against today's model: nothing, or what moved and exit code 1."""
    rules = ("--rules", "rules.yaml")
    run(capsys, "plan", "cli_models:make", *rules, "--json", "plan.json")

    assert 0 == run(capsys, "diff", "plan.json", "cli_models:make", *rules)[0]
    code, out, _ = run(capsys, "diff", "plan.json", "cli_models:make_wider", *rules)
    assert 1 == code
    assert out.endswith("\n3 changes; per device 304 B -> 576 B\n")


def test_suggested_rules_are_written_and_read(folder, capsys):
    """Each rule has its reason as a comment, and a plan with the file has no problems."""
    code, out, _ = run(capsys, "suggest", "cli_models:make", "--mesh", "batch=2,model=4")
    run(capsys, "suggest", "cli_models:make", "--mesh", "batch=2,model=4", "-o", "suggested.yaml")

    assert (0, out) == (code, (folder / "suggested.yaml").read_text())
    assert "# Suggested for cli_models:make, if batches are sharded over batch." == out.splitlines()[0]
    assert 3 == out.count("\n  # ") == len(lm.LayoutMap.from_yaml(out))
    for command in ("plan", "lint"):
        assert 0 == run(capsys, command, "cli_models:make", "--rules", "suggested.yaml")[0]


def test_a_published_model_is_suggested_its_preset(folder, capsys):
    """The dims of the mesh may have any names. An incomplete plan is refused, as by all commands."""
    code, out, _ = run(capsys, "suggest", "keras_hub:llama3_8b", "--mesh", "data=8,tp=8")
    preset = lm.LayoutMap.preset("llama", lm.Mesh(None, "data=8,tp=8"), model_dim="tp")

    assert (0, preset.rules) == (code, lm.LayoutMap.from_yaml(out).rules)
    assert 2 == run(capsys, "suggest", "cli_models:make_lazily", "--mesh", "model=4")[0]


HELP = {
    ("--help",): """\
usage: layoutmap [-h] [--version] COMMAND ...

See where every weight of a model is placed, before a byte is allocated.

positional arguments:
  COMMAND
    suggest   Write a first rules file for a model, with the reason for each rule as a comment.
    plan      Print the plan of a model: every variable with its layout and bytes, and all
              problems.
    inspect   Print the plan of a model that a function makes and lays out, in whatever way: read
              off its arrays.
    guard     Compare a model that a function makes with the plan that was kept of it; the exit
              code is 1 if it differs.
    explain   Explain why a variable has its layout, and what to type to change it.
    lint      Report layouts that are valid but probably not intended, with the evidence.
    diff      Show what changes from one plan to another; the exit code is 1 if anything does.
    search    Find the layout map with the fastest training step on a machine, and compare it with
              built-in maps.
    checkpoint
              Show, verify, relayout, and export checkpoints without loading a framework.
    devices   List the devices of this process, and its number in a job of several.
    selftest  Check on these devices that sharded models compute the same numbers as one device,
              and measure speeds.
    presets   List the presets of rules, and the published models that can be planned by name.
    schema    Print the JSON Schema of rules files, for editors, or check such files.
    completion
              Print the script with which a shell completes this command.

options:
  -h, --help  show this help message and exit
  --version   print the version and exit
""",
    ("devices", "--help"): """\
usage: layoutmap devices [-h] [--engine {jax,tensorflow,torch}]

List the devices of this process, and its number in a job of several.

options:
  -h, --help            show this help message and exit
  --engine {jax,tensorflow,torch}
                        the engine; default: all that are installed
""",
    ("diff", "--help"): """\
usage: layoutmap diff [-h] [--rules FILE] [--preset NAME] [--model-dim DIM] [--fsdp-dim DIM]
                      [--dtype POLICY] [--mesh DIMS] [--inputs SPEC [SPEC ...]] [--partial]
                      [--wide] [--optimizer NAME] [--on MACHINE] [--verify [DEVICE]] [--no-verify]
                      [--remat LAYERS] [--fuse-attention] [--batch-dim DIM]
                      [--backend {jax,tensorflow,torch}] [--library {keras,torch,jax}]
                      FILE|MODULE:FUNCTION FILE|MODULE:FUNCTION

Show what changes from one plan to another; the exit code is 1 if anything does.

positional arguments:
  FILE|MODULE:FUNCTION  the JSON file of a plan, or a model
  FILE|MODULE:FUNCTION  the JSON file of a plan, or a model

options:
  -h, --help            show this help message and exit
  --rules FILE          the rules file, as LayoutMap.to_yaml writes it
  --preset NAME         the rules for a family of models, instead of a file; "layoutmap presets"
                        lists them
  --model-dim DIM       the mesh dim over which a preset shards layers, if it is not "model";
                        "none": over none
  --fsdp-dim DIM        the mesh dim of the batch, if a preset is to shard weights over it as well
                        (FSDP)
  --dtype POLICY        the Keras dtype policy of a published model, as in bfloat16
  --mesh DIMS           the mesh, as in "batch=2,model=4"; default: that of the rules file
  --inputs SPEC [SPEC ...]
                        the model's inputs: for a model that makes its weights at its first call,
                        and for --on: "float32[8,128]", or "name=int32[8,16]"
  --partial             accept a plan of a model whose layers do not all have weights yet; without
                        it the exit code is 2
  --wide                print all columns of tables and all of each line, also where the terminal
                        is narrower
  --optimizer NAME      a Keras optimizer whose slots are planned as well, such as adamw; with
                        --on also one of torch or optax
  --on MACHINE          the machine, as in "h100:64", or "mine.yaml:my_device:64": adds to the
                        plan what a training step sends, holds and takes there; needs --inputs
  --verify [DEVICE]     with --on: have XLA's own compiler compile the step for those devices,
                        which need not be present, or for DEVICE, as in "cpu", and print its
                        figures beside the counted ones
  --no-verify           with --on: count without XLA's compiler for those devices, although it is
                        installed
  --remat LAYERS        with --on: recompute the activations inside of these layers in the
                        backward pass (rematerialization): a regex for their paths, or "blocks",
                        the repeated blocks of the model
  --fuse-attention      with --on: count attention as one fused kernel (flash attention), which
                        keeps no scores in memory, although the model as it is traced here calls
                        none
  --batch-dim DIM       the mesh dim over which the batch is sharded (several: replica,fsdp), for
                        lint and --on; default: that of the rules for activations, or one with a
                        usual name
  --backend {jax,tensorflow,torch}
                        the backend that Keras runs on
  --library {keras,torch,jax}
                        the library of the model; default: found from the function and its model
""",
}


@pytest.mark.parametrize("arguments", HELP, ids=" ".join)
def test_help(arguments, capsys, monkeypatch):
    """What a command does, each option, and examples."""
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main(arguments)
    said, _, examples = capsys.readouterr().out.partition("\nexamples:\n")

    assert HELP[arguments] == said
    assert (
        "  layoutmap diff plan.json my_models:make_llama --rules rules.yaml     in a project's CI" in examples
    )


def test_the_schema_is_printed(capsys):
    """As it is, to be put into a file."""
    assert (0, json.loads(read_rules_file_schema())) == (
        main(["schema"]),
        json.loads(capsys.readouterr().out),
    )


def test_a_published_model_needs_no_function_and_no_file(capsys):
    """Its preset lays it out, on any mesh, in any type; rules of one's own come first."""
    bert = ("plan", "keras_hub:bert_large", "--strict", "--mesh", "data=64,tp=8")
    code, out, err = run(capsys, *bert, "--model-dim", "tp", "--fsdp-dim", "data", "--dtype", "bfloat16")
    model = zoo.find_model("bert_large")
    layout_map = lm.LayoutMap.preset("bert", lm.Mesh(None, "data=64,tp=8"), model_dim="tp", fsdp_dim="data")
    plan = lm.plan(lambda: model.make(dtype="bfloat16"), layout_map)

    assert (0, printed(plan)) == (code, out)
    assert "layoutmap: planning keras_hub:bert_large by preset 'bert'\n" == err
    assert 1 == run(capsys, *bert, "--rules", "rules.yaml", "--mesh", "batch=2,model=4")[0]


def test_a_preset_is_for_models_of_ones_own_too(capsys):
    """Here it has no rule for anything, which `--strict` tells."""
    model = ("plan", "cli_models:make", "--mesh", "batch=2,model=4", "--preset")

    assert (0, 1) == (run(capsys, *model, "llama")[0], run(capsys, *model, "llama", "--strict")[0])


def test_presets_are_listed(capsys):
    """Each with what it is for, and the published models that have it."""
    code, out, _ = run(capsys, "presets")
    lines = [line.split() for line in out.splitlines()]

    assert 0 == code
    assert set(presets.list_presets()) == {
        words[0] for words in lines if not words[0].startswith("keras_hub:")
    }
    assert ["keras_hub:llama3_405b", "405,853,388,800"] in lines


def test_the_slots_of_an_optax_optimizer_are_in_the_cost_of_a_step(capsys):
    """Adam has two slots for each weight, and SGD none."""
    model = ("cli_models_of_jax:make", "--rules", "rules.yaml", "--library", "jax")
    options = ("--inputs", "float32[16,8]", "--on", "h100:8", "--no-verify", "--json", "-")

    def get_held_bytes(optimizer):
        code, out, err = run(capsys, "plan", *model, *options, "--optimizer", optimizer)
        assert 0 == code, err
        return lm.Plan.from_json(out).cost.step.argument_bytes

    weights, count = 4 * (8 * 16 // 4 + 16 // 4 + 16 * 8 // 4 + 8), 4
    assert 2 * weights + count == get_held_bytes("adamw") - get_held_bytes("sgd")


FAILED = {
    (
        *("plan", "cli_models_of_jax:make", "--mesh", "x=2", "--library", "jax"),
        *("--optimizer", "adamw"),
    ): "--optimizer adamw has no effect without --on: Net is not a Keras model",
    (
        *("plan", "cli_models_of_jax:make", "--mesh", "x=2", "--library", "jax"),
        *("--optimizer", "chain", "--on", "h100:2", "--inputs", "float32[8,8]"),
    ): "--optimizer chain cannot be used",
    ("plan", "cli_models:mkae"): "cli_models has no function 'mkae'",
    ("plan", "cli_models:make", "--rules", "none.yaml"): "none.yaml cannot be read",
    ("plan", "cli_models:make"): "the layout map has no mesh",
    ("lint", "cli_models:make"): "add --rules FILE, which layoutmap suggest writes, or --mesh",
    ("lint", "cli_models:make", "--rules", "no_mesh.yaml"): "no_mesh.yaml: the mesh is missing",
    ("plan", "cli_models:make", "--mesh", "batch"): "'batch'",
    (
        "plan",
        "cli_models:make",
        "--mesh",
        "x=2",
        "--inputs",
        "4,8",
    ): "--inputs '4,8' is not a dtype with a shape",
    ("plan", "cli_models:make", "--mesh", "x=2", "--optimizer", "adamm"): "--optimizer adamm",
    ("plan", "cli_models:make", "--mesh", "x=2", "--json", "no/folder/p.json"): "cannot be written",
    ("plan", "cli_models:make", "--mesh", "x=2", "--on", "h100"): "on='h100' needs inputs",
    (
        "plan",
        "cli_models:make",
        "--mesh",
        "x=2",
        "--inputs",
        "float32[8,8]",
        "--on",
        "h100:8",
    ): "the machine has 8 devices, but the mesh has 2",
    ("plan", "cli_models:make", "--mesh", "x=2", "--on", "h10"): "did you mean 'h100'?",
    ("diff", "cli_models.json", "cli_models:make"): "cli_models.json cannot be read",
    ("plan", "keras_hub:llama3_405", "--mesh", "x=2"): "did you mean 'llama3_405b'?",
    ("plan", "keras_hub:llama3_8b"): "preset 'llama': the mesh is missing",
    ("plan", "keras_hub:llama3_8b", "--mesh", "x=2"): "model_dim 'model' is not a dim of the mesh",
    ("plan", "keras_hub:llama3_8b", "--mesh", "model=2", "--dtype", "bfloat15"): "--dtype bfloat15",
    ("plan", "cli_models:make", "--mesh", "x=2", "--dtype", "bfloat16"): "--dtype bfloat16 has no effect",
    ("plan", "cli_models:make", "--mesh", "x=2", "--fsdp-dim", "x"): "--fsdp-dim x has no effect",
    (
        "plan",
        "keras_hub:t5_xxl",
        "--rules",
        "rules.yaml",
        "--preset",
        "t5",
    ): "--preset t5 has no effect",
}


@pytest.mark.parametrize("arguments", FAILED, ids=" ".join)
def test_what_cannot_be_done_is_reported(arguments, capsys):
    """In this library's form, on stderr, with exit code 2."""
    code, _, err = run(capsys, *arguments)

    assert 2 == code
    assert FAILED[arguments] in err.removeprefix("layoutmap: planning cli_models:make\n")


@pytest.mark.parametrize("name", OPTIMIZERS.split())
def test_optimizers_that_a_shell_completes(name):
    """Each is one that `--optimizer` takes."""
    import keras

    assert name == type(keras.optimizers.get(name)).__name__.lower()


def test_the_command_itself(folder):
    """Installed, in a process of its own: help with examples, devices, and a refusal of what is no command."""

    def command(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "layoutmap", *arguments], capture_output=True, text=True, timeout=120
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
    assert 0 == there.returncode
    assert there.stdout.startswith(
        "process 0 of 1: neither SLURM nor torchrun started it\njax: 8 devices, all of this process\n   CPU:0\n"
    )
    assert 2 == command("pan").returncode
    made = command(
        "plan", "cli_models:make", "--rules", "rules.yaml", "--json", "plan.json", "--backend", "jax"
    )
    assert 0 == made.returncode, made.stderr
    assert "layoutmap plan" == json.loads((folder / "plan.json").read_text())["format"]


def test_a_copy_that_was_not_installed_saves_and_tells_its_version(tmp_path, monkeypatch, capsys):
    """As build systems and bundlers put packages where a program finds them, without the files of an installer."""
    find = metadata.distribution

    def distribution(name):
        if name == "layoutmap":
            raise metadata.PackageNotFoundError(name)
        return find(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    lm.save({"weight": np.ones(4, "float32")}, tmp_path)
    assert 0 == main(["checkpoint", "describe", str(tmp_path)])
    assert f"layoutmap {lm.__version__}" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert f"layoutmap {lm.__version__}\n" == capsys.readouterr().out


def test_a_process_of_a_job_is_told_how_to_join_the_others(monkeypatch, capsys):
    """In a step of SLURM, JAX sees its own devices alone until the program calls `initialize`."""
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "2")

    assert 0 == main(["devices", "--engine", "jax"])
    assert """\
started by SLURM: process 1 of 2
jax: 8 devices, all of this process
   to see those of all 2 processes, call jax.distributed.initialize() first in the program
   CPU:0
""" == "".join(capsys.readouterr().out.splitlines(keepends=True)[:4])


ENDS = """
import os, signal, sys
import keras

def make(inner=None):
    if inner is None:
        import cli_models as inner
    print("said on the way")
    return inner.make()

def exits():
    sys.exit(0)

def raises():
    keras.layers.Dense(4)(keras.Input((3,)))
    return {}["gone"]

def is_interrupted():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)

def gives_nothing():
    pass

def moves():
    os.chdir("/")
    sys.stdout = None
    return make()
"""
SHAPED = ("--mesh", "batch=2,model=4")


def test_no_plan_and_no_success(folder, capsys):
    """A function that exits, raises, is interrupted or returns nothing: in each command an exit code of its own."""
    (folder / "ends.py").write_text(ENDS)
    told = {}
    for name in ("exits", "raises", "is_interrupted", "gives_nothing"):
        for command in ("plan", "lint"):
            told[name, command] = run(capsys, command, f"ends:{name}", *SHAPED)
    sys.modules.pop("ends", None)

    assert {name: (130 if name == "is_interrupted" else 2, "") for name, _ in told} == {
        name: (code, out) for (name, _), (code, out, _) in told.items()
    }
    for command in ("plan", "lint"):
        assert "layoutmap: ends:exits called sys.exit(0)\n" in told["exits", command][2]
        assert "planning ends:is_interrupted\nlayoutmap: interrupted\n" in told["is_interrupted", command][2]
        assert "the function returned no model" in told["gives_nothing", command][2]
        traced = told["raises", command][2].partition("Traceback (most recent call last):\n")[2]
        assert traced.startswith(f'  File "{folder}/ends.py", line 16, in raises\n')
        assert "KeyError: 'gone'\n\nlayoutmap: ends:raises raised KeyError\n" in traced


def test_what_a_function_does_on_the_way(folder, capsys):
    """It can import from the current folder; what it prints is not in the plan; where it moves to changes no path."""
    (folder / "ends.py").write_text(ENDS)
    _, plain, _ = run(capsys, "plan", "cli_models:make", *SHAPED)
    made = run(capsys, "plan", "ends:make", *SHAPED)
    moved = run(capsys, "plan", "ends:moves", "--rules", "rules.yaml", "--json", "moved.json")
    compared = run(capsys, "diff", "ends:moves", "moved.json", "--rules", "rules.yaml")
    sys.modules.pop("ends", None)

    assert (0, plain.replace("cli_models:make", "ends:make")) == made[:2]
    assert "said on the way\n" in made[2]
    assert 0 == moved[0]
    assert (0, True) == (compared[0], compared[1].startswith("no change"))
    assert lm.Plan.from_json((folder / "moved.json").read_text()).errors == ()


def test_a_misspelt_rule_is_corrected_in_the_syntax_of_the_file(folder, capsys):
    """That comes first, and not a rule that would silence the warning; `.*` where a part of the path was meant."""
    (folder / "typo.yaml").write_text(
        RULES.replace(r"up\.kernel", r"upp\.kernel").replace(r"down\.bias", "bias")
    )
    _, out, _ = run(capsys, "plan", "cli_models:make", "--rules", "typo.yaml")

    assert out.index("upp") < out.index("no rule matches")
    assert r"did you mean 'up\.kernel$'?" in out
    assert r"correct rule 1  upp\.kernel to 'up\.kernel$', or add a rule" in out
    assert "to match anywhere in a path: '.*bias'" in out
    assert "rest: replicated" in out
    assert "layout_map" not in out


WRONG = r"""
version: 1
mesh:
  dims: {batch: 2, model: 4}
rules:
  up\.kernel: [null, modle]
  'down(': [model]
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (WRONG, ["2 errors", "the mesh has no dim 'modle'", "missing )"]),
        (RULES.replace("[null, model]", "[None, model]"), ["write [null, model]"]),
        (RULES.replace(r"up\.kernel", r'"up\.kernel"'), ["use single quotes for a regex"]),
    ],
)
def test_a_wrong_rules_file_is_one_answer(folder, capsys, text, told):
    """All errors at once, with the same exit code from each command."""
    (folder / "wrong.yaml").write_text(text)
    answers = [
        run(capsys, *command)
        for command in (
            ("schema", "wrong.yaml"),
            ("plan", "cli_models:make", "--rules", "wrong.yaml"),
            ("lint", "cli_models:make", "--rules", "wrong.yaml"),
        )
    ]

    assert [(2, "")] * 3 == [answer[:2] for answer in answers]
    assert 1 == len({answer[2].replace("layoutmap: planning cli_models:make\n", "") for answer in answers})
    for each in told:
        assert each in answers[0][2]


def test_a_dot_for_a_colon(capsys):
    """The command that was meant."""
    assert "layoutmap plan cli_models:make" in run(capsys, "plan", "cli_models.make")[2]
