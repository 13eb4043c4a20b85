"""Measurements of devices: the speed of collectives, products, copies, and a training step, and its memory."""

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

from layoutmap.adapters import Training, get_adapter, require_capability
from layoutmap.core.errors import EngineError
from layoutmap.core.mesh import Mesh
from layoutmap.engines import get_engine
from layoutmap.scope.process_group import Group
from layoutmap.testing.laws import Outcome, run_law
from layoutmap.testing.laws.trial import NotApplicable
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import EIGHT, Devices
from layoutmap.testing.stack import Stack

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")  # the measured collectives
_ROUNDS, _CALLS = 5, 2
_DTYPES = ("float32", "bfloat16", "float16")
_SPEEDS = {"jax": "layoutmap.testing.jax_speeds", "torch": "layoutmap.testing.torch_speeds"}


def try_speeds(engine: str, seed: int, devices: Devices = EIGHT) -> Iterator[tuple[Outcome, str]]:
    """Measure the bandwidth and the FLOP rate of an engine's devices. Yields results without a program.

    A plan predicts seconds from the same figures (why: decisions/0166). All processes must call it together.
    """
    dims = Choices.from_seed(seed).pick_weighted(devices.meshes)
    for law, measure in _MEASUREMENTS.items():
        figures: list[dict[str, Any]] = []
        yield run_law(law, partial(_collect_figures, figures, measure(engine, dims)), figures), ""


def load_speeds(engine: str) -> Any:
    """Import the module that runs collectives, products, and copies of a framework.

    A collective takes the mesh, one of its dims, and the bytes of the tensor where it is largest, as `Machine.seconds`.
    """
    if engine not in _SPEEDS:
        raise EngineError(
            f"the devices of {engine} are not measured",
            facts={"measured": ", ".join(_SPEEDS)},
            why=f"{engine} leaves transfers between devices to a compiler, which has no name for a collective",
            fix="measure them with another framework: the devices are the same",
        )
    return importlib.import_module(_SPEEDS[engine])


def _collect_figures(figures: list[dict[str, Any]], measurement: Iterator[dict[str, Any]]) -> Iterable[str]:
    """Append measurements to `figures`. Returns no differences."""
    try:
        figures.extend(measurement)
    except EngineError as error:
        raise NotApplicable(str(error)) from error
    return ()


def _measure_step(engine: str, dims: str) -> Iterator[dict[str, Any]]:
    """Measure a training step of a stack of layers, and the peak memory that devices report."""
    speeds, mesh = load_speeds(engine), get_engine(engine).bind(Mesh(None, dims))
    adapter = require_capability(get_adapter(engine), Training, "a step")
    width, size = 2**7 if mesh.device_type == "CPU" else 2**12, mesh.size
    stack = Stack(engine, dims, -(-width // size) * size)
    batch, get_peak_bytes = stack.batch, speeds.watch_peak_bytes()
    adapter.set_seed(0)
    model = stack.build_model()
    created_bytes, get_peak_bytes = get_peak_bytes(), speeds.watch_peak_bytes()
    seconds = _measure_seconds(lambda: adapter.train_step(model, batch), speeds.wait, rounds=2)
    yield {
        "mesh": dims,
        "width": stack.width,
        "step": seconds,
        "step_bytes": get_peak_bytes(),
        "created_bytes": created_bytes,
    }


def _measure_operations(engine: str, dims: str) -> Iterator[dict[str, Any]]:
    """Measure collectives over each mesh dim, products, a copy, and the memory of a device."""
    speeds, mesh = load_speeds(engine), get_engine(engine).bind(Mesh(None, dims))
    is_cpu = mesh.device_type == "CPU"
    num_bytes = 2**20 if is_cpu else 2**28  # large enough to hide the latency of a collective
    for dim in mesh.mesh_dims:
        for kind in KINDS if dim.size > 1 else ():
            run = speeds.make_collective(kind, mesh, dim.name, num_bytes)
            seconds = _measure_seconds(run, speeds.wait)
            yield {"kind": kind, "mesh": dims, "dim": dim.name, "bytes": num_bytes, "seconds": seconds}
    size = 2**8 if is_cpu else 2**13
    for dtype in _DTYPES:
        seconds = _measure_seconds(speeds.make_product(dtype, size), speeds.wait)
        yield {"dtype": dtype, "flops": 2 * size**3 / seconds}
    num_bytes = 2**26 if is_cpu else 2**30
    yield {"memory_bandwidth": 2 * num_bytes / _measure_seconds(speeds.make_copy(num_bytes), speeds.wait)}
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield {"memory": speeds.get_memory_bytes() or host_bytes // len(mesh.local_device_ids)}


def _measure_seconds(run: Callable[[], Any], wait: Callable[[Any], None], rounds: int = _ROUNDS) -> float:
    """Return the shortest duration of a call over several rounds, since other programs only slow it down."""
    wait(run())  # compiles the call and connects the processes
    durations: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        wait([run() for _ in range(_CALLS)])
        durations.append((time.perf_counter() - start) / _CALLS)
    return min(durations)


_MEASUREMENTS: Mapping[str, Callable[[str, str], Iterator[dict[str, Any]]]] = {
    "a step is measured": _measure_step,  # first, since some devices report only the peak since the program started
    "speeds are measured": _measure_operations,
}


def describe_hosts(engine: str, group: Group) -> dict[str, str]:
    """Return facts about processes, hosts, and devices for a report."""
    hosts = group.texts(str(zlib.crc32(socket.gethostname().encode())))
    counts = sorted({len(devices) for devices in group.devices})
    facts = {"processes": str(group.count), "devices of each": " or ".join(map(str, counts))}
    facts["hosts"] = str(len(set(hosts)))
    with suppress(EngineError):
        facts |= load_speeds(engine).describe_devices()
    return facts
