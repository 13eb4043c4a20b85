"""Plans of drawn torch models, executed by torch and transformers themselves; run by test_handed_back_torch.py."""

import collections
import dataclasses
import json
import random
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.modeling_utils import PreTrainedModel

import layoutmap as lm
from layoutmap.core.variables import Kind
from layoutmap.testing import models


def laid_out_by_torch(plan, make_model, forms):
    """The layouts that torch's own calls give."""
    text = plan.to_parallelize_plan()
    forms["styles"] += text.count("wiseParallel(")
    forms["distributed"] += text.count("distribute(model")
    forms["shared"] += text.count("one tensor in several modules")
    names = {}
    exec(text, names)
    mesh = init_device_mesh("cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.dim_names)
    return names["parallelize"](make_model(), mesh)


def laid_out_by_transformers(plan, make_model, forms):
    """The layouts that transformers gives."""
    tp_plan = plan.to_tp_plan()
    forms["entries"] += len(tp_plan)
    model = make_model()
    specs = {spec for each in shards(plan).values() for spec in each} - {lm.UNSHARDED}
    mesh = init_device_mesh("cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.dim_names)
    expanded = PreTrainedModel._expand_parallel_plan(model, tp_plan)
    return apply_tensor_parallelism(model, mesh[specs.pop()] if specs else mesh, expanded)


def shards(plan):
    """The sharding specs of what is not replicated."""
    return {
        a.variable.path: a.layout.sharding_specs
        for a in plan.assignments
        if a.variable.kind in (Kind.WEIGHT, Kind.STATE) and not a.layout.is_fully_replicated()
    }


def make_llama():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "attention_bias": True, "mlp_bias": True}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


LINEARS = [f"self_attn.{name}_proj" for name in "qkvo"] + [
    f"mlp.{name}_proj" for name in ("gate", "up", "down")
]


def draw_llama(rng):
    """A plan of a Llama with a style of transformers' own for some of its modules."""
    keys = [f"model.layers.*.{name}" for name in LINEARS] + ["lm_head"]
    drawn = {key: rng.choice(["colwise", "rowwise", "colwise_gather_output", ""]) for key in keys}
    drawn["model.embed_tokens"] = rng.choice(["embedding_rowwise", "embedding_colwise", ""])
    layout_map = lm.LayoutMap.from_tp_plan(
        {key: style for key, style in drawn.items() if style},
        "data=2,model=4",
        parameters=dict(make_llama().named_parameters()),
    )
    layout_map.rest = "replicated"
    return lm.plan(make_llama, layout_map, library="torch")


def check_llama(seed, forms):
    """What transformers itself can say is never refused, and its rules are the same again."""
    plan = draw_llama(random.Random(seed))
    again = lm.LayoutMap.from_tp_plan(
        plan.to_tp_plan(), plan.mesh, parameters=dict(make_llama().named_parameters())
    )
    again.rest = "replicated"
    assert shards(plan) == shards(lm.plan(make_llama, again, library="torch")), seed
    for lay_out in (laid_out_by_torch, laid_out_by_transformers):
        assert shards(plan) == shards(lm.inspect(lay_out(plan, make_llama, forms))), (seed, lay_out)


def main():
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    torch.set_num_threads(1)
    told, forms = collections.Counter(), collections.Counter()
    refused = set()
    for seed in range(int(sys.argv[1]), int(sys.argv[1]) + int(sys.argv[2])):
        check_llama(seed, forms)
        case = models.draw(seed, "torch")
        plan = case.plan(case.layout_map)
        if seed % 4:  # rules for outputs of modules without a style are refused
            plan = dataclasses.replace(plan, activations=())
        for lay_out in (laid_out_by_torch, laid_out_by_transformers):
            try:
                model = lay_out(plan, case.make_model, forms)
            except lm.PlanError as error:
                told[f"refused by {lay_out.__name__}"] += 1
                refused.add(error.what.split(": ")[1] in {*plan, *case.model.layer_output_shapes})
                continue
            told[lay_out.__name__] += 1
            assert shards(plan) == shards(lm.inspect(model)), seed
    print(json.dumps({"named": all(refused), "told": told, "forms": forms}))


if __name__ == "__main__":
    main()
