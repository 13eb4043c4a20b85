"""Compare the counted cost of a training step with the step that XLA compiles.

    python benchmarks/step_cost.py                       all models on all meshes, for H100: an hour
    python benchmarks/step_cost.py --plans               the seconds of plans with 8 and 405 billion parameters
    python benchmarks/step_cost.py cpu llama 8x8         for another target, models with this prefix, one mesh
    python benchmarks/step_cost.py cpu --draw 200 --seed 1
                                                         pairs of a random model and a random map: the distribution
                                                         of the quotients, and the worst five
    python benchmarks/step_cost.py h100 --sizes 100 --seed 1
                                                         the same for common models in random sizes

The models are those of keras-hub with published widths and twelve layers (Mixtral and Whisper six in each stack), in
bfloat16, with AdamW, and a scanned stack of flax.nnx. Each step is counted twice: by XLA's partitioner ("estimate"),
and from two and three equal blocks that XLA compiles ("compiled"). XLA also compiles the whole step, for devices that
do not exist. The table has the quotients of both counts and the whole. Targets other than "cpu" need JAX's plugin for
them.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time

from measure import KERAS_ON_CPU, TESTS, make_parser, read_peak_bytes, time_call

MESHES = {"8x8": "data=8,model=8", "64x1": "data=64,model=1", "16x4": "data=16,model=4"}
LAYERS = 12  # of each stack
MODELS = ("llama", "gemma", "mixtral", "vit", "whisper", "bert", "scan")


def make_tokens(*shape):
    import jax

    return jax.ShapeDtypeStruct(shape, "int32")


def make(name):
    """Return a function that makes a model, the shapes of its inputs, its preset, and its optimizer."""
    import jax

    if name == "scan":
        return make_scanned()
    import keras
    import keras_hub

    keras.config.set_dtype_policy("bfloat16")
    hub = keras_hub.models
    text = {"token_ids": make_tokens(64, 2048), "padding_mask": make_tokens(64, 2048)}
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
        "decoder_token_ids": make_tokens(64, 448),
        "decoder_padding_mask": make_tokens(64, 448),
    }
    segmented = {name: make_tokens(64, 512) for name in ("token_ids", "padding_mask", "segment_ids")}
    models = {
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
    return *models[name], name, "adamw"


def make_scanned():
    """Return a stack of 32 blocks of flax.nnx under one scan, in the form of `make`."""
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


def make_layout_map(name, mesh):
    """Return the preset of a model on a mesh, or the rules of the scanned stack."""
    import layoutmap as lm

    devices = lm.Mesh(None, MESHES[mesh])
    if name != "scan":
        return lm.LayoutMap.preset(name, devices)
    return lm.LayoutMap(
        devices,
        {r".*(gate|up)\.kernel": (None, "data", "model"), r".*down\.kernel": (None, "model", "data")},
    )


def count_model(target, name, mesh):
    """Count and compile one model in this process, and print its row."""
    os.environ |= KERAS_ON_CPU
    import layoutmap as lm

    maker, inputs, name, optimizer = make(name)
    layout_map, library = make_layout_map(name, mesh), "jax" if name == "scan" else "keras"
    options = {"inputs": inputs, "batch_dim": "data", "optimizer": optimizer, "library": library}
    tracing, lowered = time_call(lambda: lm.lower_step(maker, layout_map, **options))
    results = [
        time_call(lambda: lowered.count(layout_map)),
        time_call(lambda: lowered.count(layout_map, target=target)),
        time_call(lambda: lowered.compile(layout_map, target=target)),
    ]
    times = [tracing, *(seconds for seconds, _ in results)]
    *counts, whole = (each for _, each in results)
    sent = sum(whole.sent_by_kind.values())
    is_exact = all(each.argument_bytes == whole.argument_bytes for each in counts)
    cells = [name, mesh, *(f"{each.sent_bytes / max(sent, 1):.3f}" for each in counts)]
    cells += [
        "exact" if is_exact else "no",
        *(f"{each.peak_bytes / whole.peak_bytes:.2f}" for each in counts),
    ]
    cells += [f"{whole.peak_bytes / 1e9:.2f}", *(f"{each:.1f}" for each in times)]
    print(f"| {' | '.join(cells)} |", flush=True)


def measure_plans():
    """Print the seconds of plans with the cost of a step, for Llama with 8 and with 405 billion parameters."""
    os.environ |= KERAS_ON_CPU
    import keras

    import layoutmap as lm
    from layoutmap.rules import zoo

    for name, mesh, rows, length, verifications in (
        ("llama3_8b", "data=8,model=8", 64, 2048, (None, False, True)),
        ("llama3_405b", "data=512,model=8", 512, 4096, (None, False)),
    ):
        model = zoo.find_model(name)
        names = ("token_ids", "padding_mask")
        inputs = {each: keras.Input(batch_shape=(rows, length), dtype="int32") for each in names}
        layout_map = lm.LayoutMap.preset("llama", lm.Mesh(None, mesh), fsdp_dim="data")
        options = {"inputs": inputs, "batch_dim": "data", "optimizer": "adamw", "library": "keras"}
        for verify in verifications:
            start, cpu = time.monotonic(), read_cpu_seconds()
            plan = lm.plan(
                lambda model=model: model.make(dtype="bfloat16"),
                layout_map,
                on=f"h100:{layout_map.mesh.size}",
                advise=False,
                verify=verify,
                **options,
            )
            seconds, cpu = time.monotonic() - start, read_cpu_seconds() - cpu
            print(
                f"{name} on {mesh}: {seconds:.1f} s, {cpu:.1f} of a CPU, {plan.cost.step.known_by}",
                flush=True,
            )
    print(f"most memory of this process: {read_peak_bytes() >> 20} MiB")


def read_cpu_seconds():
    """Return the CPU seconds of this process and its children."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


