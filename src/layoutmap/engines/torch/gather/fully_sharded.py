"""Access the state and steps of torch's `fully_shard` without its hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from layoutmap.engines.tested import make_unsupported_release_error
from layoutmap.engines.torch.modes import skip_function_modes

_OF_STATE = (
    *("_lazy_init", "_pre_forward", "_post_forward", "_pre_backward", "_root_post_backward_final_callback"),
    *("_reset_iter_state", "_training_state", "_state_ctx", "_comm_ctx", "_fsdp_param_groups"),
)
_OF_GROUP = (
    *("fsdp_params", "is_unsharded", "wait_for_unshard", "post_backward", "_to_sharded"),
    *("_training_state", "_all_gather_result", "_post_forward_indices"),
)


def find_fully_sharded_dims(root: torch.nn.Module) -> tuple[str, ...]:
    """Return the mesh dims over which `fully_shard` shards the weights of a module and its submodules."""
    if not any(isinstance(module, FSDPModule) for module in root.modules()):
        return ()
    from torch.distributed.fsdp import fully_shard  # imported here, because the import is slow

    names: dict[str, None] = {}
    for module in root.modules():
        if isinstance(module, FSDPModule):
            state: Any = fully_shard.state(module)  # pyright: ignore[reportFunctionMemberAccess]
            for group in state._fsdp_param_groups:
                mesh, dim = group.mesh_info.mesh, getattr(group.mesh_info, "shard_mesh_dim", None)
                if mesh.mesh_dim_names and dim is not None:
                    names[mesh.mesh_dim_names[dim]] = None
    return tuple(names)


class FullyShardState:
    """Gather, free, and reduce the weights of a module with the parts of `fully_shard`, without its hooks.

    Args:
        module: The module.
        is_asynchronous: Whether a gather is waited for only when its result is needed.
    """

    def __init__(self, module: torch.nn.Module, *, is_asynchronous: bool) -> None:
        from torch.distributed.fsdp import fully_shard  # imported here, because the import is slow

        self._module = module
        self._state: Any = fully_shard.state(module)  # pyright: ignore[reportFunctionMemberAccess]
        self._group: Any = next(iter(self._state._fsdp_param_groups), None)
        if self._group is not None:
            self._group.unshard_async_op = is_asynchronous  # if False, a CPU waits where a gather starts
        missing = [name for name in _OF_STATE if not hasattr(self._state, name)]
        missing += [name for name in _OF_GROUP if self._group is not None and not hasattr(self._group, name)]
        if missing:
            raise make_unsupported_release_error("torch", f"fully_shard: {', '.join(missing)}")
        self._state._root_post_backward_final_callback = skip_function_modes(
            self._state._root_post_backward_final_callback
        )

    def call_before_reducing_gradients(self, function: Callable[[], object]) -> None:
        """Register a function that is called before each reduction of gradients."""
        if self._group is not None:
            reduce = self._group.post_backward

            def call_function_and_reduce_gradients(*unused: object) -> None:
                function()
                reduce(*unused)

            self._group.post_backward = call_function_and_reduce_gradients

    def initialize_before_first_call(self) -> None:
        """Initialize the state of a root module, when all of its submodules are known."""
        self._state._lazy_init()

    @property
    def gathered_parameters(self) -> list[DTensor]:
        """Return the gathered parameters, or an empty list before the first call."""
        return [each.unsharded_param for each in self._group.fsdp_params] if self._group else []

    @property
    def is_call_running(self) -> bool:
        """Whether a call of the module, or of a module that contains it, is running."""
        return self._state._state_ctx.iter_forward_root is not None

    @property
    def is_gathered(self) -> bool:
        """Whether the gathered parameters have values."""
        return self._group is not None and self._group.is_unsharded

    @property
    def is_in_backward(self) -> bool:
        """Whether the backward pass of the module has begun and not ended."""
        both = (self._state, self._group)
        return all(each._training_state.name == "PRE_BACKWARD" for each in both if each is not None)

    @property
    def has_failed_backward(self) -> bool:
        """Whether an earlier backward pass began and did not end, because it failed."""
        return self._state._state_ctx.post_backward_final_callback_queued

    def reset_after_failed_backward(self) -> None:
        """Reset the state that a failed backward pass left in all modules."""
        states = self._state._state_ctx.all_states
        states[0]._reset_iter_state()  # only the root module, which is the first one, has this state
        for each in (p for state in states for group in state._fsdp_param_groups for p in group.fsdp_params):
            each.unsharded_accumulated_grad = None
            if hasattr(each, "_unsharded_param"):
                each.unsharded_param.grad = None

    def gather_for_forward(self) -> None:
        """Gather the parameters for the forward pass."""
        # Pass no arguments, because torch would convert their dtype and register backward hooks on them.
        self._state._pre_forward(self._module, (), {})

    def finish_forward(self) -> None:
        """Free the gathered parameters, unless the backward pass reuses them."""
        self._state._post_forward(self._module, (), None)  # torch would register a hook on a result

    def free_gathered_parameters(self) -> None:
        """Free the gathered parameters. A gather in progress is waited for."""
        if self._group is not None and (
            self._group.is_unsharded or self._group._all_gather_result is not None
        ):
            self._group.wait_for_unshard()  # otherwise a running gather would write to the freed memory
            self._group._to_sharded()

    def forget_call_order(self) -> None:
        """Clear torch's record of module calls, which only a backward pass would clear."""
        for state in self._state._state_ctx.all_states:
            for group in state._fsdp_param_groups:
                group._post_forward_indices.clear()
        self._state._comm_ctx.post_forward_order.clear()

    def gather_for_backward(self) -> None:
        """Gather the parameters in a backward pass. Torch reduces the gradients at the latest when the pass ends."""
        self._state._pre_backward(None)

    def reduce_gradients(self) -> None:
        """Reduce the gradients and free the gathered parameters."""
        if self._group is not None:
            self._group.post_backward()
