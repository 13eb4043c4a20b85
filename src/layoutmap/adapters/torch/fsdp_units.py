"""Decide which weights each module gathers over the batch dim while it computes.

That is what FSDP does. They are gathered when the layer is called and freed afterwards, and once more for the backward
pass; gradients go the same way back, summed up and sharded. The layers of one block, an element of a list of modules of
one class, are gathered together, so that it takes one collective and not one for each weight. Weights outside of the
blocks, as embeddings are, are gathered when the model is called, and stay until the backward pass has used them.

In several processes torch's `fully_shard` does it, where it can; else this library itself, see `fsdp_own`.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.protocol import ScopeContext
from layoutmap.adapters.torch.boundary import map_tensors
from layoutmap.adapters.torch.fsdp_own import GatherGroup, ModelCall, Weight, swap_temporarily
from layoutmap.adapters.torch.mesh_context import here
from layoutmap.adapters.torch.paths import Holder, find_layer_paths
from layoutmap.core.errors import join_names
from layoutmap.core.layout import Layout
from layoutmap.core.paths import merge_paths, split_at_numbers
from layoutmap.core.specs import format_batch_dim, list_batch_dims
from layoutmap.engines.patches import set_temporarily
from layoutmap.engines.torch.gather import Unit, can_gather
from layoutmap.engines.torch.operators import Args, Kwargs
from layoutmap.engines.torch.specs import get_local, get_spec, has_even_shards


@dataclass(slots=True, eq=False)
class Gathering:
    """Weights that are gathered together when a module is called.

    Args:
        weights: The weights.
        model_call: Whether a call of the model is open.
        policy: In which element types they compute: a `MixedPrecisionPolicy` of torch; `None`: in their own.
        is_kept: Whether they are not freed between the forward pass and the backward pass.
        is_outermost: Whether the module is the model.
        is_part: Whether they are gathered here when the model is called, and not by the model's own call.
        unit: Those of them that torch's `fully_shard` gathers; `None`: it gathers none.
        places: Where these are held.
        others: The weights but these.
    """

    weights: list[Weight]
    model_call: ModelCall
    policy: Any = None
    is_kept: bool = False
    is_outermost: bool = False
    is_part: bool = True
    unit: Unit | None = None
    places: list[list[Holder]] = field(default_factory=list[list[Holder]])
    others: list[Weight] = field(default_factory=list[Weight])
    _own: dict[int, GatherGroup] = field(default_factory=dict[int, GatherGroup])

    def own(self, weights: list[Weight]) -> GatherGroup:
        """Return the group of these weights, all or `others`, that this library gathers itself."""
        if id(weights) not in self._own:
            self._own[id(weights)] = GatherGroup(weights, self.policy, is_kept=self.is_kept)
        return self._own[id(weights)]

    def given(self, args: Args, kwargs: Kwargs) -> Any:
        """Cast a module's arguments to the dtype of its weights, as `fully_shard` does."""
        policy = self.policy
        if policy is None or policy.param_dtype is None or not policy.cast_forward_inputs:
            return args, kwargs
        is_inner = not self.is_part and self.model_call.is_open
        return (args, kwargs) if is_inner else _cast_floats((args, kwargs), policy.param_dtype)

    def cast_output(self, result: object) -> object:
        """Return a module's output, cast to the mixed precision policy's `output_dtype` if it is the model."""
        if not self.is_outermost:
            return result
        dtype = None if self.policy is None else self.policy.output_dtype
        return result if dtype is None else _cast_floats(result, dtype)

    def __deepcopy__(self, memo: dict[int, object]) -> Gathering:
        """Return a copy for the copied model, without its `fully_shard` unit."""
        weights, model_call = copy.deepcopy((self.weights, self.model_call), memo)
        return Gathering(weights, model_call, self.policy, self.is_kept, self.is_outermost, self.is_part)


def _cast_floats(values: object, dtype: torch.dtype) -> object:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values)