LIBRARIES = ("nnx", "keras", "pytree")
DEVICES = (8, 2, 64, 4, 32, 16)


def compare_drawn(target, number, seed):
    """Compare the counts of random pairs of model and map on 2 to 64 devices with the steps that XLA compiles."""
    os.environ |= KERAS_ON_CPU
    import warnings

    import layoutmap as lm
    from layoutmap.testing import models

    warnings.simplefilter("ignore")
    lm.simulate_devices(max(DEVICES))  # some maps name their devices

    def draw_pairs():
        for each in range(seed, seed + number):
            library = LIBRARIES[each % len(LIBRARIES)]
            devices = models.Devices(DEVICES[each % len(DEVICES)])
            case = models.draw(each, library, devices)
            inputs = case.batch[0] if library == "keras" else case.batch
            options = {"inputs": inputs, "batch_dim": case.map.batch_dim, "library": case.library}
            yield f"{library} {each} on {devices.number}", case.make_model, case.layout_map, options

    compare_with_xla(target, draw_pairs(), f"seeds {seed} to {seed + number - 1} on 2 to 64 devices")


def compare_sized(target, number, seed):
    """Compare the counts of common models in random sizes and maps with the steps that XLA compiles."""
    os.environ |= KERAS_ON_CPU
    import drawn_step_models

    pairs = map(drawn_step_models.draw, range(seed, seed + number))
    compare_with_xla(target, pairs, f"drawn sizes, seeds {seed} to {seed + number - 1}, on 2 to 64 devices")


