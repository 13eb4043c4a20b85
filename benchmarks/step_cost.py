"""How near the counted cost of a training step comes to what XLA's compiler makes of it.

    python benchmarks/step_cost.py                       all models on all meshes, for H100: an hour
    python benchmarks/step_cost.py --plans               the seconds that a plan takes, of 8 and 405 billion parameters
    python benchmarks/step_cost.py cpu llama 8x8         for another target, models that start so, one mesh
    python benchmarks/step_cost.py cpu --draw 200 --seed 1
                                                         pairs of a drawn model and a drawn map: the distribution of the
                                                         quotients, and the worst five
    python benchmarks/step_cost.py h100 --sizes 100 --seed 1
                                                         the same of everyday families in drawn sizes

Models of keras-hub with published widths and twelve layers (Mixtral and Whisper six in each stack), in bfloat16, with
AdamW, and a scanned stack of flax.nnx; each is counted twice, by XLA's partitioner and as XLA compiles two and three
of equal blocks, and all of it is compiled, for devices that are not there. Targets but "cpu" need the plugin of JAX for
them. Beside each are the quotients of both counts and the whole.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

MESHES = {"8x8": "data=8,model=8", "64x1": "data=64,model=1", "16x4": "data=16,model=4"}
LAYERS = 12  # of each stack
MODELS = ("llama", "gemma", "mixtral", "vit", "whisper", "bert", "scan")


def _tokens(*shape):
    import jax

    return jax.ShapeDtypeStruct(shape, "int32")


def make(name):
    """Return what makes a model, what it is called with, the preset for it and its optimizer."""
    import jax

    if name == "scan":
        return scanned()
    import keras
    import keras_hub

    keras.config.set_dtype_policy("bfloat16")
    hub = keras_hub.models
    text = {"token_ids": _tokens(64, 2048), "padding_mask": _tokens(64, 2048)}
    llama = {"vocabulary_size": 128256, "num_query_heads": 32, "num_key_value_heads": 8, "hidden_dim": 4096}
    gemma = {"vocabulary_size": 256000, "num_query_heads": 16, "num_key_value_heads": 16, "hidden_dim": 3072}
    mixtral = {"vocabulary_size": 32000, "num_query_heads": 32, "num_key_value_heads": 8, "hidden_dim": 4096}
    vit = {
        "image_shape": (224, 224, 3),
        "patch_size": 16,
        "num_heads": 16,
        "hidden_dim": 1024,
        "mlp_dim": 4096,
    }
    speech = {
        "vocabulary_size": 51865,
        "num_heads": 16,
        "hidden_dim": 1280,
        "intermediate_dim": 5120,
        "dropout": 0.0,
    }
    bert = {
        "vocabulary_size": 30522,
        "num_heads": 16,
        "hidden_dim": 1024,
        "intermediate_dim": 4096,
        "dropout": 0.0,
    }
    images = jax.ShapeDtypeStruct((256, 224, 224, 3), "float32")
    sounds = {
        "encoder_features": jax.ShapeDtypeStruct((64, 3000, 80), "float32"),
        "decoder_token_ids": _tokens(64, 448),
        "decoder_padding_mask": _tokens(64, 448),
    }
    segmented = {name: _tokens(64, 512) for name in ("token_ids", "padding_mask", "segment_ids")}
    found = {
        "llama": (lambda: hub.Llama3Backbone(num_layers=LAYERS, intermediate_dim=14336, **llama), text),
        "gemma": (
            lambda: hub.GemmaBackbone(num_layers=LAYERS, head_dim=256, intermediate_dim=49152, **gemma),
            text,
        ),
        "mixtral": (
            lambda: hub.MixtralBackbone(
                num_layers=LAYERS // 2,
                intermediate_dim=14336,
                num_experts=8,
                top_k=2,
                output_router_logits=False,
                **mixtral,
            ),
            text,
        ),
        "vit": (lambda: hub.ViTBackbone(num_layers=LAYERS, **vit), images),
        "whisper": (
            lambda: hub.WhisperBackbone(num_layers=LAYERS // 2, max_encoder_sequence_length=3000, **speech),
            sounds,
        ),
        "bert": (lambda: hub.BertBackbone(num_layers=LAYERS, **bert), segmented),
    }
    return *found[name], name, "adamw"


def scanned():
    """Return a stack of 32 blocks of flax.nnx, under one scan, as `make` does."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs):
            options = {"use_bias": False, "rngs": rngs, "param_dtype": jnp.bfloat16, "dtype": jnp.bfloat16}
            self.norm = nnx.RMSNorm(4096, rngs=rngs, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
            self.gate, self.up = nnx.Linear(4096, 14336, **options), nnx.Linear(4096, 14336, **options)
            self.down = nnx.Linear(14336, 4096, **options)

        def __call__(self, x):
            h = self.norm(x)
            return x + self.down(jax.nn.silu(self.gate(h)) * self.up(h))

    class Stack(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.split_rngs(splits=32)(nnx.vmap(Block, in_axes=0, out_axes=0))(rngs)

        def __call__(self, x):
            return nnx.scan(nnx.remat(lambda block, x: block(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(
                self.blocks, x
            )

    inputs = jax.ShapeDtypeStruct((64, 2048, 4096), "bfloat16")
    return lambda: Stack(nnx.Rngs(0)), inputs, "scan", optax.adamw(1e-4)


def rules(name, mesh):
    """Return the preset of a model on a mesh; weights that it leaves replicated are sharded over nothing."""
    import layoutmap as lm

    made = lm.Mesh(None, MESHES[mesh])
    if name != "scan":
        return lm.LayoutMap.preset(name, made)
    return lm.LayoutMap(
        made,
        {r".*(gate|up)\.kernel": (None, "data", "model"), r".*down\.kernel": (None, "model", "data")},
    )


def child(target, name, mesh):
    """Return one row, in this process."""
    os.environ["KERAS_BACKEND"] = "jax"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import layoutmap as lm

    maker, inputs, name, optimizer = make(name)
    layout_map, library = rules(name, mesh), "jax" if name == "scan" else "keras"
    start = time.perf_counter()
    options = {"inputs": inputs, "batch_dim": "data", "optimizer": optimizer, "library": library}
    lowered = lm.lower_step(maker, layout_map, **options)
    times = [time.perf_counter() - start]
    found = []
    for count in (
        lambda: lowered.count(layout_map),
        lambda: lowered.count(layout_map, target=target),
        lambda: lowered.compile(layout_map, target=target),
    ):
        start = time.perf_counter()
        found.append(count())
        times.append(time.perf_counter() - start)
    *counts, whole = found
    sent = sum(whole.sent_by_kind.values())
    is_exact = all(each.argument_bytes == whole.argument_bytes for each in counts)
    cells = [name, mesh, *(f"{each.sent_bytes / max(sent, 1):.3f}" for each in counts)]
    cells += [
        "exact" if is_exact else "no",
        *(f"{each.peak_bytes / whole.peak_bytes:.2f}" for each in counts),
    ]
    cells += [f"{whole.peak_bytes / 1e9:.2f}", *(f"{each:.1f}" for each in times)]
    print(f"| {' | '.join(cells)} |", flush=True)


def plans():
    """Return the seconds that a plan with the cost of a step takes: of Llama with 8 and with 405 billion parameters."""
    os.environ |= {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    import keras

    import layoutmap as lm
    from layoutmap.rules import zoo

    for name, mesh, rows, length, ways in (
        ("llama3_8b", "data=8,model=8", 64, 2048, (None, False, True)),
        ("llama3_405b", "data=512,model=8", 512, 4096, (None, False)),
    ):
        model = zoo.model(name)
        names = ("token_ids", "padding_mask")
        inputs = {each: keras.Input(batch_shape=(rows, length), dtype="int32") for each in names}
        layout_map = lm.LayoutMap.preset("llama", lm.Mesh(None, mesh), fsdp_dim="data")
        options = {"inputs": inputs, "batch_dim": "data", "optimizer": "adamw", "library": "keras"}
        for verify in ways:
            start, cpu = time.monotonic(), _cpu_seconds()
            plan = lm.plan(
                lambda made=model: made.make(dtype="bfloat16"),
                layout_map,
                on=f"h100:{layout_map.mesh.size}",
                advise=False,
                verify=verify,
                **options,
            )
            seconds, cpu = time.monotonic() - start, _cpu_seconds() - cpu
            print(f"{name} on {mesh}: {seconds:.1f} s, {cpu:.1f} of a CPU, {plan.cost.known_by}", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"most memory of this process: {peak >> 10} MiB")


def _cpu_seconds():
    """Return the seconds that this process and those that it started have computed."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


LIBRARIES = ("nnx", "keras", "pytree")
DEVICES = (8, 2, 64, 4, 32, 16)


def drawn(target, number, seed):
    """Drawn pairs of model and map on 2 to 64 devices: both counts, beside all of the step as XLA compiles it."""
    os.environ |= {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    import warnings

    import layoutmap as lm
    from layoutmap.testing import models

    warnings.simplefilter("ignore")
    lm.simulate_devices(max(DEVICES))  # some maps are on devices by name

    def pairs():
        for each in range(seed, seed + number):
            library = LIBRARIES[each % len(LIBRARIES)]
            devices = models.Devices(DEVICES[each % len(DEVICES)])
            case = models.draw(each, library, devices)
            inputs = case.batch[0] if library == "keras" else case.batch
            options = {"inputs": inputs, "batch_dim": case.map.batch_dim, "library": case.library}
            yield f"{library} {each} on {devices.number}", case.make_model, case.layout_map, options

    beside_xla(target, pairs(), f"seeds {seed} to {seed + number - 1} on 2 to 64 devices")


def sized(target, number, seed):
    """Models of everyday families in drawn sizes, under drawn maps on 2 to 64 devices, as `drawn`."""
    os.environ |= {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    import drawn_step_models

    pairs = map(drawn_step_models.draw, range(seed, seed + number))
    beside_xla(target, pairs, f"drawn sizes, seeds {seed} to {seed + number - 1}, on 2 to 64 devices")


def beside_xla(target, pairs, about):
    """Count steps by the partitioner and by XLA's compiler, and print the quotients of both and the whole step."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    import hlo_proto  # reads the compiled module without the library's code

    import layoutmap as lm
    from layoutmap.cost.jax.counting import flops_of
    from layoutmap.cost.jax.partitioned import read

    found, without, exact = {"estimate": [], "compiled": []}, {}, 0
    for name, maker, layout_map, options in pairs:
        try:
            step = lm.lower_step(maker, layout_map, **options)
            counts = step.count(layout_map), step.count(layout_map, target=target)
            made = step.compile(layout_map, target=target)
        except lm.LayoutMapError as error:
            without[error.what[:60]] = without.get(error.what[:60], 0) + 1
            continue
        whole = sum(hlo_proto.sent_by_text(made.text, layout_map.mesh.size).values())
        flops = sum(flops_of(read(made.text, layout_map.mesh)).values())
        exact += counts[0].argument_bytes == made.argument_bytes
        for rows, cost in zip(found.values(), counts, strict=True):
            sent = cost.sent_bytes
            if target == "cpu" and rows is found["estimate"]:
                # It makes no reduce-scatters, and sends twice their bytes as all-reduces.
                sent += sum(c.sent_bytes(cost.mesh) for c in cost.collectives if c.kind == "reduce_scatter")
            row = quotient(sent, whole), cost.peak_bytes / made.peak_bytes
            rows.append((*row, quotient(sum(cost.flops.values()), flops), name))
        last = "; ".join(" ".join(f"{each:.3f}" for each in rows[-1][:3]) for rows in found.values())
        gigabytes = f"{made.peak_bytes / 1e9:.2f} GB"
        print(f"{name}, {gigabytes}: bytes, peak, FLOPs {last}", file=sys.stderr, flush=True)
    print(f"XLA for {target}, {about}; arguments exact: {exact}")
    for known, rows in found.items():
        print(f"{known}, {len(rows)} pairs")
        for what, place in (("bytes", 0), ("peak", 1), ("FLOPs", 2)):
            print("  " + distribution(what, [(row[place], row[-1]) for row in rows]))
    for what, times in without.items():
        print(f"not counted, {times}: {what}")


def quotient(counted, whole):
    """What was counted by what it is; no bytes of none are all of them."""
    return 1.0 if counted == whole else counted / whole if whole else math.inf


QUANTILES = {"least": 0, "5 %": 0.05, "median": 0.5, "95 %": 0.95, "most": 1}


def distribution(what, rows):
    """Return how many quotients are how near to 1, their quantiles, and the five that are furthest from it."""
    quotients = sorted(each for each, _ in rows)
    near = {f"{most:.1%}": sum(abs(q - 1) <= most for q in quotients) for most in (0.001, 0.02, 0.05, 0.15)}
    within = ", ".join(f"{number} within {most}" for most, number in near.items())
    between = sum(0.95 <= q <= 1.2 for q in quotients)
    share = {name: quotients[int(part * (len(quotients) - 1))] for name, part in QUANTILES.items()}
    furthest = sorted(rows, key=lambda row: -abs(math.log(min(max(row[0], 1e-9), 1e9))))[:5]
    return (
        f"{what}: {within}, {between} from 0.95 to 1.20, {sum(q < 0.95 for q in quotients)} below; "
        + ", ".join(f"{name} {q:.2f}" for name, q in share.items())
        + "\n    furthest: "
        + "; ".join(f"{name}: {q:.2f}" for q, name in furthest)
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", nargs="?", default="h100", help="what XLA compiles for")
    parser.add_argument("models", nargs="?", default="", help="how the names of the models begin")
    parser.add_argument("meshes", nargs="*", metavar="mesh", help=f"some of {', '.join(MESHES)}")
    parser.add_argument("--plans", action="store_true", help="the seconds that plans of large models take")
    parser.add_argument("--draw", type=int, metavar="N", help="so many drawn pairs of model and map")
    parser.add_argument("--sizes", type=int, metavar="N", help="so many families in drawn sizes and maps")
    parser.add_argument("--seed", type=int, default=1, help="the seed of the first of them")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        child(options.target, options.models, *options.meshes)
        return
    if options.plans:
        plans()
        return
    if options.draw or options.sizes:
        (sized if options.sizes else drawn)(options.target, options.draw or options.sizes, options.seed)
        return
    print(
        "| model | mesh | sent, estimate | sent, compiled | arguments | peak, estimate | peak, compiled |",
        end="",
    )
    print(" whole peak in GB | s to trace | s to estimate | s to compile blocks | s to compile all |")
    print(f"|{'---|' * 12}", flush=True)
    for name in MODELS:
        for mesh in options.meshes or MESHES:
            if name.startswith(options.models):
                command = [sys.executable, __file__, "--one", options.target, name, mesh]
                subprocess.run(command, check=False)


if __name__ == "__main__":
    main()
