"""Detect the launcher of this process, SLURM or torchrun, and report a fatal error of torchrun's workers once."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from layoutmap.core import folders
from layoutmap.core.errors import LayoutMapError


@dataclass(frozen=True)
class Launcher:
    """The program that started this process.

    Args:
        name: `"torchrun"` or `"SLURM"`.
        process: The index of this process in its job.
        num_processes: Number of processes.
    """

    name: str
    process: int
    num_processes: int

    def __str__(self) -> str:
        return f"started by {self.name}: process {self.process} of {self.num_processes}"


def detect_launcher() -> Launcher | None:
    """Return the launcher that started this process, or None. torchrun inside a SLURM step counts as torchrun.

    Example:
        >>> print(detect_launcher())
        None
    """
    for name, process, count in (
        ("torchrun", "RANK", "WORLD_SIZE"),
        ("SLURM", "SLURM_PROCID", "SLURM_NTASKS"),
    ):
        numbers = os.environ.get(process, ""), os.environ.get(count, "")
        if all(map(str.isdecimal, numbers)):
            return Launcher(name, *map(int, numbers))
    return None


def report_errors_to_torchrun() -> None:
    """Install an exception hook that reports an error of layoutmap once for the processes that torchrun starts.

    The first process that fails on a machine prints its traceback. A process that fails with the same message prints
    one line. The hook also writes torchrun's error files. torchrun then prints the error as the root cause in its last
    lines, and otherwise only a link. Other errors and other launchers are not affected.

    torchrun itself prints a traceback of `ChildFailedError` before these lines. It raises this error in its own
    process, so no hook of a worker can prevent the traceback.
    """
    variable = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if variable is None:
        return
    file = Path(variable)
    call_earlier_hook = sys.excepthook

    def report_error(
        error_class: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        # torch's @record may have written the file, with the traceback, so keep an existing file.
        if not isinstance(error, LayoutMapError) or file.exists():
            call_earlier_hook(error_class, error, traceback)
            return
        message, seconds = f"{error_class.__name__}: {error}", int(time.time())
        # torchrun may end this process while it waits for the lock, so write the file first.
        _write_error_file(file, message, seconds)
        lock, rank = None, None
        # torchrun gives the workers of a machine the folders 0, 1, ... in one folder. Other folders are not shared.
        if folders.fcntl is not None and file.parent.name == os.environ.get("LOCAL_RANK"):
            with suppress(OSError, ValueError):
                # torchrun ends all workers after the first exit, so lock the folder until the traceback is printed.
                lock = folders.FolderLock(file.parent.parent)
                rank = _find_process_with_same_error(file.parent.parent / "layoutmap_error.json", message)
        if rank is None:
            call_earlier_hook(error_class, error, traceback)
        else:
            line = f"{message.splitlines()[0]} (printed in full by process {rank})"
            sys.stderr.write(f"{line}\n")
            # torchrun calls the earliest error the root cause and counts whole seconds.
            _write_error_file(file, line, seconds + 1)
        del lock

    sys.excepthook = report_error


def _find_process_with_same_error(first: Path, message: str) -> int | None:
    """Return the process that failed first on this machine if its message is equal. Otherwise, return None.

    Args:
        first: File with the rank and the message of that process. The first process creates it.
        message: The message of this process.
    """
    if not first.exists():
        first.write_text(json.dumps([int(os.environ["RANK"]), message]), encoding="utf-8")
        return None
    rank, first_message = json.loads(first.read_text(encoding="utf-8"))
    return rank if first_message == message else None


def _write_error_file(file: Path, message: str, seconds: int) -> None:
    """Write a message in the form that torchrun reads, and ignore errors. torchrun never reads a part of the file."""
    content = {"message": {"message": message, "extraInfo": {"timestamp": str(seconds)}}}
    with suppress(OSError):
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(content), encoding="utf-8")
        partial.replace(file)
