"""Small models of transformers from configurations, and tensor parallel plans for those that bring none."""

from __future__ import annotations

import torch
import transformers

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
BOTH = ("encoder", "decoder")
PACKED, ABSENT = "packed weights", "match nothing in the model"
# Class, config, and what is warned of.
WITH_A_PLAN = {
    "llama": ("LlamaForCausalLM", lambda: transformers.LlamaConfig(**SIZES), []),
    "tied llama": (
        "LlamaForCausalLM",
        lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True),
        [],
    ),
    "mixtral": (
        "MixtralForCausalLM",
        lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
        [PACKED],
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        lambda: transformers.Qwen3MoeConfig(
            **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
        ),
        [PACKED, ABSENT],  # its plan is also for dense layers, of which this model has none
    ),
    "gemma2": ("Gemma2ForCausalLM", lambda: transformers.Gemma2Config(**SIZES), []),
    "gemma3": ("Gemma3ForCausalLM", lambda: transformers.Gemma3TextConfig(**SIZES), []),
}
# transformers has no plan for these; one for each as a user would write it.
WITHOUT = {
    "vit": (
        "ViTForImageClassification",
        lambda: transformers.ViTConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            image_size=32,
            patch_size=8,
        ),
        {
            **{f"vit.layers.*.attention.{name}_proj": "colwise" for name in "qkv"},
            "vit.layers.*.attention.o_proj": "rowwise",
            "vit.layers.*.mlp.fc1": "colwise",
            "vit.layers.*.mlp.fc2": "rowwise",
        },
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        lambda: transformers.WhisperConfig(
            vocab_size=64,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            num_mel_bins=8,
            max_source_positions=16,
            max_target_positions=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        {
            **{f"model.{part}.layers.*.self_attn.{n}_proj": "colwise" for part in BOTH for n in "qkv"},
            **{f"model.{part}.layers.*.self_attn.out_proj": "rowwise" for part in BOTH},
            **{f"model.{part}.layers.*.fc1": "colwise" for part in BOTH},
            **{f"model.{part}.layers.*.fc2": "rowwise" for part in BOTH},
            "model.decoder.embed_tokens": "embedding_rowwise",
            "proj_out": "colwise_gather_output",
        },
    ),
    "bert": (
        "BertForMaskedLM",
        lambda: transformers.BertConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
        ),
        {
            **{f"bert.encoder.layer.*.attention.self.{n}": "colwise" for n in ("query", "key", "value")},
            "bert.encoder.layer.*.attention.output.dense": "rowwise",
            "bert.encoder.layer.*.intermediate.dense": "colwise",
            "bert.encoder.layer.*.output.dense": "rowwise",
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        lambda: transformers.T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0
        ),
        {
            **{f"{part}.block.*.layer.*.SelfAttention.{n}": "colwise" for part in BOTH for n in "qkv"},
            **{f"{part}.block.*.layer.*.SelfAttention.o": "rowwise" for part in BOTH},
            **{f"{part}.block.*.layer.*.DenseReluDense.wi": "colwise" for part in BOTH},
            **{f"{part}.block.*.layer.*.DenseReluDense.wo": "rowwise" for part in BOTH},
            "shared": "embedding_rowwise",
        },
    ),
}

# Configurations of full size, for plans: nothing of them is ever made.
FULL = {
    "llama": lambda: transformers.LlamaConfig(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "mixtral": transformers.MixtralConfig,  # 8x7B is the default
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=4096,
        moe_intermediate_size=1536,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        hidden_size=5376,
        intermediate_size=21_504,
        num_hidden_layers=62,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
    ),
    "vit": lambda: transformers.ViTConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16
    ),
    "whisper": lambda: transformers.WhisperConfig(
        vocab_size=51_868,  # padded, so that four devices can share it
        d_model=1280,
        encoder_layers=32,
        decoder_layers=32,
        encoder_attention_heads=20,
        decoder_attention_heads=20,
        encoder_ffn_dim=5120,
        decoder_ffn_dim=5120,
    ),
    "bert": lambda: transformers.BertConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16
    ),
    "t5": lambda: transformers.T5Config(d_model=1024, d_kv=128, d_ff=65_536, num_layers=24, num_heads=128),
}


def on_meta(name, config):
    with torch.device("meta"):
        return getattr(transformers, name)(config())
