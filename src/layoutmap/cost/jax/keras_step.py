"""Describe the training step of a Keras model on JAX, computed on given values of its variables."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import keras
from keras.src.backend.jax import nn as keras_nn

from layoutmap.adapters.keras.describing import DescribedVariable, describe_variables, list_layer_paths
from layoutmap.adapters.keras.private import get_stateless_scope
from layoutmap.adapters.keras.protocol import KerasSession
from layoutmap.adapters.keras.training import has_custom_train_step
from layoutmap.core.steps import BatchArraySpec, Key, StepTracer, TrainingStep
from layoutmap.core.variables import Kind
from layoutmap.cost.equal_blocks import find_stacks_of_equal_blocks, make_comparable_attributes
from layoutmap.engines.patches import AttributePatch, PatchGroup

Loss = Callable[..., Any]
Call = Callable[..., object]
Layers = Sequence[tuple[str, keras.Layer]]

_NO_LOSS = "the model has no loss: the mean of its squared outputs stands for one"
_NO_OPTIMIZER = (
    "the model has no optimizer: gradients are subtracted from the weights, and there are no slots"
)
_OWN_STEP = "the model's own train_step is not counted, but the usual step of Keras"
_NO_METRICS = "metrics are not counted"
_RECOMPUTE = (
    "In Keras: make the model in keras.RematScope('list_of_layers', layer_names=[..]); where Keras fails then, as on "
    "JAX for layers that look at `training`, see 'Recompute activations' in docs/search.md."
)


def describe_training_step(
    session: KerasSession, model: Any, inputs: object, optimizer: object, loss: Loss | None
) -> TrainingStep:
    """Return the training step of a Keras model from a dry run, which has already set `optimizer` on the model."""
    entries = [entry for entry in describe_variables(session.registry) if entry.spec.kind is not Kind.METRIC]
    layers = _list_paths_and_layers(session)
    x, tree = jax.tree.flatten(inputs)
    batch = [
        BatchArraySpec(_format_path(path), tuple(leaf.shape), str(leaf.dtype))
        for path, leaf in _flatten_with_paths(inputs)
    ]
    step = _TraceableStep(model, entries, layers, loss, tree, len(x))
    compiled = loss is None and getattr(model, "loss", None) is not None
    notes = [] if compiled or loss is not None else [_NO_LOSS]
    if compiled:
        targets = step.make_target_shapes(batch)
        batch += [
            BatchArraySpec(f"targets{_format_path(p)}", tuple(t.shape), str(t.dtype))
            for p, t in _flatten_with_paths(targets)
        ]
        step.target_tree = jax.tree.structure(targets)
        notes.append(_NO_METRICS)
    notes += [_NO_OPTIMIZER] * (step.optimizer is None) + [_OWN_STEP] * has_custom_train_step(model)
    variables = [entry.spec for entry in entries]
    blocks = find_stacks_of_equal_blocks(variables, layers, _make_comparable_settings)
    return TrainingStep(model.name, variables, batch, blocks, step.compute_step_results, notes, _RECOMPUTE)


class _TraceableStep:
    def __init__(
        self,
        model: keras.Model,
        entries: Sequence[DescribedVariable],
        layers: Layers,
        loss: Loss | None,
        tree: object,
        num_inputs: int,
    ):
        self._model = model
        self._entries = entries
        self._layers = layers
        self._loss = loss
        self._tree = tree
        self._num_inputs = num_inputs
        self.target_tree: object = None
        self.optimizer = getattr(model, "optimizer", None)
        self._trained = {id(variable) for variable in model.trainable_variables}

    def make_target_shapes(self, batch: Sequence[BatchArraySpec]) -> object:
        """Return targets for the compiled loss, as shapes and types in the structure of the model's outputs."""

        def compute_outputs(values: Sequence[object], inputs: Sequence[object]) -> object:
            with keras.StatelessScope(
                state_mapping=list(zip([e.variable for e in self._entries], values, strict=True))
            ):
                return self._call_model(inputs)

        values = [jax.ShapeDtypeStruct(e.spec.shape, e.spec.dtype) for e in self._entries]
        inputs = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in batch]
        found = jax.eval_shape(compute_outputs, values, inputs)
        leaves, tree = jax.tree.flatten(found)
        return tree.unflatten(
            map(self._make_target_shape, leaves, self._list_output_losses(found, len(leaves)))
        )

    def _list_output_losses(self, outputs: object, num_outputs: int) -> Sequence[object]:
        """Return the loss of each of `num_outputs` outputs, or None for an output that a dict of losses lacks."""
        loss: object = self._model.loss
        if isinstance(loss, Mapping):
            is_named = isinstance(outputs, Mapping)
            names: Sequence[str] = sorted(outputs) if is_named else self._model.output_names
            return [cast("Mapping[str, object]", loss).get(name) for name in names]
        return cast("Sequence[object]", loss) if isinstance(loss, list | tuple) else [loss] * num_outputs

    def _make_target_shape(self, output: jax.ShapeDtypeStruct, loss: object) -> object:
        name = loss if isinstance(loss, str) else getattr(loss, "name", type(loss).__name__)
        if "sparse" in str(name).lower():
            return jax.ShapeDtypeStruct(output.shape[:-1], "int32")
        return jax.ShapeDtypeStruct(output.shape, output.dtype)

    def _call_model(self, inputs: Sequence[object]) -> Any:
        options = {"training": True} if self._model._call_has_training_arg else {}
        return self._model(jax.tree.unflatten(self._tree, inputs), **options)

    def compute_step_results(
        self, tracer: StepTracer, values: Mapping[Key, object], batch: Sequence[object]
    ) -> Mapping[Key, Any]:
        """Return the values of the variables after a step, and the loss under the key `("", "loss")`."""
        variables = {e.spec.key: e.variable for e in self._entries if e.spec.key in values}
        trained = [key for key, variable in variables.items() if id(variable) in self._trained]
        frozen = [key for key in variables if key not in set(trained)]
        unread = [
            (e.variable, tracer.unread[e.spec.key]) for e in self._entries if e.spec.key in tracer.unread
        ]

        def compute_loss(weights: Sequence[object]) -> tuple[jax.Array, list[object]]:
            state = dict(zip(trained, weights, strict=True)) | {key: values[key] for key in frozen}
            mapping = [(variables[key], value) for key, value in state.items()]
            with keras.StatelessScope(state_mapping=mapping + unread, collect_losses=True) as scope:
                found = self._compute_loss(self._call_model(batch[: self._num_inputs]), batch)
                if self.optimizer is not None:
                    found = self.optimizer.scale_loss(found)
            return found, [scope.get_current_value(variables[key]) for key in frozen]

        kept = [variables[key] for key in frozen]
        with _PATCHES.activate(), _report_layer_calls_temporarily(tracer, self._layers, kept):
            (value, others), gradients = jax.value_and_grad(compute_loss, has_aux=True)(
                [values[k] for k in trained]
            )
        after = dict(values) | dict(zip(frozen, others, strict=True)) | {("", "loss"): value}
        if self.optimizer is None:
            with tracer.mark_optimizer_update():
                new = (values[key] - gradient for key, gradient in zip(trained, gradients, strict=True))
                return after | dict(zip(trained, new, strict=True))
        with (
            tracer.mark_optimizer_update(),
            keras.StatelessScope(state_mapping=[(variables[k], after[k]) for k in variables]) as scope,
        ):
            self.optimizer.apply(gradients, [variables[key] for key in trained])
        return after | {key: scope.get_current_value(variable) for key, variable in variables.items()}

    def _compute_loss(self, outputs: object, batch: Sequence[object]) -> Any:
        if self._loss is not None:
            return self._loss(outputs)
        if self.target_tree is None:
            found = [jnp.mean(jnp.square(each.astype("float32"))) for each in jax.tree.leaves(outputs)]
            return functools.reduce(jnp.add, found)
        targets = jax.tree.unflatten(self.target_tree, batch[self._num_inputs :])
        x = jax.tree.unflatten(self._tree, batch[: self._num_inputs])
        return self._model.compute_loss(x=x, y=targets, y_pred=outputs, training=True)


