"""Tiny models of keras-hub, each with the preset of its family."""

from __future__ import annotations

import keras
import keras_hub
import numpy as np

import layoutmap as lm

hub = keras_hub.models
ROWS, LENGTH, VOCABULARY, CLASSES = 4, 8, 64, 4

DECODER = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 2,
    "num_query_heads": 8,
    "num_key_value_heads": 4,
    "hidden_dim": 32,
    "intermediate_dim": 64,
}
ENCODER = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 2,
    "num_heads": 4,
    "hidden_dim": 32,
    "intermediate_dim": 64,
    "dropout": 0.0,
}
TINY = {
    "llama": DECODER,
    "gemma": DECODER | {"head_dim": 8, "use_post_ffw_norm": True, "use_post_attention_norm": True},
    "mixtral": DECODER | {"num_experts": 4},
    "qwen": DECODER | {"tie_word_embeddings": False},
    "vit": {
        "image_shape": (16, 16, 3),
        "patch_size": 8,
        "num_layers": 2,
        "num_heads": 4,
        "hidden_dim": 32,
        "mlp_dim": 64,
    },
    "whisper": ENCODER
    | {"num_mels": 8, "max_encoder_sequence_length": 16, "max_decoder_sequence_length": LENGTH},
    "bert": ENCODER | {"max_sequence_length": LENGTH},
    "gpt2": ENCODER | {"max_sequence_length": LENGTH},
    "t5": ENCODER | {"key_value_dim": 8, "tie_embedding_weights": False},
}
"""The configuration of each family's backbone; whatever a preset speaks of is there."""


def llama(config):
    return hub.Llama3CausalLM(hub.Llama3Backbone(**config))


def gemma(config):
    return hub.GemmaCausalLM(hub.GemmaBackbone(**config))


def mixtral(config):
    return hub.MixtralCausalLM(hub.MixtralBackbone(**config))


def qwen(config):
    return hub.QwenCausalLM(hub.QwenBackbone(**config))


def vit(config):
    return hub.ViTImageClassifier(hub.ViTBackbone(**config), num_classes=CLASSES)


@keras.saving.register_keras_serializable("hub_models")
class Transcriber(keras.Model):
    """Whisper's backbone, and logits from its table of tokens; keras-hub has no model for that."""

    def __init__(self, backbone, **options):
        super().__init__(**options)
        self.backbone = backbone

    def call(self, inputs):
        hidden = self.backbone(inputs)["decoder_sequence_output"]
        return self.backbone.token_embedding(hidden, reverse=True)

    def get_config(self):
        return super().get_config() | {"backbone": keras.saving.serialize_keras_object(self.backbone)}

    @classmethod
    def from_config(cls, config):
        return cls(**config | {"backbone": keras.saving.deserialize_keras_object(config["backbone"])})


def whisper(config):
    backbone = hub.WhisperBackbone(**config)
    lengths = {
        "encoder_features": backbone.max_encoder_sequence_length,
        "decoder_token_ids": backbone.max_decoder_sequence_length,
        "decoder_padding_mask": backbone.max_decoder_sequence_length,
    }
    model = Transcriber(backbone)
    model(
        {n: keras.KerasTensor((ROWS, lengths[n], *x.shape[2:]), x.dtype) for n, x in backbone.input.items()}
    )
    return model


def bert(config):
    return hub.BertTextClassifier(hub.BertBackbone(**config), num_classes=CLASSES, dropout=0.0)


def gpt2(config):
    return hub.GPT2CausalLM(hub.GPT2Backbone(**config))


def t5(config):
    return hub.T5Seq2SeqLM(hub.T5Backbone(**config))


FAMILIES = {f.__name__: f for f in (llama, gemma, mixtral, qwen, vit, whisper, bert, gpt2, t5)}


def make(name, config=None):
    """A model of a family, ready to train."""
    model = FAMILIES[name](config or TINY[name])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9), loss=loss)
    return model


def rules(name, mesh="batch=2,model=4", **dims):
    """The preset of a family."""
    return lm.LayoutMap.preset(name, lm.create_mesh(mesh), **dims)


def batch(name, rows=ROWS):
    """Inputs and targets; the last tokens of the last row are padding."""
    random = np.random.default_rng(0)
    tokens = random.integers(1, VOCABULARY, (rows, LENGTH), "int32")
    mask = np.ones((rows, LENGTH), "int32")
    mask[-1, -2:] = 0
    classes = random.integers(0, CLASSES, (rows,), "int32")
    if name == "vit":
        return random.normal(size=(rows, 16, 16, 3)).astype("float32"), classes
    if name == "whisper":
        sound = random.normal(size=(rows, 16, 8)).astype("float32")
        inputs = {"encoder_features": sound, "decoder_token_ids": tokens, "decoder_padding_mask": mask}
        return inputs, np.roll(tokens, -1, 1)
    if name == "t5":
        sides = {
            f"{side}_{n}": v
            for side in ("encoder", "decoder")
            for n, v in zip(("token_ids", "padding_mask"), (tokens, mask), strict=True)
        }
        return sides, np.roll(tokens, -1, 1)
    inputs = {"token_ids": tokens, "padding_mask": mask}
    if name == "bert":
        return inputs | {
            "segment_ids": np.repeat([[0, 1]], LENGTH // 2, 1).repeat(rows, 0).astype("int32")
        }, classes
    return inputs, np.roll(tokens, -1, 1)
