"""What would make a plan without a counted step fit: it does what it says, taken as it is written."""

from dataclasses import replace

import advice
import costs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import layoutmap as lm
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.plan.advice import Advice
from layoutmap.scope.plan import make_plan
from layoutmap.testing import strategies


def narrowed(variables, dtype):
    """The variables of a model whose layers are made in another type."""
    return [
        replace(v, dtype=dtype)
        if v.dtype == "float32" and (v.is_trained or (v.kind is Kind.SLOT and v.parent))
        else v
        for v in variables
    ]


@given(strategies.plans(), st.floats(0.1, 0.99))
@settings(deadline=None)
def test_advice_needs_what_it_says(drawn, share):
    """Planned so, in Python or by a rules file and options, a device holds just that; what fits comes first."""
    variables, layout_map, plan = drawn
    verdict = plan.set_limits(device_memory=max(1, int(share * plan.memory.total))).verdict
    for each in verdict.advice:
        taken, options, _ = advice.in_python(each.python, layout_map)
        of_model = narrowed(variables, options.pop("dtype")) if "dtype" in options else variables
        assert each.needed_bytes == make_plan(of_model, taken).memory.total
        assert {} == options
        assert each.needed_bytes < verdict.needed_bytes
        if each.command:
            by_file, flags = advice.as_command(each.command, layout_map)
            given = dict(zip(flags[::2], flags[1::2], strict=True))
            if "--mesh" in given:
                by_file = advice.changed(by_file, mesh=given["--mesh"])
            if "--preset" not in given:
                assert taken == by_file
    fits = [each.needed_bytes <= verdict.available_bytes for each in verdict.advice]
    assert sorted(fits, reverse=True) == fits


LLAMA = [
    VariableSpec(f"transformer_layer_{n}.feedforward_{name}_dense.kernel", shape, "float32")
    for n in range(4)
    for name, shape in (("gate", (64, 256)), ("intermediate", (64, 256)), ("output", (256, 64)))
]


def advised(layout_map, variables=LLAMA, share=0.5):
    plan = make_plan(variables, layout_map)
    return plan.set_limits(device_memory=int(share * plan.memory.total)).verdict


def test_a_preset_is_changed_by_its_options():
    """The rules of a preset are not spelled out: what its other option makes of them is counted, and that is said."""
    layout_map = lm.LayoutMap.preset("llama", lm.Mesh("data=2,model=4"))
    verdict = advised(layout_map)

    assert [
        ("shard weights over data as well (FSDP)", "--preset llama --fsdp-dim data"),
        ("use 16 devices", "--mesh data=2,model=8"),
        ("make weights and slots in bfloat16", "--dtype bfloat16"),
    ] == [(each.what, each.command) for each in verdict.advice]
    best, *_ = advised(layout_map, share=0.3).advice
    assert "--mesh data=4,model=4 --preset llama --fsdp-dim data" == best.command


def test_what_saves_next_to_nothing_is_not_advised():
    """A norm of a few numbers beside large weights that are sharded over all dims; and nothing is where a plan fits."""
    norm = VariableSpec("norm.scale", (2, 8), "bfloat16")
    large = [VariableSpec("up.kernel", (512, 512), "bfloat16")]
    layout_map = lm.LayoutMap("data=2,model=4", {"up": ("data", "model")}, rest="replicated")

    assert ["use 16 devices"] == [each.what for each in advised(layout_map, [*large, norm], 0.6).advice]
    assert () == advised(layout_map, [*large, norm], 1).advice


@pytest.mark.parametrize(
    ("as_command", "typed"),
    [(True, "rules:\n                  'up': [data, model]"), (False, 'rules={r"up": ("data", "model")}')],
)
def test_what_to_type_is_of_where_the_user_is(as_command, typed):
    """Lines of a rules file on the command line, and Python in Python."""
    verdict = advised(
        lm.LayoutMap("data=2,model=4", {"up": (None, "model")}),
        [VariableSpec("up.kernel", (512, 512), "bfloat16")],
    )
    text = verdict.format_text(as_command=as_command)

    assert f"128.0 KiB, fits: shard weights over data as well (FSDP)\n                {typed}" in text


def test_what_was_counted_is_in_the_file_of_a_plan():
    """A plan that is read again has the verdict that was written, with what was tried and what was not."""
    tried = (Advice("recompute", 'remat="blocks"', "--remat blocks", 20 * costs.GIB, "1.00 s a step"),)
    made = costs.plan()
    assert made.cost is not None
    made = replace(made, cost=replace(made.cost, tried=tried, untried=("half the batch",)))
    short, again = (
        plan.set_limits(device_memory=25 * costs.GIB) for plan in (made, lm.Plan.from_json(made.to_json()))
    )

    assert tried == again.verdict.advice
    assert short.verdict == again.verdict
    assert (
        "20.0 GiB, fits, 1.00 s a step: recompute\n                --remat blocks"
        in short.verdict.format_text(as_command=True)
    )
    assert "not tried   half the batch: counting that takes too long" in str(short.verdict)
    assert () == made.verdict.advice
