"""`lm.search` and `layoutmap search`, with the real count of a step: small models, from one call to rules in a file."""

import sys

import jax
import keras
import optax
import pytest
from cases import compiled_for_gpus
from flax import nnx

import layoutmap as lm
from layoutmap.cli.main import main
from layoutmap.cost import layout_map_search
from layoutmap.scope import progress

INPUTS = jax.ShapeDtypeStruct((32, 16, 64), "float32")


class Block(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.up = keras.layers.Dense(1024)
        self.down = keras.layers.Dense(64)

    def call(self, x):
        return x + self.down(keras.ops.gelu(self.up(x)))


class Stack(keras.Model):
    def __init__(self, depth=2):
        super().__init__()
        self.blocks = [Block() for _ in range(depth)]

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Module(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(64, 1024, rngs=rngs)
        self.down = nnx.Linear(1024, 64, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Modules(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Module(rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def pair():
    layers = (keras.layers.Dense(n, name=name, dtype="bfloat16") for n, name in ((1024, "up"), (64, "down")))
    return keras.Sequential([keras.Input((16, 64)), *layers])


def narrow():
    return keras.Sequential([keras.Input((16, 63)), keras.layers.Dense(64)], name="narrow")


def find(tries=12, **options):
    given = {"optimizer": "adam", "tries": tries, "library": "keras", "verify": False, **options}
    return lm.search(Stack, INPUTS, "h100:8", **given)


@pytest.fixture(scope="module")
def found():
    return find()


def test_a_keras_model(found):
    """The map is no slower than any expert's, its plan has its cost, and counting it from nothing gives the same."""
    alone = lm.step_cost(
        Stack, found.layout_map, inputs=INPUTS, batch_dim=found.batch_dim, optimizer="adam", library="keras"
    )
    assert alone == found.cost.step
    assert 12 >= found.num_tried > len(found.rows) >= 7
    assert "the result" in {row[-1] for row in found.rows}


def test_the_rules_are_those_of_their_file(found):
    """The rules survive their YAML, and planning with them warns of nothing."""
    again = lm.LayoutMap.from_yaml(found.layout_map.to_yaml())
    assert found.layout_map == again
    plan = lm.plan(Stack, again, inputs=INPUTS, library="keras")
    assert [] == [str(problem) for problem in plan.problems if problem.kind != "no activations"]
    assert {a.variable.path: a.layout for a in plan.assignments} == {
        a.variable.path: a.layout
        for a in found.plan.assignments
        if a.variable.kind != "slot" and a.variable.path in plan
    }


def test_what_xla_compiles_decides_whether_a_map_fits():
    """A map that fits as it is counted and not as XLA compiles it is passed over; the text says what is compiled."""

    def wide():
        layers = (
            keras.layers.Dense(n, name=name, dtype="bfloat16") for n, name in ((8192, "up"), (512, "down"))
        )
        return keras.Sequential([keras.Input((16, 512)), *layers])

    # XLA for CPUs multiplies in float32: it has 80 MB for the best map, and 69 for the next
    limit = 75_000_000
    inputs = jax.ShapeDtypeStruct((256, 16, 512), "float32")
    options = {"optimizer": "adam", "tries": 7, "library": "keras"}
    verified = lm.search(wide, inputs, "h100:8", memory=limit, verify="cpu", **options)
    refused = [row for row in verified.rows if row[-1].endswith("as XLA compiles it")]
    assert verified.compiled.peak_bytes <= limit
    assert [("Megatron's split", "data=4, model=2")] == [row[:2] for row in refused]
    assert "compiled by XLA for cpu" in str(verified)
    assert verified.cost.verified is verified.compiled


@pytest.mark.parametrize("target", [compiled_for_gpus("h100")])
def test_what_xla_compiles_is_no_worse_than_what_it_compiles_of_experts_maps(target):
    """Where its compiler for the machine is installed, maps are compared as compiled, and the result says so."""
    found = find(verify=None)
    assert f"compiled by XLA for {target}" == found.cost.known_by
    compiled = [row for row in found.rows if row[-1].endswith("as XLA compiles it")]
    assert compiled[0] in found.rows[:2]
    assert "the result as XLA compiles it" in {row[-1] for row in compiled}
    step = lm.lower_step(Stack, found.layout_map, inputs=INPUTS, optimizer="adam", library="keras")
    alone = step.count(found.layout_map, batch_dim=found.batch_dim, target=target)
    assert alone == found.cost.step


def test_a_module_of_nnx():
    """A module of flax.nnx is searched alike, and gets rules for its own paths."""
    found = lm.search(
        lambda: Modules(nnx.Rngs(0)),
        INPUTS,
        "h100:8",
        optimizer=optax.adam(1e-3),
        tries=6,
        library="jax",
        mesh="model=8",
    )
    assert {"model=8"} == {row[1] for row in found.rows}
    sharded = [a.variable.path for a in found.plan.assignments if not a.layout.is_fully_replicated()]
    assert {f"blocks.{n}.{name}.kernel" for n in range(2) for name in ("up", "down")} <= set(sharded)


class Towers(nnx.Module):
    def __init__(self, rngs):
        self.users, self.items = nnx.Embed(4096, 32, rngs=rngs), nnx.Embed(2048, 32, rngs=rngs)
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(self.users(x[:, 0])))) * self.items(x[:, 1])


class Perceptron(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(256, 256, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


EXPERTS = {
    Perceptron: (
        {r"layers\.0\.kernel": (None, "model"), r"layers\.1\.kernel": ("model", None)},
        "float32",
        256,
    ),
    Towers: ({"(users|items).embedding": ("model", None)}, "int32", 2),
}


@pytest.mark.parametrize("kind", EXPERTS)
def test_what_is_found_is_never_worse_than_what_an_expert_writes_down(kind):
    """By what XLA compiles, as well as by what is counted: its maps are among those that are tried."""
    rules, dtype, width = EXPERTS[kind]
    inputs = jax.ShapeDtypeStruct((64, width), dtype)
    options = {"optimizer": optax.adam(1e-3), "library": "jax"}
    found = lm.search(lambda: kind(nnx.Rngs(0)), inputs, "h100:8", mesh="data=2,model=4", tries=8, **options)
    hand = lm.LayoutMap("data=2,model=4", rules)
    step = lm.lower_step(lambda: kind(nnx.Rngs(0)), hand, inputs=inputs, batch_dim="data", **options)
    ours, theirs = (sum(step.compile(each).sent_by_kind.values()) for each in (found.layout_map, hand))
    assert ours <= theirs
    assert found.cost.step.sent_bytes <= step.count(hand).sent_bytes


@pytest.mark.long
def test_where_nothing_fits_activations_are_recomputed():
    """A map that needs recomputed activations says whose, why and how, in its file too, which is read as any other."""
    make, inputs = lambda: Stack(4), jax.ShapeDtypeStruct((4096, 16, 64), "float32")
    options = {"inputs": inputs, "optimizer": "adam", "library": "keras"}
    limit = {"on": "h100:8", "mesh": "data=8", "memory": 200 << 20, "tries": 2, "verify": False}
    found = lm.search(make, **options, **limit)
    assert found.recompute.startswith(
        "It needs the activations inside of blocks.{0..3} to be recomputed in the backward"
    )
    assert "no map fits, and the nearest needs" in found.recompute
    assert f"# {found.recompute.splitlines()[0]}\n" in found.to_yaml()
    assert found.layout_map == lm.LayoutMap.from_yaml(found.to_yaml())
    assert found.cost.step == lm.step_cost(
        make, found.layout_map, batch_dim="data", remat="blocks", **options
    )
    with pytest.raises(lm.PlanError, match="no layout map fits the memory"):
        lm.search(make, **options, **limit, remat=False)


@pytest.mark.long
def test_it_starts_from_rules_and_keeps_some(found):
    """Rules that are kept are in the map, and the rules it starts from stand among the experts."""
    start = lm.LayoutMap(
        "data=2,model=4", {r".*\.up\.kernel$": ("model", "data"), r".*\.down\.kernel$": (None, "model")}
    )
    kept = find(12, start=start, keep=[r".*\.up\.kernel$"])
    assert ("model", "data") == kept.layout_map["blocks.1.up.kernel"].sharding_specs
    assert "start" in {row[0] for row in kept.rows}
    assert {"data=2, model=4"} == {row[1] for row in kept.rows}


@pytest.mark.long
@pytest.mark.parametrize("verify", [False, None])
def test_a_file_keeps_figures(tmp_path, verify):
    """A search with a file of figures finds the same a second time; by XLA's compiler too, if it is installed."""
    options = {"cache": tmp_path / "figures.json", "mesh": "model=8", "verify": verify}
    first, second = (find(10, **options) for _ in range(2))
    assert str(first) == str(second)


@pytest.mark.long
def test_figures_are_those_of_a_dim_of_the_batch(tmp_path):
    """With the batch over another dim, a map has figures of its own in the file."""
    cache, mesh = tmp_path / "figures.json", "data=2,model=4"
    find(6, cache=cache, mesh=mesh, batch_dim="data")
    again, alone = (find(6, cache=each, mesh=mesh, batch_dim="model") for each in (cache, None))
    assert str(alone) == str(again)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"on": "h1000:8"}, "on='h1000:8': there is no device 'h1000'"),
        ({"on": 3}, "search: on=3 does not name a machine"),
        ({"verify": "b300"}, "target 'b300' is not known"),
        ({"mesh": "data=2,model=8"}, "on='h100:8': the machine has 8 devices, but the mesh has 16"),
        (
            {"mesh": "data=2,model=4", "batch_dim": "rows"},
            "search: batch_dim 'rows' is not a dim of the mesh",
        ),
        ({"batch_dim": "rows"}, "search: batch_dim='rows' has no effect without mesh="),
        ({"mesh": "data=2,model=2,expert=2"}, "search: the mesh has 2 dims that do not shard the batch"),
        ({"keep": ["up"]}, "search: keep='up' is not a rule of start"),
        ({"start": {"up": ("model",)}}, "search: start={'up': ('model',)} is not a layout map"),
        ({"inputs": None}, "search: there are no inputs"),
        ({"tries": 0}, "search: tries=0 is not a positive integer"),
        ({"tries": -1}, "search: tries=-1 is not a positive integer"),
        ({"tries": 1.5}, "search: tries=1.5 is not a positive integer"),
        ({"on": "h100"}, "search: on='h100' has no number of devices"),
        (
            {"make_model": lambda: Module(nnx.Rngs(0)), "library": "jax", "optimizer": "adamw"},
            "optimizer='adamw' is not an optimizer",
        ),
        (
            {
                "make_model": lambda: Module(nnx.Rngs(0)),
                "library": "jax",
                "inputs": jax.ShapeDtypeStruct((0, 64), "float32"),
            },
            "Module: the batch has no rows",
        ),
        ({"make_model": narrow}, "narrow: the model cannot be called with inputs of these shapes"),
        (
            {"inputs": jax.ShapeDtypeStruct((3, 64), "float32")},
            "search: a batch of 3 cannot be sharded evenly on h100:64",
        ),
        ({"memory": 1 << 20, "mesh": "data=8"}, "search: no layout map fits the memory"),
    ],
)
def test_bad_input(options, what):
    """Each mistake is an error that says what is wrong."""
    on = "h100:64" if "cannot be sharded" in what else "h100:8"
    given = {"make_model": Stack, "inputs": INPUTS, "on": on, "library": "keras", "tries": 3} | options
    with pytest.raises(lm.LayoutMapError) as caught:
        lm.search(**given)
    assert what == caught.value.what


def test_the_command_line(tmp_path, monkeypatch, capsys):
    """The command prints what is found and writes its rules, which `layoutmap plan` takes."""
    (tmp_path / "searched.py").write_text(
        "import keras\n\ndef make():\n"
        "    up, down = keras.layers.Dense(1024, name='up'), keras.layers.Dense(64, name='down')\n"
        "    return keras.Sequential([keras.Input((64,)), up, down])\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = ("searched:make", "--inputs", "float32[32,64]", "--library", "keras")
    assert 0 == main(["search", *arguments, "--on", "h100:4", "--tries", "3", "--write", "rules.yaml"])
    out = capsys.readouterr().out
    assert "Best: " in out
    assert (tmp_path / "rules.yaml").read_text() in out
    assert 0 == main(["plan", *arguments, "--rules", "rules.yaml", "--strict"])
    assert 2 == main(["search", *arguments, "--on", "h100:4", "--memory", "1KiB", "--tries", "3"])
    assert "no layout map fits the memory" in capsys.readouterr().err
    sys.modules.pop("searched", None)


def test_a_search_says_how_far_it_is_where_there_is_no_terminal(capsys, monkeypatch):
    """How many maps were tried and the best of them, on lines that a log keeps."""
    monkeypatch.setattr(progress, "_LOG_SECONDS", 0)
    found = lm.search(pair, INPUTS, "h100:8", tries=3, verify=False)
    lines = capsys.readouterr().err.splitlines()

    assert found.num_tried == len(lines)
    assert all(f"layoutmap: {n} maps tried so far, best " in line for n, line in enumerate(lines, 1))


def test_an_interrupt_after_the_last_map_loses_nothing(monkeypatch, capsys):
    """While the plan of the best map is made, Ctrl-C marks the result as interrupted; another one ends the search.

    With progress=False nothing is printed.
    """
    monkeypatch.setattr(progress, "_LOG_SECONDS", 0)
    plan, left = layout_map_search._MapEvaluator.make_plan, [KeyboardInterrupt]

    def interrupted(*args):
        if left:
            raise left.pop()
        return plan(*args)

    monkeypatch.setattr(layout_map_search._MapEvaluator, "make_plan", interrupted)
    found = lm.search(pair, INPUTS, "h100:8", tries=3, verify=False, progress=False)
    assert (False, True, "") == (found.is_complete, found.num_tried > 1, capsys.readouterr().err)
    left += [KeyboardInterrupt] * 2
    with pytest.raises(KeyboardInterrupt):
        lm.search(pair, INPUTS, "h100:8", tries=3, verify=False)
