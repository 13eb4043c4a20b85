"""Every family of keras-hub: a tiny configuration of its backbone, or why there is none.

A family is a class of `keras_hub.models` whose name ends in "Backbone". `docs/keras-hub.md` has this table.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Generator
from contextlib import contextmanager

import keras
import keras_hub
import numpy as np
from keras_hub.src.models.vae.vae_backbone import VAEBackbone

import layoutmap as lm
from layoutmap.adapters.keras import KerasAdapter

hub, hub_layers = keras_hub.models, keras_hub.layers
ops = keras.ops
ROWS, LENGTH, VOCABULARY = 4, 8, 32

# -- configurations

ENCODER = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 1,
    "num_heads": 2,
    "hidden_dim": 8,
    "intermediate_dim": 16,
    "dropout": 0.0,
}
SHORT = ENCODER | {"max_sequence_length": LENGTH}
DECODER = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 1,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "hidden_dim": 16,
    "intermediate_dim": 16,
}
SMALL_HEADS = DECODER | {"head_dim": 8}
LATER_QWEN = SMALL_HEADS | {
    "num_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}
ESM = ENCODER | {"max_wavelength": 100, "head_size": 4}
IMAGE = {"image_shape": (16, 16, 3)}
VISION = IMAGE | {"patch_size": 4, "num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 16}
DINO = VISION | {"image_shape": (16, 16, 3), "position_embedding_shape": (24, 24, 3)}
TEXT = {
    "vocabulary_size": VOCABULARY,
    "embedding_dim": 8,
    "hidden_dim": 8,
    "num_layers": 1,
    "num_heads": 2,
    "intermediate_dim": 16,
    "max_sequence_length": LENGTH,
}
SMOL = {
    "vocabulary_size": VOCABULARY,
    "hidden_dim": 16,
    "intermediate_dim": 16,
    "num_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_layer_enabled_list": [True],
    "layer_types": ["attention"],
    "mlp_bias": False,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": LENGTH,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
}
T5_GEMMA = {"vocabulary_size": VOCABULARY} | {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in {
        "hidden_dim": 8,
        "intermediate_dim": 16,
        "num_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "layer_types": ["full_attention"],
    }.items()
}
RESNET = {
    "input_conv_filters": [64],
    "input_conv_kernel_sizes": [3],
    "stackwise_num_filters": [64, 64, 64, 64],
    "stackwise_num_blocks": [1, 1, 1, 1],
    "stackwise_num_strides": [1, 2, 2, 2],
    "block_type": "basic_block",
    "image_shape": (32, 32, 3),
}
HGNET = {
    "depths": [1, 1],
    "embedding_size": 8,
    "hidden_sizes": [16, 16],
    "stem_channels": [3, 8, 8],
    "hidden_act": "relu",
    "use_learnable_affine_block": False,
    "stackwise_stage_filters": [(8, 8, 16, 1, 1, 3), (16, 8, 16, 1, 1, 3)],
    "apply_downsample": [False, True],
    "use_lightweight_conv_block": [False, True],
    "image_shape": (32, 32, 3),
}
MIT = {
    "layerwise_depths": [1, 1],
    "num_layers": 2,
    "layerwise_num_heads": [1, 2],
    "layerwise_sr_ratios": [2, 1],
    "max_drop_path_rate": 0.0,
    "layerwise_patch_sizes": [7, 3],
    "layerwise_strides": [4, 2],
    "image_shape": (32, 32, 3),
    "hidden_dims": [8, 16],
}
VGG = {"stackwise_num_repeats": [1, 1], "stackwise_num_filters": [8, 16], "image_shape": (16, 16, 3)}
DETECTOR = {
    "hidden_size": 8,
    "num_layers": 2,
    "intermediate_dim": 16,
    "num_heads": 2,
    "global_attention_layer_indices": [1],
    "image_shape": (32, 32, 3),
    "patch_size": 8,
    "num_output_channels": 8,
    "window_size": 2,
}


def two_towers(name):
    """A model of images and texts, by the name of its family."""
    vision = getattr(hub, f"{name}VisionEncoder")(**VISION)
    text = getattr(hub, f"{name}TextEncoder")(**TEXT)
    more = {} if name == "SigLIP" else {"projection_dim": 8}
    return getattr(hub, f"{name}Backbone")(vision_encoder=vision, text_encoder=text, **more)


def d_fine():
    image = {"image_shape": (32, 32, 3)}
    features = hub.HGNetV2Backbone(**HGNET | image | {"out_features": ["stage1", "stage2"]})
    return hub.DFineBackbone(
        backbone=features,
        decoder_in_channels=[8, 8],
        encoder_hidden_dim=8,
        num_labels=4,
        num_denoising=0,
        learn_initial_query=False,
        num_queries=8,
        anchor_image_size=(32, 32),
        feat_strides=[4, 8],
        num_feature_levels=2,
        hidden_dim=8,
        encoder_in_channels=[16, 16],
        encode_proj_layers=[1],
        num_attention_heads=2,
        encoder_ffn_dim=16,
        num_encoder_layers=1,
        hidden_expansion=0.5,
        depth_multiplier=0.5,
        eval_idx=-1,
        num_decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=16,
        decoder_n_points=[2, 2],
        lqe_hidden_dim=8,
        num_lqe_layers=1,
        out_features=["stage1", "stage2"],
        seed=0,
        **image,
    )


def depth_anything():
    encoder = hub.DINOV2Backbone(**DINO | {"image_shape": (32, 32, 3), "num_layers": 4})
    return hub.DepthAnythingBackbone(
        image_encoder=encoder,
        reassemble_factors=[4, 2, 1, 0.5],
        neck_hidden_dims=[8, 8, 8, 8],
        fusion_hidden_dim=8,
        head_hidden_dim=8,
        head_in_index=-1,
        feature_keys=["stage1", "stage2", "stage3", "stage4"],
    )


def sam():
    return hub.SAMBackbone(
        image_encoder=hub.ViTDetBackbone(**DETECTOR),
        prompt_encoder=hub_layers.SAMPromptEncoder(
            hidden_size=8, image_embedding_size=(4, 4), input_image_size=(32, 32), mask_in_channels=8
        ),
        mask_decoder=hub_layers.SAMMaskDecoder(
            num_layers=1,
            hidden_size=8,
            intermediate_dim=16,
            num_heads=2,
            embedding_dim=8,
            num_multimask_outputs=3,
            iou_head_depth=2,
            iou_head_hidden_dim=8,
        ),
    )


def sam3():
    image = {"image_shape": (32, 32, 3), "patch_size": 8}
    size = {"num_layers": 1, "hidden_dim": 8, "intermediate_dim": 16, "num_heads": 2}
    return hub.SAM3PromptableConceptBackbone(
        vision_encoder=hub_layers.SAM3VisionEncoder(
            **image,
            **size,
            fpn_hidden_dim=8,
            fpn_scale_factors=[4.0, 2.0, 1.0, 0.5],
            pretrain_image_shape=(16, 16, 3),
            window_size=2,
            global_attn_indexes=[0],
        ),
        text_encoder=hub_layers.SAM3TextEncoder(vocabulary_size=VOCABULARY, embedding_dim=8, **size),
        geometry_encoder=hub_layers.SAM3GeometryEncoder(**size, roi_size=3),
        detr_encoder=hub_layers.SAM3DetrEncoder(**size),
        detr_decoder=hub_layers.SAM3DetrDecoder(**image, **size, num_queries=8),
        mask_decoder=hub_layers.SAM3MaskDecoder(num_upsampling_stages=3, hidden_dim=8, num_heads=2),
    )


def stable_diffusion():
    filters = {f"{side}_num_filters": [32, 32, 32, 32] for side in ("encoder", "decoder")}
    blocks = {f"{side}_num_blocks": [1, 1, 1, 1] for side in ("encoder", "decoder")}
    texts = {
        name: hub.CLIPTextEncoder(**TEXT, intermediate_output_index=0, name=name)
        for name in ("clip_l", "clip_g")
    }
    backbone = hub.StableDiffusion3Backbone(
        mmdit_patch_size=2,
        mmdit_hidden_dim=16,
        mmdit_num_layers=1,
        mmdit_num_heads=2,
        mmdit_position_size=8,
        mmdit_qk_norm=None,
        mmdit_dual_attention_indices=None,
        vae=VAEBackbone(**filters, **blocks, sampler_method="mode"),
        image_shape=(16, 16, 3),
        **texts,
    )
    # Or else each call makes it for a number of steps, which JAX compiles for one only
    backbone.configure_scheduler(4)
    return backbone


FAMILIES = {
    "Albert": SHORT | {"embedding_dim": 8},
    "BASNet": lambda: hub.BASNetBackbone(
        image_encoder=hub.ResNetBackbone(**RESNET | {"image_shape": (None, None, 3)}),
        num_classes=1,
        image_shape=(32, 32, 3),
        projection_filters=64,
    ),
    "BLIP2": lambda: hub.BLIP2Backbone(
        vision_encoder=None, qformer=None, language_model=hub.OPTBackbone(**SHORT)
    ),
    "Bart": SHORT,
    "Bert": SHORT,
    "Bloom": ENCODER,
    "CLIP": lambda: two_towers("CLIP"),
    "CSPNet": {
        "stem_filters": 8,
        "stem_kernel_size": 3,
        "stem_strides": 1,
        "stackwise_depth": [1, 1],
        "stackwise_strides": [1, 2],
        "stackwise_num_filters": [16, 16],
        "block_type": "dark_block",
        "stage_type": "dark",
        "image_shape": (16, 16, 3),
    },
    "DFine": d_fine,
    "DINOV2": DINO,
    "DINOV3": VISION,
    "DebertaV3": SHORT | {"bucket_size": 8},
    "DeepLabV3": lambda: hub.DeepLabV3Backbone(
        image_encoder=hub.ResNetBackbone(**RESNET),
        projection_filters=8,
        low_level_feature_key="P2",
        spatial_pyramid_pooling_key="P4",
        upsampling_size=4,
        dilation_rates=[2],
        image_shape=(32, 32, 3),
    ),
    "DeiT": VISION,
    "DenseNet": {"stackwise_num_repeats": [1, 1], "growth_rate": 8, "image_shape": (32, 32, 3)},
    "DepthAnything": depth_anything,
    "DistilBert": SHORT,
    "ESM": ENCODER | {"vocabulary_size": 33},
    "ESM2": ENCODER | {"vocabulary_size": 33},
    "EdRec": {
        "vocab_size": VOCABULARY,
        "num_layers_enc": 1,
        "num_layers_dec": 1,
        "hidden_dim": 8,
        "intermediate_dim": 16,
        "num_heads": 2,
    },
    "EfficientNet": {
        "stackwise_kernel_sizes": [3, 3],
        "stackwise_num_repeats": [1, 1],
        "stackwise_input_filters": [8, 8],
        "stackwise_output_filters": [8, 16],
        "stackwise_expansion_ratios": [1, 2],
        "stackwise_squeeze_and_excite_ratios": [0.0, 0.25],
        "stackwise_strides": [1, 2],
        "stackwise_block_types": ["fused", "unfused"],
        "stackwise_force_input_filters": [0, 0],
        "stackwise_nores_option": [False, False],
        "stackwise_width_coefficients": [1.0, 1.0],
        "stackwise_depth_coefficients": [1.0, 1.0],
        "dropout": 0.0,
        "num_features": 16,
        "input_shape": (16, 16, 3),
    },
    "Electra": {
        "vocab_size": VOCABULARY,
        "num_layers": 1,
        "num_heads": 2,
        "hidden_dim": 8,
        "embedding_dim": 8,
        "intermediate_dim": 16,
        "dropout": 0.0,
        "max_sequence_length": LENGTH,
    },
    "FNet": {k: v for k, v in SHORT.items() if k != "num_heads"},
    "Falcon": {
        "vocabulary_size": VOCABULARY,
        "num_layers": 1,
        "num_attention_heads": 2,
        "hidden_dim": 8,
        "intermediate_dim": 16,
    },
    "Flux": {
        "input_channels": 16,
        "hidden_size": 16,
        "mlp_ratio": 2.0,
        "num_heads": 2,
        "depth": 1,
        "depth_single_blocks": 1,
        "axes_dim": [2, 2, 4],
        "theta": 100,
        "use_bias": True,
        "image_shape": (8, 16),
        "text_shape": (8, 16),
        "image_ids_shape": (8, 3),
        "text_ids_shape": (8, 3),
        "y_shape": (16,),
    },
    "GPT2": SHORT,
    "GPTNeoX": SHORT | {"rotary_percentage": 0.5},
    "Gemma": SMALL_HEADS,
    "Gemma3": SMALL_HEADS | {"image_size": 16},
    "Gemma3n": {
        "text_vocab_size": VOCABULARY,
        "text_hidden_size": 16,
        "num_hidden_layers": 1,
        "pad_token_id": 0,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": [16],
        "hidden_activation": "gelu_approximate",
        "layer_types": ["full_attention"],
        "sliding_window": 4,
        "rope_theta": 10000.0,
        "max_position_embeddings": 16,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 4,
        "altup_num_inputs": 2,
        "laurel_rank": 4,
    },
    "Gemma4": SMALL_HEADS | {"image_size": 16},
    "GptOss": DECODER | {"num_experts": 2, "sliding_window": 4, "head_dim": 8},
    "HGNetV2": HGNET,
    "Llama": DECODER,
    "Llama3": DECODER,
    "MetaCLIP2": lambda: two_towers("MetaCLIP2"),
    "MiT": MIT,
    "Mistral": DECODER,
    "Mixtral": DECODER | {"num_experts": 4},
    "MobileNet": {
        "stackwise_expansion": [[16], [16]],
        "stackwise_num_blocks": [1, 1],
        "stackwise_num_filters": [[8], [16]],
        "stackwise_kernel_size": [[3], [3]],
        "stackwise_num_strides": [[2], [1]],
        "stackwise_se_ratio": [[None], [0.25]],
        "stackwise_activation": [["relu"], ["hard_swish"]],
        "stackwise_padding": [[1], [1]],
        "output_num_filters": 16,
        "depthwise_filters": 8,
        "depthwise_stride": 1,
        "depthwise_residual": False,
        "last_layer_filter": 16,
        "squeeze_and_excite": 0.5,
        "input_num_filters": 8,
        "image_shape": (16, 16, 3),
    },
    "MobileNetV5": {
        "stackwise_block_types": [["er"], ["uir"]],
        "stackwise_num_blocks": [1, 1],
        "stackwise_num_filters": [[8], [16]],
        "stackwise_strides": [[2], [2]],
        "stackwise_act_layers": [["relu"], ["relu"]],
        "stackwise_exp_ratios": [[2.0], [2.0]],
        "stackwise_se_ratios": [[0.0], [0.0]],
        "stackwise_dw_kernel_sizes": [[0], [3]],
        "stackwise_dw_start_kernel_sizes": [[0], [0]],
        "stackwise_dw_end_kernel_sizes": [[0], [0]],
        "stackwise_exp_kernel_sizes": [[3], [0]],
        "stackwise_pw_kernel_sizes": [[1], [0]],
        "stackwise_num_heads": [[0], [0]],
        "stackwise_key_dims": [[0], [0]],
        "stackwise_value_dims": [[0], [0]],
        "stackwise_kv_strides": [[0], [0]],
        "stackwise_use_cpe": [[False], [False]],
        "use_msfa": False,
        "stem_size": 8,
        "image_shape": (32, 32, 3),
    },
    "Moonshine": {
        "vocabulary_size": VOCABULARY,
        "filter_dim": 16,
        "encoder_num_layers": 1,
        "decoder_num_layers": 1,
        "hidden_dim": 16,
        "intermediate_dim": 16,
        "encoder_num_heads": 2,
        "decoder_num_heads": 2,
    },
    "OPT": SHORT,
    "PARSeq": lambda: hub.PARSeqBackbone(
        image_encoder=hub.ViTBackbone(
            **{k: v for k, v in VISION.items() if k != "intermediate_dim"},
            mlp_dim=16,
            use_class_token=False,
        ),
        vocabulary_size=VOCABULARY,
        max_label_length=LENGTH,
        decoder_hidden_dim=8,
        num_decoder_layers=1,
        num_decoder_heads=2,
        decoder_mlp_dim=16,
        dropout_rate=0.0,
        attention_dropout=0.0,
    ),
    "PaliGemma": SMALL_HEADS
    | {
        "image_size": 16,
        "vit_patch_size": 4,
        "vit_num_heads": 2,
        "vit_hidden_dim": 8,
        "vit_num_layers": 1,
        "vit_intermediate_dim": 16,
    },
    "Phi3": DECODER,
    "Qwen": DECODER,
    "Qwen2": DECODER,
    "Qwen3": SMALL_HEADS,
    "Qwen3Moe": SMALL_HEADS | {"moe_intermediate_dim": 8, "num_experts": 4, "top_k": 2},
    "Qwen3_5": LATER_QWEN,
    "Qwen3_5Moe": {k: v for k, v in LATER_QWEN.items() if k != "intermediate_dim"}
    | {"moe_intermediate_dim": 8, "shared_expert_intermediate_size": 8, "num_experts": 4, "top_k": 2},
    "QwenMoe": DECODER
    | {"moe_intermediate_dim": 8, "shared_expert_intermediate_dim": 8, "num_experts": 4, "top_k": 2},
    "RWKV7": {
        "hidden_size": 16,
        "head_size": 4,
        "num_layers": 1,
        "vocabulary_size": VOCABULARY,
        "intermediate_dim": 16,
        "gate_lora": 4,
        "mv_lora": 4,
        "aaa_lora": 4,
        "decay_lora": 4,
    },
    "ResNet": RESNET,
    "RetinaNet": lambda: hub.RetinaNetBackbone(
        image_encoder=hub.ResNetBackbone(**RESNET),
        min_level=3,
        max_level=4,
        use_p5=False,
        image_shape=(32, 32, 3),
    ),
    "Roberta": SHORT,
    "RoformerV2": ENCODER | {"head_size": 4},
    "SAM": sam,
    "SAM3PromptableConcept": sam3,
    "SegFormer": lambda: hub.SegFormerBackbone(image_encoder=hub.MiTBackbone(**MIT), projection_filters=8),
    "SigLIP": lambda: two_towers("SigLIP"),
    "SmolLM": SMOL,
    "SmolLM3": SMOL,
    "StableDiffusion3": stable_diffusion,
    "SwinTransformer": {
        "image_shape": (32, 32, 3),
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "window_size": 4,
        "drop_path": 0.0,
    },
    "T5": ENCODER,
    "T5Gemma": T5_GEMMA,
    "T5Gemma2": T5_GEMMA,
    "VGG": VGG,
    "ViT": {k: v for k, v in VISION.items() if k != "intermediate_dim"} | {"mlp_dim": 16},
    "ViTDet": DETECTOR,
    "VideoPrism": {
        "num_frames": 2,
        "patch_size": 4,
        "hidden_dim": 8,
        "intermediate_dim": 16,
        "num_heads": 2,
        "num_spatial_layers": 1,
        "num_temporal_layers": 1,
        "num_auxiliary_layers": 0,
        "image_shape": (8, 8, 3),
    },
    "Whisper": ENCODER
    | {"num_mels": 8, "max_encoder_sequence_length": 16, "max_decoder_sequence_length": LENGTH},
    "XLMRoberta": SHORT,
    "XLNet": ENCODER,
    "Xception": {
        "stackwise_conv_filters": [[8, 8], [8, 16]],
        "stackwise_pooling": [True, False],
        "image_shape": (32, 32, 3),
    },
}
"""For each family the settings of its backbone, or what makes it."""

LEFT_OUT = {
    "FeaturePyramid": "is the base class of others, which have the layers",
}
"""Families that are not tried, and why."""

NOT_TRAINED = {
    "BASNet": "trained, not compared: on one device, weights that differ by 1e-7 change gradients by 0.03",
    "DFine": "trained, to 1.3e-5: on one device, weights that differ by 1e-7 change the loss by as much",
    "FNet": "not trained on CPU devices: XLA's Fourier transform refuses its input's layout",
}
"""Families whose training is not compared with one device, and why."""

TRAINED = [name for name in FAMILIES if name not in NOT_TRAINED]
"""Families that are built and trained, too, as on one device."""


SHAPES = {
    "Moonshine": {"encoder_input_values": (1300, 1), "encoder_padding_mask": (1300,)},
    "SAM": {"masks": (1, 16, 16, 1)},
    "Whisper": {"encoder_features": (16, 8)},
}
"""The shapes of inputs that are not as long as the others, without their rows."""

READ_WHILE_BUILT = {"DINOV2": r"\.position_embeddings$", "DepthAnything": r"\.position_embeddings$"}
"""Weights from which others are computed while the model is made: from shards that may be rounded in another way."""

NOTES = NOT_TRAINED | dict.fromkeys(
    READ_WHILE_BUILT, "leave `position_embeddings` unsharded: the layer computes another weight from it"
)
"""What the page says of a family."""


# XLA leaves out what makes a step fast, and generates less code, which takes most of the time.
QUICK_STEPS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}


def families():
    """All families of the keras-hub that is installed."""
    return {name.removesuffix("Backbone") for name in dir(hub) if name.endswith("Backbone")} - {""}


# -- models and data


class Outputs(keras.Model):
    """A backbone, and one number for each row of its outputs, to which every output adds."""

    def __init__(self, backbone):
        super().__init__(name="model")
        self.backbone = backbone

    def call(self, x, training=None):
        total = 0.0
        for out in keras.tree.flatten(self.backbone(x, training=training)):
            out = ops.cast(out, "float32")
            if not out.shape or out.shape[0] not in (None, ROWS):
                total += ops.mean(out)
                continue
            flat = ops.reshape(out, (ROWS, -1))
            waves = ops.cos(ops.arange(flat.shape[1], dtype="float32"))
            total += ops.mean(flat * waves, axis=1, keepdims=True)
        return total + ops.zeros((ROWS, 1))


def make(name):
    """A model of a family, ready to train; its first call has been made."""
    family = FAMILIES[name]
    model = Outputs(family() if callable(family) else getattr(hub, f"{name}Backbone")(**family))
    model.compile(optimizer=keras.optimizers.SGD(1e-2, momentum=0.9), loss="mse")
    inputs, _ = batch(model.backbone)
    model(keras.tree.map_structure(lambda v: keras.KerasTensor(v.shape, str(v.dtype)), inputs))
    return model


def batch(backbone):
    """Inputs that a backbone takes, and targets."""
    random = np.random.default_rng(0)
    shapes = SHAPES.get(type(backbone).__name__.removesuffix("Backbone"), {})

    def one(path, wanted):
        name = str(path[-1]) if path else wanted.name
        shape = (ROWS, *shapes.get(name, [LENGTH if n is None else n for n in wanted.shape[1:]]))
        if "mask" in name and "masks" not in name:
            return np.ones(shape, wanted.dtype)
        if "int" in wanted.dtype:
            few = 2 if "segment" in name or "type" in name else VOCABULARY
            return random.integers(few > 2, few, shape, wanted.dtype)
        return random.uniform(size=shape).astype(wanted.dtype)

    inputs = _named(backbone.input, one)
    return inputs, random.normal(size=(ROWS, 1)).astype("float32")


def _named(wanted, one):
    if isinstance(wanted, dict):
        return {name: one((name,), each) for name, each in wanted.items()}
    if isinstance(wanted, (list, tuple)):
        return [one((), each) for each in wanted]
    return one((), wanted)


def table():
    """The families as a table of `docs/keras-hub.md`."""
    rows = [
        f"| {name} | yes | {'yes' if name in TRAINED else ''} | {NOTES.get(name, '')} |" for name in FAMILIES
    ]
    rows += [f"| {name} | no | no | {why} |" for name, why in LEFT_OUT.items()]
    header = ["| family | planned | built and trained | |", "|---|---|---|---|"]
    return "\n".join([*header, *sorted(rows, key=str.lower)])


def rules(plan, name=""):
    """A rule for each weight of a plan that the mesh divides: its longest axis is sharded over "model"."""
    found = {}
    for each in plan.assignments:
        variable = each.variable
        if name in READ_WHILE_BUILT and re.search(READ_WHILE_BUILT[name], variable.path):
            continue
        if variable.parent is None and variable.kind.name in ("WEIGHT", "STATE"):
            axes = [axis for axis, size in enumerate(variable.shape) if size % 4 == 0]
            if axes and math.prod(variable.shape) > 8:
                longest = max(axes, key=lambda axis: (variable.shape[axis], axis))
                specs = ["model" if axis == longest else None for axis in range(len(variable.shape))]
                found[re.escape(variable.path) + "$"] = lm.Layout(specs, plan.mesh)
    return lm.LayoutMap(plan.mesh, found)


@contextmanager
def quick_steps() -> Generator[None]:
    """Compile training steps of JAX quickly; not what makes first values, whose bits depend on it."""
    if keras.backend.backend() != "jax":
        yield
        return
    from keras.src.backend.jax import trainer

    plain = trainer.jit
    trainer.jit = functools.partial(plain, compiler_options=QUICK_STEPS)
    try:
        yield
    finally:
        trainer.jit = plain


def difference(expected, actual):
    """The largest difference of two arrays, divided by the largest expected value or by 1 if that is larger."""
    a, b = np.asarray(expected, "float64"), np.asarray(actual, "float64")
    return float(np.max(np.abs(a - b), initial=0.0) / max(1.0, np.max(np.abs(a), initial=0.0)))


def train(plain, sharded, steps=3):
    """The largest difference between two models that begin alike, in losses and weights, over some steps; and in what
    the first step adds to each weight, which for SGD is its gradient, beside that gradient's own size.
    """
    adapter, data, worst, of_gradients = KerasAdapter(), batch(plain.backbone), 0.0, 0.0
    with quick_steps():
        for step in range(steps):
            losses = [adapter.train_step(each, data)["loss"] for each in (plain, sharded)]
            worst = max(worst, difference(*losses))
            if step == 0:
                of_gradients = max(relative(*map(momenta, (plain, sharded))))
    pairs = zip(weights(plain), weights(sharded), strict=True)
    return max(worst, *(difference(a, b) for a, b in pairs)), of_gradients


def momenta(model):
    """What the optimizer has added up for each weight."""
    return [np.asarray(each, "float64") for each in model.optimizer.momentums]


def relative(expected, actual):
    """The largest difference of each two arrays beside their size; what is a thousandth of the largest is rounding."""
    largest = max(np.abs(each).max(initial=0.0) for each in expected)
    for a, b in zip(expected, actual, strict=True):
        yield float(np.abs(a - b).max(initial=0.0) / max(np.abs(a).max(initial=0.0), 1e-3 * largest))


def weights(model):
    """The values of all variables of a model and its optimizer."""
    adapter = KerasAdapter()
    return [adapter.read(variable) for variable in adapter.variables(model).values()]
