"""Try laws in a process of their own: `python -m layoutmap.testing.worker ENGINE NUM_DEVICES MESH [LAW ...]`.

It simulates NUM_DEVICES devices, or none for 0. If MESH is not empty, all cases use it. It first writes a line of JSON
with its devices. Then it reads a subject and a seed from each line of stdin, and writes a line for each law and a line
at the end of the case.
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
from layoutmap.engines.launchers import detect_launcher
from layoutmap.scope.devices import list_device_names as list_devices
from layoutmap.scope.devices import simulate_devices
from layoutmap.scope.process_group import MeshProcesses
from layoutmap.testing import models
from layoutmap.testing.arrays import try_array_laws
from layoutmap.testing.faults import try_known_fault_law
from layoutmap.testing.killed_saves import try_killed_save_law
from layoutmap.testing.laws import PRECISIONS, Outcome, find_missing_package, ignore_warnings, try_laws
from layoutmap.testing.models import EIGHT, Devices
from layoutmap.testing.models.cases import Case
from layoutmap.testing.products import make_tf32_facts
from layoutmap.testing.speeds import make_host_facts, measure_speeds
from layoutmap.testing.subjects import WITHOUT_MODELS, get_subject

_TRIES = {
    "speeds": measure_speeds,
    "arrays": try_array_laws,
    "saves": try_killed_save_law,
    "faults": try_known_fault_law,
}
DRAWN_OPTIMIZER = 4
"""One case in this many uses a random optimizer. The others use SGD, which detects gradients of a wrong scale."""


def draw_subject_case(subject: str, seed: int, devices: Devices = EIGHT) -> Case:
    """Return the case that a subject tries for a seed.

    For a padded subject, it is the first case of 1,000 seeds whose plan pads a variable.
    """
    library = get_subject(subject).library
    if get_subject(subject).is_padded:
        drawn = (models.draw(other, library, devices) for other in range(seed * 1000, (seed + 1) * 1000))
        case = next(other for other in drawn if any(a.is_padded for a in other.plan().assignments))
    else:
        case = models.draw(seed, library, devices)
    return case.to_sgd() if seed % DRAWN_OPTIMIZER else case


def try_laws_for_seed(
    subject: str, seed: int, laws: Collection[str] = (), devices: Devices = EIGHT
) -> Iterator[tuple[Outcome, str]]:
    """Try the laws on the case of a seed. Yield each outcome, and the case's program if the law failed, or ""."""
    if subject in WITHOUT_MODELS:
        yield from _TRIES[subject.partition("-")[0]](get_subject(subject).engine, seed, devices)
        return
    try:
        with ignore_warnings():
            case = draw_subject_case(subject, seed, devices)
    except Exception as error:
        missing = find_missing_package(error)
        why = f"{missing} is not installed" if missing else traceback.format_exc(limit=-4)
        yield Outcome("a case is drawn", "not tried" if missing else "failed", why, 0.0, missing=missing), ""
        return
    for outcome in try_laws(case, laws):
        tried_case = case.to_precision(PRECISIONS[outcome.law]) if outcome.law in PRECISIONS else case
        yield outcome, str(tried_case) if outcome.is_failure else ""


def main(arguments: list[str]) -> int:
    """Try the seeds that stdin lists, and write results. For the arguments, see the docstring of the module."""
    engine, num_simulated, mesh, *laws = arguments
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # frameworks also print to descriptor 1, so send this to stderr
    if int(num_simulated):
        simulate_devices(int(num_simulated), engine)
    started_by = detect_launcher()
    is_alone = started_by is None or started_by.num_processes == 1
    if engine == "jax" and started_by is not None and not is_alone:
        import jax

        # Without a cluster manager, JAX cannot detect the processes, so pass their number and this one's index.
        if "JAX_COORDINATOR_ADDRESS" in os.environ:
            jax.distributed.initialize(num_processes=started_by.num_processes, process_id=started_by.process)
        else:
            jax.distributed.initialize()
    names = list_devices(engine)
    devices = Devices(len(names), simulated=int(num_simulated) > 0 and is_alone, mesh=mesh)
    if mesh and Mesh(None, mesh).size != len(names):
        raise MeshError(
            f"the mesh {mesh} needs {Mesh(None, mesh).size} devices, but {engine} has {len(names)}"
        )
    group = MeshProcesses(get_engine(engine), all_devices := Mesh(names, {"all": len(names)}))
    facts = make_host_facts(engine, group)
    facts |= make_tf32_facts(engine, all_devices, simulated=int(num_simulated) > 0)
    output.write(f"{json.dumps({'devices': names, 'facts': facts})}\n")
    # Only the first process has an input, so it reads each line for all processes.
    while line := group.run_in_first_process(lambda: [sys.stdin.readline()])[0]:
        subject, seed = line.split()
        failures: list[dict[str, Any]] = []
        for outcome, program in try_laws_for_seed(subject, int(seed), laws, devices):
            result = {"subject": subject, "seed": int(seed), "outcome": asdict(outcome), "program": program}
            failures += [result] * outcome.is_failure
            output.write(f"{json.dumps(result)}\n")
        for number, text in enumerate(group.gather_text(json.dumps(failures))):
            if number != group.process_index:
                output.writelines(f"{json.dumps(result)}\n" for result in json.loads(text))
        output.write(f"{json.dumps({'ended': seed})}\n")
        gc.freeze()  # later collections skip the objects of frameworks and caches, so they are faster
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
