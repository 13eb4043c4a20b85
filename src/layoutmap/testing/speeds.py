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

from layoutmap.adapters import TrainingAdapter, get_adapter, require_capability
from layoutmap.core.errors import EngineError
from layoutmap.core.mesh import Mesh
from layoutmap.engines import get_engine
from layoutmap.scope.process_group import MeshProcesses
from layoutmap.testing.laws import Outcome, run_law
from layoutmap.testing.laws.trial import NotApplicable
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import EIGHT, Devices
from layoutmap.testing.stack import LayerStack

MEASURED_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
_ROUNDS, _CALLS = 5, 2
_DTYPES = ("float32", "bfloat16", "float16")
_SPEEDS = {"jax": "layoutmap.testing.jax_speeds", "torch": "layoutmap.testing.torch_speeds"}


def measure_speeds(engine: str, seed: int, devices: Devices = EIGHT) -> Iterator[tuple[Outcome, str]]:
    """Measure the bandwidth and the FLOP rate of an engine's devices, and yield outcomes with an empty program.

    A plan predicts seconds from such measurements (decisions/0166). All processes must call it together.
    """
    dims = Choices.from_seed(seed).pick_weighted(devices.mesh_frequencies)
    for law, measure in _MEASUREMENTS.items():
        figures: list[dict[str, Any]] = []
        yield run_law(law, partial(_append_measurements, figures, measure(engine, dims)), figures), ""


def import_speed_module(engine: str) -> Any:
    """Import and return the module that runs collectives, products, and copies of a framework.

    Its `make_collective_function` takes the bytes of the tensor where it is largest, as `Machine.seconds` does.
    """
    if engine not in _SPEEDS:
        raise EngineError(
            f"the speed of {engine}'s devices cannot be measured",
            facts={"measured": ", ".join(_SPEEDS)},
            why=f"the compiler of {engine} chooses the collectives, so no call can run the collective to be measured",
            fix=f"measure the same devices with {' or '.join(_SPEEDS)}",
        )
    return importlib.import_module(_SPEEDS[engine])


def _append_measurements(results: list[dict[str, Any]], measured: Iterator[dict[str, Any]]) -> Iterable[str]:
    """Append measurements to `results`, and return no differences, since a measurement has no expected value."""
    try:
        results.extend(measured)
    except EngineError as error:
        raise NotApplicable(str(error)) from error
    return ()


def _measure_step(engine: str, dims: str) -> Iterator[dict[str, Any]]:
    """Yield the seconds of a training step of a layer stack, and the peak memory that devices report."""
    speeds, mesh = import_speed_module(engine), get_engine(engine).bind_mesh(Mesh(None, dims))
    adapter = require_capability(get_adapter(engine), TrainingAdapter, "a step")
    width, size = 2**7 if mesh.device_type == "CPU" else 2**12, mesh.size
    stack = LayerStack(engine, dims, -(-width // size) * size)
    batch, read_peak_bytes = stack.batch, speeds.make_peak_bytes_function()
    adapter.set_seed(0)
    model = stack.build_model()
    created_bytes, read_peak_bytes = read_peak_bytes(), speeds.make_peak_bytes_function()
    seconds = _measure_seconds(lambda: adapter.train_step(model, batch), speeds.wait_for_result, rounds=2)
    yield {
        "mesh": dims,
        "width": stack.width,
        "step": seconds,
        "step_bytes": read_peak_bytes(),
        "created_bytes": created_bytes,
    }


def _measure_operations(engine: str, dims: str) -> Iterator[dict[str, Any]]:
    """Yield the seconds of collectives over each mesh dim, the speed of products and of a copy, and the memory."""
    speeds, mesh = import_speed_module(engine), get_engine(engine).bind_mesh(Mesh(None, dims))
    is_cpu = mesh.device_type == "CPU"
    num_bytes = 2**20 if is_cpu else 2**28  # many bytes, so that the latency of a collective does not matter
    for dim in mesh.mesh_dims:
        for kind in MEASURED_COLLECTIVES if dim.size > 1 else ():
            operation = speeds.make_collective_function(kind, mesh, dim.name, num_bytes)
            seconds = _measure_seconds(operation, speeds.wait_for_result)
            yield {"kind": kind, "mesh": dims, "dim": dim.name, "bytes": num_bytes, "seconds": seconds}
    size = 2**8 if is_cpu else 2**13
    for dtype in _DTYPES:
        seconds = _measure_seconds(speeds.make_matmul_function(dtype, size), speeds.wait_for_result)
        yield {"dtype": dtype, "flops": 2 * size**3 / seconds}
    num_bytes = 2**26 if is_cpu else 2**30
    seconds = _measure_seconds(speeds.make_memory_copy_function(num_bytes), speeds.wait_for_result)
    yield {"memory_bandwidth": 2 * num_bytes / seconds}
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield {"memory": speeds.get_device_memory_bytes() or host_bytes // len(mesh.local_device_ids)}


def _measure_seconds(call: Callable[[], Any], wait: Callable[[Any], None], rounds: int = _ROUNDS) -> float:
    """Return the shortest mean duration of a call over several rounds, since other programs only slow calls down."""
    wait(call())  # the first call is not measured, because it compiles and connects processes
    durations: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        wait([call() for _ in range(_CALLS)])
        durations.append((time.perf_counter() - start) / _CALLS)
    return min(durations)


_MEASUREMENTS: Mapping[str, Callable[[str, str], Iterator[dict[str, Any]]]] = {
    "a step is measured": _measure_step,  # first, because some devices report only the peak since the program started
    "speeds are measured": _measure_operations,
}


def make_host_facts(engine: str, group: MeshProcesses) -> dict[str, str]:
    """Return facts about processes, hosts, and devices for a report."""
    hosts = group.gather_text(str(zlib.crc32(socket.gethostname().encode())))
    counts = sorted({len(devices) for devices in group.devices_by_process})
    facts = {"processes": str(group.num_processes), "devices of each": " or ".join(map(str, counts))}
    facts["hosts"] = str(len(set(hosts)))
    with suppress(EngineError):
        facts |= import_speed_module(engine).make_device_facts()
    return facts
