"""Python text, run in a process of its own: for what is decided once in a process, and for what ends it."""

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

TIMEOUT_SECONDS = 120

EIGHT_DEVICES = """
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor
dtensor.initialize_accelerator_system("CPU", num_logical_cpu_devices=8)
mesh = dtensor.create_mesh([("x", 4), ("y", 2)], device_type="CPU")
"""


def run(text: str, environment: Mapping[str, str | None]) -> subprocess.CompletedProcess[str]:
    """Run a text, with these changes of the environment; `None` takes a name out."""
    changed = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
    return subprocess.run(
        [sys.executable, "-c", text], env=changed, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )


def run_all(
    jobs: Iterable[tuple[str, Mapping[str, str | None]]],
) -> list[subprocess.CompletedProcess[str]]:
    """Run several texts, each with its environment, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda job: run(*job), jobs))
