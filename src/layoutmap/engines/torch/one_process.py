"""Operations of one process on plain tensors, beside devices that are simulated in it.

The process group of simulated ranks is the default one, and torch takes it for that of the program: it would leave to
the others their parts of a checkpoint and of the data, and none is there to do them. A checkpoint is written by this
process alone, as without a group; the rest is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.utils.data import DistributedSampler

from layoutmap.core.errors import EngineError
from layoutmap.engines.patches import Attribute
from layoutmap.engines.torch.private import DistWrapper

_FIX = (
    "leave it out in a program of one process, by WORLD_SIZE; or start one for each device, as with torchrun"
)


def split_nothing() -> None:  # why: decisions/0116
    """Have torch write checkpoints by this process alone, and refuse samplers, while ranks are simulated."""
    for change in _CHANGES:
        change.install()


def _are_simulated() -> bool:
    """Whether the default group is that of simulated ranks; where the program has another one, all is put back."""
    are = dist.is_initialized() and dist.get_backend() == "fake"
    for change in () if are else _CHANGES:
        change.remove()
    return are


def _checkpoint(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def init(self: Any, group: Any, use_dist: bool, coordinator_rank: int) -> None:
        plain(self, group, use_dist and not _are_simulated(), coordinator_rank)

    return init


def _sampler(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def init(self: Any, dataset: Any, num_replicas: int | None = None, *args: Any, **kwargs: Any) -> None:
        if _are_simulated() and num_replicas in (None, number := dist.get_world_size()):
            raise EngineError(
                f"DistributedSampler: it would skip the data of {number - 1} of {number} simulated devices",
                why="this process is the only one, and loads the data of all",
                fix=f"pass num_replicas=1, rank=0, or {_FIX}",
            )
        plain(self, dataset, num_replicas, *args, **kwargs)

    return init


_CHANGES = (
    Attribute(DistWrapper, "__init__", _checkpoint),
    Attribute(DistributedSampler, "__init__", _sampler),
)


def refuse_collective(op: Any, args: Any) -> None:
    """Refuse a collective of plain tensors among simulated ranks, unless this process knows what all of them would.

    Raises:
        EngineError: It does not.
    """
    name = op.overloadpacket.__name__
    is_known = name in ("barrier", "wait_tensor") or (name == "broadcast_" and args[2] == 0)
    if is_known or not _are_simulated():
        return
    raise EngineError(
        f"{name}: a collective of plain tensors, among devices that are simulated",
        facts={"devices": dist.get_world_size()},
        why="they are in this process, since its first scope or mesh, and have no tensors but those in layouts",
        fix=_FIX,
    )
