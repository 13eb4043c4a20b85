"""`layoutmap selftest`: laws of arrays and of drawn models, tried on the devices of a machine for minutes."""

from __future__ import annotations

import os
import platform
import signal
import tempfile
import time
from collections.abc import Collection
from datetime import date
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from layoutmap.core.errors import LayoutMapError
from layoutmap.engines import ENGINES, installed_engines
from layoutmap.engines.launchers import Launcher, is_one_of_several, launcher
from layoutmap.scope.progress import Waiting
from layoutmap.testing.schedule import Schedule
from layoutmap.testing.selftest.report import Report
from layoutmap.testing.subjects import ARRAYS, SUBJECTS

_LIBRARIES = {"keras": "keras", "nnx": "flax"}
"""The package of a kind of models, besides that of the engine."""
_RELEASES = "layoutmap jax jaxlib keras flax optax numpy ml_dtypes tensorflow tensorflow-cpu torch".split()  # noqa: SIM905


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
    if is_one_of_several() and not options.engine:
        raise LayoutMapError(
            "several processes try one engine together", fix=f"add --engine {next(iter(ENGINES))}"
        )
    report = Report(_facts(options, seed))
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
            together = (
                schedule.run_together(not started_by.process) if is_one_of_several() else schedule.run()
            )
            for tried in together:
                report.tried.append(tried)
                waiting(f": {len(report.tried)} laws, {len(report.failures)} failed; {tried.subject}")
        except KeyboardInterrupt:
            report.is_complete = False
    report.seconds = time.monotonic() - started
    for engine, names in schedule.devices.items():
        kind = "simulated " * (options.simulate > 0) + names[0].rpartition(":")[0].rpartition(":")[2]
        report.facts[f"{engine} devices"] = f"{len(names)} {kind}"
    if not schedule.devices and report.is_complete:
        raise LayoutMapError(
            f"nothing could be tried within {options.minutes:g} minutes",
            why=next((each.outcome.why for each in report.tried), "frameworks take up to a minute to start"),
            fix="see that this lists devices: layoutmap devices; or give more --minutes",
        )
    return None if started_by.process else report


def _facts(options: Any, seed: int) -> dict[str, str]:
    """The subjects that are tried, and the releases of what computes."""
    facts = {"seed": str(seed), "minutes": f"{options.minutes:g}", "mesh": options.mesh or "drawn"}
    facts |= {"started": str(launcher() or "as one process"), "cores of this host": str(os.cpu_count())}
    facts |= {"Python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in _RELEASES:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return facts


def _subjects(engines: Collection[str], only: Collection[str]) -> list[str]:
    """The subjects that can be tried, of those that are wanted: arrays first, then each library that is installed."""
    found = [
        name
        for name, each in (ARRAYS | SUBJECTS).items()
        if each.engine in engines and find_spec(_LIBRARIES.get(each.library, "numpy")) is not None
    ]
    unknown = [name for name in only if name not in found]
    if unknown or not found:
        raise LayoutMapError(
            f"{unknown[0]} cannot be tried here" if unknown else "no framework is installed",
            why=f"of what is installed, these can: {', '.join(found)}",
            fix="name one of them with --only"
            if found
            else 'pip install "layoutmap[jax]", [tensorflow] or [torch]',
        )
    return [name for name in found if name in (only or found)]
