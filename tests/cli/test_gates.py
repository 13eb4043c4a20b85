"""What a team puts into its CI does not pass on nothing: a plan whose layers have no weights yet ends with 2."""

import io
import json
import sys
import types
import warnings
from contextlib import redirect_stderr, redirect_stdout

import keras
import numpy as np
import pytest
from cases import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import layoutmap as lm
from layoutmap.cli.main import main
from layoutmap.testing.models import draw, draw_model

PROCESSES = ("jax",)
pytestmark = [
    pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning"),
    pytest.mark.filterwarnings("ignore:.*unbuilt state:UserWarning"),
]
DRAWN = {seed: draw_model(seed) for seed in range(60)}
# Those with LoRA factors are called where they are made.
SEEDS = {seed: model.is_subclassed and not model.lora for seed, model in DRAWN.items()}
QUIET = settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])


class Net(keras.Model):
    """Two layers, of which some are built, and of which its call may leave out the second."""

    def __init__(self, built=(), spare=False):
        super().__init__()
        self.up, self.down = keras.layers.Dense(8, name="up"), keras.layers.Dense(8, name="down")
        self.spare = spare
        for name in built:
            getattr(self, name).build((None, 8))

    def call(self, x):
        return self.up(x) if self.spare else self.down(self.up(x))


RULES = {
    r"up\.kernel": (None, "model"),
    r"down\.kernel": ("model", None),
    r".*\.bias": (None,),
    "never": ("model",),
}


