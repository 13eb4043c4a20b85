"""Wrap methods of each layer and optimizer created in a scope.

Keras itself wraps `build` and `quantize` on each layer in this way. Only a hook of `copies` stays on
a class, while a model exists that was saved to a file.

    build, _maybe_build, quantize, enable_lora, compile     open the scope again while they run
    __deepcopy__, __reduce_ex__, get_config                 copies: see `copies`
    save_own_variables                                      marks the file for `load_model`: see `copies`
    call, quantized_call                                    return arrays in the layout of a rule for activations
    optimizer.build                                         the same, on the optimizer given to compile
    load_own_variables, load_weights                        values go from a file to their devices: see `loading`
    fit                                                     looks at callbacks and batches: see `training`
    call, make_train_function and its like                  what the backend needs: see `backends`
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import keras

from layoutmap.adapters.keras.call_stack import find_running_step_name
from layoutmap.adapters.keras.copies import (
    make_copy_method_wrappers,
    make_partly_sharded_model_error,
    warn_of_unsharded_layers,
    wrap_save_to_mark_file,
)
from layoutmap.adapters.keras.existing_layers import make_existing_object_error
from layoutmap.adapters.keras.loading import make_load_own_variables_wrapper, make_load_weights_wrapper
from layoutmap.adapters.keras.paths import SESSION
from layoutmap.adapters.keras.private import Functional, get_outermost_called_layer, in_symbolic_scope
from layoutmap.adapters.keras.protocol import KerasSession
from layoutmap.adapters.keras.quantization import restore_layer_on_plan_error, unshard_own_weights_temporarily
from layoutmap.adapters.keras.training import wrap_fit_with_checks
from layoutmap.engines.patches import wrap_method_in_context

CALLS = ("call", "quantized_call")
"""The methods that compute a layer's output. Quantized layers use the second one."""

_BEFORE = "_layoutmap_before"
_ABSENT = object()


def wrap_layer(layer: Any, session: KerasSession) -> None:
    """Wrap a layer's methods so that they open this scope. First remove the wrappers of an earlier scope."""
    if not _move_to_scope(layer, session):
        return
    undo = functools.partial(restore_layer_on_plan_error, layer, session)
    wrappers = {"build": wrap_method_in_context(layer.build, session.defer_variables)}
    if hasattr(layer, "enable_lora"):
        enable_lora = wrap_method_in_context(layer.enable_lora, session.defer_variables)
        wrappers["enable_lora"] = wrap_method_in_context(enable_lora, undo)
    if hasattr(layer, "quantize"):
        off_mesh = functools.partial(unshard_own_weights_temporarily, layer, session)
        quantize = wrap_method_in_context(
            wrap_method_in_context(layer.quantize, session.defer_variables), off_mesh
        )
        wrappers["quantize"] = wrap_method_in_context(quantize, undo)
    wrappers["_maybe_build"] = _wrap_maybe_build(
        layer, session, wrap_method_in_context(layer._maybe_build, session.defer_variables)
    )
    wrappers["load_own_variables"] = make_load_own_variables_wrapper(layer, session)
    wrappers |= make_copy_method_wrappers(layer, session)
    if session.policy.activations:
        for name in CALLS:
            call = _wrap_call_to_relayout_outputs(layer, session, get_call_method(layer, name))
            _replace_methods(layer, {name: call})
    _replace_methods(layer, wrappers)
    wrappers = {**session.backend.make_layer_method_wrappers(layer, session)}
    save = wrappers.get("save_own_variables") or layer.save_own_variables
    wrappers["save_own_variables"] = wrap_save_to_mark_file(save, session)
    if isinstance(layer, keras.Model):
        wrappers["compile"] = _make_compile_wrapper(layer, session)
        wrappers["load_weights"] = make_load_weights_wrapper(
            layer, lambda: map(get_session, layer._flatten_layers())
        )
        wrappers |= session.backend.make_training_method_wrappers(layer, session)
        wrappers["fit"] = wrap_fit_with_checks(wrappers.get("fit", layer.fit), session)
    _replace_methods(layer, wrappers)


