"""Compare the cost of steps of torch models, extrapolated from few equal blocks, with the cost counted with all blocks.

    python benchmarks/equal_blocks.py                          100 random steps: about 10 minutes
    python benchmarks/equal_blocks.py --seed 7 --count 20

Each step is random: a model of transformers or a stack of own blocks, 4 to 8 blocks, a mesh, rules for weights, the
batch dim, and the optimizer. Its collectives with their causes, FLOPs, memory traffic, arguments, and peak are counted
twice. A line shows a step whose counts differ, and the largest ratio of a number in both. The last line shows how many
steps have equal counts, the worst ratio, and the median ratio of the CPU times of both plans.
"""

from __future__ import annotations

import random
import re
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import transformers
from measure import make_parser

import layoutmap as lm
from layoutmap.cost import torch_module_step

MESHES = ("data=2,model=4", "data=4,model=2", "data=2,model=2", "model=8", "data=8")
TOKENS, VOCABULARY, NUM_HEADS = (16, 32), 256, 8
KINDS = ("Llama", "Qwen2", "Gemma2", "Mixtral", "Qwen3Moe", "GPTNeoX", "GPT2", "Bert", "T5", "ViT", "Stack")
_find_stacks = torch_module_step.find_stacks_of_equal_blocks


class Block(torch.nn.Module):
    """Residual block of an MLP."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.dropout = torch.nn.LayerNorm(width), torch.nn.Dropout(0.1)
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Stack(torch.nn.Module):
    """Stack of residual blocks with a head."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = torch.nn.Linear(width, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def draw_model(rng: random.Random) -> tuple[str, Callable[[], torch.nn.Module], torch.Tensor]:
    """Return the description of a random model, a function that makes it, and its input."""
    kind, depth, width = rng.choice(KINDS), rng.randint(4, 8), rng.choice((64, 128))
    heads = {"num_attention_heads": NUM_HEADS, "hidden_size": width}
    sizes = heads | {"num_hidden_layers": depth, "intermediate_size": 2 * width}
    decoder = sizes | {"vocab_size": VOCABULARY, "num_key_value_heads": rng.choice((4, NUM_HEADS))}
    experts, head = {"num_experts_per_tok": 2}, {"head_dim": 16}
    t = transformers
    makers: dict[str, Callable[[], Any]] = {
        "Llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**decoder)),
        "Qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**decoder)),
        "Gemma2": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(**decoder, head_dim=16)),
        "Mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**decoder, **experts, num_local_experts=4)),
        "Qwen3Moe": lambda: t.Qwen3MoeForCausalLM(
            t.Qwen3MoeConfig(**decoder, **experts, **head, num_experts=4, moe_intermediate_size=width)
        ),
        "GPTNeoX": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**sizes, vocab_size=VOCABULARY)),
        "GPT2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=VOCABULARY, n_embd=width, n_layer=depth, n_head=NUM_HEADS)
        ),
        "Bert": lambda: t.BertForMaskedLM(t.BertConfig(**sizes, vocab_size=VOCABULARY)),
        "T5": lambda: t.T5EncoderModel(
            t.T5Config(
                vocab_size=VOCABULARY,
                d_model=width,
                d_kv=width // NUM_HEADS,
                d_ff=2 * width,
                num_layers=depth,
                num_heads=NUM_HEADS,
            )
        ),
        "ViT": lambda: t.ViTForImageClassification(t.ViTConfig(**sizes, image_size=32, patch_size=8)),
        "Stack": lambda: Stack(width, depth),
    }
    shapes = {"ViT": (16, 3, 32, 32), "Stack": (*TOKENS, width)}
    dtype = torch.float32 if kind in shapes else torch.int64
    inputs = torch.empty(shapes.get(kind, TOKENS), dtype=dtype, device="meta")
    return f"{kind}, {depth} blocks of width {width}", makers[kind], inputs


