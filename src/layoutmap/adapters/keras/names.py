"""Generate stable names for unnamed layers.

Paths contain layer names in Functional and Sequential models, and for layers without a parent. Keras numbers the names
of unnamed layers per process, such as `dense_7`, so the same model would have other paths when it is built again.
Therefore, such layers are numbered anew within their parent: `dense`, `dense_1`, ...

A name that the user chose is never changed, even if it looks numbered. Only for layers that are created in a scope is
it known who chose the name. In other models, all names count as chosen by the user.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from layoutmap.adapters.keras.private import to_snake_case

_CONSTRUCTOR_TEXTS = "_layoutmap_given"


def record_constructor_texts(layer: object, constructor_texts: Iterable[str]) -> None:
    """Record the texts passed to a layer's constructor. If the name is one of them, the user chose it."""
    layer.__dict__[_CONSTRUCTOR_TEXTS] = frozenset(constructor_texts)


def remove_constructor_texts(layer: object) -> None:
    """Remove the record that `record_constructor_texts` made."""
    layer.__dict__.pop(_CONSTRUCTOR_TEXTS, None)


def has_constructor_texts(layer: object) -> bool:
    """Return whether a layer has a record of the texts that were passed to its constructor."""
    return _CONSTRUCTOR_TEXTS in layer.__dict__


# Keras numbers layers over the whole process, so restart the numbers within each parent (decisions/0005).
def renumber_names(layers: Sequence[Any]) -> list[str]:
    """Return the names of sibling layers. Names that Keras generated get numbers that count only the siblings."""
    names = {id(layer): layer.name for layer in layers}
    numbered = [
        (*found, layer)
        for layer in layers
        if is_user_named(layer) is False and (found := parse_default_name(layer))
    ]
    taken = set(names.values()) - {layer.name for *_, layer in numbered}
    for prefix, _, layer in sorted(numbered, key=lambda entry: entry[:2]):
        count = 0
        while (name := f"{prefix}_{count}" if count else prefix) in taken:
            count += 1
        taken.add(name)
        names[id(layer)] = name
    return [names[id(layer)] for layer in layers]


def is_user_named(layer: Any) -> bool | None:
    """Return whether the user named a layer, or None if its constructor's texts are unknown."""
    given = layer.__dict__.get(_CONSTRUCTOR_TEXTS)
    return None if given is None else layer.name in given


def parse_default_name(layer: Any, name: str | None = None) -> tuple[str, int] | None:
    """Return prefix and number of a layer's name, or of `name`, if it looks like Keras's default, else None."""
    prefix, number = split_name_and_number(layer.name if name is None else name)
    return (prefix, number) if prefix == to_snake_case(type(layer).__name__) else None


def split_name_and_number(name: str) -> tuple[str, int]:
    """Return the prefix and the number of a name such as `dense_7`. A name without a number has the number 0."""
    found = re.fullmatch(r"(.+?)_(\d+)", name)
    return (found[1], int(found[2])) if found else (name, 0)
