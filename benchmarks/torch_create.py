"""How long it takes 8 processes to create a torch model in its layouts, and how much memory each needs.

    python benchmarks/torch_create.py                            0.4 GiB of weights, 3 rounds: some minutes
    python benchmarks/torch_create.py --size full --rounds 1     1.5 GiB; the eager ways need 13 GiB of memory

Each way in fresh processes on 127.0.0.1 with gloo, taken in turns. The weights are sharded over 8
devices by the model's tensor parallel plan.

    eager                build the model; every process has all of it
    distribute_tensor    build it, then shard each parameter with torch's `distribute_tensor`
    meta                 build it on the meta device, shard, `to_empty`, `reset_parameters`: what torch recommends
    layoutmap            build it in a scope of this library

"seconds" is the slowest process, from the first line of the model to the last parameter; "peak" the
most that a process grew meanwhile, the largest of the eight; medians over the rounds. "values" says
whether the shards are those of the eager model, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from typing import Any

from create import memory
from torch_models import SIZES, TP_PLAN, Decoder, make_model
from torch_processes import measure

PROCESSES = 8
METHODS = ("eager", "distribute_tensor", "meta", "layoutmap")


def child(method: str, size: str) -> None:
    """One process of a measurement; the first prints what it found as JSON."""
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    import layoutmap as lm
    from layoutmap.engines.torch.engine import engine

    torch.set_num_threads(1)
    mesh = lm.create_mesh({"model": PROCESSES})
    with torch.device("meta"):
        shapes = dict(make_model(size).named_parameters())
    layout_map = lm.LayoutMap.from_tp_plan(TP_PLAN, mesh, parameters=shapes)
    layout_map[r".*norm\d?\.(weight|bias)$"] = (None,)
    native = {path: engine().native(layout_map.get(path), p.ndim) for path, p in shapes.items()}
    # What is imported and made once for a process is no part of creation.
    warm = lm.LayoutMap(mesh, {"weight": ("model", None), "bias": ("model",)})
    with warm.scope():
        _warm_up = torch.nn.Linear(128, 128)
    distribute_tensor(torch.ones(8), *native["norm.weight"], src_data_rank=None)

    def shard_all(model: torch.nn.Module) -> None:
        for path, parameter in list(model.named_parameters()):
            owner, _, name = path.rpartition(".")
            made = distribute_tensor(parameter.detach(), *native[path], src_data_rank=None)
            setattr(model.get_submodule(owner), name, torch.nn.Parameter(made))

    torch.distributed.barrier()
    before = restart_peak()
    start = time.perf_counter()
    if method == "layoutmap":
        with layout_map.scope():
            model = make_model(size)
    elif method == "meta":
        with torch.device("meta"):
            model = make_model(size)
        shard_all(model)
        model.to_empty(device="cpu")
        for layer in model.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
    else:
        model = make_model(size)
        if method == "distribute_tensor":
            shard_all(model)
    seconds = time.perf_counter() - start
    peak = memory("VmHWM") - before
    shards = {path: p.to_local() if isinstance(p, DTensor) else p for path, p in model.named_parameters()}
    found: list[Any] = [None] * PROCESSES
    held = sum(shard.nbytes for shard in shards.values())
    torch.distributed.all_gather_object(found, (seconds, peak, held, digest(model)))
    if torch.distributed.get_rank() == 0:
        all_seconds, peaks, holds, digests = zip(*found, strict=True)
        result = {"seconds": max(all_seconds), "peak_bytes": max(peaks), "held_bytes": max(holds)}
        print(json.dumps(result | {"digests": digests}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def digest(model: Decoder) -> str:
    """What stands for the values of the shards that this process has, or would have, of the parameters."""
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    import layoutmap as lm
    from layoutmap.engines.torch.engine import engine

    mesh = lm.create_mesh({"model": PROCESSES})
    shapes = dict(model.named_parameters())
    layout_map = lm.LayoutMap.from_tp_plan(TP_PLAN, mesh, parameters=shapes)
    total = hashlib.sha256()
    for path, parameter in shapes.items():
        layout = layout_map[path] or lm.Layout.replicated(mesh, parameter.ndim)
        shard: Any = parameter.detach()
        if not isinstance(shard, DTensor):
            shard = distribute_tensor(shard, *engine().native(layout, shard.ndim), src_data_rank=None)
        total.update(shard.to_local().contiguous().view(torch.uint8).numpy())
    return total.hexdigest()


def restart_peak() -> int:
    """Reset the kernel's peak of what this process held; return what it holds now."""
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")
    return memory("VmRSS")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="half")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--method", choices=METHODS, action="append", help="may be given several times; else all"
    )
    parser.add_argument("--child", choices=METHODS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.size)
        return
    methods = args.method or METHODS
    runs: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
    for number in range(args.rounds):
        for method in methods:
            print(f"\r\x1b[Kround {number + 1}/{args.rounds} {method}", end="", file=sys.stderr)
            runs[method].append(measure(__file__, ("--child", method, "--size", args.size), PROCESSES))
    print("\r\x1b[K", end="", file=sys.stderr)
    report(args.size, runs)


def report(size: str, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Medians, and ratios to the first way."""
    first, *_ = runs.values()
    base = statistics.median(run["seconds"] for run in first)
    print(f"{PROCESSES} processes, mesh model={PROCESSES}, size {size}; medians of {len(first)}")
    print("method             seconds  ratio  held MiB  peak MiB  peak - held MiB  values")
    for method, results in runs.items():
        seconds = statistics.median(run["seconds"] for run in results)
        peak = statistics.median(run["peak_bytes"] for run in results) / 2**20
        held = results[0]["held_bytes"] / 2**20
        same = all(run["digests"] == first[0]["digests"] for run in results)
        print(
            f"{method:<17} {seconds:>8.2f} {seconds / base:>6.2f} {held:>9.0f} {peak:>9.0f} {peak - held:>16.0f}  "
            f"{'as eager' if same else 'other'}"
        )


if __name__ == "__main__":
    main()
