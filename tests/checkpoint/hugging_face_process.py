"""The other side, with torch: writes tiny models of transformers and their logits; then reads what was exported."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
GEMMA = {"head_dim": 8, "hidden_activation": "gelu_pytorch_tanh"}
FAMILIES = {  # table of names -> model of transformers, and its configuration
    # tunix's Llama has this base, whatever its configuration says.
    "llama": (
        "Llama",
        {"tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "qwen": ("Qwen2", {"tie_word_embeddings": False}),
    "gemma": ("Gemma", GEMMA | {"num_key_value_heads": 8}),
    "gemma2": ("Gemma2", GEMMA | {"query_pre_attn_scalar": 8, "sliding_window": 4}),
}


def main(folder: Path) -> None:
    import numpy as np
    import torch
    import transformers

    torch.manual_seed(0)
    tokens = torch.from_numpy(np.load(folder / "tokens.npy")).long()
    for family, (name, options) in FAMILIES.items():
        config = getattr(transformers, f"{name}Config")(**SIZES | options)
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
            np.save(folder / f"{family}.npy", model(tokens).logits.numpy())
        model.save_pretrained(folder / family, max_shard_size="20KB")
    (folder / "written").touch()
    while not (folder / "exported").exists():
        time.sleep(0.05)
    for exported in sorted(folder.glob("exported-*")):
        family = exported.name.split("-")[1]
        shutil.copy(folder / family / "config.json", exported)
        model = getattr(transformers, f"{FAMILIES[family][0]}ForCausalLM").from_pretrained(exported).eval()
        with torch.no_grad():
            np.save(exported / "logits.npy", model(tokens).logits.numpy())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
