"""`load_state_dict` on a laid out model: values come plain or in any layout, and end in the layout of their tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from layoutmap.engines import get_engine
from layoutmap.engines.torch.private import members_of_module


def accept_any_layout(module: torch.nn.Module) -> None:
    """Have a module redistribute loaded tensors to the layouts of its own."""
    module.register_load_state_dict_pre_hook(_into_layouts)


def _into_layouts(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    engine = get_engine("torch")
    for members in members_of_module(module):
        for name, tensor in members.items():
            value = state_dict.get(prefix + name)
            if not isinstance(tensor, DTensor) or not isinstance(value, torch.Tensor):
                continue
            layout = engine.layout_of(tensor)
            if value.shape == tensor.shape and layout is not None and engine.layout_of(value) != layout:
                state_dict[prefix + name] = engine.relayout(value.detach(), layout)
