"""Keep old spellings of public names, with a warning, until the next minor version."""

from __future__ import annotations

import warnings
from typing import Any


def warn_about_old_name(old: str, new: str, stacklevel: int = 3) -> None:
    """Give a `DeprecationWarning` that a public name was replaced by a new one."""
    warnings.warn(f"{old} has the new name {new}", DeprecationWarning, stacklevel=stacklevel)


class DeprecatedAlias:
    """Descriptor that returns the attribute with the new name, and warns that the name was changed.

    Args:
        new: The new name.

    Example:
        >>> class Grid:
        ...     def count_cells(self):
        ...         return 4
        ...
        ...     cells = DeprecatedAlias("count_cells")
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     Grid().cells(), str(caught[0].message)
        (4, 'Grid.cells has the new name count_cells')
    """

    def __init__(self, new: str) -> None:
        self._new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = name

    def __get__(self, instance: object, owner: type) -> Any:
        warn_about_old_name(f"{owner.__name__}.{self._old}", self._new)
        return getattr(owner if instance is None else instance, self._new)
