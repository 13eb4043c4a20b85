"""`plan.explain`: the whole text for each reason that a variable can have to be where it is."""

import textwrap
from dataclasses import replace

import costs
import pytest

import layoutmap as lm
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.scope.plan import make_plan

MESH = lm.Mesh(None, "batch=2,model=4")
VARIABLES = [
    VariableSpec("tokens.embeddings", (64, 8), "bfloat16", aliases=("head.kernel",)),
    VariableSpec("d1.kernel", (8, 32), "float32"),
    VariableSpec("d1.bias", (6,), "float32"),
    VariableSpec("norm.scale", (8,), "float32"),
    VariableSpec("optimizer.d1.kernel.momentum", (8, 32), "float32", Kind.SLOT, parent="d1.kernel"),
    VariableSpec("loss.total", (), "float32", Kind.METRIC),
]
RULES = {r".*embeddings": ("model", None), r".*\.kernel": (None, ("model", "batch")), r"d1\.bias": ("model",)}
RULES |= {r"norms\.scale": (None,)}

EXPLAINED = {
    "head.kernel": r"""
        tokens.embeddings
          also called   head.kernel
          what          weight, bfloat16[64, 8], 1.0 KiB
          layout        (model, unsharded)
          per device    16 x 8, 256 B
          because       rule 1  .*embeddings
          also matches  rule 2  .*\.kernel: would give (unsharded, (model, batch))
          warning       tokens.embeddings: its paths get different layouts
                          tokens.embeddings  (model, unsharded)  rule 1  .*embeddings
                          head.kernel        (unsharded, (model, batch))  rule 2  .*\.kernel
                          why                it is one variable with 2 paths, and rule 1  .*embeddings comes first
                          fix                make the rules agree, or leave out one of them
          change it     the first rule that matches wins: put one before rule 1, or change that
        """,
    "d1.kernel": r"""
        d1.kernel
          what         weight, float32[8, 32], 1.0 KiB
          layout       (unsharded, (model, batch))
          per device   8 x 4, 128 B
          global init  its initializer is orthogonal
          because      rule 2  .*\.kernel
          change it    the first rule that matches wins: put one before rule 2, or change that
        """,
    "d1.bias": r"""
        d1.bias
          what        weight, float32[6], 24 B
          layout      (model,)
          per device  does not fit
          because     rule 3  d1\.bias
          error       d1.bias: axis 0 cannot be split evenly
                        shape   (6,)
                        layout  (model,)     rule 3  d1\.bias
                        mesh    batch=2, model=4
                        why     6 is not a multiple of 4
                        fix     pad axis 0 to 8, or leave it unsharded: (unsharded,), or set uneven="shrink"
          change it   the first rule that matches wins: put one before rule 3, or change that
        """,
    "norm.scale": r"""
        norm.scale
          what        weight, float32[8], 32 B
          layout      replicated
          per device  8, 32 B
          because     no rule matches, so it is replicated
          near miss   norms\.scale
          change it   layout_map[r"norm\.scale$"] = (None,), with mesh dims where it is to be sharded
        """,
    "optimizer.d1.kernel.momentum": """
        optimizer.d1.kernel.momentum
          what        slot, float32[8, 32], 1.0 KiB
          layout      (unsharded, (model, batch))
          per device  8 x 4, 128 B
          because     it follows its parent: d1.kernel
          change it   with the rule of d1.kernel
        """,
    "loss.total": """
        loss.total
          what        metric, float32[], 4 B
          layout      replicated
          per device  scalar, 4 B
          because     rules do not apply to a metric; it is replicated
        """,
}


@pytest.fixture
def plan():
    whole = {("", "d1.kernel"): "its initializer is orthogonal"}
    return make_plan(VARIABLES, lm.LayoutMap(MESH, RULES), global_init=whole)


@pytest.mark.parametrize("path", EXPLAINED)
def test_the_text(plan, path):
    """What it is, where it is placed, why, what else matches, what is wrong with it, and what to type."""
    assert textwrap.dedent(EXPLAINED[path]).strip() == plan.explain(path)


def test_a_path_that_is_not_there(plan):
    """Those that come close are named."""
    with pytest.raises(KeyError, match=r"no variable 'd1.kernal'; near misses: d1.kernel"):
        plan.explain("d1.kernal")


def test_what_a_layout_costs_in_a_step_is_said():
    """What travels because of the weight, and because of what its layer outputs; or that nothing does."""
    plan = costs.plan()

    assert textwrap.dedent("""
          in a step   all-gather of 14.0 MiB over data, 2 times (forward): sends 24.5 MiB in 514 us on InfiniBand
          in a step   reduce-scatter of 14.0 MiB over data, once (backward): sends 12.2 MiB in 257 us on InfiniBand
          its layer   all-reduce of 256.0 MiB over model, 4 times (forward): sends 1.8 GiB in 4.18 ms on NVLink
        """) == "\n" + "".join(
        f"{line[2:]}\n"
        for line in plan.explain("blocks.0.up.kernel").splitlines()
        if "step" in line[:12] or "its layer" in line
    )
    assert "in a step   nothing travels because of it" in plan.explain("tokens.embeddings")
    starred = [replace(c, cause=c.cause.replace("0", "*")) for c in costs.collectives(1)]
    assert (
        "its layer   all-reduce of 256.0 MiB over model, 4 times for all of blocks.*.up (forward): sends 1.8 GiB in"
        in costs.plan(None, starred).explain("blocks.1.up.kernel")
    )
