"""List and probe the private names of Keras that this package uses, except those of a single backend.

This module imports and probes everything from `keras.src` that the package uses. Only the modules of this folder read
and set the attributes. The modules in `backends` list the private names of single backends in the same way.

    keras.src.backend.common.variables.Variable     __init__, _value, _initializer, _layout, _dtype, _direct_assign,
                                                    _deferred_initialize, _convert_to_tensor
    keras.src.backend.common.variables              register_uninitialized_variable, read only
    keras.src.backend.common.global_state           the "uninitialized_variables" list, "stateless_scope",
                                                    "current_call_ctx" and its entry_layer
    keras.src.backend.common                        stateless_scope.in_stateless_scope, .get_stateless_scope,
                                                    symbolic_scope.in_symbolic_scope
    keras.src.random.seed_generator                 GLOBAL_SEED_GENERATOR, global_seed_generator, draw_seed,
                                                    the name of states
    keras.src.layers.layer.Layer                    __new__, _maybe_build, _layers, _flatten_layers, _called,
                                                    _trainable_variables, _non_trainable_variables, _tracker
    keras.src.models                                functional.Functional, Sequential._functional, cloning
    keras.src.layers.rnn.conv_lstm                  ConvLSTMCell
    keras.src.layers.core, .convolutional           _kernel, _embeddings; EinsumDense._get_kernel_scale_shape
    keras.src.trainers.trainer.Trainer              _compile_config.config, _symbolic_build
    keras.src.ops                                   Function._nodes_by_depth, Node.arguments, KerasTensor._keras_history
    keras.src.optimizers                            BaseOptimizer.__init__, _trainable_variables; Adafactor._r, _c
    keras.src.saving.saving_lib                     H5IOStore, its get, h5_file, _h5_entry_group and
                                                    _h5_entry_path; load_model and its filepath,
                                                    safe_get_h5_dataset, safe_get_h5_group,
                                                    get_attr_skipset
    keras.src.utils                                 python_utils.is_default, naming.to_snake_case, and what its
                                                    uniquify counts in global_state: "object_name_uids";
                                                    traceback_utils, by _keras_call_info_injected on an error
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from layoutmap.core.errors import LayoutMapError, ScopeError
from layoutmap.engines.patches import SelfClosingContext
from layoutmap.engines.tested import ImportErrorConverter, make_unsupported_release_error, warn_if_untested

with ImportErrorConverter("keras", ScopeError):
    from keras.src.backend.common import global_state as keras_state
    from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope
    from keras.src.backend.common.symbolic_scope import in_symbolic_scope
    from keras.src.backend.common.variables import Variable as KerasVariable
    from keras.src.backend.common.variables import register_uninitialized_variable
    from keras.src.layers.rnn.conv_lstm import ConvLSTMCell
    from keras.src.models.functional import Functional
    from keras.src.optimizers.base_optimizer import BaseOptimizer as KerasOptimizer
    from keras.src.random import seed_generator
    from keras.src.random.seed_generator import draw_seed
    from keras.src.saving import saving_lib
    from keras.src.saving.saving_lib import H5IOStore as KerasStore
    from keras.src.saving.saving_lib import safe_get_h5_dataset, safe_get_h5_group
    from keras.src.utils.naming import to_snake_case, uniquify
    from keras.src.utils.python_utils import is_default

CommonVariable: object = KerasVariable
BaseOptimizer: Any = KerasOptimizer
Layer: Any = keras.layers.Layer
global_state: Any = keras_state
H5IOStore: Any = KerasStore

# Keras replaces errors without this attribute by an error with their text, so set it on layoutmap's errors.
LayoutMapError._keras_call_info_injected = True  # type: ignore[attr-defined]


_COUNTS = "object_name_uids"
_PENDING_LIST = "uninitialized_variables"
_STATELESS = "stateless_scope"
_CALL = "current_call_ctx"
_LAYOUT = "_layout"
CLONING = "keras.src.models.cloning"  # the module in which Keras clones models
LOADING = "keras.src.saving.saving_lib"  # the module in which `load_model` reads a file
NamesByOwner = Sequence[tuple[Any, Sequence[str]]]
NAMES: NamesByOwner = (
    (CommonVariable, ("__init__", "_deferred_initialize", "value", "assign", "_convert_to_tensor")),
    (Layer, ("__new__", "_maybe_build", "_flatten_layers", "load_own_variables")),
    (keras.layers.EinsumDense, ("_get_kernel_scale_shape",)),
    (keras.Model, ("_symbolic_build", "_compute_loss")),
    (BaseOptimizer, ("__init__", "build", "apply", "add_variable_from_reference", "load_own_variables")),
    (global_state, ("get_global_attribute", "set_global_attribute")),
    (seed_generator, ("GLOBAL_SEED_GENERATOR", "global_seed_generator")),
    (H5IOStore, ("__getitem__", "keys", "get")),
    (saving_lib, ("get_attr_skipset", "load_model")),
)
"""Private names that must exist in classes and modules."""

ATTRIBUTES: NamesByOwner = (
    (CommonVariable, ("_value", "_initializer", "_dtype", "_direct_assign")),
    (Layer, ("_layers", "_trainable_variables", "_non_trainable_variables", "_tracker")),
    (keras.Sequential, ("_functional",)),
    *((kind, ("_kernel",)) for kind in (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Conv1D)),
    (keras.layers.Embedding, ("_embeddings",)),
    (keras.optimizers.Adafactor, ("_r", "_c", "_trainable_variables")),
    (BaseOptimizer, ("_trainable_variables",)),
    (H5IOStore, ("_h5_entry_group", "_h5_entry_path", "h5_file")),
)
"""Private names of instances or subclasses. The code of the class must mention them."""


def check_private_names_exist(more_names: NamesByOwner = ()) -> None:
    """Raise if this Keras version lacks one of the private names that this package uses, or one of `more_names`."""
    missing = [
        f"{owner.__name__}.{name}"
        for owner, names in (*NAMES, *more_names)
        for name in names
        if not any(name in vars(each) for each in _list_class_and_bases(owner))
    ]
    for owner, names in ATTRIBUTES:
        used = {
            name for each in _list_class_and_bases(owner) for name in _iterate_names_used_in_methods(each)
        }
        missing += [f"{owner.__name__}.{name}" for name in names if name not in used]
    if _PENDING_LIST not in register_uninitialized_variable.__code__.co_consts:
        missing.append(_PENDING_LIST)
    if _STATELESS not in get_stateless_scope.__code__.co_consts:
        missing.append(_STATELESS)
    if _CALL not in inspect.unwrap(Layer._get_call_context).__code__.co_consts:
        missing.append(_CALL)
    if inspect.unwrap(keras.models.clone_model).__module__ != CLONING:
        missing.append(CLONING)
    # In Keras 3.14 only JAX variables have `_layout` from the start, so look for it in the code that reads it.
    if (
        not missing
        and _LAYOUT not in inspect.unwrap(BaseOptimizer.add_variable_from_reference).__code__.co_consts
    ):
        missing.append(_LAYOUT)
    if _COUNTS not in uniquify.__code__.co_consts:
        missing.append(_COUNTS)
    if missing:
        raise make_unsupported_release_error("keras", ", ".join(missing), ScopeError)


def _list_class_and_bases(owner: object) -> list[Any]:
    """Return a class and its base classes except `object`. For a module, return a list of only the module."""
    return [each for each in getattr(owner, "__mro__", (owner,)) if each is not object]


def _iterate_names_used_in_methods(owner: type) -> Iterator[str]:
    """Yield the names that a class's original methods use, even if another library replaced a method."""
    for name, method in list(vars(owner).items()):
        code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
        if code is not None and code.co_filename != getattr(
            sys.modules.get(owner.__module__), "__file__", None
        ):
            code = _load_code_objects(owner.__module__).get(f"{owner.__qualname__}.{name}", code)
        yield from code.co_names if code is not None else ()


