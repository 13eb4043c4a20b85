"""Set the loss and the optimizer with which a model is trained.

A torch program has these in its own loop. `check_parity` runs a loop itself, so it has to know them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.torch.boundary import list_tensors, unshard_tensors
from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import ScopeError
from layoutmap.engines.torch.trees import is_mapping, is_sequence

Model = TypeVar("Model", bound=torch.nn.Module)
Loss = Callable[[Any, Any], torch.Tensor]
MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(slots=True)
class TrainingSettings:
    """The loss, optimizer, and number of passes with which one model is trained.

    Args:
        loss: A function of the model's output and the targets; `None`: the model returns its loss.
        make_optimizer: A function that creates the optimizer from the model's parameters.
        optimizer: The optimizer, once it was created.
        num_passes: The number of backward passes whose gradients are added up before a step.
        num_draws: How many passes have drawn random numbers, each from a different seed.
    """

    loss: Loss | None = None
    make_optimizer: MakeOptimizer | None = None
    optimizer: torch.optim.Optimizer | None = None
    num_passes: int = 1
    num_draws: int = 0


_trainings: weakref.WeakKeyDictionary[torch.nn.Module, TrainingSettings] = weakref.WeakKeyDictionary()


# A torch model does not know its loss and optimizer, so this function sets them (decisions/0008).
def train_with(
    model: Model, *, loss: Loss | None = None, optimizer: MakeOptimizer | None = None, num_passes: int = 1
) -> Model:
    """Set the loss and optimizer of a model for `layoutmap.check_parity`. Your own training loop does not need it.

    Args:
        model: The model.
        loss: Called with what the model returns and the targets of a batch, returns a number; `None`: the model returns
            its loss, alone or as `loss` among others, as models of transformers do when they are given labels.
        optimizer: Makes the optimizer, given the model's parameters; `None`: no steps are taken.
        num_passes: How many backward passes of a batch, each with its own draws, add up their gradients before a step.

    Returns:
        The model.

    Example:
        >>> from functools import partial
        >>> model = torch.nn.Linear(8, 4)
        >>> train_with(model, loss=torch.nn.functional.mse_loss, optimizer=partial(torch.optim.AdamW, lr=1e-3))
        Linear(in_features=8, out_features=4, bias=True)
    """
    _trainings[model] = TrainingSettings(loss, optimizer, num_passes=num_passes)
    return model


def get_training_settings(model: torch.nn.Module) -> TrainingSettings:
    """Return the training settings of a model, which are the defaults if `train_with` was not called."""
    # Settings are stored outside the model, because the model must not change.
    return _trainings.setdefault(model, TrainingSettings())


def call_model(model: torch.nn.Module, batch: object) -> Any:
    """Return a model's output for the inputs of a batch, which are one tensor, a sequence, or a mapping by name."""
    inputs = batch[0] if is_sequence(batch) else batch  # a batch that is not a sequence has no targets
    tensors = _convert_arrays_to_tensors(inputs, _find_model_device(model))
    if isinstance(tensors, dict):
        return model(**tensors)
    return model(*tensors) if isinstance(tensors, list) else model(tensors)


def compute_loss(model: torch.nn.Module, batch: object) -> torch.Tensor:
    """Return the loss of a batch as an unsharded scalar.

    Raises:
        ScopeError: The model returns no loss, and `train_with` has set none; or the batch lacks targets.
    """
    output, loss = call_model(model, batch), get_training_settings(model).loss
    if loss is not None:
        if not is_sequence(batch) or len(batch) < 2:
            batch_text = (
                f"a mapping of {', '.join(map(str, batch))}" if is_mapping(batch) else describe_type(batch)
            )
            raise ScopeError(
                f"{type(model).__name__}: the batch has no targets for its loss",
                facts={"batch": batch_text},
                why="the loss is called with outputs and targets",
                fix="pass (inputs, targets), the inputs as a mapping if they have names",
            )
        return loss(output, _convert_arrays_to_tensors(batch[1], _find_model_device(model)))
    own_loss = find_scalar_loss(output)
    if own_loss is not None:
        return own_loss
    raise ScopeError(
        f"{type(model).__name__}: the loss of this model is unknown",
        facts={"returns": type(output).__name__},
        why="its output is not a single number, and contains none that is named loss",
        fix="pass a loss: layoutmap.adapters.torch.train_with(model, loss=..., optimizer=...)",
    )


def find_scalar_loss(output: object) -> torch.Tensor | None:
    """Return the `loss` in a model's output, else the output itself, or None if that is not a scalar tensor."""
    result = output.get("loss") if is_mapping(output) else getattr(output, "loss", output)
    result = result[0] if is_sequence(result) else result
    if isinstance(result, torch.Tensor) and result.ndim == 0:
        return unshard_tensors(result) if isinstance(result, DTensor) else result
    return None


def get_or_make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a model, which is created at its first use.

    Raises:
        ScopeError: `train_with` has set no optimizer.
    """
    training = get_training_settings(model)
    if training.make_optimizer is None:
        raise ScopeError(
            f"{type(model).__name__}: the optimizer of this model is unknown",
            why="a torch model does not contain its optimizer",
            fix="pass an optimizer: layoutmap.adapters.torch.train_with(model, loss=.., optimizer=..), "
            "or call check_parity with steps=0",
        )
    if training.optimizer is None:
        # Frozen weights have no gradients, so the optimizer does not get them.
        training.optimizer = training.make_optimizer(p for p in model.parameters() if p.requires_grad)
    return training.optimizer


def find_optimizer_class(name: str) -> MakeOptimizer:
    """Return the optimizer class in `torch.optim` with this name, such as `"adamw"`, in upper or lower case.

    Raises:
        ScopeError: There is none.
    """
    classes = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    optimizer_classes: dict[str, Any] = {
        each.__name__.lower(): each for each in classes if issubclass(each, torch.optim.Optimizer)
    }
    if name.lower() not in optimizer_classes:
        raise ScopeError(
            f"optimizer {name!r}: torch has no such optimizer",
            facts={"optimizers": ", ".join(sorted(optimizer_classes))},
            why="a name must be that of an optimizer class in torch.optim",
            fix="use one of these, or pass a function that makes it: functools.partial(torch.optim.AdamW, lr=1e-3)",
        )
    return optimizer_classes[name.lower()]


def convert_output_tensors(output: object, convert_tensor: Callable[[Any], object]) -> object:
    """Convert all tensors in a model's nested outputs with `convert_tensor`, and leave out all other values."""
    if isinstance(output, torch.Tensor):
        return convert_tensor(output)
    if is_mapping(output):
        return {
            name: convert_output_tensors(value, convert_tensor)
            for name, value in output.items()
            if list_tensors(value)
        }
    if is_sequence(output):
        return [convert_output_tensors(value, convert_tensor) for value in output if list_tensors(value)]
    return [convert_tensor(tensor) for tensor in list_tensors(output)]


def _convert_arrays_to_tensors(values: object, device: torch.device | None) -> object:
    """Return a batch with each array replaced by a tensor, also in nested tuples, lists, and mappings."""
    if is_mapping(values):
        return {name: _convert_arrays_to_tensors(each, device) for name, each in values.items()}
    if is_sequence(values):
        return [_convert_arrays_to_tensors(each, device) for each in values]
    is_array = hasattr(values, "__array__") and not isinstance(values, torch.Tensor)
    return torch.as_tensor(values, device=device) if is_array else values


def _find_model_device(model: torch.nn.Module) -> torch.device | None:
    """Return the device of a model's weights, or None for a model without weights."""
    return next((each.device for each in model.parameters()), None)
