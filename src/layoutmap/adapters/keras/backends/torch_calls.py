"""Calls of layers on the mesh: plain tensors go in and come out, and gradients pass both ways."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.keras.backends.torch_private import is_symbolic_device
from layoutmap.adapters.keras.private import in_stateless_scope
from layoutmap.adapters.keras.protocol import KerasSession
from layoutmap.adapters.keras.training import place_batch
from layoutmap.adapters.keras.wraps import call_of
from layoutmap.core.layout import Layout
from layoutmap.engines.patches import temporarily
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.dtensor_ops import (
    SummingUp,
    batch_divides,
    computing,
    note_redistributed,
    with_summed_gradient,
)
from layoutmap.engines.torch.placing import full_tensor, reduced


def placed(values: object, session: KerasSession) -> Any:
    """Return plain arrays on the mesh: each sharded along its first axis where the batch is and it divides."""
    return place_batch(values, session, _is_plain)


def plain(values: object) -> Any:
    """Return plain global tensors in the place of DTensors; gradients find their way back."""
    return keras.tree.map_structure(_off_mesh, values, none_is_leaf=True)


def _is_plain(value: object) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return is_tensor or (isinstance(value, np.ndarray) and value.dtype.kind in "biufcV")


# -- the mesh


@contextmanager
def on_mesh(session: KerasSession) -> Generator[None]:
    """While open, what is computed with DTensors of the scope's mesh is computed right."""
    native = session.engine.native(session.policy.replicated(0), 0)[0]
    with simulation.on_mesh(native), computing(native):
        yield


@contextmanager
def running(session: KerasSession, values: object) -> Generator[None]:
    """The same, for the outermost call on a thread, or a step: the layers called in it are not the outermost."""
    here = session.on_thread
    here.sums_up = not all(map(batch_divides, keras.tree.flatten(values)))
    sums = SummingUp() if here.sums_up else nullcontext()
    # The session's lock first, as where weights are made: two threads would else wait for each other.
    with temporarily(here, "call_depth", here.call_depth + 1), session.lock, on_mesh(session), sums:
        yield


def _is_running(session: KerasSession) -> bool:
    return session.on_thread.call_depth > 0


def _each(change: Callable[[Any], object], values: object) -> Any:
    return keras.tree.map_structure(change, values, none_is_leaf=True)


def _has_no_values(session: KerasSession) -> bool:
    """Whether Keras only finds out shapes: with symbols, or with placeholders where symbols do not do."""
    return is_symbolic_device() or (session.context.plan_only and in_stateless_scope())


# -- calls


def calling(layer: keras.Layer, session: KerasSession, name: str) -> Callable[..., object]:
    """The `call` of a layer, or what stands for it; the outermost one takes plain tensors to the mesh and back."""
    function = _with_weights(layer, session, name)

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        if _is_running(session):
            if session.on_thread.sums_up:
                args, kwargs = _each(with_summed_gradient, (args, kwargs))
            # Once here, not by each of those who use it. Rows of an embedding sharded by rows are a sum, too.
            return _by_rows(_each(reduced, function(*args, **kwargs)), layer, session)
        given = keras.tree.flatten((args, kwargs))
        tensors = [each for each in given if isinstance(each, (torch.Tensor, np.ndarray))]
        if not tensors or _has_no_values(session):
            return function(*args, **kwargs)
        session.refuse_in_a_plan(layer.name)
        stays = any(isinstance(each, DTensor) for each in tensors)
        args, kwargs = placed((args, kwargs), session)
        with running(session, (args, kwargs)):
            results = function(*args, **kwargs)
        return results if stays else plain(results)

    return call


def _with_weights(layer: keras.Layer, session: KerasSession, name: str) -> Callable[..., object]:
    """The `call` of a layer, in which its weights are in the layouts that they compute in.

    What is sharded over the dim of the batch, too, is gathered for the call, as FSDP does it; the gradient goes the
    same way back, reduced and scattered.
    """
    function = call_of(layer, name)

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        gathered = _computing_layouts(layer, session) if _is_running(session) else []
        if not gathered:
            return function(*args, **kwargs)
        before = [variable._value for variable, _ in gathered]
        try:
            for variable, layout in gathered:
                stored = variable._value
                variable._value = session.engine.relayout(stored, layout)
                note_redistributed(stored, variable._value)  # a layer may assign to it, as spectral norms do
            return function(*args, **kwargs)
        finally:
            for (variable, _), value in zip(gathered, before, strict=True):
                variable._value = value

    return call


def _computing_layouts(layer: keras.Layer, session: KerasSession) -> list[tuple[keras.Variable, Layout]]:
    """Return those of a layer's own weights that compute in another layout than they are stored in, and in which."""
    found: list[tuple[keras.Variable, Layout]] = []
    for variable in layer._trainable_variables:
        layout = getattr(variable, "layout", None)
        if layout is not None:
            computing_layout = session.policy.derive_compute_layout(layout)
            if computing_layout != layout:
                found.append((variable, computing_layout))
    return found


def own_losses(method: Callable[..., object], session: KerasSession) -> Callable[..., object]:
    """Return a method for losses of a layer; outside of calls and steps they are plain numbers."""

    @functools.wraps(method)
    def losses() -> object:
        if _is_running(session) or _has_no_values(session):
            return method()
        with on_mesh(session):
            return plain(method())

    return losses


def _by_rows(outputs: object, layer: object, session: KerasSession) -> object:
    """Return a model's output in a step, sharded along the batch only: losses look along the other axes."""
    if session.on_thread.model_in_step is not layer:
        return outputs
    return place_batch(outputs, session, lambda value: isinstance(value, torch.Tensor))


# -- off the mesh


def _off_mesh(value: object) -> object:
    if not isinstance(value, DTensor):
        return value
    with simulation.on_mesh(value.device_mesh):
        return full_tensor(value).clone()
