"""Compare creating and training a model on TensorFlow's DTensor with Keras on one device.

    python benchmarks/tensorflow_step.py                          all models, 3 rounds: some minutes
    python benchmarks/tensorflow_step.py --model mlp --rounds 5
    python benchmarks/tensorflow_step.py --model blocks-1 --model blocks-2 --jit-compile no
    python benchmarks/tensorflow_step.py --drawn 10 --seed 36     random models and maps

The methods are "plain Keras", unsharded on one device, and this library on 8 simulated devices in a 2x4 mesh, which
share the same cores. They take turns, each in a fresh process, with the same model, weights, batch, and optimizer.
Their losses are compared. `mlp` has two dense layers. `blocks-N` is a decoder of N blocks, width 64, 32 tokens, 8 rows.

"create" runs from the first line of the model until its weights exist, without imports. "first step" is the first
`train_on_batch`, which traces and compiles. "step" is the median time of an epoch of `fit`, divided by its 20 steps,
after one epoch that does not count. With `--drawn`, both methods run in one process and take turns by epochs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from create import MESH, import_adapters
from measure import describe_ratios, format_spread, make_parser, run_method, run_rounds

METHODS = ("plain Keras", "layoutmap")
MODEL_NAMES = ("mlp", "blocks-1", "blocks-2", "blocks-4")
BATCH, LENGTH, STEPS, EPOCHS = 8, 32, 20, 5
JIT_COMPILE = {"auto": "auto", "yes": True, "no": False}


def measure_method(method: str, model_name: str, jit_compile: str) -> None:
    """Create and train one model in this process, and print the measurements as JSON."""
    import keras
    import numpy as np
    import tensorflow as tf
    from models import MLP_RULES, RULES, make_model

    if method == "layoutmap":
        tf.experimental.dtensor.initialize_accelerator_system("CPU", num_logical_cpu_devices=8)
        import_adapters("tensorflow")
    import layoutmap as lm

    random = np.random.default_rng(0)
    if model_name == "mlp":
        x, y = random.normal(size=(BATCH, 64)).astype("float32"), random.integers(0, 64, (BATCH,), "int32")
    else:
        text = random.integers(0, 256, (BATCH, LENGTH + 1), "int32")
        x, y = text[:, :-1], text[:, 1:]
    keras.utils.set_random_seed(0)
    # The first DVariable of a process creates the devices and checks the mesh, so create one before the timer starts.
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


def measure_drawn_model(seed: int) -> None:
    """Train a random model unsharded and sharded in this process, and print the seconds of a step as JSON."""
    import tensorflow as tf

    tf.experimental.dtensor.initialize_accelerator_system("CPU", num_logical_cpu_devices=8)
    import keras
    import numpy as np

    from layoutmap.testing import models

    case = models.draw(seed).to_sgd()
    keras.utils.set_random_seed(0)
    unsharded = case.make_model()
    keras.utils.set_random_seed(0)
    sharded = case.layout_map.build(case.make_model, inputs=case.batch[0], batch_dim=case.map.batch_dim)
    rows = len(keras.tree.flatten(case.batch)[0])
    batch = keras.tree.map_structure(lambda part: np.concatenate([part] * STEPS), case.batch)
    times: list[list[float]] = [[], []]
    losses: list[list[float]] = [[], []]
    for _ in range(1 + EPOCHS):
        for number, model in enumerate((unsharded, sharded)):
            start = time.perf_counter()
            fitted = model.fit(*batch, batch_size=rows, shuffle=False, verbose=0)
            times[number].append((time.perf_counter() - start) / STEPS)
            losses[number] += fitted.history["loss"]
    medians = [statistics.median(each[1:]) for each in times]
    count = (
        count_collectives(lambda: sharded.fit(*batch, batch_size=rows, shuffle=False, verbose=0)) / 8 / STEPS
    )
    print(json.dumps({"steps": medians, "collectives": count, "losses": losses}))


def count_collectives(run: Callable[[], object]) -> int:
    """Return the number of collectives on all devices, from TensorFlow's profiler."""
    import tensorflow as tf
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder):
            run()
        (trace,) = Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(trace.read_bytes())  # pyright: ignore[reportAttributeAccessIssue]
    return sum(
        ":Collective" in plane.event_metadata[event.metadata_id].name
        for plane in space.planes
        for line in plane.lines
        for event in line.events
    )


def report_drawn(count: int, seed: int) -> None:
    """Print the ratios of random models, and the time of a collective by linear regression."""
    ratios: list[float] = []
    counts: list[float] = []
    overheads: list[float] = []
    for number in range(seed, seed + count):
        result = run_method(__file__, str(number), "mlp", flag="--drawn-child", backend="tensorflow")
        unsharded, sharded = result["steps"]
        ratios.append(sharded / unsharded)
        counts.append(result["collectives"])
        overheads.append(1000 * (sharded - unsharded))
        milliseconds = f"{1000 * sharded:.1f} / {1000 * unsharded:.1f} ms = {ratios[-1]:.1f}"
        print(f"{number}: {milliseconds}, {counts[-1]:.0f} collectives", flush=True)
    print(describe_ratios("a step", ratios))
    slope, intercept = statistics.linear_regression(counts, overheads)
    correlation = statistics.correlation(counts, overheads)
    print(
        f"more than plain Keras: {intercept:.1f} ms, and {slope:.2f} for each collective "
        f"(correlation {correlation:.2f})"
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", action="append", choices=MODEL_NAMES, help="may be given several times")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--jit-compile", choices=JIT_COMPILE, default="auto", help="passed to Keras's compile (auto)"
    )
    parser.add_argument("--drawn", type=int, help="number of random models, instead of --model")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first random model")
    parser.add_argument("--child", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--drawn-child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.drawn_child is not None:
        measure_drawn_model(args.drawn_child)
        return
    if args.drawn:
        report_drawn(args.drawn, args.seed)
        return
    if args.child:
        measure_method(args.child, args.model[0], args.jit_compile)
        return
    for model_name in args.model or MODEL_NAMES:
        options = (model_name, "--jit-compile", args.jit_compile)
        runs = run_rounds(
            METHODS,
            args.rounds,
            lambda method, options=options: run_method(__file__, method, *options, backend="tensorflow"),
            f"{model_name}: ",
        )
        report(model_name, runs)


def report(model_name: str, runs: dict[str, list[dict]]) -> None:
    """Print the medians and ratios of one model."""
    unsharded, sharded = (runs[method][0]["losses"] for method in METHODS)
    if any(abs(a - b) > 1e-3 * max(a, 1) for a, b in zip(unsharded, sharded, strict=True)):
        print("WARNING: the methods gave different losses")
    print(f"\n{model_name}: {len(runs['layoutmap'])} rounds, medians (smallest-largest)")
    print(f"{'':<14}  {'plain Keras':<22}  {'layoutmap':<22}  ratio")
    for key, title, scale, digits in (
        ("create", "create s", 1, 2),
        ("first", "first step s", 1, 2),
        ("step", "step ms", 1000, 1),
    ):
        columns = [[scale * run[key] for run in runs[method]] for method in METHODS]
        cells = [f"{format_spread(values, digits):<22}" for values in columns]
        ratio = statistics.median(columns[1]) / statistics.median(columns[0])
        print(f"{title:<14}  {'  '.join(cells)}  {ratio:.1f}")


if __name__ == "__main__":
    main()
