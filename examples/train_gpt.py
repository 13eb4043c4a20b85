"""Train a small GPT on the text of Python's standard library, and shard every weight by name.

    python examples/train_gpt.py                                      on two meshes of 8 simulated devices
    python examples/train_gpt.py --mesh batch=8 --steps 100           on another mesh
    python examples/train_gpt.py --mesh batch=2,model=4 --plan-only   only the plan, which allocates nothing
    python examples/train_gpt.py --plan-only --html plan.html         also a page for a browser

For each mesh it prints the plan, creates the sharded model, shows the bytes on each device, and trains.
The losses are equal on every mesh. At the end, the plan reports a misspelt rule.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import sysconfig
import time
from collections.abc import Mapping

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Keras imports TensorFlow, which logs

import keras
import numpy as np

import layoutmap as lm

lm.simulate_devices(8)  # omit this on a machine with 8 devices

VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS = 128, 64, 64, 4, 2
BATCH = 16
EXAMPLE = np.zeros((BATCH, LENGTH), "int32")  # an example input of the model

Specs = tuple[str | None, ...]
RULES: dict[str, Specs] = {
    r"tokens\.embeddings": ("model", None),
    r"places\.embeddings": (None, None),
    r"blocks\.\d+\.attention\.(query|key|value)_dense\.kernel": (None, "model", None),
    r"blocks\.\d+\.attention\.(query|key|value)_dense\.bias": ("model", None),
    r"blocks\.\d+\.attention\.output_dense\.kernel": ("model", None, None),
    r"blocks\.\d+\.up\.kernel": (None, "model"),
    r"blocks\.\d+\.up\.bias": ("model",),
    r"blocks\.\d+\.down\.kernel": ("model", None),
    r"blocks\.\d+\.(attention\.output_dense|down)\.bias": (None,),
    r"(.*\.)?norm\d?\.(gamma|beta)": (None,),
    r"head\.kernel": (None, "model"),
    r"head\.bias": ("model",),
}


class Block(keras.layers.Layer):
    """Attention, then two dense layers, each with a normalization before and a residual connection."""

    def __init__(self):
        super().__init__()
        self.norm1 = keras.layers.LayerNormalization()
        self.attention = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
        self.norm2 = keras.layers.LayerNormalization()
        self.up = keras.layers.Dense(4 * WIDTH, activation="gelu")
        self.down = keras.layers.Dense(WIDTH)

    def call(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.down(self.up(self.norm2(x)))


class GPT(keras.Model):
    """A decoder over characters."""

    def __init__(self):
        super().__init__()
        self.tokens = keras.layers.Embedding(VOCABULARY, WIDTH)
        self.places = keras.layers.Embedding(LENGTH, WIDTH)
        self.blocks = [Block() for _ in range(BLOCKS)]
        self.norm = keras.layers.LayerNormalization()
        self.head = keras.layers.Dense(VOCABULARY)

    def call(self, text):
        x = self.tokens(text) + self.places(keras.ops.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_gpt() -> GPT:
    """Return the compiled model. It is ordinary Keras, without any knowledge of meshes."""
    model = GPT()
    model.compile(
        optimizer=keras.optimizers.AdamW(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def read_standard_library(num_batches: int) -> np.ndarray:
    """Return the source text of Python's standard library, shape (rows, LENGTH + 1)."""
    wanted = num_batches * BATCH * (LENGTH + 1)
    text = b""
    for path in sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += bytes(c for c in path.read_bytes() if c < VOCABULARY)
        if len(text) >= wanted:
            break
    rows = np.frombuffer(text[:wanted], np.uint8).reshape(-1, LENGTH + 1).astype("int32")
    return np.random.default_rng(0).permutation(rows)


