"""Known faults of engines: programs that an engine alone computes wrongly, and with this package right."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from layoutmap.engines.launchers import launcher
from layoutmap.testing.laws import Outcome, tried
from layoutmap.testing.models.maps import EIGHT, Devices
from layoutmap.testing.subjects import alone_on_cpus

XLA_FAULTS, DTENSOR_FAULTS = (Path(__file__).with_name(f"{name}-faults.md") for name in ("xla", "dtensor"))
"""The pages of faults of XLA and of torch's DTensor, whose programs are tried."""
_SECTION = re.compile(
    r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python no-run[^\n]*\n(.+?)^```\n", re.DOTALL | re.MULTILINE
)
_IN_A_LAYOUT = """import numpy as np
import layoutmap as lm
mesh = lm.create_mesh("batch=2,model=2", device_type="cpu")
lm.dtensor.relayout(np.zeros(()), lm.Layout.replicated(mesh, 0))
"""
_DTENSOR = """import tensorflow as tf
from tensorflow.experimental import dtensor
dtensor.initialize_accelerator_system("CPU", num_logical_cpu_devices=8)
mesh = dtensor.create_mesh([("x", 4), ("y", 2)], device_type="CPU")
dtensor.relayout(tf.zeros(8), dtensor.Layout(["x"], mesh))  # from here on, settings do not count
from layoutmap.engines.tensorflow.selfcheck import FAULTS
print("right:", float(FAULTS[{}].is_absent(mesh)))
"""


@dataclass(frozen=True)
class Fault:
    """A fault of an engine, as programs on simulated CPU devices. They print a number, which is 1 where it is right.

    Args:
        title: The fault in a sentence.
        alone: A program that has it.
        corrected: The same program with this package.
    """

    title: str
    alone: str
    corrected: str


def _of_xla() -> list[Fault]:
    found = _SECTION.findall(XLA_FAULTS.read_text(encoding="utf-8"))
    changed = ("import numpy as np\n", _IN_A_LAYOUT, 1)
    return [Fault(title, text, text.replace(*changed)) for title, text in found]


def _of_torch() -> list[Fault]:
    (_, first), *found = _SECTION.findall(DTENSOR_FAULTS.read_text(encoding="utf-8"))
    with_us = first.replace("ALONE = True", "ALONE = False")
    return [Fault(title, f"{first}\n\n{text}", f"{with_us}\n\n{text}") for title, text in found]


def _of_tensorflow() -> list[Fault]:
    titles = (
        "Training steps read variables before they are written",
        "A relayout of four axes mixes up blocks",
    )
    first = "import layoutmap.engines.tensorflow.engine\n"
    programs = (_DTENSOR.format(number) for number in range(len(titles)))
    return [Fault(title, text, first + text) for title, text in zip(titles, programs, strict=True)]


FAULTS: Mapping[str, Callable[[], list[Fault]]] = {
    "jax": _of_xla,
    "torch": _of_torch,
    "tensorflow": _of_tensorflow,
}
"""The known faults, by engine."""


def printed(program: str) -> tuple[float, str]:
    """Run a program; returns the number that it prints, NaN if it prints none, and all that it wrote."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=alone_on_cpus(), capture_output=True, text=True)
    number = re.fullmatch(r"(?:times|right:) ([\d.]+)\n", done.stdout)
    wrote = f"status {done.returncode}: {done.stdout}{done.stderr[-2000:]}"
    return float(number[1] if number else "nan"), wrote


# why: decisions/0166
def try_faults(engine: str, seed: int, devices: Devices = EIGHT) -> Iterator[tuple[Outcome, str]]:
    """Yield whether a known fault is corrected, and the program where it is not; nothing but in the first process.

    Args:
        engine: The engine's name.
        seed: The number of the fault, from which on they are counted again.
        devices: Those that there are; the programs simulate their own.
    """
    if (started_by := launcher()) and started_by.process:
        return
    faults, figures = FAULTS[engine](), list[dict[str, str]]()
    fault = faults[seed % len(faults)]

    def law() -> Iterator[str]:
        (alone, _), (here, why) = printed(fault.alone), printed(fault.corrected)
        state = "present" if here != 1 else "gone" if alone == 1 else "corrected"
        figures.append({"fault": fault.title, "state": state})
        if here != 1:
            yield why

    outcome = tried("a known fault of the engine is corrected", law, figures)
    yield outcome, fault.corrected if outcome.is_suspicious else ""
