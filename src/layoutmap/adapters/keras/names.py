"""Generate stable names for unnamed layers.

Where a path goes by a layer's name (in Functional and Sequential models, and for a layer on its own), a layer without a
name of its own has one that Keras numbered: `dense_7`, after six others of its class in this process. Built again, the
same model would have other paths. So such layers are numbered anew inside what holds them: `dense`, `dense_1`, ...

A name that was given is never changed, even if it looks numbered. Only a layer made in a scope is known to have been
given none; in a model that exists, or is loaded, all names count as given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from layoutmap.adapters.keras.private import to_snake_case

_GIVEN = "_layoutmap_given"


def note_given(layer: object, texts: Iterable[str]) -> None:
    """Record the texts passed to a layer's constructor. If the name is one of them, the user chose it."""
    layer.__dict__[_GIVEN] = frozenset(texts)


def forget_given(layer: object) -> None:
    """Remove the record that `note_given` made."""
    layer.__dict__.pop(_GIVEN, None)


def is_noted(layer: object) -> bool:
    """Return whether a layer has a record of the texts that were passed to its constructor."""
    return _GIVEN in layer.__dict__


# Keras numbers layers over the whole process, so restart the numbers within each parent (decisions/0005).
def renumber_names(layers: Sequence[Any]) -> list[str]:
    """Return the names of sibling layers, with Keras's automatic numbers restarted."""
    names = {id(layer): layer.name for layer in layers}
    numbered = [
        (*found, layer)
        for layer in layers
        if is_given(layer) is False and (found := parse_default_name(layer))
    ]
    taken = set(names.values()) - {layer.name for *_, layer in numbered}
    for prefix, _, layer in sorted(numbered, key=lambda entry: entry[:2]):
        count = 0
        while (name := f"{prefix}_{count}" if count else prefix) in taken:
            count += 1
        taken.add(name)
        names[id(layer)] = name
    return [names[id(layer)] for layer in layers]


def is_given(layer: Any) -> bool | None:
    """Return whether the user named a layer, or None if unknown."""
    given = layer.__dict__.get(_GIVEN)
    return None if given is None else layer.name in given


def parse_default_name(layer: Any, name: str | None = None) -> tuple[str, int] | None:
    """Return the prefix and number of a name that looks like a default of Keras, or None."""
    prefix, number = split_number(layer.name if name is None else name)
    return (prefix, number) if prefix == to_snake_case(type(layer).__name__) else None


def split_number(name: str) -> tuple[str, int]:
    """Split a name into its prefix and its number, or 0 without one."""
    found = re.fullmatch(r"(.+?)_(\d+)", name)
    return (found[1], int(found[2])) if found else (name, 0)
