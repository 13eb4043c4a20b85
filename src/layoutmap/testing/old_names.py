"""Keep the old names of methods that subclasses of the contracts define."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from layoutmap.core.old_names import warn_about_old_name


class OldMethodNames:
    """Let subclasses define and call methods by their old names, with a warning."""

    old_names: ClassVar[Mapping[str, str]] = {}
    """The new name of each method, by its old name."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for old in vars(cls).keys() & cls.old_names.keys():
            warn_about_old_name(old, cls.old_names[old])
            setattr(cls, cls.old_names[old], vars(cls)[old])

    if not TYPE_CHECKING:  # hide this from type checkers, which would accept any method name

        def __getattr__(self, name: str) -> Any:
            if name not in self.old_names:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            warn_about_old_name(name, self.old_names[name])
            return getattr(self, self.old_names[name])
