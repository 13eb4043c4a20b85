"""Compare training steps on 8 simulated torch devices with steps on one device.

    python benchmarks/torch_simulated.py                           two minutes
    python benchmarks/torch_simulated.py --draw 20 --seed 7

Decoders of random sizes train with AdamW in one process: unsharded, and sharded over batch=2,model=4. Both take turns
after each step. A simulated device computes everything that a real one would. Times are the least CPU seconds of
several steps.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from measure import describe_ratios, draw_sizes, make_parser, time_call
from torch.nn import functional as F
from torch_models import TP_PLAN, Decoder, make_batches, make_model

import layoutmap as lm

SIZES = {
    "vocabulary": (256, 512, 1024),
    "width": (32, 64, 128),
    "blocks": (1, 2, 3),
    "heads": (4, 8),
    "rows": (8, 16),
    "tokens": (16, 32, 64),
}


def make_step(model: Decoder, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """Return a function that takes one step and returns its loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def take_step() -> float:
        loss = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return take_step


def measure_sizes(size: str, steps: int) -> tuple[float, float, float]:
    """Return the CPU seconds of a step on one device and on 8, and the largest difference of their losses."""
    (batch,) = make_batches(size, 1)
    layout_map = lm.LayoutMap.from_tp_plan(TP_PLAN, lm.create_mesh("batch=2,model=4"))
    model = layout_map.build(lambda: make_model(size), batch_dim="batch")
    takers = make_step(make_model(size), batch), make_step(model, batch)
    times: list[list[float]] = [[], []]
    difference = 0.0
    for _ in range(steps):
        losses: list[float] = []
        for taker, seconds in zip(takers, times, strict=True):
            taken, loss = time_call(taker, time.process_time)
            seconds.append(taken)
            losses.append(loss)
        difference = max(difference, abs(losses[0] - losses[1]))
    one, eight = (min(seconds[1:]) for seconds in times)
    return one, eight, difference


def main() -> None:
    """Print the factor of each random decoder, and the median and the worst."""
    parser = make_parser(__doc__)
    parser.add_argument("--draw", type=int, default=10, metavar="N", help="number of random decoders")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sizes")
    parser.add_argument("--steps", type=int, default=8, help="steps of each decoder")
    options = parser.parse_args()
    warnings.simplefilter("ignore", lm.LayoutMapWarning)
    torch.set_num_threads(1)
    factors: list[float] = []
    print(", ".join(SIZES))
    for sizes in draw_sizes(options.draw, options.seed, SIZES):
        size = ",".join(map(str, sizes.values()))
        one, eight, difference = measure_sizes(size, options.steps)
        factors.append(eight / one)
        times = f"{1e3 * one:>7.1f} ms {1e3 * eight:>7.1f} ms"
        print(f"{size:<24} {times}  factor {factors[-1]:.1f}, losses differ by {difference:.1e}", flush=True)
    print(describe_ratios("simulated / one device", factors))


if __name__ == "__main__":
    main()
