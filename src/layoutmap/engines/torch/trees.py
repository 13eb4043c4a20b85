"""Flatten and map nested containers of tensors with torch's pytree functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from layoutmap.engines.tested import ImportErrorConverter

if TYPE_CHECKING:
    from typing_extensions import TypeIs

with ImportErrorConverter("torch"):  # a private module, which other releases of torch may lack
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as _tree_map

tree_map: Callable[[Callable[[Any], object], Any], Any] = _tree_map


def is_sequence(value: object) -> TypeIs[list[Any] | tuple[Any, ...]]:
    """Return whether a value is a list or a tuple. `isinstance` would leave the item type unknown."""
    return isinstance(value, (list, tuple))


def is_mapping(value: object) -> TypeIs[Mapping[Any, Any]]:
    """Return whether a value is a mapping, such as a dict."""
    return isinstance(value, Mapping)
