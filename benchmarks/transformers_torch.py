"""How many families of transformers train and generate in layouts that nobody chose, as on one device.

    python benchmarks/transformers_torch.py                       all families of causal language models: an hour
    python benchmarks/transformers_torch.py --count 30 --seed 1   thirty of them, drawn
    python benchmarks/transformers_torch.py --family gpt2 --family mamba

A small model from each configuration. On a mesh of batch=2, model=2 each weight has a layout that the seed draws, and
the batch is sharded over "batch". A step of SGD is compared with plain torch on one device: the loss and all gradients.
Then each model generates four tokens, also with a static cache if the plain one does. Each family has a process of its
own. What plain torch does not make small, train or generate is counted apart.
"""

from __future__ import annotations

import argparse
import random
import warnings
from contextlib import suppress
from typing import Any

from families import tell, try_each

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
LARGEST = 5_000_000  # parameters: a configuration that does not heed these sizes is not small


def child(name: str, seed: int) -> None:
    """Train and generate with one family, in this process; prints what came of it as JSON."""
    import layoutmap as lm

    lm.simulate_devices(4, "torch")
    import torch
    import transformers

    def make() -> Any:
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()

    try:
        config = transformers.CONFIG_MAPPING[name]()
        for size, value in SIZES.items():
            with suppress(AttributeError, NotImplementedError):  # a size that this family does not have
                getattr(config, size)
                setattr(config, size, value)
        with torch.device("meta"):
            count = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
        if count > LARGEST:
            tell(name, "not small", f"{count:,} parameters")
            return
        plain = make()
        expected = step(plain)
    except Exception as error:  # of any kind: nothing of this library has run
        tell(name, "not on plain torch", f"{type(error).__name__}: {str(error).splitlines()[:1]}")
        return
    choose = random.Random(f"{seed} {name}")
    layout_map = lm.LayoutMap("batch=2,model=2", rest="replicated")
    for path, weight in plain.named_parameters():
        layout_map[f"^{path.replace('.', '[.]')}$"] = drawn_spec(choose, weight.shape)
    warnings.simplefilter("ignore")
    stage = "training"
    try:
        with layout_map.scope(batch_dim="batch", library="torch"):
            model = make()
        found = step(model)
        worst = max(
            (float((found[key] - one).abs().max() / one.abs().max().clamp(min=1e-3)), key)
            for key, one in expected.items()
        )
        if worst[0] > TOLERANCE or found.keys() != expected.keys():
            tell(name, "wrong", f"{worst}")
            return
        told = [f"{worst[0]:.0e}"]
        for cache in ("dynamic", "static"):
            stage = f"generation, {cache} cache"
            try:
                one = generated(plain, cache)
            except Exception:  # plain torch does not generate so; what did is told
                continue
            if not torch.equal(one, generated(model, cache)):
                tell(name, "wrong", stage)
                return
            told.append(f"generates ({cache})")
        tell(name, "right", ", ".join(told))
    except Exception as error:
        what = "outdated slice" if "outdated" in str(error) else "failed"
        tell(name, what, f"{stage}: {type(error).__name__}: {' | '.join(str(error).splitlines()[:6])}")


def drawn_spec(choose: random.Random, shape: tuple[int, ...]) -> tuple[str | None, ...]:
    """Return a valid spec of a weight, that shards at most two axes."""
    dims = choose.sample(["batch", "model"], 2)
    spec: list[str | None] = [None] * len(shape)
    for axis in choose.sample(range(len(shape)), len(shape)):
        if dims and shape[axis] % 2 == 0 and choose.random() < 0.6:
            spec[axis] = dims.pop()
    return tuple(spec)


def step(model: Any) -> dict[str, Any]:
    """Return the loss and the gradients of a step, and make it."""
    import torch

    from layoutmap.engines.torch.engine import engine

    def whole(value: Any) -> torch.Tensor:
        return torch.from_numpy(engine().to_numpy(value.detach()))

    tokens = torch.randint(3, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    found = {path: whole(p.grad) for path, p in model.named_parameters() if p.grad is not None}
    torch.optim.SGD(model.parameters(), 0.01).step()
    return {"the loss": whole(loss), **found}


def generated(model: Any, cache: str) -> Any:
    """Return the tokens that a model generates by itself."""
    import torch

    tokens = torch.randint(3, 64, (4, 6), generator=torch.Generator().manual_seed(3))
    model.eval()
    return model.generate(
        tokens, max_new_tokens=4, min_new_tokens=4, do_sample=False, cache_implementation=cache
    )


def main() -> None:
    """Try families and print a line for each, and how many were right."""
    parser = make_parser(__doc__)
    parser.add_argument("--family", action="append", default=[])
    parser.add_argument("--count", type=int, help="how many, drawn (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300, help="how long a family may take")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked.child, asked.seed)
        return
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    names = asked.family or random.Random(asked.seed).sample(known, k=len(known))
    options = ("--seed", str(asked.seed))
    try_each(names[: asked.count], options, {"HF_HUB_OFFLINE": "1"}, asked.seconds)


if __name__ == "__main__":
    main()
