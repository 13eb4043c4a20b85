"""Keras on TensorFlow: `Variable._value` is a `tf.Variable`, here one in a layout.

Private names of Keras's TensorFlow backend that are used here, besides those that `hooks` lists, tested on Keras 3.15:

    keras.src.backend.tensorflow.optimizer.TFOptimizer      _var_key
    keras.src.optimizers.base_optimizer.BaseOptimizer       add_variable_from_reference, _trainable_variables,
                                                            _trainable_variables_indices
    keras.optimizers.MultiOptimizer                         _var_to_optimizer_idx
    keras.Model                                             _symbolic_build, _call_has_training_arg
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from layoutmap.adapters.keras.backends import Wraps
from layoutmap.adapters.keras.backends.tensorflow_functions import REPLACED, computing_for_a_mesh
from layoutmap.adapters.keras.backends.tensorflow_unsupported import explained, reading_layout, unsupported_of
from layoutmap.adapters.keras.hooks import BaseOptimizer, in_stateless_scope
from layoutmap.adapters.keras.pending import is_pending
from layoutmap.adapters.keras.quantizing import weights_off_mesh
from layoutmap.adapters.keras.training import check_same_batch, place_batch, settle_for_training
from layoutmap.adapters.keras.wraps import CALLS, call_of, session_of
from layoutmap.core.errors import ScopeError
from layoutmap.core.layout import Layout
from layoutmap.core.patches import Closing
from layoutmap.core.unsupported import Unsupported
from layoutmap.core.variables import Assignment

if TYPE_CHECKING:
    from layoutmap.adapters.keras.session import KerasSession

__all__ = ["TensorFlowBackend"]

dtensor: Any = tf.experimental.dtensor


class TensorFlowBackend:
    """Keras on TensorFlow; see `layoutmap.adapters.keras.backends`."""

    engine_name = "tensorflow"
    chooses_layouts = False
    quiet = ()
    global_init: Mapping[str, str] = MappingProxyType(
        {
            "Orthogonal": "the QR decomposition of an orthogonal matrix needs all of it",
            "Identity": "TensorFlow makes a diagonal in one piece",
            "Constant": "its constant is an array, which is whole already",
        }
    )

    def private_names(self) -> Sequence[tuple[Any, Sequence[str]]]:
        """What the top of this file lists, where it belongs to a class."""
        return [(keras.Optimizer, ("_var_key",)), (keras.Model, ("_symbolic_build",)), *REPLACED]

    @contextmanager
    def outside(self) -> Generator[None]:
        """Leave any tracing that goes on, and the mesh, if what is called now runs on it."""
        with tf.init_scope(), tf.device(None):
            yield

    def is_tracing(self) -> bool:
        """Whether the code runs inside a compiled function's trace."""
        return not tf.executing_eagerly()

    def store(self, variable: Any, held: Any, assignment: Assignment, session: KerasSession) -> Any:
        """Give a variable its value; a `DVariable` keeps its layout by itself."""
        if not assignment.layout.is_fully_replicated():
            held.value = _gathering(held, assignment.layout, session)
        tag = object()
        variable._layout = tag
        variable._value = held
        return tag

    def read(self, variable: Any) -> Any:
        """The whole value of a variable."""
        return variable.value.numpy()

    def settled(self, optimizers: Sequence[Any], layers: Sequence[Any]) -> None:
        """Optimizers know variables by their `tf.Variable`, which is another one now."""
        for optimizer in optimizers:
            for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
                if each is not None and each.built and hasattr(each, "_trainable_variables_indices"):
                    numbered = enumerate(each._trainable_variables)
                    each._trainable_variables_indices = {each._var_key(v): i for i, v in numbered}
                    if isinstance(each, keras.optimizers.MultiOptimizer):
                        keys = map(each._var_key, each._trainable_variables)
                        numbers = each._var_to_optimizer_idx.values()
                        each._var_to_optimizer_idx = dict(zip(keys, numbers, strict=True))

    def own_memory(self, variables: Sequence[Any]) -> None:
        """Each `tf.Variable` has memory of its own."""

    def lay_out(self, array: Any, layout: Layout, session: KerasSession) -> Any:
        """A tensor that is computed on the mesh, in a layout; an export has no mesh."""
        return (
            array if getattr(session.inside, "exporting", False) else session.engine.relayout(array, layout)
        )

    def quantizing(self, layer: Any, session: KerasSession) -> AbstractContextManager[Any]:
        """Keras hands weights to numpy."""
        return weights_off_mesh(layer, session, tf.constant)

    def layer_wraps(self, layer: Any, session: KerasSession) -> Wraps:
        """A call with plain tensors, outside of compiled functions, runs on the mesh; an export knows no mesh."""
        wraps = {name: _calling(layer, session, name) for name in CALLS}
        if isinstance(layer, keras.Model):
            wraps["export"] = _exporting(layer, session)
        return wraps

    def optimizer_wraps(self, optimizer: Any, session: KerasSession) -> Wraps:
        """Slots are made without reading the weight; gradients of rows become whole ones; updates run on the mesh."""
        add = functools.partial(BaseOptimizer.add_variable_from_reference, optimizer)
        assigns = ("assign", "assign_add", "assign_sub")
        return {
            "add_variable_from_reference": add,
            "_var_key": _keying(optimizer),
            "apply": _applying(optimizer, session),
            **{name: _assigning(getattr(optimizer, name), session) for name in assigns},
        }

    def training_wraps(self, model: Any, session: KerasSession) -> Wraps:
        """Steps that take each batch off the iterator, place it, and run compiled on the mesh."""
        return {
            f"make_{name}_function": _making(model, session, name) for name in ("train", "test", "predict")
        }

    def unsupported_of(self, layer: Any, path: str, weights: list[str]) -> list[Unsupported]:
        """What DTensor cannot do with a layer."""
        return unsupported_of(layer, path, weights)

    def drawing(self, model: Any) -> AbstractContextManager[Any]:
        """Keras draws from generators that are variables."""
        return nullcontext()

    def gradients(self, model: Any, x: Any, y: Any, sample_weight: Any) -> tuple[Any, list[Any]]:
        """The loss in training, and its gradients."""
        session = session_of(model)
        batch = (x, y, sample_weight)
        if session is not None:
            settle_for_training(model, session)
            batch = _placed(batch, session)

        @tf.function(autograph=False)
        def compute(batch: Any) -> Any:
            x, y, sample_weight = batch
            with tf.GradientTape() as tape:
                y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
                loss = model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
            held = [v.value for v in model.trainable_variables]
            unused_is_zero = tf.UnconnectedGradients.ZERO
            found = tape.gradient(loss, held, unconnected_gradients=unused_is_zero)
            gradients = [tf.convert_to_tensor(each) for each in found]
            if session is not None:
                gradients = [_as_read(g, h, session) for g, h in zip(gradients, held, strict=True)]
            return loss, gradients

        values = [self.read(v) for v in model.non_trainable_variables]
        optimized = contextlib.nullcontext() if session is None else _Unoptimized(session)
        with explained(f"{model.name}: the gradient"), optimized:
            loss, gradients = compute(batch)
        for variable, value in zip(model.non_trainable_variables, values, strict=True):
            variable.assign(value)  # the call has moved statistics and seeds on
        return _numpy(loss, session), [_numpy(gradient, session) for gradient in gradients]


