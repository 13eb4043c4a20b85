"""Run the layers of a sharded model on its mesh, which the outermost call enters once.

An activation checkpoint recomputes a part of the model in the backward pass, when no call of the model is open. So its
function is bound to the mesh, and to functions that gather the same weights again.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

from layoutmap.adapters.protocol import ScopeContext
from layoutmap.engines.patches import AttributePatch, PatchGroup, set_attribute_temporarily
from layoutmap.engines.tested import check_names_exist, is_older_than
from layoutmap.engines.torch.backward import get_backward_pass_id
from layoutmap.engines.torch.dtensor_ops import ProductReductionMode
from layoutmap.engines.torch.operators import Function

# From torch 2.14 on, `checkpoint` calls the function with the suffix `_impl`, so patch that one.
_GENERATOR = "_checkpoint_without_reentrant_generator" + ("" if is_older_than("torch", "2.14") else "_impl")
check_names_exist("torch", (torch_checkpoint, f"{_GENERATOR} CheckpointFunction"))


class _ThreadState(threading.local):
    """The state that calls of sharded models have on one thread.

    Attributes:
        context: The scope of the sharded model that is being called, or None.
        is_uneven: Whether the batch dim cannot split the batch of this call evenly.
        is_recording: Whether a graph is being recorded.
        call: The module call of which a graph is recorded.
        compiled: Compiled modules for a caller that Dynamo compiles, by the `ShardedForward` of each.
        gatherings: For the weights that are gathered now, functions that gather them again, outermost module first.
    """

    context: ScopeContext | None = None
    is_uneven = False
    is_recording = False
    call: Any = None
    compiled: Mapping[object, Any] = MappingProxyType({})
    gatherings: tuple[Callable[[], AbstractContextManager[None]], ...] = ()


thread_state = _ThreadState()


def is_in_model_call() -> bool:
    """Return whether a call of a sharded model is running on this thread."""
    return thread_state.context is not None


@contextmanager
def compute_on_mesh(context: ScopeContext) -> Generator[None]:
    """Run this thread's torch operations on the mesh of a scope until the block ends."""
    with (
        set_attribute_temporarily(thread_state, "context", context),
        _CHECKPOINTS.activate(),
        _replace_inference_mode_temporarily(),
        context.engine.run_on(context.policy.mesh, context.options.own.draws),
    ):
        yield


@contextmanager
def reduce_partial_sums_early(is_uneven: bool) -> Generator[None]:
    """Reduce partial sums immediately until the block ends, if the batch dim cannot split the batch evenly."""
    reduction = ProductReductionMode() if is_uneven else nullcontext()
    with set_attribute_temporarily(thread_state, "is_uneven", is_uneven), reduction:
        yield


def mark_graph_recording_temporarily() -> AbstractContextManager[None]:
    """Mark this thread as recording a graph until the block ends, so that inner modules compile no graphs."""
    return set_attribute_temporarily(thread_state, "is_recording", True)


@contextmanager
def _replace_inference_mode_temporarily() -> Generator[None]:
    """Replace `torch.inference_mode` by `no_grad` until the block ends, because DTensors have no views there."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


def _bind_to_current_mesh(function: Function) -> Function:
    """Wrap a checkpointed function to recompute on the present mesh, with the same weights gathered."""
    if thread_state.is_recording:
        raise RuntimeError(
            "an activation checkpoint recomputes after the graph is recorded, and would not read the graph's inputs: "
            "compile the checkpointed modules instead"
        )
    state = thread_state
    context, is_uneven, gatherings = state.context, state.is_uneven, state.gatherings
    if context is None:
        return function

    @functools.wraps(function)
    def run_on_mesh(*args: object, **kwargs: object) -> object:
        with ExitStack() as stack:
            if not is_in_model_call():
                stack.enter_context(compute_on_mesh(context))
                stack.enter_context(reduce_partial_sums_early(is_uneven))
            if get_backward_pass_id() >= 0:
                for gather in gatherings:  # outer modules have freed the weights, so gather them again
                    stack.enter_context(gather())
            return function(*args, **kwargs)

    return run_on_mesh


def _wrap_checkpoint_generator(generator: Function) -> Function:
    @functools.wraps(generator)
    def call_generator(function: Function, *args: object, **kwargs: object) -> object:
        return generator(_bind_to_current_mesh(function), *args, **kwargs)

    return call_generator


def _wrap_reentrant_checkpoint(original: Function) -> object:
    class CheckpointOnCurrentMesh:  # torch uses only this class's `apply`
        @staticmethod
        def apply(function: Function, *args: object) -> object:
            return original.apply(_bind_to_current_mesh(function), *args)  # pyright: ignore[reportFunctionMemberAccess]

    return CheckpointOnCurrentMesh


_CHECKPOINTS = PatchGroup(
    [
        AttributePatch(torch_checkpoint, _GENERATOR, _wrap_checkpoint_generator),
        AttributePatch(torch_checkpoint, "CheckpointFunction", _wrap_reentrant_checkpoint),
    ]
)
