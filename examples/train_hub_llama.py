"""Train a tiny Llama 3 of keras-hub, sharded by its preset, and see a plan report a mistake in a rule.

    python examples/train_hub_llama.py                                  on 8 simulated devices
    python examples/train_hub_llama.py --mesh batch=8,model=1           on another mesh
    python examples/train_hub_llama.py --fsdp                           with weights sharded over both dims of the mesh
    python examples/train_hub_llama.py --mesh batch=64,model=4 --plan-only

The model is an ordinary one of keras-hub (pip install keras-hub), without any knowledge of meshes. The rules are those
of the preset "llama". The same rules shard the models with 8, 70, and 405 billion parameters:

    layoutmap plan keras_hub:llama3_405b --mesh batch=512,model=8 --fsdp-dim batch
"""

from __future__ import annotations

import argparse
import os
import pathlib

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # keras-hub imports TensorFlow, which logs

import keras
import keras_hub
import numpy as np

import layoutmap as lm

lm.simulate_devices(8)  # omit this on a machine with 8 devices

VOCABULARY, LENGTH, ROWS = 128, 32, 16


def make_llama() -> keras.Model:
    """Return the compiled model."""
    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=VOCABULARY,
        num_layers=1,
        num_query_heads=8,
        num_key_value_heads=4,
        hidden_dim=64,
        intermediate_dim=128,
    )
    model = keras_hub.models.Llama3CausalLM(backbone)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.AdamW(1e-2), loss=loss)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", default="batch=2,model=4", help="mesh dims, with 8 devices in all")
    parser.add_argument("--fsdp", action="store_true", help="also shard weights over the batch dim")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--plan-only", action="store_true", help="stop after the plan, on a mesh of any size")
    args = parser.parse_args()
    mesh = lm.Mesh(None, args.mesh)

    layout_map = lm.LayoutMap.preset("llama", mesh, fsdp_dim="batch" if args.fsdp else None)
    misspelt = lm.LayoutMap.from_yaml(
        layout_map.to_yaml().replace("feedforward_(gate", "feedforward_(gat"), mesh
    )
    print("== a misspelt rule, as the plan reports it\n")
    print(*lm.plan(make_llama, misspelt).problems, sep="\n\n")

    print(f"\n== the rules as they are\n\n{lm.plan(make_llama, layout_map, strict=True)}\n")
    if args.plan_only:
        return

    keras.utils.set_random_seed(0)
    model = layout_map.build(make_llama, strict=True, batch_dim="batch")
    text = np.frombuffer(pathlib.Path(__file__).read_bytes(), np.uint8)
    starts = np.random.default_rng(0).integers(0, len(text) - LENGTH - 1, ROWS * args.steps)
    rows = np.stack([text[s : s + LENGTH + 1] for s in starts]).astype("int32")
    inputs = {"token_ids": rows[:, :-1], "padding_mask": np.ones_like(rows[:, :-1])}
    log = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda step, logs: print(f"   step {step + 1:>3}   mean loss {logs['loss']:.4f}")
    )
    print("== training on this file\n")
    model.fit(inputs, rows[:, 1:], batch_size=ROWS, shuffle=False, verbose=0, callbacks=[log])


if __name__ == "__main__":
    main()