def plan_gatherings(
    root: torch.nn.Module, layouts: Mapping[int, Layout], context: ScopeContext
) -> dict[int, Gathering]:
    """Return, by module id, the weights that each module of a model gathers when it is called.

    A module outside of the blocks that is called by itself, and not by the model, gathers its own weights.

    Args:
        root: The model.
        layouts: The layouts of its parameters, by id.
        context: The scope.
    """
    gather: dict[int, list[Weight]] = {}
    outside: list[Weight] = []
    modules = _find_blocks(root)
    paths = find_layer_paths(root)
    policy = context.options.own.fully_shard.get("mp_policy")
    converts = policy is not None and policy.param_dtype is not None
    for module, block in modules:
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            layout = layouts.get(id(parameter))
            computing = None if layout is None else context.policy.derive_compute_layout(layout)
            if computing is not None and (converts or computing != layout):
                path = ".".join(filter(None, (paths.get(id(module)), name)))
                weight = Weight(Holder(module, name), computing, path)
                gather.setdefault(id(block or module), []).append(weight)
                if block is None:
                    outside.append(weight)
    blocks = {id(block) for _, block in modules if block is not None}
    model_call, frees = ModelCall(), context.options.own.fully_shard.get("reshard_after_forward")
    made = {
        key: Gathering(weights, model_call, policy, frees is False, is_part=key in blocks or not blocks)
        for key, weights in gather.items()
    }
    if not made:
        return {}
    of_root = outside if blocks else gather.get(id(root), [])
    outermost = made[id(root)] = Gathering(of_root, model_call, policy, frees is not True, is_outermost=True)
    if context.options.own.gather == "fully_shard" and context.across:
        below = [each for each in made.values() if each.is_part and each is not outermost]
        _apply_fully_shard(outermost, below, context)
    else:
        held = {id(w.held): w for each in gather.values() for w in each}
        here = (
            "all devices are of this process"
            if not context.across
            else f"gather={context.options.own.gather!r}"
        )
        context.note(here, _format_note("layoutmap", context, [w.path for w in held.values()], here))
    return made


def _format_note(by: str, context: ScopeContext, paths: Sequence[str], why: str = "") -> str:
    """Return the plan's note about the gathered weights and the reason."""
    groups: dict[object, list[str]] = {}
    for path in paths:
        groups.setdefault(split_at_numbers(path), []).append(path)
    names = join_names([merge_paths(each) for each in groups.values()])
    what = "1 weight is" if len(paths) == 1 else f"{len(paths)} weights are"
    reason = f", as {why}" if why else ""
    assert context.policy.batch_dim is not None, "or nothing would be gathered"
    return f"{what} gathered over {format_batch_dim(context.policy.batch_dim)!r} by {by}{reason}: {names}"


def _apply_fully_shard(outermost: Gathering, below: Sequence[Gathering], context: ScopeContext) -> None:
    """Apply torch's `fully_shard` to the weights that it can gather, and note the others with the reasons."""
    mesh = context.engine.native(context.policy.replicated(0), 0)[0]
    dims = [mesh.mesh_dim_names.index(dim) for dim in list_batch_dims(context.policy.batch_dim)]
    held = [weight.held for each in (outermost, *below) for weight in each.weights]
    sharded_over = Counter(
        dim
        for tensor in held
        if isinstance(tensor, DTensor)
        for dim in dims
        if not tensor.placements[dim].is_replicate()  # pyright: ignore[reportUnknownMemberType]
    )
    mesh_dim = max(dims, key=lambda dim: sharded_over[dim])
    others = [dim for dim in dims if dim != mesh_dim]
    users = Counter(key for each in (outermost, *below) for key in {id(w.held) for w in each.weights})
    reasons: dict[str, list[str]] = {}
    paths: list[str] = []

    def make_unit(gathering: Gathering, below: Sequence[Unit] | None = None) -> Unit | None:
        weights: dict[int, tuple[DTensor, list[Weight]]] = {}
        for weight in gathering.weights:
            if isinstance(held := weight.held, DTensor):
                weights.setdefault(id(held), (held, []))[1].append(weight)
        sharded = [tensor for tensor, _ in weights.values() if not tensor.placements[mesh_dim].is_replicate()]  # pyright: ignore[reportUnknownMemberType]
        dtypes = Counter(tensor.dtype for tensor in sharded if tensor.is_floating_point())
        usual = max(dtypes, key=dtypes.__getitem__, default=None)  # fully_shard takes weights of one dtype
        chosen: list[tuple[DTensor, list[Weight]]] = []
        for tensor, places in weights.values():
            if tensor.placements[mesh_dim].is_replicate():  # and only converted  # pyright: ignore[reportUnknownMemberType]
                gathering.others += places
                continue
            reason = _explain_refusal(tensor, mesh_dim)
            elsewhere = [dim for dim in others if not tensor.placements[dim].is_replicate()]  # pyright: ignore[reportUnknownMemberType]
            if elsewhere:
                reason = "several mesh dims of the batch shard them"
            elif users[id(tensor)] > 1:  # fully_shard would free a shared weight after its first use
                reason = "several blocks share them"
            elif tensor.dtype != usual:
                reason = "most weights of the block are of another element type"
            if reason:
                reasons.setdefault(reason, []).append(places[0].path)
                gathering.others += places
            else:
                chosen.append((tensor, places))
                paths.append(places[0].path)
        gathering.places = [[weight.place for weight in places] for _, places in chosen]
        if chosen or below:
            named = [(places[0].name, tensor) for tensor, places in chosen]
            gathering.unit = Unit(
                named, mesh, mesh_dim, context.options.own.fully_shard, is_kept=gathering.is_kept, below=below
            )
        return gathering.unit

    make_unit(outermost, [made for each in below if (made := make_unit(each)) is not None])
    if paths:
        context.note(mesh.mesh_dim_names[mesh_dim], _format_note("torch's fully_shard", context, paths))
    for reason, those in reasons.items():
        context.note(reason, _format_note("layoutmap", context, those, reason))


