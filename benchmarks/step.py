"""What one training step costs.

    python benchmarks/step.py                      micro and tiny, 5 rounds
    python benchmarks/step.py --model tiny --rounds 3

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
    """A training loop as one writes it without a library's `fit`."""
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", choices=SIZES, help="may be given several times")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", choices=METHODS, help=argparse.SUPPRESS)
    args = parser.parse_args()
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
