"""Pass a Llama of keras-hub through a checkpoint from one engine to another, in bfloat16, with random weights.

    python benchmarks/checkpoint_real.py                    1.0 billion parameters: some minutes, 12 GiB of memory
    python benchmarks/checkpoint_real.py --size tiny

Each part runs in a fresh process, one after another. JAX builds the model on a 2x4 mesh and saves it. torch loads it on
1x8 and TensorFlow on 4x2. Each computes the logits of the same tokens. The loaded values are compared with the saved
ones bit for bit. The logits are compared with those of JAX in float32 from the saved weights. On each engine they
differ from these by bfloat16 rounding.

"peak" is the most memory that the process has used up to the end of that phase, with its imports (`ru_maxrss`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from measure import make_parser, read_peak_bytes, run_script

SIZES: dict[str, dict[str, Any]] = {
    "1b": {"vocabulary_size": 32_000, "num_layers": 16, "hidden_dim": 2048, "intermediate_dim": 8192}
    | {"num_query_heads": 32, "num_key_value_heads": 8},
    "300m": {"vocabulary_size": 32_000, "num_layers": 12, "hidden_dim": 1024, "intermediate_dim": 4096}
    | {"num_query_heads": 16, "num_key_value_heads": 8},
    "tiny": {"vocabulary_size": 128, "num_layers": 2, "hidden_dim": 64, "intermediate_dim": 128}
    | {"num_query_heads": 8, "num_key_value_heads": 8},
}
MESHES = {"jax": "batch=2,model=4", "torch": "batch=1,model=8", "tensorflow": "batch=4,model=2"}
RULES = {
    r"token_embedding\.embeddings": ("model", "batch"),
    r".*\.(query|key|value)_dense\.kernel": ("batch", "model", None),
    r".*\.self_attention_layer\.output_dense\.kernel": ("model", None, "batch"),
    r".*\.feedforward_(gate|intermediate)_dense\.kernel": ("batch", "model"),
    r".*\.feedforward_output_dense\.kernel": ("model", "batch"),
}
ROWS, LENGTH = 1, 16


def measure_backend(backend: str, size: str, directory: str, dtype: str) -> None:
    """Save or load the model in this process, and print the measurements as JSON."""
    os.environ |= {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    import keras
    import keras_hub

    import layoutmap as lm
    from layoutmap.adapters import get_adapter
    from layoutmap.engines import get_engine

    if backend == "tensorflow":
        import tensorflow as tf

        tf.experimental.dtensor.initialize_accelerator_system("CPU", num_logical_cpu_devices=8)

    def make_model() -> Any:
        backbone = keras_hub.models.LlamaBackbone(
            **SIZES[size], dtype=dtype, tie_word_embeddings=True, name="backbone"
        )
        return keras.Model(backbone.input, backbone.token_embedding(backbone.output, reverse=True))

    measured: dict[str, Any] = {}

    @contextmanager
    def measured_phase(name: str) -> Generator[None]:
        begin = time.perf_counter()
        yield
        measured[name] = {"seconds": time.perf_counter() - begin, "peak_gib": read_peak_bytes() / 2**30}

    with measured_phase("import"):
        layout_map = lm.LayoutMap(lm.create_mesh(MESHES[backend]), RULES)
    if backend == "jax" and dtype == "bfloat16":
        keras.utils.set_random_seed(1)
        with measured_phase("build"):
            model = layout_map.build(make_model)
        with measured_phase("save"):
            lm.save(model, directory)
    else:
        with measured_phase("load"):
            model = lm.load(make_model, directory, layout_map=layout_map, cast=dtype == "float32")
    tokens = np.random.default_rng(0).integers(0, SIZES[size]["vocabulary_size"], (ROWS, LENGTH), "int32")
    with measured_phase("logits"):
        logits = model.predict_on_batch({"token_ids": tokens, "padding_mask": np.ones_like(tokens)})
        logits = keras.ops.convert_to_numpy(keras.ops.cast(keras.ops.convert_to_tensor(logits), "float32"))
    np.save(f"{directory}/logits.npy", logits)
    engine, saved, num_bytes = get_engine(backend), lm.describe(directory), 0
    with measured_phase("compare"):
        for path, variable in get_adapter("keras").variables(model).items():
            for index, shard in engine.iterate_shards(variable.value):
                num_bytes += shard.nbytes
                assert shard.tobytes() == saved.read(path, index).astype(shard.dtype).tobytes(), path
    measured["gib_in_shards"] = num_bytes / 2**30
    measured["gib_saved"] = saved.global_bytes / 2**30
    measured["parameters"] = int(sum(np.prod(v.shape) for v in model.variables))
    print(json.dumps(measured))


def main() -> None:
    """Run each part in its own process, and print the tables."""
    parser = make_parser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--backend", choices=("torch", "tensorflow"), action="append")
    parser.add_argument("--directory")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measure_backend(args.child[0], args.size, args.directory, args.child[1])
        return
    others = [(backend, "bfloat16") for backend in args.backend or ("torch", "tensorflow")]
    first = reference = None
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        for backend, dtype in [("jax", "bfloat16"), ("jax", "float32"), *others]:
            options = ["--child", backend, dtype, "--size", args.size, "--directory", directory]
            measured = run_script(["-W", "ignore", __file__, *options])
            logits = np.load(Path(directory) / "logits.npy")
            first = logits if first is None else first
            print(
                f"{backend} in {dtype} on {MESHES[backend]}: {measured.pop('parameters'):,} parameters, "
                f"{measured.pop('gib_saved'):.2f} GiB saved, "
                f"{measured.pop('gib_in_shards'):.2f} GiB in different shards, "
                "the values that were saved"
            )
            for name, each in measured.items():
                print(f"  {name:8} {each['seconds']:8.1f} s   peak {each['peak_gib']:6.2f} GiB")
            if dtype == "float32":
                reference = logits
                rms = compute_rms(first, reference)
                print(f"  logits   those of JAX in bfloat16 differ from these by {rms:.2%} (rms)")
            elif reference is not None:
                print(
                    f"  logits   differ from those in float32 by {compute_rms(logits, reference):.2%} (rms)"
                )
            sys.stdout.flush()


def compute_rms(logits: Any, reference: Any) -> float:
    """Return the root mean square of a difference, relative to the reference."""
    return float(np.sqrt(((logits - reference) ** 2).mean() / (reference**2).mean()))


if __name__ == "__main__":
    main()