def wrap_optimizer(optimizer: Any, session: KerasSession) -> None:
    """Wrap an optimizer's methods so that they open this scope. First remove the wrappers of an earlier scope.

    Raises:
        ScopeError: The scope is that of a plan, and the optimizer existed before it.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    for each in (optimizer, inner) if session.context.plan_only else ():
        # An optimizer without `built` is just being constructed, so it did not exist before the plan.
        if hasattr(each, "built") and get_session(each) is not session:
            raise make_existing_object_error(each, plan_only=True)
    if _move_to_scope(optimizer, session):
        wrappers = {
            "build": wrap_method_in_context(optimizer.build, session.defer_variables),
            "load_own_variables": make_load_own_variables_wrapper(optimizer, session),
        }
        _replace_methods(
            optimizer, {**wrappers, **session.backend.make_optimizer_method_wrappers(optimizer, session)}
        )
        session.registry.add_optimizer(optimizer)
    # The inner optimizer updates the variables of the outer one, so wrap the inner one, too.
    if inner is not None and _move_to_scope(inner, session):
        wrappers = {"load_own_variables": make_load_own_variables_wrapper(inner, session)}
        _replace_methods(
            inner, {**wrappers, **session.backend.make_optimizer_method_wrappers(inner, session)}
        )
    # Inner optimizers of a MultiOptimizer may come from outside the scope, so wrap them here.
    for each in getattr(optimizer, "optimizers", ()):
        wrap_optimizer(each, session)


def unwrap_optimizer(optimizer: object) -> None:
    """Restore the methods of an optimizer that no model uses, because the wrappers would keep its slots in memory."""
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if each is not None:
            _restore_methods(each)
    for each in getattr(optimizer, "optimizers", ()):
        unwrap_optimizer(each)


def get_session(wrapped_object: object) -> KerasSession | None:
    """Return the session of the scope that wrapped a layer, model, or optimizer, or None if no scope did."""
    return wrapped_object.__dict__.get(SESSION)


def get_call_method(layer: keras.Layer, method_name: str) -> Callable[..., object]:
    """Return a layer's `call` or `quantized_call`, also if the layer is still being constructed.

    A class without one may be Functional by inheritance: Keras makes it so while its first model is being initialized,
    which is after `__new__`.
    """
    if method_name != "call" or method_name in layer.__dict__ or type(layer).call is not keras.Model.call:
        return getattr(layer, method_name)

    @functools.wraps(types.MethodType(Functional.call, layer))
    def call_class_method(*args: object, **kwargs: object) -> object:
        return type(layer).call(layer, *args, **kwargs)

    return call_class_method


def _move_to_scope(wrapped_object: object, session: KerasSession) -> bool:
    """Remove the wrappers of an earlier scope, and store the session. Return False if it was stored already."""
    if wrapped_object.__dict__.get(SESSION) is session:
        return False
    _restore_methods(wrapped_object)
    wrapped_object.__dict__[SESSION] = session
    return True


def _restore_methods(wrapped_object: object) -> None:
    """Restore the methods that an object had before it was wrapped, and remove it from the registry of its scope."""
    own = wrapped_object.__dict__
    for name, before in own.pop(_BEFORE, {}).items():
        if before is _ABSENT:
            own.pop(name, None)
        else:
            own[name] = before
    if SESSION in own:
        own[SESSION].registry.remove_layer_or_optimizer(wrapped_object)
        del own[SESSION]


def _replace_methods(wrapped_object: object, wrappers: dict[str, Callable[..., object]]) -> None:
    """Replace methods in an object's `__dict__`, and store the previous ones for `_restore_methods`."""
    # Keras's __setattr__ would track the value, so write to __dict__.
    own = wrapped_object.__dict__
    before = own.setdefault(_BEFORE, {})
    for name in wrappers:
        before.setdefault(name, own.get(name, _ABSENT))
    own.update(wrappers)


