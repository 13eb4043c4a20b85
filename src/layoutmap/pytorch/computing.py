"""Where DTensors compute right: `computing(device_mesh)`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch.distributed.device_mesh import DeviceMesh

from layoutmap.pytorch.private import replicates_plain_tensors, set_replicates_plain_tensors

__all__ = ["computing"]


@contextmanager
def computing(device_mesh: DeviceMesh) -> Generator[None]:
    """While open on this thread, plain tensors that meet DTensors count as replicated.

    Args:
        device_mesh: The mesh of the DTensors.
    """
    before = replicates_plain_tensors()
    set_replicates_plain_tensors(True)
    try:
        yield
    finally:
        set_replicates_plain_tensors(before)
