"""Compare the CPU time of torch operators on unsharded tensors, on DTensors, and on DTensors under this library.

    python benchmarks/torch_operators.py            all operators: a minute
    python benchmarks/torch_operators.py view add
    python benchmarks/torch_operators.py --dropout 64

A time is the CPU time of one forward call in microseconds, on mesh batch=2,model=2. The other processes of the group do
not exist, so collectives return at once. The methods take turns in several rounds, and the least time counts.

"plain" is an unsharded tensor. "summed" is DTensor plus the sum over the mesh, which DTensor defers and layoutmap
computes at once. Differences and ratios refer to "summed" if it exists. "a mode" is DTensor in a function mode that
does nothing, which shows torch's own cost of a mode. "corrected" marks operators that DTensor alone computes wrongly or
not at all. `--dropout` measures dropout of a batch over so many devices: the time of one device with `draws="exact"`,
with `draws="tiles"`, and for its shard as an unsharded tensor.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from measure import make_parser, read_peak_bytes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import layoutmap as lm

ROUNDS, SECONDS = 7, 0.05
ROWS = ("batch", None, None)
X, Y = torch.randn(4, 16, 64), torch.randn(4, 16, 64)
WEIGHT, BIAS = torch.randn(128, 64), torch.randn(128)
HEADS = torch.randn(4, 4, 16, 16)
LOGITS, LABELS = torch.randn(64, 32), torch.randint(0, 32, (64,))
# Function, its tensors with their layouts, and whether DTensor alone is wrong.
OPERATORS: dict[str, tuple[Callable[..., Any], list[Any], bool]] = {
    "shape": (lambda x: x.shape, [(X, ROWS)], False),
    "size": (lambda x: x.size(1), [(X, ROWS)], False),
    "view": (lambda x: x.view(4, 16, 4, 16), [(X, ROWS)], False),
    "getitem": (lambda x: x[:, 2], [(X, ROWS)], False),
    "transpose": (lambda x: x.transpose(1, 2), [(X, ROWS)], False),
    "add": (torch.add, [(X, ROWS), (Y, ROWS)], False),
    "mul": (lambda x, y: x * y, [(X, ROWS), (Y, ROWS)], False),
    "gelu": (F.gelu, [(X, ROWS)], False),
    "softmax": (lambda x: F.softmax(x, -1), [(X, ROWS)], False),
    "layer_norm": (lambda x: F.layer_norm(x, (64,)), [(X, ROWS)], False),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), [(X, ROWS)], True),
    "linear": (F.linear, [(X, ROWS), (WEIGHT, ("model", None)), (BIAS, ("model",))], False),
    "mean": (lambda x: x.mean(), [(X, ROWS)], False),
    "dropout": (lambda x: F.dropout(x, 0.1), [(X, ROWS)], True),
    "cross_entropy": (F.cross_entropy, [(LOGITS, ("batch", None)), (LABELS, ("batch",))], True),
    "sdpa": (F.scaled_dot_product_attention, [(HEADS, ("batch", "model", None, None))] * 3, True),
}
# DTensor defers the sum over the mesh of these operators. layoutmap computes it at once.
SUMS = ("mean", "cross_entropy")


class Idle(TorchFunctionMode):
    """A mode that does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


def call_and_sum(call: Callable[[], Any]) -> Any:
    """Call a function of DTensors, and compute the sum over the mesh that it defers."""
    return call().redistribute(placements=[Replicate(), Replicate()])


def measure_cpu_seconds(call: Callable[[], Any]) -> float:
    """Return the CPU seconds of one call."""
    number, start = 0, time.process_time()
    while time.process_time() - start < SECONDS:
        call()
        number += 1
    return (time.process_time() - start) / number


def compare_dropout(number: int) -> None:
    """Compare dropout of a batch over some devices, on one of them, with dropout of its shard alone."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
    mesh = lm.create_mesh({"batch": number})
    shard = torch.randn(8, 128, 512)
    row = lm.dtensor.relayout(torch.zeros(number, 1, 1), lm.Layout(ROWS, mesh))
    placed = DTensor.from_local(shard, row.device_mesh, row.placements)  # has no global tensor
    methods: dict[str, tuple[Any, Callable[[], Any]]] = {
        "its shard alone": (shard, nullcontext),
        'draws="tiles"': (placed, lambda: lm.dtensor.run_on(mesh, draws="tiles")),
        'draws="exact"': (placed, lambda: lm.dtensor.run_on(mesh)),
    }
    print(f"dropout of {tuple(placed.shape)}, over {number} devices    CPU ms  times  more peak MiB")
    seconds, growth = dict.fromkeys(methods, float("inf")), dict.fromkeys(methods, 0.0)
    for _ in range(ROUNDS):  # the growth of the peak counts for the method that causes it
        for method, (tensor, context) in methods.items():
            before = read_peak_bytes()
            with context():
                cpu = measure_cpu_seconds(lambda tensor=tensor: F.dropout(tensor, 0.1))
                seconds[method] = min(seconds[method], cpu)
            growth[method] += (read_peak_bytes() - before) / 2**20
    for method, each in seconds.items():
        print(
            f"{method:<51} {1e3 * each:>8.1f} {each / seconds['its shard alone']:>6.1f} {growth[method]:>14.0f}"
        )
    dist.destroy_process_group()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("operators", nargs="*", metavar="operator")
    parser.add_argument(
        "--dropout", type=int, metavar="devices", help="measure only dropout, over this many devices"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if args.dropout:
        compare_dropout(args.dropout)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = lm.create_mesh("batch=2,model=2")
    print("operator         plain  DTensor  summed  a mode  layoutmap   over DTensor  ratio  corrected")
    for name in args.operators or OPERATORS:
        function, arguments, is_corrected = OPERATORS[name]
        unsharded = [tensor for tensor, _ in arguments]
        placed = [lm.dtensor.relayout(tensor, lm.Layout(specs, mesh)) for tensor, specs in arguments]
        # layoutmap corrects only the meshes that it has run on, so DTensor alone gets another mesh.
        other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        own = [DTensor.from_local(each.to_local(), other, each.placements) for each in placed]
        alone = partial(function, *own)
        methods: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
            "plain": (partial(function, *unsharded), nullcontext),
            "DTensor": (alone, nullcontext),
            "a mode": (alone, Idle),
            "layoutmap": (partial(function, *placed), lambda: lm.dtensor.run_on(mesh)),
        }
        if name in SUMS:
            methods["summed"] = (partial(call_and_sum, alone), nullcontext)
        least = dict.fromkeys(methods, float("inf"))
        for _ in range(ROUNDS):
            for method, (call, context) in methods.items():
                with context():
                    try:
                        least[method] = min(least[method], 1e6 * measure_cpu_seconds(call))
                    except (RuntimeError, NotImplementedError):  # DTensor has no rule
                        continue
        base = least.get("summed", least["DTensor"])
        print(
            f"{name:<15} {least['plain']:>6.0f} {least['DTensor']:>8.0f} "
            f"{format(base, '.0f') if name in SUMS else '':>7} {least['a mode']:>7.0f} {least['layoutmap']:>10.0f}"
            f" {least['layoutmap'] - base:>14.0f} {least['layoutmap'] / base:>6.2f}  {'yes' if is_corrected else ''}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
