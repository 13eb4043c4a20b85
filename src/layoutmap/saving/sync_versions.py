"""Record the version of weights at both ends of a sync, to detect a sampler that missed one."""

# Only objects have an identity: each update of a pytree creates a new tree, so trees have
# no versions (decisions/0241).
from __future__ import annotations

from collections.abc import MutableMapping
from weakref import WeakKeyDictionary, ref

Versions = MutableMapping[object, int]

_newest: Versions = WeakKeyDictionary()
_received: MutableMapping[object, Versions] = WeakKeyDictionary()


def has_identity(model: object) -> bool:
    """Return whether a model remains the same object during training, as modules do and pytrees do not."""
    try:
        hash(model)
        ref(model)
    except TypeError:
        return False
    return True


def begin_version(trainer: object, version: int | None, last: int) -> int:
    """Return the version number of the trainer's next sync. The sampler has version `last`."""
    if not has_identity(trainer):
        return last + 1 if version is None else version
    newest = _newest.get(trainer, 0)
    begun = max(last + 1, newest) if version is None else version
    _newest[trainer] = max(begun, newest)
    return begun


def record_version(trainer: object, sampler: object, version: int) -> None:
    """Record the version of the trainer's weights that the sampler now has."""
    if has_identity(trainer) and has_identity(sampler):
        _received.setdefault(sampler, WeakKeyDictionary())[trainer] = version


def find_missed_version(sampler: object) -> tuple[int, int] | None:
    """Return the sampler's version and the trainer's newest one, or `None` if they are equal."""
    if not has_identity(sampler):
        return None
    versions = _received.get(sampler, {})
    return next(((own, new) for each, own in versions.items() if own < (new := _newest[each])), None)
