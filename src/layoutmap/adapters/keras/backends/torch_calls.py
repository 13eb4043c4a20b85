"""Call layers on the mesh with unsharded inputs and outputs. Gradients pass both ways."""

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
from layoutmap.adapters.keras.wraps import get_call
from layoutmap.core.layout import Layout
from layoutmap.engines.patches import set_temporarily
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.dtensor_ops import (
    SummingUp,
    enable_dtensor_ops,
    is_batch_divisible,
    note_redistributed,
    reduce_gradient,
)
from layoutmap.engines.torch.placing import full_tensor, reduce_partial


def place_on_mesh(values: object, session: KerasSession) -> Any:
    """Return unsharded arrays on the mesh, sharded along the first axis like the batch if it divides."""
    return place_batch(values, session, _is_unsharded_array)


def unshard_results(values: object) -> Any:
    """Replace nested DTensors by unsharded tensors through which gradients flow."""
    return keras.tree.map_structure(_unshard_value, values, none_is_leaf=True)


def _is_unsharded_array(value: object) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return is_tensor or (isinstance(value, np.ndarray) and value.dtype.kind in "biufcV")


# -- the mesh


@contextmanager
def compute_on_mesh(session: KerasSession) -> Generator[None]:
    """Compute with DTensors of the scope's mesh correctly until the block ends."""
    native = session.engine.native(session.policy.replicated(0), 0)[0]
    with simulation.simulate_mesh(native), enable_dtensor_ops(native):
        yield


@contextmanager
def run_outer_call(session: KerasSession, values: object) -> Generator[None]:
    """Compute the thread's outermost call or step on the mesh until the block ends."""
    here = session.on_thread
    here.sums_up = not all(map(is_batch_divisible, keras.tree.flatten(values)))
    sums = SummingUp() if here.sums_up else nullcontext()
    # Take the session's lock first, as weight creation does. Another order could deadlock two threads.
    with (
        set_temporarily(here, "call_depth", here.call_depth + 1),
        session.lock,
        compute_on_mesh(session),
        sums,
    ):
        yield


def _is_running(session: KerasSession) -> bool:
    return session.on_thread.call_depth > 0


def _map_values(change: Callable[[Any], object], values: object) -> Any:
    return keras.tree.map_structure(change, values, none_is_leaf=True)


def _has_no_values(session: KerasSession) -> bool:
    """Return whether Keras only infers shapes, with symbols or placeholders."""
    return is_symbolic_device() or (session.context.plan_only and in_stateless_scope())


# -- calls


def wrap_call(layer: keras.Layer, session: KerasSession, name: str) -> Callable[..., object]:
    """Return a layer's `call` that moves unsharded tensors to the mesh and back in the outermost layer."""
    function = _wrap_weight_layouts(layer, session, name)

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        if _is_running(session):
            if session.on_thread.sums_up:
                args, kwargs = _map_values(reduce_gradient, (args, kwargs))
            # Convert once here, not at each use. The rows of a row-sharded embedding are a partial sum, too.
            return _constrain_to_batch_layout(
                _map_values(reduce_partial, function(*args, **kwargs)), layer, session
            )
        given = keras.tree.flatten((args, kwargs))
        tensors = [each for each in given if isinstance(each, (torch.Tensor, np.ndarray))]
        if not tensors or _has_no_values(session):
            return function(*args, **kwargs)
        session.refuse_in_a_plan(layer.name)
        stays = any(isinstance(each, DTensor) for each in tensors)
        args, kwargs = place_on_mesh((args, kwargs), session)
        with run_outer_call(session, (args, kwargs)):
            results = function(*args, **kwargs)
        return results if stays else unshard_results(results)

    return call


def _wrap_weight_layouts(layer: keras.Layer, session: KerasSession, name: str) -> Callable[..., object]:
    """Wrap a layer's `call` to compute with weights in their compute layouts.

    What is sharded over the dim of the batch, too, is gathered for the call, as FSDP does it; the gradient goes the
    same way back, reduced and scattered.
    """
    function = get_call(layer, name)

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        gathered = _find_computing_layouts(layer, session) if _is_running(session) else []
        if not gathered:
            return function(*args, **kwargs)
        before = [variable._value for variable, _ in gathered]
        try:
            for variable, layout in gathered:
                stored = variable._value
                variable._value = session.engine.relayout(stored, layout, pad=True)
                # a layer may assign to the weight, as spectral norms do
                note_redistributed(stored, variable._value)
            return function(*args, **kwargs)
        finally:
            for (variable, _), value in zip(gathered, before, strict=True):
                variable._value = value

    return call


def _find_computing_layouts(layer: keras.Layer, session: KerasSession) -> list[tuple[keras.Variable, Layout]]:
    """Return the weights of a layer with another compute layout than their stored one, and that layout."""
    found: list[tuple[keras.Variable, Layout]] = []
    for variable in layer._trainable_variables:
        layout = getattr(variable, "layout", None)
        if layout is not None:
            computing_layout = session.policy.derive_compute_layout(layout)
            if computing_layout != layout:
                found.append((variable, computing_layout))
    return found


def wrap_own_losses(method: Callable[..., object], session: KerasSession) -> Callable[..., object]:
    """Wrap a layer's loss method to return unsharded results outside calls and steps."""

    @functools.wraps(method)
    def compute_losses() -> object:
        if _is_running(session) or _has_no_values(session):
            return method()
        with compute_on_mesh(session):
            return unshard_results(method())

    return compute_losses


def _constrain_to_batch_layout(outputs: object, layer: object, session: KerasSession) -> object:
    """Shard a model's output in a step only along the batch, because losses reduce over other axes."""
    if session.on_thread.model_in_step is not layer:
        return outputs
    return place_batch(outputs, session, lambda value: isinstance(value, torch.Tensor))


# -- off the mesh


def _unshard_value(value: object) -> object:
    if not isinstance(value, DTensor):
        return value
    with simulation.simulate_mesh(value.device_mesh):
        return full_tensor(value).clone()
