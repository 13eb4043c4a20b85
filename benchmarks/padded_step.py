"""Compare training steps with a padded vocabulary, with one that divides, and with a replicated one.

    python benchmarks/padded_step.py                            10 random sizes: a quarter of an hour
    python benchmarks/padded_step.py --draw 3 --vocabulary 1003 others, with a vocabulary of this size
    python benchmarks/padded_step.py --small                    sizes at which copies of the table take most of the time

The model is an embedding, MLPs, and the embedding's transpose with a cross entropy, trained with AdamW under
`lm.jit_step` on 8 simulated devices. "even" has the next vocabulary that 8 divides. Methods take turns, one
synchronous step each; the first steps compile and do not count. Replication computes the logits on each device, so it
takes fewer steps. A ratio is a ratio of medians. Bytes are those of the results of all collectives in the compiled step
of each device.
"""

from __future__ import annotations

import os
import re
import statistics

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax
from measure import describe_ratios, draw_sizes, make_parser, time_call

import layoutmap as lm

LOSSES = ("labels", "one-hot")
SIZES = {"width": (256, 512, 768), "blocks": (2, 4, 8), "rows": (8, 16), "length": (64, 128), "loss": LOSSES}
SMALL = {"width": (32, 64, 128), "blocks": (1,), "rows": (4, 8, 16), "length": (16, 32), "loss": LOSSES}
COLLECTIVE = re.compile(
    r" = (.*?) (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
ARRAY = re.compile(r"(pred|[a-z]+)(\d*)\[([\d,]*)\]")


def count_bytes(text: str) -> int:
    """Return the bytes of the results of all collectives in a compiled program."""
    total = 0
    for shapes in COLLECTIVE.findall(text):
        for _, bits, sizes in ARRAY.findall(shapes):
            total += int(np.prod([int(n) for n in sizes.split(",") if n])) * int(bits or 8) // 8
    return total


def make_step(vocabulary: int, uneven: str, width: int, blocks: int, rows: int, length: int, loss: str):
    """Return a step without arguments, and the bytes that its collectives move."""
    mesh = lm.create_mesh("model=8")
    rules = {"table": ("model", None), r"up\d": (None, "model"), r"down\d": ("model", None)}
    layout_map, tx = lm.LayoutMap(mesh, rules, uneven=uneven), optax.adamw(1e-3)
    shapes = {"table": (vocabulary, width)}
    for n in range(blocks):
        shapes |= {f"up{n}": (width, 4 * width), f"down{n}": (4 * width, width)}

    def make_model():
        keys = jax.random.split(jax.random.key(0), len(shapes))
        return {
            name: jax.random.normal(key, shapes[name]) * 0.05 for name, key in zip(shapes, keys, strict=True)
        }

    def compute_loss(params, tokens, targets):
        hidden = params["table"][tokens]
        for n in range(blocks):
            hidden = hidden + jax.nn.gelu(hidden @ params[f"up{n}"]) @ params[f"down{n}"]
        logits = hidden @ params["table"].T
        if loss == "labels":
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
        return optax.softmax_cross_entropy(logits, jax.nn.one_hot(targets, vocabulary)).mean()

    def step(params, state, tokens, targets):
        value, gradients = jax.value_and_grad(compute_loss)(params, tokens, targets)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    compiled = lm.jit_step(step, donate_argnums=(0, 1))
    params = layout_map.build(make_model)
    values = [params, layout_map.build_optimizer(tx, params)]
    batch = np.random.default_rng(0).integers(0, 50, (2, rows, length))
    traffic = count_bytes(compiled.lower(*values, *batch).compile().as_text())

    def run():
        values[0], values[1], value = compiled(*values, *batch)
        return jax.block_until_ready((values, value))[1]

    return run, traffic


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--draw", type=int, default=10, help="number of sizes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--vocabulary", type=int, default=50257)
    asked = parser.parse_args()
    vocabulary, even = asked.vocabulary, -(-asked.vocabulary // 8) * 8
    ratios: dict[str, list[float]] = {"even": [], "replicated": []}
    traffic_ratios: list[float] = []
    for sizes in draw_sizes(asked.draw, asked.seed, SMALL if asked.small else SIZES):
        methods = {
            "padded": make_step(vocabulary, "pad", **sizes),
            "even": make_step(even, "error", **sizes),
            "replicated": make_step(vocabulary, "replicate", **sizes),
        }
        seconds = {name: [] for name in methods}
        for round_number in range(asked.steps + 2):
            for name, (run, _) in methods.items():
                if name == "replicated" and not asked.small and round_number > 3:
                    continue
                spent, _ = time_call(run)
                if round_number > 1:
                    seconds[name].append(spent)
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        for name, found in ratios.items():
            found.append(medians["padded"] / medians[name])
        traffic = {name: each for name, (_, each) in methods.items()}
        traffic_ratios.append(traffic["padded"] / traffic["even"])
        row = ", ".join(
            f"{name} {medians[name] * 1e3:.1f} ms {traffic[name] / 2**20:.2f} MiB" for name in methods
        )
        print(" ".join(f"{key}={value}" for key, value in sizes.items()), row, sep=": ", flush=True)
    for name, found in ratios.items():
        print(describe_ratios(f"padded / {name}, seconds", found))
    print(describe_ratios("padded / even, bytes of collectives", traffic_ratios))


if __name__ == "__main__":
    main()
