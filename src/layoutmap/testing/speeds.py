"""Measures how fast devices exchange, multiply and copy."""

from __future__ import annotations

import os
import socket
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from layoutmap.core.errors import EngineError
from layoutmap.core.mesh import Mesh
from layoutmap.engines import get_engine, speeds_of
from layoutmap.scope.group import Group
from layoutmap.testing.laws import Outcome, quiet
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import EIGHT, Devices

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
"""The collectives that are measured."""
LAW = "speeds are measured"
_ROUNDS, _TIMES = 5, 2
_DTYPES = ("float32", "bfloat16", "float16")


def try_speeds(engine: str, seed: int, devices: Devices = EIGHT) -> Outcome:
    """Measure the devices of an engine; returns an outcome with figures.

    All processes of a program must do so together.

    Args:
        engine: The engine's name.
        seed: Draws a mesh.
        devices: The devices that there are.
    """
    begun, what, why = time.perf_counter(), "held", ""
    figures: list[dict[str, Any]] = []
    try:
        with quiet():
            figures.extend(_measured(engine, Choices.of_seed(seed).weighted(devices.meshes)))
    except EngineError as error:
        what, why = "not tried", str(error)
    except Exception:
        what, why = "failed", traceback.format_exc(limit=-4)
    return Outcome(LAW, what, why, time.perf_counter() - begun, figures)


def _measured(engine: str, dims: str) -> Iterator[dict[str, Any]]:
    speeds, mesh = speeds_of(engine), get_engine(engine).bind(Mesh(None, dims))
    is_cpu = mesh.device_type == "CPU"
    num_bytes = 2**20 if is_cpu else 2**28  # large enough that the start of a collective takes less
    for dim in mesh.mesh_dims:
        for kind in KINDS if dim.size > 1 else ():
            seconds = _seconds(speeds.collective(kind, mesh, dim.name, num_bytes))
            yield {"kind": kind, "mesh": dims, "dim": dim.name, "bytes": num_bytes, "seconds": seconds}
    size = 2**8 if is_cpu else 2**13
    for dtype in _DTYPES:
        yield {"dtype": dtype, "flops": 2 * size**3 / _seconds(speeds.product(dtype, size))}
    copied = 2**26 if is_cpu else 2**30
    yield {"memory_bandwidth": 2 * copied / _seconds(speeds.copy(copied))}
    yield {"memory": speeds.memory_bytes() or _host_bytes() // len(mesh.local_device_ids)}


def _seconds(repeated: Callable[[int], None]) -> float:
    """The least time that something takes, of several rounds: other programs only slow it down."""
    repeated(1)  # compiles it, and connects processes
    found: list[float] = []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        repeated(_TIMES)
        found.append((time.perf_counter() - begun) / _TIMES)
    return min(found)


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def host_facts(engine: str, group: Group) -> dict[str, str]:
    """Return the number of processes, of devices of each, and of hosts, and what the engine knows of its devices."""
    hosts = group.texts(str(zlib.crc32(socket.gethostname().encode())))
    each = sorted({len(devices) for devices in group.devices})
    found = {"processes": str(group.count), "devices of each": " or ".join(map(str, each))}
    found["hosts"] = str(len(set(hosts)))
    with suppress(EngineError):
        found |= speeds_of(engine).facts()
    return found
