"""`plan.explain`: what a layout costs in a step; the text for each reason that there is is in `test_golden`."""

import textwrap
from dataclasses import replace

import costs

import layoutmap as lm
from layoutmap.core.variables import VariableSpec
from layoutmap.scope.plan import make_plan


def test_a_rule_that_comes_near_is_named():
    """Where no rule matches."""
    layout_map = lm.LayoutMap(lm.Mesh(None, "batch=2,model=4"), {r"norms\.scale": (None,)})
    plan = make_plan([VariableSpec("norm.scale", (8,), "float32")], layout_map)

    assert r"  near miss   norms\.scale" in plan.explain("norm.scale").splitlines()


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
