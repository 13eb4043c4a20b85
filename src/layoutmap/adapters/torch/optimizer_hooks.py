"""Checks before an optimizer steps: wrong steps are refused, and slots that are plain tensors get their layouts.

Of several processes each steps its own shards, so all must have the same optimizer with the same settings.

Most of torch's optimizers are sums and products, which `DTensor`s compute right, or raise where they cannot. One that
reads numbers in order to decide, as `Adafactor` does, reads those of one process's piece and goes on silently. So does
one that still holds the parameters that a model had before it was laid out: it would step those, and train nothing.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.programs import Program
from layoutmap.core.errors import ScopeError
from layoutmap.engines import get_engine
from layoutmap.engines.agreement import check_program
from layoutmap.engines.patches import Item
from layoutmap.engines.torch.changes import change
from layoutmap.engines.torch.private import optimizer_hooks

_READ = (torch.optim.Adafactor,)
# Those that the processes have compared, before their first steps.
_compared: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
# By id: what is no model's any more, and its path.
_replaced: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}


def note_replaced(tensor: torch.Tensor, path: str) -> None:
    """From now on, refuse optimizers that step a tensor: its model holds another one, in a layout.

    Args:
        tensor: The tensor; nothing is kept of it.
        path: Its path in the model, for the message.
    """
    key = id(tensor)
    _replaced[key] = weakref.ref(tensor, lambda _: _replaced.pop(key, None)), path
    look_after_optimizers()


def look_after_optimizers() -> None:  # why: decisions/0044
    """Look at each optimizer of this process before it steps, as long as there are tensors on a mesh."""
    change(_HOOK)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    state = optimizer.state
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in _replaced:
                _refuse_stale(optimizer, _replaced[id(parameter)][1])
            if isinstance(parameter, DTensor):
                if isinstance(optimizer, _READ):
                    _refuse(optimizer)
                if optimizer not in _compared:
                    _compare(optimizer, parameter)
                if parameter in state:
                    _lay_out(state[parameter], parameter)


def _compare(optimizer: torch.optim.Optimizer, parameter: DTensor) -> None:
    """Before the first step, refuse an optimizer that is another one in another process."""
    engine = get_engine("torch")
    layout = engine.layout_of(parameter)
    if layout is not None:
        program, kind = Program(), type(optimizer)
        program.value("optimizer", kind)
        for number, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if name != "params":
                    program.value(f"{kind.__name__}, group {number}: {name}", value)
        gather = functools.partial(engine.all_gather, mesh=layout.mesh)
        check_program("optimizer.step", program.settings, gather)
    _compared.add(optimizer)


def _refuse(optimizer: torch.optim.Optimizer) -> None:
    raise ScopeError(
        f"{type(optimizer).__name__} cannot step weights in layouts",
        why="it uses norms of weights and updates, and each process would compute those of its own shards",
        fix="use another optimizer, as torch.optim.AdamW, whose slots are sharded as the weights are",
    )


def _refuse_stale(optimizer: torch.optim.Optimizer, path: str) -> None:
    kind = type(optimizer).__name__
    raise ScopeError(
        f"{kind} was made before its weights were laid out",
        facts={"weight": path},
        why="the model holds another tensor now, in its layout, and this step would not train it",
        fix=f"make the optimizer after apply, and take its state along: "
        f"new = {kind}(model.parameters(), ...); new.load_state_dict(old.state_dict())",
    )


def _lay_out(slots: Any, parameter: DTensor) -> None:
    """Redistribute slots that a state dict of a plain model has given."""
    for name, slot in slots.items():
        if isinstance(slot, torch.Tensor) and not isinstance(slot, DTensor) and slot.shape == parameter.shape:
            engine = get_engine("torch")
            layout = engine.layout_of(parameter)
            if layout is not None and (slot.ndim or name != "step"):
                slots[name] = engine.relayout(slot, layout)


_HOOK = Item(optimizer_hooks, "layoutmap", _before_step)
