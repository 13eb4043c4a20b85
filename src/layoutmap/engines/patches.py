"""Replace attributes of a library temporarily, so that no interrupt leaves a replacement behind.

A `KeyboardInterrupt` can come before any line, also before the first one of an `__exit__`, or between a change and the
`try` that would undo it. So nothing here counts uses. A use of patches is an object that the running `with` block
references. It ends when the block ends, or else when the object is garbage-collected. PatchGroup can be installed and
removed repeatedly, and removing restores the attribute that was found (decisions/0025).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, cast


class SelfClosingContext:
    """A context manager that is also closed when it is garbage-collected.

    Subclasses implement `open_context` and `close_context`. A second `close_context` must have no effect.
    """

    def open_context(self) -> None:
        """Enter the context."""
        raise NotImplementedError

    def close_context(self) -> None:
        """Leave the context, even if it was entered only in part."""
        raise NotImplementedError

    _has_begun = False

    def __enter__(self) -> None:
        self._has_begun = True
        self.open_context()

    def __exit__(self, *_: object) -> None:
        self.close_context()
        self._has_begun = False

    def __del__(self) -> None:
        if self._has_begun:
            self.close_context()


class Patch(Protocol):
    """A change to a library that can be installed and removed repeatedly."""

    def install(self) -> None:
        """Install the change unless it is installed."""
        ...

    def remove(self) -> None:
        """Remove the change if it is installed."""
        ...


_INHERITED = object()


class AttributePatch:
    """Replace one attribute of a class or module.

    Another library may replace the attribute, too, while this patch is installed. Then `remove` keeps that library's
    replacement, which may still call the one of this patch. So a replacement must act only while it is needed.

    Args:
        owner: The class or module.
        name: The name of the attribute. If the owner inherits it, `remove` deletes the replacement.
        make_replacement: Returns the replacement for the original attribute.
    """

    def __init__(self, owner: Any, name: str, make_replacement: Callable[[Any], object]):
        self._owner, self._name, self._make_replacement = owner, name, make_replacement
        # Pairs of a replacement and the original. A pair is added before the attribute changes, so that an interrupt
        # loses no original.
        self._replaced: list[tuple[object, object]] = []

    def install(self) -> None:
        """Replace the attribute, unless it is already replaced."""
        found = cast(dict[str, object], vars(self._owner)).get(self._name, _INHERITED)
        if all(ours is not found for ours, _ in self._replaced):
            ours = self._make_replacement(getattr(self._owner, self._name) if found is _INHERITED else found)
            self._replaced.append((ours, found))
            setattr(self._owner, self._name, ours)

    def remove(self) -> None:
        """Restore the original attribute where the replacement is still in place."""
        now = cast(dict[str, object], vars(self._owner)).get(self._name, _INHERITED)
        for pair in [pair for pair in self._replaced if pair[0] is now]:
            if pair[1] is _INHERITED:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, pair[1])
            self._replaced.remove(pair)


class ItemPatch:
    """Add an item to a dict in which a library looks up hooks."""

    def __init__(self, items: MutableMapping[Any, Any], key: object, value: object):
        self._items, self._key, self._value = items, key, value

    def install(self) -> None:
        """Add the item."""
        self._items[self._key] = self._value

    def remove(self) -> None:
        """Remove the item."""
        self._items.pop(self._key, None)


def make_patch_if_present(owner: object, name: str, wrap: Callable[[Any], Any]) -> Iterator[AttributePatch]:
    """Yield a patch that wraps a function and keeps its signature, or nothing if `owner` lacks the function."""
    # If the name is missing, patch nothing, because the library itself reports the missing feature.
    if hasattr(owner, name):
        yield AttributePatch(owner, name, lambda original: functools.wraps(original)(wrap(original)))


# Ctrl-C can interrupt `__exit__`, so patches are also removed at garbage collection of the context (decisions/0025).
class PatchGroup:
    """Install several patches together, as long as any thread uses them.

    Args:
        patches: The patches. No other `PatchGroup` may replace the same attribute.

    Example:
        >>> class Theirs:
        ...     def name(self):
        ...         return "theirs"
        >>> patches = PatchGroup([AttributePatch(Theirs, "name", lambda name: lambda self: name(self).upper())])
        >>> with patches.activate(), patches.activate():
        ...     Theirs().name()
        'THEIRS'
        >>> Theirs().name()
        'theirs'
    """

    def __init__(self, patches: Iterable[Patch]):
        self._patches = tuple(patches)
        self._uses: weakref.WeakSet[_PatchUse] = weakref.WeakSet()
        # Reentrant, because garbage collection may close a context manager of this thread while the thread holds the
        # lock.
        self._lock = threading.RLock()

    def activate(self) -> SelfClosingContext:
        """Return a context manager during which the patches are installed."""
        return _PatchUse(self)

    def add_use(self, use: _PatchUse) -> None:
        """Register a use, and install the patches that are not installed."""
        with self._lock:
            self._uses.add(use)
            for patch in self._patches:
                patch.install()

    def remove_use(self, use: _PatchUse) -> None:
        """Unregister a use, and remove the patches if no use is left."""
        with self._lock:
            self._uses.discard(use)
            if not self._uses:
                for patch in self._patches:
                    patch.remove()


class _PatchUse(SelfClosingContext):
    """A use of `PatchGroup` in a `with` block. It ends with the block, or when this object is garbage-collected."""

    def __init__(self, patches: PatchGroup):
        self._patches = patches

    def open_context(self) -> None:
        self._patches.add_use(self)

    def close_context(self) -> None:
        self._patches.remove_use(self)


@contextmanager
def set_attribute_temporarily(owner: object, name: str, value: object) -> Generator[None]:
    """Set an attribute of an object of layoutmap, such as a thread-local one, until the block ends.

    Example:
        >>> class Here:
        ...     depth = 0
        >>> with set_attribute_temporarily(Here, "depth", 1):
        ...     Here.depth
        1
        >>> Here.depth
        0
    """
    before = getattr(owner, name, None)
    try:
        setattr(owner, name, value)
        yield
    finally:
        setattr(owner, name, before)


def wrap_method_in_context(
    method: Callable[..., Any], make_context: Callable[[], AbstractContextManager[object]]
) -> Callable[..., Any]:
    """Return a method that runs each call of `method` in a new context."""

    @functools.wraps(method)
    def call_in_context(*args: object, **kwargs: object) -> Any:
        with make_context():
            return method(*args, **kwargs)

    return call_in_context


def patch_method_context(
    owner: object, name: str, make_context: Callable[[], AbstractContextManager[object]]
) -> SelfClosingContext:
    """Run each call of a method in a new context until the block ends."""
    patch = AttributePatch(owner, name, lambda method: wrap_method_in_context(method, make_context))
    return PatchGroup([patch]).activate()
