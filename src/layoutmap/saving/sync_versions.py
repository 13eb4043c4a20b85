"""Versions of weights at both ends of syncs, so that a sampler that missed a sync is found."""

# Only objects have an identity: each update of a pytree makes another tree, so trees have no versions (decisions/0241).
from __future__ import annotations

from collections.abc import MutableMapping
from weakref import WeakKeyDictionary, ref

Versions = MutableMapping[object, int]

_newest: Versions = WeakKeyDictionary()
_received: MutableMapping[object, Versions] = WeakKeyDictionary()


def has_identity(model: object) -> bool:
    """Return whether a model stays one object while it is trained, as modules do and trees do not."""
    try:
        hash(model)
        ref(model)
    except TypeError:
        return False
    return True


def begin_version(trainer: object, version: int | None, last: int) -> int:
    """Return the version number of the trainer's new sync, for a sampler that has version `last`."""
    if not has_identity(trainer):
        return last + 1 if version is None else version
    newest = _newest.get(trainer, 0)
    begun = max(last + 1, newest) if version is None else version
    _newest[trainer] = max(begun, newest)
    return begun


def record_version(trainer: object, sampler: object, version: int) -> None:
    """Record that the sampler has the weights of this version of the trainer."""
    if has_identity(trainer) and has_identity(sampler):
        _received.setdefault(sampler, WeakKeyDictionary())[trainer] = version


def find_missed_version(sampler: object) -> tuple[int, int] | None:
    """Return the version of the sampler's weights and the newest one of its trainer, or `None` if they are equal."""
    if not has_identity(sampler):
        return None
    versions = _received.get(sampler, {})
    return next(((own, new) for each, own in versions.items() if own < (new := _newest[each])), None)
