"""Measure the time and memory of planning full-size models of transformers.

    python benchmarks/torch_plan.py                              all models, 3 rounds: about a minute
    python benchmarks/torch_plan.py --model llama-405b --rounds 1 --plan
    python benchmarks/torch_plan.py --on h100:64 --rounds 1      plans with the cost of a step: some minutes

Each model runs in a fresh process. `LayoutMap.from_tp_plan` makes the map from the function that makes
the model, and the model is planned on a mesh of 512 devices, batch=64, model=8. The benchmark downloads
nothing and creates no weight. "map" and "plan" are seconds. "meta" is the time that torch takes to build
the model on its meta device. "peak" is the growth of the process after the imports. With `--on`, the plan
contains the cost of a training step of 64 x 1024 tokens with AdamW, on a mesh of 64 devices, batch=8, model=8.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from functools import partial
from typing import Any

from measure import compute_median, make_parser, read_peak_bytes, run_method, run_rounds, time_call

MESH = "batch=64,model=8"
MESH_WITH_COST = "batch=8,model=8"
LLAMA = {"vocab_size": 128_256, "num_key_value_heads": 8, "max_position_embeddings": 8192}
# Class, config, and its numbers.
MODELS = {
    "llama-8b": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            **LLAMA,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
    ),
    "llama-70b": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            **LLAMA,
            "hidden_size": 8192,
            "intermediate_size": 28_672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
        },
    ),
    "llama-405b": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            **LLAMA,
            "hidden_size": 16_384,
            "intermediate_size": 53_248,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
        },
    ),
    # The default config is Mixtral 8x7B.
    "mixtral-8x7b": ("MixtralForCausalLM", "MixtralConfig", {}),
    "qwen3-moe-235b": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            "vocab_size": 151_936,
            "hidden_size": 4096,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
        },
    ),
}


def measure_method(name: str, method: str, target: str) -> None:
    """Plan one model in this process, and print the measurements as JSON."""
    import torch
    import transformers

    import layoutmap as lm

    torch.set_num_threads(1)
    warnings.simplefilter("ignore", lm.LayoutMapWarning)
    transformers.logging.set_verbosity_error()
    kind, config, numbers = MODELS[name]

    def make():
        return getattr(transformers, kind)(getattr(transformers, config)(**numbers))

    getattr(transformers, kind)  # triggers the lazy import of the model's module
    with torch.device("meta"):
        torch.nn.Linear(2, 2)
    lm.plan(lambda: torch.nn.Linear(2, 2), lm.LayoutMap(lm.Mesh(None, MESH)))
    before = read_peak_bytes()
    result: dict[str, Any] = {}
    start = time.perf_counter()
    if method == "meta":
        with torch.device("meta"):
            make()
        result["meta"] = time.perf_counter() - start
    else:
        mesh = lm.Mesh(None, MESH_WITH_COST if target else MESH)
        layout_map = lm.LayoutMap.from_tp_plan(make, mesh, batch_dim="batch")
        result["map"] = time.perf_counter() - start
        tokens = torch.empty((64, 1024), dtype=torch.int64, device="meta")
        options = {"inputs": tokens, "on": target, "optimizer": "adamw"} if target else {}
        result["plan"], plan = time_call(lambda: lm.plan(make, layout_map, **options))
        result |= {
            "text": str(plan),
            "parameters": sum(
                math.prod(a.variable.shape) for a in plan.assignments if a.variable.kind == "weight"
            ),
            "variables": len(plan),
            "device_bytes": plan.device_bytes,
            "errors": len(plan.errors),
            "unused": sum(p.kind in ("unused rule", "shadowed rule") for p in plan.problems),
        }
    result["peak_bytes"] = read_peak_bytes() - before
    print(json.dumps(result))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--model", action="append", choices=MODELS, help="may be given several times (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="processes of each (default: 3)")
    parser.add_argument("--plan", action="store_true", help="also print the plans")
    parser.add_argument("--on", default="", help="machine of the step's cost, such as h100:64")
    parser.add_argument("--child", choices=("layoutmap", "meta"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measure_method(args.model[0], args.child, args.on)
        return
    print(f"planning on mesh {MESH_WITH_COST if args.on else MESH}; medians of {args.rounds}")
    print(
        "model            parameters  variables  per device   map s  plan s  meta s  peak MiB  errors  unused rules"
    )
    for name in args.model or MODELS:
        options = ("--on", args.on) if args.on else ()

        def run(method: str, name: str = name, options: tuple[str, ...] = options) -> Any:
            return run_method(__file__, method, name, *options)

        runs = run_rounds(("layoutmap", "meta"), args.rounds, run)
        if args.plan:
            print(runs["layoutmap"][0]["text"])
        median = partial(compute_median, runs["layoutmap"])
        print(
            f"{name:<15} {median('parameters') / 1e9:>10.1f} B {median('variables'):>10.0f} "
            f"{median('device_bytes') / 2**30:>7.2f} GiB {median('map'):>7.2f} {median('plan'):>7.2f} "
            f"{compute_median(runs['meta'], 'meta'):>7.2f} {median('peak_bytes') / 2**20:>9.0f} "
            f"{median('errors'):>7.0f} {median('unused'):>13.0f}"
        )


if __name__ == "__main__":
    main()
