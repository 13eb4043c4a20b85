"""Processes of their own with the framework loaded: for what is decided once in a process, and for what ends it.

Loading TensorFlow takes five seconds of a core, Keras on torch seven. A server loads them once and runs nothing, and
each process is forked from it: what a framework decides at its first use it decides in that process.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

TIMEOUT_SECONDS = 300
LOADED = {
    "jax": ("jax", "keras", "flax.nnx", "optax"),
    "tensorflow": ("tensorflow",),
    "torch": (
        *("torch", "torch.distributed.tensor", "torch._dynamo", "torch._functorch.aot_autograd"),
        *("torch.distributed.checkpoint", "layoutmap.adapters.torch", "layoutmap.engines.torch.engine"),
    ),
}

EIGHT_DEVICES = """
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor
dtensor.initialize_accelerator_system("CPU", num_logical_cpu_devices=8)
mesh = dtensor.create_mesh([("x", 4), ("y", 2)], device_type="CPU")
"""  # what texts for TensorFlow begin with


@dataclass(frozen=True)
class Ended:
    """What came of a process: its exit status, a signal's number with a minus, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Running:
    """A process that was started."""

    process: BaseProcess
    folder: Path


def start(
    program: str | Path,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str | None] | None = None,
    *,
    warnings_are_errors: bool = False,
) -> Running:
    """Start a text of Python, or a file, with changes of the environment; `None` takes a name out."""
    changed = {**os.environ, **(environment or {})}
    settings = {name: value for name, value in changed.items() if value is not None}
    folder = Path(tempfile.mkdtemp(prefix="forked-"))
    process = _context().Process(
        target=_run, args=(program, tuple(arguments), settings, folder, warnings_are_errors), daemon=True
    )
    process.start()
    return Running(process, folder)


def wait_for_all(running: Sequence[Running], seconds: float = TIMEOUT_SECONDS) -> list[Ended]:
    """What came of each; those that have not ended in this time are killed, as `returncode` says."""
    try:
        until = time.monotonic() + seconds
        for each in running:
            each.process.join(max(0.0, until - time.monotonic()))
    finally:
        for each in running:
            each.process.kill()
            each.process.join()
    return [_ended(each) for each in running]


def run(
    program: str | Path, arguments: Sequence[str] = (), environment: Mapping[str, str | None] | None = None
) -> Ended:
    """What came of one process."""
    (ended,) = wait_for_all([start(program, arguments, environment)])
    return ended


def _ended(running: Running) -> Ended:
    stdout, stderr = (
        (running.folder / name).read_text(errors="replace") if (running.folder / name).exists() else ""
        for name in ("stdout", "stderr")
    )
    shutil.rmtree(running.folder)
    assert running.process.exitcode is not None
    return Ended(running.process.exitcode, stdout, stderr)


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "hypothesis", *LOADED[os.environ["KERAS_BACKEND"]]])
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OMP_NUM_THREADS", "1")  # read when torch is loaded: these processes share two cores
        forkserver.ensure_running()
    return context


def _run(
    program: str | Path,
    arguments: tuple[str, ...],
    settings: dict[str, str],
    folder: Path,
    warnings_are_errors: bool,
) -> None:
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    faulthandler.enable(2)  # what ends by SIGSEGV or SIGABRT says where
    os.environ.clear()
    os.environ.update(settings)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    if warnings_are_errors:
        warnings.simplefilter("error")
    sys.argv = [str(program), *arguments]
    failed = False
    try:
        if isinstance(program, Path):
            sys.path.insert(0, str(program.parent))
            runpy.run_path(str(program), run_name="__main__")
        else:
            exec(compile(program, "<text>", "exec"), {"__name__": "__main__"})
    except Exception:
        failed = True
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # a process of multiprocessing does not: frameworks leave their group in one
    sys.exit(failed)