def _numpy(tensor: Any, session: KerasSession | None) -> Any:
    return tensor.numpy() if session is None else session.engine.whole(tensor)


# -- calls


def _calling(layer: Any, session: KerasSession, name: str) -> Callable[..., Any]:
    plain = _reading_in(layer, session, name)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        exporting = getattr(session.inside, "exporting", False)
        if exporting or in_stateless_scope() or getattr(session.inside, "depth", 0):
            return plain(*args, **kwargs)
        with _inside(session):
            given = keras.tree.flatten((args, kwargs))
            if not tf.executing_eagerly() or not any(_is_plain(each) for each in given):
                return plain(*args, **kwargs)
            session.refuse_in_a_plan(layer.name)
            # The session's lock first, as where weights are made: two threads would else wait for each other.
            with session.lock:
                args, kwargs = place_batch((args, kwargs), session)
                with explained(f"{layer.name}: the call"), session.engine.run_on(session.policy.mesh):
                    results = plain(*args, **kwargs)
                return keras.tree.map_structure(lambda each: _off_mesh(each, session), results)

    return call


def _reading_in(layer: Any, session: KerasSession, name: str) -> Callable[..., Any]:
    """The layer's `call`, or what stands for it, in which its weights are read as DTensor can compute with them."""
    plain = call_of(layer, name)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _reading(session, reading_layout(layer)):
            return plain(*args, **kwargs)

    return call


@contextmanager
def _inside(session: KerasSession) -> Generator[None]:
    """While open, a layer of the scope is being called, and the layers in it are not the outermost one."""
    session.inside.depth = getattr(session.inside, "depth", 0) + 1
    try:
        with computing_for_a_mesh(functools.partial(_whole, session=session)):
            yield
    finally:
        session.inside.depth -= 1


