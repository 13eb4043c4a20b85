"""Describe a scope's layers and optimizers by object paths, for the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras

from layoutmap.adapters.keras.derived import Derivation, ReducedSlot, find_derivations, find_reduced_slots
from layoutmap.adapters.keras.names import is_noted, renumber_names
from layoutmap.adapters.keras.paths import (
    find_layers,
    find_roots,
    find_variables,
    list_sublayers,
    make_slot_path,
)
from layoutmap.adapters.keras.private import is_global_seed, is_seed_state, strip_number
from layoutmap.adapters.keras.protocol import Backend
from layoutmap.adapters.keras.registry import Registry
from layoutmap.adapters.keras.roles import find_uses
from layoutmap.adapters.keras.training import match_slots
from layoutmap.adapters.keras.untracked import find_untracked
from layoutmap.core.match import KERAS
from layoutmap.core.unsupported import Unsupported
from layoutmap.core.variables import Kind, Use, VariableSpec, make_unique_names


@dataclass(slots=True)
class Entry:
    """A variable of a scope, with its description for the plan."""

    variable: keras.Variable
    spec: VariableSpec


def describe_variables(registry: Registry) -> list[Entry]:
    """Return all variables of a scope: those of its models in model order, then the rest."""
    layers, optimizers = registry.layers(), _find_outer_optimizers(registry.optimizers())
    known = _sort_variables(registry, layers, optimizers)
    entries = list(_describe_layers(layers))
    slots = {id(variable) for optimizer in optimizers for variable in optimizer.variables}
    entries += _describe_untracked(
        layers, known, {id(entry.variable) for entry in entries} | slots, registry.find_kind
    )
    by_variable = {id(entry.variable): entry for entry in entries}
    reduced = {id(each.slot): each for optimizer in optimizers for each in find_reduced_slots(optimizer)}
    # A variable created from an unsharded array passes no tag to its slots.
    unknown = [
        v for v in known if id(v) in slots and id(v) not in reduced and registry.find_parent(v) is None
    ]
    trained = _list_slotted_variables(optimizers) + [
        entry.variable for entry in entries if entry.spec.is_trained
    ]
    trained = list({id(variable): variable for variable in trained}.values())
    by_name = dict(zip(map(id, unknown), match_slots(unknown, trained), strict=True))
    taken: dict[str, set[str]] = {}  # the slot paths that are used in each model
    for variable in known:
        if id(variable) in by_variable or is_global_seed(variable):
            continue
        of = reduced.get(id(variable))
        parent = of.weight if of else by_name.get(id(variable), registry.find_parent(variable))
        entry = by_variable.get(id(parent)) if parent is not None else None
        if entry is not None:
            entries.append(_describe_slot(variable, entry, of, taken.setdefault(entry.spec.model, set())))
        elif id(variable) in slots:
            path = make_slot_path(variable, None, "", taken.setdefault("", set()))
            entries.append(_make_entry(variable, path, Kind.SLOT))
        else:
            entries.append(describe_alone(variable, registry.find_kind(variable)))
    alone = [entry for entry in entries if not entry.spec.model]
    for entry, path in zip(alone, make_unique_names([entry.spec.path for entry in alone]), strict=True):
        entry.spec = replace(entry.spec, path=path)
    return entries


def _find_outer_optimizers(optimizers: Sequence[object]) -> list[Any]:
    """Return the optimizers that no other one wraps. A wrapper shares the inner variables."""
    inner = {
        id(each)
        for optimizer in optimizers
        for each in (getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ()))
    }
    return [optimizer for optimizer in optimizers if id(optimizer) not in inner]


def _sort_variables(registry: Registry, layers: Sequence[object], optimizers: Sequence[object]) -> list[Any]:
    """Sort a scope's variables: those of optimizers and metrics last, in their owner's order.

    Some of them are numbered: the number is the same whatever was made first.
    """
    owners = [*optimizers, *(layer for layer in layers if isinstance(layer, keras.Model))]
    owned = [
        v
        for owner in owners
        for v in (owner.metrics_variables if isinstance(owner, keras.Model) else owner.variables)
    ]
    place = {id(variable): number for number, variable in reversed(list(enumerate(owned)))}
    return sorted(registry.variables(), key=lambda variable: place.get(id(variable), -1))


def _list_slotted_variables(optimizers: Sequence[object]) -> list[Any]:
    """Return the variables that optimizers have slots for, in slot order, including frozen ones.

    An optimizer may also update variables of a framework, such as a `DVariable`. A plan does not list them.
    """
    every = [(each, getattr(each, "inner_optimizer", None)) for each in optimizers]
    slotted = [v for pair in every for o in pair for v in getattr(o, "_trainable_variables", ())]
    return [variable for variable in slotted if isinstance(variable, keras.Variable)]


def describe_alone(variable: Any, kind: Kind) -> Entry:
    """Describe a variable without a layer or optimizer. Keras's number is removed from its name."""
    *scopes, name = variable.path.split("/")
    name = renumber_names([variable])[0] if is_noted(variable) else strip_number(name)
    path = ".".join([*map(strip_number, scopes), name])
    return _make_entry(variable, path, Kind.RNG if is_seed_state(variable) else kind)


