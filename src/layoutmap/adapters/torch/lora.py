"""Handle models that PEFT changed: LoRA factors inherit the layout of their base weight.

    lora_A, lora_B              the rank, then what the weight sums over; its outputs, then the rank
    lora_embedding_A, _B        the rank, then the rows of the table; its outputs, then the rank
    lora_magnitude_vector       the outputs

PEFT also wraps a model and its layers, which renames the weights: the rules know them by both names.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from layoutmap.adapters.torch.paths import ModelTensor
from layoutmap.adapters.torch.roles import find_axis_roles
from layoutmap.core.uneven import Axes
from layoutmap.engines.torch.modules import list_modules

_BASE_LAYER = "base_layer"
_WRAPPER = "base_model.model."


def list_names_before_peft(model_tensor: ModelTensor, root: torch.nn.Module) -> list[str]:
    """Return the names that a tensor had before PEFT wrapped the model, except those that PEFT did not change."""
    names: list[str] = []
    for path in (model_tensor.path, *model_tensor.aliases):
        unwrapped = path.removeprefix(_WRAPPER) if _is_peft_module(root) else path
        unwrapped = ".".join(part for part in unwrapped.split(".") if part != _BASE_LAYER)
        if unwrapped != path:
            names.append(unwrapped)
    return names


def find_lora_factors(root: torch.nn.Module) -> dict[int, tuple[str, Axes]]:
    """Return a dict from a LoRA factor's id to its base weight's path, and that weight's axes for each of its axes."""
    factors: dict[int, tuple[str, Axes]] = {}
    for prefix, module in list_modules(root):
        wrapped_layer = getattr(module, _BASE_LAYER, None)
        if not (_is_peft_module(module) and isinstance(wrapped_layer, torch.nn.Module)):
            continue
        roles = find_axis_roles(wrapped_layer, "weight")
        # LoRA factors of a convolution are convolutions, which rules match, so handle only weights with two axes.
        if len(roles) == 2:
            output_axis = roles.index("out.0")
            path = ".".join(filter(None, (prefix, _BASE_LAYER, "weight")))
            pairs = _iterate_lora_factors(module, 1 - output_axis, output_axis)
            factors.update((id(factor), (path, axes)) for factor, axes in pairs)
    return factors


def _iterate_lora_factors(
    module: torch.nn.Module, input_axis: int, output_axis: int
) -> Iterator[tuple[torch.Tensor, Axes]]:
    """Yield pairs: a LoRA factor of a layer, and for each of its axes the axes of the base weight."""
    for name, axes in (("lora_A", ((), (input_axis,))), ("lora_B", ((output_axis,), ()))):
        for layer in getattr(module, name, {}).values():  # a layer has only the factors of its adapter type
            yield layer.weight, axes
            if layer.bias is not None:
                yield layer.bias, axes[:1]
    for name, axes in (("lora_embedding_A", ((), (input_axis,))), ("lora_embedding_B", ((output_axis,), ()))):
        for factor in getattr(module, name, {}).values():
            yield factor, axes
    for layer in getattr(module, "lora_magnitude_vector", {}).values():
        yield layer.weight, ((output_axis,),)


def _is_peft_module(module: torch.nn.Module) -> bool:
    return any(kind.__module__.startswith("peft.") for kind in type(module).__mro__)
