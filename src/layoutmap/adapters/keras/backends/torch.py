"""Keras on torch: `Variable._value` is a `torch.nn.Parameter`, here one that holds a `DTensor`.

What is small and belongs to no weight (metrics, seeds, an optimizer's counters) stays a plain tensor, of which every
process has one: Keras reads it between steps, where nothing runs on the mesh.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import keras
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.keras.backends.torch_calls import calling, own_losses, placed, running
from layoutmap.adapters.keras.backends.torch_private import NAMES, TorchLayer, keras_core
from layoutmap.adapters.keras.backends.torch_steps import applying, refusing_export, training_wraps
from layoutmap.adapters.keras.paths import sublayers
from layoutmap.adapters.keras.private import Names, in_symbolic_scope
from layoutmap.adapters.keras.protocol import Backend, KerasSession, Wraps
from layoutmap.adapters.keras.training import call_own_step, has_own_step, make_for_training
from layoutmap.adapters.keras.wraps import CALLS, session_of
from layoutmap.core.mesh import Mesh
from layoutmap.core.unsupported import Unsupported
from layoutmap.core.variables import Assignment, Kind
from layoutmap.engines import get_engine
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.devices import torch_type
from layoutmap.engines.torch.gather import Gradients

_to_numpy = get_engine("torch").to_numpy
_UNSIGNED = {"uint16": torch.uint16, "uint32": torch.uint32}
_num_draws: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
Found = tuple[dict[str, Any], list[object]]


class TorchBackend(Backend):  # why: decisions/0018
    """Keras on torch; see `layoutmap.adapters.keras.protocol`."""

    engine_name = "torch"
    as_plain = staticmethod(torch.as_tensor)
    value_of = staticmethod(lambda variable: _value_of(variable))
    one_scope_in = MappingProxyType({"train_step": True})
    unreadable_boards = ("write_images",)
    training_wraps = staticmethod(training_wraps)
    quiet = (
        (TorchLayer, "_post_build"),
        (TorchLayer, "_post_track_variable"),
        (keras.Model, "_post_quantize"),
    )  # all would read what has no value yet; `values_changed` does their work
    global_init = MappingProxyType(
        {
            "Orthogonal": "the QR decomposition of an orthogonal matrix needs all of it",
            "Identity": "torch makes a diagonal in one piece",
        }
    )

    def __init__(self) -> None:
        self._gradients: Gradients | None = None

    def private_names(self) -> Names:
        """Return what `torch_private` lists, where it belongs to a class or module."""
        return NAMES

    def compute_on(self, mesh: Mesh) -> None:
        """Change Keras's default device, which is a GPU where the machine has one, for a mesh of CPUs, too."""
        kind = torch_type(str(get_engine("torch").bind(mesh).device_type))
        if torch.device(keras_core.DEFAULT_DEVICE).type != kind:
            # For good: models live after their scope, and Keras makes their inputs.
            keras_core.DEFAULT_DEVICE = kind

    @contextmanager
    def outside(self) -> Generator[None]:
        """Leave Keras's symbolic device, on which tensors have no values, and modes whose tensors cannot be trained."""
        with (
            keras_core.device_scope(keras_core.DEFAULT_DEVICE),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            yield

    def is_tracing(self) -> bool:
        """Whether the code runs inside a compiled function's trace, or Keras's symbolic one."""
        return torch.compiler.is_compiling() or in_symbolic_scope()

    def store(self, variable: Any, held: Any, assignment: Assignment, session: KerasSession) -> object:
        """Give a variable its value; what is assigned to it later keeps the layout."""
        if _is_plain(assignment):
            held = torch.nn.Parameter(torch.as_tensor(_to_numpy(held)), requires_grad=held.requires_grad)
        # On the instance, as Keras has no place for it; a copy of the variable gets one that knows the copy.
        own = variable.__dict__
        own["_direct_assign"] = functools.partial(_assign, variable)
        own["__array__"] = functools.partial(_as_array, variable)
        tag = object()
        variable._layout = tag
        variable._value = held
        return tag

    def values_changed(self, optimizers: Sequence[object], layers: Sequence[keras.Layer]) -> None:
        """Layers know their parameters by the tensor, which is another one now."""
        held: dict[int, torch.Tensor] = {}
        below = {id(each): each for layer in layers for each in (layer, *sublayers(layer))}
        for layer in below.values():
            if getattr(layer, "built", False) and _is_stale(layer):
                layer._track_variables()
            held |= {id(variable): variable._value for variable in layer._trainable_variables}
        if self._gradients is not None:
            self._gradients.remove()
        self._gradients = Gradients(value for value in held.values() if value is not None)

    @staticmethod
    def unsupported_of(layer: object, path: str, weights: list[str]) -> Iterator[Unsupported]:
        """The reasons for which a layer cannot be laid out; all of Keras's own that were tried with torch 2.13 can."""
        if isinstance(layer, keras.layers.TorchModuleWrapper):
            yield Unsupported(
                path,
                "a torch module inside a Keras layer is not laid out",
                why="the module keeps its own parameters, which the layer's variables would no longer be",
                fix="write the layer in Keras, or build the whole model in torch and use its adapter: library='torch'",
            )

    def layer_wraps(self, layer: keras.Layer, session: KerasSession) -> Wraps:
        """A call with plain tensors runs on the mesh."""
        wraps = {
            **{name: calling(layer, session, name) for name in CALLS},
            "_get_own_losses": own_losses(layer._get_own_losses, session),
            "_get_regularization_losses": own_losses(layer._get_regularization_losses, session),
        }
        if isinstance(layer, keras.Model):
            wraps["export"] = refusing_export(layer)
        return wraps

    def optimizer_wraps(self, optimizer: keras.Optimizer, session: KerasSession) -> Wraps:
        """Updates run on the mesh, with each gradient in the layout of its weight."""
        return {"apply": applying(optimizer, session)}

    @contextmanager
    def comparing(self, model: object) -> Generator[None]:
        """A dropout without a seed draws from torch's own generator: seeded anew here, and put back."""
        _num_draws[model] = number = _num_draws.get(model, 0) + 1
        with torch.random.fork_rng():
            torch.manual_seed(number)
            yield

    def random_states(self) -> dict[str, Any]:
        """Return the state of torch's own generator, from which a dropout without a seed draws."""
        found = {"torch": torch.get_rng_state().numpy()}
        return found | ({"cuda": torch.cuda.get_rng_state().numpy()} if torch.cuda.is_initialized() else {})

    def restore_random_states(self, found: Mapping[str, object]) -> None:
        """Put back what `random_states` returned."""
        if "torch" in found:
            torch.set_rng_state(torch.from_numpy(found["torch"]))
        if "cuda" in found and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(torch.from_numpy(found["cuda"]))

    def gradients(self, model: keras.Model, x: object, y: object, sample_weight: object) -> Found:
        """The losses in training, and their gradients."""
        session = session_of(model)
        make_for_training(model, session, (x, y, sample_weight))
        if session is None:
            return _gradients(model, x, y, sample_weight)
        batch = placed((x, y, sample_weight), session)
        with running(session, batch):
            return _gradients(model, *batch)


def _gradients(model: keras.Model, x: object, y: object, sample_weight: object) -> Found:
    moved = [*model.non_trainable_variables, *model.metrics_variables]
    kept = [(variable, np.asarray(variable)) for variable in moved]
    model.zero_grad()
    compute = call_own_step if has_own_step(model) else _of_loss
    losses, gradients = compute(model, (x, y, sample_weight))
    model.zero_grad()
    for variable, value in kept:
        variable.assign(value)  # the call has moved statistics and seeds on
    losses = {
        n: _to_numpy(each.detach()) if isinstance(each, torch.Tensor) else each for n, each in losses.items()
    }
    return losses, [None if gradient is None else _to_numpy(gradient) for gradient in gradients]


def _of_loss(model: keras.Model, batch: Any) -> Found:
    x, y, sample_weight = batch
    y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
    loss: Any = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
    loss.backward()
    held = [variable.value for variable in model.trainable_variables]
    return {"loss": loss}, [torch.zeros_like(each) if each.grad is None else each.grad for each in held]


# -- variables


def _value_of(variable: keras.Variable) -> object:
    """Return the value of a variable; Keras holds unsigned integers as larger signed ones."""
    dtype = _UNSIGNED.get(variable.dtype)
    return variable.value if dtype is None else variable.value.to(dtype)


def _is_plain(assignment: Assignment) -> bool:
    """Whether a variable stays a plain tensor."""
    variable = assignment.variable
    small = variable.kind in (Kind.METRIC, Kind.RNG) or (variable.kind == Kind.SLOT and not variable.parent)
    return small and assignment.layout.is_fully_replicated()


def _assign(variable: keras.Variable, value: object) -> None:
    held = variable._value
    with torch.no_grad():
        if not isinstance(held, DTensor):
            held.copy_(torch.as_tensor(_to_numpy(value)) if isinstance(value, DTensor) else value)
            return
        new = get_engine("torch").relayout(value, variable.layout)
        with simulation.on_mesh(held.device_mesh):
            held.copy_(new)


def _as_array(variable: keras.Variable, dtype: Any = None, copy: bool | None = None) -> object:
    return np.asarray(_to_numpy(variable.value), dtype=dtype)


# -- layers


def _is_stale(layer: keras.Layer) -> bool:
    """Whether the parameters that torch knows of a layer are not those that its variables hold."""
    known = layer._modules.get("_torch_params")
    held = {variable.path: variable._value for variable in layer.variables}
    if known is None or known.keys() != held.keys():
        return True
    return any(known[path] is not value for path, value in held.items())
