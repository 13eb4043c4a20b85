"""Weights that are sharded over the dim of the batch are gathered over it while their layer computes.

That is what FSDP does. They are gathered when the layer is called and freed afterwards, and once more for the backward
pass; gradients go the same way back, summed up and sharded. The layers of one block, an element of a list of equal
modules, are gathered together, so that it takes one collective and not one for each weight. What is outside of the
blocks, as embeddings are, is gathered when the model is called, and stays until the backward pass has used it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.protocol import ScopeContext
from layoutmap.adapters.torch.paths import Place
from layoutmap.core.errors import format_message
from layoutmap.core.layout import Layout
from layoutmap.engines.torch.fsdp import can_gather, gather_over
from layoutmap.engines.torch.fsdp_saved import regathered
from layoutmap.engines.torch.private import members_of_module, plainly, version_of


@dataclass(slots=True, eq=False)
class Weight:
    """A parameter that is gathered when it computes.

    Args:
        place: The module that holds it, and its name there.
        layout: The layout in which it computes.
    """

    place: Place
    layout: Layout


@dataclass(slots=True, eq=False)
class Gathering:
    """Weights that are gathered together when a module is called.

    Args:
        weights: The weights.
        is_kept: Whether they are not freed between the forward pass and the backward pass.
    """

    weights: list[Weight]
    is_kept: bool


def weights_to_gather(
    root: torch.nn.Module, layouts: Mapping[int, Layout], home: ScopeContext
) -> dict[int, Gathering]:
    """What each module of a model gathers when it is called, by the module's id.

    A module outside of the blocks that is called by itself, and not by the model, gathers its own weights.

    Args:
        root: The model.
        layouts: The layouts of its parameters, by id.
        home: The scope.
    """
    gather: dict[int, list[Weight]] = {}
    outside: list[Weight] = []
    modules = _blocks(root)
    for module, block in modules:
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            layout = layouts.get(id(parameter))
            computing = None if layout is None else home.policy.computing_layout(layout)
            if computing is not None and computing != layout:
                weight = Weight(Place(module, name), computing)
                gather.setdefault(id(block or module), []).append(weight)
                if block is None:
                    outside.append(weight)
    made = {key: Gathering(weights, is_kept=False) for key, weights in gather.items()}
    if outside and any(block is not None for _, block in modules):
        made[id(root)] = Gathering(outside, is_kept=True)
    return made


def _blocks(root: torch.nn.Module) -> list[tuple[torch.nn.Module, torch.nn.Module | None]]:
    """Each module of a model, with the block that it is in."""
    found: dict[int, tuple[torch.nn.Module, torch.nn.Module | None]] = {}
    todo: list[tuple[torch.nn.Module, torch.nn.Module | None]] = [(root, None)]
    while todo:
        module, block = todo.pop()
        if id(module) in found:
            continue
        found[id(module)] = module, block
        children = list(module.children())
        are_blocks = (
            block is None
            and isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))
            and len(children) > 1
            and len({type(child) for child in children}) == 1
        )
        todo.extend((child, child if are_blocks else block) for child in reversed(children))
    return list(found.values())


@contextmanager
def gathered(gathering: Gathering, home: ScopeContext) -> Generator[None]:
    """While open, some weights are in the layouts in which they compute."""
    held, together, again = _gather(gathering.weights, home)
    if not together:  # the model's own call has gathered them
        yield
        return
    try:
        for weight, tensor in held:
            if id(tensor) in together:
                members_of_module(weight.place.module)[0][weight.place.name] = together[id(tensor)]
        with nullcontext() if gathering.is_kept else regathered(list(together.values()), again):
            yield
    finally:
        for weight, tensor in held:
            members_of_module(weight.place.module)[0][weight.place.name] = tensor


@plainly
def _gather(
    weights: Sequence[Weight], home: ScopeContext
) -> tuple[list[tuple[Weight, Any]], dict[int, Any], Callable[[], list[Any]]]:
    """What the modules hold, that gathered by its id, and what gathers it once more."""
    held = [(weight, _held(weight)) for weight in weights]
    sharded = {id(tensor): (tensor, weight.layout) for weight, tensor in held if isinstance(tensor, DTensor)}
    together = _in_layouts(sharded, home)
    versions = {key: version_of(tensor) for key, (tensor, _) in sharded.items()}

    def again() -> list[Any]:
        for weight, tensor in held:
            if version_of(tensor) != versions.get(id(tensor), version_of(tensor)):
                raise RuntimeError(_changed(weight))  # the class of torch's own error for it
        return list(_in_layouts(sharded, home).values())

    return held, together, again


def _changed(weight: Weight) -> str:
    return format_message(
        f"{type(weight.place.module).__name__}.{weight.place.name} was changed in place before the backward pass",
        {"shape": tuple(_held(weight).shape)},
        "it is sharded over the batch's dim, and the backward pass would gather its new values",
        "call backward() first, and change weights (as optimizer.step() does) after it",
    )


def _held(weight: Weight) -> Any:
    return members_of_module(weight.place.module)[0][weight.place.name]


def _in_layouts(sharded: Mapping[int, tuple[Any, Layout]], home: ScopeContext) -> dict[int, Any]:
    """Tensors in the layouts given: those that can, by one collective for all of one mesh dim and element type."""
    together: dict[int, Any] = {}
    groups: dict[Any, list[tuple[int, Any]]] = {}
    for key, (tensor, layout) in sharded.items():
        mesh, placements = home.engine.native(layout, tensor.ndim)
        if tensor.device_mesh != mesh:
            continue  # it was laid out anew, and computes as it is
        changed = [i for i, (a, b) in enumerate(zip(tensor.placements, placements, strict=True)) if a != b]
        if len(changed) == 1 and placements[changed[0]].is_replicate() and can_gather(tensor, changed[0]):
            groups.setdefault((changed[0], tensor.dtype, tensor.requires_grad), []).append((key, tensor))
        elif changed:
            together[key] = home.engine.relayout(tensor, layout)
    for (mesh_dim, _, _), members in groups.items():
        members_gathered = gather_over([tensor for _, tensor in members], mesh_dim)
        together.update(zip((key for key, _ in members), members_gathered, strict=True))
    return together
