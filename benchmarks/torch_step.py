"""Compare a training step on torch in 4 gloo processes with torch's own methods of sharding.

    python benchmarks/torch_step.py                            both meshes, model small, 3 rounds: about five minutes
    python benchmarks/torch_step.py --size medium --steps 5
    python benchmarks/torch_step.py --size deep --steps 5      twelve blocks
    python benchmarks/torch_step.py --mesh model=4 --rounds 5
    python benchmarks/torch_step.py --size medium --rounds 0     only memory and collectives, no times
    python benchmarks/torch_step.py --in-turns                 for a busy machine: a minute
    python benchmarks/torch_step.py --draw 10 --seed 1         ten random decoders, median and worst: ten minutes

On model=4 (tensor parallel alone), the methods are `layoutmap` and `parallelize_module`. On
batch=2,model=2 they are `layoutmap` and `parallelize_module` with `fully_shard`, both with every weight
also sharded over the batch dim. `layoutmap, replicated` replicates weights over the batch dim, which
takes more memory and fewer collectives. `layoutmap, gather=own` gathers by this library's own code
instead of `fully_shard`. "compiled" compiles each block by inductor. "one graph" compiles the model by
`torch.compile(model, fullgraph=True)`. (With compiled blocks, `parallelize_module` fails in the
backward pass of this decoder, on torch 2.13.) All methods use the same decoder, seed, batches, and
AdamW. Their losses must agree with those of one process within 1e-4.

`layoutmap` takes DTensors and computes the loss on the mesh. `layoutmap, plain` takes and returns
unsharded tensors, in a training loop without a mesh, so every process has the logits of all rows.
"weight rules" has no rules for activations.

"ms" is the median step of the slowest process over all rounds. The methods take turns, each in fresh
processes. "cpu ms" is the mean CPU time of a process, which is more stable where processes share
cores. `CommDebugMode` counts the collectives of the forward pass, backward pass, and optimizer of one
step. "MiB" is the peak of all tensors of the first process in a step, with the slots of AdamW: the
median of five steps, by torch's profiler in its own run. With `--in-turns`, `layoutmap` and torch's own
method take turns, step by step, in the same processes. `--draw` does the same on batch=2,model=2, with
`--compiled` also with compiled blocks and with one graph.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from bisect import bisect
from collections import Counter
from functools import partial
from itertools import islice
from typing import Any

from measure import (
    describe_ratios,
    draw_sizes,
    make_parser,
    run_process_group,
    run_rounds,
    trace_tensor_bytes,
)
from torch_models import SIZES, TP_PLAN, make_batches, make_model, parallelize, parse_size

PROCESSES = 4
WARMUP = 3
MEMORY_STEPS = 5
OWN = "parallelize_module"
REPLICATED = "layoutmap, replicated"
OWN_GATHERING = "layoutmap, gather=own"
WEIGHT_RULES = "layoutmap, weight rules"
COMPILED = "layoutmap, compiled"
ONE_GRAPH = "layoutmap, one graph"
IN_TURNS = "in turns"
DRAWN = {
    "vocabulary": (256, 1024, 4096),
    "width": (32, 64, 128, 256, 512, 1024),
    "blocks": (1, 2, 3, 4, 6, 8, 12),
    "heads": (2, 4, 8),
    "rows": (2, 4, 8),
    "tokens": (16, 32, 64, 256),
    "norm": ("layer", "rms"),
}
MOST = 4 << 20
"""Limit of blocks times width squared, so that the models and optimizers of all methods fit 24 GiB."""

METHODS = {
    "model=4": (OWN, "layoutmap", WEIGHT_RULES, "layoutmap, plain", COMPILED, ONE_GRAPH),
    "batch=2,model=2": (
        f"{OWN} + fully_shard",
        "layoutmap",
        WEIGHT_RULES,
        "layoutmap, plain",
        OWN_GATHERING,
        REPLICATED,
        COMPILED,
        ONE_GRAPH,
    ),
}


def measure_method(mesh: str, method: str, size: str, steps: int) -> None:
    """Train in one of the processes. Rank 0 prints the measurements of all as JSON."""
    import torch
    from torch.nn import functional as F

    torch.set_num_threads(1)
    make = partial(MAKERS.get(method, make_torch_step), mesh, size, F.cross_entropy)
    if steps == 0:
        memory = measure_memory(
            make,
            make_batches(size, WARMUP + MEMORY_STEPS - 1),
            is_counted=method not in (COMPILED, ONE_GRAPH),
        )
        if torch.distributed.get_rank() == 0:
            print(json.dumps(memory))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        return
    step, average = make()
    times, cpu, losses = [], [], []
    for x, y in make_batches(size, WARMUP + steps):
        torch.distributed.barrier()
        start, own = time.perf_counter(), time.process_time()
        loss = step(x, y)
        times.append(time.perf_counter() - start)
        cpu.append(time.process_time() - own)
        losses.append(average(loss))
    results: list[Any] = [None] * PROCESSES
    torch.distributed.all_gather_object(results, (times, cpu))
    if torch.distributed.get_rank() == 0:
        slowest = [max(each) for each in zip(*(each_times for each_times, _ in results), strict=True)]
        mean_cpu = [
            statistics.mean(each) for each in zip(*(each_cpu for _, each_cpu in results), strict=True)
        ]
        print(json.dumps({"times": slowest[WARMUP:], "cpu": mean_cpu[WARMUP:], "losses": losses}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def measure_memory(make: Any, data: Any, *, is_counted: bool) -> dict[str, Any]:
    """Return the median peak of all tensors in a step, and the collectives of a step.

    The first steps do not count. Steps differ by whether gloo has freed its buffers. No mode sees the collectives of
    compiled graphs, so `is_counted` is false for these.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step, _ = make()
        starts = []
        for x, y in data:
            gc.collect()  # so that no step frees the garbage of another
            starts.append(time.time_ns())
            step(x, y)
    most = [0] * (len(starts) + 1)
    for nanoseconds, num_bytes in trace_tensor_bytes(profiler):
        number = bisect(starts, nanoseconds)
        most[number] = max(most[number], num_bytes)
    counted = count_collectives(lambda: step(*data[-1])) if is_counted else {}
    return {"peak": statistics.median(most[WARMUP:]), "collectives": counted}


