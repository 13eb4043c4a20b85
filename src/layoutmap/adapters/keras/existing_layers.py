"""Refuse layers that existed before the scope and would create variables in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from layoutmap.adapters.keras.paths import list_sublayers
from layoutmap.core.errors import ScopeError


# A plan would leave variables of existing objects without values, so refuse them (decisions/0027).
def make_existing_error(thing: Any, plan_only: bool) -> ScopeError:
    """Return the error for an existing layer or optimizer that would create variables in a scope."""
    kinds = {keras.Optimizer: "optimizer", keras.Model: "model"}
    kind = next((name for each, name in kinds.items() if isinstance(thing, each)), "layer")
    where = "plan() was called" if plan_only else "the scope was opened"
    fix = f"make the {kind} inside the function" if plan_only else f"make the {kind} inside the scope"
    if kind != "optimizer":
        fix += ", or lay out a model that exists and has its weights: layout_map.apply(model)"
    return ScopeError(
        f"{kind} {thing.name!r} existed before {where}, and would make variables now",
        why="plan() must leave it as it is, and what it makes here never gets a value"
        if plan_only
        else "a scope lays out what is made in it, and has no path for variables of anything else",
        fix=fix,
    )


def find_existing_layers(layers: Iterable[object], is_known: Callable[[object], bool]) -> Iterator[object]:
    """Yield the layers below some layers that are in no scope."""
    todo, seen = list(layers), set[int]()
    while todo:
        for layer in list_sublayers(todo.pop()):
            if id(layer) not in seen and not is_known(layer):
                seen.add(id(layer))
                todo.append(layer)
                yield layer
