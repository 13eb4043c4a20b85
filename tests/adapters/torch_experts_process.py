"""One of several processes that train drawn layers of experts; run by test_torch_experts.py.

Arguments: its number, the folder for what it says, the port, the number of processes, the first seed, and the number of
cases.
"""

import json
import os
import random
import sys
import traceback
import warnings
from collections import defaultdict
from functools import partial
from math import isclose, prod
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

import layoutmap as lm

NUMBER, FOLDER, (PORT, SIZE, SEED, COUNT) = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
TOP_K, LENGTH = 2, 4
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
}
KINDS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8},
    "GptOss": {"num_local_experts": 4, "head_dim": 8, "layer_types": ["full_attention"]},
    "DeepseekV3": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
}
MESHES = {
    2: ["batch=2", "replica=2,batch=1"],
    4: ["batch=4", "batch=2,model=2", "model=2,batch=2", "replica=2,batch=2"],
}
# Programs in which code inside of the experts sees all tokens.
INNER = ("inner hook", "inner forward", "parametrized", "tensor of the model")
# The sharded axis of each weight, for the mesh dims of the batch and of the model.
RULES = {
    "replicated": ({}, {}),
    "fully sharded": ({"gate_up_proj": 1, "down_proj": 0}, {}),
    "in expert": ({}, {"gate_up_proj": 1, "down_proj": 2}),
    "by expert": ({}, {"gate_up_proj": 0, "down_proj": 0}),
    "both": ({"gate_up_proj": 2, "down_proj": 1}, {"gate_up_proj": 0, "down_proj": 0}),
}
PROGRAMS = ("plain", "checkpointed", "outer hook", "bfloat16", "no gradients", *INNER)


def make(kind, implementation):
    config = getattr(transformers, f"{kind}Config")(**SIZES, **KINDS[kind])
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.set_experts_implementation(implementation)
    return model


def find_experts(model):
    return next(each for path, each in model.named_modules() if path.endswith(".experts"))


def count_rows(experts, names=("_apply_gate", "act_fn")):
    """Count the rows of tokens that each of some functions inside of the experts gets."""
    rows = defaultdict(int)

    def wrap(name, function):
        def count(values):
            rows[name] += values.shape[0]
            return function(values)

        return count

    for name in names:
        if hasattr(experts, name):
            function = getattr(experts, name)
            vars(experts)[name] = wrap(name, function)
            experts._modules.pop(name, None)
    return rows


def prepare(model, program):
    """Set up a program. Return the list of what hooks see."""
    seen, experts = [], find_experts(model)
    if program == "outer hook":
        experts.register_forward_hook(
            lambda _, inputs, output: seen.append((*output.shape, output.sum().item()))
        )
    elif program == "inner hook":
        experts.inner, apply_gate = torch.nn.Identity(), experts._apply_gate
        experts._apply_gate = lambda values: apply_gate(experts.inner(values))
        experts.inner.register_forward_hook(lambda _, inputs, output: seen.append(tuple(output.shape)))
    elif program == "inner forward" and hasattr(experts, "act_fn"):
        experts.act_fn.forward = lambda values: values - values.mean(0)  # of all tokens
    elif program == "parametrized":
        torch.nn.utils.parametrize.register_parametrization(experts, "down_proj", torch.nn.Tanh())
    elif program == "tensor of the model":
        scale, apply_gate = model.model.norm.weight, experts._apply_gate
        experts._apply_gate = lambda values: apply_gate(values) * scale[:1]
    elif program == "checkpointed":
        enable = "activation_checkpointing_enable"  # its name since transformers 5.24
        getattr(model, enable, model.gradient_checkpointing_enable)()
    return seen


def train(model, batch, program):
    """The losses and gradients of two steps."""
    results, optimizer = [], torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(2):
        with (
            torch.set_grad_enabled(program != "no gradients"),
            torch.autocast("cpu", enabled=program == "bfloat16"),
        ):
            loss = model(input_ids=batch, labels=batch).loss
        results.append(loss.detach())
        if program != "no gradients":
            loss.backward()
            gradients = [each.grad for each in model.parameters() if each.grad is not None]
            results += [
                each.full_tensor() if hasattr(each, "full_tensor") else each.clone() for each in gradients
            ]
            optimizer.step()
            optimizer.zero_grad()
    return results


