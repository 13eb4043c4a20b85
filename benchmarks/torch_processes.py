"""Run a benchmark's own script in several processes that make one process group of torch, on 127.0.0.1."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any


def measure(script: str, arguments: Sequence[str], processes: int) -> dict[str, Any]:
    """Return one measurement in fresh processes: what the first of them prints last, as JSON."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    running = [
        subprocess.Popen(
            [sys.executable, script, *arguments],
            env={**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    said = [process.communicate() for process in running]
    for process, (_, errors) in zip(running, said, strict=True):
        if process.returncode:
            sys.exit(errors)
    return json.loads(said[0][0].splitlines()[-1])


def bytes_over_time(profiler: Any) -> Iterator[tuple[int, int]]:
    """When tensors were made or freed, in nanoseconds, and what all of them took then, by torch's profiler."""
    events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    held = 0
    for each in sorted(events, key=lambda each: each.start_ns()):
        held += each.nbytes()
        yield each.start_ns(), held
