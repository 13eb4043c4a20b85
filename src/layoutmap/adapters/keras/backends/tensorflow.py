"""Store and train Keras variables on TensorFlow, where `_value` is a `tf.Variable`, here one with a layout.

Private names of Keras that this backend uses, besides those that `private` lists, tested on Keras 3.15:

    keras.src.backend.tensorflow.optimizer.TFOptimizer      _var_key
    keras.src.optimizers.base_optimizer.BaseOptimizer       add_variable_from_reference, _trainable_variables,
                                                            _trainable_variables_indices
    keras.optimizers.MultiOptimizer                         _var_to_optimizer_idx
    keras.Model                                             _call_has_training_arg
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf

from layoutmap.adapters.keras.backends.tensorflow_calls import (
    compare_and_place_batch,
    compute_on_mesh,
    is_building_eagerly,
    make_mesh_call_wrapper,
    make_weight_reader,
    relayout_gradient_to_read_layout,
)
from layoutmap.adapters.keras.backends.tensorflow_functions import REPLACED
from layoutmap.adapters.keras.backends.tensorflow_gathering import RecompiledFunction
from layoutmap.adapters.keras.backends.tensorflow_optimizers import (
    make_apply_wrapper,
    make_var_key_wrapper,
    wrap_to_assign_dense_values,
)
from layoutmap.adapters.keras.backends.tensorflow_steps import (
    DisabledGraphOptimizer,
    make_training_method_wrappers,
)
from layoutmap.adapters.keras.backends.tensorflow_unsupported import (
    find_unsupported_features,
    make_function_that_refuses_generate,
    translate_compiler_refusals,
)
from layoutmap.adapters.keras.private import BaseOptimizer
from layoutmap.adapters.keras.protocol import Backend, KerasSession, WrappedMethods
from layoutmap.adapters.keras.training import (
    compute_loss,
    create_training_variables,
    has_custom_train_step,
    preserve_model_state,
    run_custom_train_step_without_updates,
)
from layoutmap.adapters.keras.wraps import CALLS, get_session
from layoutmap.core.layout import Layout
from layoutmap.core.variables import Assignment
from layoutmap.engines.patches import set_attribute_temporarily, wrap_method_in_context
from layoutmap.engines.tensorflow.constraints import constrain_layout

LossesAndGradients = tuple[dict[str, Any], list[Any]]


class TensorFlowBackend(Backend):
    """Adapt layoutmap to Keras on TensorFlow (see `layoutmap.adapters.keras.protocol`)."""

    engine_name = "tensorflow"
    make_unsharded_tensor = staticmethod(tf.constant)
    single_scope_steps = MappingProxyType(dict.fromkeys(("train_step", "test_step", "predict_step"), False))
    unsupported_board_options = ("histogram_freq", "write_images")
    make_training_method_wrappers = staticmethod(make_training_method_wrappers)
    find_unsupported_features = staticmethod(find_unsupported_features)
    global_init_reasons = MappingProxyType(
        {
            "Orthogonal": "the QR decomposition of an orthogonal matrix needs the whole matrix",
            "Identity": "TensorFlow creates the diagonal of a matrix only as a whole",
            "Constant": "its constant is an array that already exists as a whole",
        }
    )

    def list_required_private_names(self) -> Sequence[tuple[object, Sequence[str]]]:
        """Return pairs of a class or module and the names in it that this backend uses or replaces."""
        return [(keras.Optimizer, ("_var_key",)), *REPLACED]

    @contextmanager
    def suspend_tracing(self) -> Generator[None]:
        """Run the block outside any trace and without the default mesh."""
        with tf.init_scope(), tf.device(None):
            yield

    def is_tracing(self) -> bool:
        """Return whether the code runs in a compiled function's trace."""
        return not tf.executing_eagerly()

    def store_value(self, variable: Any, value: Any, assignment: Assignment, session: KerasSession) -> object:
        """Store a `DVariable`, read in layouts that DTensor supports. Return a `_layout` that identifies `variable`."""
        if not assignment.layout.is_fully_replicated() or is_building_eagerly():
            value.value = make_weight_reader(value, assignment.layout, session)
        keras_layout = object()
        variable._layout = keras_layout
        variable._value = value
        return keras_layout

    def update_value_references(
        self, optimizers: Sequence[keras.Optimizer], layers: Sequence[object]
    ) -> None:
        """Update the keys under which optimizers find variables, because each `tf.Variable` was replaced."""
        for optimizer in optimizers:
            for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
                if each is not None and each.built and hasattr(each, "_trainable_variables_indices"):
                    numbered = enumerate(each._trainable_variables)
                    each._trainable_variables_indices = {each._var_key(v): i for i, v in numbered}
                    if hasattr(each, "_var_to_optimizer_idx"):
                        keys = map(each._var_key, each._trainable_variables)
                        numbers = each._var_to_optimizer_idx.values()
                        each._var_to_optimizer_idx = dict(zip(keys, numbers, strict=True))

    def relayout_output(self, array: Any, layout: Layout, session: KerasSession) -> object:
        """Return a tensor in a layout, or unchanged in an export and in steps that gather more than planned."""
        as_it_is = session.thread_state.is_exporting or session.thread_state.gathering_level
        return array if as_it_is else constrain_layout(array, layout)

    def make_layer_method_wrappers(self, layer: keras.Layer, session: KerasSession) -> WrappedMethods:
        """Return wrappers of a layer's methods, by name, that run eager calls with unsharded tensors on the mesh."""
        wrappers = {name: make_mesh_call_wrapper(layer, session, name) for name in CALLS}
        # With LoRA, saving computes the kernel from sharded weights, so it runs on the mesh.
        wrappers["save_own_variables"] = compute_on_mesh(session)(layer.save_own_variables)
        if isinstance(layer, keras.Model):
            as_one_device = functools.partial(
                set_attribute_temporarily, session.thread_state, "is_exporting", True
            )
            wrappers["export"] = wrap_method_in_context(layer.export, as_one_device)
            if hasattr(layer, "make_generate_function"):  # it is a task model of keras-hub
                wrappers["make_generate_function"] = make_function_that_refuses_generate(layer)
        return wrappers

    def make_optimizer_method_wrappers(
        self, optimizer: keras.Optimizer, session: KerasSession
    ) -> WrappedMethods:
        """Return wrappers of an optimizer's methods, by name. They compute updates and slots on the mesh."""
        add = functools.partial(BaseOptimizer.add_variable_from_reference, optimizer)
        assigns = ("assign", "assign_add", "assign_sub")
        return {
            "add_variable_from_reference": add,
            "_var_key": make_var_key_wrapper(optimizer),
            "apply": make_apply_wrapper(optimizer, session),
            **{name: wrap_to_assign_dense_values(getattr(optimizer, name), session) for name in assigns},
        }

    def compute_losses_and_gradients(
        self, model: keras.Model, x: object, y: object, sample_weight: object
    ) -> LossesAndGradients:
        """Return a dict of the training losses, and a list of their gradients, as numpy arrays."""
        session = get_session(model)
        batch = (x, y, sample_weight)
        # The gradient may be traced several times, and each trace would create loss trackers, so create them first.
        create_training_variables(model, session, batch)
        if session is not None:
            batch = compare_and_place_batch(batch, session)

        def compute_for_batch(batch: object) -> LossesAndGradients:
            held = [v.value for v in model.trainable_variables]
            losses, found = (
                run_custom_train_step_without_updates(model, batch)
                if has_custom_train_step(model)
                else _compute_loss_and_gradients(model, held, batch)
            )
            gradients = [None if each is None else tf.convert_to_tensor(each) for each in found]
            if session is not None:
                pairs = zip(gradients, held, strict=True)
                gradients = [None if g is None else relayout_gradient_to_read_layout(g, h) for g, h in pairs]
            return losses, gradients

        compile_gradient = functools.partial(tf.function, compute_for_batch, autograph=False)
        what = f"{model.name}: the gradient"
        with preserve_model_state(model), translate_compiler_refusals(what), contextlib.ExitStack() as stack:
            if session is not None:
                stack.enter_context(DisabledGraphOptimizer(session))
                stack.enter_context(compute_on_mesh(session))
            run = (
                compile_gradient() if session is None else RecompiledFunction(compile_gradient, session, what)
            )
            losses, gradients = run(batch)
        numbers = {name: _convert_to_numpy(each, session) for name, each in losses.items()}
        return numbers, [_convert_to_numpy(gradient, session) for gradient in gradients]


def _compute_loss_and_gradients(
    model: keras.Model, weights: list[tf.Variable], batch: Any
) -> LossesAndGradients:
    """Return a dict with the loss of a batch, and its gradients: zeros for weights that do not affect it."""
    with tf.GradientTape() as tape:
        loss = compute_loss(model, batch)
    return {"loss": loss}, tape.gradient(loss, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO)


def _convert_to_numpy(tensor: object, session: KerasSession | None) -> object:
    if not isinstance(tensor, tf.Tensor):
        return tensor
    return tensor.numpy() if session is None else session.engine.to_numpy(tensor)
