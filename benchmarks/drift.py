"""Measure how far training on a mesh drifts from one device, beside the distance of one device from float64.

Each seed draws initial weights, batches, and, for "small", the sizes of the model. The model trains unsharded, sharded
on simulated devices, and unsharded in float64, with equal initial weights and equal batches. Each cell is the largest
relative difference of two losses in the first 1, 20, and 1,000 steps: the median of the seeds, and the largest.

    python benchmarks/drift.py                    three seeds
    python benchmarks/drift.py --publish          and write the table of docs/same-numbers.md
    python benchmarks/drift.py --seeds 2 --models small --optimizers Muon --steps 1 20
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from measure import make_parser

import layoutmap as lm

PAGE = Path(__file__).resolve().parents[1] / "docs" / "same-numbers.md"
MARKS = "<!-- drift: made by benchmarks/drift.py -->", "<!-- /drift -->"
HEAD_WIDTH = 16
OPTIMIZERS = {
    "SGD": lambda: optax.sgd(0.1, momentum=0.9),
    "AdamW": lambda: optax.adamw(1e-3),
    "Adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=16),
    "Muon": lambda: optax.contrib.muon(1e-3),
}
RULES = {
    "tokens": ("model", None),
    r"blocks\.\d+\.(up|query|key|value)": (None, "model"),
    r"blocks\.\d+\.(down|out)": ("model", None),
    "head": (None, "model"),
}


@dataclass(frozen=True)
class Model:
    """Describe a language model, and the runs in which it is measured.

    Args:
        vocabulary: Number of tokens.
        rows: Sequences in a batch.
        length: Predicted tokens of a sequence.
        optimizers: Names of the optimizers in the table.
        meshes: Meshes of the sharded runs.
        most_steps: Most steps of a run. The table has no cells beyond them.
        most_seeds: Most seeds of a run.
        sizes: Width, width of the hidden layer, and number of blocks. `None`: each seed draws them.
    """

    vocabulary: int
    rows: int
    length: int
    optimizers: tuple[str, ...]
    meshes: tuple[str, ...]
    most_steps: int = 1000
    most_seeds: int = 3
    sizes: tuple[int, int, int] | None = None


# The drawn blocks have no attention. The other models are transformers, whose steps take longer, so they take fewer.
MODELS = {
    "small": Model(64, 16, 8, ("SGD", "AdamW", "Adafactor"), ("batch=2,model=2",)),
    "2 blocks, width 64": Model(
        1000,
        8,
        32,
        ("AdamW",),
        ("batch=2,model=2", "batch=2,model=4"),
        most_steps=20,
        most_seeds=1,
        sizes=(64, 256, 2),
    ),
    "4 blocks, width 256": Model(
        2000, 4, 32, ("AdamW",), ("batch=2,model=4",), most_steps=20, most_seeds=1, sizes=(256, 1024, 4)
    ),
}


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds, at most those of each model")
    parser.add_argument(
        "--steps",
        type=int,
        nargs="+",
        default=[1, 20, 1000],
        help="numbers of steps whose losses are compared",
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument(
        "--optimizers", nargs="+", choices=list(OPTIMIZERS), help="default: those of each model"
    )
    parser.add_argument("--publish", action="store_true", help="write the table of docs/same-numbers.md")
    options = parser.parse_args()
    lm.simulate_devices(8)
    jax.config.update("jax_enable_x64", True)
    lines = []
    for name in options.models:
        for optimizer in options.optimizers or MODELS[name].optimizers:
            lines += measure(name, optimizer, options)
    heads = [f"{what}, {steps:,}" for what in ("one device", "float64") for steps in options.steps]
    head = f"| model | optimizer | precision | mesh | {' | '.join(heads)} |\n|{' --- |' * (4 + len(heads))}"
    if options.publish:
        before, _, after = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
        after = after.partition(MARKS[1])[2]
        table = "\n".join([head, *lines])
        PAGE.write_text(f"{before}{MARKS[0]}\n\n{table}\n\n{MARKS[1]}{after}", encoding="utf-8")


def measure(name, optimizer, options):
    """Return the lines of the table for a model and an optimizer."""
    model = MODELS[name]
    steps = [number for number in options.steps if number <= model.most_steps]
    absent = [""] * (len(options.steps) - len(steps))
    differences = {}
    for seed in range(min(options.seeds, model.most_seeds)):
        exact = train(seed, model, optimizer, "float64", max(steps))
        for precision in ("float32", "bfloat16"):
            one = train(seed, model, optimizer, precision, max(steps))
            differences.setdefault((precision, "float64"), []).append(compare(one, exact, steps))
            for mesh in model.meshes:
                sharded = train(seed, model, optimizer, precision, max(steps), mesh)
                differences.setdefault((precision, mesh), []).append(compare(sharded, one, steps))
    lines = []
    for precision in ("float32", "bfloat16"):
        for mesh in model.meshes:
            cells = [name, optimizer, precision, mesh]
            for against in (mesh, "float64"):
                cells += [*map(format_cell, zip(*differences[precision, against], strict=True)), *absent]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return lines


def compare(losses, expected, steps):
    """Return the largest relative difference of two losses in the first steps, for each number of steps."""
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    return [max(differences[: number + 1]) for number in steps]


def train(seed, model, optimizer, precision, steps, mesh=None):
    """Return the loss before the first step, and after each step. `mesh=None`: train on one device with JAX alone."""
    random = np.random.default_rng(seed)
    hidden, wide, depth = model.sizes or (
        int(random.choice([32, 64])),
        int(random.choice([64, 128])),
        int(random.integers(1, 4)),
    )

    def init():
        draw = np.random.default_rng([seed, 1])

        def make_weight(*shape):
            return jnp.asarray(draw.normal(size=shape) / shape[0] ** 0.5, precision)

        def make_block():
            block = {"up": make_weight(hidden, wide), "down": make_weight(wide, hidden)}
            if model.sizes is not None:
                block |= {name: make_weight(hidden, hidden) for name in ("query", "key", "value", "out")}
            return block

        return {
            "tokens": make_weight(model.vocabulary, hidden),
            "blocks": [make_block() for _ in range(depth)],
            "head": make_weight(hidden, model.vocabulary),
        }

    tx = OPTIMIZERS[optimizer]()

    def step(parameters, state, batch):
        loss, gradients = jax.value_and_grad(compute_loss)(parameters, batch)
        updates, state = tx.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    if mesh is not None:
        layout_map = lm.LayoutMap(lm.create_mesh(mesh), RULES, rest="replicated")
        parameters = layout_map.build(init, library="jax")
        state = layout_map.build_optimizer(tx, parameters)
        step = lm.jit_step(batch_dim="batch")(step)
    else:  # JAX alone
        parameters = init()
        state, step = tx.init(parameters), jax.jit(step)

    losses = []
    for batch in draw_batches(seed, model, steps):
        parameters, state, loss = step(parameters, state, batch)
        loss.block_until_ready()  # simulated devices share few cores: queued steps can wait for each other
        losses.append(float(loss))
    return losses


@functools.lru_cache(maxsize=1)
def draw_batches(seed, model, steps):
    """Return a batch of tokens for each step, and one for the first loss. A random chain draws each next token."""
    random, size = np.random.default_rng([seed, 2]), model.vocabulary
    chain = random.dirichlet(np.full(size, 0.1), size).cumsum(1)
    batches = []
    for _ in range(steps + 1):
        tokens = [random.integers(0, size, model.rows)]
        for _ in range(model.length):
            tokens.append((chain[tokens[-1]] < random.random((model.rows, 1))).sum(1).clip(max=size - 1))
        batches.append(np.stack(tokens, 1).astype("int32"))
    return batches


def compute_loss(parameters, batch):
    """Return the mean loss of the next tokens. Logits of bfloat16 become float32, so that the loss is not rounded."""
    x = parameters["tokens"][batch[:, :-1]]
    for block in parameters["blocks"]:
        if "query" in block:
            normed = normalize(x)
            heads = [split_heads(normed @ block[name]) for name in ("query", "key", "value")]
            x = x + jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape) @ block["out"]
        x = x + jax.nn.gelu((normalize(x) if "query" in block else x) @ block["up"]) @ block["down"]
    logits = x @ parameters["head"]
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def normalize(x):
    """Return the input divided by its root mean square along the last axis."""
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def split_heads(x):
    """Return the input with its last axis split into heads."""
    return x.reshape(*x.shape[:-1], -1, HEAD_WIDTH)


def format_cell(differences):
    """Return the median and the largest difference."""
    return f"{statistics.median(differences):.0e} ({max(differences):.0e})".replace("e-0", "e-")


if __name__ == "__main__":
    main()
