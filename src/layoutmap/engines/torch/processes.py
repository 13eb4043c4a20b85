"""Exchange seeds and values between the processes of a torch program."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from layoutmap.core.blocks import NumpyArray
from layoutmap.core.initializers import Initializer
from layoutmap.engines.checks import make_unequal_initial_values_error
from layoutmap.engines.torch import simulation


def has_other_processes() -> bool:
    """Return whether the program has several processes. With torch's `fake` backend, it has one."""
    if simulation.is_simulated() or simulation.get_world_size() == 1:
        return False
    return not dist.is_initialized() or dist.get_backend() != "fake"


def broadcast_seeds(initializers: Mapping[str, Initializer]) -> dict[str, object]:
    """Return the seed of each initializer that has a program. All processes get the seeds of process 0.

    Args:
        initializers: The initializers by key, in the same order in all processes.

    Raises:
        EngineError: The processes have different initializers.
    """
    seeds = {key: each.program.seed for key, each in initializers.items() if each.program is not None}
    if not has_other_processes():
        return seeds
    keys = _gather_objects(sorted(initializers))
    if any(each != keys[0] for each in keys):
        raise make_unequal_initial_values_error("the processes create different variables")
    common = [seeds]
    dist.broadcast_object_list(common, src=0)
    return common[0]


def gather_values(values: NumpyArray) -> NumpyArray:
    """Return the values of all processes, one row per process, in the order of their ranks."""
    if not has_other_processes():
        return values[None]
    simulation.ensure_process_group()
    # NCCL cannot send CPU tensors, so pickle the values. Torch moves pickles to the GPU.
    if "cpu:" not in dist.get_backend_config():
        return np.stack(_gather_objects(values))
    # Send bytes, because gloo lacks unsigned and 8-bit floating types.
    own = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8).copy())  # pyright: ignore[reportUnknownMemberType]
    rows = [torch.empty_like(own) for _ in range(simulation.get_world_size())]
    dist.all_gather(rows, own)  # pyright: ignore[reportUnknownMemberType]
    return np.stack([row.numpy().view(values.dtype).reshape(values.shape) for row in rows])


def compute_rng_checksum() -> int:
    """Return a checksum of the state of torch's default generator."""
    return zlib.crc32(torch.get_rng_state().numpy().tobytes())


def _gather_objects(value: object) -> list[Any]:
    simulation.ensure_process_group()
    rows: list[Any] = [None] * simulation.get_world_size()
    dist.all_gather_object(rows, value)  # pyright: ignore[reportUnknownMemberType]
    return rows
