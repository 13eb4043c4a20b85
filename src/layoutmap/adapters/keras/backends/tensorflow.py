"""Keras on TensorFlow: `Variable._value` is a `tf.Variable`, here one in a layout.

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
    as_read,
    calling,
    is_read_by_a_build,
    on_mesh,
    placed,
    reading_in_layout,
)
from layoutmap.adapters.keras.backends.tensorflow_functions import REPLACED
from layoutmap.adapters.keras.backends.tensorflow_gathering import Regathered
from layoutmap.adapters.keras.backends.tensorflow_optimizers import applying, assigning, keying
from layoutmap.adapters.keras.backends.tensorflow_options import Unoptimized
from layoutmap.adapters.keras.backends.tensorflow_steps import training_wraps
from layoutmap.adapters.keras.backends.tensorflow_unsupported import (
    ERRORS,
    explained,
    generating,
    unsupported_of,
)
from layoutmap.adapters.keras.private import BaseOptimizer
from layoutmap.adapters.keras.protocol import Backend, KerasSession, Wraps, read_variable
from layoutmap.adapters.keras.training import call_own_step, has_own_step, make_for_training
from layoutmap.adapters.keras.wraps import CALLS, session_of
from layoutmap.core.layout import Layout
from layoutmap.core.variables import Assignment
from layoutmap.engines.patches import temporarily, wrap_in_context

Found = tuple[dict[str, Any], list[Any]]


class TensorFlowBackend(Backend):
    """Keras on TensorFlow; see `layoutmap.adapters.keras.protocol`."""

    engine_name = "tensorflow"
    as_plain = staticmethod(tf.constant)
    one_scope_in = MappingProxyType(dict.fromkeys(("train_step", "test_step", "predict_step"), False))
    unreadable_boards = ("histogram_freq", "write_images")
    training_wraps = staticmethod(training_wraps)
    unsupported_of = staticmethod(unsupported_of)
    global_init = MappingProxyType(
        {
            "Orthogonal": "the QR decomposition of an orthogonal matrix needs all of it",
            "Identity": "TensorFlow makes a diagonal in one piece",
            "Constant": "its constant is an array, all of which exists already",
        }
    )

    def private_names(self) -> Sequence[tuple[object, Sequence[str]]]:
        """Private names of TensorFlow and Keras from the list at the top of this file, with the class of each."""
        return [(keras.Optimizer, ("_var_key",)), ERRORS, *REPLACED]

    @contextmanager
    def outside(self) -> Generator[None]:
        """Leave any tracing that goes on, and the mesh, if what is called now runs on it."""
        with tf.init_scope(), tf.device(None):
            yield

    def is_tracing(self) -> bool:
        """Whether the code runs inside a compiled function's trace."""
        return not tf.executing_eagerly()

    def store(self, variable: Any, held: Any, assignment: Assignment, session: KerasSession) -> object:
        """Give a variable its value; a `DVariable` keeps its layout by itself."""
        if not assignment.layout.is_fully_replicated() or is_read_by_a_build():
            held.value = reading_in_layout(held, assignment.layout, session)
        tag = object()
        variable._layout = tag
        variable._value = held
        return tag

    def values_changed(self, optimizers: Sequence[keras.Optimizer], layers: Sequence[object]) -> None:
        """Optimizers know variables by their `tf.Variable`, which is another one now."""
        for optimizer in optimizers:
            for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
                if each is not None and each.built and hasattr(each, "_trainable_variables_indices"):
                    numbered = enumerate(each._trainable_variables)
                    each._trainable_variables_indices = {each._var_key(v): i for i, v in numbered}
                    if hasattr(each, "_var_to_optimizer_idx"):
                        keys = map(each._var_key, each._trainable_variables)
                        numbers = each._var_to_optimizer_idx.values()
                        each._var_to_optimizer_idx = dict(zip(keys, numbers, strict=True))

    def lay_out(self, array: object, layout: Layout, session: KerasSession) -> object:
        """A tensor that is computed on the mesh, in a layout; an export has no mesh."""
        as_it_is = session.on_thread.is_exporting or session.on_thread.gathering
        return array if as_it_is else session.engine.relayout(array, layout)

    def layer_wraps(self, layer: keras.Layer, session: KerasSession) -> Wraps:
        """A call with plain tensors, outside of compiled functions, runs on the mesh; an export knows no mesh."""
        wraps = {name: calling(layer, session, name) for name in CALLS}
        # Of a kernel that is computed, as with LoRA.
        wraps["save_own_variables"] = on_mesh(session)(layer.save_own_variables)
        if isinstance(layer, keras.Model):
            as_one_device = functools.partial(temporarily, session.on_thread, "is_exporting", True)
            wraps["export"] = wrap_in_context(layer.export, as_one_device)
            if hasattr(layer, "make_generate_function"):  # a task of keras-hub
                wraps["make_generate_function"] = generating(layer)
        return wraps

    def optimizer_wraps(self, optimizer: keras.Optimizer, session: KerasSession) -> Wraps:
        """Slots are made without reading the weight; gradients of rows become dense ones; updates run on the mesh."""
        add = functools.partial(BaseOptimizer.add_variable_from_reference, optimizer)
        assigns = ("assign", "assign_add", "assign_sub")
        return {
            "add_variable_from_reference": add,
            "_var_key": keying(optimizer),
            "apply": applying(optimizer, session),
            **{name: assigning(getattr(optimizer, name), session) for name in assigns},
        }

    def gradients(self, model: keras.Model, x: object, y: object, sample_weight: object) -> Found:
        """The losses in training, and their gradients."""
        session = session_of(model)
        batch = (x, y, sample_weight)
        make_for_training(model, session, batch)  # each device would write to trackers of losses
        if session is not None:
            batch = placed(batch, session)

        def compute(batch: object) -> Found:
            held = [v.value for v in model.trainable_variables]
            losses, found = (
                call_own_step(model, batch) if has_own_step(model) else _of_loss(model, held, batch)
            )
            gradients = [None if each is None else tf.convert_to_tensor(each) for each in found]
            if session is not None:
                pairs = zip(gradients, held, strict=True)
                gradients = [None if g is None else as_read(g, h, session) for g, h in pairs]
            return losses, gradients

        moved = [*model.non_trainable_variables, *model.metrics_variables]
        values = list(map(read_variable, moved))
        compiled, what = (
            functools.partial(tf.function, compute, autograph=False),
            f"{model.name}: the gradient",
        )
        with explained(what), contextlib.ExitStack() as stack:
            if session is not None:
                stack.enter_context(Unoptimized(session))
                stack.enter_context(on_mesh(session))
            run = compiled() if session is None else Regathered(compiled, session, what)
            losses, gradients = run(batch)
        for variable, value in zip(moved, values, strict=True):
            variable.assign(value)  # the call has moved statistics and seeds on
        numbers = {name: _numpy(each, session) for name, each in losses.items()}
        return numbers, [_numpy(gradient, session) for gradient in gradients]


def _of_loss(model: keras.Model, held: list[tf.Variable], batch: Any) -> Found:
    x, y, sample_weight = batch
    with tf.GradientTape() as tape:
        y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
        loss: Any = model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
    return {"loss": loss}, tape.gradient(loss, held, unconnected_gradients=tf.UnconnectedGradients.ZERO)


def _numpy(tensor: object, session: KerasSession | None) -> object:
    if not isinstance(tensor, tf.Tensor):
        return tensor
    return tensor.numpy() if session is None else session.engine.to_numpy(tensor)
