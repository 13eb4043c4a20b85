"""Test that known faults of engines are corrected. Each fault is a program with a wrong result (decisions/0166)."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from layoutmap.engines.launchers import detect_launcher
from layoutmap.testing.laws import Outcome, run_law
from layoutmap.testing.models.maps import EIGHT, Devices
from layoutmap.testing.subjects import make_cpu_environment

XLA_FAULTS, DTENSOR_FAULTS = (Path(__file__).with_name(f"{name}-faults.md") for name in ("xla", "dtensor"))
"""The pages about faults of XLA and of torch's DTensor. Each section contains a program."""
_SECTION = re.compile(
    r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python no-run[^\n]*\n(.+?)^```\n", re.DOTALL | re.MULTILINE
)
_PLACE_AN_ARRAY = """import numpy as np
import layoutmap as lm
mesh = lm.create_mesh("all=-1", device_type="cpu")
lm.dtensor.relayout(np.zeros(()), lm.Layout.replicated(mesh, 0))
"""
_DTENSOR = """import tensorflow as tf
from tensorflow.experimental import dtensor
dtensor.initialize_accelerator_system("CPU", num_logical_cpu_devices=8)
mesh = dtensor.create_mesh([("x", 4), ("y", 2)], device_type="CPU")
dtensor.relayout(tf.zeros(8), dtensor.Layout(["x"], mesh))  # DTensor reads most of its settings here
from layoutmap.engines.tensorflow.selfcheck import FAULTS
{}print("right:", float(FAULTS[{}].is_absent(mesh)))
"""


@dataclass(frozen=True)
class Fault:
    """A fault of a framework, and two programs that show it. Each program prints 1 if its result is correct."""

    title: str
    uncorrected: str  # code of a program without layoutmap's corrections
    corrected: str  # code of the same program with these corrections


def _list_xla_faults() -> list[Fault]:
    sections = _SECTION.findall(XLA_FAULTS.read_text(encoding="utf-8"))
    change = ("import numpy as np\n", _PLACE_AN_ARRAY, 1)
    return [Fault(title, program, program.replace(*change)) for title, program in sections]


def _list_torch_faults() -> list[Fault]:
    (_, setup), *sections = _SECTION.findall(DTENSOR_FAULTS.read_text(encoding="utf-8"))
    corrected = setup.replace("ALONE = True", "ALONE = False")
    return [Fault(title, f"{setup}\n\n{text}", f"{corrected}\n\n{text}") for title, text in sections]


def _list_tensorflow_faults() -> list[Fault]:
    titles = (
        "Training steps read variables before they are written",
        "A relayout of four axes mixes up blocks",
    )
    first = "import layoutmap.engines.tensorflow.engine\n"
    unset = "import os\nfor fault in FAULTS:\n    os.environ.pop(fault.setting)\n"
    return [
        Fault(title, _DTENSOR.format(unset, number), first + _DTENSOR.format("", number))
        for number, title in enumerate(titles)
    ]


FAULTS: Mapping[str, Callable[[], list[Fault]]] = {
    "jax": _list_xla_faults,
    "torch": _list_torch_faults,
    "tensorflow": _list_tensorflow_faults,
}
"""Functions that list the known faults, by engine."""


def run_program(program: str) -> tuple[float, str]:
    """Run a program. Return the number that it prints, or NaN if there is none, and the whole output."""
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, env=make_cpu_environment(), capture_output=True, text=True)
    number = re.fullmatch(r"(?:times|right:) ([\d.]+)\n", process.stdout)
    output = f"status {process.returncode}: {process.stdout}{process.stderr[-2000:]}"
    return float(number[1] if number else "nan"), output


def try_known_fault_law(engine: str, seed: int, devices: Devices = EIGHT) -> Iterator[tuple[Outcome, str]]:
    """Check whether layoutmap corrects the fault that `seed` selects. Yield the outcome, and the program if it failed.

    Only the first process yields.
    """
    if (started_by := detect_launcher()) and started_by.process:
        return
    faults, figures = FAULTS[engine](), list[dict[str, str]]()
    fault = faults[seed % len(faults)]

    def run_fault_programs() -> Iterator[str]:
        (uncorrected, _), (corrected, output) = run_program(fault.uncorrected), run_program(fault.corrected)
        state = "present" if corrected != 1 else "gone" if uncorrected == 1 else "corrected"
        figures.append({"fault": fault.title, "state": state})
        if corrected != 1:
            yield output

    outcome = run_law("a known fault of the engine is corrected", run_fault_programs, figures)
    yield outcome, fault.corrected if outcome.is_failure else ""
