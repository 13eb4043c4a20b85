"""Compare the layout maps that `lm.search` finds with those of experts, and measure the search.

    python benchmarks/search.py                     the published models of the table: a few minutes each
    python benchmarks/search.py vit whisper         models with these prefixes
    python benchmarks/search.py --draw 50 --seed 1  random models: the found map beside the best map of an
                                                    expert. XLA compiles each for H100 (install its plugin)
    python benchmarks/search.py --small 4 --seed 1  random transformers of about 10 MB, on h100:8: CPU seconds
    python benchmarks/search.py --measure           the order of five maps by cost and by measured time, on 8 CPUs

The models are those of keras-hub at full size, in bfloat16, with AdamW. "search s" is the wall time of `lm.search`,
"building s" the part of it that makes the model, and "CPU s" its CPU time, which other load does not change. Step times
are estimates at the peak speed of the machine. "recomputing" marks a map that fits only if blocks recompute their
activations.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial

from measure import EIGHT_DEVICES, KERAS_ON_CPU, draw_sizes, time_call

CASES = {  # model: machine, batch, memory of a device
    "llama3_8b": ("h100:64", 64, None),
    "llama3_70b": ("v5p:256", 256, 95 * 10**9),
    "vit_large": ("h100:64", 2048, None),
    "whisper_large_v3": ("h100:64", 256, None),
    "mixtral_8x7b": ("h100:64", 64, None),
}
SEQUENCES = {"mixtral_8x7b": 1024}  # longer sequences do not fit 64 devices without recomputing activations
HEAD = (
    "model",
    "machine",
    "found",
    "step",
    "memory",
    "data parallel",
    "fully sharded",
    "best expert",
    "maps",
    "search s",
    "building s",
    "CPU s",
)


def make_inputs(name, batch):
    """Return the shapes of a model's inputs."""
    import jax

    def make_tokens(*shape):
        return jax.ShapeDtypeStruct(shape, "int32")

    if name.startswith("vit"):
        return jax.ShapeDtypeStruct((batch, 224, 224, 3), "float32")
    if name.startswith("whisper"):
        sound = jax.ShapeDtypeStruct((batch, 3000, 128), "float32")
        return {
            "encoder_features": sound,
            "decoder_token_ids": make_tokens(batch, 448),
            "decoder_padding_mask": make_tokens(batch, 448),
        }
    length = SEQUENCES.get(name, 2048)
    return {"token_ids": make_tokens(batch, length), "padding_mask": make_tokens(batch, length)}


def measure_search(name):
    """Search the map of one model in this process, and print its row as JSON."""
    os.environ |= KERAS_ON_CPU
    import layoutmap as lm
    from layoutmap.cost import layout_map_search as module
    from layoutmap.rules import zoo

    machine, batch, memory = CASES[name]
    model, inputs = zoo.find_model(name), make_inputs(name, batch)
    lower, building = module.lower_step, []

    def lower_timed(*args, **options):
        seconds, step = time_call(lambda: lower(*args, **options))
        building.append(seconds)
        return step

    module.lower_step = lower_timed
    begin, cpu = time.monotonic(), time.process_time()
    try:
        found = lm.search(
            lambda: model.make(dtype="bfloat16"),
            inputs,
            machine,
            optimizer="adamw",
            memory=memory,
            library="keras",
        )
    except lm.PlanError as error:
        print(json.dumps({"text": str(error)}))
        return
    seconds, cpu = time.monotonic() - begin, time.process_time() - cpu
    times = {}
    for row in found.rows:
        for kind in ("data parallel", "fully sharded"):
            if row[0].removesuffix(", recomputing") == kind:
                times[kind] = f"{row[2]}, {row[4]}" if row[4].startswith("lacks") else row[2]
    experts = [row for row in found.rows if not row[0].startswith("found")]
    best = next((row for row in experts if not row[4].startswith("lacks")), None)
    row = [
        name,
        machine,
        f"{found.layout_map.mesh}{', recomputing' * bool(found.recompute)}",
        f"{1000 * found.cost.step_seconds:.1f} ms",
        f"{found.cost.step.peak_bytes / 1e9:.1f} GB",
        *(times.get(kind, "-") for kind in ("data parallel", "fully sharded")),
        f"{best[0]}, {best[1]}: {best[2]}" if best else "none fits",
        str(found.num_tried),
        *(f"{each:.0f}" for each in (seconds, building[0], cpu)),
    ]
    print(json.dumps({"row": row, "text": str(found)}))


