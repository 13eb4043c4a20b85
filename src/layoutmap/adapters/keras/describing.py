"""Descriptions of a scope's layers and optimizers for the core: each variable and layer by its object path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras

from layoutmap.adapters.keras.derived import Derivation, ReducedSlot, derivations, reduced_slots
from layoutmap.adapters.keras.names import is_noted, stable_names
from layoutmap.adapters.keras.paths import find_layers, find_variables, roots, slot_path, sublayers
from layoutmap.adapters.keras.private import is_global_seed, is_seed_state, without_number
from layoutmap.adapters.keras.protocol import Backend
from layoutmap.adapters.keras.registry import Registry
from layoutmap.adapters.keras.roles import uses
from layoutmap.adapters.keras.training import parents_by_name
from layoutmap.adapters.keras.untracked import find_untracked
from layoutmap.core.match import KERAS
from layoutmap.core.unsupported import Unsupported
from layoutmap.core.variables import Kind, Use, VariableSpec, make_unique_names


@dataclass(slots=True)
class Entry:
    """A variable of a scope, as the core will see it."""

    variable: keras.Variable
    spec: VariableSpec


def describe(registry: Registry) -> list[Entry]:
    """All variables of a scope: those of its models first, in the order of the models, then the rest."""
    layers, optimizers = registry.layers(), _outermost(registry.optimizers())
    known = _in_order(registry, layers, optimizers)
    entries = list(_of_layers(layers))
    slots = {id(variable) for optimizer in optimizers for variable in optimizer.variables}
    entries += _held(layers, known, {id(entry.variable) for entry in entries} | slots, registry.kind_of)
    by_variable = {id(entry.variable): entry for entry in entries}
    reduced = {id(each.slot): each for optimizer in optimizers for each in reduced_slots(optimizer)}
    # A variable that was made from an array, and is nowhere yet, hands no tag on to its slots.
    unknown = [v for v in known if id(v) in slots and id(v) not in reduced and registry.parent_of(v) is None]
    trained = _with_slots(optimizers) + [entry.variable for entry in entries if entry.spec.is_trained]
    trained = list({id(variable): variable for variable in trained}.values())
    by_name = dict(zip(map(id, unknown), parents_by_name(unknown, trained), strict=True))
    taken: dict[str, set[str]] = {}  # the slots' paths in each model
    for variable in known:
        if id(variable) in by_variable or is_global_seed(variable):
            continue
        of = reduced.get(id(variable))
        parent = of.weight if of else by_name.get(id(variable), registry.parent_of(variable))
        entry = by_variable.get(id(parent)) if parent is not None else None
        if entry is not None:
            entries.append(_slot(variable, entry, of, taken.setdefault(entry.spec.model, set())))
        elif id(variable) in slots:
            path = slot_path(variable, None, "", taken.setdefault("", set()))
            entries.append(_entry(variable, path, Kind.SLOT))
        else:
            entries.append(describe_alone(variable, registry.kind_of(variable)))
    alone = [entry for entry in entries if not entry.spec.model]
    for entry, path in zip(alone, make_unique_names([entry.spec.path for entry in alone]), strict=True):
        entry.spec = replace(entry.spec, path=path)
    return entries


def _outermost(optimizers: Sequence[object]) -> list[Any]:
    """Optimizers of a list that are not inside of others, which have their variables, too."""
    inner = {
        id(each)
        for optimizer in optimizers
        for each in (getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ()))
    }
    return [optimizer for optimizer in optimizers if id(optimizer) not in inner]


def _in_order(registry: Registry, layers: Sequence[object], optimizers: Sequence[object]) -> list[Any]:
    """The variables of a scope, those of optimizers and metrics last, each in the order of its owner.

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


def _with_slots(optimizers: Sequence[object]) -> list[Any]:
    """Variables that optimizers have slots for, in the order of the slots: some may be frozen by now."""
    every = [(each, getattr(each, "inner_optimizer", None)) for each in optimizers]
    return [v for pair in every for o in pair for v in getattr(o, "_trainable_variables", ())]


def describe_alone(variable: Any, kind: Kind) -> Entry:
    """A variable that belongs to no layer and no optimizer; without a name of its own it is numbered anew."""
    *scopes, name = variable.path.split("/")
    name = stable_names([variable])[0] if is_noted(variable) else without_number(name)
    path = ".".join([*map(without_number, scopes), name])
    return _entry(variable, path, Kind.RNG if is_seed_state(variable) else kind)