def draw_rules(rng: random.Random, make: Callable[[], torch.nn.Module], mesh: str, dims: list[str]) -> Any:
    """Return a layout map: that of `suggest`, that of the model's `tp_plan`, or a random one."""
    kind = rng.choice(("suggest", "tp_plan", "random"))
    try:
        if kind == "suggest":
            return lm.suggest(make, mesh, library="torch")
        if kind == "tp_plan":
            batch_dim = dims[0] if len(dims) > 1 else None
            return lm.LayoutMap.from_tp_plan(make, lm.Mesh(None, mesh), batch_dim=batch_dim)
    except lm.LayoutMapError:
        pass  # the model has no tp_plan, or no rules for the mesh
    with torch.device("meta"):
        model = make()
    rules: dict[str, Any] = {}
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and rng.random() < 0.6:
            specs = [(dims[-1], None), (None, dims[-1]), (None, None)]
            specs += [(dims[0], dims[-1]), (dims[-1], dims[0])] if len(dims) > 1 else []
            rules.setdefault(re.sub(r"\d+", r"\\d+", name.replace(".", r"\.")), rng.choice(specs))
    return lm.LayoutMap(mesh, rules, rest="replicated")


def list_counts(step: Any) -> dict[Any, int]:
    """Return all numbers that are counted of a step. Causes have a star in place of each number."""
    counts = Counter[Any]()
    for c in step.collectives:
        counts[c.kind, c.dims, c.tensor_bytes, re.sub(r"\d+", "*", c.cause), c.phase] += c.calls
    sizes = ("traffic_bytes", "argument_bytes", "peak_bytes", "sent_bytes")
    return {**counts, **step.flops, **{name: getattr(step, name) for name in sizes}}


def find_worst_ratio(one: Any, other: Any) -> float:
    """Return the ratio that is farthest from 1 of FLOPs and of bytes of traffic, arguments, peak, and collectives."""
    names = ("traffic_bytes", "argument_bytes", "peak_bytes", "sent_bytes")
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    pairs += [(sum(one.flops.values()), sum(other.flops.values()))]
    ratios = [a / b for a, b in pairs if b]
    return max(ratios, key=lambda ratio: max(ratio, 1 / ratio) if ratio else float("inf"))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first step (default: 0)")
    parser.add_argument("--count", type=int, default=100, help="number of steps (default: 100)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    counted: list[tuple[bool, float, float]] = []
    num_refused = 0
    try:
        for seed in range(args.seed, args.seed + args.count):
            found = count_twice(seed)
            num_refused += found is None
            counted += [found] if found else []
    except KeyboardInterrupt:
        print("interrupted")
    if counted:
        equal, ratios, times = zip(*counted, strict=True)
        print(
            f"{sum(equal)} of {len(counted)} steps have equal counts ({num_refused} have rules that do not fit); "
            f"worst ratio {max(max(ratio, 1 / ratio) for ratio in ratios):.4f}; "
            f"CPU time {statistics.median(times):.2f} of counting all blocks"
        )


def count_twice(seed: int) -> tuple[bool, float, float] | None:
    """Return whether the counts of a random step are equal, their worst ratio, and the ratio of CPU times.

    The result is None if the random rules do not fit the model.
    """
    rng = random.Random(seed)
    name, make, inputs = draw_model(rng)
    mesh = rng.choice(MESHES)
    dims = [dim.partition("=")[0] for dim in mesh.split(",")]
    options: dict[str, Any] = {"inputs": inputs, "on": "h100", "library": "torch", "advise": False}
    options["batch_dim"] = dims[0] if len(dims) > 1 and rng.random() < 0.8 else None
    options["optimizer"] = rng.choice(("adamw", "sgd"))
    layout_map = draw_rules(rng, make, mesh, dims)
    steps, seconds = list[Any](), list[float]()
    for find in (_find_stacks, lambda *_: []):
        torch_module_step.find_stacks_of_equal_blocks = find
        start = time.process_time()
        cost: Any = lm.plan(make, layout_map, **options).cost
        if cost is None:
            return None
        seconds.append(time.process_time() - start)
        steps.append(cost.step)
    is_equal = list_counts(steps[0]) == list_counts(steps[1])
    ratio = find_worst_ratio(*steps)
    if not is_equal:
        print(f"seed {seed}: {name} on {mesh}: ratio {ratio:.4f}", flush=True)
    return is_equal, ratio, seconds[0] / seconds[1]


if __name__ == "__main__":
    main()