def _exporting(model: Any, session: KerasSession) -> Callable[..., Any]:
    """An export that is traced as a model of one device is: what runs it has no mesh."""
    plain = model.export

    @functools.wraps(plain)
    def export(*args: Any, **kwargs: Any) -> Any:
        session.inside.exporting = True
        try:
            return plain(*args, **kwargs)
        finally:
            session.inside.exporting = False

    return export


def _gathering(held: Any, layout: Layout, session: KerasSession) -> Callable[[], Any]:
    """Reading a weight that is cut where the operations that use it cannot have it cut: they get it put together.

    That is over the dim of the batch, where DTensor does not join an axis that two operands cut over two dims; and
    over all dims where the layer that is being called needs that.
    """
    plain = held.value
    usual = session.policy.computing_layout(layout)

    def value() -> Any:
        read = plain()
        if not getattr(session.inside, "depth", 0):
            return read
        reading = getattr(session.inside, "reading", None)
        wanted = reading(usual) if reading else usual
        held.read_layout = wanted
        return read if wanted == layout else session.engine.relayout(read, wanted)

    return value


@contextmanager
def _reading(session: KerasSession, reading: Callable[[Layout], Layout] | None) -> Generator[None]:
    """While open, the weights that are read are those of a layer that needs them in a layout of its own."""
    before = getattr(session.inside, "reading", None)
    session.inside.reading = reading
    try:
        yield
    finally:
        session.inside.reading = before


