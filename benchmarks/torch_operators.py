"""What an operator costs on torch: on plain tensors, on DTensors, and on DTensors where this library computes.

    python benchmarks/torch_operators.py            all operators: a minute
    python benchmarks/torch_operators.py view add
    python benchmarks/torch_operators.py --dropout 64

CPU time of one call of the forward pass, in microseconds, on mesh batch=2,model=2 of a process group whose other
processes do not exist: collectives return at once. Ways take turns in each of a few rounds; the least counts.

"summed" is DTensor with the sum over the mesh made, which it leaves to whoever uses the value, where layoutmap makes
it at once; differences and ratios are to that where it is there. "a mode" is DTensor in a function mode that does
nothing: what torch takes for any. "corrected": DTensor alone computes other numbers, or none. With
`--dropout`, dropout of a batch over so many devices: what one device takes by `draws="exact"`, by `draws="tiles"`, and
for its shard as a plain tensor.
"""

from __future__ import annotations

import resource
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
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
# What is called, with which tensors in which layouts, and whether DTensor alone computes something else.
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
# Of what DTensor leaves the sum over the mesh to whoever uses the value; layoutmap makes it at once.
SUMS = ("mean", "cross_entropy")


class Idle(TorchFunctionMode):
    """A mode that does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


def summed(call: Callable[[], Any]) -> Any:
    """What DTensor computes, and the sum over the mesh that it has left to be made."""
    return call().redistribute(placements=[Replicate(), Replicate()])


def cost(call: Callable[[], Any]) -> float:
    """Return the CPU seconds of one call."""
    number, start = 0, time.process_time()
    while time.process_time() - start < SECONDS:
        call()
        number += 1
    return (time.process_time() - start) / number


def dropout_over(number: int) -> None:
    """Print what dropout of a batch over some devices takes on one of them, beside that of its shard alone."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
    mesh = lm.create_mesh({"batch": number})
    shard = torch.randn(8, 128, 512)
    row = lm.dtensor.relayout(torch.zeros(number, 1, 1), lm.Layout(ROWS, mesh))
    placed = DTensor.from_local(shard, row.device_mesh, row.placements)  # whose global tensor is nowhere
    ways: dict[str, tuple[Any, Callable[[], Any]]] = {
        "its shard alone": (shard, nullcontext),
        'draws="tiles"': (placed, lambda: lm.dtensor.run_on(mesh, draws="tiles")),
        'draws="exact"': (placed, lambda: lm.dtensor.run_on(mesh)),
    }
    print(f"dropout of {tuple(placed.shape)}, over {number} devices    CPU ms  times  more peak MiB")
    seconds, more = dict.fromkeys(ways, float("inf")), dict.fromkeys(ways, 0.0)
    for _ in range(ROUNDS):  # of memory, what a way takes more than those before
        for way, (tensor, context) in ways.items():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with context():
                seconds[way] = min(seconds[way], cost(lambda tensor=tensor: F.dropout(tensor, 0.1)))
            more[way] += (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    for way, each in seconds.items():
        print(f"{way:<51} {1e3 * each:>8.1f} {each / seconds['its shard alone']:>6.1f} {more[way]:>14.0f}")
    dist.destroy_process_group()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("operators", nargs="*", metavar="operator")
    parser.add_argument("--dropout", type=int, metavar="devices", help="dropout over so many devices alone")
    given = parser.parse_args()
    chosen = given.operators or OPERATORS
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if given.dropout:
        dropout_over(given.dropout)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = lm.create_mesh("batch=2,model=2")
    print("operator         plain  DTensor  summed  a mode  layoutmap   over DTensor  ratio  corrected")
    for name in chosen:
        function, arguments, is_corrected = OPERATORS[name]
        plain = [tensor for tensor, _ in arguments]
        placed = [lm.dtensor.relayout(tensor, lm.Layout(specs, mesh)) for tensor, specs in arguments]
        # On a mesh that nobody has computed on, DTensor does as it likes.
        other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        own = [DTensor.from_local(each.to_local(), other, each.placements) for each in placed]
        alone = partial(function, *own)
        ways: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
            "plain": (partial(function, *plain), nullcontext),
            "DTensor": (alone, nullcontext),
            "a mode": (alone, Idle),
            "layoutmap": (partial(function, *placed), lambda: lm.dtensor.run_on(mesh)),
        }
        if name in SUMS:
            ways["summed"] = (partial(summed, alone), nullcontext)
        least = dict.fromkeys(ways, float("inf"))
        for _ in range(ROUNDS):
            for way, (call, context) in ways.items():
                with context():
                    try:
                        least[way] = min(least[way], 1e6 * cost(call))
                    except (RuntimeError, NotImplementedError):  # DTensor has no rule
                        continue
        alike = least.get("summed", least["DTensor"])
        print(
            f"{name:<15} {least['plain']:>6.0f} {least['DTensor']:>8.0f} "
            f"{format(alike, '.0f') if name in SUMS else '':>7} {least['a mode']:>7.0f} {least['layoutmap']:>10.0f}"
            f" {least['layoutmap'] - alike:>14.0f} {least['layoutmap'] / alike:>6.2f}  {'yes' if is_corrected else ''}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
