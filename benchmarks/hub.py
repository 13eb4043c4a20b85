"""Models of keras-hub with the presets of their families, compared with Keras's own ModelParallel.

    python benchmarks/hub.py                                    all families, 3 rounds: half an hour
    python benchmarks/hub.py --model llama gpt2 --rounds 1

The tiny models of the tests, of one block, on 8 simulated devices in a 2x4 mesh. Each measurement
is a fresh process, taken in turns: seconds from the first line of the model to the last array of
weights and slots being ready, and milliseconds of a training step, the median of 30 after the
first. ModelParallel gets the same layouts, one key for each variable by its exact Keras path.
"differs by" is the largest relative difference to one device that `layoutmap.check_parity` finds in
outputs, gradients and three steps of AdamW, with weights sharded over the model's dim and over
both; first weights must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from create import measure, preload

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "adapters")]  # the models of the tests
METHODS = ("layoutmap", "ModelParallel")
FAMILIES = ("llama", "gemma", "mixtral", "qwen", "vit", "whisper", "bert", "gpt2", "t5")
STEPS = 30


def make(name: str):
    """Return a model of one block, compiled."""
    import hub_models

    return hub_models.make(name, hub_models.TINY[name] | {"num_layers": 1})


def model_parallel(name: str):
    """Keras's own distribution, with the layouts of the preset."""
    import hub_models
    import keras

    from layoutmap.adapters.keras.paths import find_variables

    rules = hub_models.rules(name)
    mesh = keras.distribution.DeviceMesh((2, 4), ("batch", "model"), keras.distribution.list_devices())
    layout_map = keras.distribution.LayoutMap(mesh)
    keys = {}
    for found in find_variables(make(name)):
        layout = next((rules[p] for p in (found.path, *found.aliases) if rules[p]), None)
        if layout is not None:
            axes = tuple(None if spec == "unsharded" else spec for spec in layout.sharding_specs)
            # Keras has one path for several variables of T5, which have one layout.
            assert axes == keys.setdefault(found.variable.path, axes), found.variable.path
    for path, axes in keys.items():
        layout_map[path] = axes
    keras.utils.clear_session()  # so that the names that Keras numbers are those again
    return keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")


def child(method: str, name: str) -> None:
    """One measurement, in this process; prints it as JSON."""
    import hub_models
    import jax
    import keras
    import numpy as np

    preload()
    jax.block_until_ready([jax.device_put(np.zeros(1), device) for device in jax.devices()])
    x, y = hub_models.batch(name)
    if method == "ModelParallel":
        keras.distribution.set_distribution(model_parallel(name))
        jax.clear_caches()  # the programs that drew the model whose names were looked up
    layout_map = hub_models.rules(name)
    keras.utils.set_random_seed(0)
    start = time.perf_counter()
    if method == "layoutmap":
        model = layout_map.build(lambda: make(name), batch_dim="batch")
    else:
        model = make(name)
        model.optimizer.build(model.trainable_variables)
    jax.block_until_ready([v.value for v in (*model.variables, *model.optimizer.variables)])
    created = time.perf_counter() - start
    held = sum(v.value.addressable_shards[0].data.nbytes for v in model.variables)
    times: list[float] = []
    for _ in range(STEPS + 1):
        start = time.perf_counter()
        loss = float(model.train_on_batch(x, y, return_dict=True)["loss"])
        times.append(time.perf_counter() - start)
    step = statistics.median(times[1:])
    print(json.dumps({"created": created, "first": times[0], "step": step, "loss": loss, "held_bytes": held}))


def parity(name: str) -> None:
    """The parity of one model, sharded over one dim and over both; print the worse of each number as JSON."""
    import hub_models

    import layoutmap as lm

    reports = [
        lm.check_parity(
            lambda: make(name),
            hub_models.rules(name, **dims),
            hub_models.batch(name),
            batch_dim="batch",
            raises=False,
        )
        for dims in ({}, {"fsdp_dim": "batch"})
    ]
    found = {
        "agrees": all(report.agrees for report in reports),
        "worst": max(report.worst() for report in reports),
        "weights": max(report.worst("weights") for report in reports),
    }
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", choices=(*METHODS, "parity"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        (name,) = args.model
        parity(name) if args.child == "parity" else child(args.child, name)
        return
    print("         parity                create s                     step ms                      loss")
    print(
        "model    agrees, differs by    layoutmap  Keras's  ratio    layoutmap  Keras's  ratio    difference"
    )
    for name in args.model:
        runs: dict[str, list[dict]] = {method: [] for method in METHODS}
        for number in range(args.rounds):
            for method in METHODS:
                print(f"\r{name}: round {number + 1} {method:<14}", end="", file=sys.stderr)
                runs[method].append(measure(method, name, script=__file__))
        found = measure("parity", name, script=__file__)
        print("\r\x1b[K", end="", file=sys.stderr)
        middle = {
            (m, key): statistics.median(run[key] for run in runs[m])
            for m in METHODS
            for key in ("created", "step")
        }
        created, step = ([middle[m, key] for m in METHODS] for key in ("created", "step"))
        losses = [runs[m][0]["loss"] for m in METHODS]
        verdict = "yes" if found["agrees"] and not found["weights"] else "NO"
        print(
            f"{name:<8} {verdict:<6} {found['worst']:>11.1e} "
            f"{created[0]:>13.2f} {created[1]:>8.2f} {created[0] / created[1]:>6.2f} "
            f"{1e3 * step[0]:>12.2f} {1e3 * step[1]:>8.2f} {step[0] / step[1]:>6.2f} "
            f"{abs(losses[0] - losses[1]):>13.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
