"""What creating a model and training it costs on TensorFlow's DTensor, compared with plain Keras on one device.

    python benchmarks/tensorflow_step.py                          all models, 3 rounds: some minutes
    python benchmarks/tensorflow_step.py --model mlp --rounds 5
    python benchmarks/tensorflow_step.py --model blocks-1 --model blocks-2 --jit-compile no
    python benchmarks/tensorflow_step.py --drawn 10 --seed 36     models and maps that a seed draws

Two ways, each in a fresh process, taken in turns: plain Keras, and this library on 8 simulated devices in a 2x4 mesh,
which share the cores that plain Keras has for itself. The same model, weights, batch and optimizer; the losses are
compared. `mlp` is two dense layers, `blocks-N` a decoder of N blocks, width 64, 32 tokens, 8 rows.

"create" runs from the first line of the model to its weights being there; imports are not counted. "first step" is the
first `train_on_batch`, which traces and compiles; "step" is the median over epochs of `fit`, by its 20 steps, after an
epoch that is not counted. Drawn models take both ways in one process, an epoch of each in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from create import MESH, measure, preload
from drawn_sizes import spread

METHODS = ("plain Keras", "layoutmap")
MODEL_NAMES = ("mlp", "blocks-1", "blocks-2", "blocks-4")
BATCH, LENGTH, STEPS, EPOCHS = 8, 32, 20, 5
JIT_COMPILE = {"auto": "auto", "yes": True, "no": False}


def child(method: str, model_name: str, jit_compile: str) -> None:
    """One measurement, in this process; prints it as JSON."""
    import keras
    import numpy as np
    import tensorflow as tf
    from models import MLP_RULES, RULES, make_model

    if method == "layoutmap":
        tf.experimental.dtensor.initialize_accelerator_system("CPU", num_logical_cpu_devices=8)
        preload("tensorflow")
    import layoutmap as lm

    random = np.random.default_rng(0)
    if model_name == "mlp":
        x, y = random.normal(size=(BATCH, 64)).astype("float32"), random.integers(0, 64, (BATCH,), "int32")
    else:
        text = random.integers(0, 256, (BATCH, LENGTH + 1), "int32")
        x, y = text[:, :-1], text[:, 1:]
    keras.utils.set_random_seed(0)
    # What a process does once is no part of what a model costs: making its devices, and on the mesh the check that
    # steps are computed right.
    if method == "layoutmap":
        lm.DVariable(np.zeros(8, "float32"), layout=lm.Layout(["model"], lm.create_mesh(MESH)))

    start = time.perf_counter()
    if method == "layoutmap":
        layout_map = lm.LayoutMap(lm.create_mesh(MESH), MLP_RULES if model_name == "mlp" else RULES)
        model = layout_map.build(lambda: make_model(model_name), inputs=x, batch_dim="batch")
    else:
        model = make_model(model_name)
        model(keras.KerasTensor(x.shape, str(x.dtype)))
    created = time.perf_counter() - start
    model.compile(
        optimizer=keras.optimizers.AdamW(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=JIT_COMPILE[jit_compile],
    )
    start = time.perf_counter()
    losses = [float(model.train_on_batch(x, y))]
    first = time.perf_counter() - start
    times: list[float] = []
    x, y = (np.concatenate([part] * STEPS) for part in (x, y))
    for _ in range(1 + EPOCHS):
        start = time.perf_counter()
        losses += model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0).history["loss"]
        times.append((time.perf_counter() - start) / STEPS)
    print(
        json.dumps(
            {"create": created, "first": first, "step": statistics.median(times[1:]), "losses": losses}
        )
    )


def drawn_child(seed: int) -> None:
    """One drawn model in its drawn map, beside the plain one in this process; prints the seconds of steps as JSON."""
    import tensorflow as tf

    tf.experimental.dtensor.initialize_accelerator_system("CPU", num_logical_cpu_devices=8)
    import keras
    import numpy as np

    from layoutmap.testing import models

    case = models.draw(seed).to_sgd()
    keras.utils.set_random_seed(0)
    plain = case.make_model()
    keras.utils.set_random_seed(0)
    mapped = case.layout_map.build(case.make_model, inputs=case.batch[0], batch_dim=case.map.batch_dim)
    rows = len(keras.tree.flatten(case.batch)[0])
    batch = keras.tree.map_structure(lambda part: np.concatenate([part] * STEPS), case.batch)
    times: list[list[float]] = [[], []]
    losses: list[list[float]] = [[], []]
    for _ in range(1 + EPOCHS):
        for number, model in enumerate((plain, mapped)):
            start = time.perf_counter()
            fitted = model.fit(*batch, batch_size=rows, shuffle=False, verbose=0)
            times[number].append((time.perf_counter() - start) / STEPS)
            losses[number] += fitted.history["loss"]
    own, ours = (statistics.median(each[1:]) for each in times)
    count = collectives(lambda: mapped.fit(*batch, batch_size=rows, shuffle=False, verbose=0)) / 8 / STEPS
    print(json.dumps({"steps": [own, ours], "collectives": count, "losses": losses}))


def collectives(run: Callable[[], object]) -> int:
    """How many collectives devices take part in, counted by TensorFlow's profiler."""
    import tensorflow as tf
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder):
            run()
        (found,) = Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(found.read_bytes())
    return sum(
        ":Collective" in plane.event_metadata[event.metadata_id].name
        for plane in space.planes
        for line in plane.lines
        for event in line.events
    )


