"""Optimizers that would step wrongly are refused at their first step, by name.

Most of torch's optimizers are sums and products, which `DTensor`s compute right, or raise where they cannot. One that
reads numbers in order to decide, as `Adafactor` does, reads those of one process's piece and goes on silently.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from layoutmap.errors import ScopeError

__all__ = ["refuse_optimizers"]

_READ = (torch.optim.Adafactor,)


@functools.cache
def refuse_optimizers() -> None:
    """From now on, look at each optimizer before it steps; done once in a process."""
    register_optimizer_step_pre_hook(_refuse)


def _refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not isinstance(optimizer, _READ):
        return
    if any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]):
        raise ScopeError(
            f"{type(optimizer).__name__} cannot step weights in layouts",
            why="it reads norms of weights and updates, and each process would read that of its own pieces",
            mend="use another optimizer, as torch.optim.AdamW, whose slots are cut as the weights are",
        )