def _explain_refusal(tensor: DTensor, mesh_dim: int) -> str:
    """Return the reason that `fully_shard` cannot gather a weight, or an empty text if it can."""
    if not has_even_shards(get_spec(tensor)):
        return "an axis does not divide"
    if not can_gather(tensor, mesh_dim):
        return "the batch's dim is not the innermost on an axis"
    if not get_local(tensor).is_contiguous():
        return "shards are not contiguous"
    return ""


def _find_blocks(root: torch.nn.Module) -> list[tuple[torch.nn.Module, torch.nn.Module | None]]:
    """Return each module of a model with its enclosing block, or None outside all blocks."""
    found: dict[int, tuple[torch.nn.Module, torch.nn.Module | None]] = {}
    todo: list[tuple[torch.nn.Module, torch.nn.Module | None]] = [(root, None)]
    while todo:
        module, block = todo.pop()
        if id(module) in found:
            continue
        found[id(module)] = module, block
        are_blocks = block is None and _has_blocks(module)
        todo.extend((child, child if are_blocks else block) for child in reversed(list(module.children())))
    return list(found.values())


def _has_blocks(module: torch.nn.Module) -> bool:
    """Return whether the children of a module are blocks, each of which gathers its weights together."""
    children = list(module.children())
    if len(children) == 1 and isinstance(module, torch.nn.ModuleList):
        # A single child counts as a block unless it contains blocks.
        inner = list(children[0].modules())
        return len(inner) > 1 and not any(map(_has_blocks, inner))
    is_list = isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))
    return is_list and len(children) > 1 and len({type(child) for child in children}) == 1


@contextmanager
def gather_weights(
    gathering: Gathering, context: ScopeContext, inputs: Sequence[torch.Tensor]
) -> Generator[None]:
    """Put a module's weights into their compute layouts until the block ends.

    Args:
        gathering: The weights.
        context: The scope.
        inputs: The tensors that the module is called with.
    """
    again = functools.partial(gather_weights, gathering, context, ())
    unit = gathering.unit
    sharded = [places[0].held for places in gathering.places]
    with ExitStack() as stack:
        if gathering.is_outermost and not gathering.model_call.is_open:
            stack.enter_context(gathering.model_call.mark_open())
        own = gathering.weights
        # Use the unit only if dtypes are unchanged and no forward pass of the model is open.
        if unit is not None and unit.is_up_to_date(sharded):
            tensors = stack.enter_context(unit.gathered(inputs))
            whole = zip(gathering.places, sharded, tensors, strict=True)
            stack.enter_context(
                swap_temporarily([(place, old, new) for places, old, new in whole for place in places])
            )
            own = gathering.others
        if own:
            stack.enter_context(gathering.own(own).gathered(context))
        stack.enter_context(set_temporarily(here, "gatherings", (*here.gatherings, again)))
        yield
