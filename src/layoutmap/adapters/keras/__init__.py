"""Keras 3 models, on any of its backends that is supported: subclassed, Functional and Sequential."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import numpy as np

from layoutmap.adapters import random_states
from layoutmap.adapters.keras.callback import CheckpointCallback as CheckpointCallback
from layoutmap.adapters.keras.checkpoints import KerasKeeping
from layoutmap.adapters.keras.derived import reduced_slots
from layoutmap.adapters.keras.hooks import installed
from layoutmap.adapters.keras.paths import find_variables, slot_path
from layoutmap.adapters.keras.private import check_keras, global_seed_state
from layoutmap.adapters.keras.protocol import backend_name, backend_of, read_variable
from layoutmap.adapters.keras.session import Session
from layoutmap.adapters.keras.training import complete, parents_by_name
from layoutmap.adapters.keras.wraps import session_of
from layoutmap.adapters.protocol import Adapter, ScopeContext
from layoutmap.core.errors import ScopeError


class KerasAdapter(KerasKeeping, Adapter):
    """Knows Keras 3; see `layoutmap.adapters.protocol`."""

    name = "keras"
    places_batches = True

    @property
    def engine_name(self) -> str:
        """The engine of the backend that Keras runs on."""
        return backend_of(backend_name()).engine_name

    def check(self) -> None:
        """Refuse a Keras, a backend or a place in which a scope cannot work."""
        backend = backend_of(backend_name())
        check_keras(backend.private_names())
        if backend.is_tracing():
            raise ScopeError(
                "a scope was opened inside a compiled function",
                why="variables are real arrays on real devices, and inside a trace there are none",
                fix="build the model outside, and call it inside",
            )

    def owns(self, model: object) -> bool:
        """Whether an object is a Keras layer or model."""
        return isinstance(model, keras.layers.Layer)

    def refused(self, library: str) -> AbstractContextManager[None]:
        """While open, Keras layers that are built here are refused: the scope is one for another library."""
        return installed()

    def begin(self, context: ScopeContext) -> Session:
        """A session for one scope."""
        backend = backend_of(backend_name())
        check_keras(backend.private_names())
        if not context.plan_only:
            backend.compute_on(context.policy.mesh)
        return Session(context, backend)

    @contextmanager
    def undisturbed(self) -> Generator[None]:
        """Restore the random states that Keras draws from afterwards."""
        generator = global_seed_state()
        value = None if generator is None else self.read(generator)
        try:
            with random_states.put_back():
                yield
        finally:
            if generator is not None:
                generator.assign(value)

    def set_seed(self, seed: int) -> None:
        """Seed Python, numpy and the backend."""
        keras.utils.set_random_seed(seed)

    def complete(self, model: object, batch: object) -> None:
        """Have a model make what it would make at its first call and training step; computes nothing."""
        complete(model, _x_of(batch))

    def with_optimizer(self, model: Any, optimizer: keras.Optimizer) -> object:
        """Return a model with an optimizer in place of its own, by its name or what makes it."""
        if optimizer is None:
            return model
        try:
            made = keras.optimizers.get(optimizer() if callable(optimizer) else optimizer)
        except ValueError as error:
            raise ScopeError(
                f"optimizer={optimizer!r}",
                why=str(error),
                fix='pass the name of a Keras optimizer, such as "adamw"',
            ) from error
        if getattr(model, "compiled", False):
            model.optimizer = made  # the loss stays
        else:
            model.compile(optimizer=made)
        return model

    def variables(self, model: keras.Model) -> dict[str, keras.Variable]:
        """The variables of a model by path: its own, then those of its optimizer."""
        found = find_variables(model)
        named = {f.path: f.variable for f in found}
        paths = {id(f.variable): f.path for f in found}
        optimizer = getattr(model, "optimizer", None)
        slots = list(optimizer.variables) if optimizer is not None else []
        taken = set(named)
        reduced = {id(each.slot): each for each in reduced_slots(optimizer)} if optimizer is not None else {}
        for slot, found_weight in zip(slots, parents_by_name(slots, model.trainable_variables), strict=True):
            known = reduced.get(id(slot))
            weight, kind = (known.weight, known.kind) if known else (found_weight, "")
            named[slot_path(slot, weight, paths.get(id(weight), ""), taken, kind)] = slot
        return named

    def context_of(self, model: keras.Model) -> ScopeContext | None:
        """Return the scope that a model, or any layer in it, was laid out in."""
        sessions = (session_of(layer) for layer in model._flatten_layers())
        return next((session.context for session in sessions if session is not None), None)

    def read(self, variable: keras.Variable) -> Any:
        """Return the global value of a variable, as a numpy array."""
        return read_variable(variable)

    def write(self, variable: keras.Variable, value: object) -> None:
        """Give a variable a value, of the engine or of numpy; it keeps its layout."""
        variable.assign(value)

    def forward(self, model: keras.Model, batch: object) -> object:
        """Return what a model returns for a batch, in inference."""
        with backend_of(backend_name()).comparing(model):
            return keras.tree.map_structure(np.asarray, model.predict_on_batch(_x_of(batch)))

    def gradients(self, model: keras.Model, batch: object) -> tuple[dict[str, float], dict[str, Any]]:
        """The losses of a batch, and the gradients that the model's step passes to its optimizer, by path."""
        x, y, sample_weight = _tensors(batch)
        backend = backend_of(backend_name())
        with backend.comparing(model):
            losses, gradients = backend.gradients(model, x, y, sample_weight)
        paths = {id(f.variable): f.path for f in find_variables(model)}
        named = zip(model.trainable_variables, gradients, strict=True)
        return _numbers(losses), {paths[id(v)]: gradient for v, gradient in named}

    def train_step(self, model: keras.Model, batch: Any) -> dict[str, float]:
        """One optimizer step of a compiled model on a batch; returns the numbers that it logs."""
        x, y, sample_weight = _tensors(batch)
        with backend_of(backend_name()).comparing(model):
            return _numbers(model.train_on_batch(x, y, sample_weight=sample_weight, return_dict=True))


def _tensors(batch: object) -> Any:
    """The parts of a batch as `fit` passes them to a step: on torch `train_on_batch` passes on arrays of numpy."""
    return keras.tree.map_structure(
        lambda each: keras.ops.convert_to_tensor(each) if isinstance(each, np.ndarray) else each,
        keras.utils.unpack_x_y_sample_weight(batch),
        none_is_leaf=True,
    )


def _numbers(logs: Any) -> dict[str, float]:
    return {name: float(value) for name, value in logs.items() if np.ndim(value) == 0}


def _x_of(batch: object) -> object:
    return keras.utils.unpack_x_y_sample_weight(batch)[0]


def adapter() -> KerasAdapter:
    """The adapter."""
    return KerasAdapter()
