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
from layoutmap.adapters.keras.wraps import get_call_method
from layoutmap.core.layout import Layout
from layoutmap.engines.patches import set_attribute_temporarily
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.dtensor_ops import (
    ProductReductionMode,
    enable_dtensor_ops_temporarily,
    is_batch_divisible,
    record_copy,
    reduce_gradient_in_backward,
)
from layoutmap.engines.torch.placing import gather_if_sharded, reduce_if_partial


def place_on_mesh(values: object, session: KerasSession) -> Any:
    """Shard the unsharded arrays in nested values along the first axis, or replicate them if that is uneven."""
    return place_batch(values, session, _is_unsharded_array)


def unshard_results(values: object) -> Any:
    """Replace nested DTensors by unsharded tensors through which gradients flow."""
    return keras.tree.map_structure(_unshard_tensor, values, none_is_leaf=True)


def _is_unsharded_array(value: object) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return is_tensor or (isinstance(value, np.ndarray) and value.dtype.kind in "biufcV")


# -- the mesh


@contextmanager
def compute_on_mesh(session: KerasSession) -> Generator[None]:
    """Simulate the scope's mesh if needed, and correct DTensor's operations, until the block ends."""
    native = session.engine.make_native_layout(session.policy.make_replicated_layout(0), 0)[0]
    with simulation.simulate_ranks_of_mesh(native), enable_dtensor_ops_temporarily(native):
        yield


@contextmanager
def enter_outermost_call(session: KerasSession, inputs: object) -> Generator[None]:
    """Run the thread's outermost call or step, which has these inputs, on the mesh until the block ends."""
    here = session.thread_state
    here.has_replicated_inputs = not all(map(is_batch_divisible, keras.tree.flatten(inputs)))
    sums = ProductReductionMode() if here.has_replicated_inputs else nullcontext()
    # Two threads could deadlock with different orders of locks, so take the session's lock first everywhere.
    with (
        set_attribute_temporarily(here, "call_depth", here.call_depth + 1),
        session.lock,
        compute_on_mesh(session),
        sums,
    ):
        yield


def _is_in_call(session: KerasSession) -> bool:
    """Return whether a call or step of the scope is running on this thread."""
    return session.thread_state.call_depth > 0


def _map_nested_values(function: Callable[[Any], object], values: object) -> Any:
    return keras.tree.map_structure(function, values, none_is_leaf=True)


def _is_inferring_shapes(session: KerasSession) -> bool:
    """Return whether Keras only infers shapes, with symbols or placeholders."""
    return is_symbolic_device() or (session.context.plan_only and in_stateless_scope())


# -- calls


def make_mesh_call_wrapper(
    layer: keras.Layer, session: KerasSession, method_name: str
) -> Callable[..., object]:
    """Return a wrapper of a layer's `call`. The outermost call moves inputs to the mesh, and results back."""
    function = _make_weight_gathering_call_wrapper(layer, session, method_name)

    @functools.wraps(function)
    def call_on_mesh(*args: object, **kwargs: object) -> object:
        if _is_in_call(session):
            if session.thread_state.has_replicated_inputs:
                args, kwargs = _map_nested_values(reduce_gradient_in_backward, (args, kwargs))
            # Reduce a partial sum, such as rows of a row-sharded embedding, once here instead of at each use.
            return _constrain_to_batch_layout(
                _map_nested_values(reduce_if_partial, function(*args, **kwargs)), layer, session
            )
        given = keras.tree.flatten((args, kwargs))
        tensors = [each for each in given if isinstance(each, (torch.Tensor, np.ndarray))]
        if not tensors or _is_inferring_shapes(session):
            return function(*args, **kwargs)
        session.raise_if_plan_only(layer.name)
        stays = any(isinstance(each, DTensor) for each in tensors)
        args, kwargs = place_on_mesh((args, kwargs), session)
        with enter_outermost_call(session, (args, kwargs)):
            results = function(*args, **kwargs)
        return results if stays else unshard_results(results)

    return call_on_mesh


def _make_weight_gathering_call_wrapper(
    layer: keras.Layer, session: KerasSession, method_name: str
) -> Callable[..., object]:
    """Return a wrapper of a layer's `call` that computes with weights in their compute layouts.

    An axis that is sharded over the dim of the batch is gathered for the call, as in FSDP. The gradient is reduced and
    scattered back to the stored layout.
    """
    function = get_call_method(layer, method_name)

    @functools.wraps(function)
    def call_with_gathered_weights(*args: object, **kwargs: object) -> object:
        gathered = _list_weights_to_gather(layer, session) if _is_in_call(session) else []
        if not gathered:
            return function(*args, **kwargs)
        before = [variable._value for variable, _ in gathered]
        try:
            for variable, layout in gathered:
                stored = variable._value
                variable._value = session.engine.relayout(stored, layout, pad=True)
                # A layer may assign to the gathered weight, as spectral norms do, so record which weight it copies.
                record_copy(stored, variable._value)
            return function(*args, **kwargs)
        finally:
            for (variable, _), value in zip(gathered, before, strict=True):
                variable._value = value

    return call_with_gathered_weights


def _list_weights_to_gather(layer: keras.Layer, session: KerasSession) -> list[tuple[keras.Variable, Layout]]:
    """Return pairs of a weight and its compute layout, for a layer's weights that are stored in other layouts."""
    found: list[tuple[keras.Variable, Layout]] = []
    for variable in layer._trainable_variables:
        layout = getattr(variable, "layout", None)
        if layout is not None:
            computing_layout = session.policy.derive_compute_layout(layout)
            if computing_layout != layout:
                found.append((variable, computing_layout))
    return found


def wrap_to_unshard_losses(method: Callable[..., object], session: KerasSession) -> Callable[..., object]:
    """Wrap a layer's loss method to return unsharded results outside calls and steps."""

    @functools.wraps(method)
    def compute_losses() -> object:
        if _is_in_call(session) or _is_inferring_shapes(session):
            return method()
        with compute_on_mesh(session):
            return unshard_results(method())

    return compute_losses


def _constrain_to_batch_layout(outputs: object, layer: object, session: KerasSession) -> object:
    """Return outputs sharded only along the batch if `layer` is the model in its step, and otherwise unchanged."""
    if session.thread_state.model_in_step is not layer:
        return outputs
    return place_batch(outputs, session, lambda value: isinstance(value, torch.Tensor))


def _unshard_tensor(value: object) -> object:
    if not isinstance(value, DTensor):
        return value
    with simulation.simulate_ranks_of_mesh(value.device_mesh):
        return gather_if_sharded(value).clone()
