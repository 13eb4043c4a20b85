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
    place_on_mesh,
    run_outer_call,
    unshard_results,
)
from layoutmap.adapters.keras.protocol import KerasSession, WrappedMethods
from layoutmap.adapters.keras.training import (
    build_for_step,
    check_same_batch,
    make_step_wraps,
    materialize_for_training,
)
from layoutmap.core.errors import ScopeError
from layoutmap.engines.agreement import CallSchedule
from layoutmap.engines.patches import set_temporarily
from layoutmap.engines.torch.dtensor_ops import same_draws


def make_training_wraps(model: Any, session: KerasSession) -> WrappedMethods:
    """Return methods to wrap on a model so that its steps place each batch and run on the mesh."""
    schedule = CallSchedule()

    def step(name: str, own: Callable[[], Callable[..., object]]) -> _MeshStep:
        _refuse_compiling(model)
        return _MeshStep(model, session, own(), schedule)

    return make_step_wraps(model, session, schedule, step)


class _MeshStep:
    """A step that places its batch, runs on the mesh, and returns plain results."""

    def __init__(
        self, model: keras.Model, session: KerasSession, step: Callable[..., object], schedule: CallSchedule
    ) -> None:
        self._model = model
        self._session = session
        self._step = step
        self._schedule = schedule

    def __call__(self, data: Sequence[object]) -> object:
        model, session = self._model, self._session
        if build_for_step(model, session, data[0]):
            materialize_for_training(model, session)
        session.refuse_in_a_plan(model.name)
        with set_temporarily(session.on_thread, "model_in_step", model):
            is_compared = check_same_batch(data, session, self._schedule)
            batches = [place_on_mesh(batch, session) for batch in data]
            native = session.engine.native(session.policy.replicated(0), 0)[0]
            draws = same_draws(native, session.context.gather) if is_compared else nullcontext()
            with draws, run_outer_call(session, batches):
                results = self._step(batches)
        with torch.no_grad():
            return unshard_results(results)


def _refuse_compiling(model: keras.Model) -> None:
    if model.jit_compile:
        raise ScopeError(
            f"{model.name}: jit_compile=True does not work for sharded models on torch",
            why="torch.compile does not trace a Keras step that takes plain tensors to a mesh",
            fix="leave jit_compile out of model.compile(), or run this model on JAX",
        )


def make_export_refusal(model: keras.Model) -> Callable[..., object]:
    """Return an `export` that raises an error with an alternative."""

    @functools.wraps(model.export)
    def export(*args: object, **kwargs: object) -> object:
        raise ScopeError(
            f"{model.name}: a sharded model cannot be exported on torch",
            why="the export would contain the shards of a mesh",
            fix="save it, and export what keras.models.load_model returns outside of a scope",
        )

    return export


def wrap_apply(optimizer: keras.Optimizer, session: KerasSession) -> Callable[..., object]:
    """Return an `apply` that runs on the mesh, with each gradient in the layout of its weight."""
    apply_plain = optimizer.apply

    @functools.wraps(apply_plain)
    def apply(grads: Iterable[object], trainable_variables: Iterable[keras.Variable] | None = None) -> object:
        weights = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
        grads = list(grads)
        if not optimizer.built:
            with session.defer():
                optimizer.build(weights)
        with compute_on_mesh(session):
            laid_out = [_place_gradient(g, v, session) for g, v in zip(grads, weights, strict=True)]
            return apply_plain(laid_out, trainable_variables and weights)

    return apply


def _place_gradient(gradient: object, weight: keras.Variable, session: KerasSession) -> object:
    layout = getattr(weight, "layout", None)
    if layout is None or not isinstance(gradient, torch.Tensor):
        return gradient
    return session.engine.relayout(gradient.detach(), layout, pad=True)
