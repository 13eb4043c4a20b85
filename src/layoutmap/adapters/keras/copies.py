"""Shard copies of sharded models, and warn about or refuse unsharded models that contain sharded layers.

copy.deepcopy    makes the copy in the scope again, so it has the same layouts
pickle           has values and a configuration, and may be read where other devices are: a warning
clone_model      makes new layers, which are unsharded if no scope is open: a warning
load_model       makes new layers, too: a warning, by a mark in the file, while the model that was saved lives
an outer model   was made outside of the scope, and contains its layers: a warning in its first call, and an
                 error in a step that the backend cannot run
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import keras

from layoutmap.adapters.current import get_current_session
from layoutmap.adapters.keras.call_stack import find_running_frame
from layoutmap.adapters.keras.private import CLONING, LOADING, H5IOStore
from layoutmap.adapters.keras.protocol import KerasSession
from layoutmap.core.errors import LayoutMapWarning, ScopeError
from layoutmap.core.users_line import find_user_stacklevel
from layoutmap.engines.patches import AttributePatch, PatchGroup, SelfClosingContext

_MARK = "layoutmap"  # this HDF5 attribute marks files of sharded models
_INNER = frozenset(("copy", "jax", "keras", "pickle", "tensorflow", "torch"))


# A copy can lose its layouts, so shard deep copies again, and warn of pickles and clones (decisions/0056).
def make_copy_method_wrappers(layer: Any, session: KerasSession) -> dict[str, Callable[..., object]]:
    """Return wrappers of a layer's methods that shard deep copies, and warn of pickles and clones without layouts."""
    own_deepcopy = getattr(layer, "__deepcopy__", None)
    original_reduce, original_config = layer.__reduce_ex__, layer.get_config

    def copy_in_scope(memo: object) -> object:
        with session.defer_variables():
            if own_deepcopy is not None:
                return own_deepcopy(memo)
            make, arguments, *_ = original_reduce(4)
            return make(*arguments)

    @functools.wraps(original_reduce)
    def reduce_ex(protocol: object) -> object:
        _warn_at_user_line(
            f"{layer.name}: a pickle of this layer has no layouts",
            why="a pickle has values and a configuration, and may be read on other devices",
            fix="read it in a scope, with layout_map.scope(): model = pickle.loads(..); "
            "or shard the result: layout_map.apply(model)",
        )
        return original_reduce(protocol)

    @functools.wraps(original_config)
    def get_config() -> object:
        if get_current_session() is None and find_running_frame(CLONING) is not None:
            _warn_at_user_line(
                "a sharded model is cloned outside of a scope, so the clone is unsharded",
                why="clone_model creates new layers, which are unsharded without an open scope",
                fix="clone it in a scope: with layout_map.scope(): clone = keras.models.clone_model(model)",
            )
        return original_config()

    return {"__deepcopy__": copy_in_scope, "__reduce_ex__": reduce_ex, "get_config": get_config}


def wrap_save_to_mark_file(save: Callable[..., object], session: KerasSession) -> Callable[..., object]:
    """Wrap `save_own_variables` to mark the file, so that `load_model` outside a scope warns."""

    @functools.wraps(save)
    def save_own_variables(store: Any) -> None:
        if isinstance(store, H5IOStore):
            store.h5_file.attrs[_MARK] = "saved from layouts"
            session.load_warning_context.__enter__()  # closed when the session is deleted
        save(store)

    return save_own_variables


def make_load_warning_context() -> SelfClosingContext:
    """Return a context in which loading the file of a sharded model outside a scope warns."""
    return _PATCHES.activate()


def _wrap_store_get_to_warn(original: Callable[..., object]) -> Callable[..., object]:
    """Wrap the `get` of Keras's file store to warn if `load_model` reads a marked file outside a scope."""

    @functools.wraps(original)
    def get_store(store: Any, path: str) -> object:
        # Keras requests the empty path once per file, before the paths of layers, so warn only then.
        if not path and get_current_session() is None and _MARK in store.h5_file.attrs:
            loading = find_running_frame(LOADING, "load_model")
            if loading is not None:
                _warn_at_user_line(
                    f"{loading.f_locals['filepath']}: it contains a sharded model, and is loaded "
                    "outside of a scope",
                    why="a file has values and a configuration, and weights that are created outside of "
                    "a scope are unsharded",
                    fix="load it in a scope: with layout_map.scope(): model = keras.models.load_model(path); "
                    "or shard the result: layout_map.apply(model)",
                )
        return original(store, path)

    return get_store


# Layers that are loaded from a file have no wrappers, so this patch must outlive the scope.
_PATCHES = PatchGroup([AttributePatch(H5IOStore, "get", _wrap_store_get_to_warn)])


def warn_of_unsharded_layers(model: keras.Model, unsharded_layers: list[keras.Layer]) -> None:
    """Warn that a model created outside the scope of some of its layers has other layers that are unsharded."""
    names = ", ".join(layer.name for layer in unsharded_layers[:5])
    more = f" and {len(unsharded_layers) - 5} more" if len(unsharded_layers) > 5 else ""
    _warn_at_user_line(
        f"{model.name}: it has sharded layers, but was created outside of their scope",
        facts={"without layouts": names + more},
        why="weights created outside are unsharded, and the model's batches are not sharded over batch_dim",
        fix="create it in the scope, too: with layout_map.scope(): ...; or shard it: layout_map.apply(model)",
    )


def make_partly_sharded_model_error(model: keras.Model, step_name: str) -> ScopeError:
    """Return the error for running a step of a model that was created outside the scope of its sharded layers."""
    return ScopeError(
        f"{model.name}: {step_name} cannot run with sharded layers, because the model was created outside their scope",
        why="the model's batches, other layers, and optimizer are unsharded",
        fix="create the model and its new layers in the scope: with layout_map.scope(): ...; or shard the model, and "
        "compile it again: layout_map.apply(model)",
    )


def _warn_at_user_line(problem: str, **parts: Any) -> None:
    """Warn, and give the line of the user's code as the place of the warning."""
    warnings.warn(LayoutMapWarning(problem, **parts), stacklevel=find_user_stacklevel(_INNER))