def measure_in_turns(mesh: str, size: str, steps: int, is_compiled: bool) -> None:
    """Train by all methods in turns in one of the processes. Rank 0 prints the measurements of all as JSON."""
    import torch
    from torch.nn import functional as F

    torch.set_num_threads(1)
    graphs = (COMPILED, ONE_GRAPH) if is_compiled else ()
    makers = {OWN: make_torch_step} | {name: MAKERS[name] for name in ("layoutmap", WEIGHT_RULES, *graphs)}
    train_steps = {name: make(mesh, size, F.cross_entropy)[0] for name, make in makers.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
    data = make_batches(size, WARMUP + steps)
    for x, y in data:
        for name, step in train_steps.items():
            torch.distributed.barrier()
            start, own = time.perf_counter(), time.process_time()
            step(x, y)
            times[name].append((time.perf_counter() - start, time.process_time() - own))
    counted = {  # no mode sees the collectives of compiled graphs
        name: {} if name in graphs else count_collectives(lambda step=step: step(*data[0]))
        for name, step in train_steps.items()
    }
    results: list[Any] = [None] * PROCESSES
    torch.distributed.all_gather_object(results, times)
    if torch.distributed.get_rank() == 0:
        result = {}
        for name in makers:
            step_times = list(zip(*(each[name] for each in results), strict=True))[WARMUP:]
            slowest = [max(wall for wall, _ in each) for each in step_times]
            cpu = [statistics.mean(cpu for _, cpu in each) for each in step_times]
            result[name] = {"times": slowest, "cpu": cpu, "losses": [], "collectives": counted[name]}
        print(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def count_collectives(step: Any) -> dict[str, int]:
    """Return the number of each collective in a step."""
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as counter:
        step()
    short = {
        "reduce_scatter": "RS",
        "all_gather": "AG",
        "allgather": "AG",
        "all_reduce": "AR",
        "allreduce": "AR",
    }
    counts: Counter[str] = Counter()
    for operation, number in counter.get_comm_counts().items():
        name = str(operation)
        counts[next((s for n, s in short.items() if n in name), name)] += number
    return dict(counts)


def make_torch_step(mesh: str, size: str, compute_loss: Any) -> Any:
    """Return a step with `parallelize_module`, and with `fully_shard` if the mesh has a batch dim.

    All functions in `MAKERS` also return a function from a step's loss to the mean loss as a float.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    dims = dict(pair.split("=") for pair in mesh.split(","))
    device_mesh = init_device_mesh("cpu", tuple(map(int, dims.values())), mesh_dim_names=tuple(dims))
    model = parallelize(make_model(size), device_mesh["model"])
    rows = slice(None)
    if "batch" in dims:
        for block in model.blocks:
            fully_shard(block, mesh=device_mesh["batch"])
        fully_shard(model, mesh=device_mesh["batch"])
        number, count = device_mesh["batch"].get_local_rank(), int(dims["batch"])
        part = parse_size(size)[4] // count
        rows = slice(number * part, (number + 1) * part)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(x: Any, y: Any) -> Any:
        loss = compute_loss(model(x[rows]).flatten(0, 1), y[rows].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def average(loss: Any) -> float:
        if "batch" in dims:
            torch.distributed.all_reduce(loss, group=device_mesh["batch"].get_group())
            loss /= int(dims["batch"])
        return float(loss)

    return step, average


def make_layoutmap_step(
    mesh: str,
    size: str,
    compute_loss: Any,
    shard_by_batch: bool = True,
    gather: Any = "fully_shard",
    compiled: str = "",
    activations: bool = True,
) -> Any:
    """Return a step of this library from a batch on the mesh to a loss on the mesh."""
    import torch

    import layoutmap as lm

    model, optimizer, layout_map, batch_dim = make_sharded_model(
        mesh, size, shard_by_batch, gather, activations
    )
    assert layout_map.mesh is not None
    for block in model.blocks if compiled == "blocks" else ():
        block.compile(fullgraph=True)
    if compiled == "model":
        model = torch.compile(model, fullgraph=True)
    rows = lm.Layout([batch_dim, None], layout_map.mesh)

    def step(x: Any, y: Any) -> Any:
        with lm.dtensor.run_on(layout_map.mesh):
            y = lm.dtensor.relayout(y, rows).flatten()
            loss = compute_loss(model(lm.dtensor.relayout(x, rows)).flatten(0, 1), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, lambda loss: float(loss.full_tensor())


def make_unsharded_loop_step(mesh: str, size: str, compute_loss: Any) -> Any:
    """Return a step of this library from unsharded batches to an unsharded loss."""
    model, optimizer, _, _ = make_sharded_model(mesh, size, shard_by_batch=True)

    def step(x: Any, y: Any) -> Any:
        loss = compute_loss(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, float


MAKERS: dict[str, Any] = {
    "layoutmap": make_layoutmap_step,
    "layoutmap, plain": make_unsharded_loop_step,
    REPLICATED: partial(make_layoutmap_step, shard_by_batch=False),
    OWN_GATHERING: partial(make_layoutmap_step, gather="own"),
    WEIGHT_RULES: partial(make_layoutmap_step, activations=False),
    COMPILED: partial(make_layoutmap_step, compiled="blocks"),
    ONE_GRAPH: partial(make_layoutmap_step, compiled="model"),
}


def make_sharded_model(
    mesh: str, size: str, shard_by_batch: bool, gather: Any = "fully_shard", activations: bool = True
) -> Any:
    """Return the model sharded by its tensor parallel plan, its optimizer, its layout map, and its batch dim.

    With `shard_by_batch`, every weight is also sharded over the batch dim, as by `fully_shard`: along the first
    unsharded axis, or along the first axis with the model dim if it has none.
    """
    import torch

    import layoutmap as lm

    devices = lm.create_mesh(mesh)
    batch_dim = "batch" if "batch" in devices else None
    shapes = dict(make_model(size).named_parameters())
    layout_map = lm.LayoutMap.from_tp_plan(TP_PLAN, devices, batch_dim=batch_dim, parameters=shapes)
    layout_map[r".*norm\d?\.(weight|bias)$"] = (None,)
    layout_map.activations[r".*norm\d?$"] = (batch_dim, None, None)
    if not activations:
        layout_map.activations.clear()
    for rule, layout in list(layout_map.items()) if batch_dim and shard_by_batch else ():
        specs: list[Any] = [None if spec == lm.UNSHARDED else spec for spec in layout.sharding_specs]
        axis = specs.index(None) if None in specs else 0
        specs[axis] = batch_dim if specs[axis] is None else (specs[axis], batch_dim)
        del layout_map[rule]
        layout_map[rule] = tuple(specs)
    with layout_map.scope(batch_dim=batch_dim, gather=gather, check_batches=False):
        model = make_model(size)
    return model, torch.optim.AdamW(model.parameters(), 1e-3), layout_map, batch_dim


def train_unsharded(size: str, steps: int) -> list[float]:
    """Train on the same batches in this one process, and return the losses."""
    import torch
    from torch.nn import functional as F

    torch.set_num_threads(1)
    model = make_model(size)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for x, y in make_batches(size, steps):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--mesh", choices=METHODS, action="append", help="may be given twice (default: both)")
    parser.add_argument(
        "--size", default="small", help=f"{', '.join(SIZES)}, or numbers as in 1024,128,2,4,8,64"
    )
    parser.add_argument("--steps", type=int, default=20, help="timed steps in each round (default: 20)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-turns", action="store_true", help="run both methods in the same processes")
    parser.add_argument("--draw", type=int, help="number of random decoders, all methods in turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compiled", action="store_true", help="with --draw: also the compiled methods")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child == IN_TURNS:
        measure_in_turns(args.mesh[0], args.size, args.steps, args.compiled)
        return
    if args.child:
        measure_method(args.mesh[0], args.child, args.size, args.steps)
        return
    if args.draw:
        report_drawn(args.draw, args.seed, args.steps, args.compiled)
        return
    if args.in_turns:
        for mesh in args.mesh or METHODS:
            options = ("--mesh", mesh, "--size", args.size, "--steps", str(args.steps))
            results = run_process_group(__file__, ("--child", IN_TURNS, *options), PROCESSES)
            memory = {"peak": math.nan}
            report(mesh, args.size, {name: [each | memory, each] for name, each in results.items()}, [])
        return
    expected = train_unsharded(args.size, WARMUP + args.steps)
    for mesh in args.mesh or METHODS:

        def run(method: str, steps: int, mesh: str = mesh) -> dict[str, Any]:
            arguments = ("--child", method, "--mesh", mesh, "--size", args.size, "--steps", str(steps))
            return run_process_group(__file__, arguments, PROCESSES)

        memory = run_rounds(METHODS[mesh], 1, partial(run, steps=0), f"{mesh}, memory: ")
        times = run_rounds(METHODS[mesh], args.rounds, partial(run, steps=args.steps), f"{mesh}: ")
        runs = {method: [*memory[method], *times[method]] for method in METHODS[mesh]}
        report(mesh, args.size, runs, expected)


def report_drawn(count: int, seed: int, steps: int, compiled: bool) -> None:
    """Print the steps of random decoders next to those of torch's own method in the same processes."""
    print(
        f"batch=2,model=2, {PROCESSES} processes: ratios of ms, and of CPU ms, to `parallelize_module` + `fully_shard`"
    )
    print(", ".join(DRAWN))
    ratios: dict[tuple[str, str], list[float]] = {}
    fitting = (
        each for each in draw_sizes(100 * count, seed, DRAWN) if each["blocks"] * each["width"] ** 2 <= MOST
    )
    for sizes in islice(fitting, count):
        size = ",".join(map(str, sizes.values()))
        options = ("--mesh", "batch=2,model=2", "--size", size, "--steps", str(steps))
        options += ("--compiled",) * compiled
        results = run_process_group(__file__, ("--child", IN_TURNS, *options), PROCESSES)
        medians = {
            name: {kind: statistics.median(each[kind]) for kind in ("times", "cpu")}
            for name, each in results.items()
        }
        own = medians.pop(OWN)
        line = f"{size:<26} {1e3 * own['times']:>6.0f} ms"
        for name, each in medians.items():
            for kind in each:
                ratios.setdefault((name, kind), []).append(each[kind] / own[kind])
            cells = " ".join(f"{each[kind] / own[kind]:.2f}" for kind in each)
            line += f"  {name.removeprefix('layoutmap, ')} {cells}"
        print(line, flush=True)
    for (name, kind), each in ratios.items():
        print(describe_ratios(f"{name}, {'CPU ' if kind == 'cpu' else ''}ms", each))


def report(mesh: str, size: str, runs: dict[str, list[dict[str, Any]]], expected: list[float]) -> None:
    """Print the medians and ratios on one mesh."""
    print(f"\n{mesh}, {PROCESSES} processes, model {size}")
    times = "method                             ms  ratio  cpu ms  ratio  largest loss difference"
    print(f"{times}    MiB  ratio  collectives")
    medians: dict[str, tuple[float, float, float]] = {}
    for method, (memory, *results) in runs.items():
        mib = memory["peak"] / 2**20
        ms, cpu = (
            1e3 * statistics.median([seconds for run in results for seconds in run[kind]] or [math.nan])
            for kind in ("times", "cpu")
        )
        medians[method] = ms, cpu, mib
        first = next(iter(medians.values()))
        differences = [abs(a - b) for run in results for a, b in zip(run["losses"], expected, strict=True)]
        difference = max(differences, default=math.nan)
        counted = ", ".join(f"{n} {name}" for name, n in sorted(memory["collectives"].items()))
        print(
            f"{method:<32} {ms:>5.0f} {ms / first[0]:>6.2f} {cpu:>7.0f} {cpu / first[1]:>6.2f} {difference:>24.1e} "
            f"{mib:>6.1f} {mib / first[2]:>6.2f}  {counted}"
        )
        if difference > 1e-4:
            print(f"WARNING: {method} gave other losses than one process")


if __name__ == "__main__":
    main()
