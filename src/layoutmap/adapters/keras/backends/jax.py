"""Keras on JAX: `Variable._value` is a `jax.Array`, `Variable._layout` may be a `NamedSharding`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import jax
import jax.core
import keras
import numpy as np

from layoutmap.adapters.keras.backends.jax_processes import Rows, gathered_value, saving, telling
from layoutmap.adapters.keras.backends.jax_unsupported import unsupported_of
from layoutmap.adapters.keras.protocol import Backend, KerasSession, Wraps
from layoutmap.adapters.keras.training import materialize_for_training, place_batch
from layoutmap.core.layout import Layout
from layoutmap.core.unsupported import Unsupported
from layoutmap.core.variables import Assignment
from layoutmap.engines import get_engine

__all__ = ["JaxBackend"]


class JaxBackend(Backend):
    """Keras on JAX; see `layoutmap.adapters.keras.protocol`."""

    engine_name = "jax"
    chooses_layouts = True
    global_init = MappingProxyType(
        {
            "Orthogonal": "the QR decomposition of an orthogonal matrix needs all of it",
            "Constant": "its constant is an array, all of which is there already",
        }
    )

    def outside(self) -> AbstractContextManager[Any]:
        """Leave any tracing that goes on."""
        # Not ensure_compile_time_eval: that folds the constants of what is compiled in there, global arrays of them.
        return jax.core.eval_context()

    def is_tracing(self) -> bool:
        """Whether the code runs inside a compiled function's trace."""
        return isinstance(jax.numpy.add(0, 0), jax.core.Tracer)

    def store(self, variable: Any, held: Any, assignment: Assignment, session: KerasSession) -> Any:
        """Give a variable its value and the sharding that later values keep."""
        native = session.engine.native(assignment.layout, assignment.layout.rank)
        # A sharding object of its own for each variable: Keras hands a variable's `_layout` to the optimizer's slots,
        # and by that very object a slot's weight is known again.
        tag = jax.sharding.NamedSharding(native.mesh, native.spec)
        variable._layout = tag
        variable._value = held
        # On the instance, as Keras has no place for it; a copy of the variable gets one that knows the copy.
        own = variable.__dict__
        own["__array__"] = functools.partial(_as_array, variable)
        own.pop("_direct_assign", None)
        if session.context.across:
            own["_direct_assign"] = functools.partial(_assign, variable)
        return tag

    def lay_out(self, array: Any, layout: Layout, session: KerasSession) -> Any:
        """In a trace a constraint; else the array is moved."""
        return jax.lax.with_sharding_constraint(array, session.engine.native(layout, layout.rank))

    def own_memory(self, variables: Sequence[Any]) -> None:
        """A step gives its buffers away, and each can be given away only once."""
        held: set[int] = set()
        for variable in variables:
            if id(variable._value) in held:
                variable._value = variable._value.copy()
            held.add(id(variable._value))

    def training_wraps(self, model: Any, session: KerasSession) -> Wraps:
        """The batch is placed on the mesh, and new values leave the step in their variables' layouts."""
        making = {
            f"make_{name}_function": _making(model, session, name) for name in ("train", "test", "predict")
        }
        steps = ("train_step", "test_step", "predict_step")
        wraps = making | {name: _pinned(model, getattr(model, name), session) for name in steps}
        if session.context.across:
            wraps |= {name: telling(model, session, name) for name in ("fit", "evaluate", "predict")}
            wraps |= {name: saving(model, session, name) for name in ("save", "save_weights")}
        return wraps

    def unsupported_of(self, layer: Any, path: str, weights: list[str]) -> list[Unsupported]:
        """What XLA cannot compile of a layer."""
        return unsupported_of(layer, path, weights)

    def gradients(self, model: Any, x: Any, y: Any, sample_weight: Any) -> tuple[Any, list[Any]]:
        """The loss in training, and its gradients."""
        optimizer = getattr(model, "optimizer", None)
        slots = [v.value for v in optimizer.variables] if optimizer is not None else None

        def loss_of(trainable: Any, other: Any, metrics: Any) -> Any:
            loss, _ = model.compute_loss_and_updates(
                trainable, other, metrics, x, y, sample_weight, training=True, optimizer_variables=slots
            )
            return loss

        values = [
            [v.value for v in variables]
            for variables in (
                model.trainable_variables,
                model.non_trainable_variables,
                model.metrics_variables,
            )
        ]
        loss, gradients = jax.jit(jax.value_and_grad(loss_of))(*values)
        whole = get_engine("jax").to_numpy
        return whole(loss), [whole(gradient) for gradient in gradients]


