"""Run the layers of a sharded model on its mesh, which the outermost call enters once.

An activation checkpoint computes a part of the model again in the backward pass, when no call of the model is open. So
the function that it keeps is bound to the mesh, and to the weights that were gathered around it.
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
from layoutmap.engines.patches import Attribute, Patches, set_temporarily
from layoutmap.engines.tested import check_names, is_before
from layoutmap.engines.torch.backward import get_backward_pass
from layoutmap.engines.torch.dtensor_ops import SummingUp
from layoutmap.engines.torch.operators import Function

# From torch 2.14 on, `checkpoint` calls another function, and the one of this name only for programs that use it.
_GENERATOR = "_checkpoint_without_reentrant_generator" + ("" if is_before("torch", "2.14") else "_impl")
check_names("torch", (torch_checkpoint, f"{_GENERATOR} CheckpointFunction"))


class _ThreadState(threading.local):
    """The state of a thread.

    Attributes:
        context: The scope of the model that is called.
        is_odd: Whether its batch does not divide.
        is_recording: Whether a graph is recorded.
        call: Of which call.
        compiled: Compiled modules of a call in which Dynamo found a model, by the `Forward` of each.
        gatherings: Functions that gather again the weights that are gathered now, outermost first.
    """

    context: ScopeContext | None = None
    is_odd = False
    is_recording = False
    call: Any = None
    compiled: Mapping[object, Any] = MappingProxyType({})
    gatherings: tuple[Callable[[], AbstractContextManager[None]], ...] = ()


here = _ThreadState()


def is_running() -> bool:
    """Return whether a sharded model's call is open on this thread."""
    return here.context is not None


@contextmanager
def compute_on_mesh(context: ScopeContext) -> Generator[None]:
    """Run this thread's torch operations on the mesh of a scope until the block ends."""
    with (
        set_temporarily(here, "context", context),
        _CHECKPOINTS.activate(),
        _replace_inference_mode(),
        context.engine.run_on(context.policy.mesh, context.options.own.draws),
    ):
        yield


@contextmanager
def summing_up(is_odd: bool) -> Generator[None]:
    """While open, reduce partial sums at once if the batch does not divide."""
    with set_temporarily(here, "is_odd", is_odd), SummingUp() if is_odd else nullcontext():
        yield


def mark_recording() -> AbstractContextManager[None]:
    """Mark this thread as recording a graph until the block ends, so that inner modules compute uncompiled."""
    return set_temporarily(here, "is_recording", True)


@contextmanager
def _replace_inference_mode() -> Generator[None]:
    """Replace `torch.inference_mode` by `no_grad` until the block ends, since DTensors lack views there."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


def _bind_to_mesh(function: Function) -> Function:
    """Return a function that computes on this mesh with the same weights gathered, for an activation checkpoint."""
    if here.is_recording:  # the recomputation would read module attributes instead of graph inputs
        raise RuntimeError(
            "an activation checkpoint in it computes once more when the graph is recorded already"
        )
    context, is_odd, gatherings = here.context, here.is_odd, here.gatherings
    if context is None:
        return function

    @functools.wraps(function)
    def run_on_mesh(*args: object, **kwargs: object) -> object:
        with ExitStack() as stack:
            if not is_running():
                stack.enter_context(compute_on_mesh(context))
                stack.enter_context(summing_up(is_odd))
            if get_backward_pass() >= 0:
                for gather in gatherings:  # the outer module has freed the weights, so gather them again
                    stack.enter_context(gather())
            return function(*args, **kwargs)

    return run_on_mesh


def _wrap_generator(generator: Function) -> Function:
    @functools.wraps(generator)
    def wrap_function(function: Function, *args: object, **kwargs: object) -> object:
        return generator(_bind_to_mesh(function), *args, **kwargs)

    return wrap_function


def _wrap_reentrant(own: Function) -> object:
    class Wrapped:  # torch uses only this class's `apply`
        @staticmethod
        def apply(function: Function, *args: object) -> object:
            return own.apply(_bind_to_mesh(function), *args)  # pyright: ignore[reportFunctionMemberAccess]

    return Wrapped


_CHECKPOINTS = Patches(
    [
        Attribute(torch_checkpoint, _GENERATOR, _wrap_generator),
        Attribute(torch_checkpoint, "CheckpointFunction", _wrap_reentrant),
    ]
)
