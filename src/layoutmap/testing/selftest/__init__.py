"""`layoutmap selftest`: try laws of arrays and random models on the devices of a machine for some minutes."""

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
from layoutmap.engines import ENGINES, list_installed_engines
from layoutmap.engines.launchers import Launcher, detect_launcher
from layoutmap.engines.tested import TESTED
from layoutmap.scope.progress import ElapsedTime
from layoutmap.testing.schedule import Schedule
from layoutmap.testing.selftest.report import Report
from layoutmap.testing.selftest.speeds import MeasuredSpeeds
from layoutmap.testing.subjects import SUBJECTS, WITHOUT_MODELS, make_cpu_environment

_PACKAGES = {"keras": "keras", "nnx": "flax"}
"""The package of each model library that is not part of the package of its engine."""


def run_selftest(options: Any) -> Report | None:
    """Try laws until the time is over or the user interrupts. Return the report in process 0, else None.

    It runs on the user's machine, since wrong numbers depend on its releases and devices (decisions/0166).
    """
    start = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end all processes on SIGTERM, as on Ctrl-C
    seed = int(date.today().strftime("%Y%m%d")) * 1000 if options.seed is None else options.seed
    started_by = detect_launcher() or Launcher("", 0, 1)
    is_alone = started_by.num_processes == 1
    if not is_alone and not options.engine:
        raise LayoutMapError(
            "several processes can test only one engine", fix=f"add --engine with one of {', '.join(ENGINES)}"
        )
    if not (options.simulate or options.busy):
        _check_devices_are_free()
    if options.on:
        machine_named(options.on)  # raise for an unknown name before anything runs
    report = Report(_collect_run_facts(options, seed), with_names=options.with_names)
    engines = [options.engine] if options.engine else list_installed_engines()
    with (
        tempfile.TemporaryDirectory(prefix="layoutmap-selftest-", dir=options.folder) as folder,
        ElapsedTime(f"trying laws for {options.minutes:g} minutes") as waiting,
    ):
        schedule = Schedule(
            _choose_subjects(engines, options.only or ()),
            seed,
            seconds=options.minutes * 60,
            count=options.count,
            num_workers=None if options.simulate else 1,  # several workers would share the memory of a device
            simulate=options.simulate,
            mesh=options.mesh,
            settings={"TMPDIR": folder},  # so that files of killed processes are removed, too
        )
        results = (
            schedule.run_cases()
            if is_alone
            else schedule.run_cases_together(is_first_process=not started_by.process)
        )
        try:
            for result in results:
                report.results.append(result)
                waiting(f": {len(report.results)} laws, {len(report.failures)} failed; {result.subject}")
        except KeyboardInterrupt:
            report.is_complete = False
    report.seconds = time.monotonic() - start
    if report.is_complete:
        _check_laws_were_tried(report, options.minutes, has_devices=bool(schedule.devices))
    if report.missing_packages:
        report.facts["not installed"] = (
            f"{', '.join(report.missing_packages)}: pip install {' '.join(report.missing_packages)}"
        )
    if started_by.process:
        return None
    for engine in schedule.devices:
        _add_device_facts(report, schedule, engine, options.on)
    return report


def _check_laws_were_tried(report: Report, minutes: float, *, has_devices: bool) -> None:
    """Raise if no law was tried, because no engine started or because packages are missing."""
    if not has_devices:
        raise LayoutMapError(
            f"nothing could be tried within {minutes:g} minutes",
            why=next((r.outcome.why for r in report.results), "frameworks take up to a minute to start"),
            fix="check that `layoutmap devices` lists devices, or pass a larger --minutes",
        )
    if report.missing_packages and all(result.outcome.missing for result in report.results):
        raise LayoutMapError(
            "nothing could be tried",
            why=f"these packages are not installed: {', '.join(report.missing_packages)}",
            fix=f"pip install {' '.join(report.missing_packages)}",
        )


