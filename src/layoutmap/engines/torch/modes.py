"""List torch's function and dispatch modes, and leave them temporarily."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

import torch

from layoutmap.engines.tested import ImportErrorConverter, check_names_exist

with ImportErrorConverter("torch"):
    import torch.utils._python_dispatch as _dispatch
    from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode  # pyright: ignore[reportUnknownVariableType]
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

check_names_exist("torch", (torch._C, "_DisableTorchDispatch"))

P = ParamSpec("P")
R = TypeVar("R")

list_function_modes = _get_current_function_mode_stack
"""Return the active torch function modes of this thread, the innermost last."""

list_dispatch_modes = _get_current_dispatch_mode_stack
"""Return the active torch dispatch modes of this thread, the innermost last."""

correct_aliases: Callable[..., object] = cast(Any, _dispatch).return_and_correct_aliasing
"""Make the wrapped results of a view or in-place operator share the memory of its wrapped arguments."""

disable_function_modes = torch._C.DisableTorchFunction  # DisableTorchFunctionSubclass would not disable modes
"""Make a context in which functions are called without function modes."""


@contextmanager
def disable_modes() -> Generator[None]:
    """Call operators without function modes and dispatch modes until the block ends."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():  # pyright: ignore[reportUnknownMemberType]
        yield


def skip_function_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that runs without torch function modes."""

    @functools.wraps(function)
    def call_without_modes(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call_without_modes


@contextmanager
def suspend_function_modes() -> Generator[None]:
    """Leave all function modes of this thread while the `with` block runs. The block may enter other modes."""
    modes = list_function_modes()
    # Pop the modes one by one, because torch has no context that leaves several modes.
    for _ in modes:
        _pop_mode()
    try:
        yield
    finally:
        for mode in modes:  # push the modes in their original order
            _push_mode(mode)
