"""What one training step costs.

    python benchmarks/step.py                      micro and tiny, 5 rounds
    python benchmarks/step.py --model tiny --rounds 3
    python benchmarks/step.py --parts                    what placing a batch costs, and the collectives of a step

Three ways, each in a fresh process, taken in turns: `fit` on a model of this library; `fit` under Keras's own
ModelParallel; and a step written by hand with `jax.jit`, the shardings of all arguments and results given. The same
model, the same Keras optimizer, the same layouts, the same batches, on 8 simulated devices in a 2x4 mesh. The first
pass compiles and is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from create import create, measure

METHODS = ("layoutmap", "ModelParallel", "by hand")
SIZES = {"micro": (8, 16, 60), "tiny": (16, 64, 12)}  # batch, length, steps


def child(method: str, model_name: str) -> None:
    """One measurement, in this process; prints it as JSON."""
    import jax
    import keras
    import numpy as np
    from models import MODELS

    batch, length, steps = SIZES[model_name]
    text = np.random.default_rng(0).integers(
        0, MODELS[model_name]["vocabulary"], (batch * steps, length + 1), "int32"
    )
    x, y = text[:, :-1], text[:, 1:]
    keras.utils.set_random_seed(0)
    model = create("layoutmap" if method == "by hand" else method, model_name, batch_dim="batch")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.AdamW(1e-3), loss=loss)
    times: list[float] = []
    if method == "by hand":
        run = by_hand(model, loss, batch)
    else:

        def run(x, y):
            history = model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
            return history.history["loss"][-1]

    for _ in range(4):
        start = time.perf_counter()
        last = run(x, y)
        times.append((time.perf_counter() - start) / steps)
    del jax
    print(json.dumps({"first": times[0] * steps, "step": statistics.median(times[1:]), "loss": float(last)}))


def by_hand(model, loss, batch: int):
    """Return a training loop as one writes it without a library's `fit`."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    mesh = model.trainable_variables[0].value.sharding.mesh
    state = tuple(
        [v.value for v in group]
        for group in (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    state = jax.tree.map(
        lambda a: a if isinstance(a.sharding, NamedSharding) else jax.device_put(a, everywhere), state
    )
    shardings = jax.tree.map(lambda a: a.sharding, state)
    split = NamedSharding(mesh, PartitionSpec("batch", None))

    def step(state, x, y):
        trainable, other, slots = state

        def loss_of(trainable):
            out, new_other = model.stateless_call(trainable, other, x)
            return loss(y, out), new_other

        (value, other), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        return value, (trainable, other, slots)

    compiled = jax.jit(step, donate_argnums=0, out_shardings=(None, shardings))

    def run(x, y):
        nonlocal state
        losses = []
        for start in range(0, len(x), batch):
            part = slice(start, start + batch)
            value, state = compiled(state, jax.device_put(x[part], split), jax.device_put(y[part], split))
            losses.append(value)
        return jnp.mean(jnp.stack(losses))

    def waited(x, y):
        return float(run(x, y))

    return waited


def parts() -> None:
    """Print what placing ten arrays costs, and count the collectives in the step of an MLP of 12 layers."""
    import os
    import warnings

    os.environ["KERAS_BACKEND"] = "jax"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    import jax
    import keras
    import numpy as np
    from keras.src.backend.jax.trainer import _distribute_data

    import layoutmap as lm
    from layoutmap.adapters.keras.backends.jax_steps import placed
    from layoutmap.adapters.keras.wraps import session_of

    warnings.simplefilter("ignore", lm.LayoutMapWarning)

    def make_model():
        layers = [keras.layers.Dense(64, activation="relu", name=f"d{i}") for i in range(12)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        model.compile("adam", "mse")
        return model

    # The last bias has no rule, and is to stay replicated.
    rules = {f"d{i}.kernel": (None, "model") for i in range(12)} | {
        f"d{i}.bias": ("model",) for i in range(11)
    }
    with lm.LayoutMap(lm.create_mesh("batch=2,model=4"), rules).scope(batch_dim="batch"):
        ours = make_model()
    distribution = keras.distribution
    devices = distribution.DeviceMesh((2, 4), ("batch", "model"), [f"cpu:{i}" for i in range(8)])
    theirs_map = distribution.LayoutMap(devices)
    for path, specs in rules.items():
        theirs_map[".*" + path.replace(".", "/")] = specs
    parallel = distribution.ModelParallel(layout_map=theirs_map, batch_dim_name="batch")
    with parallel.scope():
        theirs = make_model()

    arrays = tuple(np.ones((64, 64), np.float32) for _ in range(10))

    def theirs_placed():
        with parallel.scope():
            return _distribute_data(arrays)

    print("placing 10 arrays of 64 x 64     ms for each, the best of 200")
    for name, place in (("layoutmap", lambda: placed(arrays, session_of(ours))), ("Keras", theirs_placed)):
        print(
            f"{name:<32} {100 * min(seconds(lambda p=place: jax.block_until_ready(p())) for _ in range(200)):.3f}"
        )

    print("\ncollectives of a step             all-gather  all-reduce")
    batch = placed(arrays[:2], session_of(ours))
    for name, model, pinned in (
        ("layoutmap", ours, False),
        ("ModelParallel, fit in its scope", theirs, True),
        ("ModelParallel, fit outside", theirs, False),
    ):
        with parallel.scope() if model is theirs else jax.default_device(None):
            model.train_on_batch(arrays[0], arrays[1])
        groups = [model.trainable_variables, model.non_trainable_variables]
        groups += [model.optimizer.variables, model.metrics_variables]
        state = tuple([v.value for v in group] for group in groups)
        kept = (None, jax.tree.map(lambda array: array.sharding, state)) if pinned else None
        text = jax.jit(model.train_step, out_shardings=kept).lower(state, batch).compile().as_text()
        counts = [
            text.count(f" {kind}(") + text.count(f" {kind}-start(") for kind in ("all-gather", "all-reduce")
        ]
        print(f"{name:<32}  {counts[0]:>10}  {counts[1]:>10}")


def seconds(function) -> float:
    """Return how long one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", action="append", choices=SIZES, help="may be given several times")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--parts", action="store_true", help="placing a batch, and collectives, instead")
    args = parser.parse_args()
    if args.parts:
        parts()
        return
    if args.child:
        child(args.child, args.model[0])
        return
    for model_name in args.model or list(SIZES):
        runs: dict[str, list[dict]] = {method: [] for method in METHODS}
        for number in range(args.rounds):
            for method in METHODS:
                print(
                    f"\r{model_name}: round {number + 1}/{args.rounds} {method:<14}", end="", file=sys.stderr
                )
                runs[method].append(measure(method, model_name, script=__file__))
        print("\r\x1b[K", end="", file=sys.stderr)
        hand = statistics.median(run["step"] for run in runs["by hand"])
        print(f"\n{model_name}: {args.rounds} rounds, medians (smallest-largest)")
        print("method          ms per step               ratio  first pass s  last loss")
        for method, results in runs.items():
            steps = [1000 * run["step"] for run in results]
            spread = f"{statistics.median(steps):.2f} ({min(steps):.2f}-{max(steps):.2f})"
            first = statistics.median(run["first"] for run in results)
            print(
                f"{method:<14}  {spread:<24}  {statistics.median(steps) / 1000 / hand:.3f} {first:>13.1f} "
                f"{results[0]['loss']:>10.4f}"
            )


if __name__ == "__main__":
    main()
