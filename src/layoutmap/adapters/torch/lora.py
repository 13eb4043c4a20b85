"""Handle models that PEFT changed: LoRA factors inherit the layout of their base weight.

    lora_A, lora_B              the rank, then what the weight sums over; its outputs, then the rank
    lora_embedding_A, _B        the rank, then the rows of the table; its outputs, then the rank
    lora_magnitude_vector       the outputs

PEFT also wraps a model and its layers, which renames the weights: the rules know them by both names.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from layoutmap.adapters.torch.paths import FoundTensor
from layoutmap.adapters.torch.roles import find_roles
from layoutmap.core.uneven import Axes
from layoutmap.engines.torch.modules import list_modules

_BASE = "base_layer"
_WRAPPER = "base_model.model."


def list_unwrapped_names(found: FoundTensor, root: torch.nn.Module) -> list[str]:
    """Return the names that a tensor had before PEFT wrapped the model, where they differ."""
    names: list[str] = []
    for path in (found.path, *found.aliases):
        plain = path.removeprefix(_WRAPPER) if _is_of_peft(root) else path
        plain = ".".join(part for part in plain.split(".") if part != _BASE)
        if plain != path:
            names.append(plain)
    return names


def find_lora_factors(root: torch.nn.Module) -> dict[int, tuple[str, Axes]]:
    """Return each LoRA factor's base weight, and the base axes of the factor's axes, by the factor's id."""
    found: dict[int, tuple[str, Axes]] = {}
    for prefix, module in list_modules(root):
        base = getattr(module, _BASE, None)
        if not (_is_of_peft(module) and isinstance(base, torch.nn.Module)):
            continue
        roles = find_roles(base, "weight")
        # only two-axis weights; adapters of convolutions are convolutions, and rules apply to them
        if len(roles) == 2:
            output = roles.index("out.0")
            path = ".".join(filter(None, (prefix, _BASE, "weight")))
            found.update((id(t), (path, axes)) for t, axes in _iterate_factors(module, 1 - output, output))
    return found


def _iterate_factors(
    module: torch.nn.Module, inward: int, output: int
) -> Iterator[tuple[torch.Tensor, Axes]]:
    for name, axes in (("lora_A", ((), (inward,))), ("lora_B", ((output,), ()))):
        for layer in getattr(module, name, {}).values():  # a layer has only the factors of its adapter type
            yield layer.weight, axes
            if layer.bias is not None:
                yield layer.bias, axes[:1]
    for name, axes in (("lora_embedding_A", ((), (inward,))), ("lora_embedding_B", ((output,), ()))):
        for factor in getattr(module, name, {}).values():
            yield factor, axes
    for layer in getattr(module, "lora_magnitude_vector", {}).values():
        yield layer.weight, ((output,),)


def _is_of_peft(module: torch.nn.Module) -> bool:
    return any(kind.__module__.startswith("peft.") for kind in type(module).__mro__)
