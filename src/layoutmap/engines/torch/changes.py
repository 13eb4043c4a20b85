"""Patch torch while tensors on a mesh exist, and remove the patches when none is left.

DTensors compute correctly because of these patches, so they stay as long as something needs them: a tensor on a mesh of
layoutmap, or a running call. After each full garbage collection, such as `gc.collect()`, this module looks for these,
and removes the patches if there are none. It removes nothing while a function of layoutmap runs.

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
"""The device meshes of layoutmap's tensors."""
_installed: list[Patch] = []
_restore_callbacks = ExitStack()
_keepers: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.RLock()  # reentrant, because garbage collection may run while the lock is held


def install_patches(*patches: Patch) -> None:
    """Install patches of torch. They are removed when no tensor on a mesh exists any more."""
    with _lock:
        for patch in patches:
            if patch not in _installed:  # several scopes may install the same patch, so add it only once
                _installed.append(patch)
            patch.install()
        if _restore_torch_if_unused not in gc.callbacks:
            gc.callbacks.append(_restore_torch_if_unused)


def call_when_patches_are_removed(function: Callable[[], object]) -> None:
    """Register a function to call when the patches are removed, in reverse order of registration."""
    _restore_callbacks.callback(function)


def keep_patches_while_alive(owner: object) -> None:
    """Keep the patches as long as an object exists, such as a sharded module or a context manager."""
    _keepers.add(owner)


# Nothing reports that the last tensor on a mesh is gone, so each full garbage collection checks this, and then calls
# this function (decisions/0150).
def restore_torch() -> None:
    """Remove all patches of torch."""
    with _lock:
        for patch in reversed(_installed):  # one patch may wrap another, so remove the last one first
            patch.remove()
        _installed.clear()
        meshes.clear()
        gc.callbacks.remove(_restore_torch_if_unused)
        _restore_callbacks.close()  # last, so that an error here does not prevent the removals above


def _restore_torch_if_unused(phase: str, info: Mapping[str, int]) -> None:
    """Remove the patches after a full garbage collection, if nothing needs them."""
    if phase == "stop" and info["generation"] == 2 and not _keepers and not _has_users_of_patches():
        restore_torch()


def _has_users_of_patches() -> bool:
    """Return whether a thread runs code of layoutmap, or a tensor on one of its meshes exists."""
    return any(map(_is_running_layoutmap, sys._current_frames().values())) or any(  # pyright: ignore[reportPrivateUsage]
        issubclass(type(each), DTensor) and each.device_mesh in meshes for each in gc.get_objects()
    )


def _is_running_layoutmap(frame: types.FrameType | None) -> bool:
    """Return whether a frame or one of its callers is code in a package of layoutmap that needs the patches."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_PATCHED_PACKAGES) and name != __name__:
            return True
        frame = frame.f_back
    return False


_PATCHED_PACKAGES = ("layoutmap.engines.torch", "layoutmap.adapters", "layoutmap.scope", "layoutmap.dtensor")
