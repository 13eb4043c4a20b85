"""What a training step costs on torch, in 4 processes with gloo, compared with torch's own ways of sharding.

    python benchmarks/torch_step.py                            both meshes, model small, 3 rounds: about five minutes
    python benchmarks/torch_step.py --size medium --steps 5
    python benchmarks/torch_step.py --size deep --steps 5      twelve blocks
    python benchmarks/torch_step.py --mesh model=4 --rounds 5
    python benchmarks/torch_step.py --size medium --rounds 0     memory and collectives alone: no time is taken
    python benchmarks/torch_step.py --in-turns                 for a busy machine: a minute
    python benchmarks/torch_step.py --draw 10 --seed 1         ten drawn decoders, median and worst: half an hour

On model=4 (tensor parallel alone): `layoutmap` and `parallelize_module`. On batch=2,model=2:
`layoutmap` and `parallelize_module` with `fully_shard`, both with every weight sharded over the
batch dim too; `layoutmap, replicated` replicates weights over the batch dim, which takes more
memory and fewer collectives, and `layoutmap, gather=own` gathers by this library's own code and
not by `fully_shard`; "compiled" has each block compiled, by inductor, and "one graph" the model, by
`torch.compile(model, fullgraph=True)` (with compiled blocks, `parallelize_module` fails in the
backward pass of this decoder, on torch 2.13). The same decoder,
seed, batches and AdamW; losses are compared with those of one process, to which every way must come
within 1e-4.

`layoutmap` takes DTensors and computes the loss on the mesh; `layoutmap, plain` takes and returns
plain tensors, in a training loop that knows no mesh: every process then has the logits of all rows.

"ms" is the median step of the slowest process, over all rounds; rounds are taken in turns, each in
fresh processes. "cpu ms" is the CPU time of its process, which says more where processes share
cores. Collectives of one step, forward, backward and optimizer, are counted by `CommDebugMode`.
"MiB" is the most that the tensors of the first process take at any time of a step, slots of AdamW and
all, the median of five steps, by torch's profiler in a run of its own.
With `--in-turns`, `layoutmap` and torch's own way take turns, step by step, in the same processes;
with `--draw` they do, on batch=2,model=2, with compiled blocks and with one graph.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from bisect import bisect
from collections import Counter
from functools import partial
from itertools import islice
from typing import Any

from drawn_sizes import draw, spread
from torch_models import SIZES, TP_PLAN, batches, make_model, parallelize, sizes_of
from torch_processes import bytes_over_time, measure

PROCESSES = 4
WARMUP = 3
MEMORY_STEPS = 5
OWN = "parallelize_module"
REPLICATED = "layoutmap, replicated"
OWN_GATHERING = "layoutmap, gather=own"
COMPILED = "layoutmap, compiled"
ONE_GRAPH = "layoutmap, one graph"
IN_TURNS = "in turns"
DRAWN = {
    "vocabulary": (256, 1024, 4096),
    "width": (32, 64, 128, 256, 512, 1024),
    "blocks": (1, 2, 3, 4, 6, 8, 12),
    "heads": (2, 4, 8),
    "rows": (2, 4, 8),
    "tokens": (16, 32, 64),
}
MOST = 4 << 20
"""Blocks times the square of the width: four models and their optimizers in each of four processes fit 24 GiB."""

METHODS = {
    "model=4": (OWN, "layoutmap", "layoutmap, plain", COMPILED, ONE_GRAPH),
    "batch=2,model=2": (
        f"{OWN} + fully_shard",
        "layoutmap",
        "layoutmap, plain",
        OWN_GATHERING,
        REPLICATED,
        COMPILED,
        ONE_GRAPH,
    ),
}


def child(mesh: str, method: str, size: str, steps: int) -> None:
    """One process of a measurement; the first prints what it found as JSON."""
    import torch
    from torch.nn import functional as F

    torch.set_num_threads(1)
    make = partial(maker(method), mesh, size, F.cross_entropy)
    if steps == 0:
        held = peak(
            make, batches(size, WARMUP + MEMORY_STEPS - 1), is_counted=method not in (COMPILED, ONE_GRAPH)
        )
        if torch.distributed.get_rank() == 0:
            print(json.dumps(held))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        return
    one_step, mean = make()
    times, cpu, losses = [], [], []
    data = batches(size, WARMUP + steps)
    for x, y in data:
        torch.distributed.barrier()
        start, own = time.perf_counter(), time.process_time()
        loss = one_step(x, y)
        times.append(time.perf_counter() - start)
        cpu.append(time.process_time() - own)
        losses.append(mean(loss))
    found: list[Any] = [None] * PROCESSES
    torch.distributed.all_gather_object(found, (times, cpu))
    if torch.distributed.get_rank() == 0:
        slowest = [max(each) for each in zip(*(one[0] for one in found), strict=True)]
        own = [statistics.mean(each) for each in zip(*(one[1] for one in found), strict=True)]
        result = {"times": slowest[WARMUP:], "cpu": own[WARMUP:], "losses": losses}
        print(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def maker(method: str) -> Any:
    """What makes the step of a way."""
    ways = {
        "layoutmap": by_layoutmap,
        "layoutmap, plain": by_layoutmap_plainly,
        REPLICATED: by_replicas,
        OWN_GATHERING: by_own_gathering,
        COMPILED: by_compiled,
        ONE_GRAPH: by_one_graph,
    }
    return ways.get(method, by_torch)


def peak(make: Any, data: Any, *, is_counted: bool) -> dict[str, Any]:
    """Return the most that tensors take in a step, the median of some, and its collectives, which no mode sees in graphs.

    The first two steps do not count. Steps differ by whether what gloo sends is still held.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step, _ = make()
        starts = []
        for x, y in data:
            gc.collect()  # what Python frees at some time is no part of a step
            starts.append(time.time_ns())
            step(x, y)
    most = [0] * (len(starts) + 1)
    for when, held in bytes_over_time(profiler):
        number = bisect(starts, when)
        most[number] = max(most[number], held)
    counted = collectives(lambda: step(*data[-1])) if is_counted else {}
    return {"peak": statistics.median(most[WARMUP:]), "collectives": counted}


