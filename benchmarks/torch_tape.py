"""Creating one rank's shards of a model of 400 million parameters: recorded and replayed, beside a plain program.

    python benchmarks/torch_tape.py [eager | rows | columns | tiles_rows | tiles_columns]

The shards are cut along rows or columns; with `tiles`, random numbers are drawn by tiles. Each way runs in a process of
its own; seconds are of the wall, and memory is what the process grew by at its peak.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import torch
from torch import nn

from layoutmap.engines.torch.deferred_init.tape import Tape

RANKS = 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))


class Model(nn.Module):
    def __init__(self, width: int = 2048, layers: int = 6, words: int = 50304, std: float = 0.02) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.std = std
        self.apply(self.initialize)

    def initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.std)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


def shard(shape: torch.Size, axis: int, rank: int = 3) -> tuple[slice, ...]:
    axis = min(axis, len(shape) - 1)
    size = shape[axis] // RANKS
    return tuple(
        slice(rank * size, rank * size + size) if i == axis else slice(0, n) for i, n in enumerate(shape)
    )


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(way: str) -> None:
    torch.set_num_threads(1)
    warm = Tape(1)
    with warm.recording():
        layer = nn.Linear(8, 8).bfloat16()  # imports what torch imports late
    warm.recipe(layer.weight).blocks([(slice(0, 8), slice(0, 4))])
    torch.manual_seed(0)
    before, start, busy = peak(), time.perf_counter(), time.process_time()
    recorded = 0.0
    if way == "eager":
        model = Model()
        held = list(model.parameters())
    else:
        tape = Tape(tiles=way.startswith("tiles"))
        with tape.recording():
            model = Model()
        recorded = time.process_time() - busy
        held = [
            tape.recipe(p).blocks([shard(p.shape, way.endswith("columns"))])[0] if tape.holds(p) else p
            for p in model.parameters()
        ]
    wall, cpu = time.perf_counter() - start, time.process_time() - busy
    mib = sum(t.numel() * t.element_size() for t in held) / 2**20
    print(
        f"{way:13} {wall:6.2f} s, {cpu:6.2f} s of CPU of which recording {recorded:5.2f} s; "
        f"holds {mib:5.0f} MiB, peak +{peak() - before:5.0f} MiB"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(sys.argv[1])
    else:
        for each in ("eager", "rows", "columns", "tiles_rows", "tiles_columns"):
            subprocess.run([sys.executable, __file__, each], check=True)