def _is_plain(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (isinstance(value, tf.Tensor) and not dtensor.is_dtensor(value))


def _off_mesh(value: Any, session: KerasSession) -> Any:
    """A result as a plain tensor, so that what follows need not run on the mesh; gradients find their way back."""
    if not isinstance(value, tf.Tensor) or not dtensor.is_dtensor(value):
        return value

    def off_mesh(tensor: Any) -> tuple[Any, Callable[[Any], Any]]:
        def back(upstream: Any) -> Any:
            return session.engine.relayout(upstream, session.policy.batch_layout(tuple(upstream.shape)))

        return tf.constant(session.engine.whole(tensor)), back

    return tf.custom_gradient(off_mesh)(value) if value.dtype.is_floating else off_mesh(value)[0]


def _whole(value: Any, session: KerasSession) -> Any:
    """A tensor, of which every device holds all."""
    if not isinstance(value, tf.Tensor):
        return value
    return session.engine.relayout(value, session.policy.replicated(len(value.shape)))


# -- optimizers


def _keying(optimizer: Any) -> Callable[..., Any]:
    plain = optimizer._var_key

    @functools.wraps(plain)
    def key(variable: Any) -> Any:
        # A variable without a value must not get one for the sake of a key; `settled` makes the keys anew.
        return id(variable) if is_pending(variable) else plain(variable)

    return key


def _applying(optimizer: Any, session: KerasSession) -> Callable[..., Any]:
    """An update on the mesh, with each gradient in the layout of its weight.

    Without that, DTensor lays the backward pass out as suits the optimizer, and fails at it (Muon on a transformer).
    """
    plain = optimizer.apply

    @functools.wraps(plain)
    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        weights = optimizer._trainable_variables if trainable_variables is None else trainable_variables
        weights, grads = list(weights), list(grads)
        with contextlib.ExitStack() as stack:
            if tf.executing_eagerly():
                stack.enter_context(session.lock)
                stack.enter_context(session.engine.run_on(session.policy.mesh))
            stack.enter_context(computing_for_a_mesh(functools.partial(_whole, session=session)))
            laid_out = [_laid_out(g, v, session) for g, v in zip(grads, weights, strict=True)]
            return plain(laid_out, trainable_variables)

    return apply


def _laid_out(gradient: Any, weight: Any, session: KerasSession) -> Any:
    layout = getattr(weight, "layout", None)
    if layout is None or not isinstance(gradient, tf.Tensor):
        return _rows(gradient, weight, session)
    # First as the layer has read the weight, so that the backward pass mirrors the forward pass.
    gradient = _as_read(gradient, weight.value, session)
    return session.engine.relayout(gradient, layout)


def _as_read(gradient: Any, held: Any, session: KerasSession) -> Any:
    """A gradient in the layout in which its weight took part in the computation."""
    return gradient if held.read_layout is None else session.engine.relayout(gradient, held.read_layout)


def _assigning(method: Callable[..., Any], session: KerasSession) -> Callable[..., Any]:
    """An assignment whose value is whole: DTensor cannot add rows to a variable one by one.

    The rows stay rows until then, as in plain Keras, where a row that occurs twice counts twice in a mean of squares.
    """

    @functools.wraps(method)
    def assign(variable: Any, value: Any) -> Any:
        rows = _rows(value, variable, session)
        return method(variable, tf.convert_to_tensor(rows) if isinstance(rows, tf.IndexedSlices) else rows)

    return assign


def _rows(value: Any, variable: Any, session: KerasSession) -> Any:
    """Rows of a variable, each on every device: DTensor would sum up only those that a device has, silently wrong.

    Their number, and that of the variable's, are made constants: DTensor does not cut what has an unknown size.
    """
    if not isinstance(value, tf.IndexedSlices):
        return value
    shape = tuple(variable.shape)
    indices = _whole(value.indices, session)
    values = value.values
    if indices.shape.is_fully_defined():
        values = tf.reshape(values, [*indices.shape, *shape[1:]])
    values = _whole(values, session)
    return tf.IndexedSlices(values, indices, tf.constant(shape, indices.dtype))


# -- training


def _making(model: Any, session: KerasSession, name: str) -> Callable[..., Any]:
    plain = getattr(model, f"make_{name}_function")
    attribute = f"{name}_function"

    @functools.wraps(plain)
    def make(force: bool = False) -> Any:
        settle_for_training(model, session)
        if getattr(model, attribute) is None or force:
            step = _Step(model, session, name)
            setattr(model, attribute, step.on_list if name == "predict" else step.on_iterator)
        return getattr(model, attribute)

    return make


class _Step:
    """A training, test or predict step on the mesh."""

    def __init__(self, model: Any, session: KerasSession, name: str):
        self._model = model
        self._session = session
        self._name = name
        self._known: set[Any] = set()  # shapes and types of batches for which all is made and checked
        self._compiled = tf.function(self._step, autograph=False, jit_compile=bool(model.jit_compile) or None)

    def _step(self, batch: Any) -> Any:
        with _outputs_by_rows(self._model, self._session):
            return getattr(self._model, f"{self._name}_step")(batch)

    def on_iterator(self, iterator: Iterator[Any]) -> Any:
        """As many steps as one execution has; what the last one gives."""
        logs: Any = None
        for number in range(self._model.steps_per_execution):
            try:
                batch = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if not number:
                    raise
                break
            logs = self._run(batch)
        return keras.tree.map_structure(self._plain, logs)

    def on_list(self, batches: Sequence[Any]) -> Any:
        """The predictions for some batches, one after the other."""
        results = [keras.tree.map_structure(self._plain, self._run(batch)) for batch in batches]
        if len(results) == 1:
            return results[0]
        return keras.tree.map_structure(lambda *parts: tf.concat(parts, axis=0), *results)

    def _run(self, batch: Any) -> Any:
        batch = keras.tree.map_structure(
            lambda a: None if isinstance(a, tf.experimental.Optional) else a, batch, none_is_leaf=True
        )
        signature = tuple(_signature(each) for each in keras.tree.flatten(batch))
        if signature not in self._known:
            self._make_all(batch)
        batch = _placed(batch, self._session)
        with explained(f"{self._model.name}: the {self._name} step"):
            if self._model.run_eagerly:
                with self._session.lock, self._session.engine.run_on(self._session.policy.mesh):
                    return self._step(batch)
            if signature not in self._known:
                self._check_captured(batch)
            self._known.add(signature)
            with _Unoptimized(self._session):
                return self._compiled(batch)

    def _make_all(self, batch: Any) -> None:
        """Make what the step would make while it is traced: weights, metrics, slots."""
        model = self._model
        if self._name == "predict":
            if not all(layer.built for layer in model._flatten_layers()):
                x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
                with self._session.defer():
                    model(keras.tree.map_structure(_symbolic, x))
        else:
            with self._session.defer():
                model._symbolic_build(data_batch=batch)
        settle_for_training(model, self._session)

    def _check_captured(self, batch: Any) -> None:
        """Refuse a step that writes to a variable outside of the mesh: every device would write to it."""
        traced = self._compiled.get_concrete_function(batch)
        written = _written(traced.graph)
        for variable in traced.graph.variables:
            if not dtensor.is_dtensor(variable) and variable.handle.ref() in written:
                raise ScopeError(
                    f"{variable.name}: the {self._name} step writes to a variable that is not on the mesh",
                    facts={"shape": str(tuple(variable.shape)), "model": self._model.name},
                    why="every device would write to it, so a counter would count each step many times",
                    fix="make it with self.add_weight or keras.Variable inside of the scope, as an attribute of a "
                    "layer, or as layoutmap.DVariable",
                )

    def _plain(self, value: Any) -> Any:
        """A result as a plain tensor, which callbacks and `predict` can read."""
        if not isinstance(value, tf.Tensor) or not dtensor.is_dtensor(value):
            return value
        return tf.constant(self._session.engine.whole(value))


def _signature(value: Any) -> Any:
    return (tuple(value.shape), str(value.dtype)) if hasattr(value, "shape") else type(value)


_ALWAYS_THERE = {"disable_model_pruning", "disable_meta_optimizer"}  # in TensorFlow's options, chosen or not
_options_lock = threading.RLock()
_unoptimized: weakref.WeakSet[_Unoptimized] = weakref.WeakSet()


class _Unoptimized(Closing):
    """While open, graphs that run on CPU devices are run as DTensor has made them.

    TensorFlow would optimize the graph of a step once for each device: half of the time of the first step on 8, and
    no later one is faster for it. On accelerators, which that may serve, it is left alone, and wherever a program has
    chosen optimizations itself.
    """

    def __init__(self, session: KerasSession) -> None:
        mesh = session.engine.native(session.policy.replicated(0), 0).mesh
        self._is_on_cpu = mesh.device_type() == "CPU"

    def open(self) -> None:
        options = tf.config.optimizer
        with _options_lock:
            chosen = options.get_experimental_options()
            wanted = self._is_on_cpu and not chosen.keys() - _ALWAYS_THERE
            if wanted and (_unoptimized or not chosen.get("disable_meta_optimizer")):
                _unoptimized.add(self)
                options.set_experimental_options({"disable_meta_optimizer": True})

    def close(self) -> None:
        with _options_lock:
            if self in _unoptimized:
                # Also with another thread inside, since each thread remembers the options that it found.
                others = len(_unoptimized) > 1
                tf.config.optimizer.set_experimental_options(
                    {} if others else {"disable_meta_optimizer": False}
                )
                _unoptimized.discard(self)


def _symbolic(array: Any) -> Any:
    return keras.KerasTensor(array.shape, keras.backend.standardize_dtype(array.dtype))


def _by_rows(output: Any, session: KerasSession) -> Any:
    shape: Any = output.shape.as_list() if isinstance(output, tf.Tensor) else [None]
    return output if None in shape else session.engine.relayout(output, session.policy.batch_layout(shape))


@contextmanager
def _outputs_by_rows(model: Any, session: KerasSession) -> Generator[None]:
    """While open, what a model puts out is cut along the batch only.

    Losses and metrics look along the other axes, and some of DTensor's operations are wrong on an axis that is cut.
    """
    call = model.call

    @functools.wraps(call)
    def by_rows(*args: Any, **kwargs: Any) -> Any:
        if getattr(session.inside, "depth", 0):
            return call(*args, **kwargs)
        return keras.tree.map_structure(lambda y: _by_rows(y, session), call(*args, **kwargs))

    own = model.__dict__
    own["call"] = by_rows
    try:
        yield
    finally:
        own["call"] = call


def _placed(batch: Any, session: KerasSession) -> Any:
    def as_numpy(value: Any) -> Any:
        return value.numpy() if isinstance(value, tf.Tensor) and _is_plain(value) else value

    batch = keras.tree.map_structure(as_numpy, batch, none_is_leaf=True)
    check_same_batch(batch, session)
    return place_batch(batch, session)


def _written(graph: Any) -> set[Any]:
    """The handles, outside of a graph, of the variables that it writes to, in functions that it calls too."""
    written: set[Any] = set()
    inside = {inner.ref(): outer for outer, inner in graph.captures}
    for op in graph.get_operations():
        if op.type.startswith(("Assign", "ResourceScatter", "ResourceApply", "ResourceSparse")):
            handle = op.inputs[0]
            if handle.ref() in inside:
                written.add(inside[handle.ref()].ref())
        elif op.type in (
            "PartitionedCall",
            "StatefulPartitionedCall",
            "While",
            "StatelessWhile",
            "If",
            "Case",
        ):
            # What a called function does is not looked into: taken as written to.
            written |= {
                inside[i.ref()].ref() for i in op.inputs if i.ref() in inside and i.dtype == tf.resource
            }
    return written
