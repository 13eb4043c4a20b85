"""What a checkpoint keeps of a Keras model: its variables under the paths that a plan shows, and random states.

A plain model is described as if it had been made in a scope, but that nothing is known of its layers' names: those that
look as if Keras had made them up, as `dense_7`, are numbered anew, as a scope does.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from layoutmap.adapters.keras.describing import Entry, describe
from layoutmap.adapters.keras.loose import find_held
from layoutmap.adapters.keras.names import is_noted, note_given, unnote
from layoutmap.adapters.keras.private import (
    global_seed_state,
    is_default,
    is_global_seed,
    set_global_seed,
    without_number,
)
from layoutmap.adapters.keras.protocol import Backend
from layoutmap.adapters.keras.registry import Registry
from layoutmap.adapters.keras.wraps import session_of
from layoutmap.adapters.protocol import Stored
from layoutmap.core import random_states
from layoutmap.core.errors import CheckpointError, listed
from layoutmap.core.variables import Kind


def stored(model: Any) -> list[Stored]:
    """Return the variables of a model with their values, those of its optimizer too.

    What an optimizer has before it is built, its learning rate for one, is no slot yet: a model that loads it needs
    none.

    Raises:
        CheckpointError: The model has no weights yet.
    """
    if hasattr(
        model, "jax_state_sync"
    ):  # in `fit`, Keras on JAX keeps new values from the model until an epoch ends
        model.jax_state_sync()
    entries = _entries(model)
    _check_built(model, entries)
    optimizer = getattr(model, "optimizer", None)
    early = () if optimizer is None or optimizer.built else map(id, optimizer.variables)
    no_slots = frozenset(early)
    return [
        Stored(
            replace(each.spec, kind=Kind.METRIC) if id(each.variable) in no_slots else each.spec,
            each.variable.value,
        )
        for each in entries
    ]


def restored(model: Any, arrays: Iterable[tuple[str, Any]]) -> None:
    """Give variables other values."""
    variables = {each.spec.path: each.variable for each in _entries(model)}
    for path, array in arrays:
        variables[path].assign(array)


def settings(backend: Backend) -> dict[str, Any]:
    """Return the random states of Python, of numpy, of Keras and of its backend."""
    generator = global_seed_state()
    seed = None if generator is None else backend.read(generator).tolist()
    return {"random": random_states.states() | backend.random_states() | {"keras": seed}}


def restore_settings(backend: Backend, found: Mapping[str, Any]) -> None:
    """Put back what `settings` returned, on this backend or another one."""
    states = found.get("random", {})
    if "keras" in states:
        set_global_seed(states["keras"])
    backend.restore_random_states(states)
    random_states.restore(states)  # last: a generator of Keras's is made with a number of Python's


def _entries(model: Any) -> list[Entry]:
    """The variables of a model, as a plan of it alone has them."""
    registry = Registry()
    layers = list(model._flatten_layers())
    for layer in layers:
        registry.add_layer(layer)
    session = session_of(model)
    optimizer = getattr(model, "optimizer", None)
    with _numbered_anew(layers):
        for each in [*model.variables, *getattr(model, "metrics_variables", ())]:
            registry.add(each)
        for found in find_held(model):
            if not is_global_seed(found.variable):
                registry.add(found.variable, kind=Kind.WEIGHT if found.variable.trainable else Kind.STATE)
        if optimizer is not None:
            registry.add_optimizer(optimizer)
            for slot in optimizer.variables:
                registry.add(slot)
                parent = None if session is None else session.registry.parent_of(slot)
                if parent is not None:
                    registry.set_parent(slot, parent)
        return describe(registry)


@contextmanager
def _numbered_anew(layers: Iterable[Any]) -> Generator[None]:
    """While open, names of layers that a scope knows nothing of count as Keras's own if they look like it."""
    unknown = [layer for layer in layers if not is_noted(layer)]
    for layer in unknown:
        note_given(layer, ())
    try:
        yield
    finally:
        for layer in unknown:
            unnote(layer)


def _check_built(model: Any, entries: Iterable[Entry]) -> None:
    if any(each.spec.kind is Kind.WEIGHT for each in entries):
        return
    unbuilt = [
        layer.name for layer in model._flatten_layers() if not layer.built and not is_default(layer.build)
    ]
    if unbuilt:
        raise CheckpointError(
            f"{without_number(model.name)}: it has no weights yet",
            facts={"not built": listed(unbuilt)},
            why="its layers make their weights when they are first called, and nothing has called them",
            fix="call it first, as in model(keras.Input(...)); to load it, pass inputs= to layoutmap.load",
        )
