"""Find variables of a scope that no layer, metric, or optimizer of a model contains.

Some of it is held by other objects, such as the generator of a sampler, and goes by their attributes. Some is what a
model was made from and nobody holds any more: a layer that was copied, a smaller model with the same layers. It stays
alive until Python collects garbage, so the session has it do so before it describes what there is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType

import keras

from layoutmap.adapters.keras.paths import (
    FoundVariable,
    find_layers,
    find_roots,
    list_attributes,
    number_equal_paths,
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
    # rules for the weight would match the path of variables inside an initializer
    keras.initializers.Initializer,
    keras.optimizers.Optimizer,
    keras.KerasTensor,
)


# Python frees cycles at any time, so find unreferenced objects and collect them first (decisions/0005).
def find_loose_ids(registry: Registry) -> set[int]:
    """Return the ids of objects outside models, and of the models if several exist, because some may be garbage."""
    layers = registry.layers()
    tops = find_roots(layers)
    models = [layer for layer in layers if isinstance(layer, keras.Model)]
    used = [model.optimizer for model in models if getattr(model, "optimizer", None) is not None]
    held = {id(v) for thing in (*tops, *used) for v in thing.variables}
    held |= {id(v) for model in models for v in model.metrics_variables}
    found = {id(v) for v in registry.variables() if id(v) not in held}
    found |= {
        id(optimizer) for optimizer in registry.optimizers() if not any(optimizer is each for each in used)
    }
    return found | ({id(top) for top in tops} if len(tops) > 1 else set())


def find_untracked(root: object, wanted: Collection[int] | None = None) -> list[FoundVariable]:
    """Find variables in objects that are no layers, below a layer or model, limited to the ids in `wanted` if given."""
    found: dict[int, FoundVariable] = {}
    seen: set[int] = set()
    for path, layer in [("", root), *find_layers(root)]:
        for below, variable, is_seed in _search_variables(layer, seen, _DEPTH):
            if wanted is None or id(variable) in wanted:
                name = f"{path}.{below}" if path else below
                found.setdefault(id(variable), FoundVariable(variable, name, is_seed=is_seed))
    return number_equal_paths(found.values())


def _search_variables(owner: object, seen: set[int], depth: int) -> Iterator[tuple[str, object, bool]]:
    for name, child in _list_children(owner):
        if isinstance(child, keras.Variable):
            yield name, child, isinstance(owner, keras.random.SeedGenerator)
        elif depth and id(child) not in seen and not isinstance(child, _NOT_SEARCHED):
            seen.add(id(child))
            for path, variable, is_seed in _search_variables(child, seen, depth - 1):
                yield f"{name}.{path}", variable, is_seed


def _list_children(owner: object) -> list[tuple[str, object]]:
    if isinstance(owner, Mapping):
        return [(str(key), value) for key, value in owner.items()]
    if isinstance(owner, (list, tuple)):
        return [(str(i), value) for i, value in enumerate(owner)]
    return list(list_attributes(owner)) if hasattr(owner, "__dict__") else []
