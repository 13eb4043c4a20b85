"""Compare a step under `lm.jit_step` with a step that uses `jax.jit` and shardings directly.

    python benchmarks/jit_step.py                     12 random sizes and meshes: some minutes
    python benchmarks/jit_step.py --draw 30 --seed 5  30 others
    python benchmarks/jit_step.py --nnx               modules of flax.nnx that the step changes in place
    python benchmarks/jit_step.py --calls             the microseconds that a call takes before XLA runs
    python benchmarks/jit_step.py --calls --nnx       the same for modules, beside `jax.jit` after `nnx.split`

"by hand" is `jax.jit` with donation, the `NamedSharding`s of all results, and `jax.device_put` of the batch. "by hand,
split" is the same for nnx, with `nnx.split` before the first step and no module between steps. `nnx.jit` keeps no
layouts. All methods use the same MLP blocks, AdamW, layouts, and batches on 8 simulated devices in one process. They
take turns, one synchronous step each. The first steps compile and do not count. A ratio is a ratio of medians.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from functools import partial

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from measure import describe_ratios, draw_sizes, make_parser, time_call

import layoutmap as lm

SIZES = {
    "width": (32, 64, 128, 256, 512),
    "blocks": (1, 2, 4, 8, 12),
    "rows": (8, 32, 64, 256),
    "mesh": ("batch=2,model=4", "batch=4,model=2", "batch=8,model=1", "batch=1,model=8"),
}
SPECS = {"up": (None, "model"), "down": ("model", None), "bias": (None,), "scale": (None,)}
SECONDS = 20.0
"""Time limit of each size. Large sizes take fewer steps than `--steps`."""


def list_shapes(width: int, blocks: int) -> list[dict[str, tuple[int, ...]]]:
    """Return the parameter shapes of each block."""
    block = {"up": (width, 4 * width), "bias": (4 * width,), "down": (4 * width, width), "scale": (width,)}
    return [block] * blocks


def forward(params, x):
    for block in params:
        x = x + jax.nn.gelu(x * block["scale"] @ block["up"] + block["bias"]) @ block["down"]
    return x


def make_pytree_steps(width: int, blocks: int, mesh: str):
    """Return the step of each method for a pytree of parameters, as a function of a batch."""
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
            for block in list_shapes(width, blocks)
        ]
        return params, layout_map.build_optimizer(tx, params)

    def bind_state(compiled, place=lambda x: x):
        params, state = start()

        def run(x):
            nonlocal params, state
            params, state, loss = compiled(params, state, place(x))
            return loss

        return run

    shardings = jax.tree.map(lambda a: a.sharding, start())
    mesh = shardings[0][0]["up"].mesh
    rows, scalar = NamedSharding(mesh, PartitionSpec("batch", None)), NamedSharding(mesh, PartitionSpec())
    explicit = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*shardings, scalar))
    own = lm.jit_step(step, donate_argnums=(0, 1), batch_dim="batch")
    return {"by hand": bind_state(explicit, lambda x: jax.device_put(x, rows)), "jit_step": bind_state(own)}


def make_module_steps(width: int, blocks: int, mesh: str):
    """Return the step of each method for modules of nnx, as a function of a batch."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, shapes):
            for name, shape in shapes.items():
                setattr(self, name, nnx.Param(jnp.zeros(shape)))

    class Net(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List([Block(shapes) for shapes in list_shapes(width, blocks)])

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

    def bind_module(compiled, place=lambda x: x):
        model, optimizer = start()
        return lambda x: compiled(model, optimizer, place(x))

    graphdef, state = nnx.split(start())
    shardings = jax.tree.map(lambda a: a.sharding, state)
    mesh = jax.tree.leaves(shardings)[0].mesh
    rows, scalar = NamedSharding(mesh, PartitionSpec("batch", None)), NamedSharding(mesh, PartitionSpec())

    def update_state(state, x):
        model, optimizer = nnx.merge(graphdef, state)
        loss = step(model, optimizer, x)
        return nnx.state((model, optimizer)), loss

    split = jax.jit(update_state, donate_argnums=0, out_shardings=(shardings, scalar))

    def run_split(x):
        nonlocal state
        state, loss = split(state, jax.device_put(x, rows))
        return loss

    return {
        "by hand, split": run_split,
        "jit_step": bind_module(lm.jit_step(step, donate_argnums=(0, 1), batch_dim="batch")),
        "nnx.jit": bind_module(nnx.jit(step, donate_argnums=(0, 1)), lambda x: jax.device_put(x, rows)),
    }


def measure_steps(methods, x, steps: int) -> dict[str, float]:
    """Return the median milliseconds of a step of each method, and check that all have the same loss."""
    losses = [float(run(x)) for run in methods.values()]
    assert np.allclose(losses, losses[0], rtol=1e-4), losses
    times: dict[str, list[float]] = {method: [] for method in methods}
    latest = time.perf_counter() + SECONDS
    while len(next(iter(times.values()))) < steps and time.perf_counter() < latest:
        for method, run in methods.items():  # one step each, so that other load slows all of them
            seconds, _ = time_call(lambda run=run: run(x).block_until_ready())
            times[method].append(1000 * seconds)
    return {method: statistics.median(values) for method, values in times.items()}


def make_module_calls(count: int, layout, x):
    """Return calls that change a module of `count` Variables in place, as functions of nothing."""
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self):
            values = [lm.dtensor.relayout(np.ones(8, np.float32), layout) for _ in range(count)]
            self.blocks = nnx.List(
                [
                    nnx.Dict({f"{n:02}": nnx.Param(values[n]) for n in range(k, min(k + 10, count))})
                    for k in range(0, count, 10)
                ]
            )

    def step(model, x):
        nnx.update(model, jax.tree.map(lambda each: each + 1, nnx.state(model)))
        return x.sum()

    def update_state(state, x):
        model = nnx.merge(graphdef, state)
        loss = step(model, x)
        return nnx.state(model), loss

    graphdef, state = nnx.split(Net())
    plain = jax.jit(
        update_state, donate_argnums=0, out_shardings=(jax.tree.map(lambda a: a.sharding, state), None)
    )
    own, model = lm.jit_step(step, donate_argnums=0, batch_dim="batch"), Net()

    def run_split():
        nonlocal state
        state, loss = plain(state, x)
        return loss

    return {"jax.jit, split": run_split, "jit_step": lambda: own(model, x)}


