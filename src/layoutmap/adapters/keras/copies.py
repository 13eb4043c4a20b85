"""Shard copies of sharded models, and warn about or refuse unsharded models that contain sharded layers.

copy.deepcopy    makes the copy in the scope again, so it has the same layouts
pickle           holds values and a configuration, and may be read where other devices are: a warning
clone_model      makes new layers; where no scope is open those are plain: a warning
load_model       makes new layers, too: a warning, by a mark in the file, while the model that was saved lives
a head           a model made outside of the scope, with layers in it that are not: a warning at its first call, and
                 an error in a step that a backend cannot take with it
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import keras

from layoutmap.adapters.current import get_current_session
from layoutmap.adapters.keras.call_stack import find_frame
from layoutmap.adapters.keras.private import CLONING, LOADING, H5IOStore
from layoutmap.adapters.keras.protocol import KerasSession
from layoutmap.core.errors import LayoutMapWarning, ScopeError
from layoutmap.core.users_line import find_user_stacklevel
from layoutmap.engines.patches import Attribute, Closing, Patches

_MARK = "layoutmap"  # this HDF5 attribute marks files of sharded models
_INNER = frozenset(("copy", "jax", "keras", "pickle", "tensorflow", "torch"))


def make_copy_wraps(
    layer: Any,
    session: KerasSession,
    # A copy can lose its layouts, so shard copies again, and warn for pickles and clones (decisions/0056).
) -> dict[str, Callable[..., object]]:
    """Return methods to wrap on a layer so that copies are sharded or a warning is issued."""
    own = getattr(layer, "__deepcopy__", None)
    plain_reduce, plain_config = layer.__reduce_ex__, layer.get_config

    def deepcopy(memo: object) -> object:
        with session.defer():
            if own is not None:
                return own(memo)
            make, arguments, *_ = plain_reduce(4)
            return make(*arguments)

    @functools.wraps(plain_reduce)
    def reduce_ex(protocol: object) -> object:
        _warn_of_copy(
            f"{layer.name}: a pickle of it has no layouts",
            why="it holds values and a configuration, and may be read on other devices",
            fix="read it in a scope, with layout_map.scope(): model = pickle.loads(..); "
            "or shard the result: layout_map.apply(model)",
        )
        return plain_reduce(protocol)

    @functools.wraps(plain_config)
    def get_config() -> object:
        if get_current_session() is None and find_frame(CLONING) is not None:
            _warn_of_copy(
                "a sharded model is cloned outside of a scope, so the clone is unsharded",
                why="clone_model creates new layers, which are unsharded without an open scope",
                fix="clone it in a scope: with layout_map.scope(): clone = keras.models.clone_model(model)",
            )
        return plain_config()

    return {"__deepcopy__": deepcopy, "__reduce_ex__": reduce_ex, "get_config": get_config}


def wrap_save_own_variables(save: Callable[..., object], session: KerasSession) -> Callable[..., object]:
    """Wrap `save_own_variables` to mark the file, so that `load_model` outside a scope warns."""

    @functools.wraps(save)
    def save_own_variables(store: Any) -> None:
        if isinstance(store, H5IOStore):
            store.h5_file.attrs[_MARK] = "saved from layouts"
            session.load_watch.__enter__()  # the watch ends with the scope's last layer
        save(store)

    return save_own_variables


def watch_loads() -> Closing:
    """Watch for marked files loaded outside a scope, until the result is garbage-collected."""
    return _PATCHES.activate()


def _wrap_store_get(plain: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(plain)
    def get(store: Any, path: str) -> object:
        # Keras requests the model with an empty path once, before its layers.
        if not path and get_current_session() is None and _MARK in store.h5_file.attrs:
            loading = find_frame(LOADING, "load_model")
            if loading is not None:
                _warn_of_copy(
                    f"{loading.f_locals['filepath']}: it contains a sharded model, and is loaded "
                    "outside of a scope",
                    why="a file has values and a configuration, and weights that are created outside of "
                    "a scope are unsharded",
                    fix="load it in a scope: with layout_map.scope(): model = keras.models.load_model(path); "
                    "or shard the result: layout_map.apply(model)",
                )
        return plain(store, path)

    return get


# The patch outlives the scope, because layers loaded from a file know nothing of this library.
_PATCHES = Patches([Attribute(H5IOStore, "get", _wrap_store_get)])


def warn_of_unsharded_layers(model: keras.Model, plain: list[keras.Layer]) -> None:
    """Warn of a model that was created outside the scope of some of its layers."""
    names = ", ".join(layer.name for layer in plain[:5])
    more = f" and {len(plain) - 5} more" if len(plain) > 5 else ""
    _warn_of_copy(
        f"{model.name}: it has sharded layers, but was created outside of their scope",
        facts={"without layouts": names + more},
        why="weights that are created outside are unsharded, and its batches are not sharded over batch_dim",
        fix="create it in the scope, too: with layout_map.scope(): ...; or shard it: layout_map.apply(model)",
    )


def make_mixed_model_error(model: keras.Model, step: str) -> ScopeError:
    """Return the error for a model created outside the scope of its sharded layers."""
    return ScopeError(
        f"{model.name}: its {step} cannot have sharded layers, because it was created outside of their scope",
        why="its batches, other layers, and optimizer are unsharded",
        fix="create its new layers and the model in the scope: with layout_map.scope(): ...; or lay it "
        "out and compile "
        "it again: layout_map.apply(model)",
    )


def _warn_of_copy(what: str, **parts: Any) -> None:
    warnings.warn(LayoutMapWarning(what, **parts), stacklevel=find_user_stacklevel(_INNER))
