"""Compare sharded training with training on one device, for every optimizer on several models and meshes.

Each case is one `layoutmap.check_parity`. It compares the same model from the same seed, unsharded and sharded: the
initial weights bit for bit, the forward pass, the gradients, and the losses and variables of three steps.

    python benchmarks/parity.py                                 Keras on TensorFlow, all cases
    python benchmarks/parity.py --backend jax                   Keras on JAX; or torch
    python benchmarks/parity.py --models mlp --optimizers adam muon --meshes batch=2,model=4
"""

from __future__ import annotations

import os
import sys
import warnings
from functools import partial

from measure import make_parser, time_call

NUM_DEVICES = 8
MESHES = ("model=8", "batch=8", "batch=2,model=4", "batch=4,model=2")


def set_up(backend):
    """Configure a backend of Keras with 8 simulated devices, before Keras is imported."""
    os.environ["KERAS_BACKEND"] = backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={NUM_DEVICES}"
    if backend == "tensorflow":
        import tensorflow as tf

        tf.get_logger().setLevel("ERROR")
        tf.experimental.dtensor.initialize_accelerator_system("CPU", num_logical_cpu_devices=NUM_DEVICES)


def get_optimizers():
    """Return a function that makes an optimizer for each name."""
    from keras import optimizers as O

    return {
        "sgd": lambda: O.SGD(0.05, momentum=0.9),
        "adam": lambda: O.Adam(1e-3),
        "adamw": lambda: O.AdamW(1e-3),
        "rmsprop": lambda: O.RMSprop(1e-3),
        "adafactor": lambda: O.Adafactor(1e-3),
        "lion": lambda: O.Lion(1e-4),
        "muon": lambda: O.Muon(1e-3),
    }


def get_models():
    """Return a function that makes a model, a batch for it, and its rules for each name."""
    import keras
    import numpy as np

    L = keras.layers

    class Block(L.Layer):
        def __init__(self):
            super().__init__()
            self.norm = L.LayerNormalization()
            self.attention = L.MultiHeadAttention(8, 2)
            self.up = L.Dense(32, activation="gelu")
            self.down = L.Dense(16)

        def call(self, x):
            y = self.norm(x)
            x = x + self.attention(y, y, use_causal_mask=True)
            return x + self.down(self.up(x))

    class Transformer(keras.Model):
        def __init__(self):
            super().__init__()
            self.tokens = L.Embedding(32, 16)
            self.blocks = [Block(), Block()]
            self.head = L.Dense(32)

        def call(self, x):
            x = self.tokens(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def make_mlp():
        layers = [L.Dense(32, name="d1"), L.BatchNormalization(name="bn"), L.Activation("relu")]
        return keras.Sequential([keras.Input((16,)), *layers, L.Dense(64, name="d2")])

    def make_embedding():
        layers = [L.Embedding(32, 16, name="tokens"), L.GlobalAveragePooling1D()]
        layers += [L.Dense(64, name="d1", activation="relu"), L.Dense(8, name="d2")]
        return keras.Sequential([keras.Input((6,), dtype="int32"), *layers])

    random = np.random.default_rng(0)
    dense = {r"d1\.kernel": (None, "model"), r"d2\.kernel": ("model", None), r"d1\.bias": ("model",)}
    return {
        "transformer": (
            Transformer,
            (random.integers(0, 32, (8, 8), "int32"), random.integers(0, 32, (8, 8), "int32")),
            {
                r".*\.(query|key|value)_dense\.kernel": (None, "model", None),
                r".*\.output_dense\.kernel": ("model", None, None),
                r".*\.up\.kernel": (None, "model"),
                r".*\.down\.kernel": ("model", "batch"),
                r"tokens\.embeddings": ("model", None),
                r"head\.kernel": ("batch", "model"),
            },
        ),
        "mlp": (
            make_mlp,
            (random.normal(size=(8, 16)).astype("float32"), random.integers(0, 64, (8,), "int32")),
            dense | {r"bn\..*": ("model",)},
        ),
        "embedding": (
            make_embedding,
            (random.integers(0, 32, (8, 6), "int32"), random.integers(0, 8, (8,), "int32")),
            dense | {r"tokens\.embeddings": ("model", "batch")},
        ),
    }


def check(model, optimizer, mesh, **options):
    """Return the report of one case.

    Args:
        model: A name of `get_models`.
        optimizer: A name of `get_optimizers`.
        mesh: The mesh, as text. Rules do not shard over dims that it lacks.
        **options: See `layoutmap.check_parity`.
    """
    import keras

    import layoutmap as lm

    make, batch, rules = get_models()[model]

    def make_model():
        compiled = make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        compiled.compile(get_optimizers()[optimizer](), loss)
        return compiled

    devices = lm.create_mesh(mesh)
    dims = devices.dim_names
    mesh_rules = {p: tuple(s if s in dims else None for s in specs) for p, specs in rules.items()}
    batch_dim = "batch" if "batch" in dims else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lm.LayoutMapWarning)
        return lm.check_parity(
            make_model, lm.LayoutMap(devices, mesh_rules), batch, batch_dim=batch_dim, **options
        )


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--backend", choices=("tensorflow", "jax", "torch"), default="tensorflow")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="transformer, mlp, embedding; all")
    parser.add_argument("--optimizers", nargs="+", metavar="NAME", help="all of them if left out")
    parser.add_argument("--meshes", nargs="+", default=MESHES, metavar="MESH", help="as in batch=2,model=4")
    args = parser.parse_args()
    set_up(args.backend)
    failed = total = 0
    print(
        f"{'model':<12} {'optimizer':<10} {'mesh':<16} verdict  worst of weights, gradient, steps; left out"
    )
    for model in args.models or get_models():
        for optimizer in args.optimizers or get_optimizers():
            for mesh in args.meshes:
                seconds, report = time_call(partial(check, model, optimizer, mesh, raises=False))
                total, failed = total + 1, failed + (not report.agrees)
                worst = ", ".join(f"{report.worst(stage):.1e}" for stage in ("weights", "gradient", "step"))
                left_out = sum(row.left_out for row in report.rows if row.stage == "step 3")
                verdict = "agrees " if report.agrees else "DIFFERS"
                print(
                    f"{model:<12} {optimizer:<10} {mesh:<16} {verdict}  {worst}; {left_out}"
                    f"   ({seconds:.1f} s)",
                    flush=True,
                )
    print(f"{total - failed} of {total} agree within 1e-5 on {args.backend}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
