"""Where the layers of a laid out model run: on its mesh, entered once by the outermost call.

A checkpoint of activations runs a part of the model once more, in the backward pass, when no call of the model is open.
What it runs then has to come to the mesh by itself, so the function that it keeps is made one that does.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

from layoutmap.adapters.protocol import ScopeContext
from layoutmap.engines.patches import Attribute, Patches, temporarily
from layoutmap.engines.tested import check_names
from layoutmap.engines.torch.dtensor_ops import SummingUp
from layoutmap.engines.torch.operators import Function

check_names("torch", (torch_checkpoint, "_checkpoint_without_reentrant_generator CheckpointFunction"))


class _Here(threading.local):
    """The state of a thread.

    Attributes:
        context: The scope of the model that is called.
        is_odd: Whether its batch does not divide.
        is_recording: Whether a graph is recorded.
        call: Of which call.
        compiled: Compiled modules of a call in which Dynamo found a model, by the `Forward` of each.
    """

    context: ScopeContext | None = None
    is_odd = False
    is_recording = False
    call: Any = None
    compiled: Mapping[object, Any] = MappingProxyType({})


here = _Here()


def is_running() -> bool:
    """Whether a call of a laid out model is open on this thread."""
    return here.context is not None


@contextmanager
def running(context: ScopeContext) -> Generator[None]:
    """While open, this thread computes on the mesh of a scope."""
    with (
        temporarily(here, "context", context),
        _CHECKPOINTS.used(),
        _with_versions(),
        context.engine.run_on(context.policy.mesh, context.options.own.draws),
    ):
        yield


@contextmanager
def summing_up(is_odd: bool) -> Generator[None]:
    """While open, sums over the mesh are made at once if a batch is odd, that is, does not divide."""
    with temporarily(here, "is_odd", is_odd), SummingUp() if is_odd else nullcontext():
        yield


def recording() -> AbstractContextManager[None]:
    """While open, this thread records a graph: what a model would have compiled is computed as it is."""
    return temporarily(here, "is_recording", True)


@contextmanager
def _with_versions() -> Generator[None]:
    """Under `torch.inference_mode`, which has no views of a `DTensor`, only no gradients."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


def _on_mesh_later(function: Function) -> Function:
    """A function for a checkpoint of activations to keep: it computes on the mesh whenever it is called."""
    if here.is_recording:  # with what modules hold then, which is not what the graph is given
        raise RuntimeError(
            "an activation checkpoint in it computes once more when the graph is recorded already"
        )
    context, is_odd = here.context, here.is_odd
    if context is None:
        return function

    @functools.wraps(function)
    def on_mesh(*args: object, **kwargs: object) -> object:
        if is_running():
            return function(*args, **kwargs)
        with running(context), summing_up(is_odd):
            return function(*args, **kwargs)

    return on_mesh


def _generating(generator: Function) -> Function:
    @functools.wraps(generator)
    def wrapped(function: Function, *args: object, **kwargs: object) -> object:
        return generator(_on_mesh_later(function), *args, **kwargs)

    return wrapped


def _reentrant(own: Function) -> object:
    class Wrapped:  # torch asks this name for `apply` alone
        @staticmethod
        def apply(function: Function, *args: object) -> object:
            return own.apply(_on_mesh_later(function), *args)  # pyright: ignore[reportFunctionMemberAccess]

    return Wrapped


_CHECKPOINTS = Patches(
    [
        Attribute(torch_checkpoint, "_checkpoint_without_reentrant_generator", _generating),
        Attribute(torch_checkpoint, "CheckpointFunction", _reentrant),
    ]
)
