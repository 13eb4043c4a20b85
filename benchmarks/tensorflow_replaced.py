"""What a training step on TensorFlow costs by products and repeats that stand in the place of TensorFlow's own.

    python benchmarks/tensorflow_replaced.py               all cases: some minutes
    python benchmarks/tensorflow_replaced.py --rounds 20 --case attention

DTensor's `einsum` is wrong for some layouts, and its gradient of `repeat` fails for some, so others take their place
(`adapters/keras/backends/tensorflow_products.py`, `tensorflow_windows.py`). Here each model is built twice in one
process, its steps compiled with and without them, and trained in turns, a round of 20 steps each, on 8 simulated
devices. The layouts are ones for which TensorFlow's own are right: the losses of both are compared. "first step" is the
first one, which traces and compiles.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import layoutmap as lm

lm.simulate_devices(8, "tensorflow")

import keras  # noqa: E402
import numpy as np  # noqa: E402

from layoutmap.adapters.keras.backends import tensorflow_functions as functions  # noqa: E402
from layoutmap.engines.patches import Patches  # noqa: E402

L = keras.layers
ROWS, LENGTH, WIDTH, HEADS, STEPS = 8, 32, 64, 8, 20
REPLACED = ("einsum", "repeat")
HEADS_OUT, HEADS_IN = (None, "model", None), ("model", None, None)
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "attention": (
        lambda: L.MultiHeadAttention(HEADS, WIDTH // HEADS, name="a"),
        {r"a\.(query|key|value)_dense\.kernel": HEADS_OUT, r"a\.output_dense\.kernel": HEADS_IN},
    ),
    "grouped queries": (
        lambda: L.GroupQueryAttention(WIDTH // HEADS, HEADS, HEADS // 2, name="a"),
        {r"a\..*(query|key|value)_dense\.kernel": HEADS_OUT, r"a\..*output_dense\.kernel": HEADS_IN},
    ),
    "a product over one axis": (
        lambda: L.EinsumDense("abc,cd->abd", (None, 4 * WIDTH), name="a"),
        {r"a\.kernel": (None, "model")},
    ),
}


def make_model(layer: Callable[[], Any]) -> Any:
    """Return a model with one layer of a kind between two dense ones."""
    x = keras.Input((LENGTH, WIDTH))
    y = L.Dense(WIDTH, name="d")(x)
    made = layer()
    y = made(y) if isinstance(made, L.EinsumDense) else made(y, y)
    model = keras.Model(x, L.Dense(4, name="out")(y))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def compare(name: str, rounds: int) -> None:
    """Train both in turns, and print the median of the ratios of each two rounds."""
    layer, rules = CASES[name]
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS * STEPS, LENGTH, WIDTH)).astype("float32")
    y = random.normal(size=(ROWS * STEPS, LENGTH, 4)).astype("float32")
    all_of_them, firsts, losses, models = functions._PATCHES, [], [], []
    without = Patches([each for each in all_of_them._patches if each._name not in REPLACED])
    for patches in (all_of_them, without):
        keras.utils.set_random_seed(0)
        layout_map = lm.LayoutMap("batch=2,model=4", rules, rest="replicated")
        model = layout_map.build(lambda: make_model(layer), batch_dim="batch")
        functions._PATCHES = patches  # looked up while a step is traced
        start = time.perf_counter()
        losses.append([float(model.train_on_batch(x[:ROWS], y[:ROWS]))])
        firsts.append(time.perf_counter() - start)
        model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
        models.append(model)
    functions._PATCHES = all_of_them
    seconds: list[list[float]] = [[], []]
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            start = time.perf_counter()
            history = models[which].fit(x, y, batch_size=ROWS, shuffle=False, verbose=0).history
            seconds[which].append((time.perf_counter() - start) / STEPS)
            losses[which] += history["loss"]
    same = np.allclose(*losses, rtol=1e-4)
    ratios = [ours / own for ours, own in zip(*seconds, strict=True)]
    ours, own = (1000 * statistics.median(each) for each in seconds)
    print(
        f"{name:<24} step {ours:.1f} / {own:.1f} ms, median of ratios {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f}-{max(ratios):.2f}); first step {firsts[0]:.1f} / {firsts[1]:.1f} s; "
        f"losses {'are the same' if same else 'DIFFER'}",
        flush=True,
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    for name in asked.case or CASES:
        compare(name, asked.rounds)


if __name__ == "__main__":
    main()