def compare_drawn(number, seed):
    """Compare the found map with the best map of an expert for random models, as XLA compiles them for H100."""
    os.environ |= KERAS_ON_CPU
    import warnings

    import layoutmap as lm
    from layoutmap.cost import layout_map_search as module
    from layoutmap.testing import models

    warnings.simplefilter("ignore")
    choose, quotients, refused = module.choose_best_compiled_map, [], {}

    def compare_all(outcome, compiled):
        found = choose(outcome, compiled)
        known = {each.cost_key: each for each in found.built_in_maps if each.compiled_bytes is not None}
        limit, seconds = outcome.best.max_bytes, []
        for each in outcome.built_in_maps:
            if each.cost is not None:
                figures = known[each.cost_key].cost if each.cost_key in known else compiled(each)
                if figures.peak_bytes <= limit:
                    seconds.append(figures.seconds)
        quotients.append((found.best.cost.seconds / min(seconds), len(seconds)))
        return found

    module.choose_best_compiled_map = compare_all
    for each in range(seed, seed + number):
        library = ("nnx", "keras", "pytree")[each % 3]
        case = models.draw(each, library)
        inputs = case.batch[0] if library == "keras" else case.batch
        begin = time.monotonic()
        try:
            lm.search(case.make_model, inputs, "h100:8", tries=24, library=case.library, progress=False)
        except lm.LayoutMapError as error:
            refused[error.what[:60]] = refused.get(error.what[:60], 0) + 1
            continue
        print(
            f"{each} {library}: {quotients[-1][0]:.3f} of the best of {quotients[-1][1]} experts' maps, "
            f"{time.monotonic() - begin:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    ratios = sorted(quotient for quotient, _ in quotients)
    print(
        f"{len(ratios)} models, seeds {seed} to {seed + number - 1}: the time of a step beside the best expert's"
    )
    print(
        f"worse by over 1 %: {sum(q > 1.01 for q in ratios)}, better by over 1 %: {sum(q < 0.99 for q in ratios)}"
    )
    print(f"least {ratios[0]:.3f}, median {ratios[len(ratios) // 2]:.3f}, most {ratios[-1]:.3f}")
    for error, times in refused.items():
        print(f"not searched, {times}: {error}")


def measure_small(number, seed):
    """Print the CPU seconds of the search for random transformers of about 10 MB in float32, on 8 devices."""
    os.environ |= KERAS_ON_CPU
    import jax
    import keras

    import layoutmap as lm

    def make(width, blocks):
        tokens = keras.Input((128,), dtype="int32")
        x = keras.layers.Embedding(1024, width)(tokens)
        for _ in range(blocks):
            y = keras.layers.LayerNormalization()(x)
            x = x + keras.layers.MultiHeadAttention(8, width // 8)(y, y)
            y = keras.layers.Dense(4 * width, activation="gelu")(keras.layers.LayerNormalization()(x))
            x = x + keras.layers.Dense(width)(y)
        return keras.Model(tokens, keras.layers.Dense(1024)(x))

    batch, times = jax.ShapeDtypeStruct((64, 128), "int32"), []
    for sizes in draw_sizes(number, seed, {"sizes": ((192, 4), (224, 3), (256, 2), (160, 6))}):
        build = partial(make, *sizes["sizes"])
        search = partial(lm.search, build, batch, "h100:8", optimizer="adamw", library="keras", verify=False)
        seconds, found = time_call(search, time.process_time)
        times.append(seconds)
        print(f"width and blocks {sizes['sizes']}: {seconds:.1f} CPU s, {found.num_tried} maps", flush=True)
    print(f"median {statistics.median(times):.1f} CPU s, worst {max(times):.1f} of {number} drawn sizes")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}")


def compare_orders():
    """Print the order of five maps by cost and by measured steps, on 8 simulated CPU devices."""
    os.environ |= KERAS_ON_CPU | EIGHT_DEVICES
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    import layoutmap as lm
    from layoutmap.cost.cost import Cost
    from layoutmap.cost.machines import machine_named

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(1024, 4096, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(4096, 1024, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return x + self.down(nnx.gelu(self.up(x)))

    class Stack(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    up, down = r".*\.up\.kernel$", r".*\.down\.kernel$"
    maps = {
        "data parallel": lm.LayoutMap("data=8", rest="replicated"),
        "fully sharded": lm.LayoutMap("data=8", {up: ("data", None), down: ("data", None)}),
        "Megatron 2x4": lm.LayoutMap("data=2,model=4", {up: (None, "model"), down: ("model", None)}),
        "Megatron 2x4, fully sharded": lm.LayoutMap(
            "data=2,model=4",
            {up: ("data", "model"), down: ("model", "data")},
            activations={r"blocks\.\d+$": ("data", None)},
        ),
        "replicated batch, Megatron 8": lm.LayoutMap("model=8", {up: (None, "model"), down: ("model", None)}),
    }
    batch, optimizer = jax.ShapeDtypeStruct((512, 1024), "float32"), optax.sgd(1e-3)
    by_cost, by_clock = {}, {}
    for name, layout_map in maps.items():
        batch_dim = "data" if "data" in layout_map.mesh else None
        options = {"inputs": batch, "batch_dim": batch_dim, "optimizer": optimizer, "library": "jax"}
        lowered = lm.lower_step(lambda: Stack(nnx.Rngs(0)), layout_map, **options)
        cost = Cost(lowered.count(layout_map), machine_named("h100:8"), batch_dim=batch_dim)
        by_cost[name] = cost.serial_seconds
        real = lm.LayoutMap(lm.create_mesh([(d.name, d.size) for d in layout_map.mesh.mesh_dims]))
        real.update({pattern: layout.sharding_specs for pattern, layout in layout_map.items()})
        real.activations.update({p: layout.sharding_specs for p, layout in layout_map.activations.items()})
        real.rest = "replicated"
        model = real.build(lambda: Stack(nnx.Rngs(0)), batch_dim=batch_dim, library="jax")
        spec = jax.sharding.PartitionSpec(batch_dim)
        mesh = jax.tree.leaves(nnx.state(model))[0].sharding.mesh
        x = jax.device_put(jnp.ones((512, 1024)), jax.sharding.NamedSharding(mesh, spec))

        @nnx.jit
        def step(model, x):
            def compute_loss(model):
                return (model(x) ** 2).mean()

            gradients = nnx.grad(compute_loss)(model)
            nnx.update(model, jax.tree.map(lambda w, g: w - 1e-3 * g, nnx.state(model, nnx.Param), gradients))

        clock = []
        for _ in range(7):
            begin = time.perf_counter()
            step(model, x)
            jax.block_until_ready(nnx.state(model))
            clock.append(time.perf_counter() - begin)
        by_clock[name] = sorted(clock[2:])[len(clock[2:]) // 2]
    print(f"{'map':<32} {'by cost':>12} {'measured':>12}")
    for name in maps:
        print(f"{name:<32} {1e6 * by_cost[name]:>9.1f} us {1000 * by_clock[name]:>9.1f} ms")
    print("order by cost:    ", " < ".join(sorted(by_cost, key=by_cost.__getitem__)))
    print("order as measured:", " < ".join(sorted(by_clock, key=by_clock.__getitem__)))


def main(arguments):
    """Print a row for each model, or run one of the options."""
    if arguments[:1] == ["--child"]:
        return measure_search(arguments[1])
    if arguments[:1] == ["--measure"]:
        return compare_orders()
    if arguments[:1] == ["--small"]:
        return measure_small(int(arguments[1]), int(arguments[3]))
    if arguments[:1] == ["--draw"]:
        return compare_drawn(int(arguments[1]), int(arguments[3]))
    print("\t".join(HEAD), flush=True)
    for name in CASES:
        if arguments and not name.startswith(tuple(arguments)):
            continue
        done = subprocess.run([sys.executable, __file__, "--child", name], capture_output=True, text=True)
        if done.returncode:
            print(f"{name}\tfailed\n{done.stderr[-2000:]}", flush=True)
            continue
        result = json.loads(done.stdout.splitlines()[-1])
        print("\t".join(result.get("row", [name])), flush=True)
        print("\n" + result["text"] + "\n", flush=True)
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
