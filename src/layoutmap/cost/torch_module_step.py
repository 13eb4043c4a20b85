"""Describe the training step of a torch module, so that `torch_step` can compute its cost."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.options import ScopeOptions
from layoutmap.adapters.torch.boundary import list_tensors, map_tensors
from layoutmap.adapters.torch.options import TorchOptions
from layoutmap.adapters.torch.paths import DescribedTensor, find_paths_by_module_id
from layoutmap.adapters.torch.session import TorchSession
from layoutmap.adapters.torch.training import call_model, find_scalar_loss, get_training_settings
from layoutmap.core.layout import Layout
from layoutmap.core.policy import LayoutPolicy
from layoutmap.core.steps import BatchArraySpec, Key, TrainingStep
from layoutmap.engines.protocol import Engine
from layoutmap.engines.torch.element_types import format_dtype
from layoutmap.engines.torch.operators import Function
from layoutmap.engines.torch.trees import is_mapping, is_sequence

_NO_LOSS = "no loss is known: the mean of the squared outputs, computed with all of them on each device, stands for one"
_NO_OPTIMIZER = "no optimizer is known: weights are updated by none, and there are no slots"


@dataclass(slots=True)
class _CountingContext:
    """Stand-in for a scope context in a counted step, with the attributes that `TorchSession.install_arrays` reads."""

    policy: LayoutPolicy
    engine: Engine
    plan_only: bool = False
    spans_processes: bool = False
    options: ScopeOptions = field(default_factory=lambda: ScopeOptions(own=TorchOptions(gather="own")))

    def add_note(self, subject: str, message: str) -> None:
        """Ignore the note, because the plan that would list it is complete."""

    def warn_of_idle_dims(self, step: str, sharded: Collection[str] = ()) -> None:
        """Ignore idle dims, because a counted step computes nothing."""


def describe_training_step(
    session: TorchSession, model: torch.nn.Module, inputs: Any, optimizer: object, loss: Function | None
) -> TrainingStep:
    """Return the training step of a module from a dry run, which has already set `optimizer` on the module."""
    entries = session.planned_tensors
    step = _RunnableStep(entries, model, inputs, loss)
    inputs = step.inputs.items()
    batch = [BatchArraySpec(name, tuple(x.shape), format_dtype(x.dtype)) for name, x in inputs]
    specs = [entry.spec for entry in entries]
    return TrainingStep(type(model).__name__, specs, batch, (), step.run_step, step.notes)


class _RunnableStep:
    def __init__(
        self, entries: Sequence[DescribedTensor], model: torch.nn.Module, inputs: Any, loss: Function | None
    ):
        self._entries = entries
        self._model = model
        self._is_named = isinstance(inputs, Mapping)
        several: list[Any] = [*inputs] if is_sequence(inputs) else [inputs]
        numbered = {f"input {i}": each for i, each in enumerate(several)}
        self.inputs: dict[str, torch.Tensor] = dict(inputs) if is_mapping(inputs) else numbered
        self.optimizer = get_training_settings(model).make_optimizer
        self.notes = [] if self.optimizer is not None else [_NO_OPTIMIZER]  # running the step may add a note
        self._loss = loss

    def run_step(
        self, tracer: Any, values: Mapping[Key, DTensor], batch: Sequence[torch.Tensor]
    ) -> Mapping[Key, DTensor]:
        """Run a step and count it, without the creation of the optimizer's slots."""
        placed: list[tuple[DescribedTensor, DTensor, Layout]] = []
        for entry in self._entries:
            value = values[entry.spec.key]
            placed.append((entry, value, tracer.engine.get_layout(value)))
        context: Any = _CountingContext(tracer.policy, tracer.engine)
        TorchSession(context).install_arrays([self._model], placed)
        paths = find_paths_by_module_id(self._model)
        for module in self._model.modules():
            _track_layer_calls(module, paths.get(id(module), ""), tracer)
        trained = [p for p in self._model.parameters() if p.requires_grad]
        optimizer = self.optimizer(trained) if self.optimizer is not None else None
        with tracer:
            self._compute_gradients(tracer, batch)
            if optimizer is not None:
                with tracer.mark_slot_creation():
                    optimizer.step()
                with tracer.mark_optimizer_update():
                    optimizer.step()
        return {}

    def _compute_gradients(self, tracer: Any, batch: Sequence[Any]) -> None:
        inputs = dict(zip(self.inputs, batch, strict=True)) if self._is_named else (tuple(batch), None)
        output = call_model(self._model, inputs)
        value: Any = find_scalar_loss(output) if self._loss is None else self._loss(output)
        if value is None:
            self.notes += [_NO_LOSS] * (_NO_LOSS not in self.notes)
            numbers = [each for each in list_tensors(output) if each.is_floating_point()]
            value = sum(each.float().square().mean() for each in numbers)
        with tracer.count_in_phase("backward"):
            value.backward()
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                tracer.record_gradient_path(parameter.grad, name)


def _track_layer_calls(module: torch.nn.Module, path: str, tracer: Any) -> None:
    """Register hooks that tell the tracer when `module`, at `path`, runs in the forward and the backward pass."""

    def enter_layer(*_: object) -> None:
        tracer.layers.append(path)

    def leave_layer(_module: object, _args: object, output: object) -> None:
        tracer.layers.pop()
        tracer.last_layer = path or tracer.last_layer

        def set_current_layer(_: object) -> None:
            tracer.layers[:] = [path]

        def watch_gradient(tensor: torch.Tensor) -> torch.Tensor:
            # Several layers may return one tensor, the innermost of them first, so watch each autograd node only once.
            if tensor.grad_fn is not None and tensor.grad_fn not in tracer.watched_nodes:
                tracer.watched_nodes.add(tensor.grad_fn)
                tensor.register_hook(set_current_layer)  # pyright: ignore[reportUnknownMemberType]
            return tensor

        map_tensors(watch_gradient, output)

    module.register_forward_pre_hook(enter_layer)
    module.register_forward_hook(leave_layer)
