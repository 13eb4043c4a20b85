"""Inspect the running backward pass, and the hooks that decide which tensors autograd saves."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import checkpoint

from layoutmap.engines.tested import Needed, check_names

with Needed("torch"):
    from torch._C import _current_graph_task_id

    _ENGINE: Any = torch.autograd.Variable._execution_engine
    _SAVING: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]

check_names("torch", (torch._C, "_current_autograd_node"), (_SAVING, "_top_saved_tensors_default_hooks"))  # pyright: ignore[reportUnknownArgumentType]
check_names("torch", (checkpoint, "_checkpoint_hook _recomputation_hook"))

get_backward_pass = _current_graph_task_id
"""Return the number of this thread's backward pass, or -1 outside a backward pass."""

Ctx = Any
"""The context of an autograd function, on which forward stores attributes for backward."""


if TYPE_CHECKING:

    class AutogradFunction(torch.autograd.Function):
        """Add a typed `apply` to `torch.autograd.Function`."""

        apply: Callable[..., Any]
else:
    AutogradFunction = torch.autograd.Function


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the running backward pass. Only hooks of that pass may use this."""
    _ENGINE.queue_callback(function)  # torch drops the callback if the pass fails


def get_backward_node() -> str:
    """Return the name of the autograd node that runs on this thread, or "" outside of backward passes."""
    node: Any = torch._C._current_autograd_node()
    return node.name() if node is not None else ""


def get_saving_hooks() -> Any:
    """Return the hooks that decide which tensors autograd saves: an object, a function, or None."""
    hooks = _SAVING._top_saved_tensors_default_hooks(True)  # True: also while Dynamo traces
    return None if hooks is None else getattr(hooks[0], "__self__", hooks[0])


def is_checkpoint(saver: object) -> bool:
    """Return whether the hooks belong to an activation checkpoint, in its first or its recomputing pass."""
    return getattr(saver, "__qualname__", "").startswith(("_checkpoint_hook.", "_recomputation_hook."))
