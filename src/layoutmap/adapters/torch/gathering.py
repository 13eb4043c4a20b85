"""Weights that are cut over the dim that splits the batch are put together while their layer computes.

That is what FSDP does: a layer needs its weights whole, but for what is cut over other dims. Each is gathered when the
layer that owns it is called and let go afterwards; its gradient goes the same way back, summed up and cut.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from layoutmap.adapters.protocol import Home
from layoutmap.layout import Layout
from layoutmap.pytorch.private import members_of_module

__all__ = ["gathered", "to_gather"]


def to_gather(layouts: Mapping[str, Layout], home: Home) -> dict[str, Layout]:
    """Those of a module's own parameters that are gathered when it is called, and the layouts that they compute in."""
    computing = {name: home.computing_layout(layout) for name, layout in layouts.items()}
    return {name: layout for name, layout in computing.items() if layout != layouts[name]}


@contextmanager
def gathered(module: torch.nn.Module, layouts: Mapping[str, Layout], home: Home) -> Generator[None]:
    """While open, a module's own parameters are in the layouts that they compute in."""
    parameters: dict[str, Any] = members_of_module(module)[0]
    before = {name: parameters[name] for name in layouts}
    try:
        for name, layout in layouts.items():
            parameters[name] = home.place(before[name], layout)
        yield
    finally:
        parameters.update(before)
