"""What a load takes beside torch's own, along other axes in two processes, and what a manifest of many variables takes.

    python benchmarks/checkpoint_large.py                     all three, 256 MiB: two minutes
    python benchmarks/checkpoint_large.py --mib 1024 --only axes

"module" is a plain module of torch in one process, beside `torch.distributed.checkpoint` (DCP), which verifies nothing:
processor seconds. "axes" is a module in layouts in two processes of gloo, saved by rows and loaded by rows and by
columns with `verify="while"`: seconds of the slower one. "manifest" is the time to open one of so many variables, in
one chunk each and in two. All ways alternate; the best of `--rounds` counts. Files are in the page cache.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

NUM_ARRAYS, WIDTH = 16, 4096


def best(ways: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Return the least time of each way, alternating."""
    found: dict[str, float] = {}
    for _ in range(rounds):
        for name, run in ways.items():
            start = clock()
            run()
            found[name] = min(found.get(name, float("inf")), clock() - start)
    return found


def module_of(mib: int) -> Any:
    """Return a module of torch of so many MiB."""
    import torch

    module = torch.nn.Module()
    rows = (mib << 20) // NUM_ARRAYS // 4 // WIDTH
    for number in range(NUM_ARRAYS):
        module.register_parameter(f"w{number}", torch.nn.Parameter(torch.rand(rows, WIDTH)))
    return module


def show_module(mib: int, rounds: int, folder: str) -> None:
    """Print what a load into a plain module takes."""
    import torch
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    import layoutmap as lm

    torch.set_num_threads(1)
    module, other = module_of(mib), module_of(mib)
    lm.save(module, f"{folder}/lm")
    save(dict(module.state_dict()), checkpoint_id=f"{folder}/dcp")
    ways: dict[str, Callable[[], object]] = {
        verify: lambda verify=verify: lm.load(other, f"{folder}/lm", verify=verify)
        for verify in ("first", "while", "no")
    }
    ways["DCP"] = lambda: load(dict(other.state_dict()), checkpoint_id=f"{folder}/dcp")
    found = best(ways, rounds, time.process_time)
    assert all(map(torch.equal, module.parameters(), other.parameters()))
    print(
        f"{mib} MiB into a plain module, processor s: " + ", ".join(f"{n} {t:.3f}" for n, t in found.items())
    )


def show_axes(mib: int, rounds: int, folder: str) -> None:
    """Print what loads along the axes of the save, and along others, take in two processes."""
    command = [sys.executable, __file__, "--mib", str(mib), "--rounds", str(rounds), "--folder", folder]
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29519", "WORLD_SIZE": "2"}
    running = [
        subprocess.Popen([*command, "--only", "process"], env=env | {"RANK": str(n)}) for n in range(2)
    ]
    assert [each.wait() for each in running] == [0, 0]


def run_process(mib: int, rounds: int, folder: str) -> None:
    """Do what `show_axes` says, as one of its processes."""
    import torch

    import layoutmap as lm

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = lm.create_mesh("x=2")
    by = {"by rows": ("x", None), "by columns": (None, "x")}
    made = {name: lm.LayoutMap(mesh, {"w.*": specs}).apply(module_of(mib)) for name, specs in by.items()}
    lm.save(made["by rows"], f"{folder}/axes")

    def load(name: str) -> None:
        lm.load(made[name], f"{folder}/axes", verify="while")
        torch.distributed.barrier()

    found = best({name: lambda name=name: load(name) for name in made}, rounds, time.perf_counter)
    if torch.distributed.get_rank() == 0:
        rows, columns = found.values()
        print(
            f"{mib} MiB saved by rows in two processes, loaded by rows {rows:.2f} s, by columns {columns:.2f} s: "
        )
        print(f"  {columns / rows:.2f} times", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def show_manifest(number: int, rounds: int) -> None:
    """Print what it takes to open a manifest of so many variables."""
    from layoutmap.checkpoint.chunk_table import Chunk
    from layoutmap.checkpoint.manifest import DataFile, Manifest, manifest_from_bytes, manifest_to_bytes
    from layoutmap.checkpoint.source import SavedVariable

    variables = [SavedVariable(f"layers.{n // 10}.w{n % 10}", (64, 32), "float32") for n in range(number)]
    for count in (1, 2):
        rows = 64 // count
        chunks = {
            v.path: [
                Chunk(
                    0,
                    200 + 8192 * n + 128 * rows * k,
                    (slice(rows * k, rows * (k + 1)), slice(0, 32)),
                    "0" * 16,
                )
                for k in range(count)
            ]
            for n, v in enumerate(variables)
        }
        file = DataFile("data-00000.safetensors", 200 + 8192 * number, 200, "0" * 16)
        data = manifest_to_bytes(Manifest(0, {"id": "x"}, None, {}, (file,), variables, chunks))
        ways: dict[str, Callable[[], object]] = {
            "open": lambda data=data: manifest_from_bytes(data, "manifest")
        }
        seconds, processor = (
            best(ways, rounds, clock)["open"] for clock in (time.perf_counter, time.process_time)
        )
        print(
            f"{number:,} variables in {count} chunks each, {len(data) >> 20} MiB: {seconds:.1f} s, CPU {processor:.1f}"
        )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variables", type=int, default=300_000)
    parser.add_argument("--only", nargs="+", default=["module", "axes", "manifest"])
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not asked.folder:
        print(f"load {os.getloadavg()[0]:.0f} at the start", flush=True)
    folder = asked.folder or tempfile.mkdtemp()
    try:
        if "process" in asked.only:
            run_process(asked.mib, asked.rounds, folder)
        if "module" in asked.only:
            show_module(asked.mib, asked.rounds, folder)
        if "axes" in asked.only:
            show_axes(asked.mib, asked.rounds, folder)
        if "manifest" in asked.only:
            show_manifest(asked.variables, min(asked.rounds, 2))
    finally:
        if not asked.folder:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
