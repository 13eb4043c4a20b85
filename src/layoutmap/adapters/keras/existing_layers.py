"""Refuse layers that existed before the scope and would create variables in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from layoutmap.adapters.keras.paths import iterate_sublayers
from layoutmap.core.errors import ScopeError


# A plan leaves new variables without values, so raise if an existing object would create some (decisions/0027).
def make_existing_object_error(layer_or_optimizer: Any, plan_only: bool) -> ScopeError:
    """Return the error for an existing layer or optimizer that would create variables in a scope."""
    kinds = {keras.Optimizer: "optimizer", keras.Model: "model"}
    kind = next((name for each, name in kinds.items() if isinstance(layer_or_optimizer, each)), "layer")
    where = "plan() was called" if plan_only else "the scope was opened"
    fix = f"create the {kind} inside the {'function' if plan_only else 'scope'}"
    if kind != "optimizer":
        fix += ", or shard an existing model with weights: layout_map.apply(model)"
    return ScopeError(
        f"{kind} {layer_or_optimizer.name!r} existed before {where}, and would create variables now",
        why=f"plan() leaves an existing {kind} unchanged, so variables that it creates here never get values"
        if plan_only
        else "a scope shards objects that are created in it, and has no paths for variables of other objects",
        fix=fix,
    )


def find_unscoped_layers(
    layers: Iterable[object], get_session: Callable[[object], object]
) -> Iterator[object]:
    """Yield the sublayers of layers, at any depth, for which `get_session` returns None."""
    todo, seen = list(layers), set[int]()
    while todo:
        for layer in iterate_sublayers(todo.pop()):
            if id(layer) not in seen and get_session(layer) is None:
                seen.add(id(layer))
                todo.append(layer)
                yield layer
