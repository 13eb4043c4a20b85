"""Plans of real models: every rule made of one is for a parameter of that model, and shards it evenly.

The models are on the meta device here, since only the names and shapes of their parameters are read.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from transformers_models import WITH_A_PLAN, WITHOUT, on_meta

import layoutmap as lm
from layoutmap.rules.tp_plan import STYLES

pytestmark = pytest.mark.every_case

MESH = lm.Mesh(None, "batch=2,model=4")


def check(layout_map, model):
    """Every rule is for something, every layout fits, and what the plan is for is all sharded."""
    shapes = {path: tuple(p.shape) for path, p in model.named_parameters(remove_duplicate=False)}
    used = {match.rule.pattern for path in shapes if (match := layout_map.match(path)).rule}
    layers = [path for path, _ in model.named_modules(remove_duplicate=False)]
    met = {match.rule.pattern for path in layers if (match := layout_map.activations.match(path)).rule}

    assert list(layout_map) == [pattern for pattern in layout_map if pattern in used]
    assert set(layout_map.activations) == met
    for path, shape in shapes.items():
        layout = layout_map[path]
        assert layout is None or (len(shape), ()) == (layout.rank, tuple(layout.find_uneven_axes(shape)))
    assert any("model" in layout.sharding_specs for layout in layout_map.values())


@pytest.mark.parametrize("name", WITH_A_PLAN)
def test_the_plan_that_a_model_has_becomes_rules_for_its_parameters(name):
    """The plan of transformers, by the model alone; what it cannot say is what is listed here, and nothing more."""
    kind, config, warned = WITH_A_PLAN[name]
    model = on_meta(kind, config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", lm.LayoutMapWarning)
        layout_map = lm.LayoutMap.from_tp_plan(model, MESH, batch_dim="batch")

    check(layout_map, model)
    assert ("model", "unsharded") == layout_map["model.embed_tokens.weight"].sharding_specs
    assert ("model", "unsharded") == layout_map["lm_head.weight"].sharding_specs
    assert len(warned) == len(caught)
    assert all(text in str(w.message) for text, w in zip(warned, caught, strict=True))


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3_moe", "gemma3"])
@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
def test_activations_have_the_rank_of_the_layers_outputs(name):
    """A layer's output is known when it runs: for these models the rules' ranks are right."""
    kind, config, _ = WITH_A_PLAN[name]
    model = getattr(transformers, kind)(config())
    layout_map = lm.LayoutMap.from_tp_plan(model, MESH)
    ranks = {}

    for path, layer in model.named_modules():
        if layout_map.activations[path]:
            layer.register_forward_hook(
                lambda _, __, out, path=path: ranks.setdefault(path, out.ndim) and None
            )
    model(torch.zeros(2, 4, dtype=torch.long))

    assert len(ranks) >= 4
    assert {path: layout_map.activations[path].rank for path in ranks} == ranks


@pytest.mark.parametrize("name", WITHOUT)
def test_a_plan_written_for_a_model_becomes_rules_for_its_parameters(name):
    """Models without a plan of their own say so, and take one; encoders and decoders, biases and tied embeddings."""
    kind, config, plan = WITHOUT[name]
    model = on_meta(kind, config)
    with pytest.raises(lm.RuleError, match="has no tp_plan"):
        lm.LayoutMap.from_tp_plan(model, MESH)

    check(
        lm.LayoutMap.from_tp_plan(
            plan, MESH, parameters=dict(model.named_parameters(remove_duplicate=False))
        ),
        model,
    )


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_the_plan_for_experts_shards_them_by_expert(name):
    """`base_model_ep_plan` of a config, with the prefix of the base model."""
    kind, config, _ = WITH_A_PLAN[name]
    model = on_meta(kind, config)
    shapes = dict(model.named_parameters())
    layout_map = lm.LayoutMap.from_tp_plan(
        model.config.base_model_ep_plan, MESH, prefix="model.", parameters=shapes
    )

    check(layout_map, model)
    assert ("model", "unsharded", "unsharded") == layout_map[
        "model.layers.0.mlp.experts.down_proj"
    ].sharding_specs


def test_every_style_of_every_plan_in_transformers_is_known():
    """No model of the installed transformers has a plan that is refused."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    plans = [
        getattr(c, f"base_model_{kind}_plan", None) for c in CONFIG_MAPPING.values() for kind in ("tp", "ep")
    ]
    styles = {style for plan in plans for style in (plan or {}).values()}

    assert set() == styles - STYLES.keys()
    assert {
        "colwise",
        "rowwise",
        "packed_colwise",
        "grouped_gemm",
        "moe_tp_experts",
        "mla_kv_a_proj",
    } <= styles


@pytest.mark.parametrize("name", ["tied llama", "mixtral"])
@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
def test_a_function_that_makes_the_model_tells_all(name):
    """A dry run of it tells the plan, the parameters and the layers, as a model on the meta device would."""
    kind, config, _ = WITH_A_PLAN[name]
    by_model = lm.LayoutMap.from_tp_plan(on_meta(kind, config), MESH, batch_dim="batch")
    state = torch.get_rng_state()

    assert by_model == lm.LayoutMap.from_tp_plan(
        lambda: getattr(transformers, kind)(config()), MESH, batch_dim="batch"
    )
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.long
def test_a_model_of_full_size_is_planned():
    """Llama 3 with 405 billion parameters: no weight is made, no rule is unused, nothing is uneven."""
    mesh = lm.Mesh(None, "batch=64,model=8")
    config = transformers.LlamaConfig(
        vocab_size=128_256,
        hidden_size=16_384,
        intermediate_size=53_248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
    )

    def make():
        return transformers.LlamaForCausalLM(config)

    layout_map = lm.LayoutMap.from_tp_plan(make, mesh, batch_dim="batch")
    layout_map[r".*(norm\.weight|inv_freq)$"] = (None,)
    plan = lm.plan(make, layout_map, strict=True, library="torch")

    assert 405_853_388_800 * 4 == sum(
        a.variable.global_bytes for a in plan.assignments if a.variable.kind == "weight"
    )
    assert plan.device_bytes < plan.global_bytes / 7.9
    assert 2 * 126 + 2 == len(plan.activations)
