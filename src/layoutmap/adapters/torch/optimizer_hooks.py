"""Check optimizers before their steps, and shard slots that are unsharded tensors.

Each process steps its own shards, so all processes must have the same optimizer with the same settings.

Torch's optimizers compute sums and products, which are right on `DTensor`s, or raise. `Adafactor` would create
replicated slots, and then compute the whole update on each device, so it gets sharded slots. An optimizer that still
references the parameters of a model before it was sharded would train nothing, so its step raises.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.torch.compiled import check_can_be_compiled
from layoutmap.adapters.torch.fingerprints import iterate_optimizer_descriptions
from layoutmap.adapters.torch.optimizer_state import check_slots_match_unsharded
from layoutmap.core.checksums import compute_checksum
from layoutmap.core.errors import ScopeError
from layoutmap.core.layout import UNSHARDED, Layout
from layoutmap.engines import get_engine
from layoutmap.engines.agreement import check_same_program, check_same_values
from layoutmap.engines.patches import ItemPatch
from layoutmap.engines.tested import ImportErrorConverter
from layoutmap.engines.torch.changes import install_patches

with ImportErrorConverter("torch"):
    from torch.optim.optimizer import _global_optimizer_pre_hooks as optimizer_hooks  # pyright: ignore[reportPrivateUsage]

# How many parameter groups each optimizer had at its last check, so that it is checked again if it has more.
_num_compared_groups: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
# For each tensor that a DTensor replaced: from its id to a weak reference to it and its path.
_replaced_tensors: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}


def record_replaced_tensor(tensor: torch.Tensor, path: str) -> None:
    """Record a tensor that a DTensor replaced, so that an optimizer that steps it raises.

    Args:
        tensor: The tensor; nothing is kept of it.
        path: Its path in the model, for the message.
    """
    key = id(tensor)
    # ids are reused, so remove the entry when the tensor is deleted.
    _replaced_tensors[key] = weakref.ref(tensor, lambda _: _replaced_tensors.pop(key, None)), path
    enable_optimizer_checks()


# A wrong step would change the weights, so check optimizers before it (decisions/0044).
def enable_optimizer_checks() -> None:
    """Check each optimizer of this process before its steps from now on, as long as a DTensor exists."""
    install_patches(_HOOK)


def _check_optimizer_before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if torch.compiler.is_dynamo_compiling():
        _check_optimizer_outside_graph(optimizer)
    else:
        _check_parameters_and_shard_slots(optimizer)


@torch.compiler.disable(reason="a step of sharded weights is checked outside of the graph")  # pyright: ignore[reportUnknownMemberType, reportUntypedFunctionDecorator]
def _check_optimizer_outside_graph(optimizer: torch.optim.Optimizer) -> None:
    if any(isinstance(each, DTensor) for group in optimizer.param_groups for each in group["params"]):
        check_can_be_compiled(f"{type(optimizer).__name__}.step", is_dynamic=False)
    _check_parameters_and_shard_slots(optimizer)


def _check_parameters_and_shard_slots(optimizer: torch.optim.Optimizer) -> None:
    """Raise if a step of the optimizer would be wrong. Otherwise, shard its unsharded slots."""
    state = optimizer.state
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in _replaced_tensors:
                _raise_replaced_parameter_error(optimizer, _replaced_tensors[id(parameter)][1])
            if isinstance(parameter, DTensor):
                if _num_compared_groups.get(optimizer) != len(optimizer.param_groups):
                    _check_optimizer_can_be_sharded(optimizer, parameter)
                is_factored = isinstance(optimizer, torch.optim.Adafactor) and parameter.ndim > 1
                if is_factored and parameter.requires_grad and not state[parameter]:
                    state[parameter] = _make_adafactor_slots(parameter)
                if parameter in state:
                    _shard_slots(state[parameter], parameter)


def _check_optimizer_can_be_sharded(optimizer: torch.optim.Optimizer, parameter: DTensor) -> None:
    """Raise if optimizers differ between processes, or if slots would differ from those on one device."""
    engine = get_engine("torch")
    layout = engine.get_layout(parameter)
    if layout is not None:
        gather = functools.partial(engine.gather_from_processes, mesh=layout.mesh)
        check_same_program("optimizer.step", iterate_optimizer_descriptions(optimizer), gather)
        weights = (each for group in optimizer.param_groups for each in group["params"])
        unsharded = [(n, each) for n, each in enumerate(weights) if not isinstance(each, DTensor)]
        check_same_values(
            (
                (f"parameter {n} of the optimizer", compute_checksum(engine.to_numpy(p.detach())))
                for n, p in unsharded
            ),
            gather,
        )
    check_slots_match_unsharded(optimizer)
    mark_optimizer_checked(optimizer)  # the comparison needs a collective, so repeat it only for new groups


def mark_optimizer_checked(optimizer: torch.optim.Optimizer) -> None:
    """Skip the checks of an optimizer before its steps, until it gets another parameter group."""
    _num_compared_groups[optimizer] = len(optimizer.param_groups)


def _raise_replaced_parameter_error(optimizer: torch.optim.Optimizer, path: str) -> NoReturn:
    optimizer_name = type(optimizer).__name__
    raise ScopeError(
        f"{optimizer_name} was created before its weights were sharded",
        facts={"weight": path},
        why="the model now has a sharded tensor in place of the weight, which this step would not train",
        fix=f"create the optimizer after apply, and copy its state: new = {optimizer_name}(model.parameters(), "
        "...); new.load_state_dict(old.state_dict())",
    )


# Adafactor would compute its slots from a shard, so create them before its first step (decisions/0044).
def _make_adafactor_slots(parameter: DTensor) -> dict[str, torch.Tensor]:
    """Return Adafactor's initial slots: a step count, and zeros for means over each of the last two axes."""
    *outer, rows, columns = parameter.shape
    return {
        "step": torch.zeros((), dtype=torch.promote_types(torch.get_default_dtype(), torch.float32)),
        "row_var": torch.zeros((*outer, rows, 1), dtype=parameter.dtype, device=parameter.device),
        "col_var": torch.zeros((*outer, 1, columns), dtype=parameter.dtype, device=parameter.device),
    }


def _shard_slots(slots: Any, parameter: DTensor) -> None:
    """Shard slots that are unsharded tensors, such as those loaded from an unsharded state dict."""
    for name, slot in slots.items():
        if isinstance(slot, torch.Tensor) and not isinstance(slot, DTensor):
            layout = derive_slot_layout(name, tuple(slot.shape), parameter)
            if layout is not None:
                slots[name] = get_engine("torch").relayout(slot, layout, pad=True)


def derive_slot_layout(name: str, shape: tuple[int, ...], parameter: torch.Tensor) -> Layout | None:
    """Return a slot's layout: that of its parameter, but unsharded on axes on which the slot has one element.

    Args:
        name: The optimizer's name of the slot.
        shape: Its shape.
        parameter: The parameter.

    Returns:
        The layout; `None` for a count of steps, for slots of different shapes, and if the parameter is on no mesh.
    """
    layout, sizes = get_engine("torch").get_layout(parameter), tuple(parameter.shape)
    if layout is None or len(shape) != len(sizes) or (name == "step" and not shape):
        return None
    if any(size not in (1, full) for size, full in zip(shape, sizes, strict=True)):
        return None
    specs = zip(layout.sharding_specs, shape, sizes, strict=True)
    return Layout([spec if size == full else UNSHARDED for spec, size, full in specs], layout.mesh)


_HOOK = ItemPatch(optimizer_hooks, "layoutmap", _check_optimizer_before_step)
