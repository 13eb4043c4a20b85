"""What it costs two processes to compare what makes their programs, and to hear of each other's end.

python benchmarks/same_program.py [--kinds keras jit_step torch] [--blocks 12] [--rounds 3]

The first training step, which compiles on JAX, and later ones, the median of 20: with both, and in processes where both
are taken out. First steps differ more from run to run than by what is compared, so that is also timed by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from torch_processes import measure

import layoutmap as lm
from layoutmap.engines import agreement, peers

WIDTH, ROWS, STEPS = 256, 8, 20
RULES = {r".*(query|key|value|up)\.kernel": (None, "model"), r".*(out|down)\.kernel": ("model", None)}


def with_keras(blocks: int) -> Callable[[], object]:
    """A step of `train_on_batch`."""
    sys.modules["tensorflow"] = None  # type: ignore[assignment] # Keras imports it to seed it
    from models import Decoder

    with lm.LayoutMap(lm.create_mesh("model=2"), RULES, rest="replicated").scope():
        model = Decoder(1024, WIDTH, 4 * WIDTH, 8, blocks)
        model.compile("adamw", "mse")
    x, y = np.zeros((ROWS, 64), np.int32), np.zeros((ROWS, 64, 1024), np.float32)
    model.predict_on_batch(x)  # makes the weights
    return lambda: model.train_on_batch(x, y)


def with_jit_step(blocks: int) -> Callable[[], object]:
    """A step of `lm.jit_step`."""
    import jax

    rules = {r".*up": (None, "model"), r".*down": ("model", None)}
    shapes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}

    def make() -> Any:
        key = jax.random.key(0)
        return [{n: jax.random.normal(key, s) / 16 for n, s in shapes.items()} for _ in range(blocks)]

    params = lm.LayoutMap(lm.create_mesh("model=2"), rules).build(make)

    @lm.jit_step
    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            out = x
            for block in params:
                out = out + jax.nn.gelu(out @ block["up"]) @ block["down"]
            return (out**2).mean()

        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, jax.grad(loss)(params))

    return lambda: jax.block_until_ready(step(params, np.ones((64 * ROWS, WIDTH), np.float32)))


def with_torch(blocks: int) -> Callable[[], object]:
    """A step of a loop of one's own."""
    import torch
    from torch_models import Decoder

    rules = {r".*\.(q|k|v|up)\.weight": ("model", None), r".*\.(o|down)\.weight": (None, "model")}
    torch.manual_seed(0)
    with lm.LayoutMap(lm.create_mesh("model=2"), rules, rest="replicated").scope():
        model = Decoder(1024, WIDTH, blocks, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.zeros((ROWS, 64), dtype=torch.int64)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


KINDS = {"keras": with_keras, "jit_step": with_jit_step, "torch": with_torch}


class Timer:
    """Calls a function, or something else in its place, and knows how long that took, in seconds."""

    def __init__(self, function: Callable[..., Any], instead: Callable[..., Any] | None):
        self.function, self.seconds = instead or function, 0.0

    def __call__(self, *args: Any) -> Any:
        begin = time.perf_counter()
        made = self.function(*args)
        self.seconds += time.perf_counter() - begin
        return made


class Nobody:
    """In the place of `Peers`: hears of no other process."""

    def begin(self) -> None:
        """Nothing."""


def child(kind: str, blocks: int, way: str) -> dict[str, float]:
    """What one process measures, in milliseconds."""
    without = way == "without"
    compared = Timer(agreement.check_program, (lambda *_: None) if without else None)
    connected = Timer(peers.Peers, (lambda *_: Nobody()) if without else None)
    agreement.check_program, peers.Peers = compared, connected  # type: ignore[misc] # before they are imported
    if kind == "torch":
        import torch.distributed as dist

        dist.init_process_group("gloo")
    else:
        os.environ.setdefault("KERAS_BACKEND", "jax")
        import jax

        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        jax.distributed.initialize(address, 2, int(os.environ["RANK"]))
    step, seconds = KINDS[kind](blocks), list[float]()
    compared.seconds = 0.0
    for _ in range(1 + STEPS):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    first, *later = seconds
    found = {"first": first, "later": statistics.median(later)}
    found |= {"compared": compared.seconds, "connected": connected.seconds}
    return {name: each * 1e3 for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child[0], options.blocks, options.child[1])))
        return
    for kind in options.kinds:
        found: dict[str, list[dict[str, float]]] = {"with": [], "without": []}
        for _ in range(options.rounds):
            for way, rounds in found.items():
                arguments = ["--blocks", str(options.blocks), "--child", kind, way]
                rounds.append(measure(__file__, arguments, 2))
        both = [
            {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
            for rounds in found.values()
        ]
        own = f"connected in {both[0]['connected']:.0f} ms, compared in {both[0]['compared']:.0f} ms"
        print(f"{kind}, {options.blocks} blocks: {own}")
        for name in ("first", "later"):
            one, other = (each[name] for each in both)
            print(f"  {name} step, ms: {one:.1f} / {other:.1f} = {one / other:.2f}")


if __name__ == "__main__":
    main()
