"""The backward pass that runs on this thread, and what decides which tensors autograd saves for it."""

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
check_names("torch", (checkpoint, "_checkpoint_hook"))

backward_pass = _current_graph_task_id
"""The number of the backward pass that runs on this thread; -1 outside of one."""

Ctx = Any
"""The object on which the forward pass of a function leaves attributes of any name for its backward pass."""


if TYPE_CHECKING:

    class AutogradFunction(torch.autograd.Function):
        """`torch.autograd.Function`, whose `apply` has no type there."""

        apply: Callable[..., Any]
else:
    AutogradFunction = torch.autograd.Function


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward pass that runs now ends; to be called by a hook of that pass."""
    _ENGINE.queue_callback(function)  # of the pass: torch drops it where that fails


def gradient_of() -> str:
    """The name of what the gradient is computed of now, on this thread; empty outside of backward passes."""
    node: Any = torch._C._current_autograd_node()
    return node.name() if node is not None else ""


def saver() -> Any:
    """The hooks that decide which tensors autograd saves: an object with these methods, a function, or `None`."""
    hooks = _SAVING._top_saved_tensors_default_hooks(True)  # also while Dynamo traces
    return None if hooks is None else getattr(hooks[0], "__self__", hooks[0])


def is_checkpoint(saver: object) -> bool:
    """Whether an activation checkpoint decides: it keeps nothing, and computes once more."""
    return getattr(saver, "__qualname__", "").startswith("_checkpoint_hook.")
