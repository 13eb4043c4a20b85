"""Unwrap torch's Python functions, so that a function mode sees the operators that they call."""

from __future__ import annotations

import types

import torch

from layoutmap.engines.torch.operators import Function

_MODULES = ("torch.nn.functional", "torch.functional", "torch.nn.init")
_OVERRIDE_CHECK = "has_torch_function"


def has_override_check(function: Function) -> bool:
    """Return whether a function of torch is Python code that checks for overrides first."""
    return (
        isinstance(function, types.FunctionType)
        and function.__globals__.get("__name__") in _MODULES
        and any(name.startswith(_OVERRIDE_CHECK) for name in function.__code__.co_names)
    )


def copy_without_override_check(function: Function, **replaced_globals: Function) -> Function:
    """Return a copy of a torch function without its check for overrides, so that modes see its inner calls.

    `replaced_globals` replace functions with the same names in the module of the function.
    """
    questions = [name for name in function.__code__.co_names if name.startswith(_OVERRIDE_CHECK)]
    scope = {**function.__globals__, **dict.fromkeys(questions, _return_false), **replaced_globals}
    # `torch.nn.init` calls the check as `torch.overrides.<name>`, so replace `torch`.
    if "overrides" in function.__code__.co_names:
        scope["torch"] = _TORCH
    made = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    # FunctionType does not accept keyword defaults, so set them here.
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _return_false(*args: object) -> bool:
    return False


class _OverrideCheckStub:
    """Replace the module torch or `torch.overrides` in a copied function, so that checks for overrides are false."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> object:
        found = getattr(self._module, name)
        if found is torch.overrides:
            return _OverrideCheckStub(found)
        return _return_false if name.startswith(_OVERRIDE_CHECK) else found


_TORCH = _OverrideCheckStub(torch)
