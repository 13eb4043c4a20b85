"""Support Keras 3 models: subclassed, Functional, and Sequential, on all supported backends."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import numpy as np

from layoutmap.adapters import random_states
from layoutmap.adapters.keras.callback import CheckpointCallback as CheckpointCallback
from layoutmap.adapters.keras.checkpoints import KerasCheckpointAdapter
from layoutmap.adapters.keras.derived import find_reduced_slots
from layoutmap.adapters.keras.hooks import install_hooks_temporarily
from layoutmap.adapters.keras.paths import find_variables, make_slot_path
from layoutmap.adapters.keras.private import check_keras_support, get_global_seed_variable
from layoutmap.adapters.keras.protocol import get_backend, get_keras_backend_name, read_global_value
from layoutmap.adapters.keras.session import Session
from layoutmap.adapters.keras.training import create_missing_variables, find_slot_weights
from layoutmap.adapters.keras.wraps import get_session
from layoutmap.adapters.protocol import Adapter, ScopeContext
from layoutmap.core.errors import ScopeError
from layoutmap.core.layout import Layout
from layoutmap.core.variables import VariableSpec


class KerasAdapter(KerasCheckpointAdapter, Adapter):
    """Adapter for Keras 3 models (see `layoutmap.adapters.protocol`)."""

    name = "keras"
    shards_batches = True

    @property
    def engine_name(self) -> str:
        """Name of the engine for the Keras backend."""
        return get_backend(get_keras_backend_name()).engine_name

    def explain_why_padding_is_impossible(self, variable: VariableSpec, layout: Layout) -> str:
        """Return why a variable cannot be stored with padding in a layout, or an empty text if it can."""
        return get_backend(get_keras_backend_name()).explain_why_padding_is_impossible(variable, layout)

    def check_scope_can_open(self) -> None:
        """Raise if a scope cannot work with this Keras version or backend, or inside a compiled function."""
        backend = get_backend(get_keras_backend_name())
        check_keras_support(backend.list_required_private_names())
        if backend.is_tracing():
            raise ScopeError(
                "a scope was opened inside a compiled function",
                why="a trace has no real arrays on real devices, which variables need",
                fix="build the model outside of the compiled function, and call it inside",
            )

    def owns_model(self, model: object) -> bool:
        """Return whether an object is a Keras layer or model."""
        return isinstance(model, keras.layers.Layer)

    def forbid_building_models(self, scope_library: str) -> AbstractContextManager[None]:
        """Raise for each Keras layer constructed in the block, because the scope is for a different library."""
        return install_hooks_temporarily()

    def make_session(self, context: ScopeContext) -> Session:
        """Return a new session for a scope. Unless it only plans, make the mesh's device type Keras's default."""
        backend = get_backend(get_keras_backend_name())
        check_keras_support(backend.list_required_private_names())
        if not context.plan_only:
            backend.set_default_device_type(context.policy.mesh)
        return Session(context, backend)

    @contextmanager
    def preserve_random_states(self) -> Generator[None]:
        """Restore the random states of Python, numpy, and Keras when the block ends."""
        generator = get_global_seed_variable()
        value = None if generator is None else self.read(generator)
        try:
            with random_states.preserve_python_and_numpy_states():
                yield
        finally:
            if generator is not None:
                generator.assign(value)

    def set_seed(self, seed: int) -> None:
        """Seed the random generators of Python, numpy, and Keras's backend."""
        keras.utils.set_random_seed(seed)

    def create_lazy_variables(self, model: object, batch: object) -> None:
        """Create the variables that a first call and a training step would create, without running either."""
        session = get_session(model)
        # JAX refuses arrays on a different mesh than that of `jax.set_mesh`, also in traced calls, so leave that mesh.
        with session.backend.suspend_tracing() if session is not None else nullcontext():
            create_missing_variables(model, _get_batch_inputs(batch))

    def set_optimizer(self, model: keras.Model, optimizer: keras.Optimizer) -> object:
        """Set a model's optimizer, given as an optimizer, its name, or a function that makes it. Return the model."""
        if optimizer is None:
            return model
        try:
            new_optimizer = keras.optimizers.get(optimizer() if callable(optimizer) else optimizer)
        except ValueError as error:
            raise ScopeError(
                f"optimizer={optimizer!r} is not an optimizer of Keras",
                why=str(error),
                fix='pass the name of a Keras optimizer, such as "adamw"',
            ) from error
        if getattr(model, "compiled", False):
            model.optimizer = new_optimizer  # assign only the optimizer, so that the compiled loss stays
        else:
            model.compile(optimizer=new_optimizer)
        return model

    def variables(self, model: keras.Model) -> dict[str, keras.Variable]:
        """Return a dict from path to variable, of a model and its optimizer."""
        found = find_variables(model)
        named = {f.path: f.variable for f in found}
        paths = {id(f.variable): f.path for f in found}
        optimizer = getattr(model, "optimizer", None)
        slots = list(optimizer.variables) if optimizer is not None else []
        taken = set(named)
        reduced = (
            {id(each.slot): each for each in find_reduced_slots(optimizer)} if optimizer is not None else {}
        )
        for slot, found_weight in zip(
            slots, find_slot_weights(slots, model.trainable_variables), strict=True
        ):
            known = reduced.get(id(slot))
            weight, kind = (known.weight, known.kind) if known else (found_weight, "")
            named[make_slot_path(slot, weight, paths.get(id(weight), ""), taken, kind)] = slot
        return named

    def find_scope_context(self, model: keras.Model) -> ScopeContext | None:
        """Return the scope that sharded a model or any layer in it, or None if no scope did."""
        sessions = (get_session(layer) for layer in model._flatten_layers())
        return next((session.context for session in sessions if session is not None), None)

    def read(self, variable: keras.Variable) -> Any:
        """Return the global value of a variable, as a numpy array."""
        return read_global_value(variable)

    def write(self, variable: keras.Variable, value: object) -> None:
        """Assign an array of the engine or of numpy to a variable, which keeps its layout."""
        variable.assign(value)

    def forward(self, model: keras.Model, batch: object) -> object:
        """Return a model's inference outputs for a batch as numpy arrays."""
        with get_backend(get_keras_backend_name()).match_draws_and_rows_temporarily(model):
            return keras.tree.map_structure(np.asarray, model.predict_on_batch(_get_batch_inputs(batch)))

    def gradients(self, model: keras.Model, batch: object) -> tuple[dict[str, float], dict[str, Any]]:
        """Return two dicts: from name to loss, and from path to the gradient that the model passes to its optimizer."""
        x, y, sample_weight = _convert_batch_to_tensors(batch)
        backend = get_backend(get_keras_backend_name())
        with backend.match_draws_and_rows_temporarily(model):
            losses, gradients = backend.compute_losses_and_gradients(model, x, y, sample_weight)
        paths = {id(f.variable): f.path for f in find_variables(model)}
        named = zip(model.trainable_variables, gradients, strict=True)
        return _convert_scalar_logs_to_floats(losses), {paths[id(v)]: gradient for v, gradient in named}

    def train_step(self, model: keras.Model, batch: object) -> dict[str, float]:
        """Run one training step of a compiled model on a batch, and return a dict of its scalar logs."""
        x, y, sample_weight = _convert_batch_to_tensors(batch)
        with get_backend(get_keras_backend_name()).match_draws_and_rows_temporarily(model):
            return _convert_scalar_logs_to_floats(
                model.train_on_batch(x, y, sample_weight=sample_weight, return_dict=True)
            )


def _convert_batch_to_tensors(batch: object) -> Any:
    """Return inputs, targets, and sample weights of a batch, with numpy arrays converted to tensors as in `fit`."""
    return keras.tree.map_structure(
        lambda each: keras.ops.convert_to_tensor(each) if isinstance(each, np.ndarray) else each,
        keras.utils.unpack_x_y_sample_weight(batch),
        none_is_leaf=True,
    )


def _convert_scalar_logs_to_floats(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return a dict from name to float, of the logs that are single numbers."""
    return {name: float(value) for name, value in logs.items() if np.ndim(value) == 0}


def _get_batch_inputs(batch: object) -> object:
    return keras.utils.unpack_x_y_sample_weight(batch)[0]


def make_adapter() -> KerasAdapter:
    """Return the adapter for Keras models."""
    return KerasAdapter()
