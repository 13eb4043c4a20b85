"""Count the bytes that the corrections of convolutions on JAX add to the collectives of a training step.

    python benchmarks/convolution_bytes.py                 twenty random nets: some minutes
    python benchmarks/convolution_bytes.py --seed 7 --count 50

Each net is random: plain, depthwise, residual, or residual with a strided shortcut, with random sizes, mesh, and
layouts of its kernels. The step is `jax.jit` of value, gradients, and an update, with a sharding for each argument and
result. XLA compiles it twice for 8 CPU devices: before this library replaces the lowering of convolutions, and after.
Both programs are only compiled, so that an error of XLA (docs/xla-faults.md) changes no count. Each line has the bytes
of the outputs of all collectives on one device, and the last line the median and the worst of all ratios.
"""

from __future__ import annotations

import os
import time
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from activations import count_collectives_in_program
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from measure import describe_ratios, draw_sizes, make_parser

import layoutmap as lm

NUMBERS = ("NHWC", "HWIO", "NHWC")


CHOICES: dict[str, list[Any]] = {
    "kind": ["plain", "depthwise", "residual", "strided shortcut"],
    "blocks": [1, 2, 3],
    "rows": [8, 16],
    "size": [8, 16, 32],
    "features": [16, 32, 64],
    "window": [1, 3, 5],
    "dims": [(1, 8), (2, 4), (4, 2)],
    # the axis of each block's two kernels that `model` shards: the features of the input, of the output, or none
    "axes": [(3, 2), (3, 3), (2, 3), (3, None), (None, 3)],
}


def make_step(net: dict[str, Any]) -> Any:
    """Return the step of a net, with a sharding for each argument and result, and the shapes of its arguments."""
    features, window = net["features"], net["window"]
    is_depthwise, is_strided = net["kind"] == "depthwise", net["kind"] == "strided shortcut"
    first = (window, window, 1 if is_depthwise else features, features)
    shapes = {"first": first, "second": (window, window, features, features)}
    shapes |= {"shortcut": (1, 1, features, features)} if is_strided else {}
    mesh = Mesh(np.array(jax.devices()).reshape(net["dims"]), ("batch", "model"))

    def shard(axis: int | None) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(("model" if axis == n else None) for n in range(4))))

    axes = dict(zip(("first", "second"), net["axes"], strict=True)) | {"shortcut": net["axes"][1]}
    if is_depthwise and axes["first"] is not None:
        axes["first"] = 3
    block = {
        name: (jax.ShapeDtypeStruct(shape, "float32"), shard(axes[name])) for name, shape in shapes.items()
    }
    weights = [{name: spec for name, (spec, _) in block.items()}] * net["blocks"]
    shardings = [{name: sharding for name, (_, sharding) in block.items()}] * net["blocks"]
    rows = NamedSharding(mesh, PartitionSpec("batch"))
    x = jax.ShapeDtypeStruct((net["rows"], net["size"], net["size"], features), "float32")

    def convolve(x: Any, kernel: Any, stride: int = 1, groups: int = 1) -> Any:
        strides = [stride, stride]
        return jax.lax.conv_general_dilated(
            x, kernel, strides, "SAME", dimension_numbers=NUMBERS, feature_group_count=groups
        )

    def compute_loss(weights: Any, x: Any) -> Any:
        for block in weights:
            stride = 2 if is_strided else 1
            y = jax.nn.relu(convolve(x, block["first"], stride, features if is_depthwise else 1))
            y = convolve(y, block["second"])
            if is_strided:
                x = jax.nn.relu(y + convolve(x, block["shortcut"], 2))
            else:
                x = jax.nn.relu(y + x if net["kind"] == "residual" else y)
        return (x**2).mean()

    def step(weights: Any, x: Any) -> Any:
        loss, gradients = jax.value_and_grad(compute_loss)(weights, x)
        return loss, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    results = NamedSharding(mesh, PartitionSpec()), shardings
    jitted = jax.jit(step, in_shardings=(shardings, rows), out_shardings=results, donate_argnums=0)
    return jitted, (weights, x)


def count_bytes(net: dict[str, Any]) -> int:
    """Return the bytes of the outputs of all collectives of a step on one device."""
    step, arguments = make_step(net)
    return sum(count_collectives_in_program(step.lower(*arguments).compile().as_text() or "")[1].values())


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--seed", type=int, default=int(time.strftime("%Y%m%d")), help="default: today's date"
    )
    parser.add_argument("--count", type=int, default=20)
    options = parser.parse_args()
    nets = list(draw_sizes(options.count, options.seed, CHOICES))
    by_hand = [count_bytes(net) for net in nets]  # before this library replaces the lowering
    mesh = lm.create_mesh("batch=2,model=4", device_type="cpu")
    lm.dtensor.relayout(np.zeros(()), lm.Layout.replicated(mesh, 0))
    ratios: dict[str, list[float]] = {}
    for net, xla_bytes in zip(nets, by_hand, strict=True):
        own_bytes = count_bytes(net)
        print(f"{own_bytes / 1e6:8.2f} / {xla_bytes / 1e6:8.2f} MB   {net}", flush=True)
        ratios.setdefault(net["kind"], []).append(own_bytes / xla_bytes)  # gradients always need collectives
    for kind, several in sorted(ratios.items()):
        print(describe_ratios(kind, several))
    print(
        describe_ratios(
            f"all, seed {options.seed}", [each for several in ratios.values() for each in several]
        )
    )


if __name__ == "__main__":
    main()
