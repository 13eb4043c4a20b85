"""Models of `torch.nn`: any module, its parameters and buffers laid out by their names.

The layout of a parameter is `layoutmap.dtensor.fetch_layout(parameter)`: `parameter.layout` is torch's own attribute,
which says how its memory is used.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from layoutmap.adapters import random_states
from layoutmap.adapters.options import ScopeOptions
from layoutmap.adapters.protocol import Adapter, Saved, ScopeContext, Stored
from layoutmap.adapters.torch import module_hooks
from layoutmap.adapters.torch.checkpoints import restore_settings, restored, settings_of, slots_of, stored
from layoutmap.adapters.torch.forward import forward_of, is_planned
from layoutmap.adapters.torch.options import TorchOptions
from layoutmap.adapters.torch.paths import find_tensors, is_of_keras, uncompiled
from layoutmap.adapters.torch.session import TorchSession, entries_of
from layoutmap.adapters.torch.training import (
    MakeOptimizer,
    arrays_of,
    call,
    loss_of,
    optimizer_named,
    optimizer_of,
    train_with,
    training_of,
)
from layoutmap.adapters.torch.variables import Variable
from layoutmap.core.blocks import NumpyArray
from layoutmap.core.errors import ScopeError
from layoutmap.engines.torch.deferred_init import FakeTensorMode
from layoutmap.engines.torch.devices import torch_type
from layoutmap.engines.torch.gather import fully_sharded_dims
from layoutmap.engines.torch.modes import dispatch_modes

__all__ = ["TorchAdapter", "adapter", "train_with"]


class TorchAdapter(Adapter):
    """Knows `torch.nn`; see `layoutmap.adapters.protocol`."""

    name = "torch"
    places_batches = True

    @property
    def engine_name(self) -> str:
        """`"torch"`."""
        return "torch"

    def check(self) -> None:
        """Refuse a place in which a scope cannot work.

        Raises:
            ScopeError: It cannot; says why.
        """
        fake = any(isinstance(mode, FakeTensorMode) for mode in dispatch_modes())
        if fake or torch.compiler.is_compiling():
            raise ScopeError(
                "a scope was opened " + ("under a FakeTensorMode" if fake else "inside a compiled function"),
                why="variables are real tensors on real devices, and here there are none",
                fix="build the model outside, and call it inside",
            )

    def owns(self, model: object) -> bool:
        """Whether an object is a torch module, and no Keras layer on torch."""
        return isinstance(model, torch.nn.Module) and not is_of_keras(model)

    def refused(self, library: str) -> AbstractContextManager[None]:
        """While open, torch modules that are built here are refused: the scope is one for another library."""
        return module_hooks.installed()

    def own_options(self, given: Mapping[str, Any], options: ScopeOptions, *, across: bool) -> TorchOptions:
        """Return the options that only scopes for torch modules have."""
        return TorchOptions.of(given, options, across=across)

    def begin(self, context: ScopeContext) -> TorchSession:
        """A session for one scope."""
        return TorchSession(context)

    @contextmanager
    def undisturbed(self) -> Generator[None]:
        """Restore the generator states of a torch program afterwards: Python's, numpy's and torch's."""
        own = torch.get_rng_state()
        gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        try:
            with random_states.put_back():
                yield
        finally:
            torch.set_rng_state(own)
            if gpus:
                torch.cuda.set_rng_state_all(gpus)

    def set_seed(self, seed: int) -> None:
        """Seed Python, numpy and torch."""
        random_states.seed_both(seed)
        torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]

    def complete(self, model: torch.nn.Module, batch: object) -> None:
        """Nothing: a torch model has its weights when it is built, and its optimizer makes slots in its first step."""

    def with_optimizer(self, model: torch.nn.Module, optimizer: str | MakeOptimizer) -> object:
        """Return a model, for which `train_with` then knows an optimizer, by its name or what makes it.

        Raises:
            ScopeError: torch has no optimizer of that name.
        """
        training_of(model).make_optimizer = (
            optimizer_named(optimizer) if isinstance(optimizer, str) else optimizer
        )
        return model

    def variables(self, model: torch.nn.Module) -> dict[str, Variable]:
        """Parameters, buffers, and slots of the optimizer that `train_with` was called with, by path."""
        has_value = not is_planned(model)
        found = find_tensors(model)
        named = {each.path: Variable(each.path, each.tensor, has_value) for each in found}
        optimizer = training_of(model).optimizer
        state: dict[torch.Tensor, Any] = {} if optimizer is None else optimizer.state
        for each in found:
            for name, slot in state.get(each.tensor, {}).items():
                if isinstance(slot, torch.Tensor):
                    path = f"optimizer.{each.path}.{name}"
                    named[path] = Variable(path, slot)
        return named

    def described(self, model: Any, optimizer: Any = None) -> list[Stored]:
        """Return the tensors of a model that any program has made, and the slots of its optimizer."""
        found = [Stored(entry.spec, entry.found.tensor) for entry in entries_of([uncompiled(model)])]
        return found + slots_of(found, optimizer or training_of(model).optimizer)

    def on_one_device(self, model: torch.nn.Module, device_type: str) -> object:
        """Move a plain model, which torch makes on the CPU, to a device of a type; returns it."""
        return model.to(torch_type(device_type))

    def context_of(self, model: torch.nn.Module) -> ScopeContext | None:
        """Return the scope that a model, or any module in it, was laid out in."""
        forwards = (forward_of(module) for module in model.modules())
        return next((forward.context for forward in forwards if forward is not None), None)

    def gathered_dims(self, model: torch.nn.Module) -> tuple[str, ...]:
        """Return the mesh dims over which torch's `fully_shard` gathers weights."""
        return fully_sharded_dims(model)

    def read(self, variable: Variable) -> NumpyArray:
        """The global value of a variable, as a numpy array."""
        return variable.read()

    def write(self, variable: Variable, value: NumpyArray | torch.Tensor) -> None:
        """Give a variable a value, of the engine or of numpy; it keeps its layout."""
        variable.write(value)

    def forward(self, model: torch.nn.Module, batch: object) -> object:
        """The output of a model for a batch, in inference; nested as the model nests it."""
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                return arrays_of(call(model, batch), _array)
        finally:
            model.train(was_training)

    def gradients(self, model: torch.nn.Module, batch: object) -> tuple[dict[str, float], dict[str, object]]:
        """The loss of a batch, and its gradient for each trainable parameter by path."""
        model.zero_grad()  # what a step of the program has left
        loss = self._add_gradients(model, batch)
        gradients: dict[str, object] = {}
        for each in find_tensors(model):
            if each.tensor.requires_grad:
                gradient = torch.zeros_like(each.tensor) if each.tensor.grad is None else each.tensor.grad
                gradients[each.path] = _array(gradient)
        model.zero_grad()
        return {"loss": loss}, gradients

    def train_step(self, model: torch.nn.Module, batch: object) -> dict[str, float]:
        """One step of the optimizer that `train_with` was called with; returns the loss before it."""
        optimizer = optimizer_of(model)
        optimizer.zero_grad()
        loss = self._add_gradients(model, batch)
        optimizer.step()
        return {"loss": loss}

    def _add_gradients(self, model: torch.nn.Module, batch: object) -> float:
        """Add the gradients of each pass of a batch; returns the last loss."""
        loss = float("nan")
        for _ in range(training_of(model).num_passes):
            with self._drawing(model):
                value = loss_of(model, batch)
                value.backward()  # pyright: ignore[reportUnknownMemberType]
            loss = value.item()
        return loss

    def stored(self, model: Any, optimizer: Any = None, saved: Saved | None = None) -> list[Stored]:
        """Return what a checkpoint keeps of a model."""
        training = training_of(model)
        if optimizer is None and training.make_optimizer is not None and saved is not None and saved.slots:
            optimizer = optimizer_of(model)  # before its first step there is none to take the saved slots
        return stored(model, optimizer or training.optimizer, saved)

    def restored(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        arrays: Iterable[tuple[str, NumpyArray | torch.Tensor]],
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer | None]:
        """Give tensors other values."""
        restored(model, optimizer or training_of(model).optimizer, arrays)
        return model, optimizer

    def settings(self, model: Any, optimizer: Any = None) -> dict[str, Any]:
        """Return the settings of the optimizer, and the random states."""
        random = random_states.states() | {"torch": torch.get_rng_state().numpy()}
        if torch.cuda.is_initialized():
            random["cuda"] = torch.cuda.get_rng_state().numpy()
        return {"optimizer": settings_of(model, optimizer or training_of(model).optimizer), "random": random}

    def restore_settings(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, settings: Mapping[str, Any]
    ) -> None:
        """Put back what `settings` returned."""
        optimizer = optimizer or training_of(model).optimizer
        if optimizer is not None and settings.get("optimizer"):
            restore_settings(model, optimizer, settings["optimizer"], settings.get("override", {}))
        random = settings["random"]
        random_states.restore(random)
        if "torch" in random:
            torch.set_rng_state(torch.from_numpy(random["torch"]))  # pyright: ignore[reportUnknownMemberType]
        if "cuda" in random and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(torch.from_numpy(random["cuda"]))  # pyright: ignore[reportUnknownMemberType]

    @contextmanager
    def _drawing(self, model: torch.nn.Module) -> Generator[None]:
        """Draw from a seed of the model's own: two models that are compared step by step draw the same numbers."""
        training = training_of(model)
        training.num_draws += 1
        with self.undisturbed():
            self.set_seed(training.num_draws)
            yield


def _array(tensor: torch.Tensor) -> object:
    return Variable("", tensor).read()


def adapter() -> TorchAdapter:
    """The adapter."""
    return TorchAdapter()
