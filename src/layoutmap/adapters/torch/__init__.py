"""Support `torch.nn` models: any module, with rules for its parameters and buffers by name.

The layout of a parameter is `layoutmap.dtensor.fetch_layout(parameter)`: `parameter.layout` is torch's own attribute,
which says how its memory is used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from layoutmap.adapters import random_states
from layoutmap.adapters.options import ScopeOptions
from layoutmap.adapters.protocol import Adapter, SavedOptimizer, ScopeContext, StoredVariable
from layoutmap.adapters.torch import module_hooks
from layoutmap.adapters.torch.checkpoint_names import list_checkpoint_names
from layoutmap.adapters.torch.checkpoints import (
    list_optimizer_slots,
    list_stored_variables,
    read_optimizer_settings,
    rename_paths_in_optimizer_settings,
    restore_optimizer_settings,
    restore_tensors,
)
from layoutmap.adapters.torch.forward import find_forward, is_valueless
from layoutmap.adapters.torch.options import TorchOptions
from layoutmap.adapters.torch.paths import is_keras_module, list_model_tensors, unwrap_compiled_module
from layoutmap.adapters.torch.session import TorchSession, describe_tensors
from layoutmap.adapters.torch.training import (
    MakeOptimizer,
    call_model,
    compute_loss,
    convert_output_tensors,
    find_optimizer_class,
    get_or_make_optimizer,
    get_training_settings,
    train_with,
)
from layoutmap.adapters.torch.variables import Variable
from layoutmap.core.blocks import NumpyArray
from layoutmap.core.errors import ScopeError
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.variables import VariableSpec
from layoutmap.engines.torch.deferred_init import FakeTensorMode
from layoutmap.engines.torch.devices import convert_to_torch_device_type, explain_why_padding_is_impossible
from layoutmap.engines.torch.element_types import to_torch
from layoutmap.engines.torch.gather import find_fully_sharded_dims
from layoutmap.engines.torch.modes import list_dispatch_modes

__all__ = ["TorchAdapter", "make_adapter", "train_with"]


class TorchAdapter(Adapter):
    """Adapter for `torch.nn` models (see `layoutmap.adapters.protocol`)."""

    name = "torch"
    shards_batches = True

    @property
    def engine_name(self) -> str:
        """Return `"torch"`."""
        return "torch"

    def check_scope_can_open(self) -> None:
        """Raise if a scope is opened under a FakeTensorMode or in a compiled function, where values do not exist."""
        fake = any(isinstance(mode, FakeTensorMode) for mode in list_dispatch_modes())
        if fake or torch.compiler.is_compiling():
            raise ScopeError(
                "a scope was opened " + ("under a FakeTensorMode" if fake else "inside a compiled function"),
                why="a scope creates tensors with values on devices, but there tensors have no values",
                fix="build the model before you " + ("enter the mode" if fake else "call the function"),
            )

    def owns_model(self, model: object) -> bool:
        """Return whether an object is a torch module, and not a Keras layer with the torch backend."""
        return isinstance(model, torch.nn.Module) and not is_keras_module(model)

    def forbid_building_models(self, scope_library: str) -> AbstractContextManager[None]:
        """Return a context for a scope for `scope_library` models, in which building a torch module raises."""
        return module_hooks.install_creation_hooks()

    def read_library_options(
        self, values: Mapping[str, Any], options: ScopeOptions, *, spans_processes: bool
    ) -> TorchOptions:
        """Return the options that only torch models have, after checking their values."""
        return TorchOptions.from_values(values, options, spans_processes=spans_processes)

    def make_session(self, context: ScopeContext) -> TorchSession:
        """Return a session, which builds or shards the models of one scope."""
        return TorchSession(context)

    @contextmanager
    def preserve_random_states(self) -> Generator[None]:
        """Restore the random states of Python, numpy, and torch when the block ends."""
        cpu_state = torch.get_rng_state()
        gpu_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        try:
            with random_states.preserve_python_and_numpy_states():
                yield
        finally:
            torch.set_rng_state(cpu_state)
            if gpu_states:
                torch.cuda.set_rng_state_all(gpu_states)

    def explain_why_padding_is_impossible(self, variable: VariableSpec, layout: Layout) -> str:
        """Return why a variable cannot have uneven shards in a layout, or an empty text if it can."""
        return explain_why_padding_is_impossible(layout, variable.shape)

    def set_seed(self, seed: int) -> None:
        """Seed the random generators of Python, numpy, and torch."""
        random_states.seed_python_and_numpy(seed)
        torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]

    def create_lazy_variables(self, model: torch.nn.Module, batch: object) -> None:
        """Do nothing, because a torch model has all weights once it is built."""

    def set_optimizer(self, model: torch.nn.Module, optimizer: str | MakeOptimizer) -> object:
        """Set the optimizer of a model as `train_with` does, and return the model.

        Raises:
            ScopeError: torch has no optimizer of that name.
        """
        get_training_settings(model).make_optimizer = (
            find_optimizer_class(optimizer) if isinstance(optimizer, str) else optimizer
        )
        return model

    def variables(self, model: torch.nn.Module) -> dict[str, Variable]:
        """Return a dict from paths to a model's parameters, buffers, and the slots of its `train_with` optimizer."""
        has_value = not is_valueless(model)
        found = list_model_tensors(model)
        named = {each.path: Variable(each.path, each.tensor, has_value) for each in found}
        optimizer = get_training_settings(model).optimizer
        state: dict[torch.Tensor, Any] = {} if optimizer is None else optimizer.state
        for each in found:
            for name, slot in state.get(each.tensor, {}).items():
                if isinstance(slot, torch.Tensor):
                    path = f"optimizer.{each.path}.{name}"
                    named[path] = Variable(path, slot)
        return named

    def describe_variables(self, model: Any, optimizer: Any = None) -> list[StoredVariable]:
        """Return the tensors of a model and the slots of its optimizer, each described as a variable of a plan."""
        entries = describe_tensors([unwrap_compiled_module(model)])
        found = [StoredVariable(entry.spec, entry.source.tensor) for entry in entries]
        return found + list_optimizer_slots(found, optimizer or get_training_settings(model).optimizer)

    def build_model_on_one_device(self, make_model: Callable[[], torch.nn.Module], mesh: Mesh) -> object:
        """Build a model unsharded on the CPU, and move it to one device of the mesh's device type."""
        return make_model().to(convert_to_torch_device_type(str(mesh.device_type)))

    def find_scope_context(self, model: torch.nn.Module) -> ScopeContext | None:
        """Return the context of the scope that sharded a model or a module in it, or None."""
        forwards = (find_forward(module) for module in model.modules())
        return next((forward.context for forward in forwards if forward is not None), None)

    def list_gathered_dims(self, model: torch.nn.Module) -> tuple[str, ...]:
        """Return the mesh dims over which torch's `fully_shard` gathers weights."""
        return find_fully_sharded_dims(model)

    def read(self, variable: Variable) -> NumpyArray:
        """Return the global value of a variable as a numpy array."""
        return variable.read()

    def write(self, variable: Variable, value: NumpyArray | torch.Tensor) -> None:
        """Assign a torch or numpy value to a variable without changing its layout."""
        variable.write(value)

    def forward(self, model: torch.nn.Module, batch: object) -> object:
        """Return a model's inference outputs for a batch, as numpy arrays that are nested like the outputs."""
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                return convert_output_tensors(call_model(model, batch), _read_as_numpy)
        finally:
            model.train(was_training)

    def gradients(self, model: torch.nn.Module, batch: object) -> tuple[dict[str, float], dict[str, object]]:
        """Return two dicts for a batch: one with its loss, and one from each parameter's path to its gradient."""
        model.zero_grad()  # drop gradients of an earlier step
        loss = self._accumulate_gradients(model, batch)
        gradients: dict[str, object] = {}
        for each in list_model_tensors(model):
            if each.tensor.requires_grad:
                gradient = torch.zeros_like(each.tensor) if each.tensor.grad is None else each.tensor.grad
                gradients[each.path] = _read_as_numpy(gradient)
        model.zero_grad()
        return {"loss": loss}, gradients

    def train_step(self, model: torch.nn.Module, batch: object) -> dict[str, float]:
        """Run one step of the `train_with` optimizer, and return the loss before the step."""
        optimizer = get_or_make_optimizer(model)
        optimizer.zero_grad()
        loss = self._accumulate_gradients(model, batch)
        optimizer.step()
        return {"loss": loss}

    def _accumulate_gradients(self, model: torch.nn.Module, batch: object) -> float:
        """Add up the gradients of all backward passes of a batch, and return the last loss."""
        loss = float("nan")
        for _ in range(get_training_settings(model).num_passes):
            with self._seed_by_pass_number_temporarily(model):
                value = compute_loss(model, batch)
                value.backward()  # pyright: ignore[reportUnknownMemberType]
            loss = value.item()
        return loss

    def list_stored_variables(
        self, model: Any, optimizer: Any = None, saved: SavedOptimizer | None = None
    ) -> list[StoredVariable]:
        """Return the tensors and optimizer slots that a checkpoint of a model contains."""
        training = get_training_settings(model)
        if optimizer is None and training.make_optimizer is not None and saved is not None and saved.slots:
            optimizer = get_or_make_optimizer(model)  # the load restores slots into it
        return list_stored_variables(model, optimizer or training.optimizer, saved)

    def list_checkpoint_names(self, model: Any) -> list[tuple[str, list[tuple[str, str]]]]:
        """Return the names and axes that a model's variables have in its Hugging Face checkpoint."""
        return list_checkpoint_names(unwrap_compiled_module(model), self.list_stored_variables(model))

    def make_host_array(self, values: NumpyArray) -> torch.Tensor:
        """Return a tensor on the host that shares the memory of a numpy array."""
        return to_torch(values, copy=False)

    def restore_variables(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        arrays: Iterable[tuple[str, NumpyArray | torch.Tensor]],
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer | None]:
        """Assign new values to the tensors and optimizer slots of a model."""
        restore_tensors(model, optimizer or get_training_settings(model).optimizer, arrays)
        return model, optimizer

    def read_state_outside_variables(self, model: Any, optimizer: Any = None) -> dict[str, Any]:
        """Return the optimizer's settings and the random states."""
        random = random_states.read_python_and_numpy_states() | {"torch": torch.get_rng_state().numpy()}
        if torch.cuda.is_initialized():
            random["cuda"] = torch.cuda.get_rng_state().numpy()
        return {
            "optimizer": read_optimizer_settings(model, optimizer or get_training_settings(model).optimizer),
            "random": random,
        }

    def restore_state_outside_variables(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, settings: Mapping[str, Any]
    ) -> None:
        """Restore the optimizer's settings and the random states from the result of `read_state_outside_variables`."""
        optimizer = optimizer or get_training_settings(model).optimizer
        if optimizer is not None and settings.get("optimizer"):
            restore_optimizer_settings(
                model, optimizer, rename_paths_in_optimizer_settings(settings), settings.get("override", {})
            )
        random = settings["random"]
        random_states.restore_python_and_numpy_states(random)
        if "torch" in random:
            torch.set_rng_state(torch.from_numpy(random["torch"]))  # pyright: ignore[reportUnknownMemberType]
        if "cuda" in random and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(torch.from_numpy(random["cuda"]))  # pyright: ignore[reportUnknownMemberType]

    @contextmanager
    def _seed_by_pass_number_temporarily(self, model: torch.nn.Module) -> Generator[None]:
        """Seed the block's random numbers by the number of passes so far, so that compared models draw alike."""
        training = get_training_settings(model)
        training.num_draws += 1
        with self.preserve_random_states():
            self.set_seed(training.num_draws)
            yield


def _read_as_numpy(tensor: torch.Tensor) -> object:
    return Variable("", tensor).read()


def make_adapter() -> TorchAdapter:
    """Return the adapter for torch models."""
    return TorchAdapter()
