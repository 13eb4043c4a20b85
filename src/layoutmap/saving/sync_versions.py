"""Record the version of weights at both ends of a sync, to detect a sampler that missed a sync."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary, ref

from layoutmap.engines.protocol import Array

Versions = MutableMapping[object, int]
"""Version of the weights, by the identity of the trainer."""

_newest: Versions = WeakKeyDictionary()
_received: MutableMapping[object, Versions] = WeakKeyDictionary()


class TreeIdentity:
    """Identity of a trainer that is a tree of arrays. It stays the same if an update makes a new tree."""


# Each update makes a new tree, so the version of a tree is stored by its arrays (decisions/0241). Arrays cannot be
# hashed, so the keys of tables are ids, and an entry is removed when its array is garbage-collected.
_Table = dict[int, tuple[ref[Any], Any]]
_trained: _Table = {}
_synced: _Table = {}


def _get_entry(table: _Table, array: Array) -> Any:
    return table.get(id(array), (None, None))[1]


def _set_entry(table: _Table, array: Array, value: object) -> None:
    key = id(array)
    table[key] = (ref(array, lambda _: table.pop(key, None)), value)


def has_stable_identity(model: object) -> bool:
    """Return whether a model remains the same object during training, as modules do and pytrees do not."""
    try:
        hash(model)
        ref(model)
    except TypeError:
        return False
    return True


def find_trainer_identity(trainer: object, arrays: Iterable[Array], last: object) -> object:
    """Return the identity of a trainer: the trainer itself, or for a tree an object that is stored for its first array.

    Args:
        trainer: The trainer.
        arrays: The arrays of the trainer.
        last: Identity of the tree before the last update. `None`: there is none.
    """
    first = None if has_stable_identity(trainer) else next(iter(arrays), None)
    if first is None:
        return trainer if has_stable_identity(trainer) else TreeIdentity()
    identity = _get_entry(_trained, first) or last or TreeIdentity()
    _set_entry(_trained, first, identity)
    return identity


def choose_and_record_sync_version(identity: object, version: int | None, last: int) -> int:
    """Return the version number of the next sync. Record it as the trainer's newest version, unless one is newer."""
    newest = _newest.get(identity, 0)
    begun = max(last + 1, newest) if version is None else version
    _newest[identity] = max(begun, newest)
    return begun


def record_sampler_version(identity: object, sampler: object, version: int) -> None:
    """Record which version of the trainer's weights a sampler now has. Do nothing for a tree."""
    if has_stable_identity(sampler):
        _received.setdefault(sampler, WeakKeyDictionary())[identity] = version


def record_tree_array_versions(identity: object, arrays: Iterable[Array], version: int) -> None:
    """Record the version of a tree's arrays, except of arrays that have a version of this trainer already."""
    versions: Versions = WeakKeyDictionary({identity: version})
    for array in arrays:
        own = _get_entry(_synced, array)
        if own is None:
            _set_entry(_synced, array, versions)
        elif identity not in own:
            _set_entry(_synced, array, WeakKeyDictionary({**own, identity: version}))


def find_missed_version(
    sampler: object, list_arrays: Callable[[], Iterable[Array]]
) -> tuple[int, int] | None:
    """Return a sampler's version and the trainer's newer version, or None if the sampler has missed no sync."""
    found: list[Versions] = []
    if has_stable_identity(sampler):
        found.append(_received.get(sampler, {}))
    elif _synced:
        found += filter(None, (_get_entry(_synced, array) for array in list_arrays()))
    missed = ((own, new) for each in found for key, own in each.items() if own < (new := _newest[key]))
    return next(missed, None)
