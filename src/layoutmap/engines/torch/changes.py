"""Patch torch while tensors on a mesh exist, and remove the patches when none is left.

DTensors compute right by what is changed in `DTensor` and beside it, so it is changed as long as anything needs it: a
tensor that this library has placed, one that was computed of it, or an open call. Python's garbage collector tells when
that may have ended: after each collection of all generations, as `gc.collect()` makes, it is looked for. Nothing is
taken back while a function of this library runs.

`docs/torch-changes.md` lists what is changed, and `tests/engines/torch/test_changes.py` compares all of torch with it.
"""

from __future__ import annotations

import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from layoutmap.engines.patches import Patch

meshes: set[DeviceMesh] = set()
"""The device meshes of this library's tensors."""
_installed: list[Patch] = []
_restore_callbacks = ExitStack()
_keepers: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.RLock()  # reentrant, because garbage collection may run while the lock is held


def change(*patches: Patch) -> None:
    """Install patches until no tensor on a mesh is left."""
    with _lock:
        for patch in patches:
            if patch not in _installed:  # another scope has not installed it
                _installed.append(patch)
            patch.install()
        if _restore_if_unused not in gc.callbacks:
            gc.callbacks.append(_restore_if_unused)


def call_on_restore(do: Callable[[], object]) -> None:
    """Register a function to call when the patches are removed, the last one first."""
    _restore_callbacks.callback(do)


def keep_patches(what: object) -> None:
    """Keep the patches while an object exists, such as a sharded module or an open context."""
    _keepers.add(what)


# Weak references cannot tell when the last tensor is gone, so garbage collection triggers this (decisions/0150).
def restore_torch() -> None:
    """Remove all patches of torch."""
    with _lock:
        for patch in reversed(_installed):  # patches may stack, so remove them in reverse order
            patch.remove()
        _installed.clear()
        meshes.clear()
        gc.callbacks.remove(_restore_if_unused)
        _restore_callbacks.close()  # last, so that a failure does not prevent the removals above


def _restore_if_unused(phase: str, info: Mapping[str, int]) -> None:
    if phase == "stop" and info["generation"] == 2 and not _keepers and not _is_needed():
        restore_torch()


def _is_needed() -> bool:
    """Return whether a function of this library runs, or a tensor on one of its meshes exists."""
    return any(map(_is_inside, sys._current_frames().values())) or any(  # pyright: ignore[reportPrivateUsage]
        issubclass(type(each), DTensor) and each.device_mesh in meshes for each in gc.get_objects()
    )


def _is_inside(frame: types.FrameType | None) -> bool:
    """Return whether a thread runs a function that may be about to use torch."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_PATCHED_PACKAGES) and name != __name__:
            return True
        frame = frame.f_back
    return False


_PATCHED_PACKAGES = ("layoutmap.engines.torch", "layoutmap.adapters", "layoutmap.scope", "layoutmap.dtensor")
