"""Detect the launcher of this process, SLURM or torchrun, from environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Launcher:
    """The program that started this process.

    Args:
        name: `"torchrun"` or `"SLURM"`.
        process: The number of this process among those that were started together.
        num_processes: How many those are.
    """

    name: str
    process: int
    num_processes: int

    def __str__(self) -> str:
        return f"started by {self.name}: process {self.process} of {self.num_processes}"


def detect_launcher() -> Launcher | None:
    """Return the launcher of this process, or None. torchrun inside a SLURM step counts as torchrun.

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
