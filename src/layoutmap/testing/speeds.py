"""Measures how fast devices exchange, multiply, copy and train, and how much memory they take for it."""

from __future__ import annotations

import importlib
import os
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from layoutmap.adapters import Training, capable, get_adapter
from layoutmap.core.errors import EngineError
from layoutmap.core.mesh import Mesh
from layoutmap.engines import get_engine
from layoutmap.scope.process_group import Group
from layoutmap.testing.laws import Outcome, tried
from layoutmap.testing.laws.trial import NotTried
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import EIGHT, Devices
from layoutmap.testing.stack import Stack

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
"""The collectives that are measured."""
_ROUNDS, _TIMES = 5, 2
_DTYPES = ("float32", "bfloat16", "float16")
_SPEEDS = {"jax": "layoutmap.testing.jax_speeds", "torch": "layoutmap.testing.torch_speeds"}


# why: decisions/0166
def try_speeds(engine: str, seed: int, devices: Devices = EIGHT) -> Iterator[tuple[Outcome, str]]:
    """Measure the devices of an engine; yields outcomes with figures, and no programs.

    All processes of a program must do so together.

    Args:
        engine: The engine's name.
        seed: Draws a mesh.
        devices: The devices that there are.
    """
    dims = Choices.of_seed(seed).weighted(devices.meshes)
    for law, measure in _LAWS.items():
        figures: list[dict[str, Any]] = []
        yield tried(law, partial(_added, figures, measure(engine, dims)), figures), ""


def load_speeds(name: str) -> Any:
    """Import the module that runs collectives, products and copies on the devices of a framework.

    A collective takes the mesh, a dim of it, and the bytes of its tensor where that is largest, as `Machine.seconds`
    does. `wait` returns when a function's work on the device is done.

    Raises:
        EngineError: Nothing is measured on that framework.
    """
    if name not in _SPEEDS:
        raise EngineError(
            f"the devices of {name} are not measured",
            facts={"measured": ", ".join(_SPEEDS)},
            why=f"what {name} sends between devices is decided by a compiler, which has no name for a collective",
            fix="measure them with another framework: the devices are the same",
        )
    return importlib.import_module(_SPEEDS[name])


def _added(figures: list[dict[str, Any]], measured: Iterator[dict[str, Any]]) -> Iterable[str]:
    try:
        figures.extend(measured)
    except EngineError as error:
        raise NotTried(str(error)) from error
    return ()


def _measured(engine: str, dims: str) -> Iterator[dict[str, Any]]:
    speeds, mesh = load_speeds(engine), get_engine(engine).bind(Mesh(None, dims))
    is_cpu = mesh.device_type == "CPU"
    num_bytes = 2**20 if is_cpu else 2**28  # large enough that the start of a collective takes less
    for dim in mesh.mesh_dims:
        for kind in KINDS if dim.size > 1 else ():
            seconds = _seconds(speeds.collective(kind, mesh, dim.name, num_bytes), speeds.wait)
            yield {"kind": kind, "mesh": dims, "dim": dim.name, "bytes": num_bytes, "seconds": seconds}
    size = 2**8 if is_cpu else 2**13
    for dtype in _DTYPES:
        yield {"dtype": dtype, "flops": 2 * size**3 / _seconds(speeds.product(dtype, size), speeds.wait)}
    copied = 2**26 if is_cpu else 2**30
    yield {"memory_bandwidth": 2 * copied / _seconds(speeds.copy(copied), speeds.wait)}
    yield {"memory": speeds.memory_bytes() or _host_bytes() // len(mesh.local_device_ids)}


def _step(engine: str, dims: str) -> Iterator[dict[str, Any]]:
    """A step of a stack of layers, and what devices say that their memory had at most."""
    speeds, mesh = load_speeds(engine), get_engine(engine).bind(Mesh(None, dims))
    adapter = capable(get_adapter(engine), Training, "a step")
    width, size = 2**7 if mesh.device_type == "CPU" else 2**12, mesh.size
    stack = Stack(engine, dims, -(-width // size) * size)
    batch, peak = stack.batch, speeds.watched_peak()
    adapter.set_seed(0)
    model = stack.built()
    created, peak = peak(), speeds.watched_peak()
    seconds = _seconds(lambda: adapter.train_step(model, batch), speeds.wait, rounds=2)
    yield {
        "mesh": dims,
        "width": stack.width,
        "step": seconds,
        "step_bytes": peak(),
        "created_bytes": created,
    }


def _seconds(run: Callable[[], Any], wait: Callable[[Any], None], rounds: int = _ROUNDS) -> float:
    """The least time that something takes, of several rounds: other programs only slow it down."""
    wait(run())  # compiles it, and connects processes
    found: list[float] = []
    for _ in range(rounds):
        begun = time.perf_counter()
        wait([run() for _ in range(_TIMES)])
        found.append((time.perf_counter() - begun) / _TIMES)
    return min(found)


_LAWS: Mapping[str, Callable[[str, str], Iterator[dict[str, Any]]]] = {
    "a step is measured": _step,  # first: some devices know only the highest peak of memory since they started
    "speeds are measured": _measured,
}


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def host_facts(engine: str, group: Group) -> dict[str, str]:
    """Return the number of processes, of devices of each, and of hosts, and what the engine knows of its devices."""
    hosts = group.texts(str(zlib.crc32(socket.gethostname().encode())))
    each = sorted({len(devices) for devices in group.devices})
    found = {"processes": str(group.count), "devices of each": " or ".join(map(str, each))}
    found["hosts"] = str(len(set(hosts)))
    with suppress(EngineError):
        found |= load_speeds(engine).facts()
    return found