def describe_below(layer: object, prefix: str, variable: object) -> Entry | None:
    """Return a variable that is below a layer; `None` if it is not."""
    entries = _of_layer(layer, "", prefix, derivations([layer]), {})
    return next((entry for entry in entries if entry.variable is variable), None)


def layer_paths(layers: Sequence[object]) -> list[tuple[str, Any]]:
    """All layers below models, and those that stand alone, under each of their paths."""
    paths: list[tuple[str, Any]] = []
    for _, prefix, root in _roots(layers):
        paths += [(prefix.removesuffix("."), root)] if prefix else []
        paths += [(prefix + path, layer) for path, layer in find_layers(root)]
    return paths


def unsupported_of(backend: Backend, layers: Sequence[Any], entries: Sequence[Entry]) -> list[Unsupported]:
    """The operations of layers with weights that a backend cannot compute."""
    specs = {id(e.variable): e.spec for e in entries}
    found: list[Unsupported] = []
    for layer in layers:
        own = [*layer._trainable_variables, *layer._non_trainable_variables]
        # A layer without weights of its own is where the first below it is: an RNN where its cell is.
        inner = own or [v for below in sublayers(layer) for v in below.variables]
        known = [specs[id(v)] for v in inner if id(v) in specs]
        if known:
            weights = [specs[id(v)].path for v in own if id(v) in specs]
            limits = backend.unsupported_of(layer, known[0].path.rpartition(".")[0] or layer.name, weights)
            found += (replace(limit, model=known[0].model) for limit in limits)
    return found


def _roots(layers: Sequence[object]) -> Iterator[tuple[str, str, object]]:
    """The layers that are in no other one: the model's name in the plan, what paths begin with, and the layer."""
    tops = roots(layers)
    names = stable_names(tops)
    for model, name, root in zip(make_unique_names(names), names, tops, strict=True):
        yield model, "" if isinstance(root, keras.Model) else f"{name}.", root


def _of_layers(layers: Sequence[object]) -> Iterator[Entry]:
    seen: set[int] = set()
    derived, used = derivations(layers), uses(layers)
    for model, prefix, root in _roots(layers):
        for entry in _of_layer(root, model, prefix, derived, used):
            if id(entry.variable) not in seen:
                seen.add(id(entry.variable))
                yield entry


def _of_layer(
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
        yield _entry(found.variable, path, Kind.RNG if found.is_seed else kind, model=model, **rest)


def _held(
    layers: Sequence[object], known: Sequence[object], described: set[int], kind_of: Callable[[Any], Kind]
) -> Iterator[Entry]:
    """Variables that other objects than layers hold, by attribute; a metric that a model has goes by its own name."""
    models = [layer for layer in layers if isinstance(layer, keras.Model)]
    others = described | {id(variable) for model in models for variable in model.metrics_variables}
    wanted = {id(variable) for variable in known if not is_global_seed(variable)} - others
    for model, prefix, root in _roots(layers) if wanted else ():
        for found in find_untracked(root, wanted):
            wanted.discard(id(found.variable))
            kind = Kind.RNG if found.is_seed else kind_of(found.variable)
            yield _entry(found.variable, prefix + found.path, kind, model=model)


def _slot(variable: keras.Variable, weight: Entry, reduced: ReducedSlot | None, taken: set[str]) -> Entry:
    spec = weight.spec
    path = slot_path(variable, weight.variable, spec.path, taken, reduced.kind if reduced else "")
    rest: dict[str, Any] = {"parent": spec.path, "model": spec.model}
    if reduced:
        rest |= {"axes": reduced.axes, "parent_shape": spec.shape}
    return _entry(variable, path, Kind.SLOT, **rest)


def _entry(variable: keras.Variable, path: str, kind: Kind, **rest: Any) -> Entry:
    shape = tuple(int(n) for n in variable.shape)
    dtype = keras.backend.standardize_dtype(variable._dtype)
    name = "" if kind is Kind.SLOT else f"{KERAS}{variable.path}"  # rules do not apply to a slot
    return Entry(variable, VariableSpec(path, shape, dtype, kind, name=name, **rest))
