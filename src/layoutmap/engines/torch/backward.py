"""Inspect the running backward pass, and the hooks that decide which tensors autograd saves."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import checkpoint

from layoutmap.engines.tested import ImportErrorConverter, check_names_exist

with ImportErrorConverter("torch"):
    from torch._C import _current_graph_task_id

    _ENGINE: Any = torch.autograd.Variable._execution_engine
    _SAVING: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]

check_names_exist("torch", (torch._C, "_current_autograd_node"))
check_names_exist("torch", (_SAVING, "_top_saved_tensors_default_hooks"))  # pyright: ignore[reportUnknownArgumentType]
check_names_exist("torch", (checkpoint, "_checkpoint_hook _recomputation_hook"))

get_backward_pass_id = _current_graph_task_id
"""Return the id of the backward pass that runs on this thread, or -1 if none runs."""

Ctx = Any
"""The context of an autograd function, on which forward stores attributes for backward."""


if TYPE_CHECKING:

    class TypedAutogradFunction(torch.autograd.Function):
        """Give `torch.autograd.Function` an `apply` with a return type."""

        apply: Callable[..., Any]
else:
    TypedAutogradFunction = torch.autograd.Function


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the running backward pass. Only hooks of that pass may use this."""
    _ENGINE.queue_callback(function)  # if the backward pass fails, torch does not call the function


def get_backward_node_name() -> str:
    """Return the name of the autograd node that runs on this thread, or "" outside of backward passes."""
    node: Any = torch._C._current_autograd_node()
    return node.name() if node is not None else ""


def get_saved_tensor_hooks() -> Any:
    """Return the object that has this thread's saved-tensor hooks as methods, or None if there are no hooks.

    If the hooks are not methods of one object, return the pack function.
    """
    hooks = _SAVING._top_saved_tensors_default_hooks(True)  # True: return the hooks even while Dynamo traces
    return None if hooks is None else getattr(hooks[0], "__self__", hooks[0])


def is_activation_checkpoint(hooks: object) -> bool:
    """Return whether saved-tensor hooks belong to an activation checkpoint, also while it recomputes."""
    return getattr(hooks, "__qualname__", "").startswith(("_checkpoint_hook.", "_recomputation_hook."))