def make_layout_map(mesh, rules):
    layout_map = lm.LayoutMap(mesh, rest="replicated")
    for name in ("gate_up_proj", "down_proj"):
        specs = [None] * 3
        for dim, axes in zip(("batch", "model"), RULES[rules], strict=True):
            if dim in mesh and name in axes:
                specs[axes[name]] = dim
        layout_map[rf".*experts\.{name}$"] = tuple(specs)
    return layout_map


def compare(seed):
    """A drawn case, how it differs from one process, and the rows that this process computed and should have."""
    draw = random.Random(seed)
    kind, implementation = draw.choice([*KINDS]), draw.choice(["eager", "grouped_mm", "batched_mm"])
    mesh, rules, program = draw.choice(MESHES[int(SIZE)]), draw.choice([*RULES]), draw.choice(PROGRAMS)
    rows, gather = draw.choice((4, 8, 6)), draw.choice(("own", "fully_shard"))
    if program in INNER:
        implementation = "grouped_mm"  # the loop over experts does not call `_apply_gate` in all models
    makers = {"plain": lambda: make(kind, implementation)}
    batch_dim = ("replica", "batch") if "replica" in mesh else "batch"
    makers["sharded"] = lambda: make_layout_map(mesh, rules).build(
        makers["plain"], batch_dim=batch_dim, library="torch", gather=gather
    )
    batch = torch.randint(0, 32, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
    results, seen, counted = {}, {}, {}
    for name, maker in makers.items():
        torch.manual_seed(seed)
        model = maker()
        seen[name] = prepare(model, program)
        functions = ("_apply_gate",) if program in INNER else ("_apply_gate", "act_fn")
        counted[name] = count_rows(find_experts(model), functions)
        results[name] = train(model, batch, program)
    differences = [
        ((mine - other).norm() / (other.norm() + 1e-3)).item()
        for mine, other in zip(results["sharded"], results["plain"], strict=True)
    ]
    tolerance = 0.05 if program == "bfloat16" else 2e-5
    close = [
        all(map(partial(isclose, rel_tol=tolerance, abs_tol=tolerance), *pair))
        for pair in zip(*seen.values(), strict=True)
    ]
    parts = prod(int(part.split("=")[1]) for part in mesh.split(",") if not part.startswith("model"))
    is_inner = program in INNER and (program != "inner forward" or hasattr(find_experts(model), "act_fn"))
    is_split = rows % parts == 0 and not is_inner
    # If a layer turns out to need all tokens, it is computed again.
    sums = [next(iter(each.values())) for each in counted.values()] if program != INNER[-1] else [0, 0]
    return {
        "case": " ".join(map(str, (seed, kind, implementation, mesh, rules, program, rows, gather))),
        "difference": max(differences) / tolerance,
        "hooks": [sum(close), len(seen["plain"])],
        "rows": [sums[1], sums[0] // (parts if is_split else 1)],
    }


def find_disagreement():
    """The error of a model that has a hook inside of its experts in the first process."""
    model = make_layout_map(MESHES[int(SIZE)][0], "by expert").build(
        lambda: make("Mixtral", "grouped_mm"), batch_dim="batch", library="torch"
    )
    if NUMBER == 0:
        find_experts(model).act_fn.register_forward_hook(lambda *_: None)
    try:
        model(torch.zeros(4, LENGTH, dtype=torch.int64))
    except lm.LayoutMapError as error:
        return str(error)
    return ""


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", lm.LayoutMapWarning)
    os.environ |= {"RANK": str(NUMBER), "WORLD_SIZE": SIZE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
    told = []
    for seed in range(int(SEED), int(SEED) + int(COUNT)):
        try:
            told.append(compare(seed))
        except Exception:
            told.append({"case": str(seed), "error": traceback.format_exc()})
            break  # the other processes may wait in a collective
    error = find_disagreement()
    (FOLDER / f"{NUMBER}.json").write_text(json.dumps([told, error]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
