"""The rules for layer outputs that fixes advise name the model's own layers and the mesh's own dims."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from flax import nnx

import layoutmap as lm
from layoutmap.cli.syntax import translate_rules_to_yaml
from layoutmap.cost.table import Collective
from layoutmap.plan.output_rules import OutputRanks, make_activation_rule_fix, make_output_rule_text

L = keras.layers


class Block(L.Layer):
    def __init__(self):
        super().__init__()
        self.up, self.down = L.Dense(32), L.Dense(16)

    def call(self, x):
        return x + self.down(self.up(x))


class Blocks(keras.Model):
    def __init__(self):
        super().__init__()
        self.blocks = [Block(), Block()]

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Feed(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return x + self.down(self.up(x))


class Stack(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([Feed(nnx.Rngs(0)), Feed(nnx.Rngs(1))])

    def __call__(self, x):
        return self.layers[1](self.layers[0](x))


def make_functional():
    tokens = keras.Input((5, 16))
    x = L.MultiHeadAttention(2, 8, name="attn0")(tokens, tokens)
    return keras.Model(tokens, L.Dense(16, name="up0")(x))


def make_images():
    return keras.Sequential(
        [keras.Input((8, 8, 4)), L.Conv2D(16, 3, name="conv_a"), L.Conv2D(16, 3, name="conv_b")]
    )


def shard_matrices(mesh):
    """Rules that shard the last two axes of the kernels of dense layers and convolutions over two dims."""
    first, second, *_ = mesh.dim_names
    rules = {r".*(up|down|up0)\.kernel$": (first, second), r"conv_.\.kernel$": (None, None, first, second)}
    return lm.LayoutMap(mesh, rules, rest="replicated")


def list_warnings(make, layout_map, **options):
    problems = lm.plan(make, layout_map, **options).problems
    return [p for p in problems if p.kind == "no activations" or "activation rule" in p.what]


BLOCKS = {"library": "keras", "inputs": keras.KerasTensor((8, 5, 16))}
STACK = {"library": "jax", "inputs": jax.ShapeDtypeStruct((8, 16), "float32")}
CASES = {
    "blocks": (Blocks, "data=2,tp=4", BLOCKS, r"blocks\.\d+$", ("data", None, None)),
    "two data dims": (Blocks, "dp=2,fsdp=4", BLOCKS, r"blocks\.\d+$", ("fsdp", None, None)),
    "no known dim": (Blocks, "x=2,y=4", BLOCKS, r"blocks\.\d+$", ("x", None, None)),
    "no blocks": (make_functional, "data=2,tp=4", {"library": "keras"}, "up0$", ("data", None, None)),
    "a known rank": (make_images, "data=2,tp=4", {"library": "keras"}, "conv_a$", ("data", None, None, None)),
    "rank of a step": (Stack, "data=2,tp=4", {**STACK, "on": "h100:8"}, r"layers\.\d+$", ("data", None)),
    "given": (
        Stack,
        "x=2,y=4",
        {**STACK, "on": "h100:8", "batch_dim": "y"},
        r"layers\.\d+$",
        ("y", None),
    ),
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", CASES)
def test_the_rule_that_the_plan_advises_can_be_copied(case):
    """In Python and in a rules file; with it the plan warns no more."""
    make, dims, options, pattern, specs = CASES[case]
    layout_map = shard_matrices(lm.create_mesh(dims))
    (problem,) = list_warnings(make, layout_map, **options)
    python = re.search(r"layout_map\.activations\[.*?\] = \(.*?\)", problem.fix)[0]
    yaml = re.search(r"activations: \{.*?\}", translate_rules_to_yaml(problem.fix))[0]
    copied = lm.LayoutMap.from_yaml(f"version: 1\nrules: {{}}\n{yaml}\n", layout_map.mesh)
    exec(python)

    assert {pattern: lm.Layout(specs, layout_map.mesh)} == dict(layout_map.activations)
    assert dict(copied.activations) == dict(layout_map.activations)
    assert ("if batches are sharded over x" in problem.fix) == (case == "no known dim")
    assert ("one None for each axis but the first" in problem.fix) == (make is Blocks)
    assert [] == list_warnings(make, layout_map, **options)


def make_tree():
    return {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16))}


def test_of_a_pytree_the_plan_advises_a_constraint_in_the_code():
    """Nothing in the plan shows the constraint, so `strict` builds; the line works in a step."""
    layout_map = lm.LayoutMap("data=2,tp=4", {"up": ("data", "tp"), "down": ("tp", "data")})
    (note,) = list_warnings(make_tree, layout_map, library="jax")
    line = "x = jax.lax.with_sharding_constraint(x, jax.P('data'))"

    @lm.jit_step
    def step(weights, x):
        names = {"jax": jax, "x": x @ weights["up"]}
        exec(line, names)
        return names["x"] @ weights["down"]

    assert "note" == note.severity
    assert f"constrain activations in the function that computes them: {line}" == note.fix
    weights = layout_map.build(make_tree, library="jax", strict=True, batch_dim="data")
    assert (np.full((8, 16), 512) == step(weights, jnp.ones((8, 16)))).all()


def test_findings_of_a_cost_name_the_layer_and_all_axes():
    """The layer, its repetitions, and the rank of its output are known from the step."""
    layout_map = lm.LayoutMap("data=2,tp=4", {r".*up\.kernel$": (None, "tp")}, rest="replicated")
    plan = lm.plan(Stack, layout_map, **STACK, on="h100:8", verify=False)
    sent = (
        Collective("all_gather", ("tp",), 2, 2**28, "layers.*.up.kernel", "forward"),
        Collective("all_reduce", ("data",), 2, 2**28, "layers.*.down", "forward"),
    )
    plan = replace(plan, cost=replace(plan.cost, step=replace(plan.cost.step, collectives=sent)))
    fixes = {problem.kind: problem.fix for problem in plan.lint()}

    gathered, summed = (rf"""layout_map.activations[r"layers\.\d+\.{name}$"] = """ for name in ("up", "down"))
    assert fixes["gathered weight"].endswith(f"so that each device computes a part: {gathered}('data', 'tp')")
    assert fixes["summed activation"] == f"shard the output by rows, too: {summed}('data', None)"


def test_without_a_rank_the_rule_is_in_words():
    """An incomplete rule would be copied. Without paths of layers it says what to do with a pytree."""
    start = "a rule of layout_map.activations for the output of "
    end = " that shards its first axis over data and its last axis over tp"
    ranks = OutputRanks({"blocks.0.up": None, "blocks.1.up": None})

    known = make_output_rule_text(ranks, "blocks.*.up", "data", "tp")
    unknown = make_output_rule_text(None, "blocks.*.up", "data", "tp")
    assert rf'{start}r"blocks\.\d+\.up$"{end}' == known
    assert (
        f"{start}blocks.*.up (of a pytree: jax.lax.with_sharding_constraint where it is computed){end}"
        == unknown
    )


def test_without_layers_that_have_weights_the_fix_says_how_to_find_the_path():
    """As of weights that the model itself owns."""
    mesh = lm.Mesh(None, "data=2,tp=4")
    fix = make_activation_rule_fix(OutputRanks({"up": None}), ["kernel"], mesh, None)

    assert fix == (
        "add a rule to layout_map.activations for the output of a layer, with 'data' for its first axis; "
        "the path of a layer is that of its variables without the last part"
    )
