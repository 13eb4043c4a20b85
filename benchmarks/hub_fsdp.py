"""Count the collectives that sharding weights over the batch dim adds to the compiled training step.

    python benchmarks/hub_fsdp.py

The model is a Llama of keras-hub, 2 blocks of width 256, under its preset on 8 simulated devices. Its
weights are sharded over `model`, over both dims without and with the preset's rules for activations,
and over the batch dim alone. A batch is 64 x 128 tokens. The benchmark prints the MiB of the
collectives' outputs on one device next to the MiB of its weights. It runs no step.
"""

from __future__ import annotations

import os
import warnings

os.environ["KERAS_BACKEND"] = "jax"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # keras-hub imports TensorFlow, which logs

import keras
import keras_hub
import numpy as np
from activations import count_collectives

import layoutmap as lm

VOCABULARY, ROWS, LENGTH = 512, 64, 128
FORMS = {
    "over model": ("batch=2,model=4", {}),
    "over both, without rules for activations": ("batch=2,model=4", {"fsdp_dim": "batch"}),
    "over both": ("batch=2,model=4", {"fsdp_dim": "batch"}),
    "over batch": ("batch=8", {"model_dim": None, "fsdp_dim": "batch"}),
}


def make_llama() -> keras.Model:
    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=VOCABULARY,
        num_layers=2,
        num_query_heads=8,
        num_key_value_heads=4,
        hidden_dim=256,
        intermediate_dim=1024,
    )
    model = keras_hub.models.Llama3CausalLM(backbone)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.AdamW(1e-3), loss=loss)
    return model


def main() -> None:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, LENGTH + 1), "int32")
    batch = {"token_ids": tokens[:, :-1], "padding_mask": np.ones((ROWS, LENGTH), "int32")}, tokens[:, 1:]
    for name, (mesh, dims) in FORMS.items():
        layout_map = lm.LayoutMap.preset("llama", lm.create_mesh(mesh), **dims)
        if "without" in name:
            layout_map.activations.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", lm.LayoutMapWarning)
            model = layout_map.build(make_llama, batch_dim="batch")
        counts, sizes = count_collectives(model, batch)
        weight_bytes = sum(v.value.addressable_shards[0].data.nbytes for v in model.trainable_variables)
        kinds = ", ".join(f"{n} {kind} {sizes[kind] / 2**20:.1f} MiB" for kind, n in counts.most_common())
        print(
            f"{name:<40} {mesh:<15} weights {weight_bytes / 2**20:.1f} MiB, {counts.total()} collectives "
            f"{sum(sizes.values()) / 2**20:.1f} MiB: {kinds}",
            flush=True,
        )


if __name__ == "__main__":
    main()
