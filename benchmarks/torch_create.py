"""Compare the time and memory of creating a sharded torch model in 8 processes, by four methods.

    python benchmarks/torch_create.py                            0.4 GiB of weights, 3 rounds: some minutes
    python benchmarks/torch_create.py --size full --rounds 1     1.5 GiB; the eager methods need 13 GiB of memory

The methods take turns, each in fresh processes on 127.0.0.1 with gloo. The weights are sharded over 8
devices by the model's tensor parallel plan.

    eager                build the whole model in every process
    distribute_tensor    build it, then shard each parameter with torch's `distribute_tensor`
    meta                 build it on the meta device, shard, `to_empty`, `reset_parameters`, as torch recommends
    layoutmap            build it in a scope of this library

"seconds" is the time of the slowest process, from the first line of the model to the last parameter.
"held" is the bytes of its shards, and "peak" the largest growth of a process meanwhile. Both are
medians over the rounds. "values" says whether the shards equal those of the eager model bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from typing import Any

from measure import compute_median, make_parser, read_status, reset_peak, run_process_group, run_rounds
from torch_models import SIZES, TP_PLAN, Decoder, make_model

PROCESSES = 8
METHODS = ("eager", "distribute_tensor", "meta", "layoutmap")


def measure_method(method: str, size: str) -> None:
    """Create the model in one of the processes. Rank 0 prints the measurements of all as JSON."""
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
    native = {path: engine().make_native_layout(layout_map.get(path), p.ndim) for path, p in shapes.items()}
    # Run the lazy imports and one-time setup of both methods before the timer starts.
    warm = lm.LayoutMap(mesh, {"weight": ("model", None), "bias": ("model",)})
    with warm.scope():
        _warm_up = torch.nn.Linear(128, 128)
    distribute_tensor(torch.ones(8), *native["norm.weight"], src_data_rank=None)

    def shard_all(model: torch.nn.Module) -> None:
        for path, parameter in list(model.named_parameters()):
            owner, _, name = path.rpartition(".")
            sharded = distribute_tensor(parameter.detach(), *native[path], src_data_rank=None)
            setattr(model.get_submodule(owner), name, torch.nn.Parameter(sharded))

    torch.distributed.barrier()
    before = reset_peak()
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
                layer.reset_parameters()  # pyright: ignore[reportCallIssue]
    else:
        model = make_model(size)
        if method == "distribute_tensor":
            shard_all(model)
    seconds = time.perf_counter() - start
    peak = read_status("VmHWM") - before
    shards = {path: p.to_local() if isinstance(p, DTensor) else p for path, p in model.named_parameters()}
    results: list[Any] = [None] * PROCESSES
    held = sum(shard.nbytes for shard in shards.values())
    torch.distributed.all_gather_object(results, (seconds, peak, held, hash_shards(model)))
    if torch.distributed.get_rank() == 0:
        all_seconds, peaks, holds, digests = zip(*results, strict=True)
        result = {"seconds": max(all_seconds), "peak_bytes": max(peaks), "held_bytes": max(holds)}
        print(json.dumps(result | {"digests": digests}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def hash_shards(model: Decoder) -> str:
    """Hash the parameter shards of this process. Shard an unsharded model first."""
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
            shard = distribute_tensor(
                shard, *engine().make_native_layout(layout, shard.ndim), src_data_rank=None
            )
        total.update(shard.to_local().contiguous().view(torch.uint8).numpy())
    return total.hexdigest()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="half")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--method", choices=METHODS, action="append", help="may be given several times (default: all)"
    )
    parser.add_argument("--child", choices=METHODS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measure_method(args.child, args.size)
        return
    runs = run_rounds(
        args.method or METHODS,
        args.rounds,
        lambda method: run_process_group(__file__, ("--child", method, "--size", args.size), PROCESSES),
    )
    report(args.size, runs)


def report(size: str, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Print the medians, and the ratios to the first method."""
    first, *_ = runs.values()
    base = compute_median(first, "seconds")
    print(f"{PROCESSES} processes, mesh model={PROCESSES}, size {size}; medians of {len(first)}")
    print("method             seconds  ratio  held MiB  peak MiB  peak - held MiB  values")
    for method, results in runs.items():
        seconds = compute_median(results, "seconds")
        peak = compute_median(results, "peak_bytes") / 2**20
        held = results[0]["held_bytes"] / 2**20
        same = all(run["digests"] == first[0]["digests"] for run in results)
        print(
            f"{method:<17} {seconds:>8.2f} {seconds / base:>6.2f} {held:>9.0f} {peak:>9.0f} {peak - held:>16.0f}  "
            f"{'as eager' if same else 'other'}"
        )


if __name__ == "__main__":
    main()