def _add_device_facts(report: Report, schedule: Schedule, engine: str, machine_name: str | None) -> None:
    """Add the devices of an engine and their measured speeds to a report."""
    names, facts, is_simulated = schedule.devices[engine], schedule.facts[engine], schedule.simulate > 0
    kind = "simulated " * is_simulated + names[0].rpartition(":")[0].rpartition(":")[2]
    report.facts[f"{engine} devices"] = f"{len(names)} {kind}"
    report.facts[f"{engine} topology"] = ", ".join(f"{name} {fact}" for name, fact in facts.items())
    results = [result for result in report.results if result.subject == f"speeds-{engine}"]
    if results:
        node_size = -(-len(names) // int(facts["hosts"]))
        share_cores = "CPU" in kind and (is_simulated or node_size > (os.cpu_count() or 1))
        expected = machine_named(machine_name).device if machine_name else None
        speeds = MeasuredSpeeds(engine, node_size, results, expected, share_cores)
        if report.is_complete:
            speeds = replace(speeds, predicted=_predict_step_cost(speeds, machine_name))
        report.add_speeds(speeds)


def _predict_step_cost(speeds: MeasuredSpeeds, machine_name: str | None) -> dict[str, float]:
    """Return the predicted cost of the measured step, on the machine of `--on` or on the measured machine.

    Return an empty mapping if the prediction fails, since the report is useful without it.
    """
    if not (speeds.measured_step and (machine_name or speeds.has_enough_measurements)):
        return {}
    with (
        tempfile.NamedTemporaryFile("w", suffix=".yaml") as file,
        suppress(KeyboardInterrupt, json.JSONDecodeError),
    ):
        file.write(speeds.to_machine_file("measured") if machine_name is None else "")
        file.flush()
        step = speeds.measured_step
        arguments = [speeds.engine, step["mesh"], str(step["width"]), machine_name or file.name]
        command = [sys.executable, "-m", "layoutmap.testing.stack", *arguments]
        process = subprocess.run(command, env=make_cpu_environment(), capture_output=True, text=True)
        return json.loads(process.stdout)
    return {}


def _collect_run_facts(options: Any, seed: int) -> dict[str, str]:
    """Return facts for the report: options, host, and releases of frameworks."""
    facts = {"seed": str(seed), "minutes": f"{options.minutes:g}", "mesh": options.mesh or "drawn"}
    facts |= {
        "started": str(detect_launcher() or "as one process"),
        "cores of this host": str(os.cpu_count()),
    }
    facts |= {"Python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in ("layoutmap", "numpy", "jaxlib", "optax", "tensorflow-cpu", *TESTED):
        with suppress(metadata.PackageNotFoundError):
            facts[name] = metadata.version(name)
    return facts


def _choose_subjects(engines: Collection[str], only: Collection[str]) -> list[str]:
    """Return the subjects that can be tried, or those of them that `only` names if it is not empty."""
    available = [
        name
        for name, subject in (WITHOUT_MODELS | SUBJECTS).items()
        if subject.engine in engines
        and subject.num_processes == 1  # other subjects start several processes, as a launcher would
        and find_spec(_PACKAGES.get(subject.library, "numpy")) is not None
    ]
    chosen = [name for name in available if name in (only or available)]
    if not chosen or len(chosen) < len(only):
        raise LayoutMapError(
            "--only names a subject that cannot be tried" if only else "the self-test has nothing to try",
            why=f"with the installed packages, these can be tried: {', '.join(available)}",
            fix='name one of them with --only, or pip install "layoutmap[jax]", [tensorflow] or [torch]',
        )
    return chosen


def _check_devices_are_free() -> None:
    """Raise if programs other than this self-test use the NVIDIA devices."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    except OSError:  # the machine has no NVIDIA driver
        return
    used = [line for line in lines if line.strip() and not _is_selftest_worker(line.partition(",")[0])]
    if used:
        raise LayoutMapError(
            "the devices are in use",
            facts={"processes, memory": "; ".join(used)},
            why="these processes and the self-test would share the memory and the time of the devices",
            fix="wait until these processes end, choose other devices with CUDA_VISIBLE_DEVICES, or add --busy",
        )


def _is_selftest_worker(pid: str) -> bool:
    """Return whether a process is a worker of a self-test. A different process of this program may have started it."""
    command = Path("/proc", pid, "cmdline")
    return command.exists() and b"layoutmap.testing.worker" in command.read_bytes()
