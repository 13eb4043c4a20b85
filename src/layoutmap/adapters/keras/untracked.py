"""Find variables of a scope that no layer, metric, or optimizer of a model contains.

Some are in attributes of other objects, such as the generator of a sampler, and are named by these attributes. Others
belong to objects without references, such as a layer that was copied, or a smaller model with the same layers. They
stay alive until Python collects garbage, so the session collects garbage before it describes variables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType

import keras

from layoutmap.adapters.keras.paths import (
    VariableWithPaths,
    find_layers,
    find_root_layers,
    iterate_public_attributes,
    number_duplicate_paths,
)
from layoutmap.adapters.keras.registry import Registry

_DEPTH = 4  # the maximum depth of nested objects below a layer
_NOT_SEARCHED = (
    type,
    str,
    bytes,
    ModuleType,
    FunctionType,
    MethodType,
    keras.layers.Layer,
    keras.Metric,
    # Rules for a weight would match the paths of variables in its initializer, so leave initializers out.
    keras.initializers.Initializer,
    keras.optimizers.Optimizer,
    keras.KerasTensor,
)


# Python frees cycles at arbitrary times, so if this function finds ids, the session collects garbage (decisions/0005).
def find_possible_garbage_ids(registry: Registry) -> set[int]:
    """Return ids of possible garbage: variables and optimizers that no model uses, and root layers if several exist."""
    layers = registry.list_layers()
    tops = find_root_layers(layers)
    models = [layer for layer in layers if isinstance(layer, keras.Model)]
    used = [model.optimizer for model in models if getattr(model, "optimizer", None) is not None]
    held = {id(v) for thing in (*tops, *used) for v in thing.variables}
    held |= {id(v) for model in models for v in model.metrics_variables}
    found = {id(v) for v in registry.list_variables() if id(v) not in held}
    found |= {
        id(optimizer)
        for optimizer in registry.list_optimizers()
        if not any(optimizer is each for each in used)
    }
    return found | ({id(top) for top in tops} if len(tops) > 1 else set())


def find_untracked_variables(
    root: object, wanted_ids: Collection[int] | None = None
) -> list[VariableWithPaths]:
    """Return variables in attributes of objects that are not layers, but only those in `wanted_ids` if given."""
    found: dict[int, VariableWithPaths] = {}
    seen: set[int] = set()
    for path, layer in [("", root), *find_layers(root)]:
        for below, variable, is_seed in _iterate_nested_variables(layer, seen, _DEPTH):
            if wanted_ids is None or id(variable) in wanted_ids:
                name = f"{path}.{below}" if path else below
                found.setdefault(id(variable), VariableWithPaths(variable, name, is_seed=is_seed))
    return number_duplicate_paths(found.values())


def _iterate_nested_variables(
    owner: object, visited_ids: set[int], max_depth: int
) -> Iterator[tuple[str, object, bool]]:
    """Yield tuples of a path, a variable, and whether it is a seed state, for variables in nested attributes."""
    for name, child in _list_named_children(owner):
        if isinstance(child, keras.Variable):
            yield name, child, isinstance(owner, keras.random.SeedGenerator)
        elif max_depth and id(child) not in visited_ids and not isinstance(child, _NOT_SEARCHED):
            visited_ids.add(id(child))
            for path, variable, is_seed in _iterate_nested_variables(child, visited_ids, max_depth - 1):
                yield f"{name}.{path}", variable, is_seed


def _list_named_children(owner: object) -> list[tuple[str, object]]:
    if isinstance(owner, Mapping):
        return [(str(key), value) for key, value in owner.items()]
    if isinstance(owner, (list, tuple)):
        return [(str(i), value) for i, value in enumerate(owner)]
    return list(iterate_public_attributes(owner)) if hasattr(owner, "__dict__") else []