@functools.cache
def _load_code_objects(module_name: str) -> dict[str, types.CodeType]:
    """Return a dict from qualified name to code object, of all functions in a module's source."""
    loader: Any = getattr(sys.modules[module_name], "__loader__", None)
    found: dict[str, types.CodeType] = {}
    todo = [loader.get_code(module_name)] if hasattr(loader, "get_code") else []
    while todo:
        inner = [each for each in todo.pop().co_consts if isinstance(each, types.CodeType)]
        found |= {each.co_qualname: each for each in inner}
        todo += inner
    return found


def check_keras_support(more_names: NamesByOwner = ()) -> None:
    """Raise if this Keras version is unsupported, or runs in NNX mode, in which variables start unsharded."""
    check_private_names_exist(more_names)
    warn_if_untested("keras")
    if keras.config.is_nnx_enabled():
        raise ScopeError(
            "Keras runs with KERAS_NNX_ENABLED",
            why="in that mode, each variable is first created in full on one device, which a layout map "
            "avoids",
            fix="unset KERAS_NNX_ENABLED, and restart the program",
        )


def strip_generated_number(name: str) -> str:
    """Return a name without the number that Keras appended to make it unique. A number that the user wrote stays."""
    prefix, _, number = name.rpartition("_")
    counts = global_state.get_global_attribute(_COUNTS) or {}
    return prefix if number.isdecimal() and 0 < int(number) < counts.get(prefix, 0) else name


