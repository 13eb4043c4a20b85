"""Compare the speed of saves and loads, and the memory of loads, with orbax, DCP, safetensors, and copies.

    python benchmarks/checkpoint_speed.py                              1 GiB, 5 rounds: some minutes
    python benchmarks/checkpoint_speed.py --mib 256 --rounds 3 --only save
    taskset -c 0 python benchmarks/checkpoint_speed.py                 with one core
    python benchmarks/checkpoint_speed.py --publish disk               also writes the tables of docs/what-it-costs.md
    python benchmarks/checkpoint_speed.py --publish "RAM disk" --directory /dev/shm

16 arrays of random sizes (`--seed`), half float32 and half bfloat16, are sharded over 8 devices in a 2x4 mesh, and
loaded on a 4x2 mesh with other axes sharded. JAX runs in one process with 8 simulated devices, torch in 8 processes
with gloo. Every round tries each method once, in the same order. A save is timed until its files and folders are on the
disk: the benchmark calls `fsync` for each of them after every method. A load reads files that were written just before,
so they come from the page cache, and the time is the library's, not the disk's. Each method saves and loads a small
checkpoint before its timed run.

"processor s" is the CPU time of all processes, which is more stable than seconds on a busy machine. "x" is a ratio of
speeds. "dd" is `dd bs=16M conv=fsync` of a file in memory with as many bytes. "copy" is a thread for each core that
writes its share of these bytes to a file of its own. "peak" is the growth of a fresh process (on torch: of all 8)
during the load, divided by the bytes of the shards. 1.00 is the minimum for a load that creates arrays. torch loads
into an existing model, and the memory of that model does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measure import make_parser, read_status, reset_peak, run_rounds

Times = tuple[float, float]
NUM_ARRAYS, NUM_PROCESSES = 16, 8
SEED = "LAYOUTMAP_BENCHMARK_SEED"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "what-it-costs.md"
BOTH = ("x", "y")
SAVED = (("x", "y"), (BOTH, None), (None, BOTH), ("y", "x"))  # on x=2, y=4
LOADED = (("x", "y"), (None, BOTH), (BOTH, None), ("y", "x"))  # on x=4, y=2
COPIES = ("dd", "copy")
NUM_CORES = len(os.sched_getaffinity(0))
SAVES = (*COPIES, "jax lm", "jax orbax", "jax orbax zarr3", "jax safetensors", "torch lm", "torch DCP")
LOG = os.path.join(tempfile.gettempdir(), "layoutmap-benchmark-checkpoint.log")
LOADS = (
    *("jax lm", "jax lm existing", "jax orbax", "jax orbax zarr3"),
    *("torch lm", "torch lm while", "torch lm no", "torch DCP"),  # while, no: `verify=` of `load`
)


def draw_arrays(num_bytes: int) -> dict[str, tuple[tuple[int, int], str]]:
    """Return names, shapes, and element types of random arrays with about this many bytes in all."""
    numbers = random.Random(int(os.environ[SEED]))
    shares = [numbers.uniform(0.2, 2) for _ in range(NUM_ARRAYS)]
    arrays: dict[str, tuple[tuple[int, int], str]] = {}
    for i in range(NUM_ARRAYS):
        dtype, size = (("float32", 4), ("bfloat16", 2))[i // 4 % 2]
        width = 8 * numbers.randint(64, 1024)  # so that each axis can be split in eight
        rows = max(8, int(num_bytes * shares[i] / sum(shares)) // size // width // 8 * 8)
        arrays[f"w{i:02d}"] = (rows, width), dtype
    return arrays


def count_task_bytes(num_bytes: int) -> int:
    """Return the exact bytes of the arrays that `draw_arrays` returns."""
    sizes = {"float32": 4, "bfloat16": 2}
    return sum(rows * width * sizes[dtype] for (rows, width), dtype in draw_arrays(num_bytes).values())


def sync_tree(path: str) -> None:
    """Force all files and folders below a path to the disk."""
    for folder, _, names in os.walk(path):
        for each in (folder, *(os.path.join(folder, name) for name in names)):
            file = os.open(each, os.O_RDONLY)
            os.fsync(file)
            os.close(file)


class Jax:
    """Save and load on JAX by each method."""

    def __init__(self) -> None:
        import jax
        import numpy as np

        self.jax, self.np = jax, np

    def get_sharding(self, number: int, loaded: bool) -> Any:
        shape, specs = ((4, 2), LOADED) if loaded else ((2, 4), SAVED)
        mesh = self.jax.make_mesh(shape, BOTH, axis_types=(self.jax.sharding.AxisType.Auto,) * 2)
        return self.jax.sharding.NamedSharding(mesh, self.jax.P(*specs[number % 4]))

    def make(self, num_bytes: int, loaded: bool = False) -> dict[str, Any]:
        random, arrays = self.np.random.default_rng(0), {}
        for i, (name, (shape, dtype)) in enumerate(draw_arrays(num_bytes).items()):
            values = random.random(shape, self.np.float32) - 0.5
            arrays[name] = self.jax.device_put(
                values.astype(self.jax.numpy.dtype(dtype)), self.get_sharding(i, loaded)
            )
        return self.jax.block_until_ready(arrays)

    def make_abstract(self, num_bytes: int) -> dict[str, Any]:
        return {
            name: self.jax.ShapeDtypeStruct(shape, dtype, sharding=self.get_sharding(i, True))
            for i, (name, (shape, dtype)) in enumerate(draw_arrays(num_bytes).items())
        }

    def save(self, way: str, model: dict[str, Any], folder: str) -> None:
        if way == "lm":
            import layoutmap as lm

            lm.save(model, folder)
        elif way == "safetensors":
            from safetensors.numpy import save_file

            os.makedirs(folder)
            save_file({k: self.np.asarray(v) for k, v in model.items()}, f"{folder}/model.safetensors")
        else:
            with self.open_orbax(way) as checkpointer:
                checkpointer.save(folder, model)

    def load(self, way: str, num_bytes: int, folder: str, existing: Any) -> Any:
        if way.startswith("lm"):
            import layoutmap as lm

            if existing is not None:
                arrays = lm.load(existing, folder)
            else:
                names = draw_arrays(num_bytes)

                def make() -> dict[str, Any]:
                    return {n: self.jax.numpy.zeros(shape, dtype) for n, (shape, dtype) in names.items()}

                rules = {name: LOADED[i % 4] for i, name in enumerate(names)}
                layout_map = lm.LayoutMap(lm.create_mesh("x=4,y=2", engine="jax"), rules)
                arrays = lm.load(make, folder, layout_map=layout_map, library="jax")
        else:
            with self.open_orbax(way) as checkpointer:
                target = self.make_abstract(num_bytes)
                if way == "orbax":
                    arrays = checkpointer.restore(folder, target)
                else:
                    from orbax.checkpoint.checkpoint_utils import construct_restore_args

                    arrays = checkpointer.restore(
                        folder, item=target, restore_args=construct_restore_args(target)
                    )
        return self.jax.block_until_ready(arrays)

    def open_orbax(self, way: str) -> Any:
        import orbax.checkpoint as ocp

        if way == "orbax":
            return ocp.StandardCheckpointer()
        return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True))

    def compute_checksums(self, model: dict[str, Any]) -> list[int]:
        from zlib import crc32

        return [crc32(self.np.asarray(model[name]).view(self.np.uint8)) for name in sorted(model)]


class Torch:
    """Save and load on torch by each method, in one of 8 processes."""

    def __init__(self) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh

        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        self.torch = torch
        self.meshes = [init_device_mesh("cpu", n, mesh_dim_names=BOTH) for n in ((2, 4), (4, 2))]

    def get_placements(self, number: int, loaded: bool) -> Any:
        from torch.distributed.tensor import Replicate, Shard

        specs = (LOADED if loaded else SAVED)[number % 4]
        return [
            next((Shard(a) for a, s in enumerate(specs) if s is not None and dim in s), Replicate())
            for dim in BOTH
        ]

    def make(self, num_bytes: int, loaded: bool = False, ones: bool = False) -> Any:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        torch, mesh = self.torch, self.meshes[loaded]
        random = torch.Generator()
        module = torch.nn.Module()
        for i, (name, (shape, dtype)) in enumerate(draw_arrays(num_bytes).items()):
            placements = self.get_placements(i, loaded)
            local, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
            dtype = getattr(torch, dtype)
            if ones:
                piece = torch.ones(*local, dtype=dtype)  # zeros would take no memory yet
            else:
                random.manual_seed(i * 1000 + sum(offset))
                piece = (torch.rand(*local, generator=random) - 0.5).to(dtype)
            tensor = DTensor.from_local(piece, mesh, placements, run_check=False)
            module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        return module

    def save(self, way: str, model: Any, folder: str) -> None:
        if way == "lm":
            import layoutmap as lm

            lm.save(model, folder)
        else:
            import torch.distributed.checkpoint as dcp

            dcp.save(dict(model.state_dict()), checkpoint_id=folder)
        self.torch.distributed.barrier()

    def load(self, way: str, num_bytes: int, folder: str, existing: Any) -> Any:
        if way.startswith("lm"):
            import layoutmap as lm

            lm.load(existing, folder, verify=way.removeprefix("lm").strip() or "first")
        else:
            import torch.distributed.checkpoint as dcp

            dcp.load(dict(existing.state_dict()), checkpoint_id=folder)
        self.torch.distributed.barrier()
        return existing

    def compute_checksums(self, model: Any) -> list[int]:
        from zlib import crc32

        bits = (p.full_tensor().view(self.torch.uint8) for _, p in sorted(model.named_parameters()))
        return [crc32(each.numpy()) for each in bits]


def serve(library: str) -> None:
    """Run the requests on stdin, and answer each with a line of JSON."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    side: Any = Jax() if library == "jax" else Torch()
    model: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        way, num_bytes, folder = request.get("way"), request["bytes"], request.get("folder")
        start, processor, answer = time.perf_counter(), time.process_time(), {}
        if request["do"] == "make":
            model = side.make(num_bytes)
        elif request["do"] == "save":
            side.save(way, model, folder)
        else:
            existing = None
            if library == "torch":
                existing = side.make(num_bytes, True, ones=True)
            elif way == "lm existing":
                existing = side.make(num_bytes, True)
            if library == "torch":
                side.torch.distributed.barrier()
            before, start, processor = reset_peak(), time.perf_counter(), time.process_time()
            loaded = side.load(way, num_bytes, folder, existing)
            answer["peak"] = read_status("VmHWM") - before
            size = count_task_bytes(num_bytes)
            answer["own"] = size // NUM_PROCESSES if library == "torch" else size
        answer["seconds"] = time.perf_counter() - start
        answer["processor"] = time.process_time() - processor
        if request.get("check"):
            answer["checksum"] = side.compute_checksums(loaded if request["do"] == "load" else model)
        loaded = existing = None
        answers.write(json.dumps(answer) + "\n")


