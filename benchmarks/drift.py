"""Measure how far training on a mesh drifts from one device, beside the distance of one device from float64.

Each seed draws a model and its batches. The model trains unsharded, sharded on a mesh of four simulated devices, and
unsharded in float64, with equal initial weights and equal batches. Each cell is the relative difference of two losses
after 1, 20, and 1,000 steps: the median of the seeds, and the largest.

    python benchmarks/drift.py                    three seeds
    python benchmarks/drift.py --publish          and write the table of docs/same-numbers.md
    python benchmarks/drift.py --seeds 2 --optimizers adamw --steps 1 20
"""

from __future__ import annotations

import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from measure import make_parser

import layoutmap as lm

PAGE = Path(__file__).resolve().parents[1] / "docs" / "same-numbers.md"
MARKS = "<!-- drift: made by benchmarks/drift.py -->", "<!-- /drift -->"
MESH = "batch=2,model=2"
VOCABULARY, ROWS, LENGTH = 64, 16, 8
OPTIMIZERS = {
    "SGD": lambda: optax.sgd(0.1, momentum=0.9),
    "AdamW": lambda: optax.adamw(1e-3),
    "Adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=16),
    "Muon": lambda: optax.contrib.muon(1e-3),
}
RULES = {
    "tokens": ("model", None),
    r"blocks\.\d+\.up": (None, "model"),
    r"blocks\.\d+\.down": ("model", None),
    "head": (None, "model"),
}


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="how many models are drawn")
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[1, 20, 1000], help="when losses are compared"
    )
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    parser.add_argument("--publish", action="store_true", help="write the table of docs/same-numbers.md")
    options = parser.parse_args()
    lm.simulate_devices(4)
    jax.config.update("jax_enable_x64", True)
    lines = []
    for optimizer in options.optimizers:
        differences = {}
        for seed in range(options.seeds):
            for name, rows in compare(seed, optimizer, options.steps).items():
                differences.setdefault(name, []).append(rows)
        for precision in ("float32", "bfloat16"):
            cells = [
                format_cell([row[number] for row in differences[precision, against]])
                for against in ("one device", "float64")
                for number in range(len(options.steps))
            ]
            lines.append(f"| {optimizer} | {precision} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    heads = [f"{what}, {steps:,}" for what in ("mesh", "float64") for steps in options.steps]
    head = f"| optimizer | precision | {' | '.join(heads)} |\n| --- | --- |{' --- |' * len(heads)}"
    if options.publish:
        before, _, after = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
        after = after.partition(MARKS[1])[2]
        table = "\n".join([head, *lines])
        PAGE.write_text(f"{before}{MARKS[0]}\n\n{table}\n\n{MARKS[1]}{after}", encoding="utf-8")


def compare(seed, optimizer, steps):
    """Return the differences of the losses after each number of steps, by precision and reference."""
    exact = train(seed, optimizer, "float64", steps, sharded=False)
    found = {}
    for precision in ("float32", "bfloat16"):
        one = train(seed, optimizer, precision, steps, sharded=False)
        mesh = train(seed, optimizer, precision, steps, sharded=True)
        found[precision, "one device"] = [abs(a - b) / abs(b) for a, b in zip(mesh, one, strict=True)]
        found[precision, "float64"] = [abs(a - b) / abs(b) for a, b in zip(one, exact, strict=True)]
    return found


def train(seed, optimizer, precision, steps, *, sharded):
    """Return the losses after each number of steps. The first step is number 1."""
    random = np.random.default_rng(seed)
    hidden, wide, depth = (
        int(random.choice([32, 64])),
        int(random.choice([64, 128])),
        int(random.integers(1, 4)),
    )

    def init():
        draw = np.random.default_rng([seed, 1])

        def make_weight(*shape):
            return jnp.asarray(draw.normal(size=shape) / shape[0] ** 0.5, precision)

        blocks = [{"up": make_weight(hidden, wide), "down": make_weight(wide, hidden)} for _ in range(depth)]
        return {
            "tokens": make_weight(VOCABULARY, hidden),
            "blocks": blocks,
            "head": make_weight(hidden, VOCABULARY),
        }

    tx = OPTIMIZERS[optimizer]()

    def step(parameters, state, batch):
        loss, gradients = jax.value_and_grad(compute_loss)(parameters, batch)
        updates, state = tx.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    if sharded:
        layout_map = lm.LayoutMap(lm.create_mesh(MESH), RULES, rest="replicated")
        parameters = layout_map.build(init, library="jax")
        state = layout_map.build_optimizer(tx, parameters)
        step = lm.jit_step(batch_dim="batch")(step)
    else:  # JAX alone
        parameters = init()
        state, step = tx.init(parameters), jax.jit(step)

    losses = []
    chain = random.dirichlet(np.full(VOCABULARY, 0.1), VOCABULARY).cumsum(
        1
    )  # the token that follows each token
    for number in range(max(steps) + 1):
        tokens = [random.integers(0, VOCABULARY, ROWS)]
        for _ in range(LENGTH):
            tokens.append((chain[tokens[-1]] < random.random((ROWS, 1))).sum(1).clip(max=VOCABULARY - 1))
        batch = np.stack(tokens, 1).astype("int32")
        parameters, state, loss = step(parameters, state, batch)
        loss.block_until_ready()  # simulated devices share few cores: queued steps can wait for each other
        if number in steps:
            losses.append(float(loss))
    return losses


def compute_loss(parameters, batch):
    """Return the mean loss of the next tokens. Logits of bfloat16 become float32, so that the loss is not rounded."""
    x = parameters["tokens"][batch[:, :-1]]
    for block in parameters["blocks"]:
        x = x + jax.nn.gelu(x @ block["up"]) @ block["down"]
    logits = x @ parameters["head"]
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def format_cell(differences):
    """Return the median and the largest difference."""
    return f"{statistics.median(differences):.0e} ({max(differences):.0e})".replace("e-0", "e-")


if __name__ == "__main__":
    main()