def count_generated_names_by_prefix() -> dict[str, int]:
    """Return a dict from prefix to the number of names with it that Keras has generated in this process."""
    return dict(global_state.get_global_attribute(_COUNTS) or {})


def renumber_keras_path(path: str, counts_before: dict[str, int]) -> str:
    """Return a path with generated numbers reduced by `counts_before` (see `count_generated_names_by_prefix`)."""
    counts = count_generated_names_by_prefix()

    def renumber_name(name: str) -> str:
        prefix, _, number = name.rpartition("_")
        first = counts_before.get(prefix, 0)
        if not first or not number.isdecimal() or not first <= int(number) < counts.get(prefix, 0):
            return name
        return f"{prefix}_{int(number) - first}" if int(number) > first else prefix

    return "/".join(map(renumber_name, path.split("/")))


class defer_values(SelfClosingContext):
    """Make Keras create variables without values until the block ends."""

    def __init__(self) -> None:
        self._outer = global_state.get_global_attribute(_STATELESS)
        self._before = len(global_state.get_global_attribute(_PENDING_LIST, [], set_to_default=True))
        self._scope = keras.StatelessScope(initialize_variables=False)

    def open_context(self) -> None:
        """Enter Keras's stateless scope."""
        self._scope.__enter__()

    def close_context(self) -> None:
        """Leave the stateless scope as Keras does, even if an interrupt prevented Keras from leaving it."""
        global_state.set_global_attribute(_STATELESS, self._outer)
        del global_state.get_global_attribute(_PENDING_LIST)[self._before :]


class _StatelessScopeEndCallback:
    """Entry in Keras's list of variables to initialize that calls a function when the stateless scope ends."""

    def __init__(self, function: Callable[[], None]):
        self.function = function

    def _deferred_initialize(self) -> None:
        try:
            self.function()
        except BaseException:
            # Keras clears its list of pending objects only on success, so remove layoutmap's objects.
            left = [
                v
                for v in global_state.get_global_attribute(_PENDING_LIST)
                if not isinstance(v, _StatelessScopeEndCallback)
            ]
            global_state.set_global_attribute(_PENDING_LIST, left)
            raise


def call_after_stateless_scope(function: Callable[[], None]) -> None:
    """Call a function once when Keras leaves the outermost stateless scope."""
    waiting = global_state.get_global_attribute(_PENDING_LIST, [], set_to_default=True)
    if not any(isinstance(v, _StatelessScopeEndCallback) and v.function == function for v in waiting):
        waiting.append(_StatelessScopeEndCallback(function))


def get_global_seed_variable() -> Any:
    """Return the state variable of Keras's global seed generator, or None if no generator exists."""
    generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    return None if generator is None else generator.state


def set_global_seed_state(state: Sequence[int] | None) -> None:
    """Set the state of Keras's global seed generator. If `state` is None, remove the generator."""
    if state is None:
        global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, None)
    else:
        variable = seed_generator.global_seed_generator().state
        variable.assign(np.asarray(state, keras.backend.standardize_dtype(variable.dtype)))


def find_h5_dataset(store: Any, key: str, opened_files: dict[str, Any]) -> object:
    """Return the `h5py.Dataset` that a Keras store would read for a key, or None if the store lacks the key.

    A store of several files would close one to open another. So this function opens them itself, and adds them to
    `opened_files`.
    """
    group = store._h5_entry_group
    if key in group:
        return safe_get_h5_dataset(group, key)
    path = f"{store._h5_entry_path}/vars" if store._h5_entry_path else "vars"
    for name in getattr(store, "current_shard_filenames", ()):
        if name not in opened_files:
            opened_files[name] = type(store.h5_file)(store.path.with_name(name), "r")
        if path in opened_files[name] and key in (group := safe_get_h5_group(opened_files[name], path)):
            return safe_get_h5_dataset(group, key)
    return None


def get_outermost_called_layer() -> object:
    """Return the outermost layer or model that is being called on this thread, or None."""
    context = global_state.get_global_attribute(_CALL)
    return None if context is None else context.entry_layer


def is_global_seed_variable(variable: object) -> bool:
    """Return whether a variable is the state of Keras's global seed generator, which belongs to no model."""
    return variable is get_global_seed_variable()


def is_seed_state(variable: keras.Variable) -> bool:
    """Return whether a variable is the state of a seed generator."""
    return variable.name == "seed_generator_state"