def compare_with_xla(target, pairs, about):
    """Count steps by the partitioner and by XLA's compiler, and print the quotients of both and the whole step."""
    sys.path.append(str(TESTS))
    import hlo_proto  # reads the compiled module without the library's code

    import layoutmap as lm
    from layoutmap.cost.jax.counting import count_flops
    from layoutmap.cost.jax.partitioned import parse_partitioned_step

    quotients, refused, exact = {"estimate": [], "compiled": []}, {}, 0
    for name, maker, layout_map, options in pairs:
        try:
            step = lm.lower_step(maker, layout_map, **options)
            counts = step.count(layout_map), step.count(layout_map, target=target)
            compiled = step.compile(layout_map, target=target)
        except lm.LayoutMapError as error:
            refused[error.what[:60]] = refused.get(error.what[:60], 0) + 1
            continue
        whole = sum(hlo_proto.sent_by_text(compiled.text, layout_map.mesh.size).values())
        flops = sum(count_flops(parse_partitioned_step(compiled.text, layout_map.mesh)).values())
        exact += counts[0].argument_bytes == compiled.argument_bytes
        for rows, cost in zip(quotients.values(), counts, strict=True):
            sent = cost.sent_bytes
            if target == "cpu" and rows is quotients["estimate"]:
                # XLA for CPU has no reduce-scatter, and its all-reduce sends twice the bytes.
                sent += sum(
                    c.count_sent_bytes(cost.mesh) for c in cost.collectives if c.kind == "reduce_scatter"
                )
            row = divide(sent, whole), cost.peak_bytes / compiled.peak_bytes
            rows.append((*row, divide(sum(cost.flops.values()), flops), name))
        last = "; ".join(" ".join(f"{each:.3f}" for each in rows[-1][:3]) for rows in quotients.values())
        gigabytes = f"{compiled.peak_bytes / 1e9:.2f} GB"
        print(f"{name}, {gigabytes}: bytes, peak, FLOPs {last}", file=sys.stderr, flush=True)
    print(f"XLA for {target}, {about}; arguments exact: {exact}")
    for known, rows in quotients.items():
        print(f"{known}, {len(rows)} pairs")
        for title, column in (("bytes", 0), ("peak", 1), ("FLOPs", 2)):
            print("  " + describe_distribution(title, [(row[column], row[-1]) for row in rows]))
    for error, times in refused.items():
        print(f"not counted, {times}: {error}")


def divide(counted, whole):
    """Divide a count by the compiled figure. The quotient of equal figures is 1, even of zeros."""
    return 1.0 if counted == whole else counted / whole if whole else math.inf


QUANTILES = {"least": 0, "5 %": 0.05, "median": 0.5, "95 %": 0.95, "most": 1}


def describe_distribution(title, rows):
    """Describe quotients: the number near 1, their quantiles, and the five that are furthest from 1."""
    quotients = sorted(each for each, _ in rows)
    near = {f"{most:.1%}": sum(abs(q - 1) <= most for q in quotients) for most in (0.001, 0.02, 0.05, 0.15)}
    within = ", ".join(f"{number} within {most}" for most, number in near.items())
    between = sum(0.95 <= q <= 1.2 for q in quotients)
    share = {name: quotients[int(part * (len(quotients) - 1))] for name, part in QUANTILES.items()}
    furthest = sorted(rows, key=lambda row: -abs(math.log(min(max(row[0], 1e-9), 1e9))))[:5]
    return (
        f"{title}: {within}, {between} from 0.95 to 1.20, {sum(q < 0.95 for q in quotients)} below; "
        + ", ".join(f"{name} {q:.2f}" for name, q in share.items())
        + "\n    furthest: "
        + "; ".join(f"{name}: {q:.2f}" for q, name in furthest)
    )


def main():
    parser = make_parser(__doc__)
    parser.add_argument("target", nargs="?", default="h100", help="target of XLA")
    parser.add_argument("models", nargs="?", default="", help="prefix of the models")
    parser.add_argument("meshes", nargs="*", metavar="mesh", help=f"some of {', '.join(MESHES)}")
    parser.add_argument("--plans", action="store_true", help="the seconds of plans of large models")
    parser.add_argument("--draw", type=int, metavar="N", help="number of random pairs of model and map")
    parser.add_argument(
        "--sizes", type=int, metavar="N", help="number of common models in random sizes and maps"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the first pair")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        count_model(options.target, options.models, *options.meshes)
        return
    if options.plans:
        measure_plans()
        return
    if options.draw or options.sizes:
        (compare_sized if options.sizes else compare_drawn)(
            options.target, options.draw or options.sizes, options.seed
        )
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
