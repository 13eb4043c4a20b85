"""What a step under `lm.jit_step` costs beside one that is written by hand.

    python benchmarks/jit_step.py                     12 drawn sizes and meshes: some minutes
    python benchmarks/jit_step.py --draw 30 --seed 5  others
    python benchmarks/jit_step.py --nnx               modules of flax.nnx, changed in place

By hand: `jax.jit` with the `NamedSharding`s of all results, donation, and `jax.device_put` of the batch; for nnx the
same with `nnx.split` before the first step and no module at all between two steps, and `nnx.jit`, which keeps no
layouts. The same MLP blocks, AdamW, layouts and batches, on 8 simulated devices, in one process: the ways take turns, a
step each, and each step is waited for. The first steps compile and are not counted. A ratio is that of medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from drawn_sizes import draw, spread
from jax.sharding import NamedSharding, PartitionSpec

import layoutmap as lm

SIZES = {
    "width": (32, 64, 128, 256, 512),
    "blocks": (1, 2, 4, 8, 12),
    "rows": (8, 32, 64, 256),
    "mesh": ("batch=2,model=4", "batch=4,model=2", "batch=8,model=1", "batch=1,model=8"),
}
SPECS = {"up": (None, "model"), "down": ("model", None), "bias": (None,), "scale": (None,)}
SECONDS = 20.0
"""How long a size is measured at most; large ones take fewer steps than asked for."""


def shapes_of(width: int, blocks: int) -> list[dict[str, tuple[int, ...]]]:
    block = {"up": (width, 4 * width), "bias": (4 * width,), "down": (4 * width, width), "scale": (width,)}
    return [block] * blocks


def forward(params, x):
    for block in params:
        x = x + jax.nn.gelu(x * block["scale"] @ block["up"] + block["bias"]) @ block["down"]
    return x


def pytrees(width: int, blocks: int, mesh: str):
    """Return the ways to step with a pytree of parameters, by name: each a function of a batch."""
    tx = optax.adamw(1e-3)
    layout_map = lm.LayoutMap(lm.create_mesh(mesh))

    def step(params, state, x):
        loss, gradients = jax.value_and_grad(lambda p: (forward(p, x) ** 2).mean())(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def start():
        random = np.random.default_rng(0)
        params = [
            {
                name: lm.dtensor.relayout(
                    random.normal(size=shape).astype("float32") / width,
                    lm.Layout(SPECS[name], layout_map.mesh),
                )
                for name, shape in block.items()
            }
            for block in shapes_of(width, blocks)
        ]
        return params, layout_map.build_optimizer(tx, params)

    def stepping(compiled, place=lambda x: x):
        params, state = start()

        def run(x):
            nonlocal params, state
            params, state, loss = compiled(params, state, place(x))
            return loss

        return run

    shardings = jax.tree.map(lambda a: a.sharding, start())
    mesh = shardings[0][0]["up"].mesh
    rows, scalar = NamedSharding(mesh, PartitionSpec("batch", None)), NamedSharding(mesh, PartitionSpec())
    by_hand = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*shardings, scalar))
    ours = lm.jit_step(step, donate_argnums=(0, 1), batch_dim="batch")
    return {"by hand": stepping(by_hand, lambda x: jax.device_put(x, rows)), "jit_step": stepping(ours)}


def modules(width: int, blocks: int, mesh: str):
    """Return the ways to step with modules of nnx, by name."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, shapes):
            for name, shape in shapes.items():
                setattr(self, name, nnx.Param(jnp.zeros(shape)))

    class Net(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List([Block(shapes) for shapes in shapes_of(width, blocks)])

        def __call__(self, x):
            return forward([{name: getattr(b, name)[...] for name in SPECS} for b in self.blocks], x)

    tx = optax.adamw(1e-3)
    layout_map = lm.LayoutMap(lm.create_mesh(mesh))

    def step(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    def start():
        random, model = np.random.default_rng(0), Net()
        for path, variable in nnx.to_flat_state(nnx.state(model)):
            values = random.normal(size=variable.get_raw_value().shape).astype("float32") / width
            variable.set_raw_value(lm.dtensor.relayout(values, lm.Layout(SPECS[path[-1]], layout_map.mesh)))
        return model, layout_map.build_optimizer(tx, model)

    def in_place(compiled, place=lambda x: x):
        model, optimizer = start()
        return lambda x: compiled(model, optimizer, place(x))

    graphdef, state = nnx.split(start())
    shardings = jax.tree.map(lambda a: a.sharding, state)
    mesh = jax.tree.leaves(shardings)[0].mesh
    rows, scalar = NamedSharding(mesh, PartitionSpec("batch", None)), NamedSharding(mesh, PartitionSpec())

    def pure(state, x):
        model, optimizer = nnx.merge(graphdef, state)
        loss = step(model, optimizer, x)
        return nnx.state((model, optimizer)), loss

    split = jax.jit(pure, donate_argnums=0, out_shardings=(shardings, scalar))

    def by_hand(x):
        nonlocal state
        state, loss = split(state, jax.device_put(x, rows))
        return loss

    return {
        "by hand, split": by_hand,
        "jit_step": in_place(lm.jit_step(step, donate_argnums=(0, 1), batch_dim="batch")),
        "nnx.jit": in_place(nnx.jit(step, donate_argnums=(0, 1)), lambda x: jax.device_put(x, rows)),
    }


def measured(ways, x, steps: int) -> dict[str, float]:
    """Median milliseconds of a step of each way, taken in turns; they must have the same loss."""
    losses = [float(run(x)) for run in ways.values()]
    assert np.allclose(losses, losses[0], rtol=1e-4), losses
    times: dict[str, list[float]] = {way: [] for way in ways}
    latest = time.perf_counter() + SECONDS
    while len(next(iter(times.values()))) < steps and time.perf_counter() < latest:
        for way, run in ways.items():  # one step each: what slows the machine down slows all of them
            start = time.perf_counter()
            run(x).block_until_ready()
            times[way].append(1000 * (time.perf_counter() - start))
    return {way: statistics.median(of) for way, of in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", type=int, default=12, help="how many sizes to draw (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60, help="steps of each way (default: %(default)s)")
    parser.add_argument("--nnx", action="store_true")
    args = parser.parse_args()
    ratios: dict[str, list[float]] = {}
    for drawn in draw(args.draw, args.seed, SIZES):
        x = np.random.default_rng(1).normal(size=(drawn["rows"], drawn["width"])).astype("float32")
        ways = (modules if args.nnx else pytrees)(drawn["width"], drawn["blocks"], drawn["mesh"])
        found = measured(ways, x, args.steps)
        first = next(iter(found.values()))
        for way, median in found.items():
            ratios.setdefault(way, []).append(median / first)
        told = ", ".join(f"{way} {median:.2f} ms ({median / first:.2f})" for way, median in found.items())
        print(f"{drawn}: {told}", flush=True)
    for way, of in list(ratios.items())[1:]:
        print(spread(f"{way}, beside {next(iter(ratios))}", of))


if __name__ == "__main__":
    main()
