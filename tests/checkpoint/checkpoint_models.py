"""Tiny models of transformers and peft that are stored under other names, in other parts, or only in part."""

import warnings
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

import layoutmap as lm

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 4}
GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
OPTIONS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "head_dim": 8, **EXPERTS},
    "DeepseekV3": {**GROUPS, **LATENT, **EXPERTS},
    "Llama": {"tie_word_embeddings": True},
}
RULES = {
    r".*mlp\.experts\.gate_up_proj": ("model", None, None),
    r".*mlp\.experts\.down_proj": (None, None, "model"),
    r".*embed_tokens\.weight": ("model", None),
    r".*(q|k|v|gate|up)_proj(\.base_layer)?\.weight": ("model", None),
    r".*(o|down)_proj\.weight": (None, "model"),
    r".*lora_A\..*": (None, "model"),
}


def make(name, seed=0, dtype=torch.float32):
    """A model with drawn weights, also where its initializers make zeros or ones."""
    torch.manual_seed(seed)
    if name == "LoRA":
        import peft

        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # peft reads a deprecated attribute of transformers
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    else:
        config = getattr(transformers, f"{name}Config")(**SIZES | OPTIONS[name])
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    model = model.to(dtype)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape))
    return model


def make_on_mesh(name, dims, seed=0, dtype=torch.float32):
    return lm.LayoutMap(dims, RULES, rest="replicated").build(
        lambda: make(name, seed, dtype), library="torch"
    )


def read_files(folder):
    """What is in the files of a folder."""
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(path)
    return found


def assert_equal(one, other):
    assert sorted(one) == sorted(other)
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape), name
        assert torch.equal(tensor, other[name]), name
