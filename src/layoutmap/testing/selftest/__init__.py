"""`layoutmap selftest`: laws of arrays and of drawn models, tried on the devices of a machine for minutes."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from datetime import date
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from layoutmap.core.errors import LayoutMapError
from layoutmap.cost.machines import machine_named
from layoutmap.engines import ENGINES, installed_engines
from layoutmap.engines.launchers import Launcher, launcher
from layoutmap.engines.tested import TESTED
from layoutmap.scope.progress import Waiting
from layoutmap.testing.schedule import Schedule
from layoutmap.testing.selftest.measured import Speeds
from layoutmap.testing.selftest.report import Report
from layoutmap.testing.subjects import SUBJECTS, WITHOUT_MODELS, alone_on_cpus

_LIBRARIES = {"keras": "keras", "nnx": "flax"}
"""The package of a kind of models, besides that of the engine."""


def selftest(options: Any) -> Report | None:  # why: decisions/0166
    """Try laws until the time is over or the user interrupts, and return what came of them; nothing but in process 0.

    Args:
        options: Those of the command line.

    Raises:
        LayoutMapError: Nothing can be tried.
    """
    started = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the processes, as Ctrl-C does
    seed = int(date.today().strftime("%Y%m%d")) * 1000 if options.seed is None else options.seed
    started_by = launcher() or Launcher("", 0, 1)
    is_alone = started_by.num_processes == 1
    if not is_alone and not options.engine:
        raise LayoutMapError("processes try one engine together", fix=f"add --engine {', '.join(ENGINES)}")
    if not (options.simulate or options.busy):
        _check_free()
    if options.on:
        machine_named(options.on)  # before anything runs
    report = Report(_facts(options, seed), with_names=options.with_names)
    with (
        tempfile.TemporaryDirectory(prefix="layoutmap-selftest-", dir=options.folder) as folder,
        Waiting(f"trying laws for {options.minutes:g} minutes") as waiting,
    ):
        schedule = Schedule(
            _subjects([options.engine] if options.engine else installed_engines(), options.only or ()),
            seed,
            seconds=options.minutes * 60,
            count=options.count,
            num_workers=None if options.simulate else 1,  # two would share the memory of one device
            simulate=options.simulate,
            mesh=options.mesh,
            settings={"TMPDIR": folder},  # what processes leave that are killed is removed with it
        )
        try:
            for tried in schedule.run() if is_alone else schedule.run_together(not started_by.process):
                report.tried.append(tried)
                waiting(f": {len(report.tried)} laws, {len(report.failures)} failed; {tried.subject}")
        except KeyboardInterrupt:
            report.is_complete = False
    report.seconds = time.monotonic() - started
    if not schedule.devices and report.is_complete:
        raise LayoutMapError(
            f"nothing could be tried within {options.minutes:g} minutes",
            why=next((each.outcome.why for each in report.tried), "frameworks take up to a minute to start"),
            fix="see that this lists devices: layoutmap devices; or give more --minutes",
        )
    if report.missing:
        report.facts["not installed"] = f"{', '.join(report.missing)}: pip install {' '.join(report.missing)}"
    if report.missing and all(each.outcome.missing for each in report.tried) and report.is_complete:
        raise LayoutMapError(
            "nothing could be tried",
            why=f"not installed: {', '.join(report.missing)}",
            fix=f"pip install {' '.join(report.missing)}",
        )
    if started_by.process:
        return None
    for engine in schedule.devices:
        _add_devices(report, schedule, engine, options.on)
    return report


def _add_devices(report: Report, schedule: Schedule, engine: str, on: str | None) -> None:
    """Add to a report what is known of the devices of an engine, and their speeds, if they were measured."""
    names, facts, is_simulated = schedule.devices[engine], schedule.facts[engine], schedule.simulate > 0
    kind = "simulated " * is_simulated + names[0].rpartition(":")[0].rpartition(":")[2]
    report.facts[f"{engine} devices"] = f"{len(names)} {kind}"
    report.facts[f"{engine} topology"] = ", ".join(f"{name} {fact}" for name, fact in facts.items())
    tried = [each for each in report.tried if each.subject == f"speeds-{engine}"]
    if tried:
        node_size = -(-len(names) // int(facts["hosts"]))
        share_cores = "CPU" in kind and (is_simulated or node_size > (os.cpu_count() or 1))
        speeds = Speeds(engine, node_size, tried, machine_named(on).device if on else None, share_cores)
        report.add_speeds(replace(speeds, counted=_counted(speeds, on)) if report.is_complete else speeds)


def _counted(speeds: Speeds, on: str | None) -> dict[str, float]:
    """Figures of that step, on the machine that was named or else on that which was measured; none if it fails."""
    if not (speeds.step and (on or speeds.is_enough)):
        return {}
    with (
        tempfile.NamedTemporaryFile("w", suffix=".yaml") as file,
        suppress(KeyboardInterrupt, json.JSONDecodeError),  # without these figures, all else is reported
    ):
        file.write(speeds.to_machine_file("measured") if on is None else "")
        file.flush()
        step = [speeds.engine, speeds.step["mesh"], str(speeds.step["width"]), on or file.name]
        command = [sys.executable, "-m", "layoutmap.testing.stack", *step]
        return json.loads(subprocess.run(command, env=alone_on_cpus(), capture_output=True, text=True).stdout)
    return {}


def _facts(options: Any, seed: int) -> dict[str, str]:
    """The subjects that are tried, and the releases of what computes."""
    facts = {"seed": str(seed), "minutes": f"{options.minutes:g}", "mesh": options.mesh or "drawn"}
    facts |= {"started": str(launcher() or "as one process"), "cores of this host": str(os.cpu_count())}
    facts |= {"Python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in ("layoutmap", "numpy", "jaxlib", "optax", "tensorflow-cpu", *TESTED):
        with suppress(metadata.PackageNotFoundError):
            facts[name] = metadata.version(name)
    return facts


def _subjects(engines: Collection[str], only: Collection[str]) -> list[str]:
    """The subjects that can be tried, of those that are wanted: libraries that are installed come last."""
    found = [
        name
        for name, each in (WITHOUT_MODELS | SUBJECTS).items()
        if each.engine in engines
        and each.num_processes == 1  # those of this program try them
        and find_spec(_LIBRARIES.get(each.library, "numpy")) is not None
    ]
    wanted = [name for name in found if name in (only or found)]
    if not wanted or len(wanted) < len(only):
        raise LayoutMapError(
            f"of what is wanted, there is {', '.join(wanted) or 'nothing'}",
            why=f"of what is installed, these can be tried: {', '.join(found)}",
            fix='name one of them with --only, or pip install "layoutmap[jax]", [tensorflow] or [torch]',
        )
    return wanted


def _check_free() -> None:
    """Refuse NVIDIA's devices that other processes compute on; those of this self-test, which has begun, are none."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    except OSError:  # there are none
        return
    used = [line for line in lines if line.strip() and not _is_ours(line.partition(",")[0])]
    if used:
        raise LayoutMapError(
            "the devices are in use",
            facts={"processes, memory": "; ".join(used)},
            why="what runs there would have less memory and time, and so would the self-test",
            fix="wait for them, choose others with CUDA_VISIBLE_DEVICES, or add --busy",
        )


def _is_ours(pid: str) -> bool:
    """Whether a process is one that a self-test has started, as another process of this program does."""
    command = Path("/proc", pid, "cmdline")
    return command.exists() and b"layoutmap.testing.trying" in command.read_bytes()
