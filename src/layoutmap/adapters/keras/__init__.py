"""Support Keras 3 models: subclassed, Functional, and Sequential, on all supported backends."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import numpy as np

from layoutmap.adapters import random_states
from layoutmap.adapters.keras.callback import CheckpointCallback as CheckpointCallback
from layoutmap.adapters.keras.checkpoints import KerasKeeping
from layoutmap.adapters.keras.derived import find_reduced_slots
from layoutmap.adapters.keras.hooks import install_hooks
from layoutmap.adapters.keras.paths import find_variables, make_slot_path
from layoutmap.adapters.keras.private import check_keras, get_global_seed_state
from layoutmap.adapters.keras.protocol import get_backend, get_backend_name, read_variable
from layoutmap.adapters.keras.session import Session
from layoutmap.adapters.keras.training import complete, match_slots
from layoutmap.adapters.keras.wraps import get_session
from layoutmap.adapters.protocol import Adapter, ScopeContext
from layoutmap.core.errors import ScopeError
from layoutmap.core.layout import Layout
from layoutmap.core.variables import VariableSpec


class KerasAdapter(KerasKeeping, Adapter):
    """Adapter for Keras 3 models (see `layoutmap.adapters.protocol`)."""

    name = "keras"
    places_batches = True

    @property
    def engine_name(self) -> str:
        """Name of the engine for the Keras backend."""
        return get_backend(get_backend_name()).engine_name

    def explain_no_padding(self, variable: VariableSpec, layout: Layout) -> str:
        """Return why a variable cannot be stored padded, or an empty text if it can."""
        return get_backend(get_backend_name()).explain_no_padding(variable, layout)

    def check(self) -> None:
        """Raise for a Keras version, a backend, or a context in which a scope cannot work."""
        backend = get_backend(get_backend_name())
        check_keras(backend.list_private_names())
        if backend.is_tracing():
            raise ScopeError(
                "a scope was opened inside a compiled function",
                why="a trace has no real arrays on real devices, which variables need",
                fix="build the model outside, and call it inside",
            )

    def owns_model(self, model: object) -> bool:
        """Return whether an object is a Keras layer or model."""
        return isinstance(model, keras.layers.Layer)

    def refused(self, library: str) -> AbstractContextManager[None]:
        """Raise for Keras layers built until the block ends, because the scope is for another library."""
        return install_hooks()

    def begin(self, context: ScopeContext) -> Session:
        """Return a session for one scope."""
        backend = get_backend(get_backend_name())
        check_keras(backend.list_private_names())
        if not context.plan_only:
            backend.compute_on(context.policy.mesh)
        return Session(context, backend)

    @contextmanager
    def keep_random_states(self) -> Generator[None]:
        """Restore the random states of Python, numpy, and Keras when the block ends."""
        generator = get_global_seed_state()
        value = None if generator is None else self.read(generator)
        try:
            with random_states.keep_states():
                yield
        finally:
            if generator is not None:
                generator.assign(value)

    def set_seed(self, seed: int) -> None:
        """Seed Python, numpy and the backend."""
        keras.utils.set_random_seed(seed)

    def complete(self, model: object, batch: object) -> None:
        """Create, without computing, the variables that a first call and training step would create."""
        session = get_session(model)
        # JAX cannot multiply arrays on another mesh than that of `jax.set_mesh`, even in traced calls.
        with session.backend.leave_tracing() if session is not None else nullcontext():
            complete(model, _get_inputs(batch))

    def set_optimizer(self, model: keras.Model, optimizer: keras.Optimizer) -> object:
        """Set the optimizer of a model, given its name or a function that makes it, and return the model."""
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
            model.optimizer = made  # assign only the optimizer, so that the compiled loss stays
        else:
            model.compile(optimizer=made)
        return model

    def variables(self, model: keras.Model) -> dict[str, keras.Variable]:
        """Return the variables of a model and its optimizer by path."""
        found = find_variables(model)
        named = {f.path: f.variable for f in found}
        paths = {id(f.variable): f.path for f in found}
        optimizer = getattr(model, "optimizer", None)
        slots = list(optimizer.variables) if optimizer is not None else []
        taken = set(named)
        reduced = (
            {id(each.slot): each for each in find_reduced_slots(optimizer)} if optimizer is not None else {}
        )
        for slot, found_weight in zip(slots, match_slots(slots, model.trainable_variables), strict=True):
            known = reduced.get(id(slot))
            weight, kind = (known.weight, known.kind) if known else (found_weight, "")
            named[make_slot_path(slot, weight, paths.get(id(weight), ""), taken, kind)] = slot
        return named

    def find_context(self, model: keras.Model) -> ScopeContext | None:
        """Return the scope that sharded a model or any layer in it, or None."""
        sessions = (get_session(layer) for layer in model._flatten_layers())
        return next((session.context for session in sessions if session is not None), None)

    def read(self, variable: keras.Variable) -> Any:
        """Return the global value of a variable, as a numpy array."""
        return read_variable(variable)

    def write(self, variable: keras.Variable, value: object) -> None:
        """Assign an engine or numpy array to a variable without changing its layout."""
        variable.assign(value)

    def forward(self, model: keras.Model, batch: object) -> object:
        """Return a model's inference outputs for a batch as numpy arrays."""
        with get_backend(get_backend_name()).match_runs(model):
            return keras.tree.map_structure(np.asarray, model.predict_on_batch(_get_inputs(batch)))

    def gradients(self, model: keras.Model, batch: object) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the losses of a batch, and the gradients that the model's step gives its optimizer, by path."""
        x, y, sample_weight = _make_step_inputs(batch)
        backend = get_backend(get_backend_name())
        with backend.match_runs(model):
            losses, gradients = backend.gradients(model, x, y, sample_weight)
        paths = {id(f.variable): f.path for f in find_variables(model)}
        named = zip(model.trainable_variables, gradients, strict=True)
        return _read_scalar_logs(losses), {paths[id(v)]: gradient for v, gradient in named}

    def train_step(self, model: keras.Model, batch: object) -> dict[str, float]:
        """Run one optimizer step of a compiled model on a batch, and return its logs."""
        x, y, sample_weight = _make_step_inputs(batch)
        with get_backend(get_backend_name()).match_runs(model):
            return _read_scalar_logs(
                model.train_on_batch(x, y, sample_weight=sample_weight, return_dict=True)
            )


def _make_step_inputs(batch: object) -> Any:
    """Return the parts of a batch as tensors, as `fit` passes them to a step."""
    return keras.tree.map_structure(
        lambda each: keras.ops.convert_to_tensor(each) if isinstance(each, np.ndarray) else each,
        keras.utils.unpack_x_y_sample_weight(batch),
        none_is_leaf=True,
    )


def _read_scalar_logs(logs: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in logs.items() if np.ndim(value) == 0}


def _get_inputs(batch: object) -> object:
    return keras.utils.unpack_x_y_sample_weight(batch)[0]


def adapter() -> KerasAdapter:
    """Return the adapter for Keras models."""
    return KerasAdapter()
