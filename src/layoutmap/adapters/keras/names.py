"""Stable names for layers that were given none.

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


def note_given(layer: Any, texts: Iterable[str]) -> None:
    """Note the texts that a layer is constructed with: its name was given if it is one of them."""
    layer.__dict__[_GIVEN] = frozenset(texts)


def unnote(layer: Any) -> None:
    """Forget what `note_given` noted."""
    layer.__dict__.pop(_GIVEN, None)


def is_noted(layer: Any) -> bool:
    """Whether the texts that a layer is constructed with are noted."""
    return _GIVEN in layer.__dict__


def stable_names(layers: Sequence[Any]) -> list[str]:
    """The names of layers that stand beside each other, those that Keras numbered being numbered anew.

    Args:
        layers: The layers. Those that were given one name keep it.
    """
    names = {id(layer): layer.name for layer in layers}
    numbered = [(*found, layer) for layer in layers if (found := _numbered(layer)) is not None]
    taken = set(names.values()) - {layer.name for *_, layer in numbered}
    for prefix, _, layer in sorted(numbered, key=lambda entry: entry[:2]):
        count = 0
        while (name := f"{prefix}_{count}" if count else prefix) in taken:
            count += 1
        taken.add(name)
        names[id(layer)] = name
    return [names[id(layer)] for layer in layers]


def _numbered(layer: Any) -> tuple[str, int] | None:
    """The prefix and number of a name that Keras made up, or `None`."""
    prefix = to_snake_case(type(layer).__name__)
    found = re.fullmatch(re.escape(prefix) + r"(?:_(\d+))?", layer.name)
    given = layer.__dict__.get(_GIVEN)
    return (
        (prefix, int(found.group(1) or 0))
        if found and given is not None and layer.name not in given
        else None
    )
