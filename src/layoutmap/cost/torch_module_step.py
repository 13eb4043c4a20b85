"""Describe the training step of a torch module, so that `torch_step` can compute its cost."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.options import ScopeOptions
from layoutmap.adapters.torch.boundary import list_tensors, map_tensors
from layoutmap.adapters.torch.experts import compute_local_share_of_experts, is_layer_of_experts
from layoutmap.adapters.torch.optimizer_hooks import mark_optimizer_checked
from layoutmap.adapters.torch.options import TorchOptions
from layoutmap.adapters.torch.paths import DescribedTensor
from layoutmap.adapters.torch.session import TorchSession
from layoutmap.adapters.torch.structure import TORCH_ATTRIBUTES
from layoutmap.adapters.torch.training import call_model, find_scalar_loss, get_training_settings
from layoutmap.core.layout import Layout
from layoutmap.core.policy import LayoutPolicy
from layoutmap.core.steps import BatchArraySpec, Key, TrainingStep
from layoutmap.cost.equal_blocks import find_stacks_of_equal_blocks, make_comparable_attributes
from layoutmap.cost.extrapolation import find_block_path
from layoutmap.engines.patches import set_attribute_temporarily
from layoutmap.engines.protocol import Engine
from layoutmap.engines.torch.element_types import format_dtype
from layoutmap.engines.torch.modules import list_modules, mark_own_hook
from layoutmap.engines.torch.operators import Args, Function, Kwargs
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
    modules = [(path, module) for path, module in list_modules(model) if path]
    blocks = find_stacks_of_equal_blocks(specs, modules, _make_comparable_settings)
    return TrainingStep(type(model).__name__, specs, batch, blocks, step.run_step, step.notes)


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
        self._has_checked_optimizer = False  # the check is slow, so check the optimizer only in the first run

    def run_step(
        self, tracer: Any, values: Mapping[Key, DTensor], batch: Sequence[torch.Tensor]
    ) -> Mapping[Key, DTensor]:
        """Run a step and count it, without the creation of the optimizer's slots."""
        placed: list[tuple[DescribedTensor, DTensor, Layout]] = []
        for entry in self._entries:
            if (value := values.get(entry.spec.key)) is None:
                continue  # a weight of a skipped block
            placed.append((entry, value, tracer.engine.get_layout(value)))
        context: Any = _CountingContext(tracer.policy, tracer.engine)
        TorchSession(context).install_arrays([self._model], placed)
        skipped = tracer.blocks.skipped
        parameters: list[tuple[str, torch.nn.Parameter]] = []
        for path, parameter in self._model.named_parameters():
            if (block := find_block_path(path, skipped)) is not None:
                tracer.record_skipped_weight(parameter, block)
            elif parameter.requires_grad:
                parameters.append((path, parameter))
        optimizer = self.optimizer([p for _, p in parameters]) if self.optimizer is not None else None
        if optimizer is not None and self._has_checked_optimizer:
            mark_optimizer_checked(optimizer)
        with ExitStack() as stack:
            for path, module in list_modules(self._model):
                if find_block_path(path.rpartition(".")[0], skipped) is None:  # is not inside a skipped block
                    stack.enter_context(_track_layer_calls(module, path, tracer))
            stack.enter_context(tracer)
            self._compute_gradients(tracer, batch)
            for path, parameter in parameters:
                if parameter.grad is not None:
                    tracer.record_gradient_path(parameter.grad, path)
            if optimizer is not None:
                with tracer.mark_slot_creation():
                    optimizer.step()
                self._has_checked_optimizer = True
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


@contextmanager
def _track_layer_calls(module: torch.nn.Module, path: str, tracer: Any) -> Generator[None]:
    """Tell the tracer when `module`, at `path`, runs, until the block ends. Skip its calls if the tracer says so."""

    def record_call(args: Args, kwargs: Kwargs) -> Args:
        """Record the call for the comparison of blocks, and return its positional arguments."""
        if not args and kwargs:  # the comparison needs the first argument after `self`
            first_name = [*inspect.signature(type(module).forward).parameters, "", ""][1]
            args = tuple(kwargs[name] for name in kwargs if name == first_name)
            kwargs = {name: value for name, value in kwargs.items() if name != first_name}
        tracer.blocks.record_call(path, args, kwargs)
        return args

    def return_first_argument(*args: object, **kwargs: object) -> object:
        return record_call(args, kwargs)[0]

    def enter_layer(_module: object, args: Args, kwargs: Kwargs) -> None:
        tracer.layers.append(path)
        tracer.layer_paths.add(path)
        calls.append(record_call(args, kwargs))
        if is_layer_of_experts(module):
            tracer.record_expert_share(path, compute_local_share_of_experts(module))

    def leave_layer(_module: object, _args: object, output: object) -> None:
        tracer.layers.pop()
        tracer.last_layer = path or tracer.last_layer
        tracer.blocks.record_output(path, calls.pop(), output)

        def set_current_layer(_: object) -> None:
            tracer.layers[:] = [path]

        def watch_gradient(tensor: torch.Tensor) -> torch.Tensor:
            # Several layers may return one tensor, the innermost of them first, so watch each autograd node only once.
            if tensor.grad_fn is not None and tensor.grad_fn not in tracer.watched_nodes:
                tracer.watched_nodes.add(tensor.grad_fn)
                tensor.register_hook(set_current_layer)  # pyright: ignore[reportUnknownMemberType]
            return tensor

        map_tensors(watch_gradient, output)

    if path in tracer.blocks.skipped:
        with set_attribute_temporarily(module, "forward", return_first_argument):
            yield
        return
    calls: list[Args] = []  # arguments of the calls that run
    hooks = (
        module.register_forward_pre_hook(mark_own_hook(enter_layer), with_kwargs=True),
        module.register_forward_hook(mark_own_hook(leave_layer)),
    )
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


_NAMES = TORCH_ATTRIBUTES | {"forward", "compile"}  # layoutmap sets the last two
_INDEX_NAMES = frozenset(
    f"{what}_{name}" for what in ("layer", "block") for name in ("idx", "id", "index", "number")
)


def _make_comparable_settings(module: torch.nn.Module) -> object:
    """Return comparable attributes of a module without the number of its block, which its cost does not depend on."""
    return module.training, make_comparable_attributes(module, _NAMES | _INDEX_NAMES)
