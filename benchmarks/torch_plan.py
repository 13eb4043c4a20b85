"""What planning a full-size model of transformers costs: seconds, and memory of the process.

    python benchmarks/torch_plan.py                              all models, 3 rounds: about a minute
    python benchmarks/torch_plan.py --model llama-405b --rounds 1 --plan

Each in a fresh process. The map is made by `LayoutMap.from_tp_plan` of the function that makes the
model, and the model is planned on a mesh of 512 devices, batch=64, model=8; nothing is downloaded
and no weight is made. "map" and "plan" are seconds; "meta" is the time that torch takes
to build the model on its meta device, for comparison. "peak" is the most that the process grew over
what it held after the imports.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
import warnings

MESH = "batch=64,model=8"
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
    # The configs' own numbers are those of Mixtral 8x7B.
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


def child(name: str, method: str, show: bool) -> None:
    """One measurement, in this process; prints it as JSON."""
    import torch
    import transformers

    import layoutmap as lm

    torch.set_num_threads(1)
    warnings.simplefilter("ignore", lm.LayoutMapWarning)
    transformers.logging.set_verbosity_error()
    kind, config, numbers = MODELS[name]

    def make():
        return getattr(transformers, kind)(getattr(transformers, config)(**numbers))

    getattr(transformers, kind)  # transformers imports a model's module when it is asked for
    with torch.device("meta"):
        torch.nn.Linear(2, 2)
    lm.plan(lambda: torch.nn.Linear(2, 2), lm.LayoutMap(lm.Mesh(None, MESH)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found: dict[str, float] = {}
    start = time.perf_counter()
    if method == "meta":
        with torch.device("meta"):
            make()
        found["meta"] = time.perf_counter() - start
    else:
        layout_map = lm.LayoutMap.from_tp_plan(make, lm.Mesh(None, MESH), batch_dim="batch")
        found["map"] = time.perf_counter() - start
        start = time.perf_counter()
        plan = lm.plan(make, layout_map)
        found["plan"] = time.perf_counter() - start
        text = str(plan)
        if show:
            print(text)
        found |= {
            "parameters": sum(
                math.prod(a.variable.shape) for a in plan.assignments if a.variable.kind == "weight"
            ),
            "variables": len(plan),
            "device_bytes": plan.device_bytes,
            "errors": len(plan.errors),
            "unused": sum(p.kind in ("unused rule", "shadowed rule") for p in plan.problems),
        }
    found["peak_bytes"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(json.dumps(found))


def measure(name: str, method: str, show: bool = False) -> dict[str, float]:
    """Return one measurement in a fresh process; with `show` its plan goes to the terminal."""
    command = [sys.executable, __file__, "--child", method, "--model", name, *(["--plan"] if show else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    *text, last = done.stdout.splitlines()
    if show:
        print("\n".join(text))
    return json.loads(last)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--model", action="append", choices=MODELS, help="may be given several times; else all"
    )
    parser.add_argument("--rounds", type=int, default=3, help="processes of each (default: 3)")
    parser.add_argument("--plan", action="store_true", help="print the plans, too")
    parser.add_argument("--child", choices=("layoutmap", "meta"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.model[0], args.child, args.plan)
        return
    print(f"planning on mesh {MESH}; medians of {args.rounds}")
    print(
        "model            parameters  variables  per device   map s  plan s  meta s  peak MiB  errors  unused rules"
    )
    for name in args.model or MODELS:
        runs = [measure(name, "layoutmap", args.plan and not i) for i in range(args.rounds)]
        meta = [measure(name, "meta") for _ in range(args.rounds)]

        def median(key: str, runs: list[dict[str, float]] = runs) -> float:
            return statistics.median(run[key] for run in runs)

        print(
            f"{name:<15} {median('parameters') / 1e9:>10.1f} B {median('variables'):>10.0f} "
            f"{median('device_bytes') / 2**30:>7.2f} GiB {median('map'):>7.2f} {median('plan'):>7.2f} "
            f"{median('meta', meta):>7.2f} {median('peak_bytes') / 2**20:>9.0f} {median('errors'):>7.0f} "
            f"{median('unused'):>13.0f}"
        )


if __name__ == "__main__":
    main()
