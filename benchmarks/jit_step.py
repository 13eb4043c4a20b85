"""What a step under `lm.jit_step` costs beside one that is written by hand.

    python benchmarks/jit_step.py                     micro and tiny, 5 rounds
    python benchmarks/jit_step.py --model tiny --rounds 3
    python benchmarks/jit_step.py --nnx               modules of flax.nnx, changed in place

By hand: `jax.jit` with the `NamedSharding`s of all results, donation, and `jax.device_put` of the batch; for nnx the
same with `nnx.split` before the first step and no module at all between two steps, and `nnx.jit`, which keeps no
layouts. The same MLP blocks, AdamW, layouts and batches, on 8 simulated devices in a 2x4 mesh, in one process: the ways
take turns, a step each, and each step is waited for. The first steps compile and are not counted.
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
from jax.sharding import NamedSharding, PartitionSpec

import layoutmap as lm

SIZES = {"micro": (64, 4, 32, 40), "tiny": (256, 4, 64, 10)}  # width, blocks, rows, steps in a round
MESH = "batch=2,model=4"
SPECS = {"up": (None, "model"), "down": ("model", None), "bias": (None,), "scale": (None,)}


def shapes_of(width: int, blocks: int) -> list[dict[str, tuple[int, ...]]]:
    block = {"up": (width, 4 * width), "bias": (4 * width,), "down": (4 * width, width), "scale": (width,)}
    return [block] * blocks


def forward(params, x):
    for block in params:
        x = x + jax.nn.gelu(x * block["scale"] @ block["up"] + block["bias"]) @ block["down"]
    return x


def pytrees(width: int, blocks: int):
    """The ways to step with a pytree of parameters, by name: each a function of a batch."""
    tx = optax.adamw(1e-3)
    layout_map = lm.LayoutMap(lm.create_mesh(MESH))

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


def modules(width: int, blocks: int):
    """The ways to step with modules of nnx, by name."""
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
    layout_map = lm.LayoutMap(lm.create_mesh(MESH))

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", choices=SIZES, help="may be given several times")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nnx", action="store_true")
    args = parser.parse_args()
    for name in args.model or list(SIZES):
        width, blocks, rows, steps = SIZES[name]
        x = np.random.default_rng(1).normal(size=(rows, width)).astype("float32")
        ways = (modules if args.nnx else pytrees)(width, blocks)
        losses = {way: float(run(x)) for way, run in ways.items()}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(args.rounds * steps):
            for way, run in ways.items():  # one step each: what slows the machine down slows all of them
                start = time.perf_counter()
                run(x).block_until_ready()
                times[way].append(1000 * (time.perf_counter() - start))
        first = next(iter(ways))
        print(
            f"\n{name}: {args.rounds * steps} steps, ms per step: median, fastest; and their ratios to the first"
        )
        for way, of in times.items():
            median, fastest = statistics.median(of), min(of)
            ratios = median / statistics.median(times[first]), fastest / min(times[first])
            print(
                f"{way:<16} {median:>9.2f} {fastest:>9.2f}   {ratios[0]:.3f}  {ratios[1]:.3f}   loss {losses[way]:.6f}"
            )


if __name__ == "__main__":
    main()
