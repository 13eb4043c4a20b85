"""Measure calls, memory, and fresh processes: the helpers that several benchmarks share."""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

TESTS = Path(__file__).resolve().parents[1] / "tests"
EIGHT_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "TF_CPP_MIN_LOG_LEVEL": "3"}
KERAS_ON_CPU = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
KERAS_ON_TENSORFLOW = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}


def make_parser(docstring: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows the docstring of a benchmark as its help."""
    return argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def time_call(function: Callable[[], T], clock: Callable[[], float] = time.perf_counter) -> tuple[float, T]:
    """Call a function, and return its seconds and its result."""
    start = clock()
    result = function()
    return clock() - start, result


def read_status(name: str) -> int:
    """Return one line of /proc/self/status in bytes, such as `VmRSS` or `VmHWM`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def reset_peak() -> int:
    """Reset the kernel's peak memory of this process (`VmHWM`), and return its current memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return read_status("VmRSS")


def read_peak_bytes() -> int:
    """Return the most memory that this process has used since its start, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def count_device_bytes(arrays: Iterable[Any]) -> int:
    """Return the bytes of these JAX arrays on the device that stores the most of them."""
    totals: Counter[str] = Counter()
    for array in arrays:
        for shard in array.addressable_shards:
            totals[str(shard.device)] += shard.data.nbytes
    return max(totals.values())


def compute_median(runs: Iterable[Mapping[str, Any]], key: str) -> float:
    """Return the median of one number over several runs."""
    return statistics.median(run[key] for run in runs)


def format_spread(values: Sequence[float], digits: int = 2) -> str:
    """Format the median, the smallest, and the largest value."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def run_rounds(
    methods: Iterable[str], rounds: int, run: Callable[[str], T], title: str = ""
) -> dict[str, list[T]]:
    """Run each method once per round, and return the results of each method.

    The methods take turns, so that other load on the machine slows all of them. Progress goes to stderr.
    """
    results: dict[str, list[T]] = {method: [] for method in methods}
    for number in range(rounds):
        for method, earlier in results.items():
            print(f"\r\x1b[K{title}round {number + 1}/{rounds} {method}", end="", file=sys.stderr)
            earlier.append(run(method))
    print("\r\x1b[K", end="", file=sys.stderr)
    return results


def run_script(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Any:
    """Run a Python script in a fresh process, and return the JSON of its last line.

    If the script fails, this process exits with its error.
    """
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def run_method(
    script: str, method: str, model: str, *options: str, flag: str = "--child", backend: str = "jax"
) -> Any:
    """Run a benchmark's own script for one method and one model, in a fresh process with 8 simulated devices."""
    command = [script, flag, method, "--model", model, *options]
    return run_script(command, EIGHT_DEVICES | {"KERAS_BACKEND": backend})


def run_process_group(script: str, arguments: Sequence[str], num_processes: int) -> Any:
    """Run a script in several processes of one torch process group, and return the JSON that rank 0 prints last."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_processes)}
    processes = [
        subprocess.Popen(
            [sys.executable, script, *arguments],
            env={**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_processes)
    ]
    outputs = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            sys.exit(errors)
    return json.loads(outputs[0][0].splitlines()[-1])


def trace_tensor_bytes(profiler: Any) -> Iterator[tuple[int, int]]:
    """Yield the nanoseconds and the bytes of all tensors at each allocation and release, from torch's profiler."""
    events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    total = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        yield event.start_ns(), total


def draw_sizes(count: int, seed: int, choices: Mapping[str, Sequence[T]]) -> Iterator[dict[str, T]]:
    """Yield random sizes: for each name one of its choices."""
    numbers = random.Random(seed)
    for _ in range(count):
        yield {name: numbers.choice(values) for name, values in choices.items()}


def describe_ratios(title: str, ratios: Sequence[float]) -> str:
    """Describe ratios over drawn sizes by their median, their worst (the largest), and their best."""
    median, least, worst = statistics.median(ratios), min(ratios), max(ratios)
    return f"{title}: median {median:.2f}, worst {worst:.2f}, best {least:.2f} of {len(ratios)} drawn sizes"


def print_outcome(family: str, outcome: str, reason: str) -> None:
    """Print the outcome of a family of models as JSON, for `try_families`."""
    print(json.dumps({"family": family, "outcome": outcome, "reason": reason}), flush=True)


def try_families(
    families: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str], seconds: float
) -> None:
    """Run this program as `--child FAMILY` in a process for each family, and print and count the outcomes.

    Args:
        families: The names of the families.
        arguments: Further arguments of each process.
        environment: Environment variables to set in each process.
        seconds: The time limit of each process.
    """
    counts: Counter[str] = Counter()
    for family in families:
        command = [sys.executable, sys.argv[0], "--child", family, *arguments]
        took, (outcome, reason) = time_call(
            lambda command=command: _try_family(command, environment, seconds)
        )
        counts[outcome] += 1
        print(f"{family:<20} {outcome:<18} {took:4.0f} s  {reason}", flush=True)
    print(", ".join(f"{number} {outcome}" for outcome, number in counts.most_common()))


def _try_family(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> tuple[str, str]:
    """Return the outcome of a family and its reason."""
    try:
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return "no end", f"over {seconds:.0f} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"family"')]
    if not lines:
        return "failed", f"the process ended: {done.stderr[-500:]}"
    result = json.loads(lines[-1])
    return result["outcome"], result["reason"]
