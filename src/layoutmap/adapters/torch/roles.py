"""Find the roles of weights' axes in a module's call, for torch modules and transformers' Conv1D.

Lints of a plan use them, because sharding an axis that is summed over has other costs than sharding an output axis. How
modules of the user's code use their weights is unknown.
"""

from __future__ import annotations

import torch

from layoutmap.adapters.torch.paths import ModelTensor
from layoutmap.core.variables import AxisRoles

_HEAD_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim")
"""Names that attention modules of transformers have for the size of a head."""


def find_head_sizes_by_module_id(root: torch.nn.Module) -> dict[int, int]:
    """Return a dict from the id of each direct child of an attention module to the head size of this module."""
    sizes_by_module_id: dict[int, int] = {}
    for module in root.modules():
        size = next((n for name in _HEAD_SIZES if isinstance(n := getattr(module, name, None), int)), None)
        if size is not None:
            sizes_by_module_id.update((id(child), size) for child in module.children())
    return sizes_by_module_id


def find_axis_roles_and_head_size(model_tensor: ModelTensor, head_sizes: dict[int, int]) -> AxisRoles | None:
    """Return the roles of a parameter's axes in the first module that stores it, or None if they are unknown."""
    attribute = model_tensor.attributes[0]
    roles = find_axis_roles(attribute.module, attribute.name)
    return AxisRoles(roles, head_sizes.get(id(attribute.module))) if roles else None


def find_axis_roles(module: torch.nn.Module, name: str) -> tuple[str, ...]:
    """Return the roles of the axes of a module's parameter, or an empty tuple if they are unknown."""
    module_class = type(module)
    if isinstance(module, torch.nn.Linear):
        return ("out.0", "in.0") if name == "weight" else ("out.0",)
    if isinstance(module, torch.nn.Embedding):
        return ("rows", "out.0")
    if isinstance(module, (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)):
        filters = ("out.0", "in.0", *("",) * len(module.kernel_size))
        return filters if name == "weight" else ("out.0",)
    # Conv1D of transformers is a Linear with a transposed weight, so its roles are swapped.
    if module_class.__name__ == "Conv1D" and module_class.__module__.startswith("transformers."):
        return ("in.0", "out.0") if name == "weight" else ("out.0",)
    return ()
