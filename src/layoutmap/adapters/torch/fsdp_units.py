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
from layoutmap.adapters.torch.fsdp_own import (
    GatheredWeight,
    ModelCallState,
    WeightGatherer,
    swap_tensors_temporarily,
)
from layoutmap.adapters.torch.mesh_context import thread_state
from layoutmap.adapters.torch.paths import TensorAttribute, find_paths_by_module_id
from layoutmap.core.errors import join_names
from layoutmap.core.layout import Layout
from layoutmap.core.paths import format_merged_paths, split_path_at_numbers
from layoutmap.core.specs import format_batch_dim, list_batch_dims
from layoutmap.engines.patches import set_attribute_temporarily
from layoutmap.engines.torch.gather import GatherUnit, can_gather_by_concatenation
from layoutmap.engines.torch.operators import Args, Kwargs
from layoutmap.engines.torch.specs import get_local, get_spec, has_even_shards


@dataclass(slots=True, eq=False)
class WeightGroup:
    """Weights that are gathered together when a module is called.

    Args:
        weights: The weights.
        model_call: Tracks whether a call of the model is running.
        policy: The element types to compute in, as torch's `MixedPrecisionPolicy`; `None`: those of the weights.
        is_kept: Whether gathered weights stay in memory between the forward pass and the backward pass.
        is_outermost: Whether the module is the model.
        gathers_in_each_call: Whether a call of the model gathers them when it reaches this module, or at its start.
        unit: Those weights that torch's `fully_shard` gathers; `None`: it gathers none.
        unit_attributes: For each weight of the unit, the attributes of modules that store it.
        others: The weights that are not in the unit.
    """

    weights: list[GatheredWeight]
    model_call: ModelCallState
    policy: Any = None
    is_kept: bool = False
    is_outermost: bool = False
    gathers_in_each_call: bool = True
    unit: GatherUnit | None = None
    unit_attributes: list[list[TensorAttribute]] = field(default_factory=list[list[TensorAttribute]])
    others: list[GatheredWeight] = field(default_factory=list[GatheredWeight])
    _gatherers: dict[int, WeightGatherer] = field(default_factory=dict[int, WeightGatherer])

    def get_or_make_gatherer(self, weights: list[GatheredWeight]) -> WeightGatherer:
        """Return the `WeightGatherer` of `self.weights` or `self.others`, which is created once for each list."""
        if id(weights) not in self._gatherers:
            self._gatherers[id(weights)] = WeightGatherer(weights, self.policy, is_kept=self.is_kept)
        return self._gatherers[id(weights)]

    def cast_inputs(self, args: Args, kwargs: Kwargs) -> Any:
        """Return a module's arguments, cast to the policy's `param_dtype` as `fully_shard` casts them."""
        policy = self.policy
        if policy is None or policy.param_dtype is None or not policy.cast_forward_inputs:
            return args, kwargs
        is_inner = not self.gathers_in_each_call and self.model_call.is_running
        return (args, kwargs) if is_inner else _cast_floating_tensors((args, kwargs), policy.param_dtype)

    def cast_output(self, result: object) -> object:
        """Return a module's output, cast to the mixed precision policy's `output_dtype` if it is the model."""
        if not self.is_outermost:
            return result
        dtype = None if self.policy is None else self.policy.output_dtype
        return result if dtype is None else _cast_floating_tensors(result, dtype)

    def __deepcopy__(self, memo: dict[int, object]) -> WeightGroup:
        """Return a copy for the copied model, without its `fully_shard` unit."""
        weights, model_call = copy.deepcopy((self.weights, self.model_call), memo)
        return WeightGroup(
            weights, model_call, self.policy, self.is_kept, self.is_outermost, self.gathers_in_each_call
        )


def _cast_floating_tensors(values: object, dtype: torch.dtype) -> object:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values)


