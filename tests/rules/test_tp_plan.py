"""A tensor parallel plan becomes rules for exactly the parameters that it is for, and says what rules cannot."""

from __future__ import annotations

import textwrap
from types import SimpleNamespace

import pytest

import layoutmap as lm
from layoutmap.rules.tp_plan import STYLES

MESH = lm.Mesh(None, "batch=2,model=4")

# Llama's plan as transformers has it, and the parameters of a Llama with biases.
LLAMA = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
SHAPES = {
    "model.embed_tokens.weight": (64, 16),
    **{
        f"model.layers.{i}.{name}": shape
        for i in range(12)
        for name, shape in {
            "self_attn.q_proj.weight": (32, 16),
            "self_attn.q_proj.bias": (32,),
            "self_attn.o_proj.weight": (16, 32),
            "self_attn.o_proj.bias": (16,),
            "mlp.up_proj.weight": (64, 16),
            "mlp.down_proj.weight": (16, 64),
        }.items()
    },
}


def specs(rules):
    return {pattern: layout.sharding_specs for pattern, layout in rules.items()}


def converted(plan, shapes=None, **options):
    return lm.LayoutMap.from_tp_plan(plan, MESH, parameters=shapes, **options)


def test_llamas_plan_by_its_parameters():
    """Each entry becomes a rule for each name of parameter that it is for, and no other."""
    layout_map = converted(LLAMA, SHAPES, prefix="model.", batch_dim="batch")
    layer = r"model\.layers\.\d+\."

    assert {
        layer + r"self_attn\.q_proj\.weight$": ("model", "unsharded"),
        layer + r"self_attn\.q_proj\.bias$": ("model",),
        layer + r"self_attn\.o_proj\.weight$": ("unsharded", "model"),
        layer + r"self_attn\.o_proj\.bias$": ("unsharded",),
        layer + r"mlp\.up_proj\.weight$": ("model", "unsharded"),
        layer + r"mlp\.down_proj\.weight$": ("unsharded", "model"),
    } == specs(layout_map)
    assert {
        layer + r"self_attn\.o_proj$": ("batch", "unsharded", "unsharded"),
        layer + r"mlp\.down_proj$": ("batch", "unsharded", "unsharded"),
    } == specs(layout_map.activations)
    assert (
        layout_map["model.layers.11.mlp.up_proj.weight"]
        == layout_map.match("model.layers.3.mlp.up_proj.weight").layout
    )
    assert layout_map["model.layers.x.mlp.up_proj.weight"] is None
    assert layout_map["model.embed_tokens.weight"] is None


def test_where_parameters_are_not_known_a_linear_layer_has_a_weight_and_a_bias():
    """A plan alone gives the rules of its parameters as they mostly are; a plan of a model tells which matched none."""
    with_shapes = converted(LLAMA, SHAPES, prefix="model.")
    alone = converted(LLAMA, prefix="model.")

    assert specs(with_shapes).items() <= specs(alone).items()
    assert {r"model\.layers\.\d+\.mlp\.up_proj\.bias$", r"model\.layers\.\d+\.mlp\.down_proj\.bias$"} == (
        alone.keys() - with_shapes.keys()
    )
    assert with_shapes.activations == alone.activations


@pytest.mark.parametrize(
    ("style", "weight", "bias", "output"),
    [
        ("colwise", ("M", None), ("M",), None),
        ("colwise_gather_output", ("M", None), ("M",), ("B", None, None)),
        ("colwise_rep", ("M", None), ("M",), ("B", None, None)),
        ("local_colwise", ("M", None), ("M",), None),
        ("rowwise", (None, "M"), (None,), ("B", None, None)),
        ("rowwise_rep", (None, "M"), (None,), ("B", None, None)),
        ("rowwise_split_input", (None, "M"), (None,), ("B", None, None)),
        ("local_rowwise", (None, "M"), (None,), None),
        ("embedding_rowwise", ("M", None), ("M",), ("B", None, None)),
        ("embedding_colwise", (None, "M"), ("M",), ("B", None, None)),
        ("sequence_parallel", (None, None), (None,), ("B", "M", None)),
        ("replicate", (None, None), (None,), None),
        ("replicated_with_grad_allreduce", (None, None), (None,), None),
        ("mla_kv_a_proj", (None, None), (None,), None),
        ("ep_router", (None, None), (None,), None),
    ],
)
def test_every_style_of_a_layer_says_how_weight_bias_and_output_are_placed(style, weight, bias, output):
    """One entry, one layer with a weight and a bias."""

    def named(layout):
        return tuple({"M": "model", "B": "batch", None: "unsharded"}[spec] for spec in layout)

    shapes = {"a.weight": (8, 8), "a.bias": (8,)}
    layout_map = converted({"a": style}, shapes, batch_dim="batch")

    assert {r"a\.weight$": named(weight), r"a\.bias$": named(bias)} == specs(layout_map)
    assert ({} if output is None else {"a$": named(output)}) == specs(layout_map.activations)