def measure_module_calls(draw: int, seed: int, calls: int) -> None:
    """Print the CPU microseconds of calls of donating steps of modules in this thread, with a placed batch."""
    chance, excess = random.Random(seed), []
    for count in [30, 400, *(chance.randint(10, 600) for _ in range(draw))]:
        mesh = lm.create_mesh(chance.choice(SIZES["mesh"]))
        x = lm.dtensor.relayout(np.ones((8, 8), np.float32), lm.Layout(["batch", None], mesh))
        methods = make_module_calls(count, lm.Layout(["model"], mesh), x)
        times = {name: [] for name in methods}
        for _ in range(calls):
            for name, call in methods.items():
                seconds, loss = time_call(call, time.thread_time)
                jax.block_until_ready(loss)
                times[name].append(1e6 * seconds)
        medians = {name: statistics.median(values[3:]) for name, values in times.items()}
        excess.append(medians["jit_step"] - medians["jax.jit, split"])
        print(f"{count} Variables: " + ", ".join(f"{name} {value:.0f} us" for name, value in medians.items()))
    print(f"jit_step above: median {statistics.median(excess):.0f} us, worst {max(excess):.0f} us")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}")


def measure_calls(draw: int, seed: int, calls: int) -> None:
    """Print the CPU microseconds of calls of donating steps in this thread, with a placed and with a numpy batch."""
    chance, excess = random.Random(seed), {}
    for count in [30, 400, *(chance.randint(10, 600) for _ in range(draw))]:
        mesh = lm.create_mesh(chance.choice(SIZES["mesh"]))
        layout = lm.Layout(["model"], mesh)
        batch = np.ones((8, 8), np.float32)
        placed = lm.dtensor.relayout(batch, lm.Layout(["batch", None], mesh))

        def step(params, x):
            return jax.tree.map(lambda each: each + 1, params), x.sum()

        def start(count=count, layout=layout):
            return {f"{n:04}": lm.dtensor.relayout(np.ones(8, np.float32), layout) for n in range(count)}

        shardings = jax.tree.map(lambda each: each.sharding, start())
        plain = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
        methods = {
            "jax.jit": lambda params, plain=plain, x=placed: plain(params, x),
            "jit_step": bind_batch(lm.jit_step(step, donate_argnums=0, batch_dim="batch"), placed),
            "jax.jit, numpy": lambda params, plain=plain, at=placed.sharding, x=batch: plain(
                params, jax.device_put(x, at)
            ),
            "jit_step, numpy": bind_batch(lm.jit_step(step, donate_argnums=0, batch_dim="batch"), batch),
        }
        states, times = {name: start() for name in methods}, {name: [] for name in methods}
        for _ in range(calls):
            for name, call in methods.items():
                seconds, (states[name], value) = time_call(partial(call, states[name]), time.thread_time)
                jax.block_until_ready((states[name], value))
                times[name].append(1e6 * seconds)
        medians = {name: statistics.median(values[3:]) for name, values in times.items()}
        for name in ("", ", numpy"):
            excess.setdefault(name, []).append(medians[f"jit_step{name}"] - medians[f"jax.jit{name}"])
        print(f"{count} arrays: " + ", ".join(f"{name} {value:.0f} us" for name, value in medians.items()))
    for name, values in excess.items():
        print(f"jit_step{name} above: median {statistics.median(values):.0f} us, worst {max(values):.0f} us")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}")


def bind_batch(step, x):
    return lambda params: step(params, x)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--draw", type=int, default=12, help="number of random sizes (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60, help="steps of each method (default: %(default)s)")
    parser.add_argument("--nnx", action="store_true")
    parser.add_argument("--calls", action="store_true")
    args = parser.parse_args()
    if args.calls:
        (measure_module_calls if args.nnx else measure_calls)(args.draw, args.seed, args.steps)
        return
    ratios: dict[str, list[float]] = {}
    for sizes in draw_sizes(args.draw, args.seed, SIZES):
        x = np.random.default_rng(1).normal(size=(sizes["rows"], sizes["width"])).astype("float32")
        make_steps = make_module_steps if args.nnx else make_pytree_steps
        medians = measure_steps(make_steps(sizes["width"], sizes["blocks"], sizes["mesh"]), x, args.steps)
        first = next(iter(medians.values()))
        for method, median in medians.items():
            ratios.setdefault(method, []).append(median / first)
        cells = ", ".join(
            f"{method} {median:.2f} ms ({median / first:.2f})" for method, median in medians.items()
        )
        print(f"{sizes}: {cells}", flush=True)
    for method, values in list(ratios.items())[1:]:
        print(describe_ratios(f"{method}, beside {next(iter(ratios))}", values))


if __name__ == "__main__":
    main()
