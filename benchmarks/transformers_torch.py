"""Count the families of transformers that train and generate in random layouts as on one device.

    python benchmarks/transformers_torch.py                       all families of causal language models: an hour
    python benchmarks/transformers_torch.py --count 30 --seed 1   thirty random families
    python benchmarks/transformers_torch.py --family gpt2 --family mamba
    python benchmarks/transformers_torch.py --experts --processes 4   those with experts, in four processes

Each family is tried with one small model. On a mesh of batch=2, model=2 each weight has a random layout from the seed,
and the batch is sharded over "batch". The loss and all gradients of a step of SGD are compared with torch on one
device. Then each model generates four tokens, also with a static cache if the unsharded model can. Each family runs in
its own process, on simulated devices, or with `--processes 4` in four processes. Families that torch itself cannot
make small, train, or generate from count separately.
"""

from __future__ import annotations

import argparse
import inspect
import os
import random
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from measure import make_parser, print_outcome, try_families

TOLERANCE = 1e-4
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "is_decoder": True,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LARGEST = 5_000_000  # parameters: some configurations ignore these sizes


def is_one_of_several_processes() -> bool:
    """Return whether torchrun has started this process."""
    return "RANK" in os.environ


def print_first_outcome(name: str, outcome: str, reason: str) -> None:
    """Print the outcome of a family in the first process."""
    if os.environ.get("RANK", "0") == "0":
        print_outcome(name, outcome, reason)


def try_family(name: str, seed: int) -> None:
    """Train and generate with one family in this process, and print its outcome."""
    import layoutmap as lm

    if not is_one_of_several_processes():
        lm.simulate_devices(4, "torch")
    import torch
    import transformers

    def make() -> Any:
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()

    try:
        config = transformers.CONFIG_MAPPING[name]()
        for size, value in SIZES.items():
            with suppress(AttributeError, NotImplementedError):  # the family lacks this size
                getattr(config, size)
                setattr(config, size, value)
        with torch.device("meta"):
            count = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
        if count > LARGEST:
            print_first_outcome(name, "not small", f"{count:,} parameters")
            return
        unsharded = make()
        expected = train_step(unsharded)
    except Exception as error:  # this library has not run yet
        print_first_outcome(
            name, "not on plain torch", f"{type(error).__name__}: {str(error).splitlines()[:1]}"
        )
        return
    choose = random.Random(f"{seed} {name}")
    layout_map = lm.LayoutMap("batch=2,model=2", rest="replicated")
    for path, weight in unsharded.named_parameters():
        layout_map[f"^{path.replace('.', '[.]')}$"] = draw_sharding_specs(choose, weight.shape)
    warnings.simplefilter("ignore")
    stage = "training"
    try:
        with layout_map.scope(batch_dim="batch", library="torch"):
            model = make()
        actual = train_step(model)
        worst = max(
            (float((actual[key] - one).abs().max() / one.abs().max().clamp(min=1e-3)), key)
            for key, one in expected.items()
        )
        if worst[0] > TOLERANCE or actual.keys() != expected.keys():
            print_first_outcome(name, "wrong", f"{worst}")
            return
        results = [f"{worst[0]:.0e}"]
        for cache in ("dynamic", "static"):
            stage = f"generation, {cache} cache"
            try:
                tokens = generate_tokens(unsharded, cache)
            except Exception:  # torch itself cannot generate with this cache
                continue
            if not torch.equal(tokens, generate_tokens(model, cache)):
                print_first_outcome(name, "wrong", stage)
                return
            results.append(f"generates ({cache})")
        print_first_outcome(name, "right", ", ".join(results))
    except Exception as error:
        outcome = "outdated slice" if "outdated" in str(error) else "failed"
        print_first_outcome(
            name, outcome, f"{stage}: {type(error).__name__}: {' | '.join(str(error).splitlines()[:6])}"
        )


def draw_sharding_specs(choose: random.Random, shape: tuple[int, ...]) -> tuple[str | None, ...]:
    """Return random valid specs of a weight that shard at most two axes."""
    dims = choose.sample(["batch", "model"], 2)
    spec: list[str | None] = [None] * len(shape)
    for axis in choose.sample(range(len(shape)), len(shape)):
        if dims and shape[axis] % 2 == 0 and choose.random() < 0.6:
            spec[axis] = dims.pop()
    return tuple(spec)


def train_step(model: Any) -> dict[str, Any]:
    """Train for one step, and return its loss and gradients."""
    import torch

    from layoutmap.engines.torch.engine import engine

    def gather(value: Any) -> torch.Tensor:
        return torch.from_numpy(engine().to_numpy(value.detach()))

    tokens = torch.randint(3, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    gradients = {path: gather(p.grad) for path, p in model.named_parameters() if p.grad is not None}
    torch.optim.SGD(model.parameters(), 0.01).step()
    return {"the loss": gather(loss), **gradients}


def generate_tokens(model: Any, cache: str) -> Any:
    """Return four tokens that a model generates."""
    import torch

    tokens = torch.randint(3, 64, (4, 6), generator=torch.Generator().manual_seed(3))
    model.eval()
    return model.generate(
        tokens, max_new_tokens=4, min_new_tokens=4, do_sample=False, cache_implementation=cache
    )


def main() -> None:
    """Try families, and print a line for each and the number of each outcome."""
    parser = make_parser(__doc__)
    parser.add_argument("--family", action="append", default=[])
    parser.add_argument("--count", type=int, help="number of random families (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--experts", action="store_true", help="only families with layers of experts")
    parser.add_argument("--processes", type=int, choices=(1, 4), default=1, help="1: simulated devices")
    parser.add_argument(
        "--seconds", type=float, default=300, help="time limit of a family (default: %(default)s)"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child and args.processes > 1 and not is_one_of_several_processes():
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.processes}")
        os.execv(sys.executable, [sys.executable, *torchrun, *sys.argv])
    if args.child:
        try_family(args.child, args.seed)
        return
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if args.experts:
        sources = {
            name: Path(inspect.getfile(getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])))
            for name in known
        }
        known = [name for name in known if "@use_experts_implementation" in sources[name].read_text()]
    names = args.family or random.Random(args.seed).sample(known, k=len(known))
    options = ("--seed", str(args.seed), "--processes", str(args.processes))
    try_families(names[: args.count], options, {"HF_HUB_OFFLINE": "1"}, args.seconds)


if __name__ == "__main__":
    main()
