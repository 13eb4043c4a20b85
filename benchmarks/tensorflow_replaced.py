"""Compare training steps on TensorFlow with and without this library's replacements of `einsum` and `repeat`.

    python benchmarks/tensorflow_replaced.py               all cases: some minutes
    python benchmarks/tensorflow_replaced.py --rounds 20 --case attention

DTensor's `einsum` is wrong for some layouts, and its gradient of `repeat` fails for some, so this library replaces both
(`adapters/keras/backends/tensorflow_products.py`, `tensorflow_windows.py`). The benchmark builds each model twice in
one process, with and without the replacements, on 8 simulated devices. The two train in turns, 20 steps in each round.
In these layouts TensorFlow's own functions are right, so the losses must agree. "first step" traces and compiles.
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
from measure import make_parser, time_call  # noqa: E402

from layoutmap.adapters.keras.backends import tensorflow_functions as functions  # noqa: E402
from layoutmap.engines.patches import PatchGroup  # noqa: E402

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
    """Return a model with this layer between two dense layers."""
    x = keras.Input((LENGTH, WIDTH))
    y = L.Dense(WIDTH, name="d")(x)
    inner = layer()
    y = inner(y) if isinstance(inner, L.EinsumDense) else inner(y, y)
    model = keras.Model(x, L.Dense(4, name="out")(y))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def compare(name: str, rounds: int) -> None:
    """Train both models in turns, and print the median ratio of their rounds."""
    layer, rules = CASES[name]
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS * STEPS, LENGTH, WIDTH)).astype("float32")
    y = random.normal(size=(ROWS * STEPS, LENGTH, 4)).astype("float32")
    original, firsts, losses, models = functions._PATCHES, [], [], []
    without = PatchGroup([each for each in original._patches if each._name not in REPLACED])  # pyright: ignore[reportAttributeAccessIssue]
    for patches in (original, without):
        keras.utils.set_random_seed(0)
        layout_map = lm.LayoutMap("batch=2,model=4", rules, rest="replicated")
        model = layout_map.build(lambda: make_model(layer), batch_dim="batch")
        functions._PATCHES = patches  # the trace of a step reads it
        first, loss = time_call(lambda model=model: float(model.train_on_batch(x[:ROWS], y[:ROWS])))
        losses.append([loss])
        firsts.append(first)
        model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
        models.append(model)
    functions._PATCHES = original
    seconds: list[list[float]] = [[], []]
    for number in range(rounds):
        for index in (0, 1) if number % 2 else (1, 0):
            start = time.perf_counter()
            history = models[index].fit(x, y, batch_size=ROWS, shuffle=False, verbose=0).history
            seconds[index].append((time.perf_counter() - start) / STEPS)
            losses[index] += history["loss"]
    same = np.allclose(*losses, rtol=1e-4)
    ratios = [replaced / original for replaced, original in zip(*seconds, strict=True)]
    replaced_ms, original_ms = (1000 * statistics.median(each) for each in seconds)
    print(
        f"{name:<24} step {replaced_ms:.1f} / {original_ms:.1f} ms, median of ratios {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f}-{max(ratios):.2f}); first step {firsts[0]:.1f} / {firsts[1]:.1f} s; "
        f"losses {'are the same' if same else 'DIFFER'}",
        flush=True,
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    for name in args.case or CASES:
        compare(name, args.rounds)


if __name__ == "__main__":
    main()
