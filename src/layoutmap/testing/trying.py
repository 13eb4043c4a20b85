"""A process that tries laws on cases of an engine's subjects: `python -m layoutmap.testing.trying jax 8 "" [LAW ...]`.

The number is that of devices to simulate, 0: none; the text is the mesh of all cases, if they have one. It writes a
line of JSON that says which devices there are. Then it reads lines from stdin, a subject and a seed each, and writes a
line for each law, and one when the case has ended.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Collection, Iterator
from dataclasses import asdict
from typing import Any

from layoutmap.core.errors import MeshError
from layoutmap.core.mesh import Mesh
from layoutmap.engines import get_engine
from layoutmap.engines.launchers import launcher
from layoutmap.scope.devices import devices, simulate_devices
from layoutmap.scope.process_group import Group
from layoutmap.testing import models
from layoutmap.testing.arrays import try_arrays
from layoutmap.testing.faults import try_faults
from layoutmap.testing.killed_saves import try_killed_saves
from layoutmap.testing.laws import PRECISIONS, Outcome, missing_package, quiet, try_case
from layoutmap.testing.models import EIGHT, Devices
from layoutmap.testing.models.cases import Case
from layoutmap.testing.products import product_facts
from layoutmap.testing.speeds import host_facts, try_speeds
from layoutmap.testing.subjects import WITHOUT_MODELS, subject_named

_TRIES = {"speeds": try_speeds, "arrays": try_arrays, "saves": try_killed_saves, "faults": try_faults}
OWN_OPTIMIZER = 4
"""One in so many cases keeps the optimizer that was drawn for it; the others have SGD, which hides no wrong scale."""


def case_of(subject: str, seed: int, there: Devices = EIGHT) -> Case:
    """Return the case that is tried for a seed of a subject."""
    case = models.draw(seed, subject_named(subject).library, there)
    return case.with_sgd if seed % OWN_OPTIMIZER else case


def try_seed(
    subject: str, seed: int, laws: Collection[str] = (), there: Devices = EIGHT
) -> Iterator[tuple[Outcome, str]]:
    """Yield what came of each law on the case of a seed, with the case as a program where the law did not hold.

    Args:
        subject: One of `SUBJECTS` or `WITHOUT_MODELS`.
        seed: The seed.
        laws: Names of laws of models; none: all.
        there: The devices that there are.
    """
    if subject in WITHOUT_MODELS:
        yield from _TRIES[subject.partition("-")[0]](subject_named(subject).engine, seed, there)
        return
    try:
        with quiet():
            case = case_of(subject, seed, there)
    except Exception as error:
        missing = missing_package(error)
        why = f"{missing} is not installed" if missing else traceback.format_exc(limit=-4)
        yield Outcome("a case is drawn", "not tried" if missing else "failed", why, 0.0, missing=missing), ""
        return
    for outcome in try_case(case, laws):
        tried = case.in_precision(PRECISIONS[outcome.law]) if outcome.law in PRECISIONS else case
        yield outcome, str(tried) if outcome.is_suspicious else ""


def main(arguments: list[str]) -> int:
    """Try the seeds that are read from stdin.

    Args:
        arguments: The engine, how many devices to simulate, the mesh, and names of laws; none: all.
    """
    engine, number, mesh, *laws = arguments
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # frameworks print, too, past Python's files
    if int(number):
        simulate_devices(int(number), engine)
    started_by = launcher()
    together = started_by is not None and started_by.num_processes > 1
    if engine == "jax" and started_by is not None and together:
        import jax

        if "JAX_COORDINATOR_ADDRESS" in os.environ:  # of processes that no cluster has started
            jax.distributed.initialize(num_processes=started_by.num_processes, process_id=started_by.process)
        else:
            jax.distributed.initialize()
    names = devices(engine)
    there = Devices(len(names), simulated=int(number) > 0 and not together, mesh=mesh)
    if mesh and Mesh(None, mesh).size != len(names):
        raise MeshError(f"{engine} has {len(names)} devices, and the mesh {mesh} has {Mesh(None, mesh).size}")
    group = Group(get_engine(engine), every := Mesh(names, {"all": len(names)}))
    facts = host_facts(engine, group) | product_facts(engine, every, simulated=int(number) > 0)
    answers.write(f"{json.dumps({'devices': names, 'facts': facts})}\n")
    while line := group.first(lambda: [sys.stdin.readline()])[0]:  # all try what the first process is told
        subject, seed = line.split()
        failed: list[dict[str, Any]] = []
        for outcome, program in try_seed(subject, int(seed), laws, there):
            case = {"subject": subject, "seed": int(seed), "outcome": asdict(outcome), "program": program}
            failed += [case] * outcome.is_suspicious
            answers.write(f"{json.dumps(case)}\n")
        for number, text in enumerate(group.texts(json.dumps(failed))):
            if number != group.number:  # what failed in others
                answers.writelines(f"{json.dumps(case)}\n" for case in json.loads(text))
        answers.write(f"{json.dumps({'ended': seed})}\n")
        gc.freeze()  # each collection would look at all objects of the frameworks, and at what they remember
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
