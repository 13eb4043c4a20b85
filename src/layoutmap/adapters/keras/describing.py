"""Describe a scope's layers and optimizers by object paths, for the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras

from layoutmap.adapters.keras.derived import (
    ReducedSlot,
    WeightDerivation,
    find_derivations_by_variable_id,
    find_reduced_slots,
)
from layoutmap.adapters.keras.names import has_constructor_texts, renumber_names
from layoutmap.adapters.keras.paths import (
    find_layers,
    find_root_layers,
    find_variables,
    iterate_sublayers,
    make_slot_path,
)
from layoutmap.adapters.keras.private import is_global_seed_variable, is_seed_state, strip_generated_number
from layoutmap.adapters.keras.protocol import Backend
from layoutmap.adapters.keras.registry import Registry
from layoutmap.adapters.keras.roles import find_weight_axis_roles
from layoutmap.adapters.keras.training import find_slot_weights
from layoutmap.adapters.keras.untracked import find_untracked_variables
from layoutmap.core.match import KERAS
from layoutmap.core.unsupported import UnsupportedFeature
from layoutmap.core.variables import AxisRoles, Kind, VariableSpec, make_unique_names


@dataclass(slots=True)
class DescribedVariable:
    """A variable of a scope, with its description for the plan."""

    variable: keras.Variable
    spec: VariableSpec


def describe_variables(registry: Registry) -> list[DescribedVariable]:
    """Describe all variables of a scope: first those of its models in model order, then the rest."""
    layers, optimizers = registry.list_layers(), _find_outer_optimizers(registry.list_optimizers())
    known = _sort_variables(registry, layers, optimizers)
    entries = list(_describe_variables_in_layers(layers, registry.number_inputs()))
    slots = {id(variable) for optimizer in optimizers for variable in optimizer.variables}
    entries += _describe_untracked_variables(
        layers, known, {id(entry.variable) for entry in entries} | slots, registry.find_standalone_kind
    )
    by_variable = {id(entry.variable): entry for entry in entries}
    reduced = {id(each.slot): each for optimizer in optimizers for each in find_reduced_slots(optimizer)}
    # Keras copies a weight's `_layout` to its slots, which tells the slot's weight. A weight that was created from an
    # array passes none, so match its slots by name.
    unknown = [
        v for v in known if id(v) in slots and id(v) not in reduced and registry.find_slot_weight(v) is None
    ]
    trained = _list_variables_with_slots(optimizers) + [
        entry.variable for entry in entries if entry.spec.is_trained
    ]
    trained = list({id(variable): variable for variable in trained}.values())
    by_name = dict(zip(map(id, unknown), find_slot_weights(unknown, trained), strict=True))
    taken_paths: dict[str, set[str]] = {}  # slot paths that are already used, by model
    for variable in known:
        if id(variable) in by_variable or is_global_seed_variable(variable):
            continue
        of = reduced.get(id(variable))
        parent = of.weight if of else by_name.get(id(variable), registry.find_slot_weight(variable))
        entry = by_variable.get(id(parent)) if parent is not None else None
        if entry is not None:
            entries.append(
                _describe_slot(variable, entry, of, taken_paths.setdefault(entry.spec.model, set()))
            )
        elif id(variable) in slots:
            path = make_slot_path(variable, None, "", taken_paths.setdefault("", set()))
            entries.append(_describe_variable(variable, path, Kind.SLOT))
        else:
            entries.append(describe_standalone_variable(variable, registry.find_standalone_kind(variable)))
    alone = [entry for entry in entries if not entry.spec.model]
    for entry, path in zip(alone, make_unique_names([entry.spec.path for entry in alone]), strict=True):
        entry.spec = replace(entry.spec, path=path)
    return entries


def _find_outer_optimizers(optimizers: Sequence[object]) -> list[Any]:
    """Return the optimizers that no other one wraps, because the wrapping one also lists their variables."""
    inner = {
        id(each)
        for optimizer in optimizers
        for each in (getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ()))
    }
    return [optimizer for optimizer in optimizers if id(optimizer) not in inner]


def _sort_variables(registry: Registry, layers: Sequence[object], optimizers: Sequence[object]) -> list[Any]:
    """Return a scope's variables. Those of optimizers and metrics are last, in the order of their owners' lists.

    Slots with equal paths are numbered in this order, so it must not depend on which of them was created first.
    """
    owners = [*optimizers, *(layer for layer in layers if isinstance(layer, keras.Model))]
    owned = [
        v
        for owner in owners
        for v in (owner.metrics_variables if isinstance(owner, keras.Model) else owner.variables)
    ]
    position = {id(variable): number for number, variable in reversed(list(enumerate(owned)))}
    return sorted(registry.list_variables(), key=lambda variable: position.get(id(variable), -1))


def _list_variables_with_slots(optimizers: Sequence[object]) -> list[Any]:
    """Return the variables for which optimizers have slots, also frozen ones, in the order of the slots.

    An optimizer may also update variables of a framework, such as a `DVariable`. A plan does not list them.
    """
    every = [(each, getattr(each, "inner_optimizer", None)) for each in optimizers]
    slotted = [v for pair in every for o in pair for v in getattr(o, "_trainable_variables", ())]
    return [variable for variable in slotted if isinstance(variable, keras.Variable)]


def describe_standalone_variable(variable: Any, kind: Kind) -> DescribedVariable:
    """Describe a variable of no layer and no optimizer, by its name without the number that Keras appended."""
    *scopes, name = variable.path.split("/")
    name = renumber_names([variable])[0] if has_constructor_texts(variable) else strip_generated_number(name)
    path = ".".join([*map(strip_generated_number, scopes), name])
    return _describe_variable(variable, path, Kind.RNG if is_seed_state(variable) else kind)


def describe_layer_variable(layer: object, prefix: str, variable: object) -> DescribedVariable | None:
    """Describe a variable in a layer, or return None if the layer does not contain it."""
    entries = _describe_variables_in_layer(layer, "", prefix, find_derivations_by_variable_id([layer]), {})
    return next((entry for entry in entries if entry.variable is variable), None)


def list_layer_paths(layers: Sequence[object]) -> list[tuple[str, Any]]:
    """Return pairs of path and layer for all layers of a scope. A shared layer occurs once for each path."""
    paths: list[tuple[str, Any]] = []
    for _, prefix, root in _iterate_root_layers_with_names(layers):
        paths += [(prefix.removesuffix("."), root)] if prefix else []
        paths += [(prefix + path, layer) for path, layer in find_layers(root)]
    return paths


def find_unsupported_features(
    backend: Backend, layers: Sequence[Any], entries: Sequence[DescribedVariable]
) -> list[UnsupportedFeature]:
    """Return the features of layers with weights that a backend does not support."""
    specs = {id(e.variable): e.spec for e in entries}
    found: list[UnsupportedFeature] = []
    for layer in layers:
        own = [*layer._trainable_variables, *layer._non_trainable_variables]
        # A layer without its own weights, such as an RNN, has no path in the plan, so report its first sublayer.
        inner = own or [v for below in iterate_sublayers(layer) for v in below.variables]
        known = [specs[id(v)] for v in inner if id(v) in specs]
        if known:
            weights = [specs[id(v)].path for v in own if id(v) in specs]
            limits = backend.find_unsupported_features(
                layer, known[0].path.rpartition(".")[0] or layer.name, weights
            )
            found += (replace(limit, model=known[0].model) for limit in limits)
    return found


def _iterate_root_layers_with_names(layers: Sequence[object]) -> Iterator[tuple[str, str, object]]:
    """Yield the model name in the plan, the prefix of paths, and the layer, of each layer without a parent."""
    tops = find_root_layers(layers)
    names = renumber_names(tops)
    for model, name, root in zip(make_unique_names(names), names, tops, strict=True):
        yield model, "" if isinstance(root, keras.Model) else f"{name}.", root


def _describe_variables_in_layers(
    layers: Sequence[object], inputs: Mapping[int, int]
) -> Iterator[DescribedVariable]:
    """Yield the variables of all layers with their descriptions, each variable once.

    `inputs` has the number of the input of each layer by the id of the layer.
    """
    seen: set[int] = set()
    derivations, uses = find_derivations_by_variable_id(layers), find_weight_axis_roles(layers, inputs)
    for model, prefix, root in _iterate_root_layers_with_names(layers):
        for entry in _describe_variables_in_layer(root, model, prefix, derivations, uses):
            if id(entry.variable) not in seen:
                seen.add(id(entry.variable))
                yield entry


def _describe_variables_in_layer(
    layer: Any,
    model: str,
    prefix: str,
    derivations: Mapping[int, WeightDerivation],
    uses: Mapping[int, AxisRoles],
) -> Iterator[DescribedVariable]:
    """Yield the variables in and below a layer. `derivations` and `uses` have ids of variables as keys."""
    # A layer stores its frozen weights with the trained ones, and moving statistics in another list.
    weight_ids = {id(v) for each in layer._flatten_layers() for v in each._trainable_variables}
    for found in find_variables(layer):
        path, trainable = prefix + found.path, bool(found.variable.trainable)
        kind = Kind.WEIGHT if trainable or id(found.variable) in weight_ids else Kind.STATE
        rest: dict[str, Any] = {"aliases": tuple(prefix + alias for alias in found.aliases)}
        if kind is Kind.WEIGHT:
            rest["trainable"] = trainable
        of = derivations.get(id(found.variable))
        if of is not None:
            parent = path[: path.rfind(".") + 1] + of.parent
            rest |= {"parent": parent, "axes": of.axes, "parent_shape": of.shape}
        elif id(found.variable) in uses:
            rest["use"] = uses[id(found.variable)]
        yield _describe_variable(
            found.variable, path, Kind.RNG if found.is_seed else kind, model=model, **rest
        )


def _describe_untracked_variables(
    layers: Sequence[object],
    variables: Sequence[object],
    described_ids: set[int],
    find_standalone_kind: Callable[[Any], Kind],
) -> Iterator[DescribedVariable]:
    """Describe variables in attributes of objects that are not layers. Leave out metrics of models."""
    models = [layer for layer in layers if isinstance(layer, keras.Model)]
    others = described_ids | {id(variable) for model in models for variable in model.metrics_variables}
    wanted = {id(variable) for variable in variables if not is_global_seed_variable(variable)} - others
    for model, prefix, root in _iterate_root_layers_with_names(layers) if wanted else ():
        for found in find_untracked_variables(root, wanted):
            wanted.discard(id(found.variable))
            kind = Kind.RNG if found.is_seed else find_standalone_kind(found.variable)
            yield _describe_variable(found.variable, prefix + found.path, kind, model=model)


def _describe_slot(
    variable: keras.Variable, weight: DescribedVariable, reduced: ReducedSlot | None, taken_paths: set[str]
) -> DescribedVariable:
    """Describe an optimizer slot of a weight. `reduced` is None if the slot has the shape of the weight."""
    spec = weight.spec
    path = make_slot_path(variable, weight.variable, spec.path, taken_paths, reduced.kind if reduced else "")
    rest: dict[str, Any] = {"parent": spec.path, "model": spec.model}
    if reduced:
        rest |= {"axes": reduced.axes, "parent_shape": spec.shape}
    return _describe_variable(variable, path, Kind.SLOT, **rest)


def _describe_variable(variable: keras.Variable, path: str, kind: Kind, **rest: Any) -> DescribedVariable:
    shape = tuple(int(n) for n in variable.shape)
    dtype = keras.backend.standardize_dtype(variable._dtype)
    # Rules for Keras names do not apply to slots, so slots get no Keras name.
    name = "" if kind is Kind.SLOT else f"{KERAS}{variable.path}"
    return DescribedVariable(variable, VariableSpec(path, shape, dtype, kind, name=name, **rest))
