"""Time loads into an unsharded module, along other axes in two processes, and of a large manifest.

    python benchmarks/checkpoint_large.py                     all three, 256 MiB: two minutes
    python benchmarks/checkpoint_large.py --mib 1024 --only axes

"module": the CPU seconds of a load into an unsharded torch module in one process, by this library and by
`torch.distributed.checkpoint` (DCP), which verifies nothing. "axes": a sharded module in two gloo processes, saved by
rows, and loaded by rows and by columns with `verify="while"`. Its time is that of the slower process. "manifest": the
time to open a manifest of `--variables` variables, with one chunk each and with two. All methods take turns, and the
best of `--rounds` counts. Files are in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

from measure import make_parser, run_process_group, run_rounds, time_call

NUM_ARRAYS, WIDTH = 16, 4096


def find_best_times(
    methods: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Run the methods in turns, and return the least time of each."""
    runs = run_rounds(methods, rounds, lambda name: time_call(methods[name], clock)[0])
    return {name: min(times) for name, times in runs.items()}


def make_module(mib: int) -> Any:
    """Return a torch module of this size."""
    import torch

    module = torch.nn.Module()
    rows = (mib << 20) // NUM_ARRAYS // 4 // WIDTH
    for number in range(NUM_ARRAYS):
        module.register_parameter(f"w{number}", torch.nn.Parameter(torch.rand(rows, WIDTH)))
    return module


def show_module(mib: int, rounds: int, folder: str) -> None:
    """Print the CPU seconds of loads into an unsharded module."""
    import torch
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    import layoutmap as lm

    torch.set_num_threads(1)
    module, other = make_module(mib), make_module(mib)
    lm.save(module, f"{folder}/lm")
    save(dict(module.state_dict()), checkpoint_id=f"{folder}/dcp")
    methods: dict[str, Callable[[], object]] = {
        verify: lambda verify=verify: lm.load(other, f"{folder}/lm", verify=verify)
        for verify in ("first", "while", "no")
    }
    methods["DCP"] = lambda: load(dict(other.state_dict()), checkpoint_id=f"{folder}/dcp")
    times = find_best_times(methods, rounds, time.process_time)
    assert all(map(torch.equal, module.parameters(), other.parameters()))
    print(
        f"{mib} MiB into a plain module, processor s: " + ", ".join(f"{n} {t:.3f}" for n, t in times.items())
    )


def show_axes(mib: int, rounds: int, folder: str) -> None:
    """Print the seconds of loads along the axes of the save, and along others, in two processes."""
    options = ["--mib", str(mib), "--rounds", str(rounds), "--folder", folder, "--only", "process"]
    rows, columns = run_process_group(__file__, options, 2)
    print(
        f"{mib} MiB saved by rows in two processes, loaded by rows {rows:.2f} s, by columns {columns:.2f} s: "
    )
    print(f"  {columns / rows:.2f} times", flush=True)


def measure_axes(mib: int, rounds: int, folder: str) -> None:
    """Measure the loads of `show_axes` in one of its processes, and print the seconds as JSON."""
    import torch

    import layoutmap as lm

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = lm.create_mesh("x=2")
    specs = {"by rows": ("x", None), "by columns": (None, "x")}
    modules = {
        name: lm.LayoutMap(mesh, {"w.*": each}).apply(make_module(mib)) for name, each in specs.items()
    }
    lm.save(modules["by rows"], f"{folder}/axes")

    def load(name: str) -> None:
        lm.load(modules[name], f"{folder}/axes", verify="while")
        torch.distributed.barrier()

    methods = {name: lambda name=name: load(name) for name in modules}
    times = find_best_times(methods, rounds, time.perf_counter)
    if torch.distributed.get_rank() == 0:
        print(json.dumps(list(times.values())))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def show_manifest(number: int, rounds: int) -> None:
    """Print the seconds to open a manifest of this many variables."""
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
        methods: dict[str, Callable[[], object]] = {
            "open": lambda data=data: manifest_from_bytes(data, "manifest")
        }
        seconds, processor = (
            find_best_times(methods, rounds, clock)["open"]
            for clock in (time.perf_counter, time.process_time)
        )
        print(
            f"{number:,} variables in {count} chunks each, {len(data) >> 20} MiB: {seconds:.1f} s, CPU {processor:.1f}"
        )


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variables", type=int, default=300_000)
    parser.add_argument("--only", nargs="+", default=["module", "axes", "manifest"])
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.folder:
        print(f"load {os.getloadavg()[0]:.0f} at the start", flush=True)
    folder = args.folder or tempfile.mkdtemp()
    try:
        if "process" in args.only:
            measure_axes(args.mib, args.rounds, folder)
        if "module" in args.only:
            show_module(args.mib, args.rounds, folder)
        if "axes" in args.only:
            show_axes(args.mib, args.rounds, folder)
        if "manifest" in args.only:
            show_manifest(args.variables, min(args.rounds, 2))
    finally:
        if not args.folder:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
