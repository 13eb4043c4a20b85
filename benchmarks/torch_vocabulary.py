"""The loss of a language model whose logits are sharded along the vocabulary: torch, 4 processes with gloo.

    python benchmarks/torch_vocabulary.py                          a minute
    python benchmarks/torch_vocabulary.py --rows 512 --vocabulary 128000

Forward and backward pass of `cross_entropy` on logits of 32 bits, on mesh model=4: torch's `loss_parallel`
makes means on a mesh of one dim alone. "layoutmap" is the call in a model; "gathered" is plain `DTensor`, which gathers
the logits; "whole" is one process with all of them. CPU time is that of the first process, the least of
some rounds. "MiB" is the most that its tensors take beside the logits, by torch's profiler. The loss and
its gradient are compared with those of "whole".
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from typing import Any

from torch_processes import bytes_over_time, measure

PROCESSES, ROUNDS = 4, 7
WHOLE = "whole"


def child(rows: int, vocabulary: int) -> None:
    """One process; the first prints the seconds, memory and difference of each way as JSON."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel
    from torch.nn import functional as F
    from torch.profiler import ProfilerActivity, profile

    import layoutmap as lm

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, vocabulary, generator=generator)
    labels = torch.randint(0, vocabulary, (rows,), generator=generator)
    mesh = lm.create_mesh(f"model={PROCESSES}")
    placed = lm.dtensor.relayout(x, lm.Layout([None, "model"], mesh))
    # On a mesh that layoutmap does not compute on, DTensor does as it likes.
    own = init_device_mesh("cpu", (PROCESSES,), mesh_dim_names=("other",))
    shard = DTensor.from_local(placed.to_local(), own, [Shard(1)])
    of_own = DTensor.from_local(labels, own, [Replicate()])
    ways: dict[str, tuple[Any, Any, Any]] = {
        "layoutmap": (placed, labels, lambda: lm.dtensor.run_on(mesh)),
        "loss_parallel": (shard, of_own, loss_parallel),
        "gathered": (shard, of_own, nullcontext),
        WHOLE: (x, labels, nullcontext),
    }
    found: dict[str, list[float]] = {}
    for name, (logits, target, context) in ways.items():
        is_here = name != WHOLE or dist.get_rank() == 0

        def step(logits: Any = logits, target: Any = target, context: Any = context) -> Any:
            logits = logits.detach().requires_grad_()
            with context():
                loss = F.cross_entropy(logits, target)
                loss.backward()
            return loss, logits.grad

        seconds = []
        for _ in range(ROUNDS if is_here else 0):
            start = time.process_time()
            step()
            seconds.append(time.process_time() - start)
        if is_here:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                results = step()
            most = max(held for _, held in bytes_over_time(profiler))
            loss, gradient = (each.full_tensor() if isinstance(each, DTensor) else each for each in results)
            expected = (
                torch.softmax(x, 1).scatter_add_(1, labels[:, None], torch.full((rows, 1), -1.0)) / rows
            )
            difference = max(
                float((loss - F.cross_entropy(x, labels)).abs()),
                float((gradient - expected).abs().max() / expected.abs().max()),
            )
            found[name] = [min(seconds), most / 2**20, difference]
        dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=1024, help="tokens of a batch (default: 1024)")
    parser.add_argument("--vocabulary", type=int, default=32_000, help="a multiple of 4 (default: 32000)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.rows, args.vocabulary)
        return
    sizes = ("--rows", str(args.rows), "--vocabulary", str(args.vocabulary))
    found: Any = measure(__file__, ("--child", *sizes), PROCESSES)
    print(
        f"{args.rows} rows, {args.vocabulary} classes: logits of {args.rows * args.vocabulary / 2**18:.0f} MiB"
    )
    print("way              CPU ms     MiB  largest difference")
    for name, (seconds, mib, difference) in found.items():
        print(f"{name:<15} {1e3 * seconds:>7.0f} {mib:>7.0f} {difference:>19.1e}")


if __name__ == "__main__":
    main()
