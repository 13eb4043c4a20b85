"""Compare `cross_entropy` on logits that are sharded along the vocabulary, on torch in 4 gloo processes.

    python benchmarks/torch_vocabulary.py                          a minute
    python benchmarks/torch_vocabulary.py --rows 512 --vocabulary 128000

The benchmark runs the forward and backward pass of `cross_entropy` on float32 logits. The mesh is model=4, because
torch's `loss_parallel` computes means only on a mesh of one dim. "layoutmap" is the call in a model of this library.
"gathered" is `DTensor` alone, which gathers the logits. "whole" is one process with unsharded logits. "CPU ms" is the
least time of the first process over several rounds. "MiB" is the peak of its tensors besides the logits, by torch's
profiler. The loss and its gradient are compared with those of "whole".
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from typing import Any

from measure import make_parser, run_process_group, time_call, trace_tensor_bytes

PROCESSES, ROUNDS = 4, 7
WHOLE = "whole"


def measure_losses(rows: int, vocabulary: int) -> None:
    """Measure each method in one of the processes. Rank 0 prints its seconds, MiB, and differences as JSON."""
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
    # layoutmap corrects only the meshes that it has run on, so DTensor alone gets another mesh.
    other = init_device_mesh("cpu", (PROCESSES,), mesh_dim_names=("other",))
    shard = DTensor.from_local(placed.to_local(), other, [Shard(1)])
    replicated = DTensor.from_local(labels, other, [Replicate()])
    methods: dict[str, tuple[Any, Any, Any]] = {
        "layoutmap": (placed, labels, lambda: lm.dtensor.run_on(mesh)),
        "loss_parallel": (shard, replicated, loss_parallel),
        "gathered": (shard, replicated, nullcontext),
        WHOLE: (x, labels, nullcontext),
    }
    measured: dict[str, list[float]] = {}
    for name, (logits, target, context) in methods.items():
        takes_part = name != WHOLE or dist.get_rank() == 0

        def step(logits: Any = logits, target: Any = target, context: Any = context) -> Any:
            logits = logits.detach().requires_grad_()
            with context():
                loss = F.cross_entropy(logits, target)
                loss.backward()
            return loss, logits.grad

        if takes_part:
            seconds = min(time_call(step, time.process_time)[0] for _ in range(ROUNDS))
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                results = step()
            peak = max(num_bytes for _, num_bytes in trace_tensor_bytes(profiler))
            loss, gradient = (each.full_tensor() if isinstance(each, DTensor) else each for each in results)
            expected = (
                torch.softmax(x, 1).scatter_add_(1, labels[:, None], torch.full((rows, 1), -1.0)) / rows
            )
            difference = max(
                float((loss - F.cross_entropy(x, labels)).abs()),
                float((gradient - expected).abs().max() / expected.abs().max()),
            )
            measured[name] = [seconds, peak / 2**20, difference]
        dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=1024, help="tokens of a batch (default: 1024)")
    parser.add_argument("--vocabulary", type=int, default=32_000, help="a multiple of 4 (default: 32000)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measure_losses(args.rows, args.vocabulary)
        return
    sizes = ("--rows", str(args.rows), "--vocabulary", str(args.vocabulary))
    measured = run_process_group(__file__, ("--child", *sizes), PROCESSES)
    print(
        f"{args.rows} rows, {args.vocabulary} classes: logits of {args.rows * args.vocabulary / 2**18:.0f} MiB"
    )
    print("way              CPU ms     MiB  largest difference")
    for name, (seconds, mib, difference) in measured.items():
        print(f"{name:<15} {1e3 * seconds:>7.0f} {mib:>7.0f} {difference:>19.1e}")


if __name__ == "__main__":
    main()