def rules(*patterns):
    return lm.LayoutMap(lm.Mesh(None, "batch=2,model=4"), {p: RULES[p] for p in patterns or RULES})


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """Run a command on what a function makes, in a folder with its rules: the exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(make, layout_map, command, *arguments):
        module = types.ModuleType("gate_models")
        vars(module)["make"] = make
        monkeypatch.setitem(sys.modules, "gate_models", module)
        (tmp_path / "rules.yaml").write_text(layout_map.to_yaml())
        given = ("gate_models:make", "--rules", "rules.yaml", "--library", "keras")
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            code = main([*command.split(), *given, *arguments])
        return code, out.getvalue(), err.getvalue()

    return run


def golden(folder, layout_map, make, **options):
    (folder / "golden.json").write_text(lm.plan(make, layout_map, library="keras", **options).to_json())


@QUIET
@given(seed=st.sampled_from(list(SEEDS)))
def test_no_gate_passes_on_a_model_without_its_weights(seed, gate, tmp_path):
    """A drawn model that makes its weights at its first call ends each gate with 2: no word on stdout, and no file."""
    case = draw(seed)
    layout_map = case.layout_map
    layout_map["never"] = (None,)
    arrays = case.batch[0] if isinstance(case.batch[0], list | tuple) else [case.batch[0]]
    inputs = [f"{a.dtype}[{','.join(map(str, a.shape))}]" for a in map(np.asarray, arrays)]
    golden(tmp_path, layout_map, case.make_model)
    written = ("--json", "plan.json", "--html", "plan.html")
    gates = {"plan": written, "lint": (), "diff golden.json": ()}
    for command, options in gates.items():
        code, out, err = gate(case.make_model, layout_map, command, *options)
        if not SEEDS[seed]:
            assert code != 2, err
            continue
        assert (2, "") == (code, out)
        assert "no weights yet" in err or "it has no weights" in err
        assert "--inputs" in err
        assert "--partial" in err
        assert "never" not in err
        assert not list(tmp_path.glob("plan.*"))

    if SEEDS[seed]:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            assert 2 == main(["diff", "golden.json", "golden.json"])
        for command, options in {"plan": written, "lint": ()}.items():
            code, out, err = gate(case.make_model, layout_map, command, *options, "--inputs", *inputs)
            assert code != 2, err
            assert "never: matches no variable" in out
        assert 1 == gate(case.make_model, layout_map, "lint", "--inputs", *inputs)[0]
    for file in tmp_path.glob("plan.*"):
        file.unlink()


@pytest.mark.parametrize("built", [(), ("up",), ("down",)])
def test_a_plan_of_some_weights_for_who_wants_it(built, gate, tmp_path):
    """With --partial the exit code is that of the problems; "fits" is not said, and what does not fit is."""
    make, all_rules = (lambda: Net(built)), rules()
    golden(tmp_path, all_rules, make)
    for command in ("plan", "lint", "diff golden.json"):
        code, out, err = gate(make, all_rules, command, "--partial")
        assert 0 == code, err
        assert "fits" not in out
        assert "matches no" not in out

    code, out, _ = gate(make, all_rules, "plan", "--partial", "--strict", "--device-memory", "1KiB")
    left = 2 - len(built)
    layers = "layers have" if left == 2 else "layer has"
    assert 0 == code
    assert out.startswith(f"Verdict: incomplete: Net: {left} {layers} no weights yet: ")
    assert "of 1.0 KiB per device so far" in out
    code, out, _ = gate(make, all_rules, "plan", "--partial", "--device-memory", "0.001KB")
    assert (1 if built else 0) == code
    assert bool(built) == ("; does not fit: " in out)
    code, out, _ = gate(make, all_rules, "diff golden.json", "--partial")
    assert out.startswith("no change among the variables that are known; the plan before is incomplete: ")


def test_the_model_of_the_issue(gate, tmp_path):
    """A golden plan that holds nothing was made, the rules were changed, and nobody was told for ever."""
    code, _, err = gate(Net, rules(), "plan", "--device-memory", "1KiB")
    assert 2 == code
    assert (
        "layoutmap: gate_models:make: the plan is incomplete: Net: 2 layers have no weights yet: up, down\n"
        in err
    )
    fix = 'describe its inputs, as in --inputs "float32[8,128]", or "int32[8,128]" for tokens; or accept'
    assert f"\n  fix   {fix} the incomplete plan: --partial\n" in err
    older = {"format": "layoutmap plan", "version": 1, "mesh": {"dims": {"batch": 2, "model": 4}}}
    (tmp_path / "golden.json").write_text(
        json.dumps(older | {"variables": [], "activations": [], "problems": []})
    )
    for arguments in (("--inputs", "float32[4,8]"), ()):
        code, out, err = gate(Net, rules(), "diff golden.json", *arguments)
        assert (2, "") == (code, out)
        assert "golden.json: the plan is incomplete: it has no weights" in err
        assert "write the file again from the model, with --inputs" in err


def test_layers_that_no_call_reaches(gate):
    """The model was called, and the plan is as incomplete: with these inputs the layer is never made."""
    for command, options in {"plan": (), "search": ("--on", "h100:8", "--tries", "1")}.items():
        arguments = ["gate_models:make", "--library", "keras", "--inputs", "float32[8,8]", *options]
        if command == "plan":
            code, out, err = gate(lambda: Net(spare=True), rules(), "plan", *arguments[3:])
        else:
            with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()) as told:
                code = main(["search", *arguments, "--write", "found.yaml"])
            out, err = printed.getvalue(), told.getvalue()
        assert (2, "") == (code, out)
        assert "Net: 1 layer has no weights yet: down" in err
        assert "name --inputs that reach these layers" in err


def test_a_model_that_never_has_weights(gate):
    """There is nothing that a gate could look at, whatever the model is called with."""

    def make():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dropout(0.5)])
        model.compile("adam", "mse")
        return model

    for command in ("plan", "lint"):
        code, out, err = gate(make, rules(), command)
        assert (2, "") == (code, out)
        assert "Sequential: it has no weights" in err
        assert 0 == gate(make, rules(), command, "--partial")[0]


@pytest.mark.parametrize("opened", ["build", "scope"])
def test_a_strict_check_that_is_still_to_come_is_announced(opened):
    """At once, with the layers and the rules; the plan of any scope says so, too. The first call then checks."""
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), RULES)

    def make(strict):
        if opened == "build":
            return lm.build(Net, layout_map, strict=strict)
        with layout_map.scope(strict=strict) as scope:
            model = Net()
        assert "incomplete: 2 layers have no weights yet: up, down" in scope.plan.verdict.headline
        return model

    with pytest.warns(lm.LayoutMapWarning) as caught:
        model = make(strict=True)
    assert 1 == len(caught)
    for words in (
        "not checked yet",
        "layers",
        "up, down",
        "rules to check",
        "rule 4  never",
        "first call",
        "inputs=",
    ):
        assert words in str(caught[0].message)
    assert __file__ == caught[0].filename
    with pytest.raises(lm.PlanError, match="never: matches no variable"):
        model(np.ones((2, 8), "float32"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(strict=False)
        lm.build(Net, rules_of(layout_map), strict=True, inputs=np.ones((2, 8), "float32"))


def rules_of(layout_map):
    """The same rules without the one that matches nothing."""
    kept = lm.LayoutMap(layout_map.mesh, RULES)
    del kept["never"]
    return kept