class Server:
    """The processes of one library: one for JAX, eight for torch."""

    def __init__(self, library: str):
        count = NUM_PROCESSES if library == "torch" else 1
        self.library, self.processes = library, []
        for rank in range(count):
            env = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu", "RANK": str(rank)}
            env |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
            command = [sys.executable, __file__, "--serve", library]
            pipe = subprocess.PIPE
            with open(LOG, "a") as log:
                self.processes.append(
                    subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True, stderr=log)
                )

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request to all processes, and merge their answers."""
        for each in self.processes:
            each.stdin.write(json.dumps(request) + "\n")
            each.stdin.flush()
        answers = [json.loads(each.stdout.readline() or '{"died": true}') for each in self.processes]
        if any("died" in each for each in answers):
            raise SystemExit(f"{self.library}: a process died; see {LOG}")
        return (
            answers[0]
            | {k: sum(a[k] for a in answers) for k in ("peak", "own", "processor") if k in answers[0]}
            | {"seconds": max(each["seconds"] for each in answers)}
        )

    def close(self) -> None:
        """End the processes."""
        for each in self.processes:
            each.stdin.close()
        for each in self.processes:
            each.wait()


def run_dd(source: str, folder: str) -> Times:
    """Copy a file with dd, and return its wall and CPU seconds."""
    os.makedirs(folder)
    start, before = time.perf_counter(), os.times()
    command = ["dd", f"if={source}", f"of={folder}/file", "bs=16M", "conv=fsync", "status=none"]
    subprocess.run(command, check=True)
    after = os.times()
    processor = sum(after[2:4]) - sum(before[2:4])
    return time.perf_counter() - start, processor


def run_copy(source: str, folder: str) -> Times:
    """Copy a file to one file per core, each on a thread of its own, and return wall and CPU seconds."""
    os.makedirs(folder)
    with open(source, "rb") as file:
        share = -(-os.fstat(file.fileno()).st_size // NUM_CORES)

        def copy(number: int) -> None:
            buffer = bytearray(8 << 20)
            end = (number + 1) * share
            with open(f"{folder}/{number}", "wb", buffering=0) as target:
                place = number * share
                while count := os.preadv(file.fileno(), [memoryview(buffer)[: end - place]], place):
                    target.write(memoryview(buffer)[:count])
                    place += count

        start, before = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(NUM_CORES) as pool:
            list(pool.map(copy, range(NUM_CORES)))
        return time.perf_counter() - start, time.process_time() - before


def measure_saves(servers: dict[str, Server], args: Any, root: str, total: int) -> dict[str, list[Times]]:
    """Return the times of each method of saving in each round."""
    shm = tempfile.mkdtemp(dir="/dev/shm")
    try:
        with open(f"{shm}/source", "wb") as file:
            for _ in range(total >> 20):
                file.write(os.urandom(1 << 20))
        return run_selected(SAVES, args, lambda way: measure_save(way, servers, f"{shm}/source", root, total))
    finally:
        shutil.rmtree(shm)


def measure_save(way: str, servers: dict[str, Server], source: str, root: str, total: int) -> Times:
    """Return the times of one durable save."""
    folder = tempfile.mktemp(dir=root)
    os.sync()
    if way in COPIES:
        seconds, processor = (run_dd if way == "dd" else run_copy)(source, folder)
    else:
        library, name = way.split(" ", 1)
        seconds, processor = get_times(servers[library].ask(do="save", way=name, bytes=total, folder=folder))
    start = time.perf_counter()
    sync_tree(folder)
    seconds += time.perf_counter() - start
    shutil.rmtree(folder)
    return seconds, processor


def get_times(answer: dict[str, Any]) -> Times:
    """Return the wall seconds and the CPU seconds of an answer."""
    return answer["seconds"], answer["processor"]


def run_selected(ways: tuple[str, ...], args: Any, run: Callable[[str], Times]) -> dict[str, list[Times]]:
    """Return the times of each selected method in each round."""
    return run_rounds([way for way in ways if is_selected(way, args)], args.rounds, run)


def is_selected(way: str, args: Any) -> bool:
    """Return whether the options select a method."""
    return way in COPIES or way.split()[0] in args.library


def print_table(
    title: str, times: dict[str, list[Times]], total: int, base: tuple[str, ...], extra: Any
) -> None:
    """Print the medians, and the ratios of speed to the methods in `base`."""
    print(f"\n{title}")
    walls = {way: [wall for wall, _ in runs] for way, runs in times.items()}
    medians = {way: statistics.median(runs) for way, runs in walls.items()}
    base = tuple(each for each in base if each in medians)
    print(
        f"{'way':<18} {'seconds':>8} {'least':>6} {'most':>6} {'GB/s':>6} {'processor s':>12}"
        + " ".join(f"{'x ' + b:>17}" for b in base)
    )
    for way, runs in times.items():
        ratios = " ".join(f"{medians[b] / medians[way]:>17.2f}" for b in base)
        processor = statistics.median(each for _, each in runs)
        print(
            f"{way:<18} {medians[way]:>8.2f} {min(walls[way]):>6.2f} {max(walls[way]):>6.2f} "
            f"{total / medians[way] / 1e9:>6.2f} {processor:>12.2f}{ratios} {extra.get(way, '')}"
        )


PEERS = {"jax": "jax orbax", "torch": "torch DCP"}
TITLES = {
    "dd": "`dd conv=fsync` of as many bytes",
    "copy": "threads that copy as many bytes",
    "jax lm": "this library",
    "jax lm existing": "the same, into an existing model",
    "jax orbax": "orbax, its default",
    "jax orbax zarr3": "orbax with zarr3",
    "jax safetensors": "safetensors, no checksums",
    "torch lm": 'this library, existing model, `verify="first"`',
    "torch lm while": 'the same, `verify="while"`',
    "torch lm no": 'the same, `verify="no"`',
    "torch DCP": "DCP, no checksums",
}


def publish(
    args: Any,
    about: str,
    saves: dict[str, list[Times]],
    loads: dict[str, list[Times]],
    peaks: dict[str, str],
) -> None:
    """Write the tables of docs/what-it-costs.md: medians, slowest rounds, and ratios to the peer."""
    command = f"python benchmarks/checkpoint_speed.py --mib {args.mib} --rounds {args.rounds}"
    command += f" --seed {args.seed} --only {' '.join(args.only)} --publish '{args.publish}'"
    lines = [textwrap.fill(f"{about} (`{command}`):", 100)]
    for library in args.library:
        peer = PEERS[library]
        head = [
            "on JAX" if library == "jax" else "on torch",
            "save, s",
            "slowest",
            "CPU s",
            "load, s",
            "slowest",
        ]
        of = TITLES[peer].split(",")[0]
        head += ["CPU s", f"save / {of}'s", f"load / {of}'s", *["room / shards"] * bool(peaks)]
        lines += ["", format_row(head), format_row(["---", *["--:"] * (len(head) - 1)])]
        for way in TITLES:
            if way in COPIES or way.startswith(library):
                cells = [TITLES[way], *format_cells(saves.get(way, [])), *format_cells(loads.get(way, []))]
                cells += [
                    f"{compute_median_seconds(times[way]) / compute_median_seconds(times[peer]):.2f}"
                    if way in times
                    else ""
                    for times in (saves, loads)
                ]
                lines.append(format_row([*cells, *[peaks.get(way, "")] * bool(peaks)]))
    start, end = (
        f"<!-- checkpoints on {args.publish}: made by benchmarks/checkpoint_speed.py --publish -->",
        f"<!-- /checkpoints on {args.publish} -->",
    )
    before, rest = PAGE.read_text(encoding="utf-8").split(start)
    text = "\n".join(lines)
    PAGE.write_text(f"{before}{start}\n\n{text}\n\n{end}{rest.split(end)[1]}", encoding="utf-8")


def compute_median_seconds(times: list[Times]) -> float:
    return statistics.median(wall for wall, _ in times)


def format_cells(times: list[Times]) -> list[str]:
    if not times:
        return ["", "", ""]
    numbers = (
        compute_median_seconds(times),
        max(wall for wall, _ in times),
        statistics.median(cpu for _, cpu in times),
    )
    return [f"{each:.2f}" for each in numbers]


def format_row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of all arrays")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="where to write (default: a temporary directory)")
    parser.add_argument("--only", nargs="+", default=["save", "load", "memory"])
    parser.add_argument("--library", nargs="+", default=["jax", "torch"])
    parser.add_argument("--seed", type=int, default=0, help="seed of the array sizes (default: %(default)s)")
    parser.add_argument(
        "--publish",
        choices=("disk", "RAM disk"),
        help=f"write the tables of docs/{PAGE.name} for a --directory there",
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    if args.publish and ({"save", "load"} - {*args.only} or len({*args.library}) < 2):
        parser.error("--publish needs saves and loads of both libraries")
    os.environ[SEED] = str(args.seed)
    total, small = args.mib << 20, 1 << 22
    root = tempfile.mkdtemp(dir=args.directory)
    try:
        run(args, root, total, small)
    finally:
        shutil.rmtree(root)


def run(args: Any, root: str, total: int, small: int) -> None:
    """Measure saves and loads, and print the tables."""
    servers = {library: Server(library) for library in args.library}
    ways = {way: way.split(" ", 1) for way in SAVES if way not in COPIES and is_selected(way, args)}
    expected: dict[str, Any] = {}
    for library, server in servers.items():
        server.ask(do="make", bytes=small)
        for way, (owner, name) in ways.items():
            if owner == library:
                server.ask(do="save", way=name, bytes=small, folder=f"{root}/small {way}")
        expected[library] = server.ask(do="make", bytes=total, check=True)["checksum"]
    about = f"{count_task_bytes(total) >> 20:,} MiB in {NUM_ARRAYS} arrays, {args.rounds} rounds, "
    about += f"{NUM_CORES} cores, load {os.getloadavg()[0]:.1f} at the start"
    print(about)
    saved: dict[str, list[Times]] = {}
    if "save" in args.only:
        saved = measure_saves(servers, args, root, total)
        print_table("save, durable", saved, count_task_bytes(total), ("copy", "jax orbax", "torch DCP"), {})
    if not {"load", "memory"} & {*args.only}:
        return
    for way, (library, name) in ways.items():
        servers[library].ask(do="save", way=name, bytes=total, folder=f"{root}/full {way}")
    peaks: dict[str, str] = {}

    def load(server: Server, way: str, **more: Any) -> dict[str, Any]:
        name = way.split(" ", 1)[1]
        size = more.pop("size", total)
        saved = way if "lm" not in way else " ".join(way.split()[:2])
        folder = f"{root}/{'full' if size == total else 'small'} {saved}"
        return server.ask(do="load", way=name, bytes=size, folder=folder, **more)

    if "memory" in args.only:
        for each in servers.values():
            each.close()
        servers.clear()
        for way in LOADS:
            if not is_selected(way, args):
                continue
            print(f"\r\x1b[Kmemory {way}", end="", file=sys.stderr)
            server = Server(way.split()[0])
            load(server, way, size=small)
            answer = load(server, way, check=True)
            is_right = answer["checksum"] == expected[server.library]
            peaks[way] = f"{answer['peak'] / answer['own']:.2f}" + " WRONG VALUES" * (not is_right)
            server.close()
        print("\r\x1b[K", end="", file=sys.stderr)
        servers |= {library: Server(library) for library in args.library if "load" in args.only}
    if "load" in args.only:
        for way in LOADS:
            if is_selected(way, args):
                load(servers[way.split()[0]], way, size=small)
        loads = run_selected(LOADS, args, lambda way: get_times(load(servers[way.split()[0]], way)))
        print_table(
            "load on another mesh, from the page cache",
            loads,
            count_task_bytes(total),
            ("jax orbax", "jax orbax zarr3", "torch DCP"),
            {way: f"   peak {peak}" for way, peak in peaks.items()},
        )
        if args.publish:
            publish(args, about, saved, loads, peaks)
    else:
        print("\n".join(f"{way:<18}   peak {peak}" for way, peak in peaks.items()))
    for each in servers.values():
        each.close()


if __name__ == "__main__":
    main()