def _making(model: Any, session: KerasSession, name: str) -> Callable[..., Any]:
    plain = getattr(model, f"make_{name}_function")
    attribute = f"{name}_function"

    @functools.wraps(plain)
    def make(force: bool = False) -> Any:
        materialize_for_training(model, session)
        if getattr(model, attribute) is None or force:
            plain(force=force)
            step = getattr(model, attribute)
            if session.context.across:
                run = _across(step, Rows(session, name), name)
            else:

                def run(state: Any, data: Any) -> Any:
                    return step(state, (place_batch(b, session) for b in data))

            setattr(model, attribute, run)
        return getattr(model, attribute)

    return make


def _across(step: Callable[..., Any], rows: Rows, name: str) -> Callable[..., Any]:
    """Steps in several processes, each with its own rows."""

    def run(state: Any, data: Any) -> Any:
        rows.placed.clear()
        outputs, new = step(state, rows.place(data))
        if rows.on_cpus:  # There this step and the next comparison of batches could wait for each other.
            jax.block_until_ready((outputs, new))
        return (rows.own(outputs), new) if name == "predict" else (outputs, new)

    return run


def _pinned(model: Any, plain: Callable[..., Any], session: KerasSession) -> Callable[..., Any]:
    """A step whose new variable values stay in the layouts of their variables."""

    @functools.wraps(plain)
    def step(state: Any, data: Any) -> Any:
        result, new = plain(state, data)
        if session.context.across:  # each process is to find its rows, and all numbers, on its own devices
            by_rows = plain.__name__ == "predict_step"
            result = keras.tree.map_structure(lambda array: _readable(array, session, by_rows), result)
        if plain.__name__ == "predict_step":
            return result, _pin(new, model.non_trainable_variables)
        groups = [model.trainable_variables, model.non_trainable_variables]
        if plain.__name__ == "train_step":
            groups.append(model.optimizer.variables)
        groups.append(model.metrics_variables)
        return result, tuple(_pin(values, group) for values, group in zip(new, groups, strict=True))

    return step


def _readable(array: Any, session: KerasSession, by_rows: bool) -> Any:
    if not isinstance(array, jax.Array):
        return array  # a number that a step of one's own returns
    layout = session.policy.batch_layout(array.shape) if by_rows else session.policy.replicated(array.ndim)
    return jax.lax.with_sharding_constraint(array, session.engine.native(layout, layout.rank))


def _assign(variable: Any, value: Any) -> None:
    if isinstance(value, jax.core.Tracer) or not getattr(value, "is_fully_addressable", True):
        type(variable)._direct_assign(variable, value)
    else:  # each process takes its devices' shards of its own value; JAX would first send all of it around
        variable._value = get_engine("jax").relayout(value, variable.layout)


def _as_array(variable: Any, dtype: Any = None, copy: bool | None = None) -> Any:
    # JAX would keep what it has gathered, with the array: after a save the host would hold all of the model.
    return np.asarray(gathered_value(variable, get_engine("jax").to_numpy), dtype=dtype)


def _pin(values: Any, variables: Any) -> list[Any]:
    return [_pinned_value(value, v._layout) for value, v in zip(values, variables, strict=True)]


def _pinned_value(array: Any, sharding: Any) -> Any:
    if isinstance(sharding, jax.sharding.Sharding):
        return jax.lax.with_sharding_constraint(array, sharding)
    return array