def _wrap_maybe_build(
    layer: keras.Layer, session: KerasSession, method: Callable[..., object]
) -> Callable[..., object]:
    """Wrap `_maybe_build` to check models from outside the scope first, and to build on one thread at a time.

    In a plan, it records the layer's input. Each call of a layer runs it, also if the layer is built.
    """

    @functools.wraps(method)
    def build_once(call_spec: Any) -> object:
        if session.context.plan_only:
            session.registry.record_input(layer, call_spec.first_arg)
        outer_model = get_outermost_called_layer()
        if outer_model is not None and get_session(outer_model) is None:
            _check_outer_model(outer_model, session)
        if layer.built:
            return None
        with session.lock:
            return None if layer.built else method(call_spec)

    return build_once


def _check_outer_model(outer_model: Any, session: KerasSession) -> None:
    """Raise if an outside model cannot run its step with layers of this scope. Warn once of its unsharded layers."""
    refused = session.backend.single_scope_steps
    step = find_running_step_name(outer_model, refused) if refused else ""
    trained = [
        layer for layer in outer_model._flatten_layers() if layer._trainable_variables and layer.trainable
    ]
    has_mixed_layers = len({get_session(layer) is None for layer in trained}) > 1
    if step and (not refused[step] or has_mixed_layers):
        raise make_partly_sharded_model_error(outer_model, step)
    if outer_model in session.checked_outer_models:
        return
    layers = outer_model._flatten_layers()
    if all(layer.built for layer in layers):
        session.checked_outer_models.add(outer_model)
        unsharded_layers = [
            layer
            for layer in layers
            if get_session(layer) is None and (layer._trainable_variables or layer._non_trainable_variables)
        ]
        if unsharded_layers:
            warn_of_unsharded_layers(outer_model, unsharded_layers)


def _make_compile_wrapper(model: Any, session: KerasSession) -> Callable[..., object]:
    """Return a wrapper of `compile` that makes slots in the scope, and wraps the new optimizer instead of the old."""
    original = model.compile

    @functools.wraps(original)
    def compile_and_wrap_optimizer(*args: object, **kwargs: object) -> object:
        before = getattr(model, "optimizer", None)
        with session.defer_variables():
            result = original(*args, **kwargs)
            optimizer = getattr(model, "optimizer", None)
            if before is not None and before is not optimizer:
                session.unwrap_optimizer_if_unused(before)
            if optimizer is not None:
                wrap_optimizer(optimizer, session)
        return result

    return compile_and_wrap_optimizer


def _wrap_call_to_relayout_outputs(
    layer: object, session: KerasSession, original: Callable[..., object]
) -> Callable[..., object]:
    """Wrap a layer's `call`, or equivalent, to return outputs in the layouts of activation rules.

    The layer's path is looked up when it is called, since it may not be known before.
    """

    @functools.wraps(original)
    def call_and_relayout_outputs(*args: object, **kwargs: object) -> object:
        outputs = original(*args, **kwargs)
        # Symbolic calls and plans have no arrays, so there is nothing to convert.
        if in_symbolic_scope() or session.context.plan_only:
            return outputs
        path, layout = session.find_path_and_output_layout(layer)
        if layout is None:
            return outputs
        flat = keras.tree.flatten(outputs)
        arrays = [each for each in flat if keras.ops.is_tensor(each)]
        shapes = [tuple(int(n) for n in array.shape) for array in arrays]
        layouts = session.policy.choose_output_layouts(layout, shapes, path)
        chosen = {id(array): each for array, each in zip(arrays, layouts, strict=True) if each is not None}
        placed = [
            session.backend.relayout_output(each, chosen[id(each)], session) if id(each) in chosen else each
            for each in flat
        ]
        return keras.tree.pack_sequence_as(outputs, placed)

    return call_and_relayout_outputs