def _flatten_with_paths(tree: object) -> Sequence[tuple[tuple[object, ...], Any]]:
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def _format_path(path: tuple[object, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".") or "inputs"


@contextmanager
def _report_layer_calls_temporarily(
    tracer: StepTracer, layers: Layers, state: Sequence[object]
) -> Generator[None]:
    """Replace the `call` of layers until the block ends, so that the tracer gets each call and the layer's path."""
    before: list[tuple[keras.Layer, object]] = []
    try:
        for path, layer in layers:
            own = layer.__dict__
            before.append((layer, own.get("call")))
            own["call"] = _wrap_with_call_report(tracer, path, layer.call, state)
        yield
    finally:
        for layer, call in before:
            if call is None:
                layer.__dict__.pop("call", None)
            else:
                layer.__dict__["call"] = call


def _wrap_with_call_report(tracer: StepTracer, path: str, original: Call, state: Sequence[object]) -> Call:
    first = next(iter(inspect.signature(original).parameters), "")

    @functools.wraps(original)
    def call_and_report_to_tracer(*args: object, **kwargs: object) -> object:
        if not args and first in kwargs:  # the tracer expects the input as a positional argument
            args = (kwargs.pop(first),)
        function = _wrap_with_recomputation(original, state) if tracer.should_recompute(path) else original
        return tracer.call_layer(path, function, args, kwargs)

    return call_and_report_to_tracer


def _wrap_with_recomputation(original: Call, state: Sequence[object]) -> Call:
    """Return a layer's call that stores only its input for the backward pass, and recomputes all other values.

    Keras's own remat is not used: it traces all arguments, but layers need the value of `training`.
    """

    def call_with_recomputation(*args: object, **kwargs: object) -> object:
        scope: Any = get_stateless_scope()
        changed: list[object] = []

        def compute_outputs() -> object:
            before, num_losses = [scope.get_current_value(v) for v in state], len(scope.losses)
            found = original(*args, **kwargs)
            pairs = [
                (v, old)
                for v, old in zip(state, before, strict=True)
                if scope.get_current_value(v) is not old
            ]
            changed[:] = [variable for variable, _ in pairs]
            after, losses = [scope.get_current_value(v) for v in changed], scope.losses[num_losses:]
            del scope.losses[num_losses:]
            for pair in pairs:  # restore old values, because tracers are invalid outside of `jax.checkpoint`
                scope.add_update(pair)
            return found, after, losses

        found, after, losses = jax.checkpoint(compute_outputs)()
        for pair in zip(changed, after, strict=True):
            scope.add_update(pair)
        scope.losses += losses
        return found

    return call_with_recomputation


def _wrap_fused_kernel_check(original: Call) -> Call:
    """Return a replacement of Keras's check for a fused kernel, which allows a kernel only if a layer requires it."""

    @functools.wraps(original)
    def can_use_fused_kernel(*args: object, raise_error: bool = False, **kwargs: object) -> bool:
        return raise_error

    return can_use_fused_kernel


class _JaxWithoutDevices:
    """Stand-in for the module `jax` in Keras's attention. It lists no real devices, as this would start a backend."""

    def __init__(self, original: object):
        self._original = original

    def __getattr__(self, name: str) -> object:
        return getattr(self._original, name)

    def devices(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(platform="cpu")]


# Without a GPU, Keras 3.15 refuses a fused kernel even if a layer requires it, so replace Keras's check.
_CAN_USE = "_can_use_flash_attention"
_PATCHES = PatchGroup(
    [
        AttributePatch(keras_nn, _CAN_USE, _wrap_fused_kernel_check),
        AttributePatch(keras_nn, "jax", _JaxWithoutDevices),
    ]
    if hasattr(keras_nn, _CAN_USE)
    else []
)


def _list_paths_and_layers(session: KerasSession) -> list[tuple[str, keras.Layer]]:
    """Return a pair for each layer: its first path, by which activation rules match the layer, and the layer."""
    found: dict[int, tuple[str, keras.Layer]] = {}
    for path, layer in list_layer_paths(session.registry.list_layers()):
        found.setdefault(id(layer), (path, layer))
    return list(found.values())


def _make_comparable_settings(layer: keras.Layer) -> object:
    """Return comparable dtypes and attributes of a layer. `get_config` is not used, because it fails for KerasHub."""
    policy = layer.dtype_policy
    return policy.compute_dtype, policy.variable_dtype, make_comparable_attributes(layer, _NAMES)


_NAMES = frozenset(("name", "_name", "_path", "_parent_path", "_inbound_nodes", "_outbound_nodes"))
