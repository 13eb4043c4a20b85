"""Run training, test, and predict steps and optimizer updates on the mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import keras
import torch

from layoutmap.adapters.keras.backends.torch_calls import (
    compute_on_mesh,
    enter_outermost_call,
    place_on_mesh,
    unshard_results,
)
from layoutmap.adapters.keras.protocol import KerasSession, WrappedMethods
from layoutmap.adapters.keras.training import (
    build_model_for_batch,
    compare_batch_between_processes,
    make_step_factory_wrappers,
    materialize_training_variables,
)
from layoutmap.core.errors import ScopeError
from layoutmap.engines.agreement import CallComparisonSchedule
from layoutmap.engines.patches import set_attribute_temporarily
from layoutmap.engines.torch.dtensor_ops import check_equal_random_draws_in_block


def make_training_method_wrappers(model: Any, session: KerasSession) -> WrappedMethods:
    """Return wrappers of a model's methods, by name. They place each batch on the mesh, and run the steps there."""
    schedule = CallComparisonSchedule()

    def make_step(step_name: str, make_keras_step: Callable[[], Callable[..., object]]) -> _MeshStep:
        _check_no_jit_compile(model)
        return _MeshStep(model, session, make_keras_step(), schedule)

    return make_step_factory_wrappers(model, session, schedule, make_step)


class _MeshStep:
    """Place a step's batch on the mesh, run the step there, and return unsharded results."""

    def __init__(
        self,
        model: keras.Model,
        session: KerasSession,
        step: Callable[..., object],
        schedule: CallComparisonSchedule,
    ) -> None:
        self._model = model
        self._session = session
        self._step = step
        self._schedule = schedule

    def __call__(self, data: Sequence[object]) -> object:
        model, session = self._model, self._session
        if build_model_for_batch(model, session, data[0]):
            materialize_training_variables(model, session)
        session.raise_if_plan_only(model.name)
        with set_attribute_temporarily(session.thread_state, "model_in_step", model):
            is_compared = compare_batch_between_processes(data, session, self._schedule)
            batches = [place_on_mesh(batch, session) for batch in data]
            native = session.engine.make_native_layout(session.policy.make_replicated_layout(0), 0)[0]
            draws = (
                check_equal_random_draws_in_block(native, session.context.gather_from_processes)
                if is_compared
                else nullcontext()
            )
            with draws, enter_outermost_call(session, batches):
                results = self._step(batches)
        with torch.no_grad():
            return unshard_results(results)


def _check_no_jit_compile(model: keras.Model) -> None:
    if model.jit_compile:
        raise ScopeError(
            f"{model.name}: jit_compile=True does not work for sharded models on torch",
            why="torch.compile does not trace a Keras step that converts unsharded tensors to a mesh",
            fix="leave jit_compile out of model.compile(), or run this model on JAX",
        )


def make_function_that_refuses_export(model: keras.Model) -> Callable[..., object]:
    """Return a replacement for a model's `export`. It raises a `ScopeError` with an alternative."""

    @functools.wraps(model.export)
    def raise_export_error(*args: object, **kwargs: object) -> object:
        raise ScopeError(
            f"{model.name}: a sharded model cannot be exported on torch",
            why="the export would contain the shards of a mesh",
            fix="save it, load it outside of a scope by keras.models.load_model, and export that model",
        )

    return raise_export_error


def make_apply_wrapper(optimizer: keras.Optimizer, session: KerasSession) -> Callable[..., object]:
    """Return a wrapper of `apply` that runs on the mesh, with each gradient in the layout of its weight."""
    original = optimizer.apply

    @functools.wraps(original)
    def apply_on_mesh(
        grads: Iterable[object], trainable_variables: Iterable[keras.Variable] | None = None
    ) -> object:
        weights = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
        grads = list(grads)
        if not optimizer.built:
            with session.defer_variables():
                optimizer.build(weights)
        with compute_on_mesh(session):
            laid_out = [_relayout_gradient(g, v, session) for g, v in zip(grads, weights, strict=True)]
            return original(laid_out, trainable_variables and weights)

    return apply_on_mesh


def _relayout_gradient(gradient: object, weight: keras.Variable, session: KerasSession) -> object:
    """Return a gradient in the layout of its weight."""
    layout = getattr(weight, "layout", None)
    if layout is None or not isinstance(gradient, torch.Tensor):
        return gradient
    return session.engine.relayout(gradient.detach(), layout, pad=True)