def describe_below(layer: object, prefix: str, variable: object) -> Entry | None:
    """Describe a variable in a layer, or return None if the layer does not contain it."""
    entries = _describe_layer(layer, "", prefix, find_derivations([layer]), {})
    return next((entry for entry in entries if entry.variable is variable), None)


def list_layer_paths(layers: Sequence[object]) -> list[tuple[str, Any]]:
    """List the layers of all models, and standalone layers, under each of their paths."""
    paths: list[tuple[str, Any]] = []
    for _, prefix, root in _iterate_roots(layers):
        paths += [(prefix.removesuffix("."), root)] if prefix else []
        paths += [(prefix + path, layer) for path, layer in find_layers(root)]
    return paths


def find_unsupported(backend: Backend, layers: Sequence[Any], entries: Sequence[Entry]) -> list[Unsupported]:
    """Return the operations of layers with weights that a backend cannot compute."""
    specs = {id(e.variable): e.spec for e in entries}
    found: list[Unsupported] = []
    for layer in layers:
        own = [*layer._trainable_variables, *layer._non_trainable_variables]
        # A layer without its own weights, such as an RNN, takes the position of its first sublayer.
        inner = own or [v for below in list_sublayers(layer) for v in below.variables]
        known = [specs[id(v)] for v in inner if id(v) in specs]
        if known:
            weights = [specs[id(v)].path for v in own if id(v) in specs]
            limits = backend.find_unsupported(layer, known[0].path.rpartition(".")[0] or layer.name, weights)
            found += (replace(limit, model=known[0].model) for limit in limits)
    return found


def _iterate_roots(layers: Sequence[object]) -> Iterator[tuple[str, str, object]]:
    """Yield each layer without a parent with its model's name in the plan and its path prefix."""
    tops = find_roots(layers)
    names = renumber_names(tops)
    for model, name, root in zip(make_unique_names(names), names, tops, strict=True):
        yield model, "" if isinstance(root, keras.Model) else f"{name}.", root


def _describe_layers(layers: Sequence[object]) -> Iterator[Entry]:
    seen: set[int] = set()
    derived, used = find_derivations(layers), find_uses(layers)
    for model, prefix, root in _iterate_roots(layers):
        for entry in _describe_layer(root, model, prefix, derived, used):
            if id(entry.variable) not in seen:
                seen.add(id(entry.variable))
                yield entry


def _describe_layer(
    layer: object, model: str, prefix: str, derived: Mapping[int, Derivation], used: Mapping[int, Use]
) -> Iterator[Entry]:
    for found in find_variables(layer):
        path = prefix + found.path
        kind = Kind.WEIGHT if found.variable.trainable else Kind.STATE
        rest: dict[str, Any] = {"aliases": tuple(prefix + alias for alias in found.aliases)}
        of = derived.get(id(found.variable))
        if of is not None:
            parent = path[: path.rfind(".") + 1] + of.parent
            rest |= {"parent": parent, "axes": of.axes, "parent_shape": of.shape}
        elif id(found.variable) in used:
            rest["use"] = used[id(found.variable)]
        yield _make_entry(found.variable, path, Kind.RNG if found.is_seed else kind, model=model, **rest)


def _describe_untracked(
    layers: Sequence[object], known: Sequence[object], described: set[int], kind_of: Callable[[Any], Kind]
) -> Iterator[Entry]:
    """Yield variables in attributes of objects that are not layers, except a model's metrics."""
    models = [layer for layer in layers if isinstance(layer, keras.Model)]
    others = described | {id(variable) for model in models for variable in model.metrics_variables}
    wanted = {id(variable) for variable in known if not is_global_seed(variable)} - others
    for model, prefix, root in _iterate_roots(layers) if wanted else ():
        for found in find_untracked(root, wanted):
            wanted.discard(id(found.variable))
            kind = Kind.RNG if found.is_seed else kind_of(found.variable)
            yield _make_entry(found.variable, prefix + found.path, kind, model=model)


def _describe_slot(
    variable: keras.Variable, weight: Entry, reduced: ReducedSlot | None, taken: set[str]
) -> Entry:
    spec = weight.spec
    path = make_slot_path(variable, weight.variable, spec.path, taken, reduced.kind if reduced else "")
    rest: dict[str, Any] = {"parent": spec.path, "model": spec.model}
    if reduced:
        rest |= {"axes": reduced.axes, "parent_shape": spec.shape}
    return _make_entry(variable, path, Kind.SLOT, **rest)


def _make_entry(variable: keras.Variable, path: str, kind: Kind, **rest: Any) -> Entry:
    shape = tuple(int(n) for n in variable.shape)
    dtype = keras.backend.standardize_dtype(variable._dtype)
    # Rules for Keras names do not apply to slots.
    name = "" if kind is Kind.SLOT else f"{KERAS}{variable.path}"
    return Entry(variable, VariableSpec(path, shape, dtype, kind, name=name, **rest))
