"""Describe a torch module and an optimizer as text, for comparison between processes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch

from layoutmap.adapters.fingerprints import format_function_fingerprint, format_setting
from layoutmap.adapters.torch.experts import is_layer_of_experts, needs_all_tokens
from layoutmap.engines.agreement import NamedText
from layoutmap.engines.torch.modules import list_modules


def iterate_module_descriptions(module: torch.nn.Module, forwards: Iterable[object]) -> Iterator[NamedText]:
    """Yield pairs of a name and a text for submodules, their settings, and the source of each `forward`."""
    yield "gradients", str(torch.is_grad_enabled())
    modules = list_modules(module)
    for path, each in modules:
        kind = type(each)
        name = f'{kind.__name__} "{path}"' if path else kind.__name__
        yield path or "model", kind.__qualname__
        yield f"{name}: training", str(each.training)
        weights = each.named_parameters(recurse=False)
        yield f"{name}: trainable", str([name for name, weight in weights if weight.requires_grad])
        if is_layer_of_experts(each):  # some processes would gather all tokens, and wait for the others
            yield f"{name}: hooks, dropout, or tensors inside", str(needs_all_tokens(each))
        if kind.__module__.startswith("torch.nn."):
            # A ParameterList prints the GPU of each parameter, which differs between processes, so remove it.
            yield f"{name}: settings", re.sub(r"(GPU |cuda:)\d+", r"\1", each.extra_repr())
    for function in dict.fromkeys([*(type(each).forward for _, each in modules), *forwards]):
        if function is not None:
            yield "forward", format_function_fingerprint(function)


def iterate_optimizer_descriptions(optimizer: torch.optim.Optimizer) -> Iterator[NamedText]:
    """Yield pairs of a name and a text that describe an optimizer: its class, and the settings of its groups."""
    kind = type(optimizer)
    yield "optimizer", kind.__qualname__
    for number, group in enumerate(optimizer.param_groups):
        for name in sorted(group.keys() - {"params"}):
            yield f"{kind.__name__}, group {number}: {name}", format_setting(group[name])
