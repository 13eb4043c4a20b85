"""Compare models of keras-hub under the presets of their families with Keras's own ModelParallel.

    python benchmarks/hub.py                                    all families, 3 rounds: half an hour
    python benchmarks/hub.py --model llama gpt2 --rounds 1

The models are the tiny ones of the tests, with one block, on 8 simulated devices in a 2x4 mesh. The
methods take turns, each in a fresh process. "create s" runs from the first line of the model until
all weights and slots are ready. "step ms" is the median of 30 training steps after the first.
ModelParallel gets the same layouts, with one key for each variable by its exact Keras path. "differs
by" is the largest relative difference to one device that `layoutmap.check_parity` finds in outputs,
gradients, and three steps of AdamW, with weights sharded over the model dim and over both dims. The
initial weights must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial

from create import import_adapters
from measure import TESTS, compute_median, make_parser, run_method, run_rounds

sys.path += [str(TESTS), str(TESTS / "adapters")]  # for hub_models
METHODS = ("layoutmap", "ModelParallel")
FAMILIES = ("llama", "gemma", "mixtral", "qwen", "vit", "whisper", "bert", "gpt2", "t5")
STEPS = 30


def make_model(name: str):
    """Return a compiled model with one block."""
    import hub_models

    return hub_models.make(name, hub_models.TINY[name] | {"num_layers": 1})


def make_model_parallel(name: str):
    """Return Keras's ModelParallel with the layouts of the preset."""
    import hub_models
    import keras

    from layoutmap.adapters.keras.paths import find_variables

    rules = hub_models.rules(name)
    mesh = keras.distribution.DeviceMesh((2, 4), ("batch", "model"), keras.distribution.list_devices())
    layout_map = keras.distribution.LayoutMap(mesh)
    keys = {}
    for each in find_variables(make_model(name)):
        layout = next((rules[p] for p in (each.path, *each.aliases) if rules[p]), None)
        if layout is not None:
            axes = tuple(None if spec == "unsharded" else spec for spec in layout.sharding_specs)
            # In T5, several variables share one Keras path, so they must share one layout.
            assert axes == keys.setdefault(each.variable.path, axes), each.variable.path
    for path, axes in keys.items():
        layout_map[path] = axes
    keras.utils.clear_session()  # restarts Keras's numbering of names
    return keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")


def measure_method(method: str, name: str) -> None:
    """Create and train one model in this process, and print the measurements as JSON."""
    import hub_models
    import jax
    import keras
    import numpy as np

    import_adapters()
    jax.block_until_ready([jax.device_put(np.zeros(1), device) for device in jax.devices()])
    x, y = hub_models.batch(name)
    if method == "ModelParallel":
        keras.distribution.set_distribution(make_model_parallel(name))
        jax.clear_caches()  # drops the programs that made the model above
    layout_map = hub_models.rules(name)
    keras.utils.set_random_seed(0)
    start = time.perf_counter()
    if method == "layoutmap":
        model = layout_map.build(lambda: make_model(name), batch_dim="batch")
    else:
        model = make_model(name)
        model.optimizer.build(model.trainable_variables)
    jax.block_until_ready([v.value for v in (*model.variables, *model.optimizer.variables)])
    created = time.perf_counter() - start
    times: list[float] = []
    for _ in range(STEPS + 1):
        start = time.perf_counter()
        loss = float(model.train_on_batch(x, y, return_dict=True)["loss"])
        times.append(time.perf_counter() - start)
    step = statistics.median(times[1:])
    print(json.dumps({"created": created, "first": times[0], "step": step, "loss": loss}))


def measure_parity(name: str) -> None:
    """Check the parity of one model, sharded over one dim and over both, and print the worse numbers as JSON."""
    import hub_models

    import layoutmap as lm

    reports = [
        lm.check_parity(
            lambda: make_model(name),
            hub_models.rules(name, **dims),
            hub_models.batch(name),
            batch_dim="batch",
            raises=False,
        )
        for dims in ({}, {"fsdp_dim": "batch"})
    ]
    result = {
        "agrees": all(report.agrees for report in reports),
        "worst": max(report.worst() for report in reports),
        "weights": max(report.worst("weights") for report in reports),
    }
    print(json.dumps(result))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", choices=(*METHODS, "parity"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        (name,) = args.model
        measure_parity(name) if args.child == "parity" else measure_method(args.child, name)
        return
    print("         parity                create s                     step ms                      loss")
    print(
        "model    agrees, differs by    layoutmap  Keras's  ratio    layoutmap  Keras's  ratio    difference"
    )
    for name in args.model:
        run = partial(run_method, __file__, model=name)
        runs = run_rounds(METHODS, args.rounds, run, f"{name}: ")
        parity = run("parity")
        created, step = ([compute_median(runs[m], key) for m in METHODS] for key in ("created", "step"))
        losses = [runs[m][0]["loss"] for m in METHODS]
        verdict = "yes" if parity["agrees"] and not parity["weights"] else "NO"
        print(
            f"{name:<8} {verdict:<6} {parity['worst']:>11.1e} "
            f"{created[0]:>13.2f} {created[1]:>8.2f} {created[0] / created[1]:>6.2f} "
            f"{1e3 * step[0]:>12.2f} {1e3 * step[1]:>8.2f} {step[0] / step[1]:>6.2f} "
            f"{abs(losses[0] - losses[1]):>13.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
