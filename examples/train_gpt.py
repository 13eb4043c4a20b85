"""Train a small GPT on the text of Python's own standard library, every weight laid out by name.

    python examples/train_gpt.py                                      on two meshes of 8 simulated devices
    python examples/train_gpt.py --mesh batch=8 --steps 100           on another mesh
    python examples/train_gpt.py --mesh batch=2,model=4 --plan-only   only the plan; nothing is allocated
    python examples/train_gpt.py --plan-only --html plan.html         and as a page for a browser

For each mesh it prints the plan, creates the model in its layouts, shows what each device holds, and trains.
The losses are the same on every mesh. Then a rule is misspelt, and the plan says so.
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
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Keras looks for TensorFlow, which then talks

import keras
import numpy as np

import layoutmap as lm

lm.simulate_devices(8)  # leave it out where there are as many devices

VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS = 128, 64, 64, 4, 2
BATCH = 16
EXAMPLE = np.zeros((BATCH, LENGTH), "int32")  # what the model is called with

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
    """Attention, then two dense layers; both with a normalization before and a residual connection."""

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
    """Return the model, compiled; plain Keras, which knows nothing of meshes."""
    model = GPT()
    model.compile(
        optimizer=keras.optimizers.AdamW(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def standard_library_text(num_batches: int) -> np.ndarray:
    """Return rows of characters from the sources of Python's standard library: shape (rows, LENGTH + 1)."""
    wanted = num_batches * BATCH * (LENGTH + 1)
    text = b""
    for path in sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += bytes(c for c in path.read_bytes() if c < VOCABULARY)
        if len(text) >= wanted:
            break
    rows = np.frombuffer(text[:wanted], np.uint8).reshape(-1, LENGTH + 1).astype("int32")
    return np.random.default_rng(0).permutation(rows)


def train(mesh: lm.Mesh, steps: int) -> list[float]:
    """Plan, create and train on one mesh; return the loss of every step."""
    layout_map = layout_map_on(mesh)
    plan = lm.plan(make_gpt, layout_map, inputs=EXAMPLE, strict=True)
    print(f"\n== mesh {mesh}: the plan, nothing allocated\n\n{plan}\n")

    keras.utils.set_random_seed(0)
    start = time.perf_counter()
    batch_dim = "batch" if "batch" in mesh else None
    model = layout_map.build(make_gpt, inputs=EXAMPLE, strict=True, batch_dim=batch_dim)
    print(f"== created in {time.perf_counter() - start:.1f} s; what each device holds of the weights\n")
    show_devices(model)

    rows = standard_library_text(steps)
    x, y = rows[:, :-1], rows[:, 1:]
    losses: list[float] = []
    log = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, logs: losses.append(float(logs["loss"]))
    )
    start = time.perf_counter()
    model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0, callbacks=[log])
    seconds = time.perf_counter() - start
    # Keras reports the mean loss since the epoch began; take that apart into the loss of each step.
    totals = np.array(losses) * np.arange(1, len(losses) + 1)
    each = np.diff(totals, prepend=0.0)
    print(f"\n== trained {len(each)} steps in {seconds:.1f} s on {x.size:,} characters\n")
    for step in sorted({0, *range(4, len(each), 10), len(each) - 1}):
        print(f"   step {step + 1:>4}   loss {each[step]:.4f}")
    return list(each)


def show_devices(model: keras.Model) -> None:
    """One line for each device: how many bytes of weights it really holds."""
    held: dict[str, int] = {}
    for variable in model.variables:
        for shard in variable.value.addressable_shards:
            held[str(shard.device)] = held.get(str(shard.device), 0) + shard.data.nbytes
    total = sum(v.value.nbytes for v in model.variables)
    for device, num_bytes in held.items():
        print(f"   {device:<10} {num_bytes:>9,} bytes  {'#' * round(40 * num_bytes / total)}")
    print(f"   {'the model':<10} {total:>9,} bytes  {'#' * 40}")


def show_a_rule_that_fails(mesh: lm.Mesh) -> None:
    """Misspell a rule; elsewhere its weights would be replicated, and nothing would say so."""
    right, wrong = r"down\.kernel", r"down\.kernal"
    rules = {pattern.replace(right, wrong): specs for pattern, specs in RULES.items()}
    print(f"\n== a misspelt rule, {wrong} for {right}: refused before anything is made\n")
    try:
        lm.plan(make_gpt, layout_map_on(mesh, rules), inputs=EXAMPLE, strict=True)
    except lm.PlanError as error:
        print(error)


def show_what_is_next() -> None:
    """What to type and to read after this."""
    print(f"""
== next

   {os.path.relpath(sys.executable)} {os.path.relpath(__file__)} --plan-only --mesh batch=4,model=4 --html plan.html
      the plan for 16 devices, as a page for a browser
   change RULES in {os.path.relpath(__file__)}, and see what the plan says
   docs/get-started/keras.md, or nnx.md, pytrees.md, torch.md, tensorflow.md
      the same for a model of your own, in a minute""")


def layout_map_on(mesh: lm.Mesh, rules: Mapping[str, Specs] = RULES) -> lm.LayoutMap:
    """Return the rules on a mesh that may lack one of the dims: axes are not sharded over that one."""
    on_mesh = {
        pattern: [each if each in mesh else None for each in specs] for pattern, specs in rules.items()
    }
    return lm.LayoutMap(mesh, on_mesh)


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
            plan = lm.plan(make_gpt, layout_map_on(mesh), inputs=EXAMPLE)
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
    show_a_rule_that_fails(meshes[0])
    show_what_is_next()


if __name__ == "__main__":
    main()
