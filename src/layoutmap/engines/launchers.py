"""Detect the launcher of this process, SLURM or torchrun, and report a fatal error to torchrun."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

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
    """Install an exception hook that writes an error of layoutmap to torchrun's error file.

    torchrun then prints the error as the root cause in its last lines, and otherwise only a link. Other errors and
    other launchers are not affected.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    call_earlier_hook = sys.excepthook

    def write_torchrun_error_file(
        error_class: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        call_earlier_hook(error_class, error, traceback)
        # torch's @record may have written the file, with the traceback, so keep an existing file.
        if isinstance(error, LayoutMapError) and not os.path.exists(file):
            message = {
                "message": f"{error_class.__name__}: {error}",
                "extraInfo": {"timestamp": str(int(time.time()))},
            }
            with suppress(OSError), open(file, "w", encoding="utf-8") as opened:
                json.dump({"message": message}, opened)

    sys.excepthook = write_torchrun_error_file
