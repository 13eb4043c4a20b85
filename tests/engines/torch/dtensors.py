"""DTensors for tests, on four simulated devices: `batch=2,model=2`."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor.experimental import implicit_replication

from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.engines.torch import changes, devices, simulation
from layoutmap.engines.torch.dtensor_ops.guard import OPERATOR_DISPATCH_PATCH
from layoutmap.engines.torch.engine import engine

__all__ = ["MESH", "alone", "place", "run_on", "summands", "whole"]

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
    return torch.from_numpy(engine().to_numpy(tensor))


def run_on() -> Any:
    """The scope of the engine in which DTensors compute."""
    return engine().run_on(MESH)


@contextmanager
def alone() -> Generator[None]:
    """DTensor without us, but for the simulation, and with plain tensors as replicated."""
    native, _ = engine().make_native_layout(Layout.replicated(MESH, 0), 0)
    OPERATOR_DISPATCH_PATCH.remove()
    changes.meshes.clear()
    with (
        patch.object(devices, "install_patches_for_mesh"),  # which each use of the mesh has called
        warnings.catch_warnings(),
        simulation.simulate_ranks(native.mesh.flatten().tolist()),
    ):
        warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
        with implicit_replication():
            yield