def train(mesh: lm.Mesh, steps: int) -> list[float]:
    """Plan, create, and train the model on one mesh, and return the loss of every step."""
    layout_map = make_layout_map(mesh)
    plan = lm.plan(make_gpt, layout_map, inputs=EXAMPLE, strict=True)
    print(f"\n== mesh {mesh}: the plan, nothing allocated\n\n{plan}\n")

    keras.utils.set_random_seed(0)
    start = time.perf_counter()
    batch_dim = "batch" if "batch" in mesh else None
    model = layout_map.build(make_gpt, inputs=EXAMPLE, strict=True, batch_dim=batch_dim)
    print(f"== created in {time.perf_counter() - start:.1f} s; what each device holds of the weights\n")
    show_devices(model)

    rows = read_standard_library(steps)
    x, y = rows[:, :-1], rows[:, 1:]
    losses: list[float] = []
    log = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, logs: losses.append(float(logs["loss"]))
    )
    start = time.perf_counter()
    model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0, callbacks=[log])
    seconds = time.perf_counter() - start
    # Keras reports the mean loss since the start of the epoch, so compute the loss of each step from the sums.
    totals = np.array(losses) * np.arange(1, len(losses) + 1)
    each = np.diff(totals, prepend=0.0)
    print(f"\n== trained {len(each)} steps in {seconds:.1f} s on {x.size:,} characters\n")
    for step in sorted({0, *range(4, len(each), 10), len(each) - 1}):
        print(f"   step {step + 1:>4}   loss {each[step]:.4f}")
    return list(each)


def show_devices(model: keras.Model) -> None:
    """Print the bytes of weights on each device."""
    stored: dict[str, int] = {}
    for variable in model.variables:
        for shard in variable.value.addressable_shards:
            stored[str(shard.device)] = stored.get(str(shard.device), 0) + shard.data.nbytes
    total = sum(v.value.nbytes for v in model.variables)
    for device, num_bytes in stored.items():
        print(f"   {device:<10} {num_bytes:>9,} bytes  {'#' * round(40 * num_bytes / total)}")
    print(f"   {'the model':<10} {total:>9,} bytes  {'#' * 40}")


def show_misspelt_rule(mesh: lm.Mesh) -> None:
    """Show the error of a misspelt rule, which other libraries would silently ignore."""
    right, wrong = r"down\.kernel", r"down\.kernal"
    rules = {pattern.replace(right, wrong): specs for pattern, specs in RULES.items()}
    print(f"\n== a misspelt rule, {wrong} for {right}: refused before anything is made\n")
    try:
        lm.plan(make_gpt, make_layout_map(mesh, rules), inputs=EXAMPLE, strict=True)
    except lm.PlanError as error:
        print(error)


def show_next_steps() -> None:
    """Print the commands to try and the pages to read next."""
    print(f"""
== next

   {os.path.relpath(sys.executable)} {os.path.relpath(__file__)} --plan-only --mesh batch=4,model=4 --html plan.html
      the plan for 16 devices, as a page for a browser
   change RULES in {os.path.relpath(__file__)}, and see what the plan says
   docs/get-started/keras.md, or nnx.md, pytrees.md, torch.md, tensorflow.md
      the same for a model of your own, in a minute""")


def make_layout_map(mesh: lm.Mesh, rules: Mapping[str, Specs] = RULES) -> lm.LayoutMap:
    """Return the rules on a mesh, without the dims that it lacks."""
    mesh_rules = {
        pattern: [each if each in mesh else None for each in specs] for pattern, specs in rules.items()
    }
    return lm.LayoutMap(mesh, mesh_rules)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", action="append", help='as in "batch=2,model=4"; may be given several times')
    parser.add_argument("--steps", type=int, default=60, help="training steps on each mesh (default: 60)")
    parser.add_argument("--plan-only", action="store_true", help="print the plan and stop")
    parser.add_argument("--html", metavar="FILE", help="for --plan-only: also write the last plan as a page")
    args = parser.parse_args()
    meshes = [lm.create_mesh(text) for text in args.mesh or ["batch=2,model=4", "batch=4,model=2"]]
    if args.plan_only:
        for mesh in meshes:
            plan = lm.plan(make_gpt, make_layout_map(mesh), inputs=EXAMPLE)
            print(plan)
            if args.html:
                pathlib.Path(args.html).write_text(plan.to_html(), encoding="utf-8")
        return
    runs = {str(mesh): train(mesh, args.steps) for mesh in meshes}
    if len(runs) > 1:
        print("\n== the same model, the same seed, the same text\n")
        for mesh, losses in runs.items():
            print(f"   mesh {mesh:<16} first loss {losses[0]:.4f}   last loss {losses[-1]:.4f}")
        table = np.array(list(runs.values()))
        print(f"\n   largest difference between two losses of one step: {np.ptp(table, axis=0).max():.1e}")
    show_misspelt_rule(meshes[0])
    show_next_steps()


if __name__ == "__main__":
    main()