def plan_weight_groups(
    root: torch.nn.Module, layouts: Mapping[int, Layout], context: ScopeContext
) -> dict[int, WeightGroup]:
    """Return a dict from the id of each module of a model to the weights that the module gathers when it is called.

    A module outside of the blocks gathers its own weights only if it is called alone, and not by the model.

    Args:
        root: The model.
        layouts: The layouts of its parameters, by id.
        context: The scope.
    """
    weights_by_module: dict[int, list[GatheredWeight]] = {}
    outer_weights: list[GatheredWeight] = []
    modules = _list_modules_with_blocks(root)
    paths = find_paths_by_module_id(root)
    policy = context.options.own.fully_shard.get("mp_policy")
    casts = policy is not None and policy.param_dtype is not None
    for module, block in modules:
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            layout = layouts.get(id(parameter))
            compute_layout = None if layout is None else context.policy.derive_compute_layout(layout)
            if compute_layout is not None and (casts or compute_layout != layout):
                path = ".".join(filter(None, (paths.get(id(module)), name)))
                weight = GatheredWeight(TensorAttribute(module, name), compute_layout, path)
                weights_by_module.setdefault(id(block or module), []).append(weight)
                if block is None:
                    outer_weights.append(weight)
    blocks = {id(block) for _, block in modules if block is not None}
    model_call, reshard = ModelCallState(), context.options.own.fully_shard.get("reshard_after_forward")
    gatherings = {
        key: WeightGroup(weights, model_call, policy, reshard is False, False, key in blocks or not blocks)
        for key, weights in weights_by_module.items()
    }
    if not gatherings:
        return {}
    root_weights = outer_weights if blocks else weights_by_module.get(id(root), [])
    outermost = gatherings[id(root)] = WeightGroup(
        root_weights, model_call, policy, reshard is not True, is_outermost=True
    )
    if context.options.own.gather == "fully_shard" and context.spans_processes:
        below = [each for each in gatherings.values() if each.gathers_in_each_call and each is not outermost]
        _apply_fully_shard(outermost, below, context)
    else:
        by_id = {id(w.tensor): w for each in weights_by_module.values() for w in each}
        location = (
            "all devices are of this process"
            if not context.spans_processes
            else f"gather={context.options.own.gather!r}"
        )
        paths = [weight.path for weight in by_id.values()]
        context.add_note(location, _format_gathering_note("layoutmap", context, paths, location))
    return gatherings


def _format_gathering_note(
    gathered_by: str, context: ScopeContext, paths: Sequence[str], reason: str = ""
) -> str:
    """Return the plan's note that `gathered_by`, such as layoutmap, gathers weights, with the reason, if any."""
    groups: dict[object, list[str]] = {}
    for path in paths:
        groups.setdefault(split_path_at_numbers(path), []).append(path)
    names = join_names([format_merged_paths(each) for each in groups.values()])
    what = "1 weight is" if len(paths) == 1 else f"{len(paths)} weights are"
    reason = f", as {reason}" if reason else ""
    assert context.policy.batch_dim is not None, "or nothing would be gathered"
    dim = format_batch_dim(context.policy.batch_dim)
    return f"{what} gathered over {dim!r} by {gathered_by}{reason}: {names}"


def _apply_fully_shard(outermost: WeightGroup, below: Sequence[WeightGroup], context: ScopeContext) -> None:
    """Apply `fully_shard` to the weights that it can gather, and note in the plan why it cannot gather the rest."""
    mesh = context.engine.make_native_layout(context.policy.make_replicated_layout(0), 0)[0]
    dims = [mesh.mesh_dim_names.index(dim) for dim in list_batch_dims(context.policy.batch_dim)]
    stored_tensors = [weight.tensor for each in (outermost, *below) for weight in each.weights]
    sharded_over = Counter(
        dim
        for tensor in stored_tensors
        if isinstance(tensor, DTensor)
        for dim in dims
        if not tensor.placements[dim].is_replicate()  # pyright: ignore[reportUnknownMemberType]
    )
    mesh_dim = max(dims, key=lambda dim: sharded_over[dim])
    others = [dim for dim in dims if dim != mesh_dim]
    num_uses = Counter(key for each in (outermost, *below) for key in {id(w.tensor) for w in each.weights})
    reasons: dict[str, list[str]] = {}
    paths: list[str] = []

    def make_gather_unit(group: WeightGroup, below: Sequence[GatherUnit] | None = None) -> GatherUnit | None:
        weights: dict[int, tuple[DTensor, list[GatheredWeight]]] = {}
        for weight in group.weights:
            if isinstance(tensor := weight.tensor, DTensor):
                weights.setdefault(id(tensor), (tensor, []))[1].append(weight)
        sharded = [tensor for tensor, _ in weights.values() if not tensor.placements[mesh_dim].is_replicate()]  # pyright: ignore[reportUnknownMemberType]
        dtypes = Counter(tensor.dtype for tensor in sharded if tensor.is_floating_point())
        # fully_shard takes weights of one dtype, so choose the most frequent one.
        main_dtype = max(dtypes, key=dtypes.__getitem__, default=None)
        unit_weights: list[tuple[DTensor, list[GatheredWeight]]] = []
        for tensor, places in weights.values():
            if tensor.placements[mesh_dim].is_replicate():  # only cast it: every device has it  # pyright: ignore[reportUnknownMemberType]
                group.others += places
                continue
            reason = _explain_why_fully_shard_fails(tensor, mesh_dim)
            elsewhere = [dim for dim in others if not tensor.placements[dim].is_replicate()]  # pyright: ignore[reportUnknownMemberType]
            if elsewhere:
                reason = "several mesh dims of the batch shard them"
            elif num_uses[id(tensor)] > 1:  # fully_shard would free a shared weight after its first use
                reason = "several blocks share them"
            elif tensor.dtype != main_dtype:
                reason = "most weights of the block have a different element type"
            if reason:
                reasons.setdefault(reason, []).append(places[0].path)
                group.others += places
            else:
                unit_weights.append((tensor, places))
                paths.append(places[0].path)
        group.unit_attributes = [[weight.attribute for weight in places] for _, places in unit_weights]
        if unit_weights or below:
            named = [(places[0].name, tensor) for tensor, places in unit_weights]
            group.unit = GatherUnit(
                named, mesh, mesh_dim, context.options.own.fully_shard, is_kept=group.is_kept, below=below
            )
        return group.unit

    make_gather_unit(outermost, [made for each in below if (made := make_gather_unit(each)) is not None])
    if paths:
        context.add_note(
            mesh.mesh_dim_names[mesh_dim], _format_gathering_note("torch's fully_shard", context, paths)
        )
    for reason, reason_paths in reasons.items():
        context.add_note(reason, _format_gathering_note("layoutmap", context, reason_paths, reason))


