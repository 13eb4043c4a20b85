"""List and restore the variables in a checkpoint of a Keras model, and its random states.

A plain model is described as if it had been made in a scope, but that nothing is known of its layers' names: those that
look as if Keras had made them up, as `dense_7`, are numbered anew, as a scope does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from layoutmap.adapters import random_states
from layoutmap.adapters.keras.describing import Entry, describe_variables
from layoutmap.adapters.keras.names import (
    forget_given,
    is_given,
    is_noted,
    note_given,
    parse_default_name,
    split_number,
)
from layoutmap.adapters.keras.paths import find_layers
from layoutmap.adapters.keras.private import (
    get_global_seed_state,
    is_default,
    is_global_seed,
    set_global_seed,
    strip_number,
)
from layoutmap.adapters.keras.protocol import get_backend, get_backend_name, read_variable
from layoutmap.adapters.keras.registry import Registry
from layoutmap.adapters.keras.training import complete
from layoutmap.adapters.keras.untracked import find_untracked
from layoutmap.adapters.keras.wraps import get_session
from layoutmap.adapters.protocol import Keeping, Saved, Stored
from layoutmap.core.errors import CheckpointError, join_names
from layoutmap.core.variables import Kind


class KerasKeeping(Keeping):
    """Save and load Keras models (see `layoutmap.adapters.protocol.Keeping`)."""

    def list_stored_variables(
        self, model: object, optimizer: object = None, saved: Saved | None = None
    ) -> list[Stored]:
        """Return the variables of a model and its optimizer with their values.

        An optimizer without slots makes them if some were saved. What an optimizer has before it is built, such as its
        learning rate, is no slot yet, so a model that loads it needs none.

        Raises:
            CheckpointError: The model has no weights yet, or the names of its layers do not tell which were saved.
        """
        if saved is not None:
            check_names(saved.settings.get("layers", {}), _collect_default_names(model))
            if saved.slots:
                complete(model, None)
        entries = _describe_synced_model(model)
        _check_built(model, entries)
        own = getattr(model, "optimizer", None)
        no_slots = set() if own is None or own.built else set(map(id, own.variables))
        value_of = get_backend(get_backend_name()).read_value
        return [
            Stored(
                replace(each.spec, kind=Kind.METRIC) if id(each.variable) in no_slots else each.spec,
                value_of(each.variable),
            )
            for each in entries
        ]

    def describe_variables(self, model: object, optimizer: object = None) -> list[Stored]:
        """Return the variables of an existing model, and the slots of its optimizer or a given one."""
        backend = get_backend(get_backend_name())
        return [
            Stored(each.spec, backend.read_stored(each.variable))
            for each in _describe_synced_model(model, optimizer)
        ]

    def restore_variables(
        self, model: object, optimizer: object, arrays: Iterable[tuple[str, object]]
    ) -> tuple[object, object]:
        """Assign new values to variables."""
        variables = {each.spec.path: each.variable for each in _describe_model(model)}
        for path, array in arrays:
            variables[path].assign(array)
        return model, optimizer

    def settings(self, model: object, optimizer: object = None) -> dict[str, object]:
        """Return names of layers, and the random states of Python, numpy, Keras, and its backend."""
        generator = get_global_seed_state()
        seed = None if generator is None else read_variable(generator).tolist()
        own = get_backend(get_backend_name()).read_random_states()
        return {
            "random": random_states.read_states() | own | {"keras": seed},
            "layers": _collect_default_names(model),
        }

    def restore_settings(self, model: object, optimizer: object, settings: Mapping[str, Any]) -> None:
        """Restore the random states in the result of `settings`, which another backend may have written."""
        states = settings.get("random", {})
        if "keras" in states:
            set_global_seed(states["keras"])
        get_backend(get_backend_name()).restore_random_states(states)
        # last, because creating Keras's generator draws a number from Python's
        random_states.restore_states(states)

    # A load without an optimizer skips saved slots, so the next `compile` restores them (decisions/0081).
    def restore_with_optimizer(self, model: Any, restore: Callable[[], None]) -> bool:
        """Call a function once, after the next `compile` that gives the model an optimizer."""
        before = model.__dict__.get("compile")
        plain = model.compile

        @functools.wraps(plain)
        def compile(*args: object, **kwargs: object) -> object:
            result = plain(*args, **kwargs)
            if getattr(model, "optimizer", None) is not None:
                if model.__dict__.get("compile") is compile:  # otherwise another scope has wrapped the model
                    del model.__dict__["compile"]
                    if before is not None:
                        model.__dict__["compile"] = before
                restore()
            return result

        # write to __dict__, because Keras's __setattr__ would track the value
        model.__dict__["compile"] = compile
        return True


def _describe_synced_model(model: Any, optimizer: object = None) -> list[Entry]:
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()  # in `fit`, Keras on JAX updates the model only at the end of an epoch
    return _describe_model(model, optimizer)


def _describe_model(model: Any, optimizer: Any = None) -> list[Entry]:
    """Return the variables of a model as a plan of only this model would list them."""
    registry = Registry()
    layers = list(model._flatten_layers())
    for layer in layers:
        registry.add_layer(layer)
    session = get_session(model)
    optimizer = optimizer or getattr(model, "optimizer", None)
    with _renumbered_names(layers):
        for each in [*model.variables, *getattr(model, "metrics_variables", ())]:
            registry.add(each)
        for found in find_untracked(model):
            if not is_global_seed(found.variable):
                registry.add(found.variable, kind=Kind.WEIGHT if found.variable.trainable else Kind.STATE)
        if optimizer is not None:
            registry.add_optimizer(optimizer)
            for slot in optimizer.variables:
                registry.add(slot)
                parent = None if session is None else session.registry.find_parent(slot)
                if parent is not None:
                    registry.set_parent(slot, parent)
        return describe_variables(registry)


@contextmanager
# Save unsharded models under the paths of a scope, so that sharded and unsharded models can load each
# other's files (decisions/0081).
def _renumbered_names(layers: Iterable[object]) -> Generator[None]:
    """Treat default-looking layer names outside a scope as generated by Keras, until the block ends."""
    unknown = [layer for layer in layers if not is_noted(layer)]
    for layer in unknown:
        note_given(layer, ())
    try:
        yield
    finally:
        for layer in unknown:
            forget_given(layer)


Names = Mapping[str, Sequence[Any]]
"""For each path, the names of layers that look numbered by Keras, and whether the user chose them."""


def _collect_default_names(model: Any) -> Names:
    """Return names of sibling layers that look like Keras's defaults, and whether each was passed by the user.

    Their paths are the numbers of these names in order. If Keras made all of them up, or none, that order is the same
    wherever the model is built. If some were given, it may not be, and weights of one shape would be exchanged.
    """
    groups: dict[tuple[str, str], dict[str, Sequence[object]]] = {}
    given = {id(layer): is_given(layer) for layer in model._flatten_layers()}
    with _renumbered_names(list(model._flatten_layers())):
        for path, layer in find_layers(model):
            owner, _, name = path.rpartition(".")
            found = parse_default_name(layer)
            if found is not None and parse_default_name(layer, name) is not None:
                groups.setdefault((owner, found[0]), {})[path] = [layer.name, given.get(id(layer))]
    several = (group for group in groups.values() if len(group) > 1)
    return {
        path: each
        for group in several
        if any(is_given is not False for _, is_given in group.values())
        for path, each in group.items()
    }


def check_names(saved: Names, own: Names) -> None:
    """Raise if layers may differ from those that were saved under their paths (see `_collect_default_names`)."""
    if not _are_names(saved):
        raise CheckpointError(
            "the checkpoint has no names of layers",
            why="its metadata is not that of a Keras model",
            fix="load another step",
        )
    shifts: dict[tuple[str, str], set[int]] = {}
    wrong: dict[str, object] = {}
    for path, (name, given) in own.items():
        old_name, old_given = saved.get(path, (name, given))
        if given or old_given:
            if name != old_name:
                wrong[path] = f"named {name}, saved by the name of {old_name}"
        elif given is None and old_given is None:
            prefix, number = split_number(name)
            shift = number - split_number(old_name)[1]
            group = shifts.setdefault((path.rpartition(".")[0], prefix), {shift})
            if shift not in group:
                wrong[path] = f"named {name}, saved by the name of {old_name}"
    if wrong:
        raise CheckpointError(
            f"{join_names([*wrong])}: these layers may differ from those that were saved under their paths",
            facts=wrong,
            why="Keras numbers unnamed layers anew in each process, and other layers have names of the "
            "same form; nothing was loaded",
            fix="name all of these layers before you save the model; a model that was saved in a scope can be loaded "
            "in one: pass layout_map=",
        )


def _are_names(saved: object) -> bool:
    return isinstance(saved, Mapping) and all(
        isinstance(each, list | tuple) and len(each) == 2 and isinstance(each[0], str)
        for each in cast("Mapping[str, object]", saved).values()
    )


def _check_built(model: Any, entries: Iterable[Entry]) -> None:
    if any(each.spec.kind is Kind.WEIGHT for each in entries):
        return
    unbuilt = [
        layer.name for layer in model._flatten_layers() if not layer.built and not is_default(layer.build)
    ]
    if unbuilt:
        raise CheckpointError(
            f"{strip_number(model.name)}: it has no weights yet",
            facts={"not built": join_names(unbuilt)},
            why="its layers create their weights in their first call, and were not called yet",
            fix="call it first, as in model(keras.Input(...)); to load it, pass inputs= to layoutmap.load",
        )
