"""DTensors for tests, on four simulated devices: `batch=2,model=2`."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from layoutmap.engines.torch import engine
from layoutmap.layout import Layout
from layoutmap.mesh import Mesh

__all__ = ["MESH", "place", "run_on", "summands", "whole"]

MESH = Mesh(None, "batch=2,model=2")


def place(tensor: torch.Tensor, *specs: Any) -> Any:
    """A plain tensor in a layout on the mesh."""
    return engine().relayout(tensor.detach(), Layout(specs, MESH))


def summands(tensor: torch.Tensor, dim: str = "batch") -> Any:
    """A tensor that waits to be summed up over a mesh dim."""
    parts = torch.stack([tensor * 0.25, tensor * 0.75])
    return place(parts, dim, *[None] * tensor.ndim).sum(0)


def whole(tensor: Any) -> torch.Tensor:
    """All values of a tensor."""
    return torch.from_numpy(engine().whole(tensor))


def run_on() -> Any:
    """The scope of the engine in which DTensors compute."""
    return engine().run_on(MESH)


def is_dtensor(value: Any) -> bool:
    return isinstance(value, DTensor)