def drawn(count: int, seed: int) -> None:
    """Drawn models, and the median and the worst of their ratios, and what a collective takes."""
    ratios: list[float] = []
    counts: list[float] = []
    more: list[float] = []
    for number in range(seed, seed + count):
        told = measure(str(number), "mlp", "--drawn-child", __file__, "tensorflow")
        own, ours = told["steps"]
        ratios.append(ours / own)
        counts.append(told["collectives"])
        more.append(1000 * (ours - own))
        milliseconds = f"{1000 * ours:.1f} / {1000 * own:.1f} ms = {ratios[-1]:.1f}"
        print(f"{number}: {milliseconds}, {counts[-1]:.0f} collectives", flush=True)
    print(spread("a step", ratios))
    (each, none), fits = statistics.linear_regression(counts, more), statistics.correlation(counts, more)
    print(
        f"more than plain Keras: {none:.1f} ms, and {each:.2f} for each collective (correlation {fits:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", choices=MODEL_NAMES, help="may be given several times")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--jit-compile", choices=JIT_COMPILE, default="auto", help="passed to Keras's compile (auto)"
    )
    parser.add_argument("--drawn", type=int, help="how many models to draw, in place of --model")
    parser.add_argument("--seed", type=int, default=0, help="the first model to be drawn")
    parser.add_argument("--child", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--drawn-child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.drawn_child is not None:
        drawn_child(args.drawn_child)
        return
    if args.drawn:
        drawn(args.drawn, args.seed)
        return
    if args.child:
        child(args.child, args.model[0], args.jit_compile)
        return
    for model_name in args.model or MODEL_NAMES:
        runs: dict[str, list[dict]] = {method: [] for method in METHODS}
        for number in range(args.rounds):
            for method in METHODS:
                print(
                    f"\r{model_name}: round {number + 1}/{args.rounds} {method:<14}", end="", file=sys.stderr
                )
                more = ("--jit-compile", args.jit_compile)
                runs[method].append(
                    measure(method, model_name, script=__file__, backend="tensorflow", more=more)
                )
        print("\r\x1b[K", end="", file=sys.stderr)
        report(model_name, runs)


def report(model_name: str, runs: dict[str, list[dict]]) -> None:
    """Medians and ratios of one model."""

    def spread(method: str, key: str, scale: float, digits: int) -> tuple[float, str]:
        values = [scale * run[key] for run in runs[method]]
        middle = statistics.median(values)
        return middle, f"{middle:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"

    plain, mapped = (runs[method][0]["losses"] for method in METHODS)
    if any(abs(a - b) > 1e-3 * max(a, 1) for a, b in zip(plain, mapped, strict=True)):
        print("WARNING: the methods gave different losses")
    print(f"\n{model_name}: {len(runs['layoutmap'])} rounds, medians (smallest-largest)")
    print(f"{'':<14}  {'plain Keras':<22}  {'layoutmap':<22}  ratio")
    for key, what, scale, digits in (
        ("create", "create s", 1, 2),
        ("first", "first step s", 1, 2),
        ("step", "step ms", 1000, 1),
    ):
        (own, own_text), (ours, ours_text) = (spread(method, key, scale, digits) for method in METHODS)
        print(f"{what:<14}  {own_text:<22}  {ours_text:<22}  {ours / own:.1f}")


if __name__ == "__main__":
    main()