def child_in_turns(mesh: str, size: str, steps: int, is_compiled: bool) -> None:
    """One process in which the ways take turns; the first prints the medians of each as JSON."""
    import torch
    from torch.nn import functional as F

    torch.set_num_threads(1)
    ways = {OWN: by_torch, "layoutmap": by_layoutmap}
    if is_compiled:
        ways |= {COMPILED: by_compiled, ONE_GRAPH: by_one_graph}
    one_steps = {name: way(mesh, size, F.cross_entropy)[0] for name, way in ways.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    data = batches(size, WARMUP + steps)
    for x, y in data:
        for name, one_step in one_steps.items():
            torch.distributed.barrier()
            start, own = time.perf_counter(), time.process_time()
            one_step(x, y)
            times[name].append((time.perf_counter() - start, time.process_time() - own))
    graphs = (COMPILED, ONE_GRAPH)  # in which no mode sees a collective
    counted = {
        name: {} if name in graphs else collectives(lambda step=step: step(*data[0]))
        for name, step in one_steps.items()
    }
    found: list[Any] = [None] * PROCESSES
    torch.distributed.all_gather_object(found, times)
    if torch.distributed.get_rank() == 0:
        result = {}
        for name in ways:
            by_step = list(zip(*(each[name] for each in found), strict=True))[WARMUP:]
            slowest = [max(wall for wall, _ in each) for each in by_step]
            cpu = [statistics.mean(cpu for _, cpu in each) for each in by_step]
            result[name] = {"times": slowest, "cpu": cpu, "losses": [], "collectives": counted[name]}
        print(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def collectives(step: Any) -> dict[str, int]:
    """Return how many of each collective a step makes."""
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


def by_compiled(mesh: str, size: str, loss_of: Any) -> Any:
    """This library, and blocks compiled."""
    return by_layoutmap(mesh, size, loss_of, compiled="blocks")


def by_one_graph(mesh: str, size: str, loss_of: Any) -> Any:
    """This library, and the model compiled as one graph."""
    return by_layoutmap(mesh, size, loss_of, compiled="model")


def by_torch(mesh: str, size: str, loss_of: Any) -> Any:
    """`parallelize_module`, with `fully_shard` where the mesh has a batch dim."""
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
        part = sizes_of(size)[4] // count
        rows = slice(number * part, (number + 1) * part)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(x: Any, y: Any) -> Any:
        loss = loss_of(model(x[rows]).flatten(0, 1), y[rows].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def mean(loss: Any) -> float:
        if "batch" in dims:
            torch.distributed.all_reduce(loss, group=device_mesh["batch"].get_group())
            loss /= int(dims["batch"])
        return float(loss)

    return step, mean


def by_replicas(mesh: str, size: str, loss_of: Any) -> Any:
    """This library, with all of a weight's part of the model dim on each process of the batch dim."""
    return by_layoutmap(mesh, size, loss_of, shard_by_batch=False)


def by_own_gathering(mesh: str, size: str, loss_of: Any) -> Any:
    """This library, which gathers weights by its own code."""
    return by_layoutmap(mesh, size, loss_of, gather="own")


def by_layoutmap(
    mesh: str,
    size: str,
    loss_of: Any,
    shard_by_batch: bool = True,
    gather: Any = "fully_shard",
    compiled: str = "",
) -> Any:
    """This library, from batches on the mesh to a loss on the mesh."""
    import torch

    import layoutmap as lm

    model, optimizer, layout_map, batch_dim = laid_out(mesh, size, shard_by_batch, gather)
    assert layout_map.mesh is not None
    for block in model.blocks if compiled == "blocks" else ():
        block.compile(fullgraph=True)
    if compiled == "model":
        model = torch.compile(model, fullgraph=True)
    rows = lm.Layout([batch_dim, None], layout_map.mesh)

    def step(x: Any, y: Any) -> Any:
        with lm.dtensor.run_on(layout_map.mesh):
            y = lm.dtensor.relayout(y, rows).flatten()
            loss = loss_of(model(lm.dtensor.relayout(x, rows)).flatten(0, 1), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def mean(loss: Any) -> float:
        return float(loss.full_tensor())

    return step, mean


def by_layoutmap_plainly(mesh: str, size: str, loss_of: Any) -> Any:
    """This library, with a training loop that knows no mesh."""
    model, optimizer, _, _ = laid_out(mesh, size, shard_by_batch=True)

    def step(x: Any, y: Any) -> Any:
        loss = loss_of(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, float


def laid_out(mesh: str, size: str, shard_by_batch: bool, gather: Any = "fully_shard") -> Any:
    """Return the model in the layouts of its tensor parallel plan, and its optimizer.

    With `shard_by_batch`, every weight is sharded over the batch dim too, as by `fully_shard`: along the first axis
    that is not sharded yet, or along with the model dim if all are.
    """
    import torch

    import layoutmap as lm

    on = lm.create_mesh(mesh)
    batch_dim = "batch" if "batch" in on else None
    shapes = dict(make_model(size).named_parameters())
    layout_map = lm.LayoutMap.from_tp_plan(TP_PLAN, on, batch_dim=batch_dim, parameters=shapes)
    layout_map[r".*norm\d?\.(weight|bias)$"] = (None,)
    layout_map.activations[r".*norm\d?$"] = (batch_dim, None, None)
    for rule, layout in list(layout_map.items()) if batch_dim and shard_by_batch else ():
        specs: list[Any] = [None if spec == lm.UNSHARDED else spec for spec in layout.sharding_specs]
        axis = specs.index(None) if None in specs else 0
        specs[axis] = batch_dim if specs[axis] is None else (specs[axis], batch_dim)
        del layout_map[rule]
        layout_map[rule] = tuple(specs)
    with layout_map.scope(batch_dim=batch_dim, gather=gather, check_batches=False):
        model = make_model(size)
    return model, torch.optim.AdamW(model.parameters(), 1e-3), layout_map, batch_dim


def plain_losses(size: str, steps: int) -> list[float]:
    """Return the losses of the same steps in this one process."""
    import torch
    from torch.nn import functional as F

    torch.set_num_threads(1)
    model = make_model(size)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for x, y in batches(size, steps):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--mesh", choices=METHODS, action="append", help="may be given twice; else both")
    parser.add_argument(
        "--size", default="small", help=f"{', '.join(SIZES)}, or numbers as in 1024,128,2,4,8,64"
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="steps that are timed in each round (default: 20)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-turns", action="store_true", help="both ways in the same processes")
    parser.add_argument("--draw", type=int, help="so many decoders of drawn sizes, all ways in turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child == IN_TURNS:
        child_in_turns(args.mesh[0], args.size, args.steps, args.compiled)
        return
    if args.child:
        child(args.mesh[0], args.child, args.size, args.steps)
        return
    if args.draw:
        report_drawn(args.draw, args.seed, args.steps)
        return
    if args.in_turns:
        for mesh in args.mesh or METHODS:
            options = ("--mesh", mesh, "--size", args.size, "--steps", str(args.steps))
            found: Any = measure(__file__, ("--child", IN_TURNS, *options), PROCESSES)
            memory = {"peak": math.nan}
            report(mesh, args.size, {name: [each | memory, each] for name, each in found.items()}, [])
        return
    expected = plain_losses(args.size, WARMUP + args.steps)
    for mesh in args.mesh or METHODS:
        runs: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS[mesh]}
        for number in range(args.rounds + 1):
            for method in METHODS[mesh]:
                print(f"\r\x1b[K{mesh}: round {number}/{args.rounds} {method}", end="", file=sys.stderr)
                steps = str(args.steps if number else 0)  # none: memory
                arguments = ("--child", method, "--mesh", mesh, "--size", args.size, "--steps", steps)
                runs[method].append(measure(__file__, arguments, PROCESSES))
        print("\r\x1b[K", end="", file=sys.stderr)
        report(mesh, args.size, runs, expected)


def report_drawn(count: int, seed: int, steps: int) -> None:
    """Steps of drawn decoders beside those of torch's own way, which takes its turns in the same processes."""
    print(
        f"batch=2,model=2, {PROCESSES} processes: ratios of ms, and of CPU ms, to `parallelize_module` + `fully_shard`"
    )
    print(", ".join(DRAWN))
    ratios: dict[tuple[str, str], list[float]] = {}
    fitting = (each for each in draw(100 * count, seed, DRAWN) if each["blocks"] * each["width"] ** 2 <= MOST)
    for drawn in islice(fitting, count):
        size = ",".join(map(str, drawn.values()))
        options = ("--mesh", "batch=2,model=2", "--size", size, "--steps", str(steps), "--compiled")
        found: Any = measure(__file__, ("--child", IN_TURNS, *options), PROCESSES)
        medians = {
            name: {kind: statistics.median(each[kind]) for kind in ("times", "cpu")}
            for name, each in found.items()
        }
        own = medians.pop(OWN)
        line = f"{size:<26} {1e3 * own['times']:>6.0f} ms"
        for name, each in medians.items():
            for kind in each:
                ratios.setdefault((name, kind), []).append(each[kind] / own[kind])
            beside = " ".join(f"{each[kind] / own[kind]:.2f}" for kind in each)
            line += f"  {name.removeprefix('layoutmap, ')} {beside}"
        print(line, flush=True)
    for (name, kind), each in ratios.items():
        print(spread(f"{name}, {'CPU ' if kind == 'cpu' else ''}ms", each))


def report(mesh: str, size: str, runs: dict[str, list[dict[str, Any]]], expected: list[float]) -> None:
    """Medians and ratios on one mesh."""
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
        off = max(differences, default=math.nan)
        counted = ", ".join(f"{n} {name}" for name, n in sorted(memory["collectives"].items()))
        print(
            f"{method:<32} {ms:>5.0f} {ms / first[0]:>6.2f} {cpu:>7.0f} {cpu / first[1]:>6.2f} {off:>24.1e} "
            f"{mib:>6.1f} {mib / first[2]:>6.2f}  {counted}"
        )
        if off > 1e-4:
            print(f"WARNING: {method} gave other losses than one process")


if __name__ == "__main__":
    main()
