"""Check optimizers before their steps, and shard slots that are unsharded tensors.

Of several processes each steps its own shards, so all must have the same optimizer with the same settings.

Torch's optimizers are sums and products, which `DTensor`s compute right, or raise where they cannot. `Adafactor` would
make its slots replicated, and by them compute whole updates on each device: it is given slots in layouts. An optimizer
that still holds the parameters that a model had before it was laid out would step those, and train nothing.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.torch.compiled import check_compilable
from layoutmap.adapters.torch.fingerprints import describe_optimizer
from layoutmap.adapters.torch.optimizer_state import check_state_kinds
from layoutmap.core.checksums import compute_checksum
from layoutmap.core.errors import ScopeError
from layoutmap.core.layout import UNSHARDED, Layout
from layoutmap.engines import get_engine
from layoutmap.engines.agreement import check_program, check_values
from layoutmap.engines.patches import Item
from layoutmap.engines.tested import Needed
from layoutmap.engines.torch.changes import change

with Needed("torch"):
    from torch.optim.optimizer import _global_optimizer_pre_hooks as optimizer_hooks  # pyright: ignore[reportPrivateUsage]

# The number of parameter groups of each optimizer at its comparison before the first step.
_compared: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
# Each replaced tensor and its former path, by the tensor's id.
_replaced: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}


def note_replaced_tensor(tensor: torch.Tensor, path: str) -> None:
    """Record a tensor that a DTensor replaced, so that optimizers that step it raise.

    Args:
        tensor: The tensor; nothing is kept of it.
        path: Its path in the model, for the message.
    """
    key = id(tensor)
    # ids are reused, so remove the entry when the tensor is deleted.
    _replaced[key] = weakref.ref(tensor, lambda _: _replaced.pop(key, None)), path
    check_optimizers()


# A wrong step would change the weights, so check optimizers before it (decisions/0044).
def check_optimizers() -> None:
    """Check each optimizer of this process before its steps, while a DTensor exists."""
    change(_HOOK)


def _check_before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if torch.compiler.is_dynamo_compiling():
        _check_before_compiled_step(optimizer)
    else:
        _check_optimizer(optimizer)


@torch.compiler.disable(reason="a step of sharded weights is checked outside of the graph")  # pyright: ignore[reportUnknownMemberType, reportUntypedFunctionDecorator]
def _check_before_compiled_step(optimizer: torch.optim.Optimizer) -> None:
    if any(isinstance(each, DTensor) for group in optimizer.param_groups for each in group["params"]):
        check_compilable(f"{type(optimizer).__name__}.step", is_dynamic=False)
    _check_optimizer(optimizer)


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in _replaced:
                _refuse_stale(optimizer, _replaced[id(parameter)][1])
            if isinstance(parameter, DTensor):
                if _compared.get(optimizer) != len(optimizer.param_groups):
                    _compare_optimizer(optimizer, parameter)
                is_factored = isinstance(optimizer, torch.optim.Adafactor) and parameter.ndim > 1
                if is_factored and parameter.requires_grad and not state[parameter]:
                    state[parameter] = _make_adafactor_slots(parameter)
                if parameter in state:
                    _shard_slots(state[parameter], parameter)


def _compare_optimizer(optimizer: torch.optim.Optimizer, parameter: DTensor) -> None:
    """Raise before the first step if other processes, or one device, would step the optimizer differently."""
    engine = get_engine("torch")
    layout = engine.get_layout(parameter)
    if layout is not None:
        gather = functools.partial(engine.all_gather, mesh=layout.mesh)
        check_program("optimizer.step", describe_optimizer(optimizer), gather)
        weights = (each for group in optimizer.param_groups for each in group["params"])
        plain = [(n, each) for n, each in enumerate(weights) if not isinstance(each, DTensor)]
        check_values(
            (
                (f"parameter {n} of the optimizer", compute_checksum(engine.to_numpy(p.detach())))
                for n, p in plain
            ),
            gather,
        )
    check_state_kinds(optimizer)
    _compared[optimizer] = len(optimizer.param_groups)  # the comparison needs a collective, so do it once


def _refuse_stale(optimizer: torch.optim.Optimizer, path: str) -> None:
    kind = type(optimizer).__name__
    raise ScopeError(
        f"{kind} was created before its weights were sharded",
        facts={"weight": path},
        why="the model now holds another, sharded tensor, which this step would not train",
        fix=f"create the optimizer after apply, and copy its state: new = {kind}(model.parameters(), "
        "...); new.load_state_dict(old.state_dict())",
    )


# Adafactor would compute its slots from a shard, so create them before its first step (decisions/0044).
def _make_adafactor_slots(parameter: DTensor) -> dict[str, torch.Tensor]:
    """Create Adafactor's first slots of a parameter: means over the last axis and over the one before it."""
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
    """Return the layout of a slot: the parameter's, but unsharded on axes that the slot reduces to one element.

    Args:
        name: The optimizer's name of the slot.
        shape: Its shape.
        parameter: The parameter.

    Returns:
        The layout; `None` for a count of steps, for slots of other shapes, and if the parameter is on no mesh.
    """
    layout, sizes = get_engine("torch").get_layout(parameter), tuple(parameter.shape)
    if layout is None or len(shape) != len(sizes) or (name == "step" and not shape):
        return None
    if any(size not in (1, whole) for size, whole in zip(shape, sizes, strict=True)):
        return None
    specs = zip(layout.sharding_specs, shape, sizes, strict=True)
    return Layout([spec if size == whole else UNSHARDED for spec, size, whole in specs], layout.mesh)


_HOOK = Item(optimizer_hooks, "layoutmap", _check_before_step)
