"""Weights that are sharded over the dim of the batch are gathered over it while their layer computes.

That is what FSDP does. They are gathered when the layer is called and freed afterwards, and once more for the backward
pass; gradients go the same way back, summed up and sharded. The layers of one block, an element of a list of equal
modules, are gathered together, so that it takes one collective and not one for each weight. What is outside of the
blocks, as embeddings are, is gathered when the model is called, and stays until the backward pass has used it.

In several processes torch's `fully_shard` does it, where it can; else `engines.torch.fsdp`.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.protocol import ScopeContext
from layoutmap.adapters.torch.paths import Place, layer_paths
from layoutmap.core.errors import listed
from layoutmap.core.layout import Layout
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.fsdp import can_gather, changed_too_early, gather_over
from layoutmap.engines.torch.fsdp_saved import regathered
from layoutmap.engines.torch.fully_shard import Unit
from layoutmap.engines.torch.private import local_of, members_of_module, plainly, version_of


@dataclass(slots=True, eq=False)
class Weight:
    """A parameter that is gathered when it computes.

    Args:
        place: The module that holds it, and its name there.
        layout: The layout in which it computes.
        path: Its path in the model.
    """

    place: Place
    layout: Layout
    path: str


@dataclass(slots=True, eq=False)
class Gathering:
    """Weights that are gathered together when a module is called.

    Args:
        weights: The weights.
        is_kept: Whether they are not freed between the forward pass and the backward pass.
        unit: Those of them that torch's `fully_shard` gathers; `None`: it gathers none.
        places: Where these are held.
        others: The weights but these.
    """

    weights: list[Weight]
    is_kept: bool
    unit: Unit | None = None
    places: list[list[Place]] = field(default_factory=list[list[Place]])
    others: list[Weight] = field(default_factory=list[Weight])

    def __deepcopy__(self, memo: dict[int, Any]) -> Gathering:
        """What a copy of the model gathers; `fully_shard` does not know its parameters."""
        return Gathering(copy.deepcopy(self.weights, memo), self.is_kept)


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
    paths = layer_paths(root)
    for module, block in modules:
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            layout = layouts.get(id(parameter))
            computing = None if layout is None else home.policy.computing_layout(layout)
            if computing is not None and computing != layout:
                path = ".".join(filter(None, (paths.get(id(module)), name)))
                weight = Weight(Place(module, name), computing, path)
                gather.setdefault(id(block or module), []).append(weight)
                if block is None:
                    outside.append(weight)
    made = {key: Gathering(weights, is_kept=False) for key, weights in gather.items()}
    blocks = {id(block) for _, block in modules if block is not None}
    if outside and blocks:
        made[id(root)] = Gathering(outside, is_kept=True)
    if made and home.gathering == "fully_shard" and not simulation.is_simulated():
        outermost = made.setdefault(id(root), Gathering([], is_kept=True))
        below = [
            each for key, each in made.items() if each is not outermost and (key in blocks or not blocks)
        ]
        _fully_shard(outermost, below, home)
    return made


def _fully_shard(outermost: Gathering, below: Sequence[Gathering], home: ScopeContext) -> None:
    """Have torch's `fully_shard` gather what it can of the weights of a model, and note what it cannot."""
    batch_dim = home.policy.batch_dim
    assert batch_dim is not None, "or nothing would be gathered"
    mesh = home.engine.native(home.policy.replicated(0), 0)[0]
    mesh_dim = mesh.mesh_dim_names.index(batch_dim)
    users = Counter(key for each in (outermost, *below) for key in {id(_held(w)) for w in each.weights})
    reasons: dict[str, list[str]] = {}

    def unit(gathering: Gathering, below: Sequence[Unit] | None = None) -> Unit | None:
        weights: dict[int, tuple[Any, list[Weight]]] = {}
        for weight in gathering.weights:
            weights.setdefault(id(_held(weight)), (_held(weight), []))[1].append(weight)
        dtypes = Counter(tensor.dtype for tensor, _ in weights.values() if tensor.is_floating_point())
        usual = max(dtypes, key=dtypes.__getitem__, default=None)
        chosen: list[tuple[Any, list[Weight]]] = []
        for tensor, places in weights.values():
            reason = _why_not(tensor, mesh_dim)
            if users[id(tensor)] > 1:
                reason = "several blocks share it"
            elif tensor.dtype != usual:
                reason = "most weights of its block are of another element type"
            if reason:
                reasons.setdefault(reason, []).append(places[0].path)
                gathering.others += places
            else:
                chosen.append((tensor, places))
        gathering.places = [[weight.place for weight in places] for _, places in chosen]
        if chosen or below:
            gathering.unit = Unit([(_name(ws[0]), tensor) for tensor, ws in chosen], mesh, mesh_dim, below)
        return gathering.unit

    unit(outermost, [made for each in below if (made := unit(each)) is not None])
    if num := sum(len(each.places) for each in (outermost, *below)):
        home.note(batch_dim, f"{num} weights are gathered over {batch_dim!r} by torch's fully_shard")
    for reason, paths in reasons.items():
        home.note(reason, f"gathered by layoutmap, nothing ahead of time, as {reason}: {listed(paths)}")


