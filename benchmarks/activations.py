"""Count the collectives that a rule for activations removes from the compiled training step.

    python benchmarks/activations.py                            a decoder of 4 blocks on meshes of 8 devices
    python benchmarks/activations.py --model decoder --meshes batch=8,model=8

Keras runs on JAX, with all kernels sharded along two axes. The step is compiled and not run: once
without a rule for activations, and once with a rule that shards the outputs of blocks along the
batch only. The benchmark counts the collectives in the program of one device, and the bytes of their
outputs on that device. `--rounds 3` also runs the steps in turns.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import time
import warnings
from collections import Counter

from measure import make_parser

ACTIVATIONS = {r"blocks\.\d+$": ("batch", None, None), r"tokens$|norm$": ("batch", None, None)}
BYTES = {"f32": 4, "s32": 4, "u32": 4, "pred": 1, "bf16": 2, "f16": 2, "s8": 1}
KINDS = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
COLLECTIVE = re.compile(rf"= (?P<result>\(.*?\)|\S+) (?P<kind>{KINDS})(?:-start)?\(")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def build_model(model_name: str, mesh: str, with_rules: bool, batch: int, length: int):
    """Return a compiled model and one batch of tokens for it."""
    import keras
    import numpy as np
    from models import MODELS, RULES, make_model

    import layoutmap as lm

    layout_map = lm.LayoutMap(lm.create_mesh(mesh), RULES, ACTIVATIONS if with_rules else None)
    keras.utils.set_random_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lm.LayoutMapWarning)
        model = layout_map.build(
            lambda: make_model(model_name), inputs=keras.Input((length,), dtype="int32"), batch_dim="batch"
        )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.AdamW(1e-3), loss=loss)
    text = np.random.default_rng(0).integers(
        0, MODELS[model_name]["vocabulary"], (batch, length + 1), "int32"
    )
    return model, (text[:, :-1], text[:, 1:])


def count_collectives(model, batch) -> tuple[Counter[str], Counter[str]]:
    """Return the number and the output bytes of each kind of collective in one device's training step."""
    import jax

    from layoutmap.adapters.keras.training import place_batch
    from layoutmap.adapters.keras.wraps import get_session

    model.make_train_function()  # places the variables that only training creates
    model.optimizer.build(model.trainable_variables)
    state = [
        [v.value for v in group]
        for group in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    ]
    data = place_batch(batch, get_session(model))
    text = jax.jit(model.train_step).lower(tuple(state), data).compile().as_text() or ""
    return count_collectives_in_program(text)


def count_collectives_in_program(text: str) -> tuple[Counter[str], Counter[str]]:
    """Return the number and the output bytes of each kind of collective in a compiled program's text."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for match in COLLECTIVE.finditer(text):
        counts[match["kind"]] += 1
        sizes[match["kind"]] += sum(
            BYTES[kind] * math.prod(int(n) for n in shape.split(",") if n)
            for kind, shape in ARRAY.findall(match["result"])
            if kind in BYTES
        )
    return counts, sizes


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--meshes", nargs="+", default=["batch=2,model=4", "batch=4,model=2"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument(
        "--rounds", type=int, default=0, help="rounds of 8 steps of each model (0: only count)"
    )
    options = parser.parse_args()
    devices = max(math.prod(int(n) for n in re.findall(r"=(\d+)", mesh)) for mesh in options.meshes)
    os.environ["KERAS_BACKEND"] = "jax"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    for mesh in options.meshes:
        total_bytes: dict[bool, int] = {}
        models = {}
        for with_rules in (False, True):
            model, batch = build_model(options.model, mesh, with_rules, options.batch, options.length)
            counts, sizes = count_collectives(model, batch)
            total_bytes[with_rules] = sum(sizes.values())
            models[with_rules] = model, batch
            kinds = ", ".join(f"{n} {kind} {sizes[kind] / 2**20:.1f} MiB" for kind, n in counts.most_common())
            name = "with a rule for activations" if with_rules else "without"
            total = f"{sum(counts.values())} collectives, {total_bytes[with_rules] / 2**20:.1f} MiB"
            print(f"{options.model} on {mesh}, {name}: {total}: {kinds}")
        print(f"   bytes without / with: {total_bytes[False] / total_bytes[True]:.2f}")
        if options.rounds:
            times: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(options.rounds + 1):
                for with_rules, (model, batch) in models.items():
                    start = time.perf_counter()
                    for _ in range(8):
                        model.train_on_batch(*batch)
                    times[with_rules].append((time.perf_counter() - start) / 8)
            # The first round compiles, so it does not count.
            before, after = (statistics.median(times[each][1:]) * 1000 for each in (False, True))
            print(f"   step without / with: {before:.1f} / {after:.1f} ms = {before / after:.2f}")


if __name__ == "__main__":
    main()
