"""Store and train Keras variables on torch: `_value` is a `torch.nn.Parameter`, here one with a `DTensor`.

Small variables that belong to no weight, such as metrics, seeds, and an optimizer's counters, stay unsharded tensors,
of which each process has one, because Keras reads them between steps, where nothing runs on the mesh.
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

from layoutmap.adapters.keras.backends.torch_calls import (
    enter_outermost_call,
    make_mesh_call_wrapper,
    place_on_mesh,
    wrap_to_unshard_losses,
)
from layoutmap.adapters.keras.backends.torch_private import NAMES, TorchLayer, keras_core
from layoutmap.adapters.keras.backends.torch_steps import (
    make_apply_wrapper,
    make_function_that_refuses_export,
    make_training_method_wrappers,
)
from layoutmap.adapters.keras.paths import iterate_sublayers
from layoutmap.adapters.keras.private import NamesByOwner, in_symbolic_scope
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
from layoutmap.core.mesh import Mesh
from layoutmap.core.unsupported import UnsupportedFeature
from layoutmap.core.variables import Assignment, Kind, VariableSpec
from layoutmap.engines import get_engine
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.devices import convert_to_torch_device_type, explain_why_padding_is_impossible
from layoutmap.engines.torch.gather import GradientReducer

_to_numpy = get_engine("torch").to_numpy
_UNSIGNED = {"uint16": torch.uint16, "uint32": torch.uint32}
_num_draws: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
LossesAndGradients = tuple[dict[str, Any], list[object]]


# torch cannot mix DTensors and unsharded tensors, so the outermost call converts both ways (decisions/0018).
class TorchBackend(Backend):
    """Adapt layoutmap to Keras on torch (see `layoutmap.adapters.keras.protocol`)."""

    engine_name = "torch"
    make_unsharded_tensor = staticmethod(torch.as_tensor)
    read_value = staticmethod(lambda variable: _read_value_in_keras_dtype(variable))
    single_scope_steps = MappingProxyType({"train_step": True})
    unsupported_board_options = ("write_images",)
    make_training_method_wrappers = staticmethod(make_training_method_wrappers)
    # These methods would read variables without values, so `update_value_references` does their work.
    methods_disabled_in_scope = (
        (TorchLayer, "_post_build"),
        (TorchLayer, "_post_track_variable"),
        (keras.Model, "_post_quantize"),
    )
    global_init_reasons = MappingProxyType(
        {
            "Orthogonal": "the QR decomposition of an orthogonal matrix needs the whole matrix",
            "Identity": "torch creates the diagonal of a matrix only as a whole",
        }
    )

    def __init__(self) -> None:
        self._gradients: GradientReducer | None = None

    def explain_why_padding_is_impossible(self, variable: VariableSpec, layout: Layout) -> str:
        """Return why a variable cannot have uneven shards in a layout, or an empty text if it can."""
        return explain_why_padding_is_impossible(layout, variable.shape)

    def list_required_private_names(self) -> NamesByOwner:
        """Return pairs of a class or module and the private names in it, as `torch_private` lists them."""
        return NAMES

    def set_default_device_type(self, mesh: Mesh) -> None:
        """Set Keras's default device to the mesh's device type, also for CPUs on a machine with GPUs."""
        kind = convert_to_torch_device_type(str(get_engine("torch").bind_mesh(mesh).device_type))
        if torch.device(keras_core.DEFAULT_DEVICE).type != kind:
            # Keras creates models' inputs on its default device, also after the scope, so change it permanently.
            keras_core.DEFAULT_DEVICE = kind

    @contextmanager
    def suspend_tracing(self) -> Generator[None]:
        """Leave Keras's symbolic device, inference mode, and no-grad mode in the block."""
        with (
            keras_core.device_scope(keras_core.DEFAULT_DEVICE),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            yield

    def is_tracing(self) -> bool:
        """Return whether the code runs in a compiled function's trace, or while Keras infers shapes."""
        return torch.compiler.is_compiling() or in_symbolic_scope()

    def store_value(self, variable: Any, value: Any, assignment: Assignment, session: KerasSession) -> object:
        """Store a value, unsharded if small. Return the new `_layout` object, which identifies the variable."""
        if _is_kept_unsharded(assignment):
            value = torch.nn.Parameter(torch.as_tensor(_to_numpy(value)), requires_grad=value.requires_grad)
        # Keras has no hook for these methods, so set them on the instance. A copy of the variable gets its own methods.
        own = variable.__dict__
        own["_direct_assign"] = functools.partial(_assign_value, variable)
        own["__array__"] = functools.partial(_convert_to_numpy_array, variable)
        keras_layout = object()
        variable._layout = keras_layout
        variable._value = value
        return keras_layout

    def update_value_references(self, optimizers: Sequence[object], layers: Sequence[keras.Layer]) -> None:
        """Make layers track the new tensors of variables as parameters, and reduce the gradients of these tensors."""
        held: dict[int, torch.Tensor] = {}
        below = {id(each): each for layer in layers for each in (layer, *iterate_sublayers(layer))}
        for layer in below.values():
            if getattr(layer, "built", False) and _has_stale_parameters(layer):
                layer._track_variables()
            held |= {id(variable): variable._value for variable in layer._trainable_variables}
        if self._gradients is not None:
            self._gradients.remove()
        self._gradients = GradientReducer(value for value in held.values() if value is not None)

    @staticmethod
    def find_unsupported_features(
        layer: object, path: str, weights: list[str]
    ) -> Iterator[UnsupportedFeature]:
        """Yield an unsupported feature if a layer contains a torch module, which would stay unsharded."""
        if isinstance(layer, keras.layers.TorchModuleWrapper):
            yield UnsupportedFeature(
                path,
                "a torch module inside a Keras layer is not sharded",
                why="the module would keep unsharded parameters while the layer's variables are sharded",
                fix="write the layer in Keras, or build the whole model in torch and use its adapter: library='torch'",
            )

    def make_layer_method_wrappers(self, layer: keras.Layer, session: KerasSession) -> WrappedMethods:
        """Return wrappers of a layer's methods, by name. They let calls with unsharded tensors run on the mesh."""
        wrappers = {
            **{name: make_mesh_call_wrapper(layer, session, name) for name in CALLS},
            "_get_own_losses": wrap_to_unshard_losses(layer._get_own_losses, session),
            "_get_regularization_losses": wrap_to_unshard_losses(layer._get_regularization_losses, session),
        }
        if isinstance(layer, keras.Model):
            wrappers["export"] = make_function_that_refuses_export(layer)
        return wrappers

    def make_optimizer_method_wrappers(
        self, optimizer: keras.Optimizer, session: KerasSession
    ) -> WrappedMethods:
        """Return a wrapper of `apply` that updates on the mesh, with each gradient in the layout of its weight."""
        return {"apply": make_apply_wrapper(optimizer, session)}

    @contextmanager
    def match_draws_and_rows_temporarily(self, model: object) -> Generator[None]:
        """Seed torch's generator with the number of this model's runs so far. Restore it when the block ends."""
        _num_draws[model] = number = _num_draws.get(model, 0) + 1
        with torch.random.fork_rng():
            torch.manual_seed(number)
            yield

    def read_random_states(self) -> dict[str, Any]:
        """Return the states of torch's own generators, from which a dropout without a seed draws."""
        found = {"torch": torch.get_rng_state().numpy()}
        return found | ({"cuda": torch.cuda.get_rng_state().numpy()} if torch.cuda.is_initialized() else {})

    def restore_random_states(self, states: Mapping[str, object]) -> None:
        """Restore the states that `read_random_states` returned."""
        if "torch" in states:
            torch.set_rng_state(torch.from_numpy(states["torch"]))
        if "cuda" in states and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(torch.from_numpy(states["cuda"]))

    def compute_losses_and_gradients(
        self, model: keras.Model, x: object, y: object, sample_weight: object
    ) -> LossesAndGradients:
        """Return a dict of the training losses, and a list of their gradients, as numpy arrays."""
        session = get_session(model)
        create_training_variables(model, session, (x, y, sample_weight))
        if session is None:
            return _compute_losses_and_gradients(model, x, y, sample_weight)
        batch = place_on_mesh((x, y, sample_weight), session)
        with enter_outermost_call(session, batch):
            return _compute_losses_and_gradients(model, *batch)


def _compute_losses_and_gradients(
    model: keras.Model, x: object, y: object, sample_weight: object
) -> LossesAndGradients:
    """Return a dict of losses, and a list of gradients, in numpy. The model's state stays unchanged."""
    compute = (
        run_custom_train_step_without_updates if has_custom_train_step(model) else _compute_loss_and_gradients
    )
    with preserve_model_state(model):
        model.zero_grad()
        losses, gradients = compute(model, (x, y, sample_weight))
        model.zero_grad()
    losses = {
        n: _to_numpy(each.detach()) if isinstance(each, torch.Tensor) else each for n, each in losses.items()
    }
    return losses, [None if gradient is None else _to_numpy(gradient) for gradient in gradients]


def _compute_loss_and_gradients(model: keras.Model, batch: Any) -> LossesAndGradients:
    """Return a dict with the loss of a batch, and its gradients: zeros for weights that do not affect it."""
    loss = compute_loss(model, batch)
    loss.backward()
    held = [variable.value for variable in model.trainable_variables]
    return {"loss": loss}, [torch.zeros_like(each) if each.grad is None else each.grad for each in held]


# -- variables


def _read_value_in_keras_dtype(variable: keras.Variable) -> object:
    """Return the value of a variable. Unsigned integers are converted back from the signed ones that Keras stores."""
    dtype = _UNSIGNED.get(variable.dtype)
    return variable.value if dtype is None else variable.value.to(dtype)


def _is_kept_unsharded(assignment: Assignment) -> bool:
    """Return whether a variable is small and belongs to no weight, so that it stays an unsharded tensor."""
    variable = assignment.variable
    small = variable.kind in (Kind.METRIC, Kind.RNG) or (variable.kind == Kind.SLOT and not variable.parent)
    return small and assignment.layout.is_fully_replicated()


def _assign_value(variable: keras.Variable, value: object) -> None:
    """Copy a value into a variable's tensor in its layout. Keras calls this instead of its own `_direct_assign`."""
    held = variable._value
    with torch.no_grad():
        if not isinstance(held, DTensor):
            held.copy_(torch.as_tensor(_to_numpy(value)) if isinstance(value, DTensor) else value)
            return
        new = get_engine("torch").relayout(value, variable.layout, pad=True)
        with simulation.simulate_ranks_of_mesh(held.device_mesh):
            held.copy_(new)


def _convert_to_numpy_array(variable: keras.Variable, dtype: Any = None, copy: bool | None = None) -> object:
    """Return the global value of a variable as a numpy array. This replaces `__array__`."""
    return np.asarray(_to_numpy(variable.value), dtype=dtype)


# -- layers


def _has_stale_parameters(layer: keras.Layer) -> bool:
    """Return whether the torch parameters that a layer tracks differ from the tensors that its variables store."""
    known = layer._modules.get("_torch_params")
    held = {variable.path: variable._value for variable in layer.variables}
    if known is None or known.keys() != held.keys():
        return True
    return any(known[path] is not value for path, value in held.items())
