"""Compare the time of one training step of Keras on JAX by three methods.

    python benchmarks/step.py                      micro and tiny, 5 rounds
    python benchmarks/step.py --model tiny --rounds 3
    python benchmarks/step.py --parts              the time of placing a batch, and the collectives of a step

The methods are `fit` on a model of this library, `fit` under Keras's own ModelParallel, and "by hand": a `jax.jit` step
with the shardings of all arguments and results. They take turns, each in a fresh process. All use the same model, Keras
optimizer, layouts, and batches, on 8 simulated devices in a 2x4 mesh. The first pass compiles and does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial

from create import create
from measure import (
    EIGHT_DEVICES,
    compute_median,
    format_spread,
    make_parser,
    run_method,
    run_rounds,
    time_call,
)

METHODS = ("layoutmap", "ModelParallel", "by hand")
SIZES = {"micro": (8, 16, 60), "tiny": (16, 64, 12)}  # batch, length, steps


def measure_method(method: str, model_name: str) -> None:
    """Train one model in this process, and print the measurements as JSON."""
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
        run = make_explicit_loop(model, loss, batch)
    else:

        def run(x, y):
            history = model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
            return history.history["loss"][-1]

    for _ in range(4):
        seconds, last = time_call(lambda: run(x, y))
        times.append(seconds / steps)
    print(json.dumps({"first": times[0] * steps, "step": statistics.median(times[1:]), "loss": float(last)}))


def make_explicit_loop(model, loss, batch: int):
    """Return a training loop that uses `jax.jit` and shardings directly."""
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
    replicated = NamedSharding(mesh, PartitionSpec())
    state = jax.tree.map(
        lambda a: a if isinstance(a.sharding, NamedSharding) else jax.device_put(a, replicated), state
    )
    shardings = jax.tree.map(lambda a: a.sharding, state)
    split = NamedSharding(mesh, PartitionSpec("batch", None))

    def step(state, x, y):
        trainable, other, slots = state

        def compute_loss(trainable):
            out, new_other = model.stateless_call(trainable, other, x)
            return loss(y, out), new_other

        (value, other), gradients = jax.value_and_grad(compute_loss, has_aux=True)(trainable)
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
        return float(jnp.mean(jnp.stack(losses)))  # waits for the steps

    return run


def measure_parts() -> None:
    """Print the time of placing ten arrays, and the collectives in the step of an MLP of 12 layers."""
    import os
    import warnings

    os.environ |= EIGHT_DEVICES | {"KERAS_BACKEND": "jax"}
    import jax
    import keras
    import numpy as np
    from keras.src.backend.jax.trainer import _distribute_data

    import layoutmap as lm
    from layoutmap.adapters.keras.backends.jax_steps import place_on_mesh
    from layoutmap.adapters.keras.wraps import get_session

    warnings.simplefilter("ignore", lm.LayoutMapWarning)

    def make_model():
        layers = [keras.layers.Dense(64, activation="relu", name=f"d{i}") for i in range(12)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        model.compile("adam", "mse")
        return model

    # The last bias has no rule, so it stays replicated.
    rules = {f"d{i}.kernel": (None, "model") for i in range(12)} | {
        f"d{i}.bias": ("model",) for i in range(11)
    }
    with lm.LayoutMap(lm.create_mesh("batch=2,model=4"), rules).scope(batch_dim="batch"):
        own = make_model()
    distribution = keras.distribution
    devices = distribution.DeviceMesh((2, 4), ("batch", "model"), [f"cpu:{i}" for i in range(8)])
    keras_map = distribution.LayoutMap(devices)
    for path, specs in rules.items():
        keras_map[".*" + path.replace(".", "/")] = specs
    parallel = distribution.ModelParallel(layout_map=keras_map, batch_dim_name="batch")
    with parallel.scope():
        keras_model = make_model()

    arrays = tuple(np.ones((64, 64), np.float32) for _ in range(10))

    def place_by_keras():
        with parallel.scope():
            return _distribute_data(arrays)

    print("placing 10 arrays of 64 x 64     ms for each, the best of 200")
    for name, place in (
        ("layoutmap", lambda: place_on_mesh(arrays, get_session(own))),
        ("Keras", place_by_keras),
    ):
        seconds = min(time_call(lambda p=place: jax.block_until_ready(p()))[0] for _ in range(200))
        print(f"{name:<32} {100 * seconds:.3f}")

    print("\ncollectives of a step             all-gather  all-reduce")
    batch = place_on_mesh(arrays[:2], get_session(own))
    for name, model, pinned in (
        ("layoutmap", own, False),
        ("ModelParallel, fit in its scope", keras_model, True),
        ("ModelParallel, fit outside", keras_model, False),
    ):
        with parallel.scope() if model is keras_model else jax.default_device(None):
            model.train_on_batch(arrays[0], arrays[1])
        groups = [model.trainable_variables, model.non_trainable_variables]
        groups += [model.optimizer.variables, model.metrics_variables]
        state = tuple([v.value for v in group] for group in groups)
        results = (None, jax.tree.map(lambda array: array.sharding, state)) if pinned else None
        text = jax.jit(model.train_step, out_shardings=results).lower(state, batch).compile().as_text()
        counts = [
            text.count(f" {kind}(") + text.count(f" {kind}-start(") for kind in ("all-gather", "all-reduce")
        ]
        print(f"{name:<32}  {counts[0]:>10}  {counts[1]:>10}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", action="append", choices=SIZES, help="may be given several times")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument(
        "--parts", action="store_true", help="measure placing a batch, and collectives, instead"
    )
    args = parser.parse_args()
    if args.parts:
        measure_parts()
        return
    if args.child:
        measure_method(args.child, args.model[0])
        return
    for model_name in args.model or list(SIZES):
        run = partial(run_method, __file__, model=model_name)
        runs = run_rounds(METHODS, args.rounds, run, f"{model_name}: ")
        base = compute_median(runs["by hand"], "step")
        print(f"\n{model_name}: {args.rounds} rounds, medians (smallest-largest)")
        print("method          ms per step               ratio  first pass s  last loss")
        for method, results in runs.items():
            spread = format_spread([1000 * run["step"] for run in results])
            ratio, first = compute_median(results, "step") / base, compute_median(results, "first")
            print(f"{method:<14}  {spread:<24}  {ratio:.3f} {first:>13.1f} {results[0]['loss']:>10.4f}")


if __name__ == "__main__":
    main()