def _why_not(tensor: Any, mesh_dim: int) -> str:
    """Why `fully_shard` cannot gather a weight; empty if it can."""
    if not can_gather(tensor, mesh_dim):
        return "the batch's dim is not the innermost on its axis"
    if tensor.shape[tensor.placements[mesh_dim].dim] % tensor.device_mesh.size(mesh_dim):
        return "its axis does not divide"
    if not local_of(tensor).is_contiguous():
        return "its shards are not contiguous"
    return ""


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
def gathered(gathering: Gathering, home: ScopeContext, inputs: Sequence[torch.Tensor]) -> Generator[None]:
    """While open, some weights are in the layouts in which they compute.

    Args:
        gathering: The weights.
        home: The scope.
        inputs: The tensors that the module is called with.
    """
    unit = gathering.unit
    sharded = [_held_at(places[0]) for places in gathering.places]
    with ExitStack() as stack:
        if unit is None or not unit.is_up_to_date(
            sharded
        ):  # the model was converted, or a call of it is open
            stack.enter_context(_gathered(gathering.weights, home, is_kept=gathering.is_kept))
        else:
            tensors = stack.enter_context(unit.gathered(inputs))
            stack.enter_context(_held_in_place(gathering.places, sharded, tensors))
            if gathering.others:
                stack.enter_context(_gathered(gathering.others, home, is_kept=gathering.is_kept))
        yield


@contextmanager
def _held_in_place(
    places: Sequence[Sequence[Place]], before: Sequence[Any], tensors: Sequence[Any]
) -> Generator[None]:
    """While open, modules hold other tensors than before."""
    try:
        _put(places, tensors)
        yield
    finally:
        _put(places, before)


def _put(places: Sequence[Sequence[Place]], tensors: Sequence[Any]) -> None:
    for same, tensor in zip(places, tensors, strict=True):
        for place in same:
            members_of_module(place.module)[0][place.name] = tensor


@contextmanager
def _gathered(weights: Sequence[Weight], home: ScopeContext, *, is_kept: bool) -> Generator[None]:
    """While open, weights are in the layouts in which they compute, gathered here."""
    held, together, again = _gather(weights, home)
    if not together:  # the model's own call has gathered them
        yield
        return
    changed = [(weight.place, tensor) for weight, tensor in held if id(tensor) in together]
    places, before = [[place] for place, _ in changed], [tensor for _, tensor in changed]
    freed = nullcontext() if is_kept else regathered(list(together.values()), again)
    with _held_in_place(places, before, [together[id(tensor)] for tensor in before]), freed:
        yield


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
                raise RuntimeError(changed_too_early(_name(weight), tuple(tensor.shape)))  # as torch does
        return list(_in_layouts(sharded, home).values())

    return held, together, again


def _name(weight: Weight) -> str:
    return f"{type(weight.place.module).__name__}.{weight.place.name}"


def _held(weight: Weight) -> Any:
    return _held_at(weight.place)


def _held_at(place: Place) -> Any:
    return members_of_module(place.module)[0][place.name]


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
