"""Models of JAX that were written elsewhere: Llama, Gemma, Qwen and Mamba in flax.nnx, ESM and others as pytrees."""

import numpy as np
import pytest
from real_jax_models import MODELS, PRESETS

import layoutmap as lm
from layoutmap.adapters import get_adapter
from layoutmap.plan.problems import merge_problems

PROCESSES = ("jax",)
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning"),
    # Older names that tunix 0.1.7 uses.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:tunix"),
    pytest.mark.filterwarnings("ignore:'sharding' is deprecated:DeprecationWarning"),
]


def make_map(name):
    return lm.LayoutMap(lm.create_mesh("batch=2,model=4"), MODELS[name].rules, rest="replicated")


def values(model):
    adapter = get_adapter("jax")
    return {path: adapter.read(variable) for path, variable in adapter.variables(model).items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_real_model_is_planned_and_built(name):
    """Each rule shards something, no global value is needed for it, and values are those of the plain model."""
    plan = lm.plan(MODELS[name].make, make_map(name), library="jax")
    built = make_map(name).build(MODELS[name].make, library="jax")
    expected = values(MODELS[name].make())

    assert [] == [p.what for p in plan.problems if p.severity == "error" or p.kind == "unused rule"]
    assert [] == [a for a in plan.assignments if a.global_init and max(a.layout.shard_counts, default=1) > 1]
    assert sorted(a.variable.path for a in plan.assignments) == sorted(expected)
    for path, value in values(built).items():
        assert np.array_equal(expected[path], value), path


@pytest.mark.parametrize("name", MODELS)
def test_a_real_model_trains_to_the_numbers_of_one_device(name):
    """Outputs, losses and gradients, and three steps of an optimizer."""
    real = MODELS[name]

    lm.check_parity(real.make, make_map(name), real.batch(), steps=3, batch_dim="batch", library="jax")


@pytest.mark.parametrize("name", ["Llama 3"])
def test_annotations_of_a_real_model_are_notes(name):
    """One for each sort of weight, over all its blocks."""
    plan = lm.plan(MODELS[name].make, make_map(name), library="jax")
    notes = {p.subject: p.what for p in merge_problems(plan.problems) if p.kind == "unsupported"}

    assert "its annotation ('tp', 'fsdp') has no effect" in notes["layers.{0..1}.mlp.down_proj.kernel"]


@pytest.mark.parametrize("options", [{}, {"fsdp_dim": "batch"}], ids=["model", "both"])
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fits_a_real_model(name, options):
    """No weight is without a rule, no rule without a weight, and lint finds nothing."""
    layout_map = lm.LayoutMap.preset(name, lm.Mesh(None, "batch=2,model=4"), **options)
    plan = lm.plan(PRESETS[name], layout_map, library="jax", strict=True)

    assert [] == [*plan.lint(batch_dim="batch")]
