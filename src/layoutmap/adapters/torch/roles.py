"""Find the roles of weights' axes in a module's call, for torch modules and transformers' Conv1D.

Lints of a plan use them, because sharding an axis that is summed over has other costs than sharding an output axis. How
modules of the user's code use their weights is unknown.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from layoutmap.adapters.torch.paths import ModelTensor
from layoutmap.adapters.torch.training import call_model
from layoutmap.core.variables import AxisRoles, number_inputs
from layoutmap.engines.torch.deferred_init import FakeTensorMode
from layoutmap.engines.torch.element_types import find_torch_dtype, format_dtype
from layoutmap.engines.torch.fake_products import allow_fake_grouped_products
from layoutmap.engines.torch.trees import is_mapping, tree_leaves, tree_map

_HEAD_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim")
"""Names that attention modules of transformers have for the size of a head."""


def find_head_sizes_by_module_id(root: torch.nn.Module) -> dict[int, int]:
    """Return a dict from the id of each direct child of an attention module to the head size of this module.

    PEFT replaces the child, and stores it as `base_layer`.
    """
    sizes_by_module_id: dict[int, int] = {}
    for module in root.modules():
        size = next((n for name in _HEAD_SIZES if isinstance(n := getattr(module, name, None), int)), None)
        if size is not None:
            sizes_by_module_id.update(
                (id(getattr(child, "base_layer", child)), size) for child in module.children()
            )
    return sizes_by_module_id


def find_axis_roles_and_head_size(
    model_tensor: ModelTensor, head_sizes: dict[int, int], inputs: Mapping[int, int] | None = None
) -> AxisRoles | None:
    """Return the roles of a parameter's axes in the first module that stores it, or None if they are unknown.

    `inputs` has the number of the input of each called module by the id of the module.
    """
    attribute = model_tensor.attributes[0]
    key, roles = id(attribute.module), find_axis_roles(attribute.module, attribute.name)
    return AxisRoles(roles, head_sizes.get(key), (inputs or {}).get(key)) if roles else None


def number_module_inputs(model: torch.nn.Module, inputs: Any, mode: FakeTensorMode) -> dict[int, int]:
    """Return a dict from the id of each called module to the number of the tensor that it reads in its last call.

    The model runs on shapes, and its attributes stay the same. The dict is empty if layers have no weights yet.

    Args:
        model: The model.
        inputs: Its inputs: an object with shape and dtype, a sequence of these, or a mapping by name.
        mode: The mode of the model's deferred tensors.

    Raises:
        Exception: The call failed, as it does if the model's code reads values.
    """
    read: dict[int, torch.Tensor] = {}

    def record_input(module: torch.nn.Module, args: object, kwargs: object) -> None:
        read.pop(id(module), None)
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        if (tensor := next(tensors, None)) is not None:
            read[id(module)] = tensor

    def make_fake_tensor(leaf: Any) -> object:
        is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        dtype = find_torch_dtype(format_dtype(leaf.dtype), "inputs") if is_array else None
        return torch.empty(tuple(leaf.shape), dtype=dtype, device=device) if is_array else leaf

    modules, weights = [*model.modules()], [*model.parameters()]
    if any(map(is_lazy, weights)):
        return {}
    device = weights[0].device if weights else None
    before: list[dict[str, Any]] = [
        {name: copy.copy(each) if is_mapping(each) else each for name, each in vars(module).items()}
        for module in modules
    ]
    try:
        for module in modules:
            module.register_forward_pre_hook(record_input, with_kwargs=True)
        with (
            torch.compiler.set_stance("force_eager"),
            mode,
            torch.no_grad(),
            allow_fake_grouped_products(),
        ):
            fake = tree_map(make_fake_tensor, dict(inputs) if is_mapping(inputs) else inputs)
            call_model(model, (fake, None))
    finally:
        for module, attributes in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(attributes)
    return number_inputs(read)


def find_axis_roles(module: torch.nn.Module, name: str) -> tuple[str, ...]:
    """Return the roles of the axes of a module's parameter, or an empty tuple if they are unknown."""
    module_class = type(module)
    if isinstance(module, torch.nn.Linear):
        return ("out.0", "in.0") if name == "weight" else ("out.0",)
    if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
        return ("rows", "out.0")
    if isinstance(module, (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)):
        filters = ("out.0", "in.0", *("",) * len(module.kernel_size))
        return filters if name == "weight" else ("out.0",)
    # Conv1D of transformers is a Linear with a transposed weight, so its roles are swapped.
    if module_class.__name__ == "Conv1D" and module_class.__module__.startswith("transformers."):
        return ("in.0", "out.0") if name == "weight" else ("out.0",)
    return ()