EXPERTS = {
    "mlp.experts.gate_up_proj": (4, 32, 16),
    "mlp.experts.down_proj": (4, 16, 16),
    "mlp.experts.down_proj_bias": (4, 16),
}


def test_experts_are_sharded_by_expert():
    """An entry may name a parameter itself; the plan for expert parallelism shards the first axis."""
    plan = {
        "mlp.experts": "ep_dispatch_experts",
        "mlp.experts.gate_up_proj": "grouped_gemm",
        "mlp.experts.down_proj": "grouped_gemm",
        "mlp.experts.down_proj_bias": "grouped_gemm",
    }
    expected = {
        r"mlp\.experts\.gate_up_proj$": ("model", "unsharded", "unsharded"),
        r"mlp\.experts\.down_proj$": ("model", "unsharded", "unsharded"),
        r"mlp\.experts\.down_proj_bias$": ("model", "unsharded"),
    }

    for layout_map in (converted(plan, EXPERTS, batch_dim="batch"), converted(plan, batch_dim="batch")):
        assert expected == specs(layout_map)
        assert {r"mlp\.experts$": ("batch", "unsharded")} == specs(layout_map.activations)


def test_packed_weights_are_sharded_as_one_with_a_warning():
    """The gate and the up projection in one tensor: a layout cannot shard each for itself."""
    plan = {
        "mlp.experts.gate_up_proj": "packed_colwise",
        "mlp.experts.down_proj": "rowwise",
        "mlp.experts": "moe_tp_experts",
    }

    for shapes in (EXPERTS, None):
        with pytest.warns(lm.LayoutMapWarning) as caught:
            layout_map = converted(plan, shapes)
        assert {
            r"mlp\.experts\.gate_up_proj$": ("unsharded", "model", "unsharded"),
            r"mlp\.experts\.down_proj$": ("unsharded", "unsharded", "model"),
        } == specs(layout_map)
        assert (
            textwrap.dedent("""\
            tp_plan: packed weights are sharded in consecutive pieces
              entries  mlp.experts.gate_up_proj (packed_colwise)
              why      a layout shards the axis as a whole, but transformers shards each weight in it. The \
results are equal, but splitting the axis into the weights sends values between devices
              fix      shard the experts instead, with the config's base_model_ep_plan, or ignore this""")
            == str(caught[0].message)
        )
        assert [__file__] == [w.filename for w in caught]


def test_a_packed_row_is_sharded_along_its_last_axis():
    """As for the experts of Llama 4, which are no linear layers."""
    plan = {"experts.up": "packed_rowwise", "lin": "packed_rowwise"}
    with pytest.warns(lm.LayoutMapWarning, match="packed"):
        rules = specs(converted(plan, {"experts.up": (4, 8, 16), "lin.bias": (8,)}))

    assert {r"experts\.up$": ("unsharded", "unsharded", "model"), r"lin\.bias$": ("unsharded",)} == rules


def test_a_parameter_without_a_layer_follows_its_own_entry():
    """Attention sinks are a parameter of one axis; the style of the layer above says nothing of them."""
    plan = {"self_attn.sinks": "colwise", "self_attn": "local_params"}

    for shapes in ({"self_attn.sinks": (8,), "self_attn.q_proj.weight": (8, 8)}, None):
        assert {r"self_attn\.sinks$": ("model",)} == specs(converted(plan, shapes))


def test_a_parameters_own_entry_comes_before_that_of_its_layer():
    """As in transformers, whatever the order of the plan."""
    plan = {"a": "rowwise", "a.weight": "colwise"}

    assert {r"a\.weight$": ("model", "unsharded"), r"a\.bias$": ("unsharded",)} == specs(
        converted(plan, {"a.weight": (8, 8), "a.bias": (8,)})
    )


def test_every_style_is_listed():
    """Each style makes rules, or is of a layer that only computes and makes none."""
    for style in STYLES:
        shapes = {"a.weight": (8, 8)}
        if STYLES[style].sharded == "none of its own":
            assert {} == specs(converted({"a": style, "a.weight": "replicate"}, shapes)).get("a$", {})
        elif not STYLES[style].packed:
            assert 1 == len(converted({"a": style}, shapes))


def test_activations_may_be_left_out():
    """Without them, only parameters are laid out."""
    assert 0 == len(converted(LLAMA, activations=False).activations)


# -- where plans come from


