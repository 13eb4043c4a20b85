"""Print once that simulated devices are slow, and recommend torchrun."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

import torch

from layoutmap.core.terminals import is_stderr_interactive
from layoutmap.engines.torch import simulation

_PATIENCE_SECONDS = 2.0


class SlowCallNotice:
    """Print a notice once if training calls of one model on simulated devices are slow."""

    def __init__(self) -> None:
        self._num_calls = 0

    @contextmanager
    def time_call(self, progress: bool | None) -> Generator[None]:
        """Time a call, and print a notice after the first slow one. The first call is slow anyway, so skip it.

        Args:
            progress: The option of the scope. `None`: the notice is printed if stderr is a terminal.
        """
        if self._num_calls < 0 or not torch.is_grad_enabled() or not simulation.is_simulated():
            yield
            return
        start = time.monotonic()
        yield
        self._num_calls += 1
        seconds = time.monotonic() - start
        if self._num_calls > 1 and seconds > _PATIENCE_SECONDS:
            self._num_calls = -1
            if progress or (progress is None and is_stderr_interactive()):
                size = simulation.get_world_size()
                print(
                    f"layoutmap: this call took {seconds:.0f} s, since one process computes the parts of "
                    f"{size} simulated devices in turn. Faster: torchrun --nproc-per-node {size} PROGRAM",
                    file=sys.stderr,
                )
