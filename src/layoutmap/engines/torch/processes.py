"""Agreement between several processes of torch."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from layoutmap.core.blocks import NumpyArray
from layoutmap.core.initializers import Initializer
from layoutmap.engines.checks import processes_differ
from layoutmap.engines.torch import simulation


def across() -> bool:
    """Whether there are other processes; those of torch's `fake` backend, as of a step that is counted, are none."""
    if simulation.is_simulated() or simulation.world_size() == 1:
        return False
    return not dist.is_initialized() or dist.get_backend() != "fake"


def common_seeds(initializers: Mapping[str, Initializer]) -> dict[str, object]:
    """The seed of each initializer that has a program; with several processes, those of process 0.

    Args:
        initializers: The initializers by key, in the same order in all processes.

    Raises:
        EngineError: The processes have different initializers.
    """
    seeds = {key: each.program.seed for key, each in initializers.items() if each.program is not None}
    if not across():
        return seeds
    keys = _gathered(sorted(initializers))
    if any(each != keys[0] for each in keys):
        raise processes_differ("the processes create different variables")
    common = [seeds]
    dist.broadcast_object_list(common, src=0)
    return common[0]


def gathered(values: NumpyArray) -> NumpyArray:
    """The values of each process, one row each, in order of the processes."""
    if not across():
        return values[None]
    simulation.start()
    if "cpu:" not in dist.get_backend_config():  # NCCL alone: torch pickles, and sends that by way of the GPU
        return np.stack(_gathered(values))
    # As bytes, since gloo has no collectives of unsigned and 8-bit floating types.
    own = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8).copy())  # pyright: ignore[reportUnknownMemberType]
    rows = [torch.empty_like(own) for _ in range(simulation.world_size())]
    dist.all_gather(rows, own)  # pyright: ignore[reportUnknownMemberType]
    return np.stack([row.numpy().view(values.dtype).reshape(values.shape) for row in rows])


def random_state() -> int:
    """A checksum of what the next numbers will be."""
    return zlib.crc32(torch.get_rng_state().numpy().tobytes())


def _gathered(value: object) -> list[Any]:
    simulation.start()
    rows: list[Any] = [None] * simulation.world_size()
    dist.all_gather_object(rows, value)  # pyright: ignore[reportUnknownMemberType]
    return rows