def _explain_why_fully_shard_fails(tensor: DTensor, mesh_dim: int) -> str:
    """Return the reason why `fully_shard` cannot gather a weight, or an empty text if it can."""
    if not has_even_shards(get_spec(tensor)):
        return "an axis cannot be split evenly"
    if not can_gather_by_concatenation(tensor, mesh_dim):
        return "the batch's dim is not the innermost on an axis"
    if not get_local(tensor).is_contiguous():
        return "shards are not contiguous"
    return ""


def _list_modules_with_blocks(root: torch.nn.Module) -> list[tuple[torch.nn.Module, torch.nn.Module | None]]:
    """Return a pair for each module of a model: the module, and the block that contains it, or None."""
    blocks_by_module_id: dict[int, tuple[torch.nn.Module, torch.nn.Module | None]] = {}
    pending: list[tuple[torch.nn.Module, torch.nn.Module | None]] = [(root, None)]
    while pending:
        module, block = pending.pop()
        if id(module) in blocks_by_module_id:
            continue
        blocks_by_module_id[id(module)] = module, block
        are_blocks = block is None and _has_block_children(module)
        pending.extend((child, child if are_blocks else block) for child in reversed(list(module.children())))
    return list(blocks_by_module_id.values())


def _has_block_children(module: torch.nn.Module) -> bool:
    """Return whether the children of a module are blocks, each of which gathers its weights together."""
    children = list(module.children())
    if len(children) == 1 and isinstance(module, torch.nn.ModuleList):
        # The only child of a list may be a block, or the container of all blocks, so look for blocks inside it.
        inner = list(children[0].modules())
        return len(inner) > 1 and not any(map(_has_block_children, inner))
    is_list = isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))
    return is_list and len(children) > 1 and len({type(child) for child in children}) == 1


@contextmanager
def gather_weights_temporarily(
    group: WeightGroup, context: ScopeContext, inputs: Sequence[torch.Tensor]
) -> Generator[None]:
    """Replace a module's weights by gathered ones until the block ends, so that the module computes with them.

    Args:
        group: The weights.
        context: The scope.
        inputs: The tensors that the module is called with.
    """
    gather_again = functools.partial(gather_weights_temporarily, group, context, ())
    unit = group.unit
    sharded = [places[0].tensor for places in group.unit_attributes]
    with ExitStack() as stack:
        if group.is_outermost and not group.model_call.is_running:
            stack.enter_context(group.model_call.mark_running_temporarily())
        remaining = group.weights
        # A unit supports only the dtypes of its creation, and one forward pass at a time. If it cannot gather,
        # layoutmap gathers all weights.
        if unit is not None and unit.can_be_reused_for(sharded):
            tensors = stack.enter_context(unit.gather_parameters_temporarily(inputs))
            replacements = zip(group.unit_attributes, sharded, tensors, strict=True)
            stack.enter_context(
                swap_tensors_temporarily(
                    [(at, old, new) for places, old, new in replacements for at in places]
                )
            )
            remaining = group.others
        if remaining:
            stack.enter_context(
                group.get_or_make_gatherer(remaining).gather_into_modules_temporarily(context)
            )
        inner = (*thread_state.gatherings, gather_again)
        stack.enter_context(set_attribute_temporarily(thread_state, "gatherings", inner))
        yield