def test_plans_come_from_models_configs_and_dicts():
    """A model tells plan, parameters and layers; a config and a dict the plan."""
    tensors = {name: SimpleNamespace(shape=shape) for name, shape in SHAPES.items()}
    plan = {f"model.{key}": style for key, style in LLAMA.items()}
    layers = {path.rpartition(".")[0]: None for path in SHAPES}

    model = SimpleNamespace(
        tp_plan=plan,
        named_parameters=lambda remove_duplicate: tensors.items(),
        named_modules=lambda remove_duplicate: layers.items(),
    )
    config = SimpleNamespace(base_model_tp_plan=LLAMA)
    expected = converted(LLAMA, SHAPES, prefix="model.")

    assert expected == lm.LayoutMap.from_tp_plan(model, MESH)
    assert expected == converted(config, SHAPES, prefix="model.")
    assert expected == converted(config, tensors, prefix="model.")


class Named:
    """Has no plan."""


BAD = {
    "no plan": (
        lambda: converted(Named()),
        f"""
        {Named.__module__}.Named has no tp_plan
          why   transformers has plans only for some models, in the config of each submodel
          fix   pass a model, a config, or a plan: {{"layers.*.self_attn.q_proj": "colwise", ...}}
        """,
    ),
    "a class": (
        lambda: converted(Named),
        f"""
        {Named.__module__}.Named has no tp_plan
          why   it is a class, and part of the plan is in the config of an instance
          fix   pass a model, a config, or a plan: {{"layers.*.self_attn.q_proj": "colwise", ...}}
        """,
    ),
    "a config of parts": (
        lambda: converted(SimpleNamespace(base_model_tp_plan=None, text_config=1, vision_config=2)),
        """
        types.SimpleNamespace has no tp_plan
          why   transformers has plans only for some models, in the config of each submodel
          fix   pass the config of a part, as in config.text_config, and its prefix
        """,
    ),
    "a style that is not known": (
        lambda: converted({"a": "colwize"}),
        f"""
        tp_plan entry 'a': there is no style 'colwize'
          why   the styles are {", ".join(STYLES)}
          fix   did you mean 'colwise'?
        """,
    ),
    "a style that is an object": (
        lambda: converted({"a": Named}),
        f"""
        tp_plan entry 'a': there is no style {Named!r}
          why   the styles are {", ".join(STYLES)}
          fix   use one of them, or leave the entry out
        """,
    ),
    "a star that is no layer's number": (
        lambda: converted({"layer*": "colwise"}),
        """
        tp_plan entry 'layer*': its * is not a complete part of the path
          why   * stands for the number of a layer, and must be between dots
          fix   write it as in 'layers.*.mlp.up_proj'
        """,
    ),
    "a dim that is not there": (
        lambda: converted(LLAMA, dim="tp"),
        """
        from_tp_plan: dim 'tp' is not a dim of the mesh
          mesh  batch=2, model=4
          why   weights are sharded over it
          fix   use one of 'batch', 'model'
        """,
    ),
    "no prefix": (
        lambda: converted(LLAMA, SHAPES),
        """
        tp_plan: no entry matches a parameter of the model
          entry      layers.*.self_attn.q_proj
          parameter  model.embed_tokens.weight
          why        the model's paths have another prefix
          fix        from_tp_plan(..., prefix='model.')
        """,
    ),
    "another model": (
        lambda: converted(LLAMA, {"a": (2, 2)}),
        """
        tp_plan: no entry matches a parameter of the model
          entry      layers.*.self_attn.q_proj
          parameter  a
          why        the plan belongs to another model
          fix        use the plan of this model
        """,
    ),
    "one entry for two ranks": (
        lambda: converted({"a.*": "colwise"}, {"a.0.weight": (8, 8), "a.1.weight": (8, 8, 8)}),
        """
        tp_plan entry 'a.*': its parameters have different ranks, 2 and 3
          parameter  a.1.weight
          why        a rule gives one layout, with a spec for each axis
          fix        write an entry for each parameter
        """,
    ),
}


@pytest.mark.parametrize("mistake", BAD)
def test_what_cannot_be_is_refused(mistake):
    """Each mistake has its whole message."""
    act, message = BAD[mistake]
    with pytest.raises(lm.RuleError) as caught:
        act()

    assert textwrap.dedent(message).strip() == str(caught.value)


def test_an_entry_for_nothing_in_the_model_is_reported():
    """Where the parameters are known, entries for none of them are a warning."""
    with pytest.warns(lm.LayoutMapWarning) as caught:
        layout_map = converted({**LLAMA, "layers.*.mlp.gate_porj": "colwise"}, SHAPES, prefix="model.")

    assert 6 == len(layout_map)
    assert textwrap.dedent("""\
        tp_plan: these entries match nothing in the model
          entries  model.layers.*.mlp.gate_porj (colwise)
          why      no parameter and no layer has such a path
          fix      ignore this if the model has no such part, else correct their paths""") == str(
        caught[0].message
    )
