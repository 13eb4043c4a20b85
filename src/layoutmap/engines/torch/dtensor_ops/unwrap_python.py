"""Python functions of torch, unwrapped: called so that a function mode sees what they call, and not just their name."""

from __future__ import annotations

import types

import torch

from layoutmap.engines.torch.operators import Function

_MODULES = ("torch.nn.functional", "torch.functional", "torch.nn.init")
_QUESTION = "has_torch_function"


def can_be_unwrapped(function: Function) -> bool:
    """Whether a function is Python that first asks whether there is a mode to be called in its place."""
    return (
        isinstance(function, types.FunctionType)
        and function.__globals__.get("__name__") in _MODULES
        and any(name.startswith(_QUESTION) for name in function.__code__.co_names)
    )


def unwrapped(function: Function, **replaced: Function) -> Function:
    """Such a function, without the question.

    Args:
        function: The function.
        **replaced: What it is to find under some names of its module.
    """
    questions = [name for name in function.__code__.co_names if name.startswith(_QUESTION)]
    scope = {**function.__globals__, **dict.fromkeys(questions, _no), **replaced}
    if "overrides" in function.__code__.co_names:  # `torch.nn.init` asks `torch.overrides`
        scope["torch"] = _TORCH
    made = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__  # which FunctionType does not take
    return made


def _no(*args: object) -> bool:
    return False


class _Unasked:
    """Torch, or `torch.overrides`, without the question."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> object:
        found = getattr(self._module, name)
        if found is torch.overrides:
            return _Unasked(found)
        return _no if name.startswith(_QUESTION) else found


_TORCH = _Unasked(torch)
